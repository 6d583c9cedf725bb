// The steps of an LSTM or GRU layer in one direction over packed sequences, and their gradients, on CPU, in float32.
// Shapes: N valid steps of all samples, B samples, H hidden, G gates: 4 of an LSTM, 3 of a GRU.
//
// States of a sample do not depend on other samples: a thread runs all steps of its own, and waits for no other. Weights
// are packed once into panels, vectors of channels that are multiplied together, one of each gate, so that a cell
// follows its product at once. Each sum is computed by one thread, in one order: results do not depend on their number.

#include "dots.h"
#include "exponential.h"
#include "vectors.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using lightning_accel::dot;
using lightning_accel::sigmoid;
using lightning_accel::kSums;
using lightning_accel::tanh;
using lightning_accel::Vector;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int kLanes = lightning_accel::kWidth;
constexpr int kBack = 4;              // vectors of a panel in the backward pass
constexpr int64_t kGrain = 1 << 20;  // multiplications that are worth a thread

// sums (kRows, kVectors * kLanes) = x (kRows, depth), rows `stride` apart, times panel (depth, kVectors * kLanes).
template <int kVectors, int kRows>
inline void multiply_rows(const float* x, int64_t stride, const float* panel, int64_t depth, float* sums) {
  Vector sum[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vector weight[kVectors];
    std::memcpy(weight, panel + k * kVectors * kLanes, sizeof weight);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Vector value = x[row * stride + k] - Vector{};
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[row][v] += value * weight[v];
    }
  }
  std::memcpy(sums, sum, sizeof sum);
}

template <int kVectors, int kRows = kSums / kVectors>
void multiply(int64_t rows, const float* x, int64_t stride, const float* panel, int64_t depth, float* sums) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply<kVectors, kRows - 1>(rows, x, stride, panel, depth, sums);
  }
  multiply_rows<kVectors, kRows>(x, stride, panel, depth, sums);
}

// Calls use(row, channel, channels, sums) with the products of `rows` rows of x and all panels.
template <int kVectors, typename F>
void for_products(int64_t rows, const float* x, int64_t stride, const std::vector<float>& panels, int64_t depth,
                  int64_t width, const F& use) {
  constexpr int64_t kRows = kSums / kVectors;
  alignas(64) float sums[kSums * kLanes];
  const float* panel = panels.data();
  for (int64_t c = 0; c < width; ++c, panel += depth * kVectors * kLanes)
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t some = std::min(kRows, rows - row);
      multiply<kVectors>(some, x + row * stride, stride, panel, depth, sums);
      for (int64_t r = 0; r < some; ++r) use(row + r, c, sums + r * kVectors * kLanes);
    }
}

int64_t count(int64_t channels, int64_t width) { return (channels + width - 1) / width; }

// weight (G * H, H) as panels (H, G * kLanes) of kLanes channels of all gates.
std::vector<float> pack_forward(const float* weight, int64_t gates, int64_t hidden) {
  const int64_t width = gates * kLanes;
  std::vector<float> panels(count(hidden, kLanes) * hidden * width, 0.0f);
  for (int64_t gate = 0; gate < gates; ++gate)
    for (int64_t c = 0; c < hidden; ++c) {
      float* to = panels.data() + c / kLanes * hidden * width + gate * kLanes + c % kLanes;
      const float* from = weight + (gate * hidden + c) * hidden;
      for (int64_t k = 0; k < hidden; ++k) to[k * width] = from[k];
    }
  return panels;
}

// weight (D, H) as panels (D, kBack * kLanes) of channels.
std::vector<float> pack_backward(const float* weight, int64_t depth, int64_t hidden) {
  constexpr int64_t width = kBack * kLanes;
  std::vector<float> panels(count(hidden, width) * depth * width, 0.0f);
  for (int64_t c = 0; c < hidden; c += width)
    for (int64_t k = 0; k < depth; ++k)
      std::copy_n(weight + k * hidden + c, std::min(width, hidden - c), panels.data() + (c * depth + k * width));
  return panels;
}

// Steps in the order in which they are read, and the samples of each thread, which have about as many steps in all.
struct Plan {
  int64_t steps, samples, valid = 0;
  std::vector<int64_t> sizes, begins, bounds;
  bool reverse;

