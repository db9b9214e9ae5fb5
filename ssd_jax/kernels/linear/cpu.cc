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
#include <utility>
#include <vector>

#include "../parallel.h"
#include "../tiles.h"
#include "activations.h"
#include "kinds.h"
#include "panel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kGrainBytes = 1 << 16;  // of weights; less is not worth a thread's waking

// A weight that a call multiplies; of experts, the first one's.
struct Operand {
  const Kind* kind;
  Weight weight;
};

// A weight and rows that it is multiplied with.
struct Job {
  const Activations* rows;
  Operand operand;
};

ffi::Error Refused(std::string_view name) {
  return ffi::Error::InvalidArgument("weights are not packed as " + std::string(name));
}

// The weights of a call, of `experts` each. `offsets`: the byte of its array at which each begins;
// `kinds`: their names, with a space after each; `cache_resident`: in a cache from call to call.
ffi::ErrorOr<std::vector<Operand>> Operands(const ffi::RemainingArgs& panels,
                                            const ffi::RemainingRets& ys, const int64_t* offsets,
                                            std::string_view kinds, int64_t width, int64_t experts,
                                            bool cache_resident) {
  std::vector<Operand> operands;
  for (size_t i = 0; i < panels.size(); ++i) {
    const auto w = panels.get<ffi::Buffer<ffi::U8>>(i);
    auto y = ys.get<ffi::Buffer<ffi::F32>>(i);
    if (w.has_error()) return ffi::Unexpected(w.error());
    if (y.has_error()) return ffi::Unexpected(y.error());
    const size_t space = kinds.find(' ');
    const auto name = kinds.substr(0, space);
    const int64_t outputs = (*y)->dimensions()[1];
    const Kind* kind = Find(name, width, outputs, experts, w->dimensions(), offsets[i]);
    if (kind == nullptr) return ffi::Unexpected(Refused(name));
    kinds.remove_prefix(space + 1);
    const char* first = reinterpret_cast<const char*>(w->typed_data()) + offsets[i];
    operands.push_back(
        {kind, {first, kind->Bytes(width), outputs, (*y)->typed_data(), cache_resident}});
  }
  return operands;
}

// Parts of the loop are panels of the jobs, in their order.
void Multiply(ffi::ThreadPool& pool, const std::vector<Job>& jobs, bool tiles) {
  std::vector<int64_t> ends;  // panels of each job and all before it
  int64_t count = 0, bytes = 0;
  for (const Job& job : jobs) {
    const Weight& weight = job.operand.weight;
    count += weight.Panels();
    bytes += weight.Panels() * weight.panel_bytes;
    ends.push_back(count);
  }
  const int64_t grain = std::max<int64_t>(1, kGrainBytes * count / std::max<int64_t>(1, bytes));
  parallel::For(pool, count, grain, [&](int64_t begin, int64_t end) {
    const Tiles configured(tiles);
    size_t at = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (int64_t i = begin; i < end; ++i) {
      while (i >= ends[at]) ++at;
      const auto& [kind, weight] = jobs[at].operand;
      kind->multiply(*jobs[at].rows, weight, i - ends[at] + weight.Panels(), tiles);
    }
  });
}

// One product for each weight. Rows are normed first where there are weights of a norm. `offsets`:
// the byte at which the norm begins in its array, and a weight's panels in each of theirs.
ffi::Error Products(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer norm,
                    ffi::RemainingArgs panels, ffi::RemainingRets ys, ffi::Span<const int64_t> offsets,
                    std::string_view kinds, float eps, bool cache_resident) {
  const auto in = x.dimensions();
  if (offsets.size() != panels.size() + 1)
    return ffi::Error::InvalidArgument("every array has a place to begin at");
  const int64_t normed = norm.size_bytes(), wanted = 4 * in[1];
  const bool own = norm.element_type() == ffi::F32;
  if (normed != 0 && (own ? normed != wanted : !Holds({&normed, 1}, offsets[0], 1, wanted)))
    return ffi::Error::InvalidArgument("a norm has one weight an input");
  const char* first = static_cast<const char*>(norm.untyped_data()) + (own ? 0 : offsets[0]);
  const float* weights = normed == 0 ? nullptr : reinterpret_cast<const float*>(first);
  const auto operands =
      Operands(panels, ys, offsets.begin() + 1, kinds, in[1], 1, cache_resident);
  if (operands.has_error()) return operands.error();
  const bool tiles = kHasTiles && TilesAllowed();
  Activations rows({x.typed_data(), in[0], in[1], weights, eps}, tiles);
  std::vector<Job> jobs;
  for (const Operand& operand : *operands) {
    rows.Need(operand.kind->form);
    jobs.push_back({&rows, operand});
  }
  for (int64_t first = 0; first < in[0]; first += rows.block) {
    rows.Begin(first);
    parallel::For(pool, Parts(rows.rows, kTile), 1, [&](int64_t begin, int64_t end) {
      rows.Make(begin * kTile, std::min(end * kTile, rows.rows));
    });
    Multiply(pool, jobs, tiles);
  }
  return ffi::Error::Success();
}

