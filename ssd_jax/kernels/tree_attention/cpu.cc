// Attention of queries over pages and branches of keys and values, for XLA's CPU backend.

#include <algorithm>
#include <cstdint>

#include "../parallel.h"
#include "call.h"
#include "task.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kGrain = 1024;  // positions times queries; less is not worth a thread's waking
constexpr int64_t kPreparation = 4;  // queries that cost as much as a block's transposition

template <typename Number>
void Run(const Call& call, ffi::ThreadPool& pool) {
  const int64_t tiles = (call.Queries() + kTile - 1) / kTile;
  int64_t positions = 0;
  for (int64_t row = 0; row < call.rows; ++row) positions += call.Seen(row);
  const int64_t queries = call.Queries() + kPreparation * tiles;
  const int64_t work = positions * call.kv_heads * queries;
  const int64_t tasks = call.rows * call.kv_heads * tiles;
  parallel::For(pool, tasks, work < kGrain ? tasks : 1, [&](int64_t begin, int64_t end) {
    const Tiles configured(call.tiles);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / tiles;
      Task<Number>(call, head / call.kv_heads, head % call.kv_heads, i % tiles * kTile).Run();
    }
  });
}

bool IsBits(ffi::DataType type) { return type == ffi::U16 || type == ffi::BF16; }

ffi::Error Refused(const char* why) { return ffi::Error::InvalidArgument(why); }

// `others`: of branches, keys beside values, and paths; with a window, the first position that each
// query sees; sinks. `tiles`: whether tiles may compute products.
ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv,
                  ffi::Buffer<ffi::S32> table,
                  ffi::Buffer<ffi::S32> visible, ffi::RemainingArgs others,
                  ffi::ResultBuffer<ffi::F32> out, bool tiles, bool window, bool sinks, float scale,
                  float soft_cap) {
  const auto queries = q.dimensions(), pages = kv.dimensions();
  const bool bits = IsBits(kv.element_type()), narrow = IsBits(q.element_type());
  if (!bits && kv.element_type() != ffi::F32)
    return Refused("pages are neither float32 nor bfloat16");
  if (!narrow && q.element_type() != ffi::F32) return Refused("q is neither float32 nor bfloat16");
  if (pages[2] % kBlock != 0) return Refused("page_size is no multiple of 64");
  if (pages[3] != 2 * queries[3]) return Refused("pages are not keys beside values of q's size");
  Call call = {queries[0], queries[1], queries[2], pages[1], queries[3], pages[0], pages[2],
               table.dimensions()[1]};
  call.q = q.untyped_data();
  call.narrow = narrow;
  call.kv = kv.untyped_data();
  call.table = table.typed_data();
  call.visible = visible.typed_data();
  call.out = out->typed_data();
  call.scale = scale;
  call.soft_cap = soft_cap;
  const int64_t of_branches = others.size() - window - sinks;
  if (window) {
    const auto first = others.get<ffi::Buffer<ffi::S32>>(of_branches);
    if (first.has_error()) return first.error();
    call.first = first->typed_data();
  }
  if (sinks) {
    const auto of_heads = others.get<ffi::Buffer<ffi::F32>>(of_branches + window);
    if (of_heads.has_error()) return of_heads.error();
    call.sinks = of_heads->typed_data();
  }
  if (of_branches == 2) {
    const auto branch_kv = others.get<ffi::AnyBuffer>(0);
    const auto paths = others.get<ffi::Buffer<ffi::S32>>(1);
    if (paths.has_error()) return paths.error();
    if (branch_kv->element_type() != kv.element_type() || branch_kv->dimensions()[4] != pages[3])
      return Refused("branches are not stored as pages are");
    if (branch_kv->dimensions()[2] > kMostEntries) return Refused("a branch has more than 31 entries");
    call.entries = branch_kv->dimensions()[2];
    call.branches = branch_kv->dimensions()[3];
    call.branch_kv = branch_kv->untyped_data();
    call.paths = paths->typed_data();
  }
  call.tiles = tiles && kHasTiles && bits && narrow && call.size % kPairs == 0 && TilesAllowed();
  if (bits)
    Run<uint16_t>(call, pool);
  else
    Run<float>(call, pool);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ssd_jax_tree_attention, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("tiles")
                                  .Attr<bool>("window")
                                  .Attr<bool>("sinks")
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap"));
