// Weights whose groups of inputs have scales of their own: ggml's quantised types (kinds.py).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "activations.h"
#include "panel.h"

namespace {

inline float FromHalf(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof(half));
  return half;
}

inline Floats FromHalves(const char* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(Load<__m256i>(from));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(Load<__m128i>(from));
#else
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = FromHalf(Load<uint16_t>(from + 2 * i));
  return out;
#endif
}

// GCC 12 converts vectors of bytes one byte at a time.
template <typename Byte>
inline Floats FromBytes(const char* from) {
  constexpr bool kSigned = std::is_signed_v<Byte>;
#if defined(__AVX512F__)
  const __m128i bytes = Load<__m128i>(from);
  const __m512i whole = kSigned ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
  return (Floats)_mm512_cvtepi32_ps(whole);
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadu_si64(from);
  const __m256i whole = kSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
  return (Floats)_mm256_cvtepi32_ps(whole);
#else
  typedef Byte Bytes __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(Load<Bytes>(from), Floats);
#endif
}

// 2^(byte - 128); 0 of byte 0, and infinity of byte 255, which stands for no number.
inline Floats FromExponents(const char* from) {
  const Ints bytes = __builtin_convertvector(FromBytes<uint8_t>(from), Ints);
  return (Floats)((Words)bytes << 23) * 0.5f;
}

// A kind of weights whose groups have scales of their own; see kinds.py.
struct Grouped {
  int bits;        // of a value: 8, or 4 and a word of those above them
  int64_t inputs;  // of a group
  int64_t block;   // inputs of a superblock; of a group where there is none
  int32_t offset;
  bool minima;
  bool e2m1 = false;  // values are floats of four bits, scales are exponents

  constexpr bool Halves() const { return bits < 8; }  // two inputs in a byte
  constexpr int Steps() const { return inputs / (Halves() ? 8 : 4); }
  constexpr int64_t ValueBytes() const { return inputs * kPanel * bits / 8; }
  constexpr int64_t ScaleBytes() const { return block == inputs && !e2m1 ? 2 : 1; }
  constexpr int64_t GroupBytes() const {
    return ValueBytes() + (minima ? 2 : 1) * kPanel * ScaleBytes();
  }
  constexpr int64_t SharedBytes() const {  // of a superblock, before its groups
    return block == inputs ? 0 : (minima ? 2 : 1) * kPanel * 2;
  }
  constexpr int64_t BlockBytes() const { return SharedBytes() + block / inputs * GroupBytes(); }
};

constexpr Grouped kQ4_0{4, 32, 32, 8, false}, kQ4_1{4, 32, 32, 0, true};
constexpr Grouped kQ5_0{5, 32, 32, 16, false}, kQ5_1{5, 32, 32, 0, true};
constexpr Grouped kQ8_0{8, 32, 32, 128, false};
constexpr Grouped kQ4_K{4, 32, 256, 0, true}, kQ5_K{5, 32, 256, 0, true};
constexpr Grouped kQ6_K{6, 16, 256, 32, false};
constexpr Grouped kMXFP4{4, 32, 32, 12, false, true};

// A float of E2M1, by its bits: twice its value, plus the offset of kMXFP4.
constexpr uint8_t kE2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The same in every byte.
inline Words FromE2M1(Words bits) {
#if defined(__AVX512BW__)
  return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(Load<__m128i>(kE2M1)), (__m512i)bits);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i table = _mm256_broadcastsi128_si256(Load<__m128i>(kE2M1));
  return (Words)_mm256_shuffle_epi8(table, (__m256i)bits);
#elif defined(__SSSE3__) && SSD_JAX_VECTOR_BYTES == 16
  return (Words)_mm_shuffle_epi8(Load<__m128i>(kE2M1), (__m128i)bits);
#elif defined(__aarch64__)
  return (Words)vqtbl1q_u8(vld1q_u8(kE2M1), (uint8x16_t)bits);
#else
  uint8_t bytes[sizeof(bits)];
  std::memcpy(bytes, &bits, sizeof(bits));
  for (uint8_t& byte : bytes) byte = kE2M1[byte];
  return Load<Words>(bytes);
#endif
}

