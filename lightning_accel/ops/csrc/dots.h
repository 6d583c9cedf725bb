// Products of a matrix and a vector, which read each weight once and where it is.

#pragma once

#include "vectors.h"

#include <cstdint>
#include <cstring>

namespace lightning_accel {

struct BFloat16 {
  uint16_t bits;
};

inline void load(const float* from, Vector* to) { std::memcpy(to, from, sizeof *to); }

inline void load(const BFloat16* from, Vector* to) {
  typedef uint16_t Short __attribute__((vector_size(kWidth * sizeof(uint16_t))));
  typedef uint32_t Wide __attribute__((vector_size(kWidth * sizeof(uint32_t))));
  Short bits;
  std::memcpy(&bits, from, sizeof bits);
  const Wide wide = __builtin_convertvector(bits, Wide) << 16;
  std::memcpy(to, &wide, sizeof wide);
}

inline float read(float x) { return x; }

inline float read(BFloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &wide, sizeof y);
  return y;
}

// sums[r] = row r of weight, (kRows, depth), times x.
template <int kRows, typename T>
inline void dot_rows(const T* weight, const float* x, int64_t depth, float* sums) {
  Vector sum[kRows] = {};
  int64_t k = 0;
  for (; k + kWidth <= depth; k += kWidth) {
    Vector value;
    load(x + k, &value);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      Vector factor;
      load(weight + row * depth + k, &factor);
      sum[row] += factor * value;
    }
  }
  for (int row = 0; row < kRows; ++row) {
    float total = 0.0f;
    for (int lane = 0; lane < kWidth; ++lane) total += sum[row][lane];
    for (int64_t i = k; i < depth; ++i) total += read(weight[row * depth + i]) * x[i];
    sums[row] = total;
  }
}

constexpr int64_t kDots = 8;  // as many sums as hide the latency of a multiplication

// sums (rows,) = weight (rows, depth) times x (depth,).
template <typename T>
void dot(int64_t rows, const T* weight, const float* x, int64_t depth, float* sums) {
  int64_t row = 0;
  for (; row + kDots <= rows; row += kDots) dot_rows<kDots>(weight + row * depth, x, depth, sums + row);
  for (; row < rows; ++row) dot_rows<1>(weight + row * depth, x, depth, sums + row);
}

}  // namespace lightning_accel
