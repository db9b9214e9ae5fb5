// All kinds of packed weights: their products with rows, and their rows (kinds.py has the layouts).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "activations.h"
#include "float8.h"
#include "grouped.h"
#include "grouped_tiles.h"
#include "panel.h"
#include "xla/ffi/api/ffi.h"

namespace {

constexpr int64_t kLongest = 65000;  // inputs; int32 sums of more could overflow

void Bfloat16Panel(const Activations& x, const Weight& w, int64_t panel, bool tiles) {
  const int64_t steps = RoundUp(x.width, 32) / 32, lanes = w.Lanes(panel);
  const int64_t passes = Passes(Form::kBfloat16, x.rows, tiles);
  const bool once = Once(Form::kBfloat16, x.rows, passes, tiles);
  const int64_t part = PartSteps(Form::kBfloat16, steps, kSteps, x.rows, once);
  float* y = w.y + x.first * w.outputs + panel * kPanel;
  alignas(64) float sums[2 * kTile][kPanel];
  for (int64_t begin = 0; begin < steps; begin += part) {
    const int64_t count = std::min(part, steps - begin);
    const char* from = w.Panel(panel) + begin * kSteps;
    for (int64_t row = 0, many, pass = 0; row < x.rows; row += many, ++pass) {
      many = PassRows(Form::kBfloat16, row, x.rows - row, tiles);
      const Ahead ahead(from, count * kSteps, kAsked, pass, passes, once, w.cache_resident);
      float(*own)[kPanel] = sums + row % (2 * kTile);
      const bool whole = lanes == kPanel && many == Written(Form::kBfloat16, many, tiles);
      Sums<Form::kBfloat16, struct Bfloat16>(x.Bfloat16(row, begin), count, many, from, ahead, tiles,
                            whole ? y + row * w.outputs : *own, 4 * (whole ? w.outputs : kPanel),
                            begin > 0, steps);
      for (int64_t r = 0; r < many && !whole && begin + count == steps; ++r)
        std::memcpy(y + (row + r) * w.outputs, own[r], lanes * sizeof(float));
    }
  }
}

// (high + low / DIGIT) * scale of the row * scale of the output, as quantized.py has it; without
// low where activations have one digit.
template <int kMany, Digits<kMany> Activations::* kOf>
void Int8Panel(const Activations& rows, const Weight& w, int64_t panel, bool tiles) {
  const Digits<kMany>& x = rows.*kOf;
  const int64_t steps = x.padded / 64, lanes = w.Lanes(panel), digits = kMany * rows.rows;
  const int64_t passes = Passes(Form::kDigits, digits, tiles);
  const bool once = Once(Form::kDigits, digits, passes, tiles);
  const int64_t part = PartSteps(Form::kDigits, steps, kSteps, digits, once);
  const char* scales = w.Panel(panel) + steps * kSteps;
  alignas(64) int32_t sums[2 * kTile][kPanel];
  for (int64_t begin = 0; begin < steps; begin += part) {
    const int64_t count = std::min(part, steps - begin);
    const char* from = w.Panel(panel) + begin * kSteps;
    for (int64_t digit = 0, many, pass = 0; digit < digits; digit += many, ++pass) {
      many = PassRows(Form::kDigits, digit, digits - digit, tiles);
      const Ahead ahead(from, count * kSteps, kAsked, pass, passes, once, w.cache_resident);
      int32_t(*own)[kPanel] = sums + digit % (2 * kTile);
      Sums<Form::kDigits, struct Int8>(x.Row(digit, begin), count, many, from, ahead, tiles, own, 4 * kPanel,
                          begin > 0, steps);
      for (int64_t r = 0; r < many && begin + count == steps; r += kMany) {
        const int64_t row = (digit + r) / kMany;
        float y[kPanel];
        for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
          const auto units = [&](int i) {
            const Ints whole =
                Load<Ints>(&own[r + i][lane]) - (128 - kTaken) * x.sums[digit + r + i];
            return __builtin_convertvector(whole, Floats);
          };
          Floats total = units(0);
          if constexpr (kMany == 2) total += units(1) / kDigit;
          Store(y + lane, total * x.scales[row] * Load<Floats>(scales + 4 * lane));
        }
        std::memcpy(w.y + (rows.first + row) * w.outputs + panel * kPanel, y,
                    lanes * sizeof(float));
      }
    }
  }
}

