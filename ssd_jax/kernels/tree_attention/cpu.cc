// Attention of queries over pages and branches of keys and values, for XLA's CPU backend.
//
// A task is a row, a key/value head and some of the queries that share it. It goes once over the
// row's positions, in blocks, and merges each into every query's running softmax. All of a query's
// sums are made in the order of positions, and blocks begin at multiples of kBlock, whatever runs
// beside it: its bits depend on it alone. What a query does not see is multiplied with nothing, so
// that it may be NaN.
//
// Keys and values are float32, or bits of bfloat16. Where queries are bfloat16, too, AMX tiles make
// the products, if there are any; else vectors do, in float32. Branches are always for vectors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "../parallel.h"
#include "softmax.h"
#include "tile_products.h"
#include "vector_products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kTile = 32;   // queries of a task
constexpr int64_t kGrain = 1024;  // positions times queries; less is not worth a thread's waking
constexpr int64_t kPreparation = 4;  // queries that cost as much as a block's transposition

inline int64_t Clamp(int64_t value, int64_t most) {
  return std::clamp<int64_t>(value, 0, most);
}

// ---------------------------------------------------------------- a task

// The sizes and arrays of a call; see api.py.
struct Call {
  int64_t rows, tokens, heads, kv_heads, size, pages, page_size, row_pages, depths, branches;
  const void *q, *kv, *branch_kv;
  bool narrow;  // q has bits of bfloat16
  bool tiles;
  const int32_t *table, *visible, *ancestors;
  float* out;

  int64_t Group() const { return heads / kv_heads; }
  int64_t Queries() const { return tokens * Group(); }  // of a row and key/value head
  int64_t Capacity() const { return row_pages * page_size; }
  int64_t Stride() const { return 2 * size; }  // from a key or value to the next position's

  void ReadQuery(int64_t index, float* to) const {
    if (!narrow) {
      std::copy_n(static_cast<const float*>(q) + index, size, to);
      return;
    }
    for (int64_t d = 0; d < size; ++d) {
      const uint32_t bits = static_cast<const uint16_t*>(q)[index + d] << 16;
      std::memcpy(to + d, &bits, sizeof(bits));
    }
  }

  int64_t Seen(int64_t row) const {
    const int32_t* of_row = visible + row * tokens;
    return Clamp(*std::max_element(of_row, of_row + tokens), Capacity());
  }
};

template <typename Number>
class Task {
 public:
  Task(const Call& call, int64_t row, int64_t head, int64_t first)
      : call_(call), chunks_(call.size), row_(row), head_(head), first_(first),
        many_(std::min(kTile, call.Queries() - first)), width_(chunks_.Width()),
        memory_(new Line[(2 * kTile + kBlock) * width_ / kLanes]),
        scale_(1.44269504f / std::sqrt(float(call.size))), q_(memory_[0].words),
        sums_(q_ + kTile * width_), keys_(sums_ + kTile * width_),
        tiled_q_(reinterpret_cast<Tile*>(keys_)), tiled_values_(tiled_q_ + kTile / kTileRows * Pairs()),
        spare_(reinterpret_cast<float*>(tiled_values_ + kParts * 2 * Pairs())) {
    std::fill_n(q_, 2 * kTile * width_, 0.0f);
    for (int64_t i = 0; i < many_; ++i) {
      seen_[i] = Clamp(call.visible[row * call.tokens + Token(i)], call.Capacity());
      if (call.tiles && call.depths == 0) continue;
      call.ReadQuery(Index(i), keys_);
      chunks_.Pack(keys_, scale_, q_ + i * width_);
    }
    if (call.tiles)
      for (int64_t i = 0; i < many_; i += kTileRows) TransposeQueries(i);
  }

  void Run() {
    const int64_t most = *std::max_element(seen_, seen_ + many_);
    while (there_ < most && PageExists(there_)) there_ += call_.page_size;
    for (int64_t begin = 0; begin < most; begin += kBlock) AddBlock(begin, most - begin);
    if (call_.depths > 0)
      for (int64_t i = 0; i < many_; ++i) AddBranch(i);
    for (int64_t i = 0; i < many_; ++i) {
      const float total = Sum(state_[i].total);
      const float divisor = !InRange(i) ? NAN : total == 0 ? 1 : total;
      chunks_.Unpack(sums_ + i * width_, divisor, call_.out + Index(i));
    }
  }

 private:
  struct alignas(64) Line {
    float words[kLanes];
  };

  int64_t Token(int64_t i) const { return (first_ + i) / call_.Group(); }

  // Where query i is in q and in the output.
  int64_t Index(int64_t i) const {
    const int64_t head = head_ * call_.Group() + (first_ + i) % call_.Group();
    return ((row_ * call_.tokens + Token(i)) * call_.heads + head) * call_.size;
  }

  int64_t Page(int64_t position) const {
    return call_.table[row_ * call_.row_pages + position / call_.page_size];
  }

  bool PageExists(int64_t position) const {
    return Page(position) >= 0 && Page(position) < call_.pages;
  }

