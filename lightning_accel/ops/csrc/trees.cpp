// A recurrent network from the leaves of trees to their roots, and its gradients, on CPU, in float32 and float64.
// Shapes: N nodes, H hidden, G gates: 4 of an LSTM, 3 of a GRU.
//
// Nodes are sorted by level, deepest first, so that the children of a level are the level before it. The state of a
// child is multiplied by the weights in one product for each level. All else is computed channel by channel: threads
// share channels, and each sum over children has one order, whatever their number.

#include "exponential.h"

#include <ATen/Dispatch.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/stable/ops.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using lightning_accel::sigmoid;
using lightning_accel::tanh;
using Maybe = std::optional<Tensor>;

constexpr int64_t kGrain = 1 << 14;  // numbers of a level that are worth a thread
constexpr int64_t kLeast = 16;       // channels of a thread

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double tanh(double x) { return std::tanh(x); }

struct Level {
  int64_t first, begin, end;  // positions of the first child, of the first node, and behind the last node
  const int64_t* parents;     // of each child, as position
};

struct Levels {
  int64_t nodes, roots, longest = 0;  // longest: most nodes of a level that has a next one
  const Tensor kept, slots;
  const int64_t* order;
  std::vector<Level> all;
  std::vector<int64_t> parents;

  Levels(const Tensor& order_, at::IntArrayRef sizes, const Tensor& slots_, int64_t nodes)
      : nodes(nodes),
        roots(sizes.empty() ? 0 : sizes.back()),
        kept(order_.contiguous()),
        slots(slots_.contiguous()) {
    int64_t total = 0;
    for (const int64_t size : sizes) {
      TORCH_CHECK(size > 0, "sizes of levels must be positive");
      total += size;
    }
    TORCH_CHECK(kept.scalar_type() == at::kLong && kept.dim() == 1 && kept.size(0) == nodes && total == nodes &&
                    slots.scalar_type() == at::kLong && slots.dim() == 1 && slots.size(0) == nodes - roots,
                "levels must be those of one forest, with a node for each row of gates (N, G * H)");
    order = kept.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < nodes; ++i)
      TORCH_CHECK_INDEX(order[i] >= 0 && order[i] < nodes, "order must lie in [0, N)");
    parents.reserve(nodes);
    int64_t first = 0, begin = 0;
    for (size_t level = 0; level < sizes.size(); ++level) {
      const int64_t children = begin - first;
      longest = std::max(longest, children);
      for (int64_t child = first; child < begin; ++child) {
        const int64_t slot = slots.const_data_ptr<int64_t>()[child];
        TORCH_CHECK_INDEX(slot >= 0 && slot < sizes[level], "parents must lie in the next level");
        parents.push_back(begin + slot);
      }
      all.push_back({first, begin, begin + sizes[level], parents.data() + first});
      first = begin;
      begin += sizes[level];
    }
  }
};

// What nodes keep, sorted by level. `values` (N, G * H) has the gates: of a node, and as the last its own for its
// parent. `extra` is c (N, H) of an LSTM; of a GRU (N, 2 * H) what the reset gate multiplies, and the sum of states.
template <typename T>
struct Data {
  int64_t hidden;
  const int64_t* order;
  const T *gates, *products;  // (N, G * H) by node; of the children of a level
  T *values, *extra, *h;
};

template <typename T>
struct Gradients {
  T *gates, *products, *h, *c;  // gates by node, the others by level; c of an LSTM
};

template <typename T, int kGates>
struct Cell;

