// Weights of 8-bit floats (E4M3) with a scale for each output and 128 inputs (kinds.py).
//
// bfloat16 has all their values. So a block of 128 inputs is decoded to the words of a panel of bfloat16
// and multiplied by what multiplies bfloat16; its sums get the block's scales. Vectors of 64 bytes
// multiply few rows as they decode; for more rows, and tiles, the words stay in the first cache.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "activations.h"
#include "panel.h"

namespace {

constexpr int64_t kFloat8Steps = 4;                         // of 32 inputs, in a block
constexpr int64_t kFloat8Values = 8 * kFloat8Steps * kStep;  // bytes of a block before its scales
constexpr int64_t kFloat8Bytes = kFloat8Values + 4 * kPanel;

// The number of bfloat16 that a byte is.
constexpr uint16_t ToBfloat16(uint32_t byte) {
  const uint32_t sign = byte >> 7 << 15, exponent = byte >> 3 & 15, fraction = byte & 7;
  if ((byte & 127) == 127) return sign | 0x7fc0;
  if (exponent > 0) return sign | (exponent + 120) << 7 | fraction << 4;
  if (fraction == 0) return sign;
  const int above = fraction >= 4 ? 2 : fraction >= 2 ? 1 : 0;  // place of the highest bit
  return sign | (118 + above) << 7 | (fraction << (7 - above) & 127);
}

// The words of a panel of bfloat16 from those of bytes: `first` has bytes 0 and 2, `second` 1 and 3.
#if defined(__AVX512VBMI__)

// Low and high bytes of the numbers without a sign.
struct Float8Table {
  constexpr Float8Table() {
    for (int byte = 0; byte < 128; ++byte) {
      low[byte] = ToBfloat16(byte) & 255;
      high[byte] = ToBfloat16(byte) >> 8;
    }
  }
  alignas(64) uint8_t low[128] = {};
  alignas(64) uint8_t high[128] = {};
};
constexpr Float8Table kFloat8Table;

inline void DecodeWords(Words bytes, Words* first, Words* second) {
  const auto look_up = [&](const uint8_t* table) {
    return (Words)_mm512_permutex2var_epi8(_mm512_load_si512(table), (__m512i)bytes,
                                           _mm512_load_si512(table + 64));
  };
  const auto select = [](uint32_t bits, Words set, Words clear) {
    return (Words)_mm512_ternarylogic_epi32(_mm512_set1_epi32(bits), (__m512i)set, (__m512i)clear, 0xca);
  };
  const Words low = look_up(kFloat8Table.low);
  const Words high = select(0x80808080u, bytes, look_up(kFloat8Table.high));
  *first = select(0xff00ff00u, high << 8, low);
  *second = select(0xff00ff00u, high, low >> 8);
}

#else

typedef uint16_t Halves __attribute__((vector_size(SSD_JAX_VECTOR_BYTES)));

// Halves whose high bytes are zero.
inline Halves DecodeHalves(Halves bytes) {
  const Halves size = bytes & 127, normal = (size << 4) + (120 << 7);
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(  // of those without an exponent
      0, 0, char(0x80), char(0xc0), 0, 0x20, 0x40, 0x60, 0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c));
  const __m256i places = (__m256i)(size | (size << 8) | (8 << 8));
  const Halves small = (Halves)_mm256_shuffle_epi8(table, places);
#else
  const Halves small = size > 3   ? (size << 5) + (119 << 7)
                       : size > 1 ? (size << 6) + (118 << 7)
                                  : size * (118 << 7);
#endif
  const Halves number = size > 7 ? normal : small;
  return (size == 127 ? (Halves{} + 0x7fc0) : number) | (bytes & 128) << 8;
}

inline void DecodeWords(Words bytes, Words* first, Words* second) {
  *first = (Words)DecodeHalves((Halves)(bytes & 0x00ff00ffu));
  *second = (Words)DecodeHalves((Halves)(bytes >> 8 & 0x00ff00ffu));
}

#endif

#if SSD_JAX_VECTOR_BYTES == 64