// Rows that follow each other and belong to one expert, as its weights multiply them.
struct ExpertRows {
  int64_t expert, first;  // row of the call
  Activations rows;
};

// Products of some experts' rows with these experts' weights.
void MultiplyExperts(ffi::ThreadPool& pool, std::vector<ExpertRows>& groups,
                     const std::vector<Operand>& operands, bool tiles) {
  std::vector<std::pair<const Activations*, int64_t>> parts;  // of up to kTile rows, from one on
  std::vector<Job> jobs;
  int64_t count = 0;
  for (auto& [expert, first, rows] : groups) {
    for (const auto& [kind, weight] : operands) {
      rows.Need(kind->form);
      const char* panels = weight.panels + expert * weight.Panels() * weight.panel_bytes;
      float* y = weight.y + first * weight.outputs;
      const Weight own{panels, weight.panel_bytes, weight.outputs, y, weight.cache_resident};
      jobs.push_back({&rows, {kind, own}});
    }
    rows.Begin(0);
    for (int64_t row = 0; row < rows.rows; row += kTile) parts.push_back({&rows, row});
    count += rows.rows;
  }
  if (groups.empty()) return;
  const int64_t grain = std::max<int64_t>(1, kTile * parts.size() / count);
  parallel::For(pool, parts.size(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto [rows, row] = parts[i];
      rows->Make(row, std::min(row + kTile, rows->rows));
    }
  });
  Multiply(pool, jobs, tiles);
}

// One product for each weight, which every expert has: of its rows, `sizes` of them, which follow
// those of the experts before it. Rows of none give zeros; weights of experts without rows are not
// read. Attributes: see `Products`.
ffi::Error ExpertProducts(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> sizes,
                          ffi::RemainingArgs panels, ffi::RemainingRets ys,
                          ffi::Span<const int64_t> offsets, std::string_view kinds,
                          bool cache_resident) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const int64_t experts = sizes.dimensions()[0];
  if (offsets.size() != panels.size())
    return ffi::Error::InvalidArgument("every array has a place to begin at");
  const auto operands =
      Operands(panels, ys, offsets.begin(), kinds, width, experts, cache_resident);
  if (operands.has_error()) return operands.error();
  const bool tiles = kHasTiles && TilesAllowed();
  std::vector<ExpertRows> groups;  // that are rounded, and then multiplied, together
  int64_t first = 0, together = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t size = sizes.typed_data()[expert], end = first + size;
    if (size < 0 || end > rows)
      return ffi::Error::InvalidArgument("experts have other rows than there are");
    while (first < end) {
      const int64_t count = std::min(kMostRows, end - first);
      if (together + count > kMostRows) {
        MultiplyExperts(pool, groups, *operands, tiles);
        groups.clear();
        together = 0;
      }
      const float* from = x.typed_data() + first * width;
      groups.push_back({expert, first, Activations({from, count, width, nullptr, 0}, tiles)});
      first += count;
      together += count;
    }
  }
  MultiplyExperts(pool, groups, *operands, tiles);
  for (const auto& [kind, weight] : *operands)
    std::fill(weight.y + first * weight.outputs, weight.y + rows * weight.outputs, 0.0f);
  return ffi::Error::Success();
}

// Rows of a weight, as float32; an index that is no row gives NaN.
ffi::Error Take(ffi::Buffer<ffi::S32> indices, ffi::Buffer<ffi::U8> panels,
                ffi::ResultBuffer<ffi::F32> y, std::string_view kind_name, int64_t outputs) {
  const int64_t width = y->dimensions()[1];
  const Kind* kind = Find(kind_name, width, outputs, 1, panels.dimensions(), 0);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(ssd_jax_linear_expert_products, ExpertProducts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("offsets")
                                  .Attr<std::string_view>("kinds")
                                  .Attr<bool>("cache_resident"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ssd_jax_linear_take, Take,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<std::string_view>("kind")
                                  .Attr<int64_t>("outputs"));
