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

constexpr int64_t kPanel = 32;                 // outputs of one panel
constexpr int64_t kStep = 4 * kPanel;          // bytes of a panel's step: one word an output
constexpr int64_t kSteps = kLine / 4 * kStep;  // bytes of a panel that meet a line of words

constexpr int64_t kAhead = 4096;        // bytes that are asked of memory ahead of use
constexpr int64_t kAsked = kSteps / 4;  // bytes for which they are asked at a time

// The cache that they go to. AMD: the first one, and what is read once passes by the caches that the
// cores share, unless it stays there from call to call: dispatching the next program takes half of
// the time where weights have not driven out what the host needs. Intel: the second one, whose queue
// to memory is longer; the first one is up to 1.2 times slower there, and past the caches 1.3 to 2.4
// times.
#if defined(__x86_64__) && !defined(__znver1__) && !defined(__znver2__) && \
    !defined(__znver3__) && !defined(__znver4__) && !defined(__znver5__)
constexpr int kNear = 2, kPassing = kNear;
#else
constexpr int kNear = 3, kPassing = 0;
#endif

// Steps of a part of a panel that has so many. All passes take a part before the next one, so that it
// comes from memory while they compute, and stays in the first cache from pass to pass and from sweep
// to sweep. A part is all of the panel if that is read `once`, if sums of more rows would not stay, or
// with vectors of 64 bytes, which sweep once.
inline int64_t PartSteps(Form form, int64_t steps, int64_t step_bytes, int64_t rows, bool once) {
  if (once || rows > kTile || kLanes == 16) return steps;
  const int64_t most = form == Form::kBfloat16 ? 4096 : 20480;  // bytes
  return Parts(steps, Parts(steps * step_bytes, most));
}

// What a pass over a part of a panel asks of memory: its share of what is read after the part, so
// that no pass waits for all of it. A step is for `step_bytes` of the panel.
struct Ahead {
  Ahead(const char* part, int64_t bytes, int64_t step_bytes, int64_t pass, int64_t passes, bool once,
        bool cache_resident)
      : at(part + kAhead + (once ? 0 : bytes) + pass * (bytes / passes)),
        share(step_bytes / passes),
        passing(once && !cache_resident) {}

  // Begins a pass that goes over the part so many times.
  void Begin(int sweeps) { share = RoundUp(share / sweeps, kLine); }

  void Step() {
    for (const char* end = at + share; at < end; at += kLine) {
      if (passing)
        __builtin_prefetch(at, 0, kPassing);
      else
        __builtin_prefetch(at, 0, kNear);
    }
  }

  const char* at;
  int64_t share;  // bytes
  const bool passing;
};

#if defined(SSD_JAX_SPREAD)
// The word or number at `from` in all lanes. (GCC 12 would read several in advance, and spill them;
// it would keep sums in memory if the instruction that reads were written in assembler.)
inline Words Word(const void* from) { return Now((Words)_mm256_set1_epi32(Load<int32_t>(from))); }
inline Floats Float(const void* from) { return Now((Floats)_mm256_set1_ps(Load<float>(from))); }
#else
inline uint32_t Word(const void* from) { return Load<uint32_t>(from); }
#endif

// sums[lane] += x[0] * w[2 lane] + x[1] * w[2 lane + 1], bfloat16.
template <typename X>
inline Floats Dot2(Floats sums, Words w, X x) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
#else
  const uint32_t words[2] = {x << 16, x & 0xffff0000u};
  float at[2];
  std::memcpy(at, words, sizeof(at));
  return MulAdd((Floats)(w & 0xffff0000u), at[1], MulAdd((Floats)(w << 16), at[0], sums));
#endif
}

// Products of bytes, added to sums of two and then, where VNNI does not do all at once, to sums of
// four. A sum of four fits 16 bits if the values of w are `small`, less than 64, and one of 16 if they
// have four bits. If they are not small, the offset of weights is subtracted, and the sign goes to x.
#if defined(SSD_JAX_SPREAD) && !defined(__AVXVNNI__)
#define SSD_JAX_PAIRS
constexpr int kTaken = 128;  // offset of the values of w that are not small

