// Perceptrons of experts, each over blocks of its own tokens, and their gradients, on CPU: what _blocks and
// _blocks_backward of expert_mlp.py do, without Python between the operations, whose products are torch's.
// Shapes: N tokens, D features, E experts, S slots sorted by expert, H hidden, U = H or 2 * H where gated.

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/stable/ops.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;

constexpr int64_t kGrain = 1 << 15;  // elements that are worth a thread
constexpr double kQuick = 1.702;     // of quick_gelu

enum Activation : int64_t { kGelu, kGeluTanh, kQuickGelu, kRelu, kSilu };  // as sorted in expert_mlp.py

// Few different numbers of rows in 16 bits, see _pad_rows of expert_mlp.py.
int64_t pad_rows(int64_t rows, const Tensor& like) {
  if (like.element_size() > 2 || rows <= 16) return rows;
  int64_t bits = 0;
  while (rows >> bits) ++bits;
  const int64_t unit = std::max<int64_t>(16, int64_t{1} << std::max<int64_t>(0, bits - 6));
  return (rows + unit - 1) / unit * unit;
}

Tensor activate(const Tensor& x, int64_t activation) {
  switch (activation) {
    case kGelu: return at::gelu(x);
    case kGeluTanh: return at::gelu(x, "tanh");
    case kQuickGelu: return at::silu(at::mul(x, kQuick)).div_(kQuick);
    case kRelu: return at::relu(x);
    default: return at::silu(x);
  }
}

// Writes grad times the derivative at x.
void activate_backward(const Tensor& grad, const Tensor& x, int64_t activation, Tensor out) {
  switch (activation) {
    case kGelu: at::gelu_backward_out(out, grad, x); break;
    case kGeluTanh: at::gelu_backward_out(out, grad, x, "tanh"); break;
    case kQuickGelu: at::silu_backward_out(out, grad, at::mul(x, kQuick)); break;
    case kRelu: at::threshold_backward_out(out, grad, x, 0); break;
    default: at::silu_backward_out(out, grad, x);
  }
}

void multiply(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor out) {
  if (bias)
    at::addmm_out(out, *bias, x, weight.t());
  else
    at::mm_out(out, x, weight.t());
}

struct Slots {
  Tensor tokens, weights, counts;  // weights in the dtype of sums
  const int64_t* token;

  Slots(const Tensor& token_of_slot, const Tensor& weight_of_slot, const Tensor& counts_, int64_t num_tokens,
        at::ScalarType wide)
      : tokens(token_of_slot.to(at::kLong).contiguous()),
        weights(weight_of_slot.to(wide).contiguous()),
        counts(counts_.to(at::kLong).contiguous()) {
    token = tokens.const_data_ptr<int64_t>();
    int64_t total = 0;
    for (int64_t e = 0; e < counts.size(0); ++e) {
      TORCH_CHECK(count(e) >= 0, "counts must not be negative");
      total += count(e);
    }
    TORCH_CHECK(total <= tokens.size(0) && weights.size(0) == tokens.size(0),
                "counts must add up to at most the number of slots, and each slot has a weight");
    for (int64_t slot = 0; slot < total; ++slot)
      TORCH_CHECK_INDEX(token[slot] >= 0 && token[slot] < num_tokens, "token_of_slot must lie in [0, N)");
  }

  int64_t count(int64_t expert) const { return counts.const_data_ptr<int64_t>()[expert]; }
};

// How many rows (or columns) of `size` numbers are worth a thread. torch::stable::parallel_for has threads without
// OpenMP, unlike at::parallel_for.
int64_t grain_of(int64_t size) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, size)); }

void gather_rows(const Tensor& from, const int64_t* row, int64_t num, const Tensor& to) {
  const int64_t bytes = from.size(1) * from.element_size();
  const char* const source = static_cast<const char*>(from.const_data_ptr());
  char* const target = static_cast<char*>(to.mutable_data_ptr());
  torch::stable::parallel_for(0, num, grain_of(from.size(1)), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) std::memcpy(target + i * bytes, source + row[i] * bytes, bytes);
  });
}

