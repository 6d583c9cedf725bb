// The recurrences of minGRU and minLSTM from what their linear maps give, and their gradients, on CPU, in float32.
// Shapes: B rows, T steps, H channels, G gates.
//
// One pass over time; gates are computed where they are used, again in the backward pass. Threads share rows, and
// channels where rows are few; each channel is summed by one thread from the first step to the last, so that results do
// not depend on their number.

#include "exponential.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using lightning_accel::exp_of_negative;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int64_t kGrain = 32768;  // elements that are worth a thread
constexpr int64_t kLane = 16;      // channels of a vector

// a * b + c, rounded once where the processor can: said, not left to the compiler, so that all of its loops agree.
float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// (B, T, H) or, with step 0, (B, H); channels lie next to each other.
template <typename T>
struct View {
  T* data = nullptr;
  int64_t row = 0, step = 0;
  T* operator()(int64_t b, int64_t t) const { return data + b * row + t * step; }
};

Tensor with_unit_channels(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return x.size(last) <= 1 || x.stride(last) == 1 ? x : torch::stable::contiguous(x);
}

Maybe with_unit_channels(const Maybe& x) {
  return x ? Maybe(with_unit_channels(*x)) : std::nullopt;
}

View<const float> read(const Tensor& x) {
  return {static_cast<const float*>(x.const_data_ptr()), x.stride(0), x.dim() == 3 ? x.stride(1) : 0};
}

View<float> write(const Tensor& x) {
  return {static_cast<float*>(x.mutable_data_ptr()), x.stride(0), x.dim() == 3 ? x.stride(1) : 0};
}

struct Starts {
  const bool* data = nullptr;
  int64_t row = 0, step = 0;
  explicit Starts(const Maybe& mask) {
    if (!mask) return;
    data = static_cast<const bool*>(mask->const_data_ptr());
    row = mask->stride(0), step = mask->stride(1);
  }
  bool operator()(int64_t b, int64_t t) const { return data && data[b * row + t * step]; }
};

bool is_time_major(const Tensor& x) { return x.stride(1) > x.stride(0); }

// Fresh memory for `channels`, time-major where `like` is, batch-major otherwise.
Tensor empty_as(const Tensor& like, int64_t channels) {
  const int64_t rows = like.size(0), steps = like.size(1);
  Tensor given = like;
  if (like.is_contiguous() || !torch::stable::transpose(given, 0, 1).is_contiguous())
    return torch::stable::new_empty(like, {rows, steps, channels});
  Tensor swapped = torch::stable::new_empty(like, {steps, rows, channels});
  return torch::stable::transpose(swapped, 0, 1);
}

// Calls visit(b, t, c0, c1, state) for all steps of all rows and channels in the order of time, several threads at
// once; `state` is (c1 - c0,) numbers which are the caller's own, zeros at first. Memory is gone through as
// it lies: row by row, or, time-major, step by step.
template <typename F>
void over_time(int64_t rows, int64_t steps, int64_t channels, bool time_major, bool reverse, const F& visit) {
  const int64_t threads_a_row = (torch::stable::get_num_threads() + rows - 1) / rows;
  const int64_t parts = std::max<int64_t>(1, std::min(channels / kLane, threads_a_row));
  const int64_t width = ((channels + parts - 1) / parts + kLane - 1) / kLane * kLane;
  const int64_t blocks = (channels + width - 1) / width;
  const int64_t grain = std::max<int64_t>(1, kGrain / (steps * std::min(width, channels)));
  torch::stable::parallel_for(0, rows * blocks, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> states((end - begin) * width, 0.0f);
    const auto one = [&](int64_t item, int64_t t) {
      const int64_t c0 = item % blocks * width, c1 = std::min(channels, c0 + width);
      visit(item / blocks, reverse ? steps - 1 - t : t, c0, c1, states.data() + (item - begin) * width);
    };
    if (time_major) {
      for (int64_t t = 0; t < steps; ++t)
        for (int64_t item = begin; item < end; ++item) one(item, t);
    } else {
      for (int64_t item = begin; item < end; ++item)
        for (int64_t t = 0; t < steps; ++t) one(item, t);
    }
  });
}

// What a step keeps of the state, takes of the candidate, and how these change with the first two inputs.
struct MinGRU {  // update, candidate
  static constexpr int64_t kGates = 2;
  float keep, take;
  MinGRU(float update, float) {
    const float small = exp_of_negative(-std::fabs(update)), big = 1.0f / (1.0f + small);
    take = update >= 0 ? big : small * big;
    keep = update >= 0 ? small * big : big;
  }
};

