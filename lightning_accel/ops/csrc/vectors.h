// Vectors of floats as wide as the processor's, and how many of them sums may take.

#pragma once

namespace lightning_accel {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kSums = 24;  // floats of a vector; vectors of sums that leave registers for the operands
#elif defined(__AVX2__)
constexpr int kWidth = 8, kSums = 12;
#else
constexpr int kWidth = 4, kSums = 12;
#endif

typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));

}  // namespace lightning_accel
