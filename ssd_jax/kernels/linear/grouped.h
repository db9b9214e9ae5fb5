// Weights whose groups of inputs have scales of their own: ggml's quantised types (kinds.py).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

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
#else
  Floats out;
  const auto* halves = reinterpret_cast<const uint16_t*>(from);
  for (int i = 0; i < kLanes; ++i) out[i] = FromHalf(halves[i]);
  return out;
#endif
}

template <typename Byte>
inline Floats FromBytes(const char* from) {
  typedef Byte Bytes __attribute__((vector_size(16)));
  return __builtin_convertvector(Load<Bytes>(from), Floats);
}

// A kind of weights whose groups have scales of their own; see kinds.py.
struct Grouped {
  bool nibbles;
  int64_t inputs;  // of a group
  int64_t block;   // inputs of a superblock; of a group where there is none
  int32_t offset;
  bool minima;

  constexpr int64_t GroupBytes() const {
    const int64_t values = inputs * kPanel / (nibbles ? 2 : 1);
    return values + (minima ? 2 : 1) * kPanel * (block == inputs ? 2 : 1);
  }
  constexpr int64_t BlockBytes() const {
    const int64_t shared = block == inputs ? 0 : (minima ? 2 : 1) * kPanel * 2;
    return shared + block / inputs * GroupBytes();
  }
};

constexpr Grouped kQ4_0{true, 32, 32, 8, false}, kQ4_1{true, 32, 32, 0, true};
constexpr Grouped kQ5_0{false, 32, 32, 16, false}, kQ5_1{false, 32, 32, 0, true};
constexpr Grouped kQ8_0{false, 32, 32, 128, false};
constexpr Grouped kQ4_K{true, 32, 256, 0, true}, kQ6_K{false, 16, 256, 32, false};

// Rows first .. first + kRows with a panel of a kind whose groups have scales: the integer sum of
// each group is exact, and groups are added in their order.
template <const Grouped& kind, int kRows>
void GroupedRows(const Activations& x, int64_t first, const char* w, float (*out)[kPanel]) {
  constexpr int64_t kWords = kind.inputs / 4, kVectors = kWords / (kind.nibbles ? 2 : 1);
  constexpr bool kShared = kind.block != kind.inputs;
  Floats totals[2][kRows] = {}, shared[2] = {}, shared_minima[2] = {};
  for (int64_t k = 0; k < x.width; k += kind.inputs) {
    if (kShared && k % kind.block == 0) {
      for (int v = 0; v < 2; ++v) shared[v] = FromHalves(w + 32 * v);
      w += 2 * kPanel;
      if constexpr (kind.minima) {
        for (int v = 0; v < 2; ++v) shared_minima[v] = FromHalves(w + 32 * v);
        w += 2 * kPanel;
      }
    }
    const char* scales = w + kVectors * kStep;
    for (int64_t line = 0; line < kind.GroupBytes(); line += 64) Ask(w + line);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      Ints sums[kRows] = {};
#pragma GCC unroll 8
      for (int64_t i = 0; i < kVectors; ++i) {
        const Words words = Load<Words>(w + i * kStep + 64 * v);
        const int8_t* at = &x.grouped[first * x.width + k + 4 * i];
        if constexpr (kind.nibbles) {
          const Words low = words & 0x0f0f0f0fu, high = words >> 4 & 0x0f0f0f0fu;
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            sums[r] = Dot4(sums[r], low, Load<uint32_t>(at + r * x.width));
            sums[r] = Dot4(sums[r], high, Load<uint32_t>(at + r * x.width + 16));
          }
        } else {
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r)
            sums[r] = Dot4(sums[r], words, Load<uint32_t>(at + r * x.width));
        }
      }
      Floats scale, minimum = {};
      if constexpr (!kShared) {
        scale = FromHalves(scales + 32 * v);
        if constexpr (kind.minima) minimum = FromHalves(scales + 2 * kPanel + 32 * v);
      } else if constexpr (kind.minima) {
        scale = shared[v] * FromBytes<uint8_t>(scales + 16 * v);
        minimum = -shared_minima[v] * FromBytes<uint8_t>(scales + kPanel + 16 * v);
      } else {
        scale = shared[v] * FromBytes<int8_t>(scales + 16 * v);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = first + r, at = row * x.width + k;
        const int32_t* parts = &x.group_sums[at / 16];
        const int32_t sum = kind.inputs == 16 ? parts[0] : parts[0] + parts[1];
        const float unit = x.group_scales[at / kGroup];
        const Floats exact = __builtin_convertvector(sums[r] - kind.offset * sum, Floats);
        totals[v][r] += scale * unit * exact;
        if constexpr (kind.minima) totals[v][r] += minimum * (unit * sum);
      }
    }
    w += kind.GroupBytes();
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < 2; ++v) std::memcpy(out[r] + kLanes * v, &totals[v][r], 64);
}

template <const Grouped& kind>
void GroupedPanel(const Activations& x, const Weight& w, int64_t panel, bool) {
  const int64_t lanes = std::min(kPanel, w.outputs - panel * kPanel);
  alignas(64) float out[kTogether][kPanel];
  for (int64_t row = 0; row < x.rows; row += kTogether) {
    const int64_t many = std::min<int64_t>(kTogether, x.rows - row);
    WithRows(many, [&](auto rows) {
      GroupedRows<kind, rows()>(x, row, w.panels + panel * w.panel_bytes, out);
    });
    for (int64_t r = 0; r < many; ++r)
      std::memcpy(w.y + (row + r) * w.outputs + panel * kPanel, out[r], lanes * sizeof(float));
  }
}

template <const Grouped& kind>
void GroupedRow(const char* w, int64_t lane, int64_t width, float* out) {
  constexpr bool kShared = kind.block != kind.inputs;
  constexpr int64_t kSize = kShared ? 1 : 2;  // bytes of a scale
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
    const char* scales = w + kind.inputs * kPanel / (kind.nibbles ? 2 : 1);
    const char* minima = scales + kPanel * kSize;
    const float scale = !kShared ? half(scales)
                        : kind.minima ? shared * Load<uint8_t>(scales + lane)
                                      : shared * Load<int8_t>(scales + lane);
    const float minimum = !kind.minima ? 0
                          : kShared    ? shared_minimum * Load<uint8_t>(minima + lane)
                                       : half(minima);
    for (int64_t i = 0; i < kind.inputs; ++i) {
      const int64_t byte = kind.nibbles ? i % 16 : i;
      int32_t value = Load<uint8_t>(w + byte / 4 * kStep + 4 * lane + byte % 4);
      if (kind.nibbles) value = i < 16 ? value & 15 : value >> 4;
      out[k + i] = (value - kind.offset) * scale + minimum;
    }
    w += kind.GroupBytes();
  }
}

}  // namespace
