// Root-mean-square norm of a row.

#pragma once

#include <cmath>
#include <cstdint>

#include "../vectors.h"

namespace {

// x / rms(x) * weight, to whole vectors; sums are of squares at the same lane, then of those.
inline void NormRow(const float* x, int64_t width, const float* weight, float eps, float* out) {
  Floats sums = {};
  for (int64_t k = 0; k < width; k += kLanes) {
    const Floats part = LoadSome(x + k, width - k);
    sums = MulAdd(part, part, sums);
  }
  float sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  const float scale = 1 / std::sqrt(sum / width + eps);
  for (int64_t k = 0; k < width; k += kLanes)
    Store(out + k, LoadSome(x + k, width - k) * scale * LoadSome(weight + k, width - k));
}

}  // namespace