inline Words Pairs(Words w, Words x) { return (Words)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
inline Words SignedPairs(Words w, Words x) {
  const __m256i own = (__m256i)(w ^ 0x80808080u);
  return Pairs((Words)_mm256_abs_epi8(own), (Words)_mm256_sign_epi8((__m256i)x, own));
}
inline Words Plus(Words a, Words b) { return (Words)_mm256_add_epi16((__m256i)a, (__m256i)b); }
inline Ints Joined(Words pairs) {
  return (Ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
}
#else
constexpr int kTaken = 0;
#endif

// sums[lane] += the sum over i < 4 of w[4 lane + i] (unsigned, less kTaken unless it is `small`) * x[i]
// (signed, not -128).
template <bool small, typename X>
inline Ints Dot4(Ints sums, Words w, X x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#elif defined(__AVX512BW__)
  const __m512i at = _mm512_set1_epi32(x), ones = _mm512_set1_epi16(1);
  const auto part = [&](Words of) {  // two products of less than 2^14 fit 16 bits
    return (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)of, at), ones);
  };
  if (small) return sums + part(w);
  return sums + part(w & 0x7f7f7f7fu) + part(w & 0x80808080u);
#elif defined(SSD_JAX_PAIRS)
  return sums + Joined(small ? Pairs(w, x) : SignedPairs(w, x));
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

// Vectors of a panel that a pass of so many rows takes together, a power of two: their sums stay in
// registers, of which others hold weights and words. A row's sum with a vector waits for the one before
// it, so that many together keep the multipliers busy.
constexpr int Vectors(Form form, int rows) {
  const bool floats = form == Form::kBfloat16 && kWide;
  const int most = form == Form::kGroups ? kRegisters / 2 : floats && rows != 3 ? 12 : kRegisters - 8;
  int vectors = kPanel / kLanes;
  while (vectors > 1 && vectors * rows > most) vectors /= 2;
  return vectors;
}

// How often the pass goes over a part, each time over other vectors.
constexpr int Sweeps(Form form, int rows) { return kPanel / kLanes / Vectors(form, rows); }

#if defined(SSD_JAX_TILES)

// Sums of kHeight * 16 rows, which have `all` steps, with a panel; a row of `out` is so many bytes.
template <Form form, int kHeight>
void TileSums(const char* x, int64_t steps, const char* w, Ahead ahead, char* out, int64_t stride,
              int64_t all) {
  const char* below = x + all * kTile * kLine;
  ahead.Begin(1);
#define MULTIPLY(to, a, b)                                    \
  if constexpr (form == Form::kBfloat16)                      \
    _tile_dpbf16ps(to, a, b);                                 \
  else                                                        \
    _tile_dpbsud(to, a, b)
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (; steps > 0; --steps, w += kSteps, x += kTile * kLine, below += kTile * kLine) {
    ahead.Step();
    _tile_loadd(6, w, kStep);
    ahead.Step();
    _tile_loadd(7, w + 64, kStep);
    ahead.Step();
    _tile_loadd(4, x, kLine);
    MULTIPLY(0, 4, 6);
    MULTIPLY(1, 4, 7);
    ahead.Step();
    if constexpr (kHeight == 2) {
      _tile_loadd(5, below, kLine);
      MULTIPLY(2, 5, 6);
      MULTIPLY(3, 5, 7);
    }
  }
#undef MULTIPLY
  _tile_stored(0, out, stride);
  _tile_stored(1, out + 64, stride);
  if constexpr (kHeight == 2) {
    _tile_stored(2, out + kTile * stride, stride);
    _tile_stored(3, out + kTile * stride + 64, stride);
  }
}

#else

template <Form form, int kHeight>
void TileSums(const char*, int64_t, const char*, Ahead, char*, int64_t, int64_t) {}

#endif

// Sums of kRows rows of a tile with a part of a panel, a word of each row at a time; with `more` they
// are added to those of `out`.
template <Form form, int kRows, typename Caller>
void VectorSums(const char* x, int64_t steps, const char* part, Ahead ahead, char* out,
                int64_t stride, bool more) {
  using Sums = std::conditional_t<form == Form::kBfloat16, Floats, Ints>;
  constexpr bool kFloats = form == Form::kBfloat16 && kWide;
  constexpr int kMany = Vectors(form, kRows);
  ahead.Begin(Sweeps(form, kRows));
  for (int64_t first = 0; first < kStep; first += kMany * sizeof(Sums)) {
    Sums sums[kRows][kMany] = {};
    if (more) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kMany; ++v)
          sums[r][v] = Load<Sums>(out + r * stride + first + v * sizeof(Sums));
      }
    }
    const char *w = part + first, *line = x;
    for (int64_t step = 0; step < steps; ++step, line += (kFloats ? 2 : 1) * kTile * kLine) {
      for (int64_t at = 0; at < kLine; at += 4, w += kStep) {
        if (at % (kLine * kAsked / kSteps) == 0) ahead.Step();
#if defined(SSD_JAX_SPREAD)
        if constexpr (kFloats) {  // a word's two numbers one after the other, each with all sums
          const char* from = line + 2 * at / kLine * kTile * kLine + 2 * at % kLine;
          const auto add = [&](auto second) {
            Floats numbers[kMany];
#pragma GCC unroll 8
            for (int v = 0; v < kMany; ++v) {
              const Words words = Load<Words>(w + v * sizeof(Words));
              numbers[v] = (Floats)(second ? words & 0xffff0000u : words << 16);
            }
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
              const Floats number = Float(from + r * kLine + 4 * second);
#pragma GCC unroll 8
              for (int v = 0; v < kMany; ++v) sums[r][v] = MulAdd(numbers[v], number, sums[r][v]);
            }
          };
          add(std::false_type());
          add(std::true_type());
        } else {
          Words words[kMany];
          for (int v = 0; v < kMany; ++v) words[v] = Load<Words>(w + v * sizeof(Words));
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const Words word = Word(line + r * kLine + at);
#pragma GCC unroll 8
            for (int v = 0; v < kMany; ++v) sums[r][v] = Dot4<false>(sums[r][v], words[v], word);
          }
        }
