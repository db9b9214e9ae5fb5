// Products of rows with weight matrices that were packed once, for XLA's CPU backend.
//
// y[n, N] = x[n, K] @ w[N, K]^T in float32. Weights lie in panels of 32 outputs, each one stream of
// bytes in the order in which it is read (kinds.py has the layouts), so that memory is read once
// and in one direction. A row's sums are made in the same order whatever rows run beside it: its
// bits depend on it alone.
//
// Activations are rounded to what a kind multiplies: bfloat16, two int8 digits with a scale a row
// (quantized.py), or int8 with a scale for each group of 32.
//
// Compiled for the processor that runs it: AMX tiles, AVX-512 or the same loops over narrower
// vectors.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../parallel.h"
#include "../tiles.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kLanes = 16;          // outputs of one vector
constexpr int64_t kPanel = 2 * kLanes;  // outputs of one panel
constexpr int64_t kStep = 4 * kPanel;   // bytes of a panel's step: one word an output
constexpr int64_t kAhead = 4096;        // bytes that are asked of memory ahead of use
constexpr int64_t kGroup = 32;          // activations that share a scale
constexpr int64_t kLongest = 65000;     // inputs; int32 sums of more could overflow
constexpr float kLargest = 127.0f;      // LARGEST, DIGIT and _SMALLEST_ABSMAX of quantized.py
constexpr float kDigit = 2 * kLargest;
constexpr float kSmallestAbsmax = 1e-30f;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

template <typename V>
inline V Load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

inline void Ask(const char* at) { __builtin_prefetch(at + kAhead); }

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

// ---------------------------------------------------------------- kinds of weights

// A kind of weights whose groups have scales of their own; see kinds.py. kInputs share a scale.
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

enum class Form { kBfloat16, kDigits, kGroups };  // of activations

inline int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// ---------------------------------------------------------------- activations

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
    grouped.resize(rows * width);
    group_scales.resize(rows * width / kGroup);
    group_sums.resize(rows * width / 16);
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

// ---------------------------------------------------------------- sums of a panel

using Block = std::array<std::array<float, kPanel>, 2 * kTile>;  // of rows, with a panel's outputs
using Counts = std::array<std::array<int32_t, kPanel>, 2 * kTile>;

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
  constexpr int kTogether = kRows > 4 ? 1 : 2;  // vectors of the panel
  for (int first = 0; first < 2; first += kTogether) {
    Sums sums[kRows][kTogether] = {};
    const char* w = panel + 64 * first;
    for (int64_t at = 0; at < stride; at += 4, w += kStep) {
      if (first == 0) {
        Ask(w);
        Ask(w + 64);
      }
      for (int v = 0; v < kTogether; ++v) {
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
      std::memcpy(static_cast<char*>(out) + r * kStep + 64 * first, sums[r], 64 * kTogether);
  }
}

constexpr int64_t kTogether = 8;  // rows of one pass over a panel by vectors

// Calls run(std::integral_constant<int, rows>) for 1 <= rows <= kTogether.
template <int kRows = kTogether, typename F>
void WithRows(int64_t rows, F run) {
  if constexpr (kRows == 1) {
    run(std::integral_constant<int, 1>());
  } else {
    if (rows == kRows) return run(std::integral_constant<int, kRows>());
    WithRows<kRows - 1>(rows, run);
  }
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
    WithRows(std::min(kTogether, rows - row), [&](auto many) {
      VectorSums<form, many()>(x + row * stride, stride, panel,
                               static_cast<char*>(out) + row * kStep);
    });
  }
}

struct Weight {
  const char* panels;
  int64_t panel_bytes, outputs;
  float* y;

  int64_t Panels() const { return (outputs + kPanel - 1) / kPanel; }
};

void Bfloat16Panel(const Activations& x, const Weight& w, int64_t panel, bool tiles) {
  const int64_t stride = 2 * RoundUp(x.width, 32), first = panel * kPanel;
  const int64_t lanes = std::min(kPanel, w.outputs - first);
  const char* rows = reinterpret_cast<const char*>(x.bfloat16.data());
  alignas(64) Block sums;
  for (int64_t row = 0; row < x.rows; row += 2 * kTile) {
    const int64_t many = std::min(2 * kTile, x.rows - row);
    Sums<Form::kBfloat16>(rows + row * stride, stride, many, w.panels + panel * w.panel_bytes,
                          tiles, &sums);
    for (int64_t r = 0; r < many; ++r)
      std::memcpy(w.y + (row + r) * w.outputs + first, &sums[r], lanes * sizeof(float));
  }
}

