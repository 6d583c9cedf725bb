// The recurrences of minGRU and minLSTM from what their linear maps give, and their gradients, on CPU, in float32.
// Shapes: B rows, T steps, H channels, G gates. Gates are computed where they are used, again in the backward pass.

#include "exponential.h"
#include "scan.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>

namespace {

using namespace lightning_accel;

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
  const View<const float> inputs = read<float>(gates);
  const View<const float> states = state ? read<float>(*state) : View<const float>();
  const View<float> outs = write<float>(out);
  const int64_t channels = out.size(2);
  over_time<float>(out.size(0), out.size(1), channels, is_time_major(out), false,
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
  const View<const float> grads = read<float>(grad), inputs = read<float>(gates), outs = read<float>(out);
  const View<const float> states = state ? read<float>(*state) : View<const float>();
  const View<float> d_inputs = write<float>(d_gates), d_states = write<float>(d_state);
  const int64_t channels = out.size(2);
  const std::vector<float> zeros(channels, 0.0f);
  over_time<float>(out.size(0), out.size(1), channels, is_time_major(out), true,
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