template <typename T>
struct Cell<T, 4> {
  static void forward(const Data<T>& all, const Level& level, int64_t c0, int64_t c1) {
    const int64_t hidden = all.hidden;
    for (int64_t node = level.begin; node < level.end; ++node) {
      for (int64_t gate = 0; gate < 3; ++gate)
        std::copy(all.gates + (all.order[node] * 4 + gate) * hidden + c0,
                  all.gates + (all.order[node] * 4 + gate) * hidden + c1, all.values + (node * 4 + gate) * hidden + c0);
      std::fill(all.extra + node * hidden + c0, all.extra + node * hidden + c1, T(0));
    }
    for (int64_t child = level.first; child < level.begin; ++child) {
      const int64_t node = level.parents[child - level.first];
      const T* __restrict__ x_f = all.gates + (all.order[node] * 4 + 3) * hidden;
      const T* __restrict__ product = all.products + (child - level.first) * 4 * hidden;
      const T* __restrict__ below = all.extra + child * hidden;
      T* __restrict__ sums = all.values + node * 4 * hidden;
      T* __restrict__ f = all.values + (child * 4 + 3) * hidden;
      T* __restrict__ c = all.extra + node * hidden;
#pragma GCC ivdep
      for (int64_t l = c0; l < c1; ++l) {
        f[l] = sigmoid(x_f[l] + product[l + 3 * hidden]);
        c[l] += f[l] * below[l];
        sums[l] += product[l];
        sums[l + hidden] += product[l + hidden];
        sums[l + 2 * hidden] += product[l + 2 * hidden];
      }
    }
    for (int64_t node = level.begin; node < level.end; ++node) {
      T* __restrict__ i = all.values + node * 4 * hidden;
      T* __restrict__ o = i + hidden;
      T* __restrict__ u = o + hidden;
      T* __restrict__ c = all.extra + node * hidden;
      T* __restrict__ h = all.h + node * hidden;
#pragma GCC ivdep
      for (int64_t l = c0; l < c1; ++l) {
        i[l] = sigmoid(i[l]);
        o[l] = sigmoid(o[l]);
        u[l] = tanh(u[l]);
        c[l] += i[l] * u[l];
        h[l] = o[l] * tanh(c[l]);
      }
    }
  }

  static void backward(const Data<T>& all, const Gradients<T>& d, const Level& level, int64_t c0, int64_t c1) {
    const int64_t hidden = all.hidden;
    for (int64_t node = level.begin; node < level.end; ++node) {
      const T* __restrict__ i = all.values + node * 4 * hidden;
      const T* __restrict__ o = i + hidden;
      const T* __restrict__ u = o + hidden;
      const T* __restrict__ c = all.extra + node * hidden;
      const T* __restrict__ d_h = d.h + node * hidden;
      T* __restrict__ d_c = d.c + node * hidden;
      T* __restrict__ d_i = d.gates + all.order[node] * 4 * hidden;
      T* __restrict__ d_o = d_i + hidden;
      T* __restrict__ d_u = d_o + hidden;
      T* __restrict__ d_f = d_u + hidden;
#pragma GCC ivdep
      for (int64_t l = c0; l < c1; ++l) {
        const T shown = tanh(c[l]);
        d_c[l] += d_h[l] * o[l] * (T(1) - shown * shown);
        d_i[l] = d_c[l] * u[l] * i[l] * (T(1) - i[l]);
        d_o[l] = d_h[l] * shown * o[l] * (T(1) - o[l]);
        d_u[l] = d_c[l] * i[l] * (T(1) - u[l] * u[l]);
        d_f[l] = T(0);
      }
    }
    for (int64_t child = level.first; child < level.begin; ++child) {
      const int64_t node = level.parents[child - level.first];
      const T* __restrict__ f = all.values + (child * 4 + 3) * hidden;
      const T* __restrict__ below = all.extra + child * hidden;
      const T* __restrict__ d_node = d.c + node * hidden;
      T* __restrict__ d_x = d.gates + all.order[node] * 4 * hidden;
      T* __restrict__ d_product = d.products + child * 4 * hidden;
      T* __restrict__ d_c = d.c + child * hidden;
#pragma GCC ivdep
      for (int64_t l = c0; l < c1; ++l) {
        const T d_f = d_node[l] * below[l] * f[l] * (T(1) - f[l]);
        d_c[l] = d_node[l] * f[l];
        d_x[l + 3 * hidden] += d_f;
        d_product[l] = d_x[l];
        d_product[l + hidden] = d_x[l + hidden];
        d_product[l + 2 * hidden] = d_x[l + 2 * hidden];
        d_product[l + 3 * hidden] = d_f;
      }
    }
  }
};

