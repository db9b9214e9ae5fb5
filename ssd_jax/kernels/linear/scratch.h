// Memory for what a call makes of its rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

namespace {

// `each` entries a row, from the beginning of a cache line on; `together` rows are read at a time.
// Entries hold anything until they are written: filling them first took as long as some products.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t each, int64_t together = 1) : each_(each), together_(together) {}

  bool empty() const { return lines_ == nullptr; }
  T& operator[](int64_t at) const { return reinterpret_cast<T*>(lines_.get())[at]; }

  void Resize(int64_t rows) {
    const int64_t entries = (rows + together_ - 1) / together_ * together_ * each_;
    lines_.reset(new Line[(entries * sizeof(T) + 63) / 64]);
  }

  // Zeros where the last of so many rows are read together with rows that are none.
  void Pad(int64_t rows) {
    const int64_t some = rows % together_;
    if (some != 0 && !empty()) std::fill_n(&(*this)[(rows - some) * each_], together_ * each_, T{});
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  const int64_t each_, together_;
  std::unique_ptr<Line[]> lines_;
};

}  // namespace