// Adds rows of x, each times its factor or 1, to rows of out in its wider dtype. Threads take columns: rows may repeat.
template <typename T>
void add_rows(const T* x, const int64_t* row, const at::opmath_type<T>* factor, int64_t num, int64_t width,
              at::opmath_type<T>* out) {
  using Wide = at::opmath_type<T>;
  torch::stable::parallel_for(0, width, grain_of(num), [&](int64_t first, int64_t last) {
    for (int64_t i = 0; i < num; ++i) {
      const Wide scale = factor ? factor[i] : Wide(1);
      for (int64_t j = first; j < last; ++j) out[row[i] * width + j] += scale * static_cast<Wide>(x[i * width + j]);
    }
  });
}

// d_weight = sum over features of grad times visited; grad times the slot's weight replaces grad.
template <typename T>
void weigh_rows(T* grad, const T* visited, const at::opmath_type<T>* weight, int64_t num, int64_t width,
                at::opmath_type<T>* d_weight) {
  using Wide = at::opmath_type<T>;
  constexpr int64_t kSums = 16;  // so that sums over features are vectors
  torch::stable::parallel_for(0, num, grain_of(width), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      T* const own = grad + i * width;
      const T* const out = visited + i * width;
      const Wide scale = static_cast<Wide>(static_cast<T>(weight[i]));
      Wide sums[kSums] = {}, total = 0;
      int64_t j = 0;
      for (; j + kSums <= width; j += kSums)
        for (int64_t k = 0; k < kSums; ++k) {
          const Wide value = static_cast<Wide>(own[j + k]);
          sums[k] += static_cast<Wide>(static_cast<T>(value * static_cast<Wide>(out[j + k])));
          own[j + k] = static_cast<T>(value * scale);
        }
      for (; j < width; ++j) {
        const Wide value = static_cast<Wide>(own[j]);
        total += static_cast<Wide>(static_cast<T>(value * static_cast<Wide>(out[j])));
        own[j] = static_cast<T>(value * scale);
      }
      for (const Wide sum : sums) total += sum;
      d_weight[i] = total;
    }
  });
}

std::optional<Tensor> bias_of(at::TensorList biases, int64_t layer, int64_t expert) {
  return biases.empty() ? std::nullopt : std::optional<Tensor>(biases[layer].select(0, expert));
}

void check(const Tensor& tokens, const Tensor& token_of_slot, const Tensor& counts, const Tensor& up,
           const Tensor& down, at::TensorList biases) {
  const int64_t dim = tokens.dim() == 2 ? tokens.size(1) : -1;
  bool fits = up.dim() == 3 && down.dim() == 3 && token_of_slot.dim() == 1 && counts.dim() == 1 &&
              up.size(2) == dim && down.size(1) == dim && up.size(0) == down.size(0) && counts.size(0) == up.size(0) &&
              (up.size(1) == down.size(2) || up.size(1) == 2 * down.size(2));
  for (size_t layer = 0; fits && layer < biases.size(); ++layer) {
    const Tensor& bias = biases[layer];
    fits = bias.dim() == 2 && bias.size(0) == up.size(0) && bias.size(1) == (layer == 0 ? up : down).size(1) &&
           bias.scalar_type() == tokens.scalar_type();
  }
  TORCH_CHECK(fits && up.scalar_type() == tokens.scalar_type() && down.scalar_type() == tokens.scalar_type(),
              "tokens (N, D), counts (E,), layers (E, U, D) and (E, D, H), and their biases (E, U) and (E, D) disagree in shape "
              "or dtype");
}

