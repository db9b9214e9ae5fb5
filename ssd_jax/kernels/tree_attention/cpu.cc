// Attention of queries over pages and branches of keys and values, for XLA's CPU backend.
//
// A task is a row, a key/value head and some of the queries that share it. It goes once over the
// row's positions, in blocks: transposes the block's keys, so that a lane is a position, and merges
// the block into every query's running softmax. All of a query's sums are made in the order of
// positions, and blocks begin at multiples of kBlock, whatever runs beside it: its bits depend on it
// alone. What a query does not see is multiplied with nothing, so that it may be NaN.
//
// Everything is float32; keys and values are float32, or bits of bfloat16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "../parallel.h"
#include "../vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kBlock = 64;  // positions; divides kv_pages.BLOCK
constexpr int64_t kTile = 32;   // queries of a task
constexpr int64_t kGrain = 4096;  // positions times queries; less is not worth a thread's waking
constexpr int64_t kPreparation = 4;  // queries that cost as much as a block's transposition
constexpr float kLowest = -1e30f;

#if defined(__AVX512F__)
constexpr int kTogether = 4;  // queries of one pass over a block
constexpr int kVectors = 4;   // of positions at a time
#else
constexpr int kTogether = 2;
constexpr int kVectors = 1;
#endif

inline int64_t Clamp(int64_t value, int64_t most) {
  return std::clamp<int64_t>(value, 0, most);
}

// ---------------------------------------------------------------- vectors

// 2^x, for x <= 0; 0 below 2^-125. Off by at most 1 unit in the last place.
inline Floats Exp2(Floats x) {
  constexpr float kSmallest = -125, kRound = 12582912;  // adding 1.5 * 2^23 rounds to integers
  const Floats at = x < kSmallest ? Floats{} + kSmallest : x;
  const Floats whole = (at + kRound) - kRound, part = at - whole;
  Floats p = Floats{} + 0x1.41fbbcp-13f;
  p = p * part + 0x1.5f3e54p-10f;
  p = p * part + 0x1.3b2d4cp-7f;
  p = p * part + 0x1.c6aee8p-5f;
  p = p * part + 0x1.ebfbdcp-3f;
  p = p * part + 0x1.62e430p-1f;
  p = p * part + 1.0f;
  const Floats scale = (Floats)((__builtin_convertvector(whole, Ints) + 127) << 23);
  return x < kSmallest ? Floats{} : p * scale;
}

inline float Sum(Floats x) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof(x));
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

inline float Largest(Floats x) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof(x));
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] = std::max(lanes[i], lanes[i + half]);
  return lanes[0];
}

inline void Store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

// The transpose of 16 x 16 words, in place.
inline void Transpose(Words (&rows)[kLanes]) {
  for (int round = 0; round < 4; ++round) {
    Words mixed[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      mixed[2 * i] = __builtin_shufflevector(rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4,
                                             20, 5, 21, 6, 22, 7, 23);
      mixed[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27,
                                                 12, 28, 13, 29, 14, 30, 15, 31);
    }
    std::memcpy(rows, mixed, sizeof(mixed));
  }
}

// ---------------------------------------------------------------- keys and values

// A key or value of `size` numbers is read a chunk of 16 words at a time. What is computed from it
// is in packed order: of a chunk of bfloat16, first its numbers of even index, then the others.
// Beyond `size` there are zeros.
template <typename Number>
struct Chunks {
  static constexpr int kParts = sizeof(float) / sizeof(Number);  // vectors that a chunk makes
  static constexpr int64_t kNumbers = kParts * kLanes;

  explicit Chunks(int64_t size) : size(size), count((size + kNumbers - 1) / kNumbers) {}

  const int64_t size, count;

  int64_t Width() const { return count * kNumbers; }

  int64_t Packed(int64_t index) const {
    const int64_t within = index % kNumbers;
    return index - within + within % kParts * kLanes + within / kParts;
  }

  Words Read(const Number* from, int64_t chunk) const {
    from += chunk * kNumbers;
    if ((chunk + 1) * kNumbers <= size) return Load<Words>(from);
    Words words = {};
    std::memcpy(&words, from, (size - chunk * kNumbers) * sizeof(Number));
    return words;
  }

  static Floats Part(Words words, int part) {
    if constexpr (kParts == 1) return (Floats)words;
    return (Floats)(part == 0 ? words << 16 : words & 0xffff0000u);
  }
};

// Keys of `positions`, rounded up to vectors, as [width, kBlock].
template <typename Number>
void TransposeKeys(const Chunks<Number>& chunks, const Number* keys, int64_t positions,
                   float* out) {
  for (int64_t first = 0; first < positions; first += kLanes) {
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      Words words[kLanes];
      for (int64_t i = 0; i < kLanes; ++i)
        words[i] = chunks.Read(keys + (first + i) * chunks.size, chunk);
      Transpose(words);
      for (int part = 0; part < chunks.kParts; ++part)
        for (int64_t i = 0; i < kLanes; ++i)
          Store(out + (chunk * chunks.kNumbers + part * kLanes + i) * kBlock + first,
                chunks.Part(words[i], part));
    }
  }
}