  Plan(const Tensor& batch_sizes, int64_t samples, bool reverse)
      : steps(batch_sizes.size(0)), samples(samples), reverse(reverse) {
    const int64_t* size = static_cast<const int64_t*>(batch_sizes.const_data_ptr());
    sizes.assign(size, size + steps);
    for (int64_t t = 0; t < steps; ++t) {
      STD_TORCH_CHECK(sizes[t] >= 1 && sizes[t] <= (t ? sizes[t - 1] : samples),
                      "batch_sizes must be positive, and not grow");
      begins.push_back(valid);
      valid += sizes[t];
    }
  }

  void split(int64_t multiplications) {
    const int64_t wanted = std::max<int64_t>(1, multiplications / kGrain);
    const int64_t threads = std::min<int64_t>({torch::stable::get_num_threads(), samples, wanted});
    bounds.assign(1, 0);
    int64_t before = 0, t = steps - 1;
    for (int64_t b = 0; b < samples; ++b) {
      while (t >= 0 && sizes[t] <= b) --t;
      before += t + 1;
      if (before * threads >= valid * static_cast<int64_t>(bounds.size())) bounds.push_back(b + 1);
    }
    bounds.back() = samples;
  }

  // Calls visit(first sample, samples, position of the first) of each thread's part of each step, in order or not.
  template <typename F>
  void for_steps(bool in_order, const F& visit) const {
    torch::stable::parallel_for(0, bounds.size() - 1, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part)
        for (int64_t i = 0; i < steps; ++i) {
          const int64_t t = in_order != reverse ? i : steps - 1 - i, first = bounds[part];
          const int64_t rows = std::min(sizes[t], bounds[part + 1]) - first;
          if (rows > 0) visit(first, rows, begins[t] + first);
        }
    });
  }
};

// States (B, H) and what each step keeps of them (N, ...). `extra` holds c before the step, or what a GRU's reset gate
// multiplies.
struct Data {
  int64_t hidden;
  float *h, *c, *gates, *extra, *out;
  const float* bias;
};

template <int kGates>
struct Cell;

template <>
struct Cell<4> {
  static void forward(const Data& all, int64_t sample, int64_t at, int64_t c0, int64_t n, const float* sums) {
    const int64_t hidden = all.hidden;
    float* __restrict__ i = all.gates + at * 4 * hidden + c0;
    float* __restrict__ f = i + hidden;
    float* __restrict__ g = f + hidden;
    float* __restrict__ o = g + hidden;
    float* __restrict__ h = all.h + sample * hidden + c0;
    float* __restrict__ c = all.c + sample * hidden + c0;
    float* __restrict__ out = all.out + at * hidden + c0;
    float* __restrict__ before = all.extra + at * hidden + c0;
#pragma GCC ivdep
    for (int64_t l = 0; l < n; ++l) {
      i[l] = sigmoid(i[l] + sums[l]);
      f[l] = sigmoid(f[l] + sums[l + kLanes]);
      g[l] = tanh(g[l] + sums[l + 2 * kLanes]);
      o[l] = sigmoid(o[l] + sums[l + 3 * kLanes]);
      before[l] = c[l];
      c[l] = f[l] * c[l] + i[l] * g[l];
      h[l] = out[l] = o[l] * tanh(c[l]);
    }
  }

  // Writes the gradients of a sample's gates, and of c; that of h is then a product.
  static void backward(const Data& all, const float* grad, const float*, int64_t sample, int64_t at, float* d_gates,
                       float*) {
    const int64_t hidden = all.hidden;
    const float* __restrict__ i = all.gates + at * 4 * hidden;
    const float* __restrict__ f = i + hidden;
    const float* __restrict__ g = f + hidden;
    const float* __restrict__ o = g + hidden;
    const float* __restrict__ before = all.extra + at * hidden;
    const float* __restrict__ d_out = grad + at * hidden;
    const float* __restrict__ d_h = all.h + sample * hidden;
    float* __restrict__ d_c = all.c + sample * hidden;
    float* __restrict__ d_i = d_gates + at * 4 * hidden;
    float* __restrict__ d_f = d_i + hidden;
    float* __restrict__ d_g = d_f + hidden;
    float* __restrict__ d_o = d_g + hidden;
#pragma GCC ivdep
    for (int64_t l = 0; l < hidden; ++l) {
      const float shown = tanh(f[l] * before[l] + i[l] * g[l]), d = d_out[l] + d_h[l];
      const float d_cell = d_c[l] + d * o[l] * (1.0f - shown * shown);
      d_i[l] = d_cell * g[l] * i[l] * (1.0f - i[l]);
      d_f[l] = d_cell * before[l] * f[l] * (1.0f - f[l]);
      d_g[l] = d_cell * i[l] * (1.0f - g[l] * g[l]);
      d_o[l] = d * shown * o[l] * (1.0f - o[l]);
      d_c[l] = d_cell * f[l];
    }
  }
};

