// What a draw of 0 or 1 is, on CPU and GPU alike: each operation is rounded in the same way, so that bits agree.
#pragma once
#include "philox.h"

#include <cmath>
#include <cstring>

namespace lightning_accel {

// exp(x) within 2e-7 of itself, for |x| <= 87; NaN of NaN. It is 2^n exp(r) with |r| <= log(2) / 2, of which the
// polynomial is that of Cephes (Moshier 1992, https://www.netlib.org/cephes/, single/expf.c). fmaf is spelt out, since
// compilers are free to fuse a * b + c or not.
LIGHTNING_ACCEL_INLINE float exp_of(float x) {
  const float shift = 12582912.f;  // 1.5 * 2^23: the sum has the nearest integer in its lowest bits
  const float shifted = fmaf(x, 1.44269504f, shift);
  const float n = shifted - shift;
  const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
  float sum = 1.9875691500e-4f;
  sum = fmaf(sum, r, 1.3981999507e-3f);
  sum = fmaf(sum, r, 8.3334519073e-3f);
  sum = fmaf(sum, r, 4.1665795894e-2f);
  sum = fmaf(sum, r, 1.6666665459e-1f);
  sum = fmaf(sum, r, 5.0000001201e-1f);
  sum = fmaf(sum, r * r, r) + 1.f;
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3F800000u;  // of 2^n
  float power;
  memcpy(&power, &bits, sizeof power);
  return sum * power;
}

// 1 with probability sigmoid(logit), else 0; 0 of NaN. u = (k + 1/2) / 2^31 with 31 random bits k is compared with
// 1 / (1 + exp(-logit)). k is capped where float32 would make u 1, which is below no probability.
LIGHTNING_ACCEL_INLINE float bernoulli(float logit, uint32_t random) {
  logit = logit < -87.f ? -87.f : logit;
  logit = logit > 87.f ? 87.f : logit;
  int32_t k = int32_t(random >> 1);
  k = k > 2147483520 ? 2147483520 : k;
  const float u = float(k) + 0.5f;  // times 2^31
  return fmaf(u, exp_of(-logit), u) < 2147483648.f ? 1.f : 0.f;
}

}  // namespace lightning_accel
