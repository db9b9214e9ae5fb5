// The part of a call that a thread does at a time.
//
// A task is a row, a key/value head and some of the queries that share it. It goes once over the
// row's positions, in blocks, and merges each into every query's running softmax. All of a query's
// sums are made in the order of positions, and blocks begin at multiples of kBlock, whatever runs
// beside it: its bits depend on it alone. What a query does not see is multiplied with nothing, so
// that it may be NaN.
//
// The entries on a query's path take the positions behind what it sees of the pages, and belong to
// the same blocks: its bits are those of a query that sees them in the pages. A window hides the first
// positions, of the pages and then of the path; the others stay where they are in their blocks.
//
// Keys and values are float32, or bits of bfloat16. Where queries are bfloat16, too, AMX tiles make
// the products, if there are any and the caller allows them; else vectors do, in float32. Paths are
// always for vectors: where tiles make the other products, a path is a block of its own.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include "call.h"
#include "path.h"
#include "softmax.h"
#include "tile_products.h"
#include "vector_products.h"

namespace {

constexpr int64_t kTile = 32;  // queries of a task
constexpr int64_t kManyRows = 8;  // whose keys and values the cache does not hold
constexpr int64_t kNothing = INT32_MAX;  // the first position that a query of nothing sees

template <typename Number>
class Task {
 public:
  Task(const Call& call, int64_t row, int64_t head, int64_t first)
      : call_(call), chunks_(call.size), row_(row), head_(head), first_(first),
        many_(std::min(kTile, call.Queries() - first)), width_(chunks_.Width()),
        memory_(new Line[((2 * kTile + kBlock) * width_ + (call.entries > 0) * kTile * kBlock) /
                         kLanes]),
        scale_(call.scale > 0 ? kLog2E * call.scale : kLog2E / std::sqrt(float(call.size))),
        cap_(kLog2E * call.soft_cap), q_(memory_[0].words),
        sums_(q_ + kTile * width_), keys_(sums_ + kTile * width_),
        path_scores_(keys_ + kBlock * width_), tiled_q_(reinterpret_cast<Tile*>(keys_)),
        tiled_values_(tiled_q_ + kTile / kTileRows * Pairs()),
        spare_(reinterpret_cast<float*>(tiled_values_ + kParts * 2 * Pairs())) {
    std::fill_n(q_, 2 * kTile * width_, 0.0f);
    for (int64_t i = 0; i < many_; ++i) {
      const int64_t token = row * call.tokens + Token(i);
      seen_[i] = Clamp(call.visible[token], call.Capacity());
      unseen_[i] = call.first == nullptr ? 0 : call.first[token];
      if (call.sinks != nullptr) {
        state_[i].maximum = kLog2E * call.sinks[Head(i)];
        state_[i].total[0] = 1;
      }
      if (call.tiles && call.entries == 0) continue;
      call.ReadQuery(Index(i), keys_);
      chunks_.Pack(keys_, scale_, q_ + i * width_);
    }
    if (call.entries > 0) ScorePaths();
    if (call.tiles)
      for (int64_t i = 0; i < many_; i += kTileRows) TransposeQueries(i);
  }

