// Products of queries with keys, and of weights with values, by vectors: in float32 throughout.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "softmax.h"
#include "lanes.h"

namespace {

constexpr int kTogether = 4;  // queries of one pass over a block
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectors = 4;  // of positions at a time; there are 32 registers
#else
constexpr int kVectors = 2;
#endif

constexpr int64_t kLine = 64;  // bytes of a line of the cache
// Where prefetches go: to the first level of the cache, of which a block fills much; to the second.
constexpr int kNear = 3, kOuter = 2;

// A key or value of `size` numbers is read a chunk of kLanes words at a time. What is computed from it
// is in packed order: of a chunk of bfloat16, first its numbers of even index, then the others.
// Beyond `size` there are zeros.
template <typename Number>
struct Chunks {
  static constexpr int kParts = sizeof(float) / sizeof(Number);  // vectors that a chunk makes
  static constexpr int64_t kNumbers = kParts * kLanes;

  explicit Chunks(int64_t size) : size(size), count((size + kNumbers - 1) / kNumbers) {}

  const int64_t size, count;

  int64_t Width() const { return count * kNumbers; }

  // `size` numbers in packed order, each times `scale`.
  void Pack(const float* from, float scale, float* to) const {
    for (int64_t first = 0; first < size; first += kNumbers)
      for (int64_t i = 0; i < std::min(kNumbers, size - first); ++i)
        to[first + i % kParts * kLanes + i / kParts] = from[first + i] * scale;
  }

  // The inverse, with a divisor.
  void Unpack(const float* from, float divisor, float* to) const {
    for (int64_t first = 0; first < size; first += kNumbers) {
      float numbers[kNumbers];
      const Floats even = Load<Floats>(from + first) / divisor;
      if constexpr (kParts == 1) {
        Store(numbers, even);
      } else {
        const Floats odd = Load<Floats>(from + first + kLanes) / divisor;
        Store(numbers, Interleave<0>(even, odd, Lanes()));
        Store(numbers + kLanes, Interleave<kLanes / 2>(even, odd, Lanes()));
      }
      std::memcpy(to + first, numbers, std::min(kNumbers, size - first) * sizeof(float));
    }
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

// Keys, or values, of which each lies `stride` behind the one before.
template <typename Number>
struct Evenly {
  const Number* first;
  int64_t stride;

  const Number* operator[](int64_t index) const { return first + index * stride; }
};

// Writes a chunk of the keys [first, first + kLanes) to `out`, [width, kBlock].
template <typename Number, typename Keys>
inline void TransposeChunk(const Chunks<Number>& chunks, const Keys& keys, int64_t first,
                           int64_t chunk, float* out) {
  Words words[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) words[i] = chunks.Read(keys[first + i], chunk);
  Transpose(words);
  for (int part = 0; part < chunks.kParts; ++part)
    for (int64_t i = 0; i < kLanes; ++i)
      Store(out + (chunk * chunks.kNumbers + part * kLanes + i) * kBlock + first,
            chunks.Part(words[i], part));
}

// Memory that is read soon.
struct Stretch {
  const char* first = nullptr;
  int64_t bytes = 0;
  bool far = false;  // whether the cache is too small for what the call reads
};

// Keys of `positions`, rounded up to vectors, as [width, kBlock]. Memory is asked for `next` bit by
// bit: all at once would be waited for.
template <typename Number>
void TransposeKeys(const Chunks<Number>& chunks, const Evenly<Number>& keys, int64_t positions,
                   float* out, Stretch next) {
  const int64_t steps = (positions + kLanes - 1) / kLanes * chunks.count;
  const int64_t share = (next.bytes / kLine + steps - 1) / steps * kLine;
  int64_t asked = 0;
  for (int64_t first = 0; first < positions; first += kLanes) {
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      for (const int64_t end = std::min(asked + share, next.bytes); asked < end; asked += kLine) {
        if (next.far)
          __builtin_prefetch(next.first + asked, 0, kOuter);
        else
          __builtin_prefetch(next.first + asked, 0, kNear);
      }
      TransposeChunk(chunks, keys, first, chunk, out);
    }
  }
}

// Products of queries [many, width] with kParts vectors of transposed keys.
template <int kMany, int kParts>
inline void Products(const float* q, int64_t width, const float* keys, float* scores) {
  Floats sums[kMany][kParts] = {};
  for (int64_t d = 0; d < width; ++d) {
    Floats key[kParts];
    for (int v = 0; v < kParts; ++v) key[v] = Now(Load<Floats>(keys + d * kBlock + v * kLanes));
#pragma GCC unroll 4
    for (int r = 0; r < kMany; ++r)
      for (int v = 0; v < kParts; ++v) sums[r][v] = MulAdd(key[v], q[r * width + d], sums[r][v]);
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

// Adds values to sums [many, width] in their order.
template <typename Number, int kMany, typename Values>
void AddValues(const Chunks<Number>& chunks, const float* weights, const Values& values,
               int64_t positions, float* sums) {
  constexpr int kParts = Chunks<Number>::kParts;
  for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
    float* at = sums + chunk * chunks.kNumbers;
    Floats total[kMany][kParts];
    for (int r = 0; r < kMany; ++r)
      for (int p = 0; p < kParts; ++p)
        total[r][p] = Load<Floats>(at + r * chunks.Width() + p * kLanes);
    for (int64_t t = 0; t < positions; ++t) {
      const Words words = chunks.Read(values[t], chunk);
#pragma GCC unroll 4
      for (int r = 0; r < kMany; ++r)
        for (int p = 0; p < kParts; ++p)
          total[r][p] = MulAdd(chunks.Part(words, p), weights[r * kBlock + t], total[r][p]);
    }
    for (int r = 0; r < kMany; ++r)
      for (int p = 0; p < kParts; ++p) Store(at + r * chunks.Width() + p * kLanes, total[r][p]);
  }
}

}  // namespace
