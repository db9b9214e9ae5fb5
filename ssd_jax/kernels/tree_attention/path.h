// The tokens of branches, and those of them that a query sees; see kv_pages.py, Scratch.

#pragma once

#include <cstdint>

namespace {

constexpr int64_t kMostEntries = 31;  // of a branch

// Keys, each with its value behind it, of the entries on a path, in order.
template <typename Number>
class PathEntries {
 public:
  // `path`: bits of the entries, which lie `stride` apart, entry 0 at `from`.
  PathEntries(const Number* from, int64_t stride, uint32_t path)
      : from_(from), stride_(stride), count_(__builtin_popcount(path)) {
    for (int64_t index = 0; path != 0; path &= path - 1) entries_[index++] = __builtin_ctz(path);
  }

  int64_t Count() const { return count_ - first_; }

  const Number* operator[](int64_t index) const {
    return from_ + entries_[first_ + index] * stride_;
  }

  // The values, `offset` behind their keys, of all entries but the first ones.
  PathEntries Values(int64_t offset, int64_t first) const {
    PathEntries values = *this;
    values.from_ += offset;
    values.first_ += first;
    return values;
  }

 private:
  const Number* from_;
  int64_t stride_, count_, first_ = 0;
  uint8_t entries_[kMostEntries];
};

}  // namespace
