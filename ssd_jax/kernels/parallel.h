// Loops over threads of our own beside XLA's.
//
// A product of few rows takes some tens of microseconds, as long as a sleeping thread needs to wake:
// a thread that has helped looks for the next loop for a while before it sleeps. XLA's own threads
// sleep at once.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace parallel {

constexpr auto kAwake = std::chrono::microseconds(500);  // without a loop, before a thread sleeps

inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Threads that take parts of one loop at a time.
class Helpers {
 public:
  // Runs `part` on the calling thread and on all threads that were ever asked for, at least
  // `threads` - 1, which have all returned from it at the end. Whoever calls while another loop
  // runs has no others.
  void Run(int64_t threads, const std::function<void()>& part) {
    std::unique_lock<std::mutex> alone(running_, std::try_to_lock);
    if (!alone.owns_lock()) return part();
    while (started_ + 1 < threads) {
      ++started_;
      std::thread([this] { Help(); }).detach();
    }
    part_ = &part;
    open_.store(++loops_);
    if (asleep_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    part();
    open_.store(0);
    while (inside_.load() > 0) Pause();
  }

 private:
  void Help() {
    for (uint64_t last = 0;;) {
      const uint64_t loop = Next(last);
      inside_.fetch_add(1);
      // Either this sees that the loop is over, or its caller sees this thread inside.
      if (open_.load() == loop) (*part_)();
      inside_.fetch_sub(1);
      last = loop;
    }
  }

  // The number of a loop that is not the last one. A thread that wakes is late for the loop that
  // woke it, but not for those that follow.
  uint64_t Next(uint64_t last) {
    for (;;) {
      const uint64_t begun = loops_.load();
      const auto until = std::chrono::steady_clock::now() + kAwake;
      do {
        for (int i = 0; i < 64; ++i) {
          const uint64_t loop = open_.load();
          if (loop != 0 && loop != last) return loop;
          Pause();
        }
        std::this_thread::yield();
      } while (std::chrono::steady_clock::now() < until);
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.fetch_add(1);
      wake_.wait(lock, [&] { return loops_.load() != begun; });
      asleep_.fetch_sub(1);
    }
  }

  std::mutex running_;
  int64_t started_ = 0;  // threads
  std::atomic<uint64_t> loops_{0};  // so far
  const std::function<void()>* part_ = nullptr;
  std::atomic<uint64_t> open_{0};  // the loop that runs; 0: none
  std::atomic<int64_t> inside_{0}, asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Never destroyed: its threads end with the process.
inline Helpers& helpers = *new Helpers;

// Cores that this thread may use: its process may have been pinned since XLA counted them.
inline int64_t Cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  return std::thread::hardware_concurrency();
}

// Calls run(begin, end) for parts of [0, count), of at least `grain`, on the calling thread and on
// as many others as XLA has, or as there are cores for. Whoever is free takes half of its share of
// what is left: parts follow each other in memory, and end together.
template <typename F>
void For(xla::ffi::ThreadPool& pool, int64_t count, int64_t grain, F run) {
  int64_t threads = std::min<int64_t>(pool.num_threads(), (count + grain - 1) / grain);
  if (threads > 1) threads = std::min(threads, Cores());
  if (threads <= 1) return run(int64_t{0}, count);
  alignas(64) std::atomic<int64_t> next{0};  // a line that nothing else shares
  helpers.Run(threads, [&] {
    for (int64_t begin = next.load(); begin < count;) {
      const int64_t part = std::max(grain, (count - begin) / (2 * threads));
      const int64_t end = std::min(count, begin + part);
      if (!next.compare_exchange_weak(begin, end)) continue;
      run(begin, end);
      begin = next.load();
    }
  });
}

}  // namespace parallel