// Adds the products of the rows of a pass with so many steps of a block to `totals`.
template <int kRows>
void Float8Sums(const char* x, int64_t steps, const char* from, Ahead ahead, float (*totals)[kPanel]) {
  constexpr int kMany = kPanel / kLanes;
  Floats sums[kRows][kMany] = {};
  const char *scales = from + kFloat8Values, *line = x;
  for (int64_t step = 0; step < steps; ++step, line += kTile * kLine)
    for (int64_t at = 0; at < kLine; at += 8, from += kStep) {  // two words of a row
      ahead.Step();
#pragma GCC unroll 2
      for (int v = 0; v < kMany; ++v) {
        Words first, second;
        DecodeWords(Load<Words>(from + v * sizeof(Words)), &first, &second);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const char* words = line + r * kLine + at;
          sums[r][v] = Dot2(Dot2(sums[r][v], first, Word(words)), second, Word(words + 4));
        }
      }
    }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kMany; ++v) {
      float* total = &totals[r][v * kLanes];
      Store(total, MulAdd(Load<Floats>(scales + v * sizeof(Floats)), sums[r][v], Load<Floats>(total)));
    }
}

#endif

void Float8Panel(const Activations& x, const Weight& w, int64_t panel, bool tiles) {
  constexpr Form kForm = Form::kBfloat16;
  const int64_t steps = Parts(x.width, 32);
  alignas(64) char numbers[kFloat8Steps * kSteps];
  alignas(64) float sums[2 * kTile][kPanel], totals[kMostRows][kPanel];
  std::memset(totals, 0, RoundUp(x.rows, 2) * sizeof(*totals));
  const char* from = w.Panel(panel);
  for (int64_t begin = 0; begin < steps; begin += kFloat8Steps, from += kFloat8Bytes) {
    const int64_t count = std::min(kFloat8Steps, steps - begin);
    Ahead ahead(from, 0, kStep, 0, 1, true, w.cache_resident);
    ahead.Begin(1);
#if SSD_JAX_VECTOR_BYTES == 64
    if (!tiles && x.rows <= kTogether) {
      WithRows(x.rows, [&](auto rows) {
        Float8Sums<rows()>(x.Bfloat16(0, begin), count, from, ahead, totals);
      });
      continue;
    }
#endif
    for (int64_t at = 0; at < kFloat8Values; at += kStep) {
      ahead.Step();
      for (int64_t byte = 0; byte < kStep; byte += sizeof(Words)) {
        Words first, second;
        DecodeWords(Load<Words>(from + at + byte), &first, &second);
        std::memcpy(numbers + 2 * at + byte, &first, sizeof(first));
        std::memcpy(numbers + 2 * at + kStep + byte, &second, sizeof(second));
      }
    }
    asm volatile("" : : : "memory");  // GCC 12 does not know what a tile is loaded from
    const Ahead none(numbers, 0, 0, 0, 1, true, true);
    const char* scales = from + kFloat8Values;
    for (int64_t row = 0, many; row < x.rows; row += many) {
      many = PassRows(kForm, row, x.rows - row, tiles);
      Sums<kForm, struct Float8>(x.Bfloat16(row, begin), count, many, numbers, none, tiles, sums,
                                 4 * kPanel, false, steps);
      for (int64_t r = 0; r < many; ++r)
        for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
          float* total = &totals[row + r][lane];
          Store(total, MulAdd(Load<Floats>(scales + 4 * lane), Load<Floats>(&sums[r][lane]),
                              Load<Floats>(total)));
        }
    }
  }
  for (int64_t r = 0; r < x.rows; ++r)
    std::memcpy(w.y + (x.first + r) * w.outputs + panel * kPanel, totals[r],
                w.Lanes(panel) * sizeof(float));
}

void Float8Row(const char* panel, int64_t lane, int64_t width, float* out) {
  constexpr int64_t kInputs = 32 * kFloat8Steps;
  for (int64_t k = 0; k < width; ++k) {
    const char* block = panel + k / kInputs * kFloat8Bytes;
    const int64_t word = k % kInputs / 4, byte = k % 2 * 2 + k / 2 % 2;
    const auto bits = Load<uint8_t>(block + word * kStep + 4 * lane + byte);
    const uint32_t wide = uint32_t(ToBfloat16(bits)) << 16;
    std::memcpy(&out[k], &wide, sizeof(wide));
    out[k] *= Load<float>(block + kFloat8Values + 4 * lane);
  }
}

}  // namespace
