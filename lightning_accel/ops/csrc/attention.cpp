// Scaled dot-product attention with dropout, and its gradients, on the CPU, in float32 and bfloat16.
// Shapes: B samples, H heads of queries, G heads of keys and values (H a multiple of G), L queries and S keys a head,
// D features of queries and keys, V of values.
//
// Scores are computed in blocks that stay in the cache and are never stored, as in FlashAttention-2 (Dao 2023,
// https://arxiv.org/abs/2307.08691); the backward pass computes them again, and draws the masks of dropout again, from
// words whose counters depend on the position alone. All sums are in float32. Each is computed by one thread, in one
// order: results do not depend on the number of threads.
//
// Dropout keeps a weight where 16 random bits are small enough. Probabilities are rounded to multiples of 2^-16, and the
// factor of kept weights is that of the rounded one, so that means are exact; FlashAttention has 8 bits.

#include "exponential.h"
#include "philox_tile.h"
#include "vectors.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using lightning_accel::exp_of_negative;
using lightning_accel::kSums;
using lightning_accel::kTile;
using lightning_accel::kWidth;
using lightning_accel::Vector;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int64_t kQueries = 48;             // of a block
constexpr int64_t kKeys = kTile;             // of a block: random words of two queries are one tile
constexpr int64_t kStride = kKeys + kWidth;  // between rows of a block, no power of two, which the cache maps to few sets
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t padded(int64_t n) { return (n + kWidth - 1) / kWidth * kWidth; }

// A factor of a product: element (row, k) is at data[row * row_stride + k * k_stride].
struct Rows {
  const float* data;
  int64_t row_stride, k_stride;
};

