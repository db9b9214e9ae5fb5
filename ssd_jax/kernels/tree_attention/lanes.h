// What vectors do across their lanes.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "../vectors.h"

namespace {

using Lanes = std::make_integer_sequence<int, int(kLanes)>;

// a[first], b[first], a[first + 1], b[first + 1] and so on.
template <int first, typename V, int... i>
inline V Interleave(V a, V b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (first + i / 2 + i % 2 * int(kLanes))...);
}

template <int by, int... i>
inline Floats Rotate(Floats x, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(x, x, ((i + by) % int(kLanes))...);
}

// All lanes of x joined to one by join(x, y), always in the same order.
template <int half = int(kLanes / 2), typename F>
inline float Fold(Floats x, F join) {
  x = join(x, Rotate<half>(x, Lanes()));
  if constexpr (half == 1)
    return x[0];
  else
    return Fold<half / 2>(x, join);
}

// The transpose of kLanes x kLanes words, in place.
inline void Transpose(Words (&rows)[kLanes]) {
  constexpr int kHalf = kLanes / 2;
  for (int64_t done = 1; done < kLanes; done *= 2) {
    Words mixed[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kHalf; ++i) {
      mixed[2 * i] = Interleave<0>(rows[i], rows[i + kHalf], Lanes());
      mixed[2 * i + 1] = Interleave<kHalf>(rows[i], rows[i + kHalf], Lanes());
    }
    std::memcpy(rows, mixed, sizeof(mixed));
  }
}

}  // namespace