  // Whether all exists that query i sees.
  bool InRange(int64_t i) const {
    const int64_t token = row_ * call_.tokens + Token(i);
    if (call_.visible[token] > there_) return false;
    if (call_.depths == 0) return true;
    const int32_t branch = call_.ancestors[2 * token], depth = call_.ancestors[2 * token + 1];
    return branch >= 0 && branch < call_.branches && depth >= -1 && depth < call_.depths;
  }

  // The keys of a block of positions, each with its value behind it.
  const Number* Block(int64_t head, int64_t begin) const {
    const int64_t page = Clamp(Page(begin), call_.pages - 1);
    const int64_t at = (page * call_.kv_heads + head) * call_.page_size + begin % call_.page_size;
    return static_cast<const Number*>(call_.kv) + at * call_.Stride();
  }

  void AddBlock(int64_t begin, int64_t most) {
    const Number *keys = Block(head_, begin), *values = keys + call_.size;
    if constexpr (std::is_same_v<Number, uint16_t>)
      if (call_.tiles) return AddTiled(begin, keys, values);
    const Number* next = most > kBlock                  ? Block(head_, begin + kBlock)
                         : head_ + 1 < call_.kv_heads ? Block(head_ + 1, 0)
                                                      : keys;
    TransposeKeys(chunks_, keys, call_.Stride(), std::min(most, kBlock), keys_, next);
    for (int64_t i = 0; i < many_; i += kTogether) {
      const int64_t many = std::min<int64_t>(kTogether, many_ - i);
      if (many == kTogether)
        AddTo<kTogether>(i, begin, values);
      else
        AddToFew<kTogether - 1>(many, i, begin, values);
    }
  }

  template <int kMany>
  void AddToFew(int64_t many, int64_t i, int64_t begin, const Number* values) {
    if (kMany == 1 || many == kMany) return AddTo<kMany>(i, begin, values);
    if constexpr (kMany > 1) AddToFew<kMany - 1>(many, i, begin, values);
  }

  // Merges a block, whose keys are transposed, into queries i .. i + kMany.
  template <int kMany>
  void AddTo(int64_t i, int64_t begin, const Number* values) {
    int64_t seen[kMany];
    for (int r = 0; r < kMany; ++r) seen[r] = Clamp(seen_[i + r] - begin, kBlock);
    const int64_t least = *std::min_element(seen, seen + kMany);
    float *q = q_ + i * width_, *sums = sums_ + i * width_;
    alignas(64) float weights[kMany * kBlock];
    Scores<kMany>(q, width_, keys_, *std::max_element(seen, seen + kMany), weights);
    for (int r = 0; r < kMany; ++r)
      if (seen[r] > 0) Weigh(weights + r * kBlock, seen[r], state_[i + r], sums + r * width_, width_);
    AddValues<Number, kMany>(chunks_, weights, values, call_.Stride(), least, sums);
    for (int r = 0; r < kMany; ++r)
      if (seen[r] > least)
        AddValues<Number, 1>(chunks_, weights + r * kBlock + least,
                             values + least * call_.Stride(), call_.Stride(), seen[r] - least,
                             sums + r * width_);
  }

  int64_t Pairs() const { return width_ / kPairs; }  // tiles of 16 queries

  // The words of queries i .. i + 16, as `TileScores` has them.
  void TransposeQueries(int64_t i) {
    for (int64_t pairs = 0; pairs < Pairs(); ++pairs) {
      Tile& tile = tiled_q_[i / kTileRows * Pairs() + pairs] = {};
      for (int64_t r = 0; r < std::min(kTileRows, many_ - i); ++r)
        tile.rows[r] = Load<Words>(static_cast<const uint16_t*>(call_.q) + Index(i + r) +
                                   pairs * kPairs);
      Transpose(tile.rows);
    }
  }

  // Merges a block into all queries by tiles.
  void AddTiled(int64_t begin, const uint16_t* keys, const uint16_t* values) {
    int64_t paired[kParts] = {};  // positions for which `tiled_values_` are
    for (int64_t i = 0; i < many_; i += kTileRows) {
      const int64_t many = std::min(kTileRows, many_ - i);
      int64_t seen[kTileRows];
      for (int64_t r = 0; r < many; ++r) seen[r] = Clamp(seen_[i + r] - begin, kBlock);
      alignas(64) float weights[kTileRows * kBlock];
      TileScores(tiled_q_ + i / kTileRows * Pairs(), call_.size, keys, call_.Stride(),
                 *std::max_element(seen, seen + many), many, scale_, weights);
      float* sums = sums_ + i * width_;
      for (int64_t r = 0; r < many; ++r) {
        if (seen[r] == 0) continue;
        Weigh(weights + r * kBlock, seen[r], state_[i + r], sums + r * width_, width_);
        Split(weights + r * kBlock, r, split_);
      }
      if (*std::min_element(seen, seen + many) == kBlock) {
        for (int64_t part = 0; part < kParts; ++part) Pair(part, kPairs, values, paired);
        AddPaired(split_, 0, kParts, tiled_values_, width_, sums, sums);
        continue;
      }
      for (int64_t part = 0; part < kParts; ++part) AddPart(part, values, seen, many, sums, paired);
    }
  }

