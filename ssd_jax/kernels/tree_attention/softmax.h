// A query's running softmax over blocks of positions.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace {

constexpr int64_t kBlock = 64;  // positions; divides kv_pages.BLOCK
constexpr float kLowest = -1e30f;
constexpr float kLog2E = 1.44269504f;

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

// tanh x, off by at most some units in the last place.
inline Floats Tanh(Floats x) {
  const Words sign = (Words)x & 0x80000000u;
  const Floats size = (Floats)((Words)x ^ sign), square = x * x;
  Floats p = Floats{} + -5.70498872745e-3f;
  p = MulAdd(p, square, Floats{} + 2.06390887954e-2f);
  p = MulAdd(p, square, Floats{} + -5.37397155531e-2f);
  p = MulAdd(p, square, Floats{} + 1.33314422036e-1f);
  p = MulAdd(p, square, Floats{} + -3.33332819422e-1f);
  const Floats small = MulAdd(p * square, x, x);
  const Floats power = Exp2(size * (-2.0f * kLog2E));
  const Floats large = (Floats)((Words)((1.0f - power) / (1.0f + power)) | sign);
  return size < 0.625f ? small : large;
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

// Scores of the first positions of a block under a soft cap.
__attribute__((noinline)) void Cap(float* scores, int64_t positions, float soft_cap) {
  for (int64_t at = 0; at < positions; at += kLanes)
    Store(scores + at, Tanh(Load<Floats>(scores + at) / soft_cap) * soft_cap);
}

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