struct MinLSTM {  // keep, entry, candidate: the odds are sigmoid(keep) to sigmoid(entry)
  static constexpr int64_t kGates = 3;
  float keep, take, not_kept, not_entered;
  MinLSTM(float kept, float entry) {
    kept = kept < -1e30f ? -1e30f : kept;
    entry = entry < -1e30f ? -1e30f : entry;
    float top = kept < entry ? -kept : -entry;
    top = top < 0 ? 0 : top;  // taken out of all, so that none overflows
    const float one = exp_of_negative(-top);
    const float of_kept = exp_of_negative(-kept - top), of_entry = exp_of_negative(-entry - top);
    const float scale = 1.0f / (one + of_entry + one + of_kept);
    keep = (one + of_entry) * scale, take = (one + of_kept) * scale;
    not_kept = of_kept / (one + of_kept), not_entered = of_entry / (one + of_entry);
  }
};

struct Lengths {
  const int64_t* data = nullptr;
  int64_t row = 0;
  explicit Lengths(const Maybe& given) {
    if (!given) return;
    data = static_cast<const int64_t*>(given->const_data_ptr());
    row = given->stride(0);
  }
  bool is_over(int64_t b, int64_t t) const { return data && t >= data[b * row]; }
};

template <typename Cell>
void forward(const Tensor& gates, const Maybe& state, const Starts& starts, const Lengths& lengths, const Tensor& out) {
  const View<const float> inputs = read(gates);
  const View<const float> states = state ? read(*state) : View<const float>();
  const View<float> outs = write(out);
  const int64_t channels = out.size(2);
  over_time(out.size(0), out.size(1), channels, is_time_major(out), false,
                   [&](int64_t b, int64_t t, int64_t c0, int64_t c1, float* __restrict__ h) {
    const int64_t n = c1 - c0;
    const float* __restrict__ x = inputs(b, t) + c0;
    const float* __restrict__ y = x + channels;
    const float* __restrict__ candidate = x + (Cell::kGates - 1) * channels;
    float* __restrict__ o = outs(b, t) + c0;
    if (t == 0 && states.data) std::copy_n(states(b, 0) + c0, n, h);
    if (lengths.is_over(b, t)) {
      std::copy_n(h, n, o);
      return;
    }
    if (starts(b, t)) std::fill_n(h, n, 0.0f);
#pragma GCC ivdep
    for (int64_t c = 0; c < n; ++c) {
      const Cell cell(x[c], y[c]);
      h[c] = o[c] = fused(cell.keep, h[c], cell.take * candidate[c]);
    }
  });
}

// Writes the gradients of a step's gates; `difference` is how far the candidate is from the state before.
inline void step_back(const MinGRU& cell, float g, float difference, float* __restrict__ d_x, float* __restrict__) {
  *d_x = g * difference * cell.take * cell.keep;
}
inline void step_back(const MinLSTM& cell, float g, float difference, float* __restrict__ d_x,
                      float* __restrict__ d_y) {
  const float d_odds = -g * difference * cell.take * cell.keep;
  *d_x = d_odds * cell.not_kept;
  *d_y = -d_odds * cell.not_entered;
}

template <typename Cell>
void backward(const Tensor& grad, const Tensor& gates, const Tensor& out, const Maybe& state, const Starts& starts,
              const Lengths& lengths, const Tensor& d_gates, const Tensor& d_state) {
  const View<const float> grads = read(grad), inputs = read(gates), outs = read(out);
  const View<const float> states = state ? read(*state) : View<const float>();
  const View<float> d_inputs = write(d_gates), d_states = write(d_state);
  const int64_t channels = out.size(2);
  const std::vector<float> zeros(channels, 0.0f);
  over_time(out.size(0), out.size(1), channels, is_time_major(out), true,
                   [&](int64_t b, int64_t t, int64_t c0, int64_t c1, float* __restrict__ carry) {
    const int64_t n = c1 - c0;
    const float* __restrict__ d = grads(b, t) + c0;
    const float* __restrict__ x = inputs(b, t) + c0;
    const float* __restrict__ y = x + channels;
    const float* __restrict__ candidate = x + (Cell::kGates - 1) * channels;
    float* __restrict__ d_x = d_inputs(b, t) + c0;
    float* __restrict__ d_y = d_x + channels;
    float* __restrict__ d_candidate = d_x + (Cell::kGates - 1) * channels;
    const bool over = lengths.is_over(b, t), begins = !over && starts(b, t);
    const float* __restrict__ before =
        begins || (!t && !states.data) ? zeros.data() : (t ? outs(b, t - 1) : states(b, 0)) + c0;
    if (over) {
      for (int64_t c = 0; c < n; ++c) carry[c] += d[c];
      for (int64_t part = 0; part < Cell::kGates; ++part) std::fill_n(d_x + part * channels, n, 0.0f);
    } else {
#pragma GCC ivdep
      for (int64_t c = 0; c < n; ++c) {
        const Cell cell(x[c], y[c]);
        const float g = d[c] + carry[c];
        step_back(cell, g, candidate[c] - before[c], d_x + c, d_y + c);
        d_candidate[c] = g * cell.take;
        carry[c] = cell.keep * g;
      }
    }
    if (begins) std::fill_n(carry, n, 0.0f);
    if (t == 0) std::copy_n(carry, n, d_states(b, 0) + c0);
  });
}