// Products of queries [many, width] with kParts vectors of transposed keys.
template <int kMany, int kParts>
inline void Products(const float* q, int64_t width, const float* keys, float* scores) {
  Floats sums[kMany][kParts] = {};
  for (int64_t d = 0; d < width; ++d) {
    Floats key[kParts];
    for (int v = 0; v < kParts; ++v) key[v] = Load<Floats>(keys + d * kBlock + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kMany; ++r)
      for (int v = 0; v < kParts; ++v) sums[r][v] += key[v] * q[r * width + d];
  }
  for (int r = 0; r < kMany; ++r)
    for (int v = 0; v < kParts; ++v) Store(scores + r * kBlock + v * kLanes, sums[r][v]);
}

template <int kMany>
void Scores(const float* q, int64_t width, const float* keys, int64_t positions, float* scores) {
  int64_t at = 0;
  for (; at + (kVectors - 1) * kLanes < positions; at += kVectors * kLanes)
    Products<kMany, kVectors>(q, width, keys + at, scores + at);
  for (; at < positions; at += kLanes) Products<kMany, 1>(q, width, keys + at, scores + at);
}

// Adds values to sums [many, width] in the order of positions; those of `from` are `stride` apart.
template <typename Number, int kMany>
void AddValues(const Chunks<Number>& chunks, const float* weights, const Number* from,
               int64_t stride, int64_t positions, float* sums) {
  constexpr int kParts = chunks.kParts;
  for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
    float* at = sums + chunk * chunks.kNumbers;
    Floats total[kMany][kParts];
    for (int r = 0; r < kMany; ++r)
      for (int p = 0; p < kParts; ++p)
        total[r][p] = Load<Floats>(at + r * chunks.Width() + p * kLanes);
    for (int64_t t = 0; t < positions; ++t) {
      const Words words = chunks.Read(from + t * stride, chunk);
#pragma GCC unroll 4
      for (int r = 0; r < kMany; ++r)
        for (int p = 0; p < kParts; ++p)
          total[r][p] += chunks.Part(words, p) * weights[r * kBlock + t];
    }
    for (int r = 0; r < kMany; ++r)
      for (int p = 0; p < kParts; ++p) Store(at + r * chunks.Width() + p * kLanes, total[r][p]);
  }
}

// ---------------------------------------------------------------- softmax

// A query's softmax so far; its weighted sum of values, not normalised, lies elsewhere.
struct Softmax {
  float maximum = kLowest;  // of scores, which are in units of log 2
  Floats total = {};
};

// Turns a block's scores into weights, those beyond `seen` into zeros. Never inlined, so that it is
// the same instructions for every query.
__attribute__((noinline)) void Weigh(float* scores, int64_t seen, Softmax& state, float* sums,
                                     int64_t width) {
  constexpr Ints kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  constexpr int kCount = kBlock / kLanes;
  Floats score[kCount], best = Floats{} + kLowest;
  for (int v = 0; v < kCount; ++v) {
    const Ints unseen = kLane + v * int32_t(kLanes) >= int32_t(seen);
    score[v] = unseen ? Floats{} - INFINITY : Load<Floats>(scores + v * kLanes);
    best = score[v] > best ? score[v] : best;
  }
  const float maximum = Largest(best);
  if (maximum > state.maximum) {
    const Floats scale = Exp2(Floats{} + (state.maximum - maximum));
    state.total *= scale;
    for (int64_t d = 0; d < width; d += kLanes) Store(sums + d, Load<Floats>(sums + d) * scale);
    state.maximum = maximum;
  }
  for (int v = 0; v < kCount; ++v) {
    const Floats weights = Exp2(score[v] - state.maximum);
    state.total += weights;
    Store(scores + v * kLanes, weights);
  }
}

// ---------------------------------------------------------------- a task

// The sizes and arrays of a call; see api.py.
struct Call {
  int64_t rows, tokens, heads, kv_heads, size, pages, page_size, row_pages, depths, branches;
  const void *q, *keys, *values, *branch_keys, *branch_values;
  bool narrow;  // q has bits of bfloat16
  const int32_t *table, *visible, *ancestors;
  float* out;

  int64_t Group() const { return heads / kv_heads; }
  int64_t Queries() const { return tokens * Group(); }  // of a row and key/value head
  int64_t Capacity() const { return row_pages * page_size; }

