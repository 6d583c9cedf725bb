// Compute torch's operators of CUDA tensors by their kernels for the CPU, on the same memory.
//
// On the emulated GPU (runtime.c) the memory of a device is the host's, so that a CPU tensor can lie upon a CUDA tensor's
// storage. What a GPU refuses is refused: tensors of several devices in one operator, matrix products of integers; and
// operators that make the host wait obey torch.cuda.set_sync_debug_mode.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <Python.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>

namespace {

using Names = std::unordered_set<std::string>;

// Kernels that touch no element: they stay as they are.
const Names METADATA = {
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::set_", "aten::resize_",
    "aten::empty", "aten::empty_strided", "aten::record_stream", "aten::is_set_to", "aten::_fused_sdp_choice",
    "aten::is_pinned", "aten::_pin_memory", "aten::view_as_real", "aten::view_as_complex", "aten::_efficientzerotensor"};
// Kernels of all devices that launch some of CUDA's.
const Names LAUNCHING = {"aten::copy_"};
// Operators that take tensors of the CPU and of CUDA together.
const Names MIXED = {
    "aten::copy_", "aten::index", "aten::_unsafe_index", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_pack_padded_sequence"};
// Operators whose shapes, or values, the host needs at once.
const Names WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::bincount", "aten::is_nonzero"};
// Operators that CUDA has for floating point alone.
const Names FLOATING = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::dot"};

bool is_cuda(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// Pairs of tensors of a device and of the host that share their memory.
struct Shared {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;

  at::Tensor host(const at::Tensor& tensor) {
    if (!is_cuda(tensor)) return tensor;
    for (auto& [device, host] : pairs)
      if (device.is_same(tensor)) return host;
    // Resizable: an output of another size gets new memory, which `resize` copies back.
    auto storage = c10::Storage(
        c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
        at::DataPtr(tensor.storage().mutable_data(), at::kCPU), c10::GetCPUAllocator(), true);
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    host._set_conj(tensor.is_conj());
    host._set_neg(tensor.is_neg());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs.emplace_back(tensor, host);
    return host;
  }

  at::Tensor device(const at::Tensor& tensor, c10::Device on) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (auto& [device, host] : pairs)
      if (host.is_same(tensor)) return device;
    auto result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(on));
    Shared().host(result).copy_(tensor);
    return result;
  }

  void resize(const std::vector<std::vector<int64_t>>& before) {
    for (size_t i = 0; i < before.size(); ++i) {
      auto& [device, host] = pairs[i];
      if (host.sizes() == c10::IntArrayRef(before[i])) continue;
      device.resize_(host.sizes());
      Shared().host(device).copy_(host);
    }
  }
};

// Return whether an argument is a list of tensors, some of which may be missing.
bool lists_tensors(const c10::IValue& value, const c10::Argument& argument) {
  return value.isTensorList() || (value.isList() && argument.type()->str().find("Tensor") != std::string::npos);
}

c10::Device common_device(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> found, other;
  auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (!tensor.is_cuda()) {
      if (tensor.dim() > 0) other = tensor.device();  // numbers may stay on the CPU
    } else if (!found) {
      found = tensor.device();
    } else if (*found != tensor.device()) {
      other = tensor.device();
    }
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = arguments[i];
    if (value.isTensor()) see(value.toTensor());
    else if (lists_tensors(value, schema.arguments()[i])) {
      for (const auto& entry : value.toListRef())
        if (entry.isTensor()) see(entry.toTensor());
    } else if (value.isDevice() && value.toDevice().is_cuda() && !found) {
      found = value.toDevice();
    }
  }
  if (!found || found->index() < 0) found = c10::Device(c10::kCUDA, c10::cuda::current_device());
  TORCH_CHECK(
      !other || MIXED.count(schema.name()), "Expected all tensors to be on the same device, but found at least two ",
      "devices, ", *found, " and ", *other, "! (", schema.name(), ")");
  return *found;
}

void check_waits(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  bool waits = WAITING.count(schema.name());
  if (schema.name() == "aten::copy_") {
    const auto& to = arguments[0].toTensor();
    const auto& from = arguments[1].toTensor();
    const auto& host = to.is_cuda() ? from : to;
    waits = to.is_cuda() != from.is_cuda() && !(arguments[2].toBool() && host.is_pinned());
  } else if (schema.name() == "aten::_grouped_mm") {  // a loop over groups, whose sizes it copies, but for bfloat16
    waits = arguments[0].toTensor().scalar_type() != at::kBFloat16;
  }
  if (waits) c10::cuda::warn_or_error_on_sync();
}

