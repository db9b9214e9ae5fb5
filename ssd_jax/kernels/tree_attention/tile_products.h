// Products of queries with keys, and of weights with values, by AMX tiles. Queries, keys and values
// are bfloat16; of a weight, its first 16 bits are taken. Sums are float32.

#pragma once

#include <cstdint>
#include <cstring>

#include "../tiles.h"
#include "softmax.h"
#include "lanes.h"

namespace {

constexpr int64_t kPairs = 2 * kTileRows;  // bfloat16 numbers of a tile's row
constexpr int64_t kParts = kBlock / kPairs;  // of a block's positions: each is a row of weights

struct Positions {
  int64_t begin, end;

  bool operator==(const Positions& other) const { return begin == other.begin && end == other.end; }
};

struct alignas(64) Tile {
  Words rows[kLanes];  // kTileRows, where there are tiles
};

// Weights as the sum of two bfloat16, a block's weights of 16 queries each.
struct alignas(64) SplitWeights {
  uint16_t high[kTileRows][kBlock], low[kTileRows][kBlock];
};

#if defined(SSD_JAX_TILES)

// Products of 16 queries with a block's keys, `key_stride` numbers apart, as [query][kBlock], times
// `scale`; those of positions and queries that nobody asks for may be missing. `q`: for each 32
// numbers, the transpose of the queries' words.
inline void TileScores(const Tile* q, int64_t size, const uint16_t* keys, int64_t key_stride,
                       int64_t positions, int64_t queries, float scale, float* scores) {
  Tile products[kBlock / kTileRows];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t first = 0; first < size; first += kPairs, ++q) {
    const auto* from = reinterpret_cast<const char*>(keys + first);
    const int64_t stride = 2 * key_stride, rows = kTileRows * stride;
    _tile_loadd(4, q, 64);
    _tile_loadd(5, from, stride);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, from + rows, stride);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(5, from + 2 * rows, stride);
    _tile_dpbf16ps(2, 5, 4);
    _tile_loadd(6, from + 3 * rows, stride);
    _tile_dpbf16ps(3, 6, 4);
  }
  _tile_stored(0, &products[0], 64);
  _tile_stored(1, &products[1], 64);
  _tile_stored(2, &products[2], 64);
  _tile_stored(3, &products[3], 64);
  for (int64_t at = 0; at < positions; at += kTileRows) {
    Tile& tile = products[at / kTileRows];
    Transpose(tile.rows);
    for (int64_t i = 0; i < queries; ++i)
      Store(scores + i * kBlock + at, (Floats)tile.rows[i] * scale);
  }
}

inline void Split(const float* weights, int64_t query, SplitWeights& to) {
  for (int64_t at = 0; at < kBlock; at += kLanes) {
    const Words bits = Load<Words>(weights + at), high = bits & 0xffff0000u;
    const Floats rest = (Floats)bits - (Floats)high;
    const __m256i first = _mm512_cvtepi32_epi16((__m512i)(bits >> 16));
    const __m256bh second = _mm512_cvtneps_pbh((__m512)rest);
    std::memcpy(&to.high[query][at], &first, sizeof(first));
    std::memcpy(&to.low[query][at], &second, sizeof(second));
  }
}

// Values of 32 positions, `stride` numbers apart, of which all but `seen` are taken for zeros, as
// tiles of 16 numbers each, in packed order (vector_products.h): a tile's word has the numbers of two
// positions.
inline void PairValues(const uint16_t* values, int64_t size, int64_t stride, Positions seen,
                       Tile* out) {
  const auto read = [&](const uint16_t* from, int64_t position) {
    return position >= seen.begin && position < seen.end ? Load<Words>(from) : Words{};
  };
  for (int64_t chunk = 0; chunk < size / kPairs; ++chunk) {
    for (int64_t i = 0; i < kTileRows; ++i) {
      const uint16_t* from = values + 2 * i * stride + chunk * kPairs;
      const Words first = read(from, 2 * i), second = read(from + stride, 2 * i + 1);
      out[2 * chunk].rows[i] = (first & 0xffffu) | second << 16;
      out[2 * chunk + 1].rows[i] = first >> 16 | (second & 0xffff0000u);
    }
  }
}

// Adds the products of 16 queries' weights with paired values, [kParts][width / 16], of parts
// [begin, end) to sums [16, width], into `out`.
inline void AddPaired(const SplitWeights& weights, int64_t begin, int64_t end, const Tile* values,
                      int64_t width, const float* sums, float* out) {
  const int64_t stride = 4 * width;
  for (int64_t at = 0; at < width; at += 2 * kLanes) {
    _tile_loadd(0, sums + at, stride);
    _tile_loadd(1, sums + at + kLanes, stride);
    for (int64_t part = begin; part < end; ++part) {
      const Tile* from = values + (part * width + at) / kLanes;
      _tile_loadd(4, &weights.high[0][part * kPairs], sizeof(weights.high[0]));
      _tile_loadd(2, &from[0], 64);
      _tile_dpbf16ps(0, 4, 2);
      _tile_loadd(3, &from[1], 64);
      _tile_dpbf16ps(1, 4, 3);
      _tile_loadd(5, &weights.low[0][part * kPairs], sizeof(weights.low[0]));
      _tile_dpbf16ps(0, 5, 2);
      _tile_dpbf16ps(1, 5, 3);
    }
    _tile_stored(0, out + at, stride);
    _tile_stored(1, out + at + kLanes, stride);
  }
}

#else

inline void TileScores(const Tile*, int64_t, const uint16_t*, int64_t, int64_t, int64_t, float,
                       float*) {}
inline void Split(const float*, int64_t, SplitWeights&) {}
inline void PairValues(const uint16_t*, int64_t, int64_t, Positions, Tile*) {}
inline void AddPaired(const SplitWeights&, int64_t, int64_t, const Tile*, int64_t, const float*,
                      float*) {}

#endif

}  // namespace