// The inputs of word i of a group, those of its bytes' low and high halves where it has such.
template <const Grouped& kind>
struct Unpacked {
  // `group`: where the group begins, in the lanes that are meant.
  Unpacked(const char* group, int i) {
    const Words words = Load<Words>(group + i * kStep);
    low = kind.Halves() ? words & 0x0f0f0f0fu : words;
    high = words >> 4 & 0x0f0f0f0fu;
    if constexpr (kAbove > 0) {
      const Words above = Load<Words>(group + kind.Steps() * kStep);
      low |= Above(above, i);
      high |= Above(above, i + kind.Steps());
    }
    if constexpr (kind.e2m1) {
      low = FromE2M1(low);
      high = FromE2M1(high);
    }
  }

  Words low, high;

 private:
  static constexpr int kAbove = kind.Halves() ? kind.bits - 4 : 0;

  // What step i has above its four bits, in its place.
  static Words Above(Words above, int i) {
    const int at = kAbove * i;
    return (at < 4 ? above << (4 - at) : above >> (at - 4)) & ((1u << kAbove) - 1) * 0x10101010u;
  }
};

// The scales and minima of a group's outputs, a vector of them.
template <const Grouped& kind>
struct GroupScales {
  static constexpr bool kShared = kind.block != kind.inputs;

  GroupScales() = default;

  // `block`: where the superblock begins; `at`: behind the group's values; v: which vector.
  GroupScales(const char* block, const char* at, int v) {
    const int64_t byte = kLanes * v, half = 2 * byte;
    if constexpr (kind.e2m1) {
      scale = FromExponents(at + byte);
    } else if constexpr (!kShared) {
      scale = FromHalves(at + half);
      if constexpr (kind.minima) minimum = FromHalves(at + 2 * kPanel + half);
    } else if constexpr (kind.minima) {
      scale = FromHalves(block + half) * FromBytes<uint8_t>(at + byte);
      minimum = -FromHalves(block + 2 * kPanel + half) * FromBytes<uint8_t>(at + kPanel + byte);
    } else {
      scale = FromHalves(block + half) * FromBytes<int8_t>(at + byte);
    }
  }

  // A row's total with this group, whose integer sum is exact.
  Floats Add(Floats total, Ints sum, float unit, float moment) const {
    total = MulAdd(scale * unit, __builtin_convertvector(sum, Floats), total);
    if constexpr (kind.minima) total = MulAdd(minimum, moment, total);
    return total;
  }

  Floats scale, minimum;
};