// Return a seed of the CPU for the next numbers of a generator of CUDA, which moves on.
uint64_t next_seed(const std::optional<at::Generator>& given, c10::Device device) {
  auto generator = given && given->defined() ? *given : at::cuda::detail::getDefaultCUDAGenerator(device.index());
  auto* state = at::check_generator<at::CUDAGeneratorImpl>(generator);
  std::lock_guard<std::mutex> lock(state->mutex_);
  const uint64_t offset = state->get_offset();
  state->set_offset(offset + 4);
  return state->current_seed() + 0x9E3779B97F4A7C15ull * offset;
}

void call_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  auto arguments = torch::jit::last(*stack, count);
  const auto device = common_device(schema, arguments);
  check_waits(schema, arguments);
  if (FLOATING.count(schema.name())) {
    const auto type = arguments[0].toTensor().scalar_type();
    TORCH_CHECK(
        c10::isFloatingType(type) || c10::isComplexType(type), "\"", schema.name(), "_cuda\" not implemented for '", type, "'");
  }
  Shared shared;
  bool has_generator = false;
  for (size_t i = 0; i < count; ++i) {
    const auto value = (*stack)[first + i];
    auto& slot = (*stack)[first + i];
    const auto& argument = schema.arguments()[i];
    if (value.isTensor()) {
      slot = shared.host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(shared.host(tensor));
      slot = list;
    } else if (lists_tensors(value, argument)) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& entry : value.toListRef())
        list.push_back(entry.isTensor() ? std::optional(shared.host(entry.toTensor())) : std::nullopt);
      slot = list;
    } else if (value.isDevice()) {
      slot = c10::Device(c10::kCPU);
    } else if (argument.type()->str().find("Generator") != std::string::npos) {
      const auto given = value.isGenerator() ? std::optional(value.toGenerator()) : std::nullopt;
      slot = at::detail::createCPUGenerator(next_seed(given, device));
      has_generator = true;
    }
  }
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  std::vector<std::vector<int64_t>> sizes;
  for (auto& [_, host] : shared.pairs) sizes.push_back(host.sizes().vec());
  if (op.hasTag(at::Tag::nondeterministic_seeded) && !has_generator) {  // as dropout, which draws from the default one
    auto generator = at::detail::getDefaultCPUGenerator();
    const auto state = generator.get_state();
    generator.set_current_seed(next_seed(std::nullopt, device));
    op.callBoxed(stack);
    generator.set_state(state);
  } else {
    op.callBoxed(stack);
  }
  shared.resize(sizes);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& slot = (*stack)[i];
    if (slot.isTensor()) {
      slot = shared.device(slot.toTensor(), device);
    } else if (slot.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : slot.toTensorList()) list.push_back(shared.device(tensor, device));
      slot = list;
    }
  }
}

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), " has no kernel for the CPU, which an emulated GPU needs");
}

struct Quiet : c10::WarningHandler {  // each kernel that is replaced is a warning
  void process(const c10::Warning&) override {}
};

PyObject* install(PyObject*, PyObject*) {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  PyObject* refused = PyList_New(0);
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.rfind("aten::", 0) != 0 || METADATA.count(name.name)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !LAUNCHING.count(name.name)) continue;
    const bool is_known = op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
    auto kernel = is_known ? c10::KernelFunction::makeFromBoxedFunction<&call_on_host>()
                           : c10::KernelFunction::makeFromBoxedFunction<&refuse>();
    if (!is_known) {
      PyObject* text = PyUnicode_FromString(c10::toString(name).c_str());
      PyList_Append(refused, text);
      Py_DECREF(text);
    }
    // kept for the life of the process
    new c10::RegistrationHandleRAII(dispatcher.registerImpl(
        name, c10::DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "an emulated GPU"));
  }
  return refused;
}

PyMethodDef METHODS[] = {
    {"install", install, METH_NOARGS, "Compute operators of CUDA tensors by the CPU from now on; return the names of those that it has no kernel for."}, {}};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "emulated_gpu_kernels", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_emulated_gpu_kernels(void) { return PyModule_Create(&MODULE); }