#else
#pragma GCC unroll 8
        for (int v = 0; v < kMany; ++v) {
          const Words words = Load<Words>(w + v * sizeof(Words));
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const auto word = Word(line + r * kLine + at);
            if constexpr (form == Form::kBfloat16)
              sums[r][v] = Dot2(sums[r][v], words, word);
            else
              sums[r][v] = Dot4<false>(sums[r][v], words, word);
          }
        }
#endif
      }
    }
#pragma GCC unroll 16  // so that no sum has an address, and all stay in registers
    for (int r = 0; r < kRows; ++r) {
      char* to = out + r * stride + first;
#pragma GCC unroll 8
      for (int v = 0; v < kMany; ++v) {
        const Sums sum = sums[r][v];
        std::memcpy(to + v * sizeof(sum), &sum, sizeof(sum));
      }
    }
  }
}

// Calls run(std::integral_constant<int, InPass(rows, kRows)>), for 1 <= rows.
template <int kRows = kTogether, typename F>
void WithRows(int64_t rows, F run) {
  if constexpr (kRows > 1) {
    constexpr int kNext = kRows > 6 ? kRows - 2 : kRows - 1;
    if (InPass(rows, kRows) < kRows) return WithRows<kNext>(rows, run);
  }
  run(std::integral_constant<int, kRows>());
}

// Rows of the next pass over a panel, of the `rows` that are left from a row on, and how many passes
// `rows` from the first one on take. Vectors stay within a tile, whose passes get about as many each.
inline int64_t PassRows(Form form, int64_t row, int64_t rows, bool tiles) {
  if (tiles) return std::min(2 * kTile, rows);
  const int64_t left = std::min(kTile - row % kTile, rows);
  const int64_t passes = Parts(left, MostTogether(form));
  return std::min(left, RoundUp(Parts(left, passes), 2));
}
inline int64_t Passes(Form form, int64_t rows, bool tiles) {
  if (tiles) return Parts(rows, 2 * kTile);
  const int64_t most = MostTogether(form);
  return rows / kTile * Parts(kTile, most) + Parts(rows % kTile, most);
}

// Whether all rows together go over a panel once.
inline bool Once(Form form, int64_t rows, int64_t passes, bool tiles) {
  return passes == 1 && (tiles || Sweeps(form, InPass(rows, MostTogether(form))) == 1);
}

// Rows that a pass of so many writes.
inline int64_t Written(Form form, int64_t rows, bool tiles) {
  return tiles ? RoundUp(rows, kTile) : InPass(rows, MostTogether(form));
}

// Sums of the rows of a pass with a part of a panel, [Written(rows), kPanel] of 4 bytes; a row of `out`
// is so many bytes. With `more` they are added to those of `out`, which tiles do not. The rows have
// `all` steps. Each `Caller` has a copy of its own: GCC inlines what is called in one place, and the
// products of one row take 4% longer otherwise.
template <Form form, typename Caller>
void Sums(const char* x, int64_t steps, int64_t rows, const char* part, Ahead ahead, bool tiles,
          void* out, int64_t stride, bool more, int64_t all) {
  char* to = static_cast<char*>(out);
  if (!tiles)
    WithRows<MostTogether(form)>(
        rows,
        [&](auto many) { VectorSums<form, many(), Caller>(x, steps, part, ahead, to, stride, more); });
  else if (rows > kTile)
    TileSums<form, 2>(x, steps, part, ahead, to, stride, all);
  else
    TileSums<form, 1>(x, steps, part, ahead, to, stride, all);
}

// A packed weight, and where its products go.
struct Weight {
  const char* panels;
  int64_t panel_bytes, outputs;
  float* y;
  bool cache_resident;  // from call to call

  int64_t Panels() const { return (outputs + kPanel - 1) / kPanel; }
  const char* Panel(int64_t panel) const { return panels + panel * panel_bytes; }
  int64_t Lanes(int64_t panel) const { return std::min(kPanel, outputs - panel * kPanel); }
};

}  // namespace
