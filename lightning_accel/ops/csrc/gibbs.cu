// Draws of a Gibbs step, bit for bit those of gibbs.cpp.
#ifndef USE_CUDA
#define USE_CUDA  // lets shim.h declare what it has for CUDA
#endif
#include "gibbs.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cuda_runtime.h>

namespace {
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256;

// A thread has a counter, and so four elements; `aligned`: whether their logits can be read at once.
__global__ void __launch_bounds__(kThreads)
    draw(const float* logits, float* drawn, const int64_t* seed, bool aligned, int64_t n) {
  const int64_t counter = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t start = 4 * counter;
  if (start >= n) return;
  uint64_t word[4][1] = {{uint64_t(counter)}, {uint64_t(counter) >> 32}, {0}, {0}};
  lightning_accel::philox(word, uint64_t(*seed));
  if (aligned && start + 4 <= n) {
    const float4 logit = *reinterpret_cast<const float4*>(logits + start);
    *reinterpret_cast<float4*>(drawn + start) = make_float4(
        lightning_accel::bernoulli(logit.x, uint32_t(word[0][0])),
        lightning_accel::bernoulli(logit.y, uint32_t(word[1][0])),
        lightning_accel::bernoulli(logit.z, uint32_t(word[2][0])),
        lightning_accel::bernoulli(logit.w, uint32_t(word[3][0])));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (start + i < n) drawn[start + i] = lightning_accel::bernoulli(logits[start + i], uint32_t(word[i][0]));
  }
}

Tensor sample_bernoulli(const Tensor& any, const Tensor& seed) {
  STD_TORCH_CHECK(any.scalar_type() == ScalarType::Float, "sample_bernoulli takes logits in float32");
  STD_TORCH_CHECK(any.is_cuda() && seed.is_cuda() && seed.get_device_index() == any.get_device_index() &&
                      seed.scalar_type() == ScalarType::Long && seed.numel() == 1,
                  "seed must be (1,) int64, on the device of logits");
  const torch::stable::accelerator::DeviceGuard guard(any.get_device_index());
  const Tensor in = torch::stable::contiguous(any);
  const Tensor out = torch::stable::new_empty(in, in.sizes());
  const int64_t n = in.numel();
  if (n == 0) return out;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(in.get_device_index(), &stream));
  const float* logits = static_cast<const float*>(in.const_data_ptr());
  float* drawn = static_cast<float*>(out.mutable_data_ptr());
  const bool aligned = (reinterpret_cast<uintptr_t>(logits) | reinterpret_cast<uintptr_t>(drawn)) % sizeof(float4) == 0;
  const int64_t blocks = (n + 4 * kThreads - 1) / (4 * kThreads);
  draw<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      logits, drawn, static_cast<const int64_t*>(seed.const_data_ptr()), aligned, n);
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "sample_bernoulli: ", cudaGetErrorString(error));
  return out;
}
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lightning_accel_native, CUDA, m) {
  m.impl("sample_bernoulli", TORCH_BOX(&sample_bernoulli));
}
