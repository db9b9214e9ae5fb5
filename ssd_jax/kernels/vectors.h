// Vectors of words, as wide as the processor has them: 16, 8 or 4. (GCC lowers wider ones through
// memory.)

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define SSD_JAX_VECTOR_BYTES 64
#elif defined(__AVX__)
#define SSD_JAX_VECTOR_BYTES 32
#else
#define SSD_JAX_VECTOR_BYTES 16
#endif

namespace {

constexpr int64_t kLanes = SSD_JAX_VECTOR_BYTES / 4;  // of a vector

typedef float Floats __attribute__((vector_size(SSD_JAX_VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(SSD_JAX_VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(SSD_JAX_VECTOR_BYTES)));

template <typename V>
inline V Load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

inline void Store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

}  // namespace
