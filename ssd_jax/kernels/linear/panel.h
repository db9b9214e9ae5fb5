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

constexpr int64_t kPanel = 2 * kLanes;  // outputs of one panel
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

// sums[lane] += the sum over i < 4 of w[4 lane + i] (unsigned) * x[i] (signed).
inline Ints Dot4(Ints sums, Words w, uint32_t x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  const __m256i at = _mm256_cvtepi8_epi16(_mm_set1_epi32(x));
  const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
  __m128i quarters[4];
  __m256i pairs[4], both[2];
  std::memcpy(quarters, &w, sizeof(w));
  for (int i = 0; i < 4; ++i) pairs[i] = _mm256_madd_epi16(_mm256_cvtepu8_epi16(quarters[i]), at);
  for (int i = 0; i < 2; ++i)
    both[i] = _mm256_permutevar8x32_epi32(_mm256_hadd_epi32(pairs[2 * i], pairs[2 * i + 1]), order);
  return sums + Load<Ints>(both);
#else
  for (int i = 0; i < 32; i += 8)
    sums += (Ints)(w >> i & 255) * int32_t(static_cast<int8_t>(x >> i));
  return sums;
#endif
}

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
  constexpr int kVectors = kRows > 4 ? 1 : 2;  // of the panel at a time
  for (int first = 0; first < 2; first += kVectors) {
    Sums sums[kRows][kVectors] = {};
    const char* w = panel + 64 * first;
    for (int64_t at = 0; at < stride; at += 4, w += kStep) {
      if (first == 0) {
        Ask(w);
        Ask(w + 64);
      }
      for (int v = 0; v < kVectors; ++v) {
        const Words words = Load<Words>(w + 64 * v);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const uint32_t word = Load<uint32_t>(x + r * stride + at);
          if constexpr (form == Form::kBfloat16)
            sums[r][v] = Dot2(sums[r][v], words, word);
          else
            sums[r][v] = Dot4(sums[r][v], words, word);
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      std::memcpy(static_cast<char*>(out) + r * kStep + 64 * first, sums[r], 64 * kVectors);
  }
}

constexpr int kTogether = 8;  // rows of one pass over a panel by vectors

// Calls run(std::integral_constant<int, many>) with the next power of two that is not less than
// `rows`, at most kTogether.
template <typename F>
void WithRows(int64_t rows, F run) {
  if (rows == 1) return run(std::integral_constant<int, 1>());
  if (rows == 2) return run(std::integral_constant<int, 2>());
  if (rows <= 4) return run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, kTogether>());
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