template <typename T>
struct Cell<T, 3> {
  static void forward(const Data<T>& all, const Level& level, int64_t c0, int64_t c1) {
    const int64_t hidden = all.hidden;
    for (int64_t node = level.begin; node < level.end; ++node) {
      for (int64_t gate = 0; gate < 2; ++gate)
        std::copy(all.gates + (all.order[node] * 3 + gate) * hidden + c0,
                  all.gates + (all.order[node] * 3 + gate) * hidden + c1, all.values + (node * 3 + gate) * hidden + c0);
      std::fill(all.extra + (node * 2 + 1) * hidden + c0, all.extra + (node * 2 + 1) * hidden + c1, T(0));
    }
    for (int64_t child = level.first; child < level.begin; ++child) {
      const int64_t node = level.parents[child - level.first];
      const T* __restrict__ x_r = all.gates + (all.order[node] * 3 + 2) * hidden;
      const T* __restrict__ product = all.products + (child - level.first) * 3 * hidden;
      const T* __restrict__ below = all.h + child * hidden;
      T* __restrict__ sums = all.values + node * 3 * hidden;
      T* __restrict__ total = all.extra + (node * 2 + 1) * hidden;
      T* __restrict__ r = all.values + (child * 3 + 2) * hidden;
      T* __restrict__ remembered = all.extra + child * 2 * hidden;
#pragma GCC ivdep
      for (int64_t l = c0; l < c1; ++l) {
        r[l] = sigmoid(x_r[l] + product[l + 2 * hidden]);
        remembered[l] = product[l + hidden];
        sums[l] += product[l];
        sums[l + hidden] += r[l] * remembered[l];
        total[l] += below[l];
      }
    }
    for (int64_t node = level.begin; node < level.end; ++node) {
      const T* __restrict__ total = all.extra + (node * 2 + 1) * hidden;
      T* __restrict__ z = all.values + node * 3 * hidden;
      T* __restrict__ n = z + hidden;
      T* __restrict__ h = all.h + node * hidden;
#pragma GCC ivdep
      for (int64_t l = c0; l < c1; ++l) {
        z[l] = sigmoid(z[l]);
        n[l] = tanh(n[l]);
        h[l] = n[l] + z[l] * (total[l] - n[l]);
      }
    }
  }

  static void backward(const Data<T>& all, const Gradients<T>& d, const Level& level, int64_t c0, int64_t c1) {
    const int64_t hidden = all.hidden;
    for (int64_t node = level.begin; node < level.end; ++node) {
      const T* __restrict__ z = all.values + node * 3 * hidden;
      const T* __restrict__ n = z + hidden;
      const T* __restrict__ total = all.extra + (node * 2 + 1) * hidden;
      T* __restrict__ d_h = d.h + node * hidden;
      T* __restrict__ d_z = d.gates + all.order[node] * 3 * hidden;
      T* __restrict__ d_n = d_z + hidden;
      T* __restrict__ d_r = d_n + hidden;
#pragma GCC ivdep
      for (int64_t l = c0; l < c1; ++l) {
        d_z[l] = d_h[l] * (total[l] - n[l]) * z[l] * (T(1) - z[l]);
        d_n[l] = d_h[l] * (T(1) - z[l]) * (T(1) - n[l] * n[l]);
        d_r[l] = T(0);
        d_h[l] *= z[l];  // of the sum of states
      }
    }
    for (int64_t child = level.first; child < level.begin; ++child) {
      const int64_t node = level.parents[child - level.first];
      const T* __restrict__ r = all.values + (child * 3 + 2) * hidden;
      const T* __restrict__ remembered = all.extra + child * 2 * hidden;
      const T* __restrict__ d_total = d.h + node * hidden;
      T* __restrict__ d_x = d.gates + all.order[node] * 3 * hidden;
      T* __restrict__ d_product = d.products + child * 3 * hidden;
      T* __restrict__ d_h = d.h + child * hidden;
#pragma GCC ivdep
      for (int64_t l = c0; l < c1; ++l) {
        const T d_r = d_x[l + hidden] * remembered[l] * r[l] * (T(1) - r[l]);
        d_x[l + 2 * hidden] += d_r;
        d_product[l] = d_x[l];
        d_product[l + hidden] = d_x[l + hidden] * r[l];
        d_product[l + 2 * hidden] = d_r;
        d_h[l] += d_total[l];
      }
    }
  }
};

// Calls visit(first channel, channel behind the last) in threads that share the channels of some rows.
template <typename F>
void for_channels(int64_t hidden, int64_t rows, const F& visit) {
  // not at::parallel_for, which has threads only in files compiled with OpenMP
  torch::stable::parallel_for(0, hidden, std::max(kLeast, kGrain / std::max<int64_t>(1, rows)), visit);
}

template <typename T>
const T* read(const Tensor& x) { return x.const_data_ptr<T>(); }

template <typename T>
T* data(const Tensor& x) { return x.mutable_data_ptr<T>(); }