  float Query(int64_t index) const {
    if (!narrow) return static_cast<const float*>(q)[index];
    const uint32_t bits = static_cast<const uint16_t*>(q)[index] << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
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
        q_(memory_[0].words), sums_(q_ + kTile * width_), keys_(sums_ + kTile * width_) {
    std::fill_n(q_, 2 * kTile * width_, 0.0f);
    const float scale = 1.44269504f / std::sqrt(float(call.size));
    for (int64_t i = 0; i < many_; ++i) {
      seen_[i] = Clamp(call.visible[row * call.tokens + Token(i)], call.Capacity());
      for (int64_t d = 0; d < call.size; ++d)
        q_[i * width_ + chunks_.Packed(d)] = call.Query(Index(i) + d) * scale;
    }
  }

  void Run() {
    const int64_t most = *std::max_element(seen_, seen_ + many_);
    for (int64_t begin = 0; begin < most; begin += kBlock) AddBlock(begin, most - begin);
    if (call_.depths > 0)
      for (int64_t i = 0; i < many_; ++i) AddBranch(i);
    for (int64_t i = 0; i < many_; ++i) {
      const float total = Sum(state_[i].total), divisor = total == 0 ? 1 : total;
      for (int64_t d = 0; d < call_.size; ++d)
        call_.out[Index(i) + d] = sums_[i * width_ + chunks_.Packed(d)] / divisor;
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

  void AddBlock(int64_t begin, int64_t most) {
    const int64_t page = call_.table[row_ * call_.row_pages + begin / call_.page_size];
    const int64_t at = (Clamp(page, call_.pages - 1) * call_.kv_heads + head_) * call_.page_size +
                       begin % call_.page_size;
    const Number* values = static_cast<const Number*>(call_.values) + at * call_.size;
    TransposeKeys(chunks_, static_cast<const Number*>(call_.keys) + at * call_.size,
                  std::min(most, kBlock), keys_);
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
    AddValues<Number, kMany>(chunks_, weights, values, call_.size, least, sums);
    for (int r = 0; r < kMany; ++r)
      if (seen[r] > least)
        AddValues<Number, 1>(chunks_, weights + r * kBlock + least, values + least * call_.size,
                             call_.size, seen[r] - least, sums + r * width_);
  }

  // Merges what query i sees of its branch.
  void AddBranch(int64_t i) {
    const int32_t* ancestor = call_.ancestors + 2 * (row_ * call_.tokens + Token(i));
    const int64_t branch = ancestor[0], stride = call_.branches * call_.size;
    if (branch < 0 || branch >= call_.branches) return;
    const int64_t seen = Clamp(ancestor[1] + 1, call_.depths);
    const int64_t at = (row_ * call_.kv_heads + head_) * call_.depths * stride + branch * call_.size;
    const Number* keys = static_cast<const Number*>(call_.branch_keys) + at;
    const Number* values = static_cast<const Number*>(call_.branch_values) + at;
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
        sum += chunks_.Part(words, part) * Load<Floats>(q);
    }
    return Sum(sum);
  }

  const Call& call_;
  const Chunks<Number> chunks_;
  const int64_t row_, head_, first_, many_, width_;
  const std::unique_ptr<Line[]> memory_;
  float *const q_, *const sums_;  // [kTile, width]
  float* const keys_;             // [width, kBlock]
  int64_t seen_[kTile];
  Softmax state_[kTile];
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
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / tiles;
      Task<Number>(call, head / call.kv_heads, head % call.kv_heads, i % tiles * kTile).Run();
    }
  });
}

bool IsBits(ffi::DataType type) { return type == ffi::U16 || type == ffi::BF16; }

// `branches`: none, or keys, values and ancestors.
ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer keys,
                  ffi::AnyBuffer values, ffi::Buffer<ffi::S32> table,
                  ffi::Buffer<ffi::S32> visible, ffi::RemainingArgs branches,
                  ffi::ResultBuffer<ffi::F32> out) {
  const auto queries = q.dimensions(), pages = keys.dimensions();
  Call call = {queries[0], queries[1], queries[2], pages[1], queries[3], pages[0], pages[2],
               table.dimensions()[1]};
  call.q = q.untyped_data();
  call.narrow = IsBits(q.element_type());
  call.keys = keys.untyped_data();
  call.values = values.untyped_data();
  call.table = table.typed_data();
  call.visible = visible.typed_data();
  call.out = out->typed_data();
  if (call.page_size % kBlock != 0)
    return ffi::Error::InvalidArgument("page_size is no multiple of " + std::to_string(kBlock));
  if (branches.size() == 3) {
    const auto branch_keys = branches.get<ffi::AnyBuffer>(0);
    const auto branch_values = branches.get<ffi::AnyBuffer>(1);
    const auto ancestors = branches.get<ffi::Buffer<ffi::S32>>(2);
    if (ancestors.has_error()) return ancestors.error();
    call.depths = branch_keys->dimensions()[2];
    call.branches = branch_keys->dimensions()[3];
    call.branch_keys = branch_keys->untyped_data();
    call.branch_values = branch_values->untyped_data();
    call.ancestors = ancestors->typed_data();
  }
  if (IsBits(keys.element_type()))
    Run<uint16_t>(call, pool);
  else if (keys.element_type() == ffi::F32)
    Run<float>(call, pool);
  else
    return ffi::Error::InvalidArgument("pages are neither float32 nor bfloat16");
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ssd_jax_tree_attention, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>());