inline Vector load_vector(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// out (kRows, kVectors * kWidth) += x (kRows, depth) times y (depth, kVectors * kWidth).
template <int kRows, int kVectors>
inline void multiply_tile(const Rows& x, const float* y, int64_t y_stride, int64_t depth, float* out,
                          int64_t out_stride) {
  Vector sum[kRows][kVectors];  // of which compilers keep in registers what is moved by whole vectors
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[row][v] = load_vector(out + row * out_stride + v * kWidth);
  for (int64_t k = 0; k < depth; ++k) {
    Vector factor[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) factor[v] = load_vector(y + k * y_stride + v * kWidth);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const Vector value = x.data[row * x.row_stride + k * x.k_stride] - Vector{};
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[row][v] += value * factor[v];
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) std::memcpy(out + row * out_stride + v * kWidth, &sum[row][v], sizeof(Vector));
}

template <int kVectors, int kRows = std::min(12, kSums / kVectors)>
void multiply_rows(int64_t rows, Rows x, const float* y, int64_t y_stride, int64_t depth, float* out,
                   int64_t out_stride) {
  for (; rows >= kRows; rows -= kRows, x.data += kRows * x.row_stride, out += kRows * out_stride)
    multiply_tile<kRows, kVectors>(x, y, y_stride, depth, out, out_stride);
  if constexpr (kRows > 1) {
    if (rows > 0) multiply_rows<kVectors, kRows - 1>(rows, x, y, y_stride, depth, out, out_stride);
  }
}

// out (rows, columns) += x (rows, depth) times y (depth, columns), of which columns are a multiple of kWidth.
void multiply(int64_t rows, int64_t columns, int64_t depth, const Rows& x, const float* y, int64_t y_stride, float* out,
              int64_t out_stride) {
  int64_t c = 0;
  for (; c + 2 * kWidth <= columns; c += 2 * kWidth)
    multiply_rows<2>(rows, x, y + c, y_stride, depth, out + c, out_stride);
  if (c < columns) multiply_rows<1>(rows, x, y + c, y_stride, depth, out + c, out_stride);
}

inline float load(const float* from) { return *from; }
inline float load(const uint16_t* from) {
  const uint32_t bits = uint32_t(*from) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline void store(float value, float* to) { *to = value; }
inline void store(float value, uint16_t* to) {  // rounded to the nearest, ties to even; NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  *to = value == value ? uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) : uint16_t(0x7FC0);
}

// A matrix of one head, of which the features lie side by side.
template <typename T>
struct Head {
  T* data;
  int64_t stride;  // between rows
  T* row(int64_t i) const { return data + i * stride; }
};

// Strides of (B, H, rows, features) tensors.
template <typename T>
struct Heads {
  T* data;
  int64_t sample, head, row;
  Head<T> at(int64_t b, int64_t h) const { return {data + b * sample + h * head, row}; }
};

template <typename T>
Heads<const T> read(const Tensor& x) {
  return {static_cast<const T*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}
template <typename T>
Heads<T> write(const Tensor& x) {
  return {static_cast<T*>(x.mutable_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

// to (rows, width) = rows of a head times a factor, with zeros up to the width.
template <typename T>
void copy_rows(const Head<const T>& from, int64_t begin, int64_t rows, int64_t features, float factor, float* to,
               int64_t width) {
  for (int64_t i = 0; i < rows; ++i, to += width) {
    const T* row = from.row(begin + i);
    for (int64_t f = 0; f < features; ++f) to[f] = load(row + f) * factor;
    std::fill(to + features, to + width, 0.0f);
  }
}

// to: blocks of (features, kStride), each of kKeys rows of a head as columns, with zeros up to the last of them.
template <typename T>
void copy_transposed(const Head<const T>& from, int64_t rows, int64_t features, float* to) {
  for (int64_t start = 0; start < rows; start += kKeys, to += features * kStride) {
    const int64_t count = std::min(kKeys, rows - start);
    for (int64_t f = 0; f < features; ++f) std::fill(to + f * kStride + count, to + f * kStride + kKeys, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const T* row = from.row(start + i);
      for (int64_t f = 0; f < features; ++f) to[f * kStride + i] = load(row + f);
    }
  }
}

// What all heads share. The mask is added to the scores; its strides are 0 where it is broadcast.
struct Problem {
  int64_t samples, heads, groups, queries, keys, features, value_features;
  const float* mask;
  int64_t mask_strides[4];
  uint64_t seed;
  uint32_t last;  // random bits up to it keep a weight
  bool drops, causal;
  float scale, kept;  // kept weights are multiplied by `kept`

  int64_t num_keys(int64_t first, int64_t rows) const {  // that these queries may attend to
    return causal ? std::min(keys, first + rows) : keys;
  }

  // scores (rows, kStride) of queries from `first` and keys from `start`, -infinity for those that are masked.
  void add_masks(int64_t b, int64_t h, int64_t first, int64_t rows, int64_t start, int64_t count, float* scores) const {
    const int64_t end = padded(count);
    for (int64_t i = 0; i < rows; ++i, scores += kStride) {
      if (mask) {
        const float* row = mask + b * mask_strides[0] + h * mask_strides[1] + (first + i) * mask_strides[2] +
                           start * mask_strides[3];
        if (mask_strides[3] == 1)
          for (int64_t j = 0; j < count; ++j) scores[j] += row[j];
        else
          for (int64_t j = 0; j < count; ++j) scores[j] += row[j * mask_strides[3]];
      }
      const int64_t valid = causal ? std::clamp<int64_t>(first + i + 1 - start, 0, count) : count;
      std::fill(scores + valid, scores + end, -kInfinity);
    }
  }

  // words (kTile) of a query, which is even, and the next one, and of the keys from `start`.
  void draw(int64_t b, int64_t h, int64_t query, int64_t start, uint32_t* words) const {
    const int64_t pairs = (queries + 1) / 2, tiles = (keys + kTile - 1) / kTile;
    const int64_t tile = ((b * heads + h) * pairs + query / 2) * tiles + start / kTile;
    lightning_accel::random_tile(uint64_t(tile) * (kTile / 4), seed, words);
  }
};

inline float largest(const float* row, int64_t n) {
  Vector most = Vector{} - kInfinity;
  for (int64_t j = 0; j < n; j += kWidth) {
    const Vector some = load_vector(row + j);
    most = some > most ? some : most;
  }
  float value = most[0];
  for (int l = 1; l < kWidth; ++l) value = std::max(value, most[l]);
  return value;
}

inline float sum_of(const float* row, int64_t n) {
  Vector sum{};
  for (int64_t j = 0; j < n; j += kWidth) sum += load_vector(row + j);
  float value = 0.0f;
  for (int l = 0; l < kWidth; ++l) value += sum[l];
  return value;
}

// row = exp(row - most) * factor, exactly 0 where that is below 1e-37: masked keys.
inline void exponentiate(float* row, int64_t n, float most, float factor) {
  for (int64_t j = 0; j < n; ++j) {
    const float x = row[j] - most, power = exp_of_negative(x) * factor;
    row[j] = x < -87.0f ? 0.0f : power;
  }
}

// The factors of weights: 0 or `kept`. Its arguments are values, since compilers would read others after each store.
inline void choose(const uint32_t* words, bool is_odd, uint32_t last, float kept, int64_t n, float* factors) {
  const int shift = is_odd ? 16 : 0;
  for (int64_t j = 0; j < n; ++j) factors[j] = ((words[j] >> shift) & 0xFFFFu) <= last ? kept : 0.0f;
}

// What a thread of the forward pass holds of the keys and values of one head. Statistics of a query, of which its
// weights are made again: its highest score, and 1 / (the sum of exponentials).
struct Forward {
  const Problem& all;
  const int64_t d, width;
  std::vector<float> keys, values;       // of all keys
  std::vector<float> q, scores, sums;    // of a block

  explicit Forward(const Problem& all)
      : all(all), d(all.features), width(padded(all.value_features)),
        keys((all.keys + kKeys - 1) / kKeys * d * kStride), values(all.keys * width), q(kQueries * d),
        scores(kQueries * kStride), sums(kQueries * width) {}

  template <typename T>
  void run(int64_t b, int64_t h, Head<const T> query, Head<const T> key, Head<const T> value, int64_t begin, int64_t end,
           Head<T> out, float* statistics) {
    copy_transposed(key, all.keys, d, keys.data());
    copy_rows(value, 0, all.keys, all.value_features, 1.0f, values.data(), width);
    for (int64_t first = begin; first < end; first += kQueries) {
      const int64_t rows = std::min(kQueries, end - first);
      float most[kQueries], total[kQueries] = {};
      std::fill_n(most, kQueries, -kInfinity);
      std::fill(sums.begin(), sums.end(), 0.0f);
      copy_rows(query, first, rows, d, all.scale, q.data(), d);
      for (int64_t start = 0; start < all.num_keys(first, rows); start += kKeys)
        add_block(b, h, first, rows, start, most, total);
      for (int64_t i = 0; i < rows; ++i) {
        const float factor = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
        T* to = out.row(first + i);
        for (int64_t f = 0; f < all.value_features; ++f) store(sums[i * width + f] * factor, to + f);
        statistics[2 * (first + i)] = most[i] == -kInfinity ? 0.0f : most[i];
        statistics[2 * (first + i) + 1] = factor;
      }
    }
  }

  void add_block(int64_t b, int64_t h, int64_t first, int64_t rows, int64_t start, float* most, float* total) {
    const int64_t count = std::min(kKeys, all.keys - start), columns = padded(count);
    for (int64_t i = 0; i < rows; ++i) std::fill_n(scores.data() + i * kStride, columns, 0.0f);
    multiply(rows, columns, d, {q.data(), d, 1}, keys.data() + start * d / kKeys * kStride, kStride, scores.data(),
             kStride);
    all.add_masks(b, h, first, rows, start, count, scores.data());
    uint32_t words[kTile];
    for (int64_t i = 0; i < rows; ++i) {
      float* row = scores.data() + i * kStride;
      const float before = most[i], now = std::max(before, largest(row, columns));
      const bool none = now == -kInfinity;  // no key yet; scores that are NaN stay so
      most[i] = now;
      exponentiate(row, columns, none ? 0.0f : now, 1.0f);
      const float fade = before == now ? 1.0f : std::exp(before - now);
      total[i] = total[i] * fade + sum_of(row, columns);
      if (fade != 1.0f)
        for (int64_t f = 0; f < width; ++f) sums[i * width + f] *= fade;
      if (all.drops) {
        if (i % 2 == 0) all.draw(b, h, first + i, start, words);
        float factors[kKeys];
        choose(words, i % 2, all.last, all.kept, columns, factors);
        for (int64_t j = 0; j < columns; ++j) row[j] *= factors[j];
      }
    }
    multiply(rows, width, count, {scores.data(), kStride, 1}, values.data() + start * width, width, sums.data(), width);
  }
};

// What a thread of the backward pass holds of the keys and values of one head.
struct Backward {
  const Problem& all;
  const int64_t d, v, width, value_width;
  std::vector<float> keys, transposed_keys, transposed_values, d_keys, d_values;  // of all keys
  std::vector<float> q, grads, weights, d_scores, d_queries;                     // of a block

  explicit Backward(const Problem& all)
      : all(all), d(all.features), v(all.value_features), width(padded(d)), value_width(padded(v)),
        keys(all.keys * width), transposed_keys((all.keys + kKeys - 1) / kKeys * d * kStride),
        transposed_values((all.keys + kKeys - 1) / kKeys * v * kStride), d_keys(all.keys * width),
        d_values(all.keys * value_width), q(kQueries * width), grads(kQueries * value_width),
        weights(kQueries * kStride), d_scores(kQueries * kStride), d_queries(kQueries * width) {}

  template <typename T>
  void enter(Head<const T> key, Head<const T> value) {
    copy_rows(key, 0, all.keys, d, 1.0f, keys.data(), width);
    copy_transposed(key, all.keys, d, transposed_keys.data());
    copy_transposed(value, all.keys, v, transposed_values.data());
    std::fill(d_keys.begin(), d_keys.end(), 0.0f);
    std::fill(d_values.begin(), d_values.end(), 0.0f);
  }

  // Adds what the queries of a head give to the gradients of its keys and values, and writes their own.
  template <typename T>
  void add(int64_t b, int64_t h, Head<const T> query, Head<const T> out, Head<const T> grad, const float* statistics,
           Head<T> d_query) {
    for (int64_t first = 0; first < all.queries; first += kQueries) {
      const int64_t rows = std::min(kQueries, all.queries - first);
      copy_rows(query, first, rows, d, all.scale, q.data(), width);
      copy_rows(grad, first, rows, v, 1.0f, grads.data(), value_width);
      float inner[kQueries];  // of outputs and their gradients
      for (int64_t i = 0; i < rows; ++i) {
        const T* row = out.row(first + i);
        inner[i] = 0.0f;
        for (int64_t f = 0; f < v; ++f) inner[i] += load(row + f) * grads[i * value_width + f];
      }
      std::fill(d_queries.begin(), d_queries.end(), 0.0f);
      for (int64_t start = 0; start < all.num_keys(first, rows); start += kKeys)
        add_block(b, h, first, rows, start, inner, statistics);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t f = 0; f < d; ++f) store(d_queries[i * width + f] * all.scale, d_query.row(first + i) + f);
    }
  }

  void add_block(int64_t b, int64_t h, int64_t first, int64_t rows, int64_t start, const float* inner,
                 const float* statistics) {
    const int64_t count = std::min(kKeys, all.keys - start), columns = padded(count);
    for (int64_t i = 0; i < rows; ++i) {
      std::fill_n(weights.data() + i * kStride, columns, 0.0f);
      std::fill_n(d_scores.data() + i * kStride, columns, 0.0f);
    }
    multiply(rows, columns, d, {q.data(), width, 1}, transposed_keys.data() + start * d / kKeys * kStride, kStride,
             weights.data(), kStride);
    multiply(rows, columns, v, {grads.data(), value_width, 1}, transposed_values.data() + start * v / kKeys * kStride,
             kStride, d_scores.data(), kStride);
    all.add_masks(b, h, first, rows, start, count, weights.data());
    uint32_t words[kTile];
    for (int64_t i = 0; i < rows; ++i) {
      float *row = weights.data() + i * kStride, *d_row = d_scores.data() + i * kStride;
      exponentiate(row, columns, statistics[2 * (first + i)], statistics[2 * (first + i) + 1]);
      if (all.drops) {
        if (i % 2 == 0) all.draw(b, h, first + i, start, words);
        float factors[kKeys];
        choose(words, i % 2, all.last, all.kept, columns, factors);
        for (int64_t j = 0; j < columns; ++j) {
          d_row[j] = row[j] * (d_row[j] * factors[j] - inner[i]);
          row[j] *= factors[j];
        }
      } else {
        for (int64_t j = 0; j < columns; ++j) d_row[j] = row[j] * (d_row[j] - inner[i]);
      }
    }
    multiply(count, value_width, rows, {weights.data(), 1, kStride}, grads.data(), value_width,
             d_values.data() + start * value_width, value_width);
    multiply(count, width, rows, {d_scores.data(), 1, kStride}, q.data(), width, d_keys.data() + start * width, width);
    multiply(rows, width, count, {d_scores.data(), kStride, 1}, keys.data() + start * width, width, d_queries.data(),
             width);
  }

  template <typename T>
  void leave(Head<T> d_key, Head<T> d_value) const {
    for (int64_t j = 0; j < all.keys; ++j) {
      for (int64_t f = 0; f < d; ++f) store(d_keys[j * width + f], d_key.row(j) + f);
      for (int64_t f = 0; f < v; ++f) store(d_values[j * value_width + f], d_value.row(j) + f);
    }
  }
};

void check(const Tensor& x, const Tensor& like, int64_t heads, int64_t rows, int64_t features) {
  STD_TORCH_CHECK(x.dim() == 4 && x.size(0) == like.size(0) && x.size(1) == heads && x.size(2) == rows &&
                      x.size(3) == features && x.scalar_type() == like.scalar_type() &&
                      (x.stride(3) == 1 || features == 1),
                  "tensors must be (B, heads, rows, features) of one dtype, with features side by side");
}

Problem problem_of(const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& mask, const Maybe& seed,
                   double dropout, bool causal, double scale) {
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4, "tensors must have 4 dimensions");
  STD_TORCH_CHECK(query.scalar_type() == ScalarType::Float || query.scalar_type() == ScalarType::BFloat16,
                  "tensors must be float32 or bfloat16");
  Problem all{query.size(0), query.size(1), key.size(1), query.size(2), key.size(2), query.size(3), value.size(3)};
  STD_TORCH_CHECK(all.groups > 0 && all.heads % all.groups == 0, "heads must be a multiple of those of keys");
  check(query, query, all.heads, all.queries, all.features);
  check(key, query, all.groups, all.keys, all.features);
  check(value, query, all.groups, all.keys, all.value_features);
  if (mask) {
    STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Float && mask->dim() == 4 && mask->size(0) == all.samples &&
                        mask->size(1) == all.heads && mask->size(2) == all.queries && mask->size(3) == all.keys,
                    "mask must be (B, H, L, S) float32");
    all.mask = static_cast<const float*>(mask->const_data_ptr());
    for (int i = 0; i < 4; ++i) all.mask_strides[i] = mask->stride(i);
  }
  const int64_t kept = std::llround((1.0 - dropout) * 65536.0);  // values of 16 bits that keep a weight
  all.drops = dropout > 0;
  if (all.drops) {
    STD_TORCH_CHECK(seed && seed->is_cpu() && seed->scalar_type() == ScalarType::Long && seed->numel() == 1 && kept > 0,
                    "dropout must be below 1 - 2^-17, and needs a seed (1,) int64, on the CPU");
    all.seed = uint64_t(*static_cast<const int64_t*>(seed->const_data_ptr()));
    all.last = uint32_t(kept - 1);
    all.kept = float(65536.0 / double(kept));
  }
  all.causal = causal;
  all.scale = float(scale);
  return all;
}

// (B, heads, rows, features) with heads side by side in the memory of a row, as layers join them.
Tensor empty_heads(const Tensor& like, int64_t heads, int64_t rows, int64_t features) {
  const Tensor whole = torch::stable::new_empty(like, {like.size(0), rows, heads, features});
  return torch::stable::transpose(whole, 1, 2);
}

template <typename T>
void run_forward(const Problem& all, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
                 float* statistics) {
  const auto q = read<T>(query), k = read<T>(key), v = read<T>(value);
  const auto to = write<T>(out);
  const int64_t heads = all.samples * all.heads, blocks = (all.queries + kQueries - 1) / kQueries;
  // few heads are split, so that no thread is idle; each part prepares the keys again
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(blocks, 4 * torch::stable::get_num_threads() / heads));
  torch::stable::parallel_for(0, heads * parts, 1, [&](int64_t from, int64_t until) {
    Forward pass(all);
    for (int64_t task = from; task < until; ++task) {
      const int64_t head = task / parts, b = head / all.heads, h = head % all.heads, g = h / (all.heads / all.groups);
      const int64_t part = task % parts;
      const int64_t begin = part * blocks / parts * kQueries;
      const int64_t end = std::min(all.queries, (part + 1) * blocks / parts * kQueries);
      pass.run<T>(b, h, q.at(b, h), k.at(b, g), v.at(b, g), begin, end, to.at(b, h), statistics + head * all.queries * 2);
    }
  });
}

template <typename T>
void run_backward(const Problem& all, const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                  const Tensor& out, const float* statistics, const Tensor& d_query, const Tensor& d_key,
                  const Tensor& d_value) {
  const auto g_out = read<T>(grad), q = read<T>(query), k = read<T>(key), v = read<T>(value), o = read<T>(out);
  const auto d_q = write<T>(d_query), d_k = write<T>(d_key), d_v = write<T>(d_value);
  const int64_t shared = all.heads / all.groups;
  torch::stable::parallel_for(0, all.samples * all.groups, 1, [&](int64_t from, int64_t until) {
    Backward pass(all);
    for (int64_t task = from; task < until; ++task) {
      const int64_t b = task / all.groups, g = task % all.groups;
      pass.enter<T>(k.at(b, g), v.at(b, g));
      for (int64_t h = g * shared; h < (g + 1) * shared; ++h)
        pass.add<T>(b, h, q.at(b, h), o.at(b, h), g_out.at(b, h), statistics + (b * all.heads + h) * all.queries * 2,
                    d_q.at(b, h));
      pass.leave<T>(d_k.at(b, g), d_v.at(b, g));
    }
  });
}

// Rows of one sample in segments that attend to themselves, where each begins, and where the last one ends.
struct Segments {
  const int64_t* begins;
  int64_t count;

  Segments(const Tensor& begins, const Problem& all)
      : begins(static_cast<const int64_t*>(begins.const_data_ptr())), count(begins.numel() - 1) {
    STD_TORCH_CHECK(begins.dim() == 1 && begins.is_contiguous() && begins.scalar_type() == ScalarType::Long &&
                        count >= 0 && this->begins[0] == 0 && this->begins[count] == all.queries &&
                        std::is_sorted(this->begins, this->begins + count + 1),
                    "begins must be (B + 1,) int64, contiguous, and ascend from 0 to the number of rows");
    STD_TORCH_CHECK(all.samples == 1 && all.queries == all.keys, "segments are of the rows of one sample");
  }

  // Calls run(pass, first row) for each segment, in parallel, with a pass whose problem is that of the segment.
  template <typename Pass, typename F>
  void each(const Problem& all, const F& run) const {
    const int64_t rows_of_task = std::max<int64_t>(1, 256 * count / std::max<int64_t>(1, all.queries));
    torch::stable::parallel_for(0, count, rows_of_task, [&](int64_t from, int64_t until) {
      Problem one = all;
      one.queries = 0;
      for (int64_t s = from; s < until; ++s) one.queries = std::max(one.queries, begins[s + 1] - begins[s]);
      one.keys = one.queries;
      Pass pass(one);  // which has room for the longest
      for (int64_t s = from; s < until; ++s) {
        one.queries = one.keys = begins[s + 1] - begins[s];
        if (one.queries > 0) run(pass, begins[s]);
      }
    });
  }
};

template <typename T>
Head<T> from_row(const Heads<T>& heads, int64_t h, int64_t row) {
  const Head<T> head = heads.at(0, h);
  return {head.row(row), head.stride};
}

template <typename T>
void run_segments(const Problem& all, const Segments& segments, const Tensor& query, const Tensor& key,
                  const Tensor& value, const Tensor& out, float* statistics) {
  const auto q = read<T>(query), k = read<T>(key), v = read<T>(value);
  const auto to = write<T>(out);
  segments.each<Forward>(all, [&](Forward& pass, int64_t row) {
    for (int64_t h = 0; h < all.heads; ++h) {
      const int64_t g = h / (all.heads / all.groups);
      pass.run<T>(0, h, from_row(q, h, row), from_row(k, g, row), from_row(v, g, row), 0, pass.all.queries,
                  from_row(to, h, row), statistics + (h * all.queries + row) * 2);
    }
  });
}

template <typename T>
void run_segments_backward(const Problem& all, const Segments& segments, const Tensor& grad, const Tensor& query,
                           const Tensor& key, const Tensor& value, const Tensor& out, const float* statistics,
                           const Tensor& d_query, const Tensor& d_key, const Tensor& d_value) {
  const auto g_out = read<T>(grad), q = read<T>(query), k = read<T>(key), v = read<T>(value), o = read<T>(out);
  const auto d_q = write<T>(d_query), d_k = write<T>(d_key), d_v = write<T>(d_value);
  const int64_t shared = all.heads / all.groups;
  segments.each<Backward>(all, [&](Backward& pass, int64_t row) {
    for (int64_t g = 0; g < all.groups; ++g) {
      pass.enter<T>(from_row(k, g, row), from_row(v, g, row));
      for (int64_t h = g * shared; h < (g + 1) * shared; ++h)
        pass.add<T>(0, h, from_row(q, h, row), from_row(o, h, row), from_row(g_out, h, row),
                    statistics + (h * all.queries + row) * 2, from_row(d_q, h, row));
      pass.leave<T>(from_row(d_k, g, row), from_row(d_v, g, row));
    }
  });
}

// The output (B, H, L, V), and float32 statistics (B, H, L, 2) for the backward pass.
std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value, Maybe mask,
                                     Maybe seed, double dropout, bool causal, double scale) {
  const Problem all = problem_of(query, key, value, mask, seed, dropout, causal, scale);
  Tensor out = empty_heads(query, all.heads, all.queries, all.value_features);
  Tensor statistics =
      torch::stable::new_empty(query, {all.samples, all.heads, all.queries, 2}, ScalarType::Float);
  float* to = static_cast<float*>(statistics.mutable_data_ptr());
  query.scalar_type() == ScalarType::Float ? run_forward<float>(all, query, key, value, out, to)
                                           : run_forward<uint16_t>(all, query, key, value, out, to);
  return {out, statistics};
}

void check_saved(const Tensor& grad, const Tensor& out, const Tensor& statistics, const Tensor& query,
                 const Problem& all) {
  for (const Tensor& x : {grad, out}) check(x, query, all.heads, all.queries, all.value_features);
  STD_TORCH_CHECK(statistics.scalar_type() == ScalarType::Float && statistics.is_contiguous() &&
                      statistics.numel() == all.samples * all.heads * all.queries * 2,
                  "statistics must be contiguous (B, H, L, 2) float32");
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                      const Tensor& value, Maybe mask, Maybe seed, const Tensor& out,
                                                      const Tensor& statistics, double dropout, bool causal,
                                                      double scale) {
  const Problem all = problem_of(query, key, value, mask, seed, dropout, causal, scale);
  check_saved(grad, out, statistics, query, all);
  Tensor d_query = empty_heads(query, all.heads, all.queries, all.features);
  Tensor d_key = empty_heads(key, all.groups, all.keys, all.features);
  Tensor d_value = empty_heads(value, all.groups, all.keys, all.value_features);
  const float* from = static_cast<const float*>(statistics.const_data_ptr());
  query.scalar_type() == ScalarType::Float
      ? run_backward<float>(all, grad, query, key, value, out, from, d_query, d_key, d_value)
      : run_backward<uint16_t>(all, grad, query, key, value, out, from, d_query, d_key, d_value);
  return {d_query, d_key, d_value};
}

// As attention of one sample (1, H, N, D), whose rows attend within their segments.
std::tuple<Tensor, Tensor> segment_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const Tensor& begins, bool causal, double scale) {
  const Problem all = problem_of(query, key, value, {}, {}, 0.0, causal, scale);
  const Segments segments(begins, all);
  Tensor out = empty_heads(query, all.heads, all.queries, all.value_features);
  Tensor statistics = torch::stable::new_empty(query, {1, all.heads, all.queries, 2}, ScalarType::Float);
  float* to = static_cast<float*>(statistics.mutable_data_ptr());
  query.scalar_type() == ScalarType::Float ? run_segments<float>(all, segments, query, key, value, out, to)
                                           : run_segments<uint16_t>(all, segments, query, key, value, out, to);
  return {out, statistics};
}

