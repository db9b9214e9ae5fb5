// The arguments of a call of attention.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

inline int64_t Clamp(int64_t value, int64_t most) {
  return std::clamp<int64_t>(value, 0, most);
}

// The sizes and arrays of a call; see api.py.
struct Call {
  int64_t rows, tokens, heads, kv_heads, size, pages, page_size, row_pages, entries, branches;
  const void *q, *kv, *branch_kv;
  bool narrow;  // q has bits of bfloat16
  bool tiles;
  const int32_t *table, *visible, *paths;
  const int32_t* first;  // null without a window
  const float* sinks;  // null without any
  float scale, soft_cap;  // 0: that of the size; none
  float* out;

  int64_t Group() const { return heads / kv_heads; }
  int64_t Queries() const { return tokens * Group(); }  // of a row and key/value head
  int64_t Capacity() const { return row_pages * page_size; }
  int64_t Stride() const { return 2 * size; }  // from a key or value to the next position's

  // Whether there are all entries that the query with this branch and path sees.
  bool HasPath(const int32_t* branch_and_path) const {
    const int64_t branch = branch_and_path[0], path = branch_and_path[1];
    return branch >= 0 && branch < branches && path >> entries == 0;
  }

  void ReadQuery(int64_t index, float* to) const {
    if (!narrow) {
      std::copy_n(static_cast<const float*>(q) + index, size, to);
      return;
    }
    for (int64_t d = 0; d < size; ++d) {
      const uint32_t bits = static_cast<const uint16_t*>(q)[index + d] << 16;
      std::memcpy(to + d, &bits, sizeof(bits));
    }
  }

  // Number of a row's positions up to the last that some query sees.
  int64_t End(int64_t row) const {
    const int32_t* of_row = visible + row * tokens;
    return Clamp(*std::max_element(of_row, of_row + tokens), Capacity());
  }

  // Number of a row's positions from the first that some query sees to the last.
  int64_t Seen(int64_t row) const {
    const int64_t end = End(row);
    if (first == nullptr) return end;
    return end - Clamp(*std::min_element(first + row * tokens, first + (row + 1) * tokens), end);
  }
};

}  // namespace
