// Rows of activations, rounded to what a kind of weights multiplies: bfloat16, two int8 digits with a
// scale a row (quantized.py), or int8 with a scale for each group of 32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../tiles.h"
#include "../vectors.h"

namespace {

constexpr int64_t kGroup = 32;      // activations that share a scale
constexpr float kLargest = 127.0f;  // LARGEST, DIGIT and _SMALLEST_ABSMAX of quantized.py
constexpr float kDigit = 2 * kLargest;
constexpr float kSmallestAbsmax = 1e-30f;

enum class Form { kBfloat16, kDigits, kGroups };  // of activations

inline int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

constexpr int kTogether = kLanes == 16 ? 8 : 4;  // rows of one pass over a panel by vectors

// Rows that a pass over a panel is made for: 7 are run as 8, which saves some compilation.
inline int64_t InPass(int64_t rows) {
  return rows == 7 ? kTogether : std::min<int64_t>(rows, kTogether);
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
  // Passes of up to kTogether rows, what their rows have at one place of the width side by side.
  std::vector<uint32_t> words;      // four int8 values
  std::vector<float> group_scales;  // of each group of 32
  std::vector<float> group_sums;    // of each group of 32, its scale included
  std::vector<int32_t> half_sums;   // of each 16 values

  void Make(Form form) {
    if (form == Form::kBfloat16 && bfloat16.empty()) MakeBfloat16();
    if (form == Form::kDigits && digits.empty()) MakeDigits();
    if (form == Form::kGroups && words.empty()) MakeGroups();
  }

  // Index of a row's group in what passes have for each group, `each` of it.
  int64_t GroupAt(int64_t row, int64_t group, int64_t each = 1) const {
    const int64_t first = row / kTogether * kTogether;
    return first * (width / kGroup) * each + group * InPass(rows - first) + row - first;
  }

  void MakeBfloat16() {
    const int64_t padded = RoundUp(width, 32);
    bfloat16.resize(RoundUp(rows, kTile) * padded);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < width; k += kLanes) {
        const Floats part = Part(x + row * width + k, width - k);
        const Words bits = (Words)part, even = bits >> 16 & 1;
        const Words rounded = part == part ? bits + 0x7fffu + even : bits | 0x400000u;
        typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
        const Halves halves = __builtin_convertvector(rounded >> 16, Halves);
        std::memcpy(&bfloat16[row * padded + k], &halves, sizeof(halves));
      }
    }
  }

  // Of some values: their scale, NaN if one of them is not finite.
  static float Scale(const float* values, int64_t count) {
    Floats largest = Floats{} + kSmallestAbsmax;
    Ints finite = Ints{} - 1;
    for (int64_t k = 0; k < count; k += kLanes) {
      const Floats size = (Floats)((Words)Part(values + k, count - k) & 0x7fffffffu);
      finite &= size <= 3.4028235e38f;
      largest = size > largest ? size : largest;
    }
    float most = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      if (!finite[lane]) return NAN;
      most = std::max(most, largest[lane]);
    }
    return most / kLargest;
  }

  // The first kLanes of `count` values; zeros where there are fewer.
  static Floats Part(const float* values, int64_t count) {
    if (count >= kLanes) return Load<Floats>(values);
    Floats part = {};
    std::memcpy(&part, values, count * sizeof(float));
    return part;
  }

  // To nearest, ties to even, of numbers that are less than 2^22.
  static Floats Round(Floats x) { return (x + 12582912.0f) - 12582912.0f; }

  static Ints StoreBytes(Floats x, int8_t* to) {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    const Ints whole = __builtin_convertvector(x, Ints);
    const Bytes bytes = __builtin_convertvector(whole, Bytes);
    std::memcpy(to, &bytes, sizeof(bytes));
    return whole;
  }

  static int32_t Sum(Ints x) {
    int32_t sum = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) sum += x[lane];
    return sum;
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
      Ints highs = {}, lows = {};
      for (int64_t k = 0; k < width; k += kLanes) {
        const Floats units = Part(values + k, width - k) / scale, first = Round(units);
        highs += StoreBytes(first, high + k);
        lows += StoreBytes(Round((units - first) * kDigit), low + k);
      }
      sums[2 * row] = Sum(highs);
      sums[2 * row + 1] = Sum(lows);
    }
  }

  void MakeGroups() {
    const int64_t padded = RoundUp(rows, kTogether), groups = width / kGroup;
    words.resize(padded * width / 4);
    group_scales.resize(padded * groups);
    group_sums.resize(padded * groups);
    half_sums.resize(padded * 2 * groups);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t many = InPass(rows - row / kTogether * kTogether);
      for (int64_t group = 0; group < groups; ++group) {
        const float* from = x + row * width + group * kGroup;
        const float scale = Scale(from, kGroup);
        int8_t values[kGroup] = {};
        int32_t sums[2] = {};
        for (int64_t i = 0; i < kGroup && !std::isnan(scale); i += kLanes)
          sums[i / 16] += Sum(StoreBytes(Round(Load<Floats>(from + i) / scale), values + i));
        const int64_t at = GroupAt(row, group);
        group_scales[at] = scale;
        group_sums[at] = scale * (sums[0] + sums[1]);
        for (int64_t half = 0; half < 2; ++half)
          half_sums[GroupAt(row, 2 * group + half, 2)] = sums[half];
        uint32_t* to = &words[GroupAt(row, group * kGroup / 4, kGroup / 4)];
        for (int64_t i = 0; i < kGroup / 4; ++i) std::memcpy(to + i * many, values + 4 * i, 4);
      }
    }
  }
};

}  // namespace
