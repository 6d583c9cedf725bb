// Draws of 0 or 1 with one probability, in place, on all threads.
#include "philox_tile.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace {
using lightning_accel::kTile;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kGrain = 256;  // tiles for a thread at least, as torch has it

// Whether the elements lie side by side, in any order of the dimensions, none of them in the place of another.
bool is_dense(const Tensor& x) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (int64_t i = 0; i < x.dim(); ++i)
    if (x.size(i) != 1) dims.emplace_back(x.stride(i), x.size(i));
  std::sort(dims.begin(), dims.end());
  int64_t next = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != next) return false;
    next *= size;
  }
  return true;
}

// Writes `one`, bits of the type of the elements, where a word is at most `last`, and 0 elsewhere. Its arguments are
// values, since compilers would read captured ones anew after each store.
template <typename Bits>
inline void draw_tile(int64_t tile, uint64_t key, uint32_t last, Bits one, Bits* out) {
  uint32_t words[kTile];
  lightning_accel::random_tile(uint64_t(tile) * (kTile / 4), key, words);
  for (int64_t i = 0; i < kTile; ++i) out[i] = words[i] <= last ? one : Bits(0);
}

template <typename Bits>
void draw(void* elements, int64_t n, Bits one, uint32_t last, uint64_t key) {
  Bits* out = static_cast<Bits*>(elements);
  torch::stable::parallel_for(0, (n + kTile - 1) / kTile, kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t start = tile * kTile;
      if (start + kTile <= n) {
        draw_tile(tile, key, last, one, out + start);
      } else {
        Bits drawn[kTile];
        draw_tile(tile, key, last, one, drawn);
        memcpy(out + start, drawn, (n - start) * sizeof(Bits));
      }
    }
  });
}

void fill(void* out, int64_t n, ScalarType type, uint32_t last, uint64_t key) {
  switch (type) {
    case ScalarType::Float: return draw<uint32_t>(out, n, 0x3F800000u, last, key);
    case ScalarType::BFloat16: return draw<uint16_t>(out, n, 0x3F80, last, key);
    case ScalarType::Half: return draw<uint16_t>(out, n, 0x3C00, last, key);
    case ScalarType::Double: return draw<uint64_t>(out, n, 0x3FF0000000000000u, last, key);
    case ScalarType::Bool: return draw<uint8_t>(out, n, 1, last, key);
    default: STD_TORCH_CHECK(false, "bernoulli_ takes float32, bfloat16, float16, float64 or bool");
  }
}

// Probabilities are rounded to multiples of 2^-32, of which there are as many as words, and 1.
void bernoulli_(Tensor self, double p, const Tensor& seed) {
  STD_TORCH_CHECK(p >= 0 && p <= 1, "p must lie in [0, 1]; got ", p);
  STD_TORCH_CHECK(seed.is_cpu() && seed.scalar_type() == ScalarType::Long && seed.numel() == 1,
                  "seed must be (1,) int64, on the CPU");
  const int64_t count = std::llround(p * 4294967296.0);  // words that draw 1
  if (count == 0) {
    torch::stable::zero_(self);
    return;
  }
  const uint64_t key = uint64_t(*static_cast<const int64_t*>(seed.const_data_ptr()));
  const bool in_place = is_dense(self);
  const Tensor out = in_place ? self : torch::stable::new_empty(self, self.sizes());
  fill(out.mutable_data_ptr(), out.numel(), self.scalar_type(), uint32_t(count - 1), key);
  if (!in_place) torch::stable::copy_(self, out);
}
}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def("bernoulli_(Tensor(a!) self, float p, Tensor seed) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(lightning_accel_native, CPU, m) {
  m.impl("bernoulli_", TORCH_BOX(&bernoulli_));
}