template <>
struct Cell<3> {
  static void forward(const Data& all, int64_t sample, int64_t at, int64_t c0, int64_t n, const float* sums) {
    const int64_t hidden = all.hidden;
    float* __restrict__ r = all.gates + at * 3 * hidden + c0;
    float* __restrict__ z = r + hidden;
    float* __restrict__ g = z + hidden;
    float* __restrict__ h = all.h + sample * hidden + c0;
    float* __restrict__ out = all.out + at * hidden + c0;
    float* __restrict__ remembered = all.extra + at * hidden + c0;
    const float* __restrict__ bias = all.bias + c0;
#pragma GCC ivdep
    for (int64_t l = 0; l < n; ++l) {
      r[l] = sigmoid(r[l] + sums[l]);
      z[l] = sigmoid(z[l] + sums[l + kLanes]);
      remembered[l] = sums[l + 2 * kLanes] + bias[l];
      g[l] = tanh(g[l] + r[l] * remembered[l]);
      h[l] = out[l] = g[l] + z[l] * (h[l] - g[l]);
    }
  }

  // Writes the gradients of a sample's gates with respect to the input and the state, and what h passes on directly.
  static void backward(const Data& all, const float* grad, const float* before, int64_t sample, int64_t at,
                       float* d_gates, float* d_hidden) {
    const int64_t hidden = all.hidden;
    const float* __restrict__ r = all.gates + at * 3 * hidden;
    const float* __restrict__ z = r + hidden;
    const float* __restrict__ g = z + hidden;
    const float* __restrict__ remembered = all.extra + at * hidden;
    const float* __restrict__ was = before + at * hidden;
    const float* __restrict__ d_out = grad + at * hidden;
    float* __restrict__ d_h = all.h + sample * hidden;
    float* __restrict__ d_x = d_gates + at * 3 * hidden;
    float* __restrict__ d_y = d_hidden + at * 3 * hidden;
#pragma GCC ivdep
    for (int64_t l = 0; l < hidden; ++l) {
      const float d = d_out[l] + d_h[l];
      const float d_g = d * (1.0f - z[l]) * (1.0f - g[l] * g[l]);
      const float d_r = d_g * remembered[l] * r[l] * (1.0f - r[l]);
      const float d_z = d * (was[l] - g[l]) * z[l] * (1.0f - z[l]);
      d_x[l] = d_y[l] = d_r;
      d_x[l + hidden] = d_y[l + hidden] = d_z;
      d_x[l + 2 * hidden] = d_g;
      d_y[l + 2 * hidden] = d_g * r[l];
      d_h[l] = d * z[l];
    }
  }
};

template <int kGates>
void run(const Plan& plan, const Data& all, const float* weight, float* before) {
  const int64_t hidden = all.hidden;
  const std::vector<float> panels = pack_forward(weight, kGates, hidden);
  plan.for_steps(true, [&](int64_t first, int64_t rows, int64_t at) {
    std::copy_n(all.h + first * hidden, rows * hidden, before + at * hidden);
    for_products<kGates>(rows, before + at * hidden, hidden, panels, hidden, count(hidden, kLanes),
                         [&](int64_t row, int64_t panel, const float* sums) {
      const int64_t c0 = panel * kLanes;
      if (hidden - c0 >= kLanes) {  // a constant number of channels, for the compiler
        Cell<kGates>::forward(all, first + row, at + row, c0, kLanes, sums);
      } else {
        Cell<kGates>::forward(all, first + row, at + row, c0, hidden - c0, sums);
      }
    });
  });
}

