// Rows of activations, rounded to what a kind of weights multiplies: bfloat16, two int8 digits with a
// scale a row (quantized.py), or int8 with a scale for each group of 32.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../tiles.h"

namespace {

constexpr int64_t kGroup = 32;      // activations that share a scale
constexpr float kLargest = 127.0f;  // LARGEST, DIGIT and _SMALLEST_ABSMAX of quantized.py
constexpr float kDigit = 2 * kLargest;
constexpr float kSmallestAbsmax = 1e-30f;

enum class Form { kBfloat16, kDigits, kGroups };  // of activations

inline int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline uint16_t RoundToBfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (std::isnan(value)) return bits >> 16 | 64;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

constexpr int64_t kTile = kTileRows;  // rows of activations are padded to them by zeros

// Rows as kinds multiply them, each form made once for all weights of a call. Rows of zeros fill
// the last tile.
struct Activations {
  Activations(const float* x, int64_t rows, int64_t width) : x(x), rows(rows), width(width) {}

  const float* x;
  int64_t rows, width;
  std::vector<uint16_t> bfloat16;  // [rows, width to 32]
  std::vector<int8_t> digits;      // [2 rows, width to 64]: high and low of each row
  std::vector<float> scales;       // [rows]
  std::vector<int32_t> sums;       // [2 rows]
  std::vector<int8_t> grouped;     // [rows, width]
  std::vector<float> group_scales;   // [rows, width / 32]
  std::vector<int32_t> group_sums;   // [rows, width / 16]

  void Make(Form form) {
    if (form == Form::kBfloat16 && bfloat16.empty()) MakeBfloat16();
    if (form == Form::kDigits && digits.empty()) MakeDigits();
    if (form == Form::kGroups && grouped.empty()) MakeGroups();
  }

  void MakeBfloat16() {
    const int64_t padded = RoundUp(width, 32);
    bfloat16.resize(RoundUp(rows, kTile) * padded);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t k = 0; k < width; ++k)
        bfloat16[row * padded + k] = RoundToBfloat16(x[row * width + k]);
  }

  // Of some values: their scale, NaN if one of them is not finite.
  static float Scale(const float* values, int64_t count) {
    float largest = kSmallestAbsmax;
    bool finite = true;
    for (int64_t k = 0; k < count; ++k) {
      const float size = std::fabs(values[k]);
      finite &= size <= 3.4028235e38f;
      largest = size > largest ? size : largest;
    }
    return finite ? largest / kLargest : NAN;
  }

  void MakeDigits() {
    const int64_t padded = RoundUp(width, 64);
    digits.resize(RoundUp(2 * rows, kTile) * padded);
    scales.resize(rows);
    sums.resize(2 * rows);
    for (int64_t row = 0; row < rows; ++row) {
      const float* values = x + row * width;
      int8_t *high = &digits[2 * row * padded], *low = high + padded;
      const float scale = scales[row] = Scale(values, width);
      if (std::isnan(scale)) continue;
      int32_t highs = 0, lows = 0;
      for (int64_t k = 0; k < width; ++k) {
        const float units = values[k] / scale, first = std::nearbyint(units);
        high[k] = int8_t(first);
        low[k] = int8_t(std::nearbyint((units - first) * kDigit));
        highs += high[k];
        lows += low[k];
      }
      sums[2 * row] = highs;
      sums[2 * row + 1] = lows;
    }
  }

  void MakeGroups() {
    const int64_t padded = RoundUp(rows, kTile) * width;
    grouped.resize(padded);
    group_scales.resize(padded / kGroup);
    group_sums.resize(padded / 16);
    for (int64_t at = 0; at < rows * width; at += kGroup) {
      const float scale = group_scales[at / kGroup] = Scale(x + at, kGroup);
      if (std::isnan(scale)) continue;
      for (int64_t half = 0; half < kGroup; half += 16) {
        int32_t sum = 0;
        for (int64_t k = at + half; k < at + half + 16; ++k)
          sum += grouped[k] = int8_t(std::nearbyint(x[k] / scale));
        group_sums[(at + half) / 16] = sum;
      }
    }
  }
};

}  // namespace
