// h[t] = gate[t] * h[t - 1] + value[t] and its gradient, on CPU. Shapes: B rows, T steps, H channels.
// Accumulates in float32, or float64.

#include "scan.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>

namespace {

using namespace lightning_accel;

template <typename T>
void forward(const Tensor& gate, const Tensor& value, const Maybe& state, const Starts& starts, const Tensor& out) {
  using W = wide<T>;
  const View<const T> gates = read<T>(gate), values = read<T>(value);
  const View<const T> states = state ? read<T>(*state) : View<const T>();
  const View<T> outs = write<T>(out);
  over_time<W>(out.size(0), out.size(1), out.size(2), is_time_major(out), false,
               [&](int64_t b, int64_t t, int64_t c0, int64_t c1, W* __restrict__ h) {
    const int64_t n = c1 - c0;
    const T* __restrict__ a = gates(b, t) + c0;
    const T* __restrict__ v = values(b, t) + c0;
    T* __restrict__ o = outs(b, t) + c0;
    if (t == 0 && states.data) {
      const T* first = states(b, 0) + c0;
      for (int64_t c = 0; c < n; ++c) h[c] = W(first[c]);
    }
    if (starts(b, t) || (t == 0 && !states.data)) {  // not by a gate of 0: 0 * inf is NaN
      for (int64_t c = 0; c < n; ++c) h[c] = W(v[c]), o[c] = v[c];
    } else {
      for (int64_t c = 0; c < n; ++c) {
        const W s = fused(W(a[c]), h[c], W(v[c]));
        h[c] = s, o[c] = T(s);
      }
    }
  });
}

template <typename T>
void backward(const Tensor& grad, const Tensor& gate, const Tensor& out, const Maybe& state, const Starts& starts,
              const Tensor& d_gate, const Tensor& d_value, const Tensor& d_state) {
  using W = wide<T>;
  const View<const T> grads = read<T>(grad), gates = read<T>(gate), outs = read<T>(out);
  const View<const T> states = state ? read<T>(*state) : View<const T>();
  const View<T> d_gates = write<T>(d_gate), d_values = write<T>(d_value), d_states = write<T>(d_state);
  const int64_t steps = out.size(1);
  over_time<W>(out.size(0), steps, out.size(2), is_time_major(out), true,
               [&](int64_t b, int64_t t, int64_t c0, int64_t c1, W* __restrict__ g) {
    const int64_t n = c1 - c0;
    const T* __restrict__ d = grads(b, t) + c0;
    T* __restrict__ dv = d_values(b, t) + c0;
    T* __restrict__ da = d_gates(b, t) + c0;
    const bool begins = starts(b, t);
    const T* __restrict__ before = t ? outs(b, t - 1) + c0 : states.data ? states(b, 0) + c0 : nullptr;
    if (t + 1 == steps || starts(b, t + 1)) {
      for (int64_t c = 0; c < n; ++c) g[c] = W(d[c]), dv[c] = d[c];
    } else {
      const T* __restrict__ a = gates(b, t + 1) + c0;
      for (int64_t c = 0; c < n; ++c) {
        const W s = fused(W(a[c]), g[c], W(d[c]));
        g[c] = s, dv[c] = T(s);
      }
    }
    if (begins || !before) {
      std::fill(da, da + n, T(0));
    } else {
      for (int64_t c = 0; c < n; ++c) da[c] = T(g[c] * W(before[c]));
    }
    if (t == 0) {
      T* first = d_states(b, 0) + c0;
      const T* a = gates(b, 0) + c0;
      for (int64_t c = 0; c < n; ++c) first[c] = begins ? T(0) : T(W(a[c]) * g[c]);
    }
  });
}

template <typename F>
void with_type(ScalarType type, const F& call) {
  switch (type) {
    case ScalarType::Float: return call(float());
    case ScalarType::Double: return call(double());
    case ScalarType::BFloat16: return call(torch::headeronly::BFloat16());
    case ScalarType::Half: return call(torch::headeronly::Half());
    default: STD_TORCH_CHECK(false, "linear_scan needs float32, float64, bfloat16 or float16");
  }
}

void check(const Tensor& gate, const Tensor& value, const Maybe& state, const Maybe& starts) {
  const auto same_type = [&](const Tensor& x) { return x.scalar_type() == value.scalar_type(); };
  const auto same_size = [&](const Tensor& x) {
    return x.dim() == 3 && x.size(0) == value.size(0) && x.size(1) == value.size(1) && x.size(2) == value.size(2);
  };
  STD_TORCH_CHECK(same_size(value) && same_size(gate), "gate and value must both be (B, T, H)");
  STD_TORCH_CHECK(same_type(gate) && (!state || same_type(*state)), "gate, value and state must have one dtype");
  STD_TORCH_CHECK(!state || (state->dim() == 2 && state->size(0) == value.size(0) && state->size(1) == value.size(2)),
                  "state must be (B, H)");
  STD_TORCH_CHECK(!starts || (starts->scalar_type() == ScalarType::Bool && starts->dim() == 2 &&
                              starts->size(0) == value.size(0) && starts->size(1) == value.size(1)),
                  "starts must be (B, T) bool");
}

Tensor linear_scan(const Tensor& gate, const Tensor& value, const Maybe& state, const Maybe& starts) {
  check(gate, value, state, starts);
  Tensor out = empty_as(value, value.size(2));
  if (out.numel()) {
    const Tensor gates = with_unit_channels(gate), values = with_unit_channels(value);
    const Maybe states = with_unit_channels(state);
    with_type(value.scalar_type(), [&](auto zero) {
      forward<decltype(zero)>(gates, values, states, Starts(starts), out);
    });
  }
  return out;
}

std::tuple<Tensor, Tensor, Tensor> linear_scan_backward(const Tensor& grad, const Tensor& gate, const Tensor& out,
                                                        const Maybe& state, const Maybe& starts) {
  check(gate, out, state, starts);
  check(grad, out, state, starts);
  Tensor d_gate = empty_as(out, out.size(2)), d_value = empty_as(out, out.size(2));
  Tensor d_state = out.numel() ? torch::stable::new_empty(out, {out.size(0), out.size(2)})
                               : torch::stable::new_zeros(out, {out.size(0), out.size(2)});
  if (out.numel()) {
    const Tensor grads = with_unit_channels(grad), gates = with_unit_channels(gate), outs = with_unit_channels(out);
    const Maybe states = with_unit_channels(state);
    with_type(out.scalar_type(), [&](auto zero) {
      backward<decltype(zero)>(grads, gates, outs, states, Starts(starts), d_gate, d_value, d_state);
    });
  }
  return {d_gate, d_value, d_state};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def("linear_scan(Tensor gate, Tensor value, Tensor? state, Tensor? starts) -> Tensor");
  m.def(
      "linear_scan_backward(Tensor grad, Tensor gate, Tensor out, Tensor? state, Tensor? starts) "
      "-> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(lightning_accel_native, CPU, m) {
  m.impl("linear_scan", TORCH_BOX(&linear_scan));
  m.impl("linear_scan_backward", TORCH_BOX(&linear_scan_backward));
}
