// Rows of activations, rounded to what a kind of weights multiplies: bfloat16, one or two int8
// digits with a scale a row (quantized.py), or int8 with a scale for each group of 32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../tiles.h"
#include "../vectors.h"
#include "norm.h"
#include "scratch.h"

namespace {

constexpr int64_t kGroup = 32;      // activations that share a scale
constexpr float kLargest = 127.0f;  // LARGEST, DIGIT and _SMALLEST_ABSMAX of quantized.py
constexpr float kDigit = 2 * kLargest;
constexpr float kSmallestAbsmax = 1e-30f;

enum class Form { kBfloat16, kDigit, kDigits, kGroups };  // of activations

inline int64_t Parts(int64_t value, int64_t of) { return (value + of - 1) / of; }
inline int64_t RoundUp(int64_t value, int64_t to) { return Parts(value, to) * to; }

// A number of bfloat16, as vectors multiply it.
#if defined(SSD_JAX_SPREAD)
typedef float Rounded;
#else
typedef uint16_t Rounded;
#endif
constexpr bool kWide = sizeof(Rounded) == sizeof(float);

// Rows of one pass over a panel by vectors, with groups and without.
constexpr int kTogether = kLanes == 16 ? 8 : 4;
constexpr int MostTogether(Form form) {
  if (kLanes == 16) return 12;
  return form == Form::kBfloat16 && kWide ? 6 : 4;
}

// Rows that a pass over a panel is made for: more than 6 are even, which saves some compilation.
inline int64_t InPass(int64_t rows, int64_t most = kTogether) {
  return rows < most && rows > 6 ? RoundUp(rows, 2) : std::min(rows, most);
}

constexpr int64_t kMostRows = 256;  // that are rounded, and then multiplied with all weights
constexpr int64_t kLine = 64;       // bytes of a tile's row
// Rows of activations are padded to those of a tile by zeros. (The lines of 16 rows of floats would
// lie too far from each other for the first cache.)
constexpr int64_t kTile = kWide ? 8 : kTileRows;

// Where a byte of a row is among tiles: kTile rows, 64 bytes of each, lie one after the other.
inline int64_t TileAt(int64_t row, int64_t byte, int64_t row_bytes) {
  const int64_t tile = row / kTile * kTile * row_bytes + byte / kLine * kTile * kLine;
  return tile + row % kTile * kLine + byte % kLine;
}

// Rows as they come, [rows, width], and the norm that they get before they are rounded.
struct Input {
  const float* x;
  int64_t rows, width;
  const float* norm;  // [width]; null: none
  float eps;
};

// Of some values: their scale, NaN if one of them is not finite. Sizes compare as their bits do.
inline float Scale(const float* values, int64_t count) {
  Ints largest = (Ints)(Floats{} + kSmallestAbsmax);
  for (int64_t k = 0; k < count; k += kLanes) {
    const Ints size = (Ints)LoadSome(values + k, count - k) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  const int32_t most = Max(largest);
  return most > 0x7f7fffff ? NAN : Load<float>(&most) / kLargest;
}

// To nearest, ties to even, of numbers that are less than 2^22.
inline Floats Round(Floats x) { return (x + 12582912.0f) - 12582912.0f; }

// Numbers that fit a byte. (GCC 12 narrows vectors of AVX2 one number at a time.)
inline Ints StoreBytes(Floats x, int8_t* to) {
  const Ints whole = __builtin_convertvector(x, Ints);
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i low = _mm256_castsi256_si128((__m256i)whole);
  const __m128i halves = _mm_packs_epi32(low, _mm256_extracti128_si256((__m256i)whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(halves, halves));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes bytes = __builtin_convertvector(whole, Bytes);
  std::memcpy(to, &bytes, sizeof(bytes));
#endif
  return whole;
}

// Activations as int8 digits, a row of tiles for each digit.
template <int kMany>
struct Digits {
  explicit Digits(int64_t width) : padded(RoundUp(width, 64)) {}

  const int64_t padded;
  Scratch<int8_t> tiles{kMany * padded, kTile / kMany};
  Scratch<float> scales{1};
  Scratch<int32_t> sums{kMany};

  void Resize(int64_t block) {
    tiles.Resize(block);
    scales.Resize(block);
    sums.Resize(block);
  }

  // A digit's bytes from a line on; those of the next digits of a tile are 64 bytes apart.
  const char* Row(int64_t digit, int64_t line) const {
    return reinterpret_cast<const char*>(&tiles[TileAt(digit, line * kLine, padded)]);
  }

  // Each digit is what those before it leave.
  void Make(int64_t row, const float* x, int64_t width) const {
    const float scale = scales[row] = Scale(x, width);
    Ints total[kMany] = {};
    for (int64_t k = 0; k < padded; k += kLanes) {
      Floats units = std::isnan(scale) ? Floats{} : LoadSome(x + k, width - k) / scale;
      for (int digit = 0; digit < kMany; ++digit) {
        const Floats whole = Round(units);
        total[digit] += StoreBytes(whole, &tiles[TileAt(kMany * row + digit, k, padded)]);
        units = (units - whole) * kDigit;
      }
    }
    for (int digit = 0; digit < kMany; ++digit) sums[kMany * row + digit] = Sum(total[digit]);
  }
};

// A block of rows as kinds multiply them, each form made once for all weights of a call.
struct Activations {
  Activations(const Input& in, bool tiles)
      : in(in), width(in.width), block(std::min(kMostRows, in.rows)), tiles(tiles) {}

  const Input in;
  const int64_t width, block;
  const bool tiles;
  int64_t first = 0, rows = 0;                            // of the block
  Scratch<Rounded> bfloat16{RoundUp(width, 32), kTile};   // in tiles
  Digits<1> digit{width};
  Digits<2> digits{width};
  // Passes of up to kTogether rows, what their rows have at one place of the width side by side.
  Scratch<uint32_t> words{width / 4, kTogether};           // four int8 values
  Scratch<int8_t> bytes{RoundUp(width, kLine), kTile};     // the same, in tiles
  Scratch<float> group_scales{width / kGroup, kTogether};  // of each group of 32
  Scratch<float> group_sums{width / kGroup, kTogether};  // of each group of 32, its scale included
  Scratch<int32_t> half_sums{width / 16, kTogether};     // of each 16 values

  void Need(Form form) {
    if (form == Form::kBfloat16 && bfloat16.empty()) {
      bfloat16.Resize(block);
    } else if (form == Form::kDigit && digit.tiles.empty()) {
      digit.Resize(block);
    } else if (form == Form::kDigits && digits.tiles.empty()) {
      digits.Resize(block);
    } else if (form == Form::kGroups && words.empty()) {
      words.Resize(block);
      if (tiles) bytes.Resize(block);
      group_scales.Resize(block);
      group_sums.Resize(block);
      half_sums.Resize(block);
    }
  }

  // Lets the block begin at a row.
  void Begin(int64_t row) {
    first = row;
    rows = std::min(block, in.rows - row);
    bfloat16.Pad(rows);
    digit.tiles.Pad(rows);
    digits.tiles.Pad(rows);
    words.Pad(rows);
    bytes.Pad(rows);
    group_scales.Pad(rows);
    group_sums.Pad(rows);
    half_sums.Pad(rows);
  }

  // Makes rows [begin, end) of the block.
  void Make(int64_t begin, int64_t end) const {
    std::vector<float> normed(in.norm == nullptr ? 0 : RoundUp(width, kLanes));
    for (int64_t row = begin; row < end; ++row) {
      const float* x = in.x + (first + row) * width;
      if (in.norm != nullptr) {
        NormRow(x, width, in.norm, in.eps, normed.data());
        x = normed.data();
      }
      if (!bfloat16.empty()) MakeBfloat16(row, x);
      if (!digit.tiles.empty()) digit.Make(row, x, width);
      if (!digits.tiles.empty()) digits.Make(row, x, width);
      if (!words.empty()) MakeGroups(row, x);
    }
  }

  // A row's numbers of bfloat16 from 32 * step on; those of the next rows of a tile are 64 bytes apart.
  const char* Bfloat16(int64_t row, int64_t step) const {
    const int64_t size = sizeof(Rounded), at = 32 * step * size;
    const int64_t bytes = size * RoundUp(width, 32);
    return reinterpret_cast<const char*>(&bfloat16[TileAt(row, at, bytes) / size]);
  }

  // How many rows, the first ones, tiles may multiply with groups.
  int64_t TiledRows() const { return tiles ? rows / (2 * kTile) * (2 * kTile) : 0; }

  // A row's byte; those of the next rows of a tile are 64 bytes apart.
  const char* Bytes(int64_t row, int64_t k) const {
    return reinterpret_cast<const char*>(&bytes[TileAt(row, k, RoundUp(width, kLine))]);
  }

  // Index of a row's group in what passes have for each group, `each` of it.
  int64_t GroupAt(int64_t row, int64_t group, int64_t each = 1) const {
    const int64_t first = row / kTogether * kTogether;
    return first * (width / kGroup) * each + group * InPass(rows - first) + row - first;
  }

  void MakeBfloat16(int64_t row, const float* x) const {
    const int64_t padded = RoundUp(width, 32), size = sizeof(Rounded);
    for (int64_t k = 0; k < padded; k += kLanes) {
      Rounded* to = &bfloat16[TileAt(row, size * k, size * padded) / size];
      const Floats part = LoadSome(x + k, width - k);
      const Words bits = (Words)part, even = bits >> 16 & 1;
      const Words rounded = part == part ? bits + 0x7fffu + even : bits | 0x400000u;
      if constexpr (kWide) {
        const Words wide = rounded & 0xffff0000u;
        std::memcpy(to, &wide, sizeof(wide));
      } else {
        typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
        const Halves halves = __builtin_convertvector(rounded >> 16, Halves);
        std::memcpy(to, &halves, sizeof(halves));
      }
    }
  }

  void MakeGroups(int64_t row, const float* x) const {
    const int64_t many = InPass(rows - row / kTogether * kTogether), tiled = TiledRows();
    for (int64_t group = 0; group < width / kGroup; ++group) {
      const float* from = x + group * kGroup;
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
      if (row < tiled)
        std::memcpy(&bytes[TileAt(row, group * kGroup, RoundUp(width, kLine))], values, kGroup);
      uint32_t* to = &words[GroupAt(row, group * kGroup / 4, kGroup / 4)];
      for (int64_t i = 0; i < kGroup / 4; ++i) std::memcpy(to + i * many, values + 4 * i, 4);
    }
  }
};

}  // namespace
