// Loops of 1 to 4 threads, from one caller and from two at once: every index is run once.

#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "parallel.h"

bool Once(int64_t threads, int64_t count) {
  std::vector<std::atomic<int>> runs(count);
  std::atomic<int64_t> next{0};
  int64_t plain = 0;  // written by whoever runs the last index, read after the loop
  parallel::helpers.Run(threads, [&] {
    for (int64_t i; (i = next.fetch_add(1)) < count;) {
      runs[i].fetch_add(1);
      if (i == count - 1) plain = count;
    }
  });
  for (auto& run : runs)
    if (run.load() != 1) return false;
  return plain == count;
}

int main() {
  std::atomic<bool> right{true};
  const auto many = [&](int loops) {
    for (int loop = 0; loop < loops; ++loop) {
      if (!Once(1 + loop % 4, 1 + loop % 37)) right = false;
      if (loop % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // they sleep
    }
  };
  many(4000);
  std::thread other(many, 2000);
  many(2000);
  other.join();
  std::puts(right ? "right" : "wrong");
  return right ? 0 : 1;
}
