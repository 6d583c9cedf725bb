// A mixture of experts for few tokens, without gradients, on CPU: each weight is read once, where it is, and those of
// experts without tokens never. One operation replaces some dozens, whose code would leave the cache between tokens.
// Shapes: N tokens, D features, E experts, K experts per token, S slots, H hidden, U = H or 2 * H where gated.

#include "dots.h"
#include "exponential.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using lightning_accel::BFloat16;
using lightning_accel::dot;
using lightning_accel::sigmoid;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int64_t kPanel = 64;       // outputs that are computed together
constexpr int64_t kGrain = 1 << 19;  // multiplications that are worth a thread

const float* floats(const Tensor& x) { return static_cast<const float*>(x.const_data_ptr()); }
const int64_t* integers(const Tensor& x) { return static_cast<const int64_t*>(x.const_data_ptr()); }

void check(const Tensor& x, ScalarType dtype, int64_t dim) {
  STD_TORCH_CHECK(x.scalar_type() == dtype && x.dim() == dim && x.is_contiguous(),
                  "tensors must be contiguous: tokens (N, D), weights of slots (S,) and logits (N, E) float32, slots and "
                  "counts int64, layers of experts all float32 or all bfloat16");
}

// In the order of the names in few_tokens.py.
inline float activate(int64_t activation, float x) {
  switch (activation) {
    case 0: return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f));
    case 1: return 0.5f * x * (1.0f + std::tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case 2: return x * sigmoid(1.702f * x);
    case 3: return x > 0.0f || std::isnan(x) ? x : 0.0f;
    default: return x * sigmoid(x);
  }
}

struct Segment {
  int64_t expert, begin, end;  // slots of an expert
};

std::vector<Segment> segments_of(const Tensor& counts, int64_t slots) {
  std::vector<Segment> segments;
  int64_t begin = 0;
  for (int64_t expert = 0; expert < counts.size(0); ++expert) {
    const int64_t count = integers(counts)[expert];
    STD_TORCH_CHECK(count >= 0, "counts must not be negative");
    if (count) segments.push_back({expert, begin, begin + count});
    begin += count;
  }
  STD_TORCH_CHECK(begin <= slots, "counts must add up to at most the number of slots");
  return segments;
}

// out (S, width) = the row of each slot, at `row` times depth in x, times the weight of its expert, (width, depth).
template <typename T>
void multiply(const std::vector<Segment>& segments, const float* x, const int64_t* row, const T* weight, const T* bias,
              int64_t depth, int64_t width, float* out) {
  if (segments.empty()) return;
  const int64_t panels = (width + kPanel - 1) / kPanel, units = segments.size() * panels;
  const int64_t cost = std::max<int64_t>(1, segments.back().end * width * depth / units);
  torch::stable::parallel_for(0, units, std::max<int64_t>(1, kGrain / cost), [&](int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit) {
      const Segment& segment = segments[unit / panels];
      const int64_t column = unit % panels * kPanel, columns = std::min(kPanel, width - column);
      const int64_t place = segment.expert * width + column;
      for (int64_t slot = segment.begin; slot < segment.end; ++slot) {
        float* const to = out + slot * width + column;
        dot(columns, weight + place * depth, x + (row ? row[slot] : slot) * depth, depth, to);
        for (int64_t i = 0; bias != nullptr && i < columns; ++i) to[i] += lightning_accel::read(bias[place + i]);
      }
    }
  });
}

