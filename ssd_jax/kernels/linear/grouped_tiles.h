// 32 rows with weights that have scales for each 32 inputs, by AMX.
//
// Tiles give the exact sums of each group, which pass through memory to the vectors that scale them.
// A processor does not do both at once, so the two take turns; and a tile is stored while the next
// ones are multiplied.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../tiles.h"
#include "activations.h"
#include "grouped.h"
#include "panel.h"

namespace {

// Kinds that tiles multiply; for groups of 16 inputs vectors are as fast.
template <const Grouped& kind>
constexpr bool kTiled = kHasTiles && kind.inputs == kGroup;

#if defined(SSD_JAX_TILES)

// Up to eight groups of a panel: values as signed bytes, scales as they are used.
template <const Grouped& kind>
class Piece {
 public:
  static constexpr int64_t kGroups = 8;

  Piece() { std::memset(values_, 0, sizeof(values_)); }

  // Takes groups from the bytes of a panel on; returns where the next ones are.
  const char* Fill(const char* w, int64_t groups, Ahead& ahead) {
    const char* block = w;
    w += kind.SharedBytes();
    for (int64_t group = 0; group < groups; ++group, w += kind.GroupBytes()) {
      ahead.Step();
      for (int v = 0; v < 2; ++v) {
        char* to = values_[v][group];
#pragma GCC unroll 8
        for (int64_t i = 0; i < kind.Steps(); ++i, to += kLine) {
          const Unpacked<kind> words(w + v * kLine, i);
          Put(words.low, to);
          if constexpr (kind.Halves()) Put(words.high, to + kind.Steps() * kLine);
        }
        scales[group][v] = GroupScales<kind>(block, w + kind.ValueBytes(), v);
      }
    }
    asm volatile("" : : : "memory");  // GCC 12 does not know what a tile is loaded from
    return w;
  }

  // A tile of 64 inputs and 16 outputs, where the other group that shares them is zeros: they are
  // behind every group's half of a tile.
  const char* Tile(int64_t group, int v) const {
    return values_[v][group] - group % 2 * (kTile / 2 * kLine);
  }

  GroupScales<kind> scales[kGroups][2];

 private:
  static void Put(Words values, char* to) {
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(kind.offset));
    _mm512_store_si512(to, _mm512_sub_epi8((__m512i)values, offset));
  }

  alignas(64) char values_[2][kGroups][kTile * kLine];
};

// Of one or two groups: two tiles of rows, two of outputs, the rows of a tile.
typedef int32_t PairSums[2][2][2][kTile][kLanes];

// Exact sums of the groups that share a line of x's tiles; the second tile is `below` bytes behind.
template <const Grouped& kind>
void SumPair(const char* x, int64_t below, const Piece<kind>& piece, int64_t group, int64_t groups,
             PairSums to) {
  _tile_loadd(4, x, kLine);
  _tile_loadd(5, x + below, kLine);
  for (int64_t i = 0; i < groups; ++i) {
    _tile_loadd(6, piece.Tile(group + i, 0), kLine);
    _tile_zero(0);
    _tile_dpbssd(0, 4, 6);
    if (i > 0) _tile_stored(2, to[i - 1][1][0], kLine);
    _tile_loadd(7, piece.Tile(group + i, 1), kLine);
    _tile_zero(1);
    _tile_dpbssd(1, 4, 7);
    if (i > 0) _tile_stored(3, to[i - 1][1][1], kLine);
    _tile_zero(2);
    _tile_dpbssd(2, 5, 6);
    _tile_stored(0, to[i][0][0], kLine);
    _tile_zero(3);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(1, to[i][0][1], kLine);
  }
  _tile_stored(2, to[groups - 1][1][0], kLine);
  _tile_stored(3, to[groups - 1][1][1], kLine);
}

// Adds what a piece, whose first input is k, gives 32 rows.
template <const Grouped& kind>
void AddPiece(const Activations& x, int64_t row, int64_t k, const Piece<kind>& piece,
              int64_t groups, float (*totals)[kPanel]) {
  constexpr int kAtATime = 4;  // rows whose totals are in registers
  alignas(64) PairSums sums;
  for (int64_t group = 0; group < groups; group += 2, k += kLine) {
    const int64_t many = std::min<int64_t>(2, groups - group);
    SumPair<kind>(x.Bytes(row, k), x.Bytes(kTile, 0) - x.Bytes(0, 0), piece, group, many, sums);
    for (int64_t first = 0; first < 2 * kTile; first += kAtATime) {
      const int64_t at = x.GroupAt(row + first, k / kGroup);
      Floats total[kAtATime][2];
      std::memcpy(total, totals[first], sizeof(total));
      for (int64_t i = 0; i < many; ++i) {
        const float* unit = &x.group_scales[at + i * kTogether];
        const float* moment = &x.group_sums[at + i * kTogether];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
#pragma GCC unroll 8
          for (int r = 0; r < kAtATime; ++r) {
            const Ints sum = Load<Ints>(sums[i][first / kTile][v][first % kTile + r]);
            total[r][v] = piece.scales[group + i][v].Add(total[r][v], sum, unit[r], moment[r]);
          }
        }
      }
      std::memcpy(totals[first], total, sizeof(total));
    }
  }
}

// Products of the first `rows`, a multiple of 32, with a panel.
template <const Grouped& kind>
void GroupedTiles(const Activations& x, int64_t rows, const char* panel, Ahead ahead,
                  float (*out)[kPanel]) {
  Piece<kind> piece;
  ahead.Begin(1);
  std::memset(out, 0, rows * sizeof(*out));
  for (int64_t k = 0; k < x.width; k += piece.kGroups * kGroup) {
    const int64_t groups = std::min(piece.kGroups, (x.width - k) / kGroup);
    panel = piece.Fill(panel, groups, ahead);
    for (int64_t row = 0; row < rows; row += 2 * kTile)
      AddPiece<kind>(x, row, k, piece, groups, out + row);
  }
}

#else

template <const Grouped& kind>
void GroupedTiles(const Activations&, int64_t, const char*, Ahead, float (*)[kPanel]) {}

#endif

}  // namespace
