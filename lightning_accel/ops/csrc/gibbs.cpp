// Draws of a Gibbs step: probabilities, random numbers and their comparison in one pass, on all threads.
#include "gibbs.h"
#include "philox_tile.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace {
using lightning_accel::kTile;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kGrain = 256;  // tiles for a thread at least, as torch has it

inline void draw_tile(const float* logits, float* drawn, int64_t counter, uint64_t key) {
  uint32_t words[kTile];
  lightning_accel::random_tile(uint64_t(counter), key, words);
  for (int64_t i = 0; i < kTile; ++i) drawn[i] = lightning_accel::bernoulli(logits[i], words[i]);
}

Tensor sample_bernoulli(const Tensor& any, const Tensor& seed) {
  STD_TORCH_CHECK(any.scalar_type() == ScalarType::Float, "sample_bernoulli takes logits in float32");
  STD_TORCH_CHECK(seed.is_cpu() && seed.scalar_type() == ScalarType::Long && seed.numel() == 1,
                  "seed must be (1,) int64, on the device of logits");
  const Tensor in = any.is_contiguous() ? any : torch::stable::contiguous(any);
  const Tensor out = torch::stable::new_empty(in, in.sizes());
  const float* logits = static_cast<const float*>(in.const_data_ptr());
  float* drawn = static_cast<float*>(out.mutable_data_ptr());
  const uint64_t key = uint64_t(*static_cast<const int64_t*>(seed.const_data_ptr()));
  const int64_t n = in.numel();
  torch::stable::parallel_for(0, (n + kTile - 1) / kTile, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t start = tile * kTile, counter = tile * (kTile / 4);
      if (start + kTile <= n) {
        draw_tile(logits + start, drawn + start, counter, key);
        continue;
      }
      float rest[kTile] = {}, rest_drawn[kTile];
      memcpy(rest, logits + start, (n - start) * sizeof(float));
      draw_tile(rest, rest_drawn, counter, key);
      memcpy(drawn + start, rest_drawn, (n - start) * sizeof(float));
    }
  });
  return out;
}
}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def("sample_bernoulli(Tensor logits, Tensor seed) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(lightning_accel_native, CPU, m) {
  m.impl("sample_bernoulli", TORCH_BOX(&sample_bernoulli));
}