template <int kGates>
void run_back(const Plan& plan, const Data& all, const float* weight, const float* grad, const float* before,
              float* d_gates, float* d_hidden) {
  const int64_t hidden = all.hidden, depth = kGates * hidden;
  constexpr int64_t width = kBack * kLanes;
  const std::vector<float> panels = pack_backward(weight, depth, hidden);
  const float* d_products = kGates == 3 ? d_hidden : d_gates;
  plan.for_steps(false, [&](int64_t first, int64_t rows, int64_t at) {
    for (int64_t row = 0; row < rows; ++row)
      Cell<kGates>::backward(all, grad, before, first + row, at + row, d_gates, d_hidden);
    for_products<kBack>(rows, d_products + at * depth, depth, panels, depth, count(hidden, width),
                        [&](int64_t row, int64_t panel, const float* sums) {
      float* __restrict__ d_h = all.h + (first + row) * hidden + panel * width;
      const int64_t n = std::min(width, hidden - panel * width);
#pragma GCC ivdep
      for (int64_t l = 0; l < n; ++l) d_h[l] = kGates == 3 ? d_h[l] + sums[l] : sums[l];
    });
  });
}

// One step of few samples: each product reads the weights where they are, since packing them would take longer.
template <int kGates>
void run_step(const Data& all, int64_t samples, int64_t inputs, const float* x, const float* before,
              const float* weight_ih, const float* weight_hh, const float* bias_ih, const float* bias_hh) {
  const int64_t hidden = all.hidden, panels = count(hidden, kLanes);
  const int64_t grain = kGrain / std::max<int64_t>(1, kGates * kLanes * samples * (inputs + hidden));
  torch::stable::parallel_for(0, panels, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
    alignas(64) float sums[kGates * kLanes];
    for (int64_t c0 = begin * kLanes; c0 < std::min(hidden, end * kLanes); c0 += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, hidden - c0);
      for (int64_t sample = 0; sample < samples; ++sample) {
        for (int64_t gate = 0; gate < kGates; ++gate) {
          const int64_t row = gate * hidden + c0;
          float* gates = all.gates + sample * kGates * hidden + row;
          dot(n, weight_ih + row * inputs, x + sample * inputs, inputs, gates);
          dot(n, weight_hh + row * hidden, before + sample * hidden, hidden, sums + gate * kLanes);
          const bool is_added_later = kGates == 3 && gate == 2;  // to what the reset gate multiplies
          for (int64_t l = 0; l < n; ++l) gates[l] += bias_ih[row + l] + (is_added_later ? 0.0f : bias_hh[row + l]);
        }
        Cell<kGates>::forward(all, sample, sample, c0, n, sums);
      }
    }
  });
}

void check(const Tensor& x, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.dim() == 2 && x.is_contiguous() && x.size(0) == rows &&
                      x.size(1) == columns,
                  "tensors must be contiguous float32, of the shapes of one layer");
}

Plan plan_of(const Tensor& batch_sizes, const Tensor& gates, const Tensor& weight, const Tensor& h, const Maybe& c,
             bool reverse) {
  STD_TORCH_CHECK(batch_sizes.scalar_type() == ScalarType::Long && batch_sizes.dim() == 1 &&
                      batch_sizes.is_contiguous() && h.dim() == 2 && gates.dim() == 2,
                  "batch_sizes must be (T,) int64, states (B, H), gates (N, G * H)");
  const int64_t hidden = h.size(1), samples = h.size(0), width = (c ? 4 : 3) * hidden;
  Plan plan(batch_sizes, samples, reverse);
  check(gates, plan.valid, width);
  check(weight, width, hidden);
  check(h, samples, hidden);
  if (c) check(*c, samples, hidden);
  plan.split(plan.valid * width * hidden);
  return plan;
}

float* data(const Tensor& x) { return static_cast<float*>(x.mutable_data_ptr()); }
const float* read(const Tensor& x) { return static_cast<const float*>(x.const_data_ptr()); }

// Overwrites gates, which come with the biases, by their values, and the states h and c, by the last ones.
std::tuple<Tensor, Tensor, Tensor> recurrent_steps(Tensor gates, const Tensor& weight, const Tensor& bias, Tensor h,
                                                   std::optional<Tensor> c, const Tensor& batch_sizes, bool reverse) {
  const Plan plan = plan_of(batch_sizes, gates, weight, h, c, reverse);
  const int64_t hidden = h.size(1);
  STD_TORCH_CHECK(bias.scalar_type() == ScalarType::Float && bias.dim() == 1 && bias.is_contiguous() &&
                      bias.size(0) == (c ? 0 : hidden), "bias must be (H,) float32 of a GRU, empty of an LSTM");
  Tensor out = torch::stable::new_empty(gates, {plan.valid, hidden});
  Tensor before = torch::stable::new_empty(gates, {plan.valid, hidden});
  Tensor extra = torch::stable::new_empty(gates, {plan.valid, hidden});
  const Data all{hidden, data(h), c ? data(*c) : nullptr, data(gates), data(extra), data(out), read(bias)};
  c ? run<4>(plan, all, read(weight), data(before)) : run<3>(plan, all, read(weight), data(before));
  return {out, before, extra};
}