// (high + low / DIGIT) * scale of the row * scale of the output, as quantized.py has it.
void Int8Panel(const Activations& x, const Weight& w, int64_t panel, bool tiles) {
  const int64_t stride = RoundUp(x.width, 64), first = panel * kPanel;
  const int64_t lanes = std::min(kPanel, w.outputs - first);
  const char* from = w.panels + panel * w.panel_bytes;
  const char* rows = reinterpret_cast<const char*>(x.digits.data());
  float scales[kPanel];
  std::memcpy(scales, from + stride * kPanel, sizeof(scales));
  alignas(64) Counts sums;
  for (int64_t row = 0; row < x.rows; row += kTile) {
    const int64_t many = std::min(kTile, x.rows - row);
    Sums<Form::kDigits>(rows + 2 * row * stride, stride, 2 * many, from, tiles, &sums);
    for (int64_t r = 0; r < many; ++r) {
      const int32_t* offsets = &x.sums[2 * (row + r)];
      float* y = w.y + (row + r) * w.outputs + first;
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const float high = sums[2 * r][lane] - 128 * offsets[0];
        const float low = sums[2 * r + 1][lane] - 128 * offsets[1];
        y[lane] = (high + low / kDigit) * x.scales[row + r] * scales[lane];
      }
    }
  }
}

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
    const int64_t many = std::min(kTogether, x.rows - row);
    WithRows(many, [&](auto rows) {
      GroupedRows<kind, rows()>(x, row, w.panels + panel * w.panel_bytes, out);
    });
    for (int64_t r = 0; r < many; ++r)
      std::memcpy(w.y + (row + r) * w.outputs + panel * kPanel, out[r], lanes * sizeof(float));
  }
}

// ---------------------------------------------------------------- rows of a weight

void Bfloat16Row(const char* panel, int64_t lane, int64_t width, float* out) {
  for (int64_t k = 0; k < width; ++k) {
    const auto bits = Load<uint16_t>(panel + k / 2 * kStep + 4 * lane + 2 * (k % 2));
    const uint32_t wide = uint32_t(bits) << 16;
    std::memcpy(&out[k], &wide, sizeof(wide));
  }
}

