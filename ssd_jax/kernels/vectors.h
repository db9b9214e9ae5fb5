// Vectors of 16 words, for AVX-512 or whatever narrower ones the compiler makes of them.

#pragma once

#include <cstdint>
#include <cstring>

constexpr int64_t kLanes = 16;  // of a vector

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

template <typename V>
inline V Load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}
