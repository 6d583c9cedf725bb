// Philox4x32-10, a random number generator without a state: a counter and a key give four words, so that threads and
// devices that share out the counters draw the same numbers as one alone.
// Source: Salmon, Moraes, Dror and Shaw 2011, Parallel Random Numbers: As Easy as 1, 2, 3,
// https://doi.org/10.1145/2063384.2063405
#pragma once
#include <cstdint>
#if defined(__AVX2__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif

#ifdef __CUDACC__
#define LIGHTNING_ACCEL_INLINE __host__ __device__ __forceinline__
#else
#define LIGHTNING_ACCEL_INLINE inline __attribute__((always_inline))
#endif
#ifdef __CUDACC__
#define LIGHTNING_ACCEL_UNROLL  // which nvcc does unasked
#elif defined(__clang__)
#define LIGHTNING_ACCEL_UNROLL _Pragma("unroll")
#else
#define LIGHTNING_ACCEL_UNROLL _Pragma("GCC unroll 10")
#endif

namespace lightning_accel {

// The product of the lower 32 bits of `a` with `b`; of `Lanes` in each of them.
LIGHTNING_ACCEL_INLINE uint64_t product(uint64_t a, uint32_t b) { return uint64_t{b} * uint32_t(a); }

#ifndef __CUDACC__
// Of a product of lanes, compilers do not see that its factors are short, and take three instructions for one.
#if defined(__AVX512F__)
constexpr int kLanes = 8;
typedef uint64_t Lanes __attribute__((vector_size(8 * kLanes)));
LIGHTNING_ACCEL_INLINE Lanes product(Lanes a, uint32_t b) {
  return (Lanes)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
}
// Writes the lanes of `a` and `b` in turns.
LIGHTNING_ACCEL_INLINE void store_in_turns(Lanes a, Lanes b, void* out) {
  const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), last = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi64((__m512i)a, first, (__m512i)b));
  _mm512_storeu_si512(static_cast<char*>(out) + sizeof a, _mm512_permutex2var_epi64((__m512i)a, last, (__m512i)b));
}
#elif defined(__AVX2__)
constexpr int kLanes = 4;
typedef uint64_t Lanes __attribute__((vector_size(8 * kLanes)));
LIGHTNING_ACCEL_INLINE Lanes product(Lanes a, uint32_t b) {
  return (Lanes)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
}
LIGHTNING_ACCEL_INLINE void store_in_turns(Lanes a, Lanes b, void* out) {
  const __m256i even = _mm256_unpacklo_epi64((__m256i)a, (__m256i)b), odd = _mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
  __m256i* to = static_cast<__m256i*>(out);
  _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
}
#else
constexpr int kLanes = 2;
typedef uint64_t Lanes __attribute__((vector_size(8 * kLanes)));
LIGHTNING_ACCEL_INLINE Lanes product(Lanes a, uint32_t b) { return (a & 0xFFFFFFFFu) * uint64_t{b}; }
LIGHTNING_ACCEL_INLINE void store_in_turns(Lanes a, Lanes b, void* out) {
  const Lanes turns[2] = {{a[0], b[0]}, {a[1], b[1]}};
  __builtin_memcpy(out, turns, sizeof turns);
}
#endif
#endif

// Puts random words in the place of the counters' words, the lowest first, of which the lower 32 bits count: each word
// has 64 bits (or as many in each lane), which spares the halves of products their way back together. Several
// counters at a time, kCounters x lanes, keep the multipliers busy.
template <typename Words, int kCounters>
LIGHTNING_ACCEL_INLINE void philox(Words (&word)[4][kCounters], uint64_t key) {
  uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
  LIGHTNING_ACCEL_UNROLL
  for (int round = 0; round < 10; ++round) {
    LIGHTNING_ACCEL_UNROLL
    for (int i = 0; i < kCounters; ++i) {
      const Words even = product(word[0][i], 0xD2511F53u), odd = product(word[2][i], 0xCD9E8D57u);
      word[0][i] = (odd >> 32) ^ word[1][i] ^ uint64_t{low};
      word[2][i] = (even >> 32) ^ word[3][i] ^ uint64_t{high};
      word[1][i] = odd;
      word[3][i] = even;
    }
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
}

}  // namespace lightning_accel