void check(const Tensor& gates, const Tensor& weight) {
  const int64_t hidden = weight.dim() == 2 ? weight.size(1) : 0;
  TORCH_CHECK(hidden > 0 && (weight.size(0) == 3 * hidden || weight.size(0) == 4 * hidden) && gates.dim() == 2 &&
                  gates.size(1) == weight.size(0) && gates.scalar_type() == weight.scalar_type(),
              "gates must be (N, G * H), weight (G * H, H) of the same dtype, G 3 or 4");
}

void check_rows(const Tensor& x, int64_t rows, int64_t columns, const Tensor& like) {
  TORCH_CHECK(x.dim() == 2 && x.size(0) == rows && x.size(1) == columns && x.is_contiguous() &&
                  x.scalar_type() == like.scalar_type(),
              "gradients and what the forward pass kept must be those of one forest");
}

// The states by node (N, H) and of the roots (R, H), and for the backward pass the states by level, values and extra.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tree_steps(const Tensor& gates_, const Tensor& weight,
                                                              const Tensor& order, at::IntArrayRef sizes,
                                                              const Tensor& parents) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check(gates_, weight);
  const Tensor gates = gates_.contiguous(), turned = weight.t();
  const int64_t nodes = gates.size(0), width = gates.size(1), hidden = weight.size(1);
  const bool is_lstm = width == 4 * hidden;
  const Levels levels(order, sizes, parents, nodes);
  const Tensor out = at::empty({nodes, hidden}, gates.options());
  const Tensor last = at::empty({levels.roots, hidden}, gates.options());
  const Tensor h = at::empty({nodes, hidden}, gates.options()), values = at::empty({nodes, width}, gates.options());
  const Tensor extra = at::empty({nodes, (is_lstm ? 1 : 2) * hidden}, gates.options());
  const Tensor products = at::empty({levels.longest, width}, gates.options());
  AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "tree_steps", [&] {
    const Data<scalar_t> all{hidden, levels.order, read<scalar_t>(gates), read<scalar_t>(products),
                             data<scalar_t>(values), data<scalar_t>(extra), data<scalar_t>(h)};
    const auto forward = is_lstm ? Cell<scalar_t, 4>::forward : Cell<scalar_t, 3>::forward;
    for (const Level& level : levels.all) {
      const int64_t children = level.begin - level.first;
      if (children) {
        Tensor product = products.narrow(0, 0, children);
        at::mm_out(product, h.narrow(0, level.first, children), turned);
      }
      for_channels(hidden, level.end - level.first, [&](int64_t c0, int64_t c1) { forward(all, level, c0, c1); });
    }
    scalar_t* const to = data<scalar_t>(out);
    for (int64_t i = 0; i < nodes; ++i) std::copy_n(all.h + i * hidden, hidden, to + levels.order[i] * hidden);
    std::copy_n(all.h + (nodes - levels.roots) * hidden, levels.roots * hidden, data<scalar_t>(last));
  });
  return {out, last, h, values, extra};
}

// The gradients of gates, by node, and of the weight.
std::tuple<Tensor, Tensor> tree_steps_backward(const Maybe& grad, const Maybe& grad_roots, const Tensor& h,
                                               const Tensor& values, const Tensor& extra, const Tensor& weight,
                                               const Tensor& order, at::IntArrayRef sizes, const Tensor& parents) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check(values, weight);
  const int64_t nodes = values.size(0), width = values.size(1), hidden = weight.size(1);
  const bool is_lstm = width == 4 * hidden;
  const Levels levels(order, sizes, parents, nodes);
  check_rows(h, nodes, hidden, values);
  check_rows(values, nodes, width, values);
  check_rows(extra, nodes, (is_lstm ? 1 : 2) * hidden, values);
  const Tensor d_out = grad ? grad->contiguous() : Tensor(), d_last = grad_roots ? grad_roots->contiguous() : Tensor();
  if (grad) check_rows(d_out, nodes, hidden, values);
  if (grad_roots) check_rows(d_last, levels.roots, hidden, values);
  const Tensor d_gates = at::empty({nodes, width}, values.options());
  const Tensor d_products = at::empty({nodes - levels.roots, width}, values.options());
  const Tensor d_h = at::zeros({nodes, hidden}, values.options());
  const Tensor d_c = at::zeros({is_lstm ? nodes : 0, hidden}, values.options());
  AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "tree_steps_backward", [&] {
    const Data<scalar_t> all{hidden, levels.order, nullptr, nullptr, data<scalar_t>(values), data<scalar_t>(extra),
                             nullptr};
    const Gradients<scalar_t> d{data<scalar_t>(d_gates), data<scalar_t>(d_products), data<scalar_t>(d_h),
                                data<scalar_t>(d_c)};
    for (int64_t i = 0; grad && i < nodes; ++i)
      std::copy_n(read<scalar_t>(d_out) + levels.order[i] * hidden, hidden, d.h + i * hidden);
    for (int64_t i = 0; grad_roots && i < levels.roots * hidden; ++i)
      d.h[(nodes - levels.roots) * hidden + i] += read<scalar_t>(d_last)[i];
    const auto backward = is_lstm ? Cell<scalar_t, 4>::backward : Cell<scalar_t, 3>::backward;
    for (auto level = levels.all.rbegin(); level != levels.all.rend(); ++level) {
      const int64_t children = level->begin - level->first;
      for_channels(hidden, level->end - level->first, [&](int64_t c0, int64_t c1) {
        backward(all, d, *level, c0, c1);
      });
      if (!children) continue;
      Tensor below = d_h.narrow(0, level->first, children);
      at::addmm_out(below, below, d_products.narrow(0, level->first, children), weight);
    }
  });
  return {d_gates, at::mm(d_products.t(), h.narrow(0, 0, nodes - levels.roots))};
}