// Overwrites the gradients of the last states by those of the first ones. The gradients of the gates with respect to
// the state are empty where they are those with respect to the input: of an LSTM.
std::tuple<Tensor, Tensor> recurrent_steps_backward(const Tensor& grad, Tensor d_h, std::optional<Tensor> d_c,
                                                    const Tensor& gates, const Tensor& before, const Tensor& extra,
                                                    const Tensor& weight, const Tensor& batch_sizes, bool reverse) {
  const Plan plan = plan_of(batch_sizes, gates, weight, d_h, d_c, reverse);
  const int64_t hidden = d_h.size(1);
  for (const Tensor& x : {grad, before, extra}) check(x, plan.valid, hidden);
  Tensor d_gates = torch::stable::new_empty(gates, {plan.valid, gates.size(1)});
  Tensor d_hidden = torch::stable::new_empty(gates, {d_c ? 0 : plan.valid, gates.size(1)});
  const Data all{hidden, data(d_h), d_c ? data(*d_c) : nullptr, const_cast<float*>(read(gates)),
                 const_cast<float*>(read(extra)), nullptr, nullptr};
  const auto back = d_c ? run_back<4> : run_back<3>;
  back(plan, all, read(weight), read(grad), read(before), data(d_gates), data(d_hidden));
  return {d_gates, d_hidden};
}

// Overwrites the states h and c by those after one step.
void recurrent_step(const Tensor& x, Tensor h, std::optional<Tensor> c, const Tensor& weight_ih, const Tensor& weight_hh,
                    const Tensor& bias_ih, const Tensor& bias_hh) {
  STD_TORCH_CHECK(x.dim() == 2 && h.dim() == 2, "x must be (B, I), states (B, H)");
  const int64_t samples = h.size(0), hidden = h.size(1), inputs = x.size(1), width = (c ? 4 : 3) * hidden;
  check(x, samples, inputs);
  check(h, samples, hidden);
  if (c) check(*c, samples, hidden);
  check(weight_ih, width, inputs);
  check(weight_hh, width, hidden);
  for (const Tensor* bias : {&bias_ih, &bias_hh})
    STD_TORCH_CHECK(bias->scalar_type() == ScalarType::Float && bias->dim() == 1 && bias->is_contiguous() &&
                        bias->size(0) == width, "biases must be (G * H,) float32");
  std::vector<float> room(samples * (width + 3 * hidden));
  float* const gates = room.data();
  float* const before = gates + samples * (width + 2 * hidden);
  std::copy_n(read(h), samples * hidden, before);
  const Data all{hidden, data(h), c ? data(*c) : nullptr, gates, gates + samples * width,
                 gates + samples * (width + hidden), read(bias_hh) + (c ? 0 : 2 * hidden)};
  const auto step = c ? run_step<4> : run_step<3>;
  step(all, samples, inputs, read(x), before, read(weight_ih), read(weight_hh), read(bias_ih), read(bias_hh));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def(
      "recurrent_steps(Tensor(a!) gates, Tensor weight, Tensor bias, Tensor(b!) h, Tensor(c!)? c, Tensor batch_sizes, "
      "bool reverse) -> (Tensor, Tensor, Tensor)");
  m.def(
      "recurrent_steps_backward(Tensor grad, Tensor(a!) d_h, Tensor(b!)? d_c, Tensor gates, Tensor before, "
      "Tensor extra, Tensor weight, Tensor batch_sizes, bool reverse) -> (Tensor, Tensor)");
  m.def(
      "recurrent_step(Tensor x, Tensor(a!) h, Tensor(b!)? c, Tensor weight_ih, Tensor weight_hh, Tensor bias_ih, "
      "Tensor bias_hh) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(lightning_accel_native, CPU, m) {
  m.impl("recurrent_steps", TORCH_BOX(&recurrent_steps));
  m.impl("recurrent_steps_backward", TORCH_BOX(&recurrent_steps_backward));
  m.impl("recurrent_step", TORCH_BOX(&recurrent_step));
}
