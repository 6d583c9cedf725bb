// Linear layers of experts for few rows, on CPU: each weight is read once, and those of experts without rows never.
// Shapes: N rows of x, D features in, U out, E experts, S slots.

#include "dots.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace {

using lightning_accel::BFloat16;
using lightning_accel::dot;
using lightning_accel::read;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kPanel = 64;         // outputs that are computed together
constexpr int64_t kGrain = 1 << 19;  // multiplications that are worth a thread

struct Segment {
  int64_t expert, begin, end;  // slots of an expert
};

template <typename T>
void multiply(const std::vector<Segment>& segments, const float* x, const int64_t* row_of_slot, const T* weight,
              const T* bias, int64_t depth, int64_t width, int64_t slots, float* out) {
  const int64_t panels = (width + kPanel - 1) / kPanel, units = segments.size() * panels;
  const int64_t cost = std::max<int64_t>(1, slots * width * depth / std::max<int64_t>(1, units));
  torch::stable::parallel_for(0, units, std::max<int64_t>(1, kGrain / cost), [&](int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit) {
      const Segment& segment = segments[unit / panels];
      const int64_t column = unit % panels * kPanel, columns = std::min(kPanel, width - column);
      const T* const own = weight + (segment.expert * width + column) * depth;
      for (int64_t slot = segment.begin; slot < segment.end; ++slot) {
        float* const to = out + slot * width + column;
        dot(columns, own, x + row_of_slot[slot] * depth, depth, to);
        for (int64_t i = 0; bias != nullptr && i < columns; ++i) to[i] += read(bias[segment.expert * width + column + i]);
      }
    }
  });
}

void check(const Tensor& x, ScalarType dtype, int64_t dim) {
  STD_TORCH_CHECK(x.scalar_type() == dtype && x.dim() == dim && x.is_contiguous(),
                  "multiply_few_rows takes contiguous tensors: x (N, D) float32, weight (E, U, D) and bias (E, U) float32 or "
                  "bfloat16, row_of_slot (S,) and counts (E,) int64");
}

// Returns (S, U) float32: row row_of_slot[s] of x times the weight of the expert of slot s, slots sorted by expert; 0
// from slot counts.sum() on.
Tensor multiply_few_rows(const Tensor& x, const Tensor& row_of_slot, const Tensor& counts, const Tensor& weight,
                         std::optional<Tensor> bias) {
  const ScalarType dtype = weight.scalar_type();
  check(x, ScalarType::Float, 2);
  check(row_of_slot, ScalarType::Long, 1);
  check(counts, ScalarType::Long, 1);
  check(weight, dtype == ScalarType::BFloat16 ? dtype : ScalarType::Float, 3);
  const int64_t slots = row_of_slot.size(0), width = weight.size(1), depth = weight.size(2);
  if (bias) check(*bias, dtype, 2);
  STD_TORCH_CHECK(x.size(1) == depth && counts.size(0) == weight.size(0) &&
                      (!bias || (bias->size(0) == weight.size(0) && bias->size(1) == width)),
                  "shapes of x, counts, weight and bias disagree");
  const auto* const row = static_cast<const int64_t*>(row_of_slot.const_data_ptr());
  const auto* const count = static_cast<const int64_t*>(counts.const_data_ptr());
  for (int64_t slot = 0; slot < slots; ++slot)
    STD_TORCH_CHECK(row[slot] >= 0 && row[slot] < x.size(0), "row_of_slot must lie in [0, N)");
  std::vector<Segment> segments;
  int64_t begin = 0;
  for (int64_t expert = 0; expert < counts.size(0); ++expert) {
    if (count[expert]) segments.push_back({expert, begin, begin + count[expert]});
    begin += count[expert];
  }
  STD_TORCH_CHECK(begin <= slots, "counts must add up to at most the number of slots");
  Tensor out = torch::stable::new_empty(x, {slots, width});
  float* const to = static_cast<float*>(out.mutable_data_ptr());
  std::fill_n(to + begin * width, (slots - begin) * width, 0.0f);
  const auto* const from = static_cast<const float*>(x.const_data_ptr());
  const void* const added = bias ? bias->const_data_ptr() : nullptr;
  if (dtype == ScalarType::BFloat16) {
    multiply(segments, from, row, static_cast<const BFloat16*>(weight.const_data_ptr()),
             static_cast<const BFloat16*>(added), depth, width, begin, to);
  } else {
    multiply(segments, from, row, static_cast<const float*>(weight.const_data_ptr()), static_cast<const float*>(added),
             depth, width, begin, to);
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def("multiply_few_rows(Tensor x, Tensor row_of_slot, Tensor counts, Tensor weight, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lightning_accel_native, CPU, m) {
  m.impl("multiply_few_rows", TORCH_BOX(&multiply_few_rows));
}