void Int8Row(const char* panel, int64_t lane, int64_t width, float* out) {
  const auto scale = Load<float>(panel + RoundUp(width, 64) * kPanel + 4 * lane);
  for (int64_t k = 0; k < width; ++k)
    out[k] = (Load<uint8_t>(panel + k / 4 * kStep + 4 * lane + k % 4) - 128) * scale;
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

// ---------------------------------------------------------------- what a kind can do

struct Kind {
  std::string_view name;
  Form form;
  int64_t block;        // inputs; a width of other multiples is padded, where blocks are no groups
  int64_t block_bytes;  // of a panel
  int64_t panel_bytes;  // at its end
  void (*multiply)(const Activations&, const Weight&, int64_t panel, bool tiles);
  void (*row)(const char* panel, int64_t lane, int64_t width, float* out);

  int64_t Bytes(int64_t width) const {
    return RoundUp(width, block) / block * block_bytes + panel_bytes;
  }
};

template <const Grouped& kind>
constexpr Kind Of(std::string_view name) {
  return {name, Form::kGroups,      kind.block,      kind.BlockBytes(),
          0,    GroupedPanel<kind>, GroupedRow<kind>};
}

constexpr Kind kKinds[] = {
    {"bfloat16", Form::kBfloat16, 32, 32 * kPanel * 2, 0, Bfloat16Panel, Bfloat16Row},
    {"int8", Form::kDigits, 64, 64 * kPanel, kPanel * 4, Int8Panel, Int8Row},
    Of<kQ4_0>("Q4_0"),
    Of<kQ4_1>("Q4_1"),
    Of<kQ5_0>("Q5_0"),
    Of<kQ5_1>("Q5_1"),
    Of<kQ8_0>("Q8_0"),
    Of<kQ4_K>("Q4_K"),
    Of<kQ6_K>("Q6_K"),
};

// The kind of this name if it fits the shape of panels, else null.
const Kind* Find(std::string_view name, int64_t width, int64_t outputs,
                 ffi::Span<const int64_t> panels) {
  for (const Kind& kind : kKinds) {
    const bool fits = kind.form != Form::kGroups || width % kind.block == 0;
    if (kind.name == name && fits && panels.size() == 2 && panels[1] == kind.Bytes(width) &&
        panels[0] * kPanel == RoundUp(outputs, kPanel) && width <= kLongest)
      return &kind;
  }
  return nullptr;
}

ffi::Error Refused(std::string_view name) {
  return ffi::Error::InvalidArgument("weights are not packed as " + std::string(name));
}

constexpr int64_t kGrainBytes = 1 << 16;  // of weights; less is not worth a thread's waking

// ---------------------------------------------------------------- handlers

// One product for each weight; `kinds`: their names, with a space after each.
ffi::Error Products(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs panels,
                    ffi::RemainingRets ys, std::string_view kinds) {
  struct Job {
    Weight weight;
    const Kind* kind;
    int64_t end;  // panels of this and all jobs before it
  };
  const auto in = x.dimensions();
  Activations rows(x.typed_data(), in[0], in[1]);
  std::vector<Job> jobs;
  int64_t count = 0, bytes = 0;
  for (size_t i = 0; i < panels.size(); ++i) {
    const auto w = panels.get<ffi::Buffer<ffi::U8>>(i);
    auto y = ys.get<ffi::Buffer<ffi::F32>>(i);
    if (w.has_error()) return w.error();
    if (y.has_error()) return y.error();
    const size_t space = kinds.find(' ');
    const auto name = kinds.substr(0, space);
    const int64_t outputs = (*y)->dimensions()[1];
    const Kind* kind = Find(name, rows.width, outputs, w->dimensions());
    if (kind == nullptr) return Refused(name);
    kinds.remove_prefix(space + 1);
    rows.Make(kind->form);
    const Weight weight{reinterpret_cast<const char*>(w->typed_data()), w->dimensions()[1], outputs,
                        (*y)->typed_data()};
    count += weight.Panels();
    bytes += weight.Panels() * weight.panel_bytes;
    jobs.push_back({weight, kind, count});
  }
  const bool tiles = kHasTiles && TilesAllowed();
  const int64_t grain = std::max<int64_t>(1, kGrainBytes * count / std::max<int64_t>(1, bytes));
  ParallelFor(pool, count, grain, [&](int64_t begin, int64_t end) {
    const Tiles configured(tiles);
    size_t at = 0;
    for (int64_t i = begin; i < end; ++i) {
      while (i >= jobs[at].end) ++at;
      const Job& job = jobs[at];
      job.kind->multiply(rows, job.weight, i - job.end + job.weight.Panels(), tiles);
    }
  });
  return ffi::Error::Success();
}

// Rows of a weight, as float32; an index that is no row gives NaN.
ffi::Error Take(ffi::Buffer<ffi::S32> indices, ffi::Buffer<ffi::U8> panels,
                ffi::ResultBuffer<ffi::F32> y, std::string_view kind_name, int64_t outputs) {
  const int64_t width = y->dimensions()[1], bytes = panels.dimensions()[1];
  const Kind* kind = Find(kind_name, width, outputs, panels.dimensions());
  if (kind == nullptr) return Refused(kind_name);
  const char* data = reinterpret_cast<const char*>(panels.typed_data());
  for (int64_t i = 0; i < indices.dimensions()[0]; ++i) {
    const int64_t row = indices.typed_data()[i];
    float* out = y->typed_data() + i * width;
    if (row < 0 || row >= outputs)
      std::fill_n(out, width, NAN);
    else
      kind->row(data + row / kPanel * bytes, row % kPanel, width, out);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ssd_jax_linear_products, Products,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("kinds"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ssd_jax_linear_take, Take,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<std::string_view>("kind")
                                  .Attr<int64_t>("outputs"));