template <typename F>
void with_cell(int64_t num_gates, const F& call) {
  num_gates == MinGRU::kGates ? call(MinGRU(0, 0)) : call(MinLSTM(0, 0));
}

void check(const Tensor& gates, const Maybe& state, const Maybe& starts, const Maybe& lengths,
           int64_t num_gates) {
  STD_TORCH_CHECK(num_gates == MinGRU::kGates || num_gates == MinLSTM::kGates,
                  "num_gates must be 2, minGRU, or 3, minLSTM");
  STD_TORCH_CHECK(gates.dim() == 3 && gates.size(2) % num_gates == 0, "gates must be (B, T, num_gates * H)");
  const int64_t rows = gates.size(0), steps = gates.size(1), channels = gates.size(2) / num_gates;
  STD_TORCH_CHECK(gates.scalar_type() == ScalarType::Float && (!state || state->scalar_type() == ScalarType::Float),
                  "gates and state must be float32");
  STD_TORCH_CHECK(!state || (state->dim() == 2 && state->size(0) == rows && state->size(1) == channels),
                  "state must be (B, H)");
  STD_TORCH_CHECK(!starts || (starts->scalar_type() == ScalarType::Bool && starts->dim() == 2 &&
                              starts->size(0) == rows && starts->size(1) == steps),
                  "starts must be (B, T) bool");
  STD_TORCH_CHECK(!lengths || (lengths->scalar_type() == ScalarType::Long && lengths->dim() == 1 &&
                               lengths->size(0) == rows),
                  "lengths must be (B,) int64");
}

Tensor gated_scan(const Tensor& gates, const Maybe& state, const Maybe& starts,
                  const Maybe& lengths, int64_t num_gates) {
  check(gates, state, starts, lengths, num_gates);
  Tensor out = empty_as(gates, gates.size(2) / num_gates);
  if (out.numel()) {
    const Tensor inputs = with_unit_channels(gates);
    const Maybe states = with_unit_channels(state);
    with_cell(num_gates, [&](auto cell) {
      forward<decltype(cell)>(inputs, states, Starts(starts), Lengths(lengths), out);
    });
  }
  return out;
}

std::tuple<Tensor, Tensor> gated_scan_backward(const Tensor& grad, const Tensor& gates, const Tensor& out,
                                               const Maybe& state, const Maybe& starts, const Maybe& lengths,
                                               int64_t num_gates) {
  check(gates, state, starts, lengths, num_gates);
  for (const Tensor& x : {grad, out})
    STD_TORCH_CHECK(x.dim() == 3 && x.size(0) == gates.size(0) && x.size(1) == gates.size(1) &&
                        x.size(2) == gates.size(2) / num_gates && x.scalar_type() == ScalarType::Float,
                    "grad and out must be (B, T, H) float32");
  Tensor d_gates = empty_as(gates, gates.size(2));
  Tensor d_state = out.numel() ? torch::stable::new_empty(out, {out.size(0), out.size(2)})
                               : torch::stable::new_zeros(out, {out.size(0), out.size(2)});
  if (out.numel()) {
    const Tensor grads = with_unit_channels(grad), inputs = with_unit_channels(gates), outs = with_unit_channels(out);
    const Maybe states = with_unit_channels(state);
    with_cell(num_gates, [&](auto cell) {
      backward<decltype(cell)>(grads, inputs, outs, states, Starts(starts), Lengths(lengths), d_gates, d_state);
    });
  }
  return {d_gates, d_state};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def("gated_scan(Tensor gates, Tensor? state, Tensor? starts, Tensor? lengths, int num_gates) -> Tensor");
  m.def(
      "gated_scan_backward(Tensor grad, Tensor gates, Tensor out, Tensor? state, Tensor? starts, Tensor? lengths, "
      "int num_gates) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(lightning_accel_native, CPU, m) {
  m.impl("gated_scan", TORCH_BOX(&gated_scan));
  m.impl("gated_scan_backward", TORCH_BOX(&gated_scan_backward));
}
