// What recurrences over time share on CPU. Shapes: B rows, T steps, H channels.
//
// One pass over time. Threads share rows, and channels where rows are few; each channel is summed by one thread from
// the first step to the last, so that results do not depend on their number.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>
#include <vector>

namespace lightning_accel {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int64_t kGrain = 32768;  // elements that are worth a thread
constexpr int64_t kLane = 16;      // channels of a vector

template <typename T>
using wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// a * b + c, rounded once where the processor can: said, not left to the compiler, so that all of its loops agree.
template <typename W>
W fused(W a, W b, W c) {
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

inline Tensor with_unit_channels(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return x.size(last) <= 1 || x.stride(last) == 1 ? x : torch::stable::contiguous(x);
}

inline Maybe with_unit_channels(const Maybe& x) {
  return x ? Maybe(with_unit_channels(*x)) : std::nullopt;
}

template <typename T>
View<const T> read(const Tensor& x) {
  return {static_cast<const T*>(x.const_data_ptr()), x.stride(0), x.dim() == 3 ? x.stride(1) : 0};
}

template <typename T>
View<T> write(const Tensor& x) {
  return {static_cast<T*>(x.mutable_data_ptr()), x.stride(0), x.dim() == 3 ? x.stride(1) : 0};
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

inline bool is_time_major(const Tensor& x) { return x.stride(1) > x.stride(0); }

// Fresh memory for `channels`, time-major where `like` is, batch-major otherwise.
inline Tensor empty_as(const Tensor& like, int64_t channels) {
  const int64_t rows = like.size(0), steps = like.size(1);
  Tensor given = like;
  if (like.is_contiguous() || !torch::stable::transpose(given, 0, 1).is_contiguous())
    return torch::stable::new_empty(like, {rows, steps, channels});
  Tensor swapped = torch::stable::new_empty(like, {steps, rows, channels});
  return torch::stable::transpose(swapped, 0, 1);
}

// Calls visit(b, t, c0, c1, state) for all steps of all rows and channels in the order of time, several threads at
// once; `state` is (c1 - c0,) numbers of type W which are the caller's own, zeros at first. Memory is gone through as
// it lies: row by row, or, time-major, step by step.
template <typename W, typename F>
void over_time(int64_t rows, int64_t steps, int64_t channels, bool time_major, bool reverse, const F& visit) {
  const int64_t threads_a_row = (torch::stable::get_num_threads() + rows - 1) / rows;
  const int64_t parts = std::max<int64_t>(1, std::min(channels / kLane, threads_a_row));
  const int64_t width = ((channels + parts - 1) / parts + kLane - 1) / kLane * kLane;
  const int64_t blocks = (channels + width - 1) / width;
  const int64_t grain = std::max<int64_t>(1, kGrain / (steps * std::min(width, channels)));
  torch::stable::parallel_for(0, rows * blocks, grain, [&](int64_t begin, int64_t end) {
    std::vector<W> states((end - begin) * width, W(0));
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

}  // namespace lightning_accel
