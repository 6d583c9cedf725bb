// exp of numbers up to 0, sigmoid and tanh, in float32, inline, so that loops over it are vectorised.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace lightning_accel {

// Off by 2 units in the last place at most; 1e-38 for what is below -87; NaN of NaN. Cephes' polynomial (Moshier 1989).
inline float exp_of_negative(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504088896341f + 12582912.0f;  // rounds to an integer, in the lowest bits
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline float sigmoid(float x) {
  const float small = exp_of_negative(-std::fabs(x)), big = 1.0f / (1.0f + small);
  return x >= 0 ? big : small * big;
}

// Cephes' tanhf (Moshier 1989): a polynomial where the quotient would lose digits.
inline float tanh(float x) {
  const float size = std::fabs(x), z = x * x;
  const float small = exp_of_negative(-2.0f * size);
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  return size < 0.625f ? p * z * x + x : std::copysign((1.0f - small) / (1.0f + small), x);
}

}  // namespace lightning_accel