std::tuple<Tensor, Tensor, Tensor> expert_blocks(const Tensor& tokens_, const Tensor& token_of_slot,
                                                 const Tensor& weight_of_slot, const Tensor& counts, const Tensor& up,
                                                 const Tensor& down, at::TensorList biases, int64_t activation,
                                                 bool keep, int64_t block_rows) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check(tokens_, token_of_slot, counts, up, down, biases);
  const Tensor tokens = tokens_.contiguous();
  const int64_t dim = tokens.size(1), hidden_dim = down.size(2), up_dim = up.size(1), num_slots = token_of_slot.size(0);
  const at::ScalarType wide = at::toOpMathType(tokens.scalar_type());
  const Slots slots(token_of_slot, weight_of_slot, counts, tokens.size(0), wide);
  const int64_t spare = pad_rows(block_rows, tokens), kept = (keep ? num_slots : 0) + spare;
  const Tensor before = at::empty({kept, up_dim}, tokens.options()), visited = at::empty({kept, dim}, tokens.options());
  const Tensor rows = at::empty({spare, dim}, tokens.options()), hidden = at::empty({spare, hidden_dim}, tokens.options());
  Tensor out = at::zeros({tokens.size(0), dim}, tokens.options().dtype(wide));
  int64_t begin = 0;
  for (int64_t expert = 0; expert < up.size(0); ++expert) {
    const int64_t end = begin + slots.count(expert);
    if (begin == end) continue;
    const Tensor up_weight = up.select(0, expert), down_weight = down.select(0, expert);
    for (int64_t start = begin; start < end; start += block_rows) {
      const int64_t num = std::min(block_rows, end - start), padded = pad_rows(num, tokens), at = keep ? start : 0;
      const Tensor x_up = before.narrow(0, at, padded), y = visited.narrow(0, at, padded);
      gather_rows(tokens, slots.token + start, num, rows);
      multiply(rows.narrow(0, 0, padded), up_weight, bias_of(biases, 0, expert), x_up);
      Tensor h = activate(x_up.narrow(1, 0, hidden_dim), activation);
      if (up_dim > hidden_dim) {
        Tensor product = hidden.narrow(0, 0, padded);
        h = at::mul_out(product, h, x_up.narrow(1, hidden_dim, hidden_dim));
      }
      multiply(h, down_weight, bias_of(biases, 1, expert), y);
      AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, tokens.scalar_type(), "expert_blocks", [&] {
        using Wide = at::opmath_type<scalar_t>;
        add_rows(y.const_data_ptr<scalar_t>(), slots.token + start, slots.weights.const_data_ptr<Wide>() + start, num,
                 dim, out.mutable_data_ptr<Wide>());
      });
    }
    begin = end;
  }
  return {out.to(tokens.scalar_type()), before, visited};
}

