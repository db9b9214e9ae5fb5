// Sums of rows with the 32 outputs of a panel, whose words lie in the order in which they are read.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../tiles.h"
#include "../vectors.h"
#include "activations.h"

namespace {

constexpr int64_t kPanel = 32;          // outputs of one panel
constexpr int64_t kStep = 4 * kPanel;   // bytes of a panel's step: one word an output
constexpr int64_t kAhead = 4096;        // bytes that are asked of memory ahead of use

inline void Ask(const char* at) { __builtin_prefetch(at + kAhead); }

// sums[lane] += x[0] * w[2 lane] + x[1] * w[2 lane + 1], bfloat16.
inline Floats Dot2(Floats sums, Words w, uint32_t x) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
#else
  const uint32_t words[2] = {x << 16, x & 0xffff0000u};
  float at[2];
  std::memcpy(at, words, sizeof(at));
  return sums + (Floats)(w << 16) * at[0] + (Floats)(w & 0xffff0000u) * at[1];
#endif
}

// sums[lane] += the sum over i < 4 of w[4 lane + i] (unsigned) * x[i] (signed). Values of w that are
// `small`, less than 64, cost less with AVX2.
template <bool small>
inline Ints Dot4(Ints sums, Words w, uint32_t x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, _mm256_set1_epi32(x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i at = _mm256_set1_epi32(x), ones = _mm256_set1_epi16(1);
  const auto part = [&](Words of) {  // two products of less than 2^14 fit 16 bits
    return (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)of, at), ones);
  };
  if (small) return sums + part(w);
  return sums + part(w & 0x7f7f7f7fu) + part(w & 0x80808080u);
#else
  for (int i = 0; i < 32; i += 8)
    sums += (Ints)(w >> i & 255) * int32_t(static_cast<int8_t>(x >> i));
  return sums;
#endif
}

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

// Vectors of a panel whose sums of kRows rows stay in registers, a power of two.
template <int kRows>
constexpr int kVectors = std::min<int>(kPanel / kLanes, std::max(1, kRegisters / (4 * kRows)));

#if defined(SSD_JAX_TILES)

// Sums of kHeight * 16 rows with a panel, 64 bytes of each row a step. `stride`: bytes of a row.
template <Form form, int kHeight>
void TileSums(const char* x, int64_t stride, const char* w, void* out) {
#define MULTIPLY(to, a, b)                                    \
  if constexpr (form == Form::kBfloat16)                      \
    _tile_dpbf16ps(to, a, b);                                 \
  else                                                        \
    _tile_dpbsud(to, a, b)
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t at = 0; at < stride; at += 64, w += kTile * kStep) {
    for (int64_t line = 0; line < kTile * kStep; line += 64) Ask(w + line);
    _tile_loadd(6, w, kStep);
    _tile_loadd(7, w + 64, kStep);
    _tile_loadd(4, x + at, stride);
    MULTIPLY(0, 4, 6);
    MULTIPLY(1, 4, 7);
    if constexpr (kHeight == 2) {
      _tile_loadd(5, x + kTile * stride + at, stride);
      MULTIPLY(2, 5, 6);
      MULTIPLY(3, 5, 7);
    }
  }
#undef MULTIPLY
  char* to = static_cast<char*>(out);
  _tile_stored(0, to, kStep);
  _tile_stored(1, to + 64, kStep);
  if constexpr (kHeight == 2) {
    _tile_stored(2, to + kTile * kStep, kStep);
    _tile_stored(3, to + kTile * kStep + 64, kStep);
  }
}

#else

template <Form form, int kHeight>
void TileSums(const char*, int64_t, const char*, void*) {}

#endif

// Sums of kRows rows with a panel, a word of each row a step.
template <Form form, int kRows>
void VectorSums(const char* x, int64_t stride, const char* panel, void* out) {
  using Sums = std::conditional_t<form == Form::kBfloat16, Floats, Ints>;
  constexpr int kMany = kVectors<kRows>;
  for (int64_t first = 0; first < kStep; first += kMany * sizeof(Sums)) {
    Sums sums[kRows][kMany] = {};
    const char* w = panel + first;
    for (int64_t at = 0; at < stride; at += 4, w += kStep) {
      if (first == 0)
        for (int64_t line = 0; line < kStep; line += 64) Ask(w + line);
#pragma GCC unroll 8
      for (int v = 0; v < kMany; ++v) {
        const Words words = Load<Words>(w + v * sizeof(Words));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const uint32_t word = Load<uint32_t>(x + r * stride + at);
          if constexpr (form == Form::kBfloat16)
            sums[r][v] = Dot2(sums[r][v], words, word);
          else
            sums[r][v] = Dot4<false>(sums[r][v], words, word);
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      std::memcpy(static_cast<char*>(out) + r * kStep + first, sums[r], sizeof(sums[r]));
  }
}

// Calls run(std::integral_constant<int, InPass(rows)>), for 1 <= rows.
template <int kRows = kTogether, typename F>
void WithRows(int64_t rows, F run) {
  if constexpr (kRows > 1) {
    constexpr int kNext = kRows == 8 ? 6 : kRows - 1;
    if (InPass(rows) < kRows) return WithRows<kNext>(rows, run);
  }
  run(std::integral_constant<int, kRows>());
}

// Sums of up to 2 kTile rows (which memory has whole tiles of) with a panel, [rows, kPanel].
template <Form form>
void Sums(const char* x, int64_t stride, int64_t rows, const char* panel, bool tiles, void* out) {
  if (tiles) {
    if (rows > kTile)
      TileSums<form, 2>(x, stride, panel, out);
    else
      TileSums<form, 1>(x, stride, panel, out);
    return;
  }
  for (int64_t row = 0; row < rows; row += kTogether) {
    WithRows(std::min<int64_t>(kTogether, rows - row), [&](auto many) {
      VectorSums<form, many()>(x + row * stride, stride, panel,
                               static_cast<char*>(out) + row * kStep);
    });
  }
}

// A packed weight, and where its products go.
struct Weight {
  const char* panels;
  int64_t panel_bytes, outputs;
  float* y;

  int64_t Panels() const { return (outputs + kPanel - 1) / kPanel; }
};

}  // namespace
