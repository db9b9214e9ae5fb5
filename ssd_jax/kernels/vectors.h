// Vectors of 16 words, for AVX-512 or whatever narrower ones the compiler makes of them.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

// a * b + c, rounded once where the processor can: the same bits wherever it is called.
inline Floats Fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

inline void Store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

// The transpose of 16 x 16 words, in place.
inline void Transpose(Words (&rows)[kLanes]) {
  for (int round = 0; round < 4; ++round) {
    Words mixed[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      mixed[2 * i] = __builtin_shufflevector(rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4,
                                             20, 5, 21, 6, 22, 7, 23);
      mixed[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27,
                                                 12, 28, 13, 29, 14, 30, 15, 31);
    }
    std::memcpy(rows, mixed, sizeof(mixed));
  }
}