// Fills the gradients of layers, and returns those of tokens and of the weights of slots, in the dtype of sums.
std::tuple<Tensor, Tensor> expert_blocks_backward(const Tensor& grad_, const Tensor& tokens_,
                                                  const Tensor& token_of_slot, const Tensor& weight_of_slot,
                                                  const Tensor& counts, const Tensor& up, const Tensor& down,
                                                  const Tensor& before, const Tensor& visited, int64_t activation,
                                                  int64_t block_rows, int64_t panel_rows, const Tensor& d_up_weight,
                                                  const Tensor& d_down_weight, at::TensorList d_biases) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check(tokens_, token_of_slot, counts, up, down, d_biases);
  const Tensor tokens = tokens_.contiguous(), grad = grad_.contiguous();
  const int64_t dim = tokens.size(1), hidden_dim = down.size(2), up_dim = up.size(1), num_slots = token_of_slot.size(0);
  const at::ScalarType wide = at::toOpMathType(tokens.scalar_type());
  const Slots slots(token_of_slot, weight_of_slot, counts, tokens.size(0), wide);
  const auto sums = tokens.options().dtype(wide);
  Tensor d_tokens = at::zeros({tokens.size(0), dim}, sums), d_weights = at::zeros({num_slots}, sums);
  int64_t most = 0;
  for (int64_t expert = 0; expert < up.size(0); ++expert) most = std::max(most, slots.count(expert));
  const int64_t longest = pad_rows(std::min(most, panel_rows), tokens), block = pad_rows(block_rows, tokens);
  const Tensor x = at::empty({longest, dim}, tokens.options()), d_y = at::empty({longest, dim}, tokens.options());
  const Tensor h = at::empty({longest, hidden_dim}, tokens.options());
  const Tensor d_up = at::empty({longest, up_dim}, tokens.options());
  const Tensor d_hidden = at::empty({std::min(block, longest), hidden_dim}, tokens.options());
  const Tensor d_rows = at::empty({std::min(block, longest), dim}, tokens.options());
  int64_t begin = 0;
  for (int64_t expert = 0; expert < up.size(0); ++expert) {
    const int64_t end = begin + slots.count(expert);
    Tensor own_d_up = d_up_weight.select(0, expert), own_d_down = d_down_weight.select(0, expert);
    if (begin == end) {
      own_d_up.zero_();
      own_d_down.zero_();
      continue;
    }
    const Tensor up_weight = up.select(0, expert), down_weight = down.select(0, expert);
    for (int64_t panel = begin; panel < end; panel += panel_rows) {
      const int64_t in_panel = std::min(panel_rows, end - panel), padded = pad_rows(in_panel, tokens);
      if (padded > in_panel)  // all four, since the padding may hold the NaN of an expert
        for (const Tensor& one : {x, d_y, h, d_up}) one.narrow(0, in_panel, padded - in_panel).zero_();
      for (int64_t start = panel; start < panel + in_panel; start += block_rows) {
        const int64_t num = std::min(block_rows, panel + in_panel - start), at = start - panel;
        const int64_t whole = std::min(pad_rows(num, tokens), longest - at);
        const Tensor own_h = h.narrow(0, at, num), own_d_y = d_y.narrow(0, at, whole);
        const Tensor own_up = d_up.narrow(0, at, num), out = before.narrow(0, start, num);
        gather_rows(tokens, slots.token + start, num, x.narrow(0, at, num));
        gather_rows(grad, slots.token + start, num, own_d_y);
        AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, tokens.scalar_type(), "expert_blocks", [&] {
          using Wide = at::opmath_type<scalar_t>;
          weigh_rows(own_d_y.mutable_data_ptr<scalar_t>(), visited.const_data_ptr<scalar_t>() + start * dim,
                     slots.weights.const_data_ptr<Wide>() + start, num, dim,
                     d_weights.mutable_data_ptr<Wide>() + start);
        });
        Tensor product = d_hidden.narrow(0, 0, whole);
        at::mm_out(product, own_d_y, down_weight);
        const Tensor d_h = product.narrow(0, 0, num), first = out.narrow(1, 0, hidden_dim);
        Tensor activated = activate(first, activation), to_h = own_h;
        if (up_dim == hidden_dim) {
          to_h.copy_(activated);
        } else {
          Tensor d_factor = own_up.narrow(1, hidden_dim, hidden_dim);
          const Tensor factor = out.narrow(1, hidden_dim, hidden_dim);
          at::mul_out(to_h, activated, factor);
          at::mul_out(d_factor, d_h, activated);
          d_h.mul_(factor);
        }
        activate_backward(d_h, first, activation, own_up.narrow(1, 0, hidden_dim));
        Tensor d_x = d_rows.narrow(0, 0, whole);
        at::mm_out(d_x, d_up.narrow(0, at, whole), up_weight);
        AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, tokens.scalar_type(), "expert_blocks", [&] {
          using Wide = at::opmath_type<scalar_t>;
          add_rows<scalar_t>(d_x.const_data_ptr<scalar_t>(), slots.token + start, nullptr, num, dim,
                             d_tokens.mutable_data_ptr<Wide>());
        });
      }
      const Tensor all_d_up = d_up.narrow(0, 0, padded), all_d_y = d_y.narrow(0, 0, padded);
      const double beta = panel == begin ? 0 : 1;
      at::addmm_out(own_d_up, own_d_up, all_d_up.t(), x.narrow(0, 0, padded), beta);
      at::addmm_out(own_d_down, own_d_down, all_d_y.t(), h.narrow(0, 0, padded), beta);
      if (!d_biases.empty()) {
        d_biases[0].select(0, expert).add_(all_d_up.sum(0));
        d_biases[1].select(0, expert).add_(all_d_y.sum(0));
      }
    }
    begin = end;
  }
  return {d_tokens.to(tokens.scalar_type()), d_weights.to(weight_of_slot.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def(
      "expert_blocks(Tensor tokens, Tensor token_of_slot, Tensor weight_of_slot, Tensor counts, Tensor up, Tensor down, "
      "Tensor[] biases, int activation, bool keep, int block_rows) -> (Tensor, Tensor, Tensor)");
  m.def(
      "expert_blocks_backward(Tensor grad, Tensor tokens, Tensor token_of_slot, Tensor weight_of_slot, Tensor counts, "
      "Tensor up, Tensor down, Tensor before, Tensor visited, int activation, int block_rows, int panel_rows, "
      "Tensor(a!) d_up_weight, Tensor(b!) d_down_weight, Tensor(c!)[] d_biases) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lightning_accel_native, CPU, m) {
  m.impl("expert_blocks", &expert_blocks);
  m.impl("expert_blocks_backward", &expert_blocks_backward);
}