template <typename T>
void run(const std::vector<Segment>& segments, const Tensor& tokens, const Tensor& token_of_slot,
         const Tensor& weight_of_slot, const Tensor& up, const Tensor& down, const Maybe& up_bias,
         const Maybe& down_bias, int64_t activation, float* out) {
  const int64_t dim = down.size(1), hidden_dim = down.size(2), up_dim = up.size(1);
  const int64_t slots = segments.empty() ? 0 : segments.back().end;
  const auto layer = [](const Tensor& x) { return static_cast<const T*>(x.const_data_ptr()); };
  std::vector<float> before(slots * up_dim), hidden(slots * hidden_dim), visited(slots * dim);
  multiply<T>(segments, floats(tokens), integers(token_of_slot), layer(up), up_bias ? layer(*up_bias) : nullptr, dim,
              up_dim, before.data());
  for (int64_t slot = 0; slot < slots; ++slot)
    for (int64_t i = 0; i < hidden_dim; ++i) {
      const float* const own = before.data() + slot * up_dim;
      const float factor = up_dim == hidden_dim ? 1.0f : own[hidden_dim + i];
      hidden[slot * hidden_dim + i] = activate(activation, own[i]) * factor;
    }
  multiply<T>(segments, hidden.data(), nullptr, layer(down), down_bias ? layer(*down_bias) : nullptr, hidden_dim, dim,
              visited.data());
  for (int64_t slot = 0; slot < slots; ++slot) {
    const float weight = floats(weight_of_slot)[slot];
    float* const to = out + integers(token_of_slot)[slot] * dim;
    for (int64_t i = 0; i < dim; ++i) to[i] += weight * visited[slot * dim + i];
  }
}

// Returns (N, D) float32: the weighted sum of the outputs of each token's experts; slots are sorted by expert.
Tensor experts_of_few_tokens(const Tensor& tokens, const Tensor& token_of_slot, const Tensor& weight_of_slot,
                             const Tensor& counts, const Tensor& up, const Tensor& down, Maybe up_bias,
                             Maybe down_bias, int64_t activation) {
  const ScalarType dtype = up.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, "layers must be float32 or bfloat16");
  check(tokens, ScalarType::Float, 2);
  check(token_of_slot, ScalarType::Long, 1);
  check(weight_of_slot, ScalarType::Float, 1);
  check(counts, ScalarType::Long, 1);
  check(up, dtype, 3);
  check(down, dtype, 3);
  const int64_t num = up.size(0), dim = tokens.size(1), up_dim = up.size(1), hidden_dim = down.size(2);
  const auto fits = [&](const Maybe& bias, int64_t width) {
    if (bias) check(*bias, dtype, 2);
    return !bias || (bias->size(0) == num && bias->size(1) == width);
  };
  STD_TORCH_CHECK(counts.size(0) == num && down.size(0) == num && up.size(2) == dim && down.size(1) == dim &&
                      (up_dim == hidden_dim || up_dim == 2 * hidden_dim) && fits(up_bias, up_dim) &&
                      fits(down_bias, dim) && weight_of_slot.size(0) == token_of_slot.size(0),
                  "shapes of tokens, slots, counts and layers disagree");
  for (int64_t slot = 0; slot < token_of_slot.size(0); ++slot) {
    const int64_t token = integers(token_of_slot)[slot];
    STD_TORCH_CHECK(token >= 0 && token < tokens.size(0), "token_of_slot must lie in [0, N)");
  }
  const std::vector<Segment> segments = segments_of(counts, token_of_slot.size(0));
  Tensor out = torch::stable::new_empty(tokens, {tokens.size(0), dim});
  float* const to = static_cast<float*>(out.mutable_data_ptr());
  std::fill_n(to, tokens.size(0) * dim, 0.0f);
  const auto compute = dtype == ScalarType::BFloat16 ? run<BFloat16> : run<float>;
  compute(segments, tokens, token_of_slot, weight_of_slot, up, down, up_bias, down_bias, activation, to);
  return out;
}