  void Run() {
    const int64_t most = *std::max_element(seen_, seen_ + many_), first = FirstBlock(most);
    for (int64_t begin = first; begin < most; begin += kBlock) AddBlock(begin, most - begin, first);
    if (call_.entries > 0)
      for (int64_t i = 0; i < many_; ++i)
        if (call_.tiles || LastBlock(i) >= most) AddPath(i, 0);
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

  int64_t Head(int64_t i) const { return head_ * call_.Group() + (first_ + i) % call_.Group(); }

  // Where query i is in q and in the output.
  int64_t Index(int64_t i) const {
    return ((row_ * call_.tokens + Token(i)) * call_.heads + Head(i)) * call_.size;
  }

  // Where the first block begins that has something for a query.
  int64_t FirstBlock(int64_t most) const {
    int64_t first = most;
    for (int64_t i = 0; i < many_; ++i)
      if (unseen_[i] != kNothing) first = std::min({first, unseen_[i], LastBlock(i)});
    return first / kBlock * kBlock;
  }

  int64_t Page(int64_t row, int64_t position) const {
    return call_.table[row * call_.row_pages + position / call_.page_size];
  }

  bool PageExists(int64_t position) const {
    const int64_t page = Page(row_, position);
    return page >= 0 && page < call_.pages;
  }

  // Whether all exists that query i sees.
  bool InRange(int64_t i) const {
    const int64_t token = row_ * call_.tokens + Token(i);
    if (call_.visible[token] > call_.Capacity()) return false;
    const int64_t first_page = unseen_[i] / call_.page_size * call_.page_size;
    for (int64_t page = first_page; page < seen_[i]; page += call_.page_size)
      if (!PageExists(page)) return false;
    return call_.entries == 0 || call_.HasPath(call_.paths + 2 * token);
  }

  // The keys of a block of positions, each with its value behind it.
  const Number* Block(int64_t row, int64_t head, int64_t begin) const {
    const int64_t page = Clamp(Page(row, begin), call_.pages - 1);
    const int64_t at = (page * call_.kv_heads + head) * call_.page_size + begin % call_.page_size;
    return static_cast<const Number*>(call_.kv) + at * call_.Stride();
  }

  // What is read after the block at `begin`, behind which the row has `more` positions: its next
  // block, or the first one of the next head or row. The row's first block is at `first`.
  Stretch Next(int64_t begin, int64_t more, int64_t first) const {
    if (more > 0) return BlockOf(row_, head_, begin + kBlock, more);
    if (head_ + 1 < call_.kv_heads)
      return BlockOf(row_, head_ + 1, first, begin + kBlock + more - first);
    if (row_ + 1 == call_.rows) return {};
    const int64_t end = call_.End(row_ + 1);
    const int64_t at = (end - call_.Seen(row_ + 1)) / kBlock * kBlock;
    return end > at ? BlockOf(row_ + 1, 0, at, end - at) : Stretch{};
  }

  Stretch BlockOf(int64_t row, int64_t head, int64_t begin, int64_t positions) const {
    const int64_t numbers = std::min(positions, kBlock) * call_.Stride();
    const Number* keys = Block(row, head, begin);
    const bool far = call_.rows >= kManyRows;
    return {reinterpret_cast<const char*>(keys), numbers * int64_t{sizeof(Number)}, far};
  }

  // Merges the block that begins at `begin` into all queries; the row's first one is at `first`.
  void AddBlock(int64_t begin, int64_t most, int64_t first) {
    const Number *keys = Block(row_, head_, begin), *values = keys + call_.size;
    if constexpr (std::is_same_v<Number, uint16_t>)
      if (call_.tiles) return AddTiled(begin, keys, values);
    TransposeKeys(chunks_, Evenly<Number>{keys, call_.Stride()}, std::min(most, kBlock), keys_,
                  Next(begin, most - kBlock, first));
    InGroups(0, many_, [&](int64_t i, auto many) {
      AddTo<decltype(many)::value>(i, begin, {values, call_.Stride()});
    });
  }

  // f(i, many) for queries i .. i + many, kTogether at a time, from i = begin to `end`.
  template <typename F>
  static void InGroups(int64_t begin, int64_t end, F f) {
    for (; begin + kTogether <= end; begin += kTogether)
      f(begin, std::integral_constant<int, kTogether>());
    if (begin < end) Few<kTogether - 1>(begin, end, f);
  }

  template <int kMany, typename F>
  static void Few(int64_t begin, int64_t end, F& f) {
    if (kMany == 1 || end - begin == kMany) return f(begin, std::integral_constant<int, kMany>());
    if constexpr (kMany > 1) Few<kMany - 1>(begin, end, f);
  }

  // Merges a block, whose keys are transposed, into queries i .. i + kMany. A query's path begins in
  // its last block, and what that has no room for is merged after it.
  template <int kMany>
  void AddTo(int64_t i, int64_t begin, const Evenly<Number>& values) {
    int64_t seen[kMany], unseen[kMany];
    for (int r = 0; r < kMany; ++r) {
      seen[r] = Clamp(seen_[i + r] - begin, kBlock);
      unseen[r] = Clamp(unseen_[i + r] - begin, kBlock);
    }
    float *q = q_ + i * width_, *sums = sums_ + i * width_;
    alignas(64) float weights[kMany * kBlock];
    const int64_t most = *std::max_element(seen, seen + kMany);
    Scores<kMany>(q, width_, keys_, most, weights);
    int64_t added[kMany];  // entries of the path
    for (int r = 0; r < kMany; ++r) {
      float* const scores = weights + r * kBlock;
      if (cap_ > 0) Cap(scores, most, cap_);
      const bool last = call_.entries > 0 && LastBlock(i + r) == begin;
      added[r] = last ? std::min(PathLength(i + r), kBlock - seen[r]) : 0;
      std::copy_n(path_scores_ + (i + r) * kBlock, added[r], scores + seen[r]);
      const int64_t end = seen[r] + added[r];
      std::fill_n(scores, std::min(unseen[r], end), -INFINITY);
      if (end > unseen[r]) Weigh(scores, end, state_[i + r], sums + r * width_, width_);
    }
    // Positions that all see, if there are any, are added for all together.
    int64_t begin_all = *std::max_element(unseen, unseen + kMany);
    int64_t end_all = *std::min_element(seen, seen + kMany);
    if (begin_all >= end_all) begin_all = end_all = kBlock;
    const auto add = [&](int r, int64_t from, int64_t to) {
      if (from >= to) return;
      AddValues<Number, 1>(chunks_, weights + r * kBlock + from,
                           Evenly<Number>{values[from], values.stride}, to - from,
                           sums + r * width_);
    };
    for (int r = 0; r < kMany; ++r) add(r, unseen[r], std::min(seen[r], begin_all));
    if (begin_all < end_all)
      AddValues<Number, kMany>(chunks_, weights + begin_all,
                               Evenly<Number>{values[begin_all], values.stride},
                               end_all - begin_all, sums);
    for (int r = 0; r < kMany; ++r) {
      add(r, end_all, seen[r]);
      if (added[r] == 0) continue;
      const int64_t hidden = Clamp(unseen[r] - seen[r], added[r]);
      AddValues<Number, 1>(chunks_, weights + r * kBlock + seen[r] + hidden,
                           Path(i + r).Values(call_.size, hidden), added[r] - hidden,
                           sums + r * width_);
      if (added[r] < PathLength(i + r)) AddPath(i + r, added[r]);
    }
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
    Positions paired[kParts] = {};  // for which `tiled_values_` are
    for (int64_t i = 0; i < many_; i += kTileRows) {
      const int64_t many = std::min(kTileRows, many_ - i);
      Positions seen[kTileRows];
      int64_t most = 0;
      bool all = true;  // whether all queries see all positions
      for (int64_t r = 0; r < many; ++r) {
        seen[r] = {Clamp(unseen_[i + r] - begin, kBlock), Clamp(seen_[i + r] - begin, kBlock)};
        most = std::max(most, seen[r].end);
        all &= seen[r] == Positions{0, kBlock};
      }
      alignas(64) float weights[kTileRows * kBlock];
      TileScores(tiled_q_ + i / kTileRows * Pairs(), call_.size, keys, call_.Stride(), most, many,
                 scale_, weights);
      float* sums = sums_ + i * width_;
      for (int64_t r = 0; r < many; ++r) {
        if (seen[r].begin >= seen[r].end) continue;
        float* const scores = weights + r * kBlock;
        if (cap_ > 0) Cap(scores, most, cap_);
        std::fill_n(scores, seen[r].begin, -INFINITY);
        Weigh(scores, seen[r].end, state_[i + r], sums + r * width_, width_);
        Split(scores, r, split_);
      }
      if (all) {
        for (int64_t part = 0; part < kParts; ++part) Pair(part, {0, kPairs}, values, paired);
        AddPaired(split_, 0, kParts, tiled_values_, width_, sums, sums);
        continue;
      }
      for (int64_t part = 0; part < kParts; ++part) AddPart(part, values, seen, many, sums, paired);
    }
  }

  // Makes the tiles of these positions of a part of a block, if they are not there.
  void Pair(int64_t part, Positions positions, const uint16_t* values, Positions* paired) {
    if (paired[part] == positions) return;
    PairValues(values + part * kPairs * call_.Stride(), call_.size, call_.Stride(), positions,
               tiled_values_ + part * 2 * Pairs());
    paired[part] = positions;
  }

  // Adds the values of a part of a block to sums of queries, those together that see the same of it:
  // what one does not see shall not meet another's weights.
  void AddPart(int64_t part, const uint16_t* values, const Positions* seen, int64_t many,
               float* sums, Positions* paired) {
    const auto of_part = [&](int64_t r) {
      const int64_t begin = part * kPairs;
      return Positions{Clamp(seen[r].begin - begin, kPairs), Clamp(seen[r].end - begin, kPairs)};
    };
    uint32_t left = 0;
    for (int64_t r = 0; r < many; ++r) left |= uint32_t(of_part(r).begin < of_part(r).end) << r;
    while (left != 0) {
      const Positions positions = of_part(__builtin_ctz(left));
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

  // Where the block begins that has the first position behind what query i sees of the pages.
  int64_t LastBlock(int64_t i) const { return seen_[i] / kBlock * kBlock; }

  // The branch of query i, and its path; an empty path where not all of it exists.
  std::pair<int64_t, uint32_t> BranchAndPath(int64_t i) const {
    const int32_t* path = call_.paths + 2 * (row_ * call_.tokens + Token(i));
    if (!call_.HasPath(path)) return {0, 0};
    return {path[0], path[1]};
  }

  int64_t PathLength(int64_t i) const { return __builtin_popcount(BranchAndPath(i).second); }

  // What is on the path of query i.
  PathEntries<Number> Path(int64_t i) const {
    const auto [branch, path] = BranchAndPath(i);
    const int64_t first = (row_ * call_.kv_heads + head_) * call_.entries * call_.branches;
    const auto* from = static_cast<const Number*>(call_.branch_kv);
    return {from + (first + branch) * call_.Stride(), call_.branches * call_.Stride(), path};
  }

  // The first query behind i of another token. Those of a token have the same path.
  int64_t NextToken(int64_t i) const {
    return std::min(many_, (Token(i) + 1) * call_.Group() - first_);
  }

  // Products of all queries with the keys on their paths. As many tokens' keys as a block has room
  // for are transposed together.
  void ScorePaths() {
    const Number* keys[kBlock];
    for (int64_t i = 0; i < many_;) {
      const int64_t begin = i;
      int64_t count = 0;
      for (; i < many_; i = NextToken(i)) {
        const PathEntries<Number> path = Path(i);
        if (count + path.Count() > kBlock) break;
        for (int64_t entry = 0; entry < path.Count(); ++entry) keys[count++] = path[entry];
      }
      if (count == 0) continue;
      std::fill(keys + count, keys + kBlock, keys[0]);
      for (int64_t first = 0; first < count; first += kLanes)
        for (int64_t chunk = 0; chunk < chunks_.count; ++chunk)
          TransposeChunk(chunks_, keys, first, chunk, keys_);
      const float* of_token = keys_;
      for (int64_t token = begin; token < i; token = NextToken(token)) {
        const int64_t length = PathLength(token);
        InGroups(token, NextToken(token), [&](int64_t r, auto many) {
          float* const scores = path_scores_ + r * kBlock;
          Scores<decltype(many)::value>(q_ + r * width_, width_, of_token, length, scores);
          for (int64_t query = 0; cap_ > 0 && query < many; ++query)
            Cap(scores + query * kBlock, length, cap_);
        });
        of_token += length;
      }
    }
  }

  // Merges the entries on the path of query i, but the first ones, as a block of their own.
  void AddPath(int64_t i, int64_t first) {
    const int64_t count = PathLength(i) - first;
    const int64_t hidden = Clamp(unseen_[i] - seen_[i] - first, count);
    if (hidden == count) return;
    alignas(64) float weights[kBlock];
    std::copy_n(path_scores_ + i * kBlock + first, count, weights);
    std::fill_n(weights, hidden, -INFINITY);
    Weigh(weights, count, state_[i], sums_ + i * width_, width_);
    AddValues<Number, 1>(chunks_, weights + hidden, Path(i).Values(call_.size, first + hidden),
                         count - hidden, sums_ + i * width_);
  }

  const Call& call_;
  const Chunks<Number> chunks_;
  const int64_t row_, head_, first_, many_, width_;
  const std::unique_ptr<Line[]> memory_;
  const float scale_, cap_;  // in units of log 2; a cap of 0 is none
  float *const q_, *const sums_;  // [kTile, width]
  float* const keys_;             // [width, kBlock]; or, with tiles, the memory of tiles and spare_
  float* const path_scores_;      // [kTile, kBlock], where there are branches
  Tile *const tiled_q_, *const tiled_values_;
  float* const spare_;  // [16, width]
  int64_t seen_[kTile], unseen_[kTile];  // positions of pages; first ones, in the window of none
  Softmax state_[kTile];
  SplitWeights split_ = {};
};

}  // namespace