std::tuple<Tensor, Tensor, Tensor> segment_attention_backward(const Tensor& grad, const Tensor& query,
                                                              const Tensor& key, const Tensor& value,
                                                              const Tensor& begins, const Tensor& out,
                                                              const Tensor& statistics, bool causal, double scale) {
  const Problem all = problem_of(query, key, value, {}, {}, 0.0, causal, scale);
  const Segments segments(begins, all);
  check_saved(grad, out, statistics, query, all);
  Tensor d_query = empty_heads(query, all.heads, all.queries, all.features);
  Tensor d_key = empty_heads(key, all.groups, all.keys, all.features);
  Tensor d_value = empty_heads(value, all.groups, all.keys, all.value_features);
  const float* from = static_cast<const float*>(statistics.const_data_ptr());
  query.scalar_type() == ScalarType::Float
      ? run_segments_backward<float>(all, segments, grad, query, key, value, out, from, d_query, d_key, d_value)
      : run_segments_backward<uint16_t>(all, segments, grad, query, key, value, out, from, d_query, d_key, d_value);
  return {d_query, d_key, d_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed, float dropout, bool causal, "
      "float scale) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed, Tensor out, "
      "Tensor statistics, float dropout, bool causal, float scale) -> (Tensor, Tensor, Tensor)");
  m.def(
      "segment_attention(Tensor query, Tensor key, Tensor value, Tensor begins, bool causal, float scale) -> (Tensor, "
      "Tensor)");
  m.def(
      "segment_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor begins, Tensor out, "
      "Tensor statistics, bool causal, float scale) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(lightning_accel_native, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("segment_attention", TORCH_BOX(&segment_attention));
  m.impl("segment_attention_backward", TORCH_BOX(&segment_attention_backward));
}