// Returns the slots of the k experts of each token with the highest scores, as TopKGate has them: tokens (S,), experts
// (S,), weights (S,), the slots of each expert (E,), and balance loss, z-loss and confidence (3,).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> route_few_tokens(const Tensor& logits, Maybe bias, int64_t k,
                                                                    bool is_sigmoid, bool normalize, double scale) {
  check(logits, ScalarType::Float, 2);
  const int64_t num = logits.size(0), experts = logits.size(1);
  if (bias) check(*bias, ScalarType::Float, 1);
  STD_TORCH_CHECK(1 <= k && k <= experts && num > 0 && (!bias || bias->size(0) == experts),
                  "k must lie in [1, E], with a bias (E,) and a token");
  Tensor token_of_slot = torch::stable::new_empty(logits, {num * k}, ScalarType::Long);
  Tensor expert_of_slot = torch::stable::new_empty(logits, {num * k}, ScalarType::Long);
  Tensor weight_of_slot = torch::stable::new_empty(logits, {num * k});
  Tensor counts = torch::stable::new_empty(logits, {experts}, ScalarType::Long);
  Tensor statistics = torch::stable::new_empty(logits, {3});
  auto* const tokens = static_cast<int64_t*>(token_of_slot.mutable_data_ptr());
  auto* const chosen = static_cast<int64_t*>(expert_of_slot.mutable_data_ptr());
  auto* const weights = static_cast<float*>(weight_of_slot.mutable_data_ptr());
  auto* const count = static_cast<int64_t*>(counts.mutable_data_ptr());
  auto* const found = static_cast<float*>(statistics.mutable_data_ptr());
  std::fill_n(count, experts, 0);
  std::vector<float> probs(experts), scores(experts), mean(experts, 0.0f);
  float z_loss = 0.0f, confidence = 0.0f;
  for (int64_t n = 0; n < num; ++n) {
    const float* const own = floats(logits) + n * experts;
    float top = -std::numeric_limits<float>::infinity(), sum = 0.0f, total = 0.0f;
    for (int64_t e = 0; e < experts; ++e) top = own[e] > top || std::isnan(own[e]) ? own[e] : top;
    for (int64_t e = 0; e < experts; ++e) sum += probs[e] = std::exp(own[e] - top);
    const float log_sum = std::isinf(top) ? top : top + std::log(sum);
    z_loss += log_sum * log_sum;
    for (int64_t e = 0; e < experts; ++e) {
      probs[e] = is_sigmoid ? 1.0f / (1.0f + std::exp(-own[e])) : probs[e] / sum;
      scores[e] = (std::isnan(probs[e]) ? -1.0f : probs[e]) + (bias ? floats(*bias)[e] : 0.0f);
      total += probs[e];
    }
    float sum_of_weights = 0.0f;
    for (int64_t choice = 0; choice < k; ++choice) {
      const int64_t best = std::max_element(scores.begin(), scores.end()) - scores.begin();
      scores[best] = -std::numeric_limits<float>::infinity();
      tokens[choice * num + n] = n;
      chosen[choice * num + n] = best;
      weights[choice * num + n] = probs[best];
      sum_of_weights += probs[best];
      ++count[best];
    }
    // a maximum that keeps NaN
    const float least = std::isnan(sum_of_weights) ? sum_of_weights
                                                   : std::max(sum_of_weights, std::numeric_limits<float>::min());
    for (int64_t choice = 0; choice < k; ++choice) {
      float& weight = weights[choice * num + n];
      weight = (normalize ? weight / least : weight) * static_cast<float>(scale);
    }
    float largest = 0.0f;
    for (int64_t e = 0; e < experts; ++e) {
      const float share = is_sigmoid ? probs[e] / total : probs[e];
      mean[e] += share;
      largest = share > largest || std::isnan(share) ? share : largest;
    }
    confidence += largest;
  }
  float balance = 0.0f;
  for (int64_t e = 0; e < experts; ++e) balance += count[e] / static_cast<float>(num * k) * (mean[e] / num);
  found[0] = experts * balance;
  found[1] = z_loss / num;
  found[2] = confidence / num;
  return {token_of_slot, expert_of_slot, weight_of_slot, counts, statistics};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def(
      "experts_of_few_tokens(Tensor tokens, Tensor token_of_slot, Tensor weight_of_slot, Tensor counts, Tensor up, "
      "Tensor down, Tensor? up_bias, Tensor? down_bias, int activation) -> Tensor");
  m.def(
      "route_few_tokens(Tensor logits, Tensor? bias, int k, bool is_sigmoid, bool normalize, float scale) -> (Tensor, "
      "Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(lightning_accel_native, CPU, m) {
  m.impl("experts_of_few_tokens", TORCH_BOX(&experts_of_few_tokens));
  m.impl("route_few_tokens", TORCH_BOX(&route_few_tokens));
}