  // Makes the tiles of the first positions of a part of a block, if they are not there.
  void Pair(int64_t part, int64_t positions, const uint16_t* values, int64_t* paired) {
    if (paired[part] == positions) return;
    PairValues(values + part * kPairs * call_.Stride(), call_.size, call_.Stride(), positions,
               tiled_values_ + part * 2 * Pairs());
    paired[part] = positions;
  }

  // Adds the values of a part of a block to sums of queries, those together that see as much of it:
  // what one does not see shall not meet another's weights.
  void AddPart(int64_t part, const uint16_t* values, const int64_t* seen, int64_t many, float* sums,
               int64_t* paired) {
    const auto of_part = [&](int64_t r) { return Clamp(seen[r] - part * kPairs, kPairs); };
    uint32_t left = 0;
    for (int64_t r = 0; r < many; ++r) left |= uint32_t(of_part(r) > 0) << r;
    while (left != 0) {
      const int64_t positions = of_part(__builtin_ctz(left));
      uint32_t same = 0;
      for (int64_t r = 0; r < many; ++r) same |= uint32_t(of_part(r) == positions) << r;
      left &= ~same;
      Pair(part, positions, values, paired);
      const bool all = same == (1u << many) - 1;
      AddPaired(split_, part, part + 1, tiled_values_, width_, sums, all ? sums : spare_);
      for (int64_t r = 0; !all && r < many; ++r)
        if (same >> r & 1) std::copy_n(spare_ + r * width_, width_, sums + r * width_);
    }
  }

  // Merges what query i sees of its branch.
  void AddBranch(int64_t i) {
    const int32_t* ancestor = call_.ancestors + 2 * (row_ * call_.tokens + Token(i));
    const int64_t branch = ancestor[0], stride = call_.branches * call_.Stride();
    if (branch < 0 || branch >= call_.branches) return;
    const int64_t seen = Clamp(ancestor[1] + 1, call_.depths);
    const int64_t at =
        (row_ * call_.kv_heads + head_) * call_.depths * stride + branch * call_.Stride();
    const Number* keys = static_cast<const Number*>(call_.branch_kv) + at;
    const Number* values = keys + call_.size;
    alignas(64) float weights[kBlock] = {};
    for (int64_t begin = 0; begin < seen; begin += kBlock) {
      const int64_t many = std::min(kBlock, seen - begin);
      for (int64_t depth = 0; depth < many; ++depth)
        weights[depth] = Product(q_ + i * width_, keys + (begin + depth) * stride);
      Weigh(weights, many, state_[i], sums_ + i * width_, width_);
      AddValues<Number, 1>(chunks_, weights, values + begin * stride, stride, many,
                           sums_ + i * width_);
    }
  }

  float Product(const float* q, const Number* key) const {
    Floats sum = {};
    for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
      const Words words = chunks_.Read(key, chunk);
      for (int part = 0; part < chunks_.kParts; ++part, q += kLanes)
        sum = MulAdd(chunks_.Part(words, part), Load<Floats>(q), sum);
    }
    return Sum(sum);
  }

  const Call& call_;
  const Chunks<Number> chunks_;
  const int64_t row_, head_, first_, many_, width_;
  const std::unique_ptr<Line[]> memory_;
  const float scale_;
  float *const q_, *const sums_;  // [kTile, width]
  float* const keys_;             // [width, kBlock]; or, with tiles, the memory of what follows
  Tile *const tiled_q_, *const tiled_values_;
  float* const spare_;  // [16, width]
  int64_t seen_[kTile];
  int64_t there_ = 0;  // positions before the first page that does not exist
  Softmax state_[kTile];
  SplitWeights split_ = {};
};

// ---------------------------------------------------------------- handler

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

// `branches`: none, or keys beside values, and ancestors.
ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv,
                  ffi::Buffer<ffi::S32> table,
                  ffi::Buffer<ffi::S32> visible, ffi::RemainingArgs branches,
                  ffi::ResultBuffer<ffi::F32> out) {
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
  if (branches.size() == 2) {
    const auto branch_kv = branches.get<ffi::AnyBuffer>(0);
    const auto ancestors = branches.get<ffi::Buffer<ffi::S32>>(1);
    if (ancestors.has_error()) return ancestors.error();
    if (branch_kv->element_type() != kv.element_type() || branch_kv->dimensions()[4] != pages[3])
      return Refused("branches are not stored as pages are");
    call.depths = branch_kv->dimensions()[2];
    call.branches = branch_kv->dimensions()[3];
    call.branch_kv = branch_kv->untyped_data();
    call.ancestors = ancestors->typed_data();
  }
  call.tiles = kHasTiles && bits && narrow && call.size % kPairs == 0 && TilesAllowed();
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
                                  .Ret<ffi::Buffer<ffi::F32>>());
