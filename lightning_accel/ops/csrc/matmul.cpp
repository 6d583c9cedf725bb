// Products of float32 matrices by oneDNN, in place of the library for linear algebra that torch calls.
//
// Torch's stable ABI has neither its own kernels, which are to be called for all other products, nor oneDNN.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace at::native {
// result = beta * result + alpha * mat1 @ mat2, of torch but in none of its headers. Weak: where it has other
// arguments, the library loads without it.
__attribute__((weak)) void mkldnn_matmul(const Tensor& mat1, const Tensor& mat2, const Tensor& result, float beta,
                                         float alpha);
}  // namespace at::native

namespace {
using at::Scalar;
using at::Tensor;
using Sizes = std::vector<int64_t>;

int64_t min_terms, min_size;  // of a product, for each thread, and of each dimension
// Kernels stay registered: to remove them would change the dispatcher's tables while other threads read these.
std::atomic<bool> is_on = false;

bool is_plain(const Tensor& x, int64_t dim) {
  return x.scalar_type() == at::kFloat && x.dim() == dim && x.device().is_cpu() && x.layout() == at::kStrided;
}

// The sizes of the product where oneDNN computes it, and none where torch does: small or invalid products among others.
Sizes sizes_by_onednn(const Tensor& a, const Tensor& b, int64_t dim) {
  if (!is_on || !is_plain(a, dim) || !is_plain(b, dim) || a.size(-1) != b.size(-2)) return {};
  if (dim == 3 && a.size(0) != b.size(0)) return {};
  const int64_t rows = a.size(-2), inner = a.size(-1), columns = b.size(-1), count = dim == 3 ? a.size(0) : 1;
  if (std::min({rows, inner, columns}) < min_size) return {};
  if (count * rows * inner * columns < min_terms * at::get_num_threads()) return {};
  if (!at::globalContext().userEnabledMkldnn()) return {};
  return dim == 3 ? Sizes{count, rows, columns} : Sizes{rows, columns};
}

bool is(const Scalar& x, double value) { return !x.isComplex() && x.to<double>() == value; }

bool adds_by_onednn(const Tensor& self, const Sizes& sizes, const Scalar& beta, const Scalar& alpha) {
  const bool is_sum = is(alpha, 1) && (is(beta, 1) || is(beta, 0));
  return is_sum && self.scalar_type() == at::kFloat && self.device().is_cpu() && self.layout() == at::kStrided &&
         at::is_expandable_to(self.sizes(), sizes);
}

bool takes(const Tensor& out, const Sizes& sizes, const Tensor& a, const Tensor& b) {
  return is_plain(out, int64_t(sizes.size())) && out.sizes() == sizes && out.is_contiguous() && !out.is_alias_of(a) &&
         !out.is_alias_of(b);
}

Tensor empty(const Sizes& sizes, const Tensor& like) { return at::detail::empty_cpu(sizes, like.options()); }

void multiply(const Tensor& a, const Tensor& b, const Tensor& out, bool adds = false) {
  at::native::mkldnn_matmul(a, b, out, adds ? 1.f : 0.f, 1.f);
}

void multiply_add(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Tensor& out) {
  const bool adds = is(beta, 1);  // else NaN of what is not added stays out
  if (adds && !out.is_same(self)) out.copy_(self.expand(out.sizes()));
  multiply(a, b, out, adds);
}

// Each operation in its three forms; `dim` of matrices, or of batches of them, and torch's own kernels.
template <int64_t dim, Tensor (*torchs)(const Tensor&, const Tensor&)>
Tensor product(const Tensor& a, const Tensor& b) {
  const Sizes sizes = sizes_by_onednn(a, b, dim);
  if (sizes.empty()) return torchs(a, b);
  const Tensor out = empty(sizes, a);
  multiply(a, b, out);
  return out;
}

template <int64_t dim, Tensor& (*torchs)(const Tensor&, const Tensor&, Tensor&)>
Tensor& product_out(const Tensor& a, const Tensor& b, Tensor& out) {
  const Sizes sizes = sizes_by_onednn(a, b, dim);
  if (sizes.empty() || !takes(out, sizes, a, b)) return torchs(a, b, out);
  multiply(a, b, out);
  return out;
}

template <int64_t dim, Tensor (*torchs)(const Tensor&, const Tensor&, const Tensor&, const Scalar&, const Scalar&)>
Tensor sum(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  const Sizes sizes = sizes_by_onednn(a, b, dim);
  if (sizes.empty() || !adds_by_onednn(self, sizes, beta, alpha)) return torchs(self, a, b, beta, alpha);
  const Tensor out = empty(sizes, a);
  multiply_add(self, a, b, beta, out);
  return out;
}

template <int64_t dim,
          Tensor& (*torchs)(const Tensor&, const Tensor&, const Tensor&, const Scalar&, const Scalar&, Tensor&)>
Tensor& sum_out(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                Tensor& out) {
  const Sizes sizes = sizes_by_onednn(a, b, dim);
  const bool is_apart = out.is_same(self) || !out.is_alias_of(self);
  if (sizes.empty() || !adds_by_onednn(self, sizes, beta, alpha) || !takes(out, sizes, a, b) || !is_apart)
    return torchs(self, a, b, beta, alpha, out);
  multiply_add(self, a, b, beta, out);
  return out;
}

template <int64_t dim, Tensor& (*torchs)(Tensor&, const Tensor&, const Tensor&, const Scalar&, const Scalar&)>
Tensor& sum_(Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  const Sizes sizes = sizes_by_onednn(a, b, dim);
  if (sizes.empty() || !adds_by_onednn(self, sizes, beta, alpha) || !takes(self, sizes, a, b))
    return torchs(self, a, b, beta, alpha);
  multiply_add(self, a, b, beta, self);
  return self;
}

// The dispatcher warns of each replacement, on standard error.
struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

bool has_onednn_matmul() { return at::native::mkldnn_matmul != nullptr; }

void restore_matmul() { is_on = false; }

void register_kernels() {
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto* const replaced = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  replaced->impl("mm", &product<2, &at::cpu::mm>);
  replaced->impl("mm.out", &product_out<2, &at::cpu::mm_outf>);
  replaced->impl("bmm", &product<3, &at::cpu::bmm>);
  replaced->impl("bmm.out", &product_out<3, &at::cpu::bmm_outf>);
  replaced->impl("addmm", &sum<2, &at::cpu::addmm>);
  replaced->impl("addmm.out", &sum_out<2, &at::cpu::addmm_outf>);
  replaced->impl("addmm_", &sum_<2, &at::cpu::addmm_>);
  replaced->impl("baddbmm", &sum<3, &at::cpu::baddbmm>);
  replaced->impl("baddbmm.out", &sum_out<3, &at::cpu::baddbmm_outf>);
  replaced->impl("baddbmm_", &sum_<3, &at::cpu::baddbmm_>);
}

void replace_matmul(int64_t terms, int64_t size) {
  static const bool once = (register_kernels(), true);
  min_terms = terms;
  min_size = size;
  is_on = once;
}
}  // namespace

TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def("has_onednn_matmul() -> bool", &has_onednn_matmul);
  m.def("replace_matmul(int min_terms, int min_size) -> ()", &replace_matmul);
  m.def("restore_matmul() -> ()", &restore_matmul);
}
