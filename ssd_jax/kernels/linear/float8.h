// Weights of 8-bit floats (E4M3) with a scale for each output and 128 inputs (kinds.py).
//
// bfloat16 has all their values. So a block of 128 inputs is decoded to the words of a panel of bfloat16,
// which stay in the first cache, and multiplied there by what multiplies bfloat16; its sums get the
// block's scales.

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
  const Words low = look_up(kFloat8Table.low);
  const Words high = look_up(kFloat8Table.high) | (bytes & 0x80808080u);
  *first = (low & 0x00ff00ffu) | (high << 8 & 0xff00ff00u);
  *second = (low >> 8 & 0x00ff00ffu) | (high & 0xff00ff00u);
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

void Float8Panel(const Activations& x, const Weight& w, int64_t panel, bool tiles) {
  constexpr Form kForm = Form::kBfloat16;
  const int64_t steps = Parts(x.width, 32);
  alignas(64) char numbers[kFloat8Steps * kSteps];
  alignas(64) float sums[2 * kTile][kPanel], totals[kMostRows][kPanel];
  std::memset(totals, 0, x.rows * sizeof(*totals));
  const char* from = w.Panel(panel);
  for (int64_t begin = 0; begin < steps; begin += kFloat8Steps, from += kFloat8Bytes) {
    Ahead ahead(from, 0, kStep, 0, 1, true, w.cache_resident);
    ahead.Begin(1);
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
    const int64_t count = std::min(kFloat8Steps, steps - begin);
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