// Tiles take what rows they can, and vectors the others.
template <const Grouped& kind>
void GroupedPanel(const Activations& x, const Weight& w, int64_t panel, bool) {
  const int64_t lanes = w.Lanes(panel), tiled = kTiled<kind> ? x.TiledRows() : 0;
  const int64_t passes = (tiled > 0) + Parts(x.rows - tiled, kTogether);
  const int64_t blocks = x.width / kind.block;
  const bool once = passes == 1 && (tiled > 0 || Sweeps(Form::kGroups, InPass(x.rows)) == 1);
  const int64_t part = PartSteps(Form::kGroups, blocks, kind.BlockBytes(), x.rows, once);
  alignas(64) float out[kMostRows][kPanel];
  for (int64_t begin = 0; begin < blocks; begin += part) {
    const int64_t end = std::min(begin + part, blocks), bytes = (end - begin) * kind.BlockBytes();
    const char* from = w.Panel(panel) + begin * kind.BlockBytes();
    int64_t pass = 0;
    const auto ahead = [&] {
      return Ahead(from, bytes, kind.GroupBytes(), pass++, passes, once, w.cache_resident);
    };
    if (tiled > 0) GroupedTiles<kind>(x, tiled, from, ahead(), out);
    for (int64_t row = tiled; row < x.rows; row += kTogether)
      WithRows(x.rows - row, [&](auto many) {
        GroupedRows<kind, many()>(x, row, begin, end, from, ahead(), out + row);
      });
  }
  for (int64_t r = 0; r < x.rows; ++r)
    std::memcpy(w.y + (x.first + r) * w.outputs + panel * kPanel, out[r], lanes * sizeof(float));
}

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
  return {name,
          Form::kGroups,
          kind.block,
          kind.BlockBytes(),
          0,
          GroupedPanel<kind>,
          GroupedRow<kind>};
}

constexpr Kind kKinds[] = {
    {"bfloat16", Form::kBfloat16, 32, 32 * kPanel * 2, 0, Bfloat16Panel, Bfloat16Row},
    {"int8", Form::kDigits, 64, 64 * kPanel, kPanel * 4, Int8Panel<2, &Activations::digits>,
     Int8Row},
    {"w8a8", Form::kDigit, 64, 64 * kPanel, kPanel * 4, Int8Panel<1, &Activations::digit>,
     Int8Row},
    {"F8_E4M3", Form::kBfloat16, 128, kFloat8Bytes, 0, Float8Panel, Float8Row},
    Of<kQ4_0>("Q4_0"),
    Of<kQ4_1>("Q4_1"),
    Of<kQ5_0>("Q5_0"),
    Of<kQ5_1>("Q5_1"),
    Of<kQ8_0>("Q8_0"),
    Of<kQ4_K>("Q4_K"),
    Of<kQ5_K>("Q5_K"),
    Of<kQ6_K>("Q6_K"),
    Of<kMXFP4>("MXFP4"),
};

// Whether an array of panels, or one of bytes from `at` on, has these.
bool Holds(xla::ffi::Span<const int64_t> array, int64_t at, int64_t panels, int64_t bytes) {
  if (array.size() == 1) return at >= 0 && at + panels * bytes <= array[0];
  return array.size() == 2 && at == 0 && array[0] == panels && array[1] == bytes;
}

// The kind of this name if the array has so many weights of it, one after the other, else null.
const Kind* Find(std::string_view name, int64_t width, int64_t outputs, int64_t count,
                 xla::ffi::Span<const int64_t> array, int64_t at) {
  for (const Kind& kind : kKinds) {
    const bool fits = kind.form != Form::kGroups || width % kind.block == 0;
    if (kind.name == name && fits && width <= kLongest &&
        Holds(array, at, count * Parts(outputs, kPanel), kind.Bytes(width)))
      return &kind;
  }
  return nullptr;
}

}  // namespace
