// Loops over the threads of XLA's CPU backend.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

// Calls run(begin, end) for parts of [0, count) on the calling thread and on those of the pool that
// are free; whoever is free takes the next part. The calling thread waits for nothing that has not
// begun.
template <typename F>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, int64_t grain, F run) {
  const int64_t threads = std::min<int64_t>(pool.num_threads(), (count + grain - 1) / grain);
  if (threads <= 1) return run(0, count);
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  auto work = [shared, count, grain, run] {
    for (int64_t begin; (begin = shared->next.fetch_add(grain)) < count;) {
      const int64_t end = std::min(count, begin + grain);
      run(begin, end);
      shared->done.fetch_add(end - begin, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < threads; ++i) pool.Schedule(decltype(work)(work));
  work();
  while (shared->done.load(std::memory_order_acquire) < count) {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
}
