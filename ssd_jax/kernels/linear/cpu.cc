// Products of rows with weight matrices that were packed once, for XLA's CPU backend.
//
// y[n, N] = x[n, K] @ w[N, K]^T in float32. Weights lie in panels of 32 outputs, each one stream of
// bytes in the order in which it is read (kinds.py has the layouts), so that memory is read once
// and in one direction. A row's sums are made in the same order whatever rows run beside it: its
// bits depend on it alone.
//
// Activations are rounded to what a kind multiplies: bfloat16, one or two int8 digits with a scale
// a row (quantized.py), or int8 with a scale for each group of 32.
//
// Compiled for the processor that runs it: AMX tiles, AVX-512 or the same loops over narrower
// vectors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "../parallel.h"
#include "../tiles.h"
#include "activations.h"
#include "grouped.h"
#include "grouped_tiles.h"
#include "panel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

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
      Sums<Form::kBfloat16>(x.Bfloat16(row, begin), count, many, from, ahead, tiles,
                            whole ? y + row * w.outputs : *own, 4 * (whole ? w.outputs : kPanel),
                            begin > 0);
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
      Sums<Form::kDigits>(x.Row(digit, begin), count, many, from, ahead, tiles, own, 4 * kPanel,
                          begin > 0);
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
    Of<kQ4_0>("Q4_0"),
    Of<kQ4_1>("Q4_1"),
    Of<kQ5_0>("Q5_0"),
    Of<kQ5_1>("Q5_1"),
    Of<kQ8_0>("Q8_0"),
    Of<kQ4_K>("Q4_K"),
    Of<kQ5_K>("Q5_K"),
    Of<kQ6_K>("Q6_K"),
};

// Whether an array of panels, or one of bytes from `at` on, has these.
bool Holds(ffi::Span<const int64_t> array, int64_t at, int64_t panels, int64_t bytes) {
  if (array.size() == 1) return at >= 0 && at + panels * bytes <= array[0];
  return array.size() == 2 && at == 0 && array[0] == panels && array[1] == bytes;
}

// The kind of this name if the array has a weight of it, else null.
const Kind* Find(std::string_view name, int64_t width, int64_t outputs,
                 ffi::Span<const int64_t> array, int64_t at) {
  for (const Kind& kind : kKinds) {
    const bool fits = kind.form != Form::kGroups || width % kind.block == 0;
    if (kind.name == name && fits && width <= kLongest &&
        Holds(array, at, RoundUp(outputs, kPanel) / kPanel, kind.Bytes(width)))
      return &kind;
  }
  return nullptr;
}

ffi::Error Refused(std::string_view name) {
  return ffi::Error::InvalidArgument("weights are not packed as " + std::string(name));
}

constexpr int64_t kGrainBytes = 1 << 16;  // of weights; less is not worth a thread's waking

// One product for each weight; `kinds`: their names, with a space after each; `cache_resident`:
// in a cache from call to call. Rows are normed first where there are weights of a norm. `offsets`:
// the byte at which the norm begins in its array, and a weight's panels in each of theirs.
ffi::Error Products(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer norm,
                    ffi::RemainingArgs panels, ffi::RemainingRets ys, ffi::Span<const int64_t> offsets,
                    std::string_view kinds, float eps, bool cache_resident) {
  struct Job {
    Weight weight;
    const Kind* kind;
    int64_t end;  // panels of this and all jobs before it
  };
  const auto in = x.dimensions();
  if (offsets.size() != panels.size() + 1)
    return ffi::Error::InvalidArgument("every array has a place to begin at");
  const int64_t normed = norm.size_bytes(), wanted = 4 * in[1];
  const bool own = norm.element_type() == ffi::F32;
  if (normed != 0 && (own ? normed != wanted : !Holds({&normed, 1}, offsets[0], 1, wanted)))
    return ffi::Error::InvalidArgument("a norm has one weight an input");
  const char* first = static_cast<const char*>(norm.untyped_data()) + (own ? 0 : offsets[0]);
  const float* weights = normed == 0 ? nullptr : reinterpret_cast<const float*>(first);
  const bool tiles = kHasTiles && TilesAllowed();
  Activations rows({x.typed_data(), in[0], in[1], weights, eps}, tiles);
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
    const Kind* kind = Find(name, rows.width, outputs, w->dimensions(), offsets[i + 1]);
    if (kind == nullptr) return Refused(name);
    kinds.remove_prefix(space + 1);
    rows.Need(kind->form);
    const Weight weight{reinterpret_cast<const char*>(w->typed_data()) + offsets[i + 1],
                        kind->Bytes(rows.width), outputs, (*y)->typed_data(), cache_resident};
    count += weight.Panels();
    bytes += weight.Panels() * weight.panel_bytes;
    jobs.push_back({weight, kind, count});
  }
  const int64_t grain = std::max<int64_t>(1, kGrainBytes * count / std::max<int64_t>(1, bytes));
  for (int64_t first = 0; first < in[0]; first += rows.block) {
    rows.Begin(first);
    parallel::For(pool, Parts(rows.rows, kTile), 1, [&](int64_t begin, int64_t end) {
      rows.Make(begin * kTile, std::min(end * kTile, rows.rows));
    });
    parallel::For(pool, count, grain, [&](int64_t begin, int64_t end) {
      const Tiles configured(tiles);
      size_t at = 0;
      for (int64_t i = begin; i < end; ++i) {
        while (i >= jobs[at].end) ++at;
        const Job& job = jobs[at];
        job.kind->multiply(rows, job.weight, i - job.end + job.weight.Panels(), tiles);
      }
    });
  }
  return ffi::Error::Success();
}

// Rows of a weight, as float32; an index that is no row gives NaN.
ffi::Error Take(ffi::Buffer<ffi::S32> indices, ffi::Buffer<ffi::U8> panels,
                ffi::ResultBuffer<ffi::F32> y, std::string_view kind_name, int64_t outputs) {
  const int64_t width = y->dimensions()[1];
  const Kind* kind = Find(kind_name, width, outputs, panels.dimensions(), 0);
  if (kind == nullptr) return Refused(kind_name);
  const char* data = reinterpret_cast<const char*>(panels.typed_data());
  const int64_t bytes = kind->Bytes(width);
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
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("offsets")
                                  .Attr<std::string_view>("kinds")
                                  .Attr<float>("eps")
                                  .Attr<bool>("cache_resident"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ssd_jax_linear_take, Take,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<std::string_view>("kind")
                                  .Attr<int64_t>("outputs"));