// A pass of kRows rows with superblocks [begin, end) of a panel of a kind whose groups have scales: the
// integer sum of each group is exact, and groups are added in their order to those of `out` before.
template <const Grouped& kind, int kRows>
void GroupedRows(const Activations& x, int64_t first, int64_t begin, int64_t end, const char* part,
                 Ahead ahead, float (*out)[kPanel]) {
  constexpr int64_t kSteps = kind.Steps();
  constexpr int kMany = Vectors(Form::kGroups, kRows);
  constexpr bool kSmall = kind.offset != 128;
#if defined(SSD_JAX_PAIRS)
  constexpr bool kPaired = kind.bits == 4 && !kind.e2m1;  // a group's sums of two fit 16 bits
#else
  constexpr bool kPaired = false;
#endif
  const int64_t at = first * x.width + begin * kind.block * kRows;
  ahead.Begin(Sweeps(Form::kGroups, kRows));
  for (int from = 0; from < kPanel / kLanes; from += kMany) {
    Floats totals[kRows][kMany] = {};
    for (int r = 0; r < kRows && begin > 0; ++r)
      std::memcpy(totals[r], out[r] + kLanes * from, sizeof(totals[r]));
    const uint32_t* word = &x.words[at / 4];
    const float* unit = &x.group_scales[at / kGroup];
    const float* moment = &x.group_sums[at / kGroup];
    const int32_t* half = &x.half_sums[at / 16];
    const char* w = part;
    for (int64_t blocks = end - begin; blocks > 0; --blocks) {
      const char* block = w;
      w += kind.SharedBytes();
      for (int64_t k = 0; k < kind.block; k += kind.inputs, w += kind.GroupBytes()) {
        ahead.Step();
        Ints sums[kRows][kMany];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const int32_t sum = kind.inputs == 16 ? half[r] : half[r] + half[kRows + r];
#pragma GCC unroll 8
          for (int v = 0; v < kMany; ++v)
            sums[r][v] = Ints{} - (kPaired ? 0 : kind.offset - (kSmall ? 0 : kTaken)) * sum;
        }
#pragma GCC unroll 8
        for (int64_t i = 0; i < kSteps; ++i) {
          Words low[kMany], high[kMany];
#pragma GCC unroll 8
          for (int v = 0; v < kMany; ++v) {
            const Unpacked<kind> words(w + (from + v) * sizeof(Words), i);
            low[v] = words.low;
            high[v] = words.high;
          }
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int v = 0; v < kMany; ++v) {
              const auto to_low = Word(&word[i * kRows + r]);
#if defined(SSD_JAX_PAIRS)
              if constexpr (kind.Halves()) {
                const Words to_high = Word(&word[(i + kSteps) * kRows + r]);
                const Words both = Plus(Pairs(low[v], to_low), Pairs(high[v], to_high));
                sums[r][v] = Now(kPaired ? (Ints)Plus((Words)sums[r][v], both)
                                         : sums[r][v] + Joined(both));
                continue;
              }
#endif
              sums[r][v] = Now(Dot4<kSmall>(sums[r][v], low[v], to_low));
              if constexpr (kind.Halves())
                sums[r][v] =
                    Dot4<kSmall>(sums[r][v], high[v], Word(&word[(i + kSteps) * kRows + r]));
            }
          }
        }
#pragma GCC unroll 8
        for (int v = 0; v < kMany; ++v) {
          const GroupScales<kind> own(block, w + kind.ValueBytes(), from + v);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
#if defined(SSD_JAX_PAIRS)
            if (kPaired)
              sums[r][v] = Joined((Words)sums[r][v]) - kind.offset * (half[r] + half[kRows + r]);
#endif
            totals[r][v] = own.Add(totals[r][v], sums[r][v], unit[r], moment[r]);
          }
        }
        word += kind.inputs / 4 * kRows;
        half += kind.inputs / 16 * kRows;
        if ((k + kind.inputs) % kGroup == 0) {
          unit += kRows;
          moment += kRows;
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      std::memcpy(out[r] + kLanes * from, totals[r], sizeof(totals[r]));
  }
}

template <const Grouped& kind>
void GroupedRow(const char* w, int64_t lane, int64_t width, float* out) {
  constexpr bool kShared = kind.block != kind.inputs;
  float shared = 1, shared_minimum = -1;
  const auto half = [&](const char* at) { return FromHalf(Load<uint16_t>(at + 2 * lane)); };
  for (int64_t k = 0; k < width; k += kind.inputs) {
    if (kShared && k % kind.block == 0) {
      shared = half(w);
      w += 2 * kPanel;
      if (kind.minima) {
        shared_minimum = -half(w);
        w += 2 * kPanel;
      }
    }
    const char* scales = w + kind.ValueBytes();
    const char* minima = scales + kPanel * kind.ScaleBytes();
    const float scale = kind.e2m1 ? std::ldexp(1.0f, Load<uint8_t>(scales + lane) - 128)
                        : !kShared ? half(scales)
                        : kind.minima ? shared * Load<uint8_t>(scales + lane)
                                      : shared * Load<int8_t>(scales + lane);
    const float minimum = !kind.minima ? 0
                          : kShared    ? shared_minimum * Load<uint8_t>(minima + lane)
                                       : half(minima);
    for (int64_t i = 0; i < kind.inputs; ++i) {
      const int64_t half = 4 * kind.Steps(), byte = i % half;
      int32_t value = Load<uint8_t>(w + byte / 4 * kStep + 4 * lane + byte % 4);
      if (kind.Halves()) value = i < half ? value & 15 : value >> 4;
      if (kind.Halves() && kind.bits > 4) {
        const int above = kind.bits - 4, bits = (1 << above) - 1;
        const int32_t all = Load<uint8_t>(w + kind.Steps() * kStep + 4 * lane + i % 4);
        value |= (all >> i / 4 * above & bits) << 4;
      }
      if (kind.e2m1) value = kE2M1[value];
      out[k + i] = (value - kind.offset) * scale + minimum;
    }
    w += kind.GroupBytes();
  }
}

}  // namespace
