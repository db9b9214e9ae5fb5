// A query's running softmax over blocks of positions.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace {

constexpr int64_t kBlock = 64;  // positions; divides kv_pages.BLOCK
constexpr float kLowest = -1e30f;

// 2^x, for x <= 0; 0 below 2^-125. Off by at most 1 unit in the last place,
// or 1.3 where multiplications are not fused with additions.
inline Floats Exp2(Floats x) {
  constexpr float kSmallest = -125, kRound = 12582912;  // adding 1.5 * 2^23 rounds to integers
  const Floats at = x < kSmallest ? Floats{} + kSmallest : x;
  const Floats whole = (at + kRound) - kRound, part = at - whole;
  Floats p = Floats{} + 0x1.41fbbcp-13f;
  p = MulAdd(p, part, Floats{} + 0x1.5f3e54p-10f);
  p = MulAdd(p, part, Floats{} + 0x1.3b2d4cp-7f);
  p = MulAdd(p, part, Floats{} + 0x1.c6aee8p-5f);
  p = MulAdd(p, part, Floats{} + 0x1.ebfbdcp-3f);
  p = MulAdd(p, part, Floats{} + 0x1.62e430p-1f);
  p = MulAdd(p, part, Floats{} + 1.0f);
  const Floats scale = (Floats)((__builtin_convertvector(whole, Ints) + 127) << 23);
  return x < kSmallest ? Floats{} : p * scale;
}

inline float Sum(Floats x) {
  return Fold(x, [](Floats a, Floats b) { return a + b; });
}

inline Floats Larger(Floats a, Floats b) { return a > b ? a : b; }

// A query's softmax so far; its weighted sum of values, not normalised, lies elsewhere.
struct Softmax {
  float maximum = kLowest;  // of scores, which are in units of log 2
  Floats total = {};
};

// Turns a block's scores into weights, those beyond `seen` into zeros. Never inlined, so that it is
// the same instructions for every query.
__attribute__((noinline)) void Weigh(float* scores, int64_t seen, Softmax& state, float* sums,
                                     int64_t width) {
  constexpr int kCount = kBlock / kLanes;
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  Floats score[kCount], best = Floats{} + kLowest;
  for (int v = 0; v < kCount; ++v) {
    const Ints unseen = lane + v * int32_t(kLanes) >= int32_t(seen);
    score[v] = unseen ? Floats{} - INFINITY : Load<Floats>(scores + v * kLanes);
    best = Larger(score[v], best);
  }
  const float maximum = Fold(best, Larger);
  if (maximum > state.maximum) {
    const Floats scale = Exp2(Floats{} + (state.maximum - maximum));
    state.total *= scale;
    for (int64_t d = 0; d < width; d += kLanes) Store(sums + d, Load<Floats>(sums + d) * scale);
    state.maximum = maximum;
  }
  for (int v = 0; v < kCount; ++v) {
    const Floats weights = Exp2(score[v] - state.maximum);
    state.total += weights;
    Store(scores + v * kLanes, weights);
  }
}

}  // namespace
