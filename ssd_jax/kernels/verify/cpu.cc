// Thresholds of top-k and top-p, for XLA's CPU backend.
//
// Floats that are not negative order like their bits. So a row is summed into buckets by the upper
// bits, and only the bucket in which the sum from above reaches its least is looked at more closely.
// Few tokens have most of a row: a bound that the threshold probably reaches leaves most blocks of
// the row out. It decides nothing: a threshold below it is looked for again in the whole row.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "../vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kShift = 17;                   // bits of a value that its bucket does not tell
constexpr uint32_t kBuckets = 0x2000;        // of values below 2
constexpr int64_t kBlock = 16 * kLanes;      // values of a row that are left out together
constexpr int kCopies = 2;                   // so that a sum need not wait for the one before

inline uint32_t Bucket(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits >> kShift;
}

inline float Largest(const float* values, int64_t count) {
  Floats best = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats next = Load<Floats>(values + i);
    best = next > best ? next : best;
  }
  float largest = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) largest = std::max(largest, best[lane]);
  for (; i < count; ++i) largest = std::max(largest, values[i]);
  return largest;
}

// The search in one row: for the largest threshold at or above which values sum to `least`, or as
// many are positive with `count`; 0 if there is none.
class Row {
 public:
  Row(const float* values, int64_t size, float least, bool count)
      : values_(values), size_(size), least_(least), count_(count), blocks_((size - 1) / kBlock + 1) {
    for (int64_t block = 0; block < int64_t(blocks_.size()); ++block)
      blocks_[block] = Largest(values_ + block * kBlock, End(block) - block * kBlock);
  }

  float Threshold() {
    const float bound = Bound();
    if (bound > 0) {
      const float threshold = Among(bound);
      if (threshold >= bound) return threshold;
    }
    return Among(0);
  }

 private:
  int64_t End(int64_t block) const { return std::min(size_, (block + 1) * kBlock); }

  // Each of `least` blocks has a value that is at least the smallest of their maxima. What lies
  // below an even share of the mass that may be missing does not sum to it.
  float Bound() const {
    if (!count_) return (1 - least_) / size_;
    if (!(least_ >= 1 && least_ <= blocks_.size())) return 0;
    std::vector<float> maxima = blocks_;
    const auto last = maxima.begin() + int64_t(least_) - 1;
    std::nth_element(maxima.begin(), last, maxima.end(), std::greater<float>());
    return *last;
  }

  template <typename F>
  void ForEach(float bound, F each) const {
    for (int64_t block = 0; block < int64_t(blocks_.size()); ++block)
      if (blocks_[block] >= bound)
        for (int64_t i = block * kBlock; i < End(block); ++i) each(values_[i], i);
  }

  double Worth(float value) const { return count_ ? double(value > 0) : double(value); }

  // The threshold by the blocks with a value that reaches a bound.
  float Among(float bound) const {
    std::vector<double> sums(kCopies * kBuckets);
    bool numbers = true;
    ForEach(bound, [&](float value, int64_t i) {
      const uint32_t bucket = std::min(Bucket(value), kBuckets - 1);
      numbers &= value < 2;
      sums[bucket * kCopies + i % kCopies] += Worth(value);
    });
    if (!numbers) return 0;  // NaN is no probability: then nothing is enough
    double above = 0;
    for (int64_t bucket = kBuckets - 1; bucket >= 0; --bucket) {
      double inside = 0;
      for (int copy = 0; copy < kCopies; ++copy) inside += sums[bucket * kCopies + copy];
      if (inside > 0 && above + inside >= least_) return Inside(bound, bucket, above);
      above += inside;
    }
    return 0;
  }

  // The threshold among the values of a bucket, given the sum of those above.
  float Inside(float bound, uint32_t bucket, double above) const {
    std::vector<float> inside;
    ForEach(bound, [&](float value, int64_t) {
      if (Bucket(value) == bucket && value > 0) inside.push_back(value);
    });
    std::sort(inside.begin(), inside.end(), std::greater<float>());
    for (const float value : inside) {
      above += Worth(value);
      if (above >= least_) return value;
    }
    return inside.back();  // the bucket's sum reached it, in another order
  }

  const float* values_;
  int64_t size_;
  float least_;
  bool count_;
  std::vector<float> blocks_;  // largest value of each
};

ffi::Error Thresholds(ffi::Buffer<ffi::F32> p, ffi::Buffer<ffi::F32> least,
                      ffi::ResultBuffer<ffi::F32> thresholds, bool count) {
  const auto shape = p.dimensions();
  for (int64_t row = 0; row < shape[0]; ++row)
    thresholds->typed_data()[row] =
        Row(p.typed_data() + row * shape[1], shape[1], least.typed_data()[row], count).Threshold();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ssd_jax_thresholds, Thresholds,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("count"));