// Nodes by distance from their roots, farthest first, how many there are at each, for each node but the roots the
// position of its parent among those of its level, and the roots. Nodes that lead to no root are left out.
std::tuple<Tensor, std::vector<int64_t>, Tensor, Tensor> tree_levels(const Tensor& parent_) {
  TORCH_CHECK(parent_.scalar_type() == at::kLong && parent_.dim() == 1, "parent must be (N,) int64");
  const Tensor parent_row = parent_.contiguous();
  const int64_t nodes = parent_row.size(0);
  const int64_t* const parent = read<int64_t>(parent_row);
  constexpr int64_t kUnknown = -1, kLost = -2;
  std::vector<int64_t> depth(nodes, kUnknown), path, sizes;
  for (int64_t start = 0; start < nodes; ++start) {
    int64_t node = start;
    path.clear();
    while (node >= 0 && node < nodes && depth[node] == kUnknown) {
      depth[node] = kLost;  // as what is met again before its depth is known
      path.push_back(node);
      node = parent[node];
    }
    const bool is_known = node >= 0 && node < nodes;
    int64_t below = is_known ? depth[node] : node == -1 ? -1 : kLost;
    for (; !path.empty(); path.pop_back()) {
      below = below == kLost ? kLost : below + 1;
      depth[path.back()] = below;
      if (below == kLost) continue;
      if (below >= static_cast<int64_t>(sizes.size())) sizes.resize(below + 1, 0);
      ++sizes[below];
    }
  }
  std::reverse(sizes.begin(), sizes.end());
  std::vector<int64_t> next(sizes.size() + 1, 0), position(nodes);
  for (size_t level = 0; level < sizes.size(); ++level) next[level + 1] = next[level] + sizes[level];
  const std::vector<int64_t> begin = next;
  const int64_t levels = sizes.size(), total = begin.back(), roots = sizes.empty() ? 0 : sizes.back();
  Tensor order = at::empty({total}, parent_row.options()), slots = at::empty({total - roots}, parent_row.options());
  int64_t *const to = data<int64_t>(order), *const slot = data<int64_t>(slots);
  for (int64_t node = 0; node < nodes; ++node)
    if (depth[node] != kLost) to[position[node] = next[levels - 1 - depth[node]]++] = node;
  for (int64_t i = 0; i < total - roots; ++i)
    slot[i] = position[parent[to[i]]] - begin[levels - depth[to[i]]];
  return {order, sizes, slots, order.narrow(0, total - roots, roots)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def(
      "tree_steps(Tensor gates, Tensor weight, Tensor order, int[] sizes, Tensor parents) -> (Tensor, Tensor, "
      "Tensor, Tensor, Tensor)");
  m.def(
      "tree_steps_backward(Tensor? grad, Tensor? grad_roots, Tensor h, Tensor values, Tensor extra, Tensor weight, "
      "Tensor order, int[] sizes, Tensor parents) -> (Tensor, Tensor)");
  m.def("tree_levels(Tensor parent) -> (Tensor, int[], Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lightning_accel_native, CPU, m) {
  m.impl("tree_steps", &tree_steps);
  m.impl("tree_steps_backward", &tree_steps_backward);
  m.impl("tree_levels", &tree_levels);
}
