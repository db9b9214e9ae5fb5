// Vectors of words, as wide as the processor has them: 16, 8 or 4. (GCC lowers wider ones through
// memory.)

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
#define SSD_JAX_SPREAD  // numbers are spread to all lanes by loads, before they are multiplied
#endif

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

// v, which is to be in a register now. GCC 12 would put off a group's sums with AVX2, and spill what
// they add; or read a vector again for each use of it.
template <typename V>
inline V Now(V v) {
#if defined(SSD_JAX_SPREAD)
  asm("" : "+x"(v));
#endif
  return v;
}

// The first kLanes of `count` values; zeros where there are fewer.
inline Floats LoadSome(const float* values, int64_t count) {
  if (count >= kLanes) return Load<Floats>(values);
  Floats some = {};
  if (count > 0) std::memcpy(&some, values, count * sizeof(float));
  return some;
}

// a * b + c, rounded once where the processor has an instruction for it. A compiler that may make it
// of a product and a sum does so in some copies of a loop and not in others, and a row's bits would
// depend on how many rows there are; so it may not (`-ffp-contract=off`).
inline Floats MulAdd(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline Floats MulAdd(Floats a, float b, Floats c) { return MulAdd(a, b - Floats{}, c); }

#if defined(__AVX512F__)
inline int32_t Sum(Ints x) { return _mm512_reduce_add_epi32((__m512i)x); }
inline int32_t Max(Ints x) { return _mm512_reduce_max_epi32((__m512i)x); }
#else
inline int32_t Sum(Ints x) {
  int32_t sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
}

inline int32_t Max(Ints x) {
  int32_t most = x[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) most = x[lane] > most ? x[lane] : most;
  return most;
}
#endif

inline void Store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

}  // namespace
