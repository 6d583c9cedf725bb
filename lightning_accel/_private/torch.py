"""Private names of torch that the package stands on."""

import contextlib
import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # with which DTensor looks for sizes of results
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # no other way to see all operations
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec as TreeSpec  # torch has no public functions for nested structures
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

BatchNormBase = _BatchNorm  # of all batch norms, users' own included; the public names are those of its subclasses
NormBase = _NormBase  # of all norms with running statistics
ConvBase = _ConvNd  # of all convolutions
ConvTransposeBase = _ConvTransposeNd
DropoutBase = _DropoutNd  # of all dropouts
LoaderIterator = _BaseDataLoaderIter  # the type of iter(DataLoader), whose documentation names none

# ---- tensors


def change_count(tensor: Tensor) -> int:
    """Return how often ``tensor`` was changed in place; autograd alone reads this counter, without a public name."""
    return tensor._version


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether hooks wait for the gradient of ``parameter``; torch registers and removes them, but lists none."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def multiply_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply ``tensors`` in place in one kernel per device; torch offers this to its optimizers alone."""
    torch._foreach_mul_(tensors, factor)


def multiply_int8(a: Tensor, b: Tensor) -> Tensor:
    """Multiply int8 matrices with sums in int32; ``torch.mm`` of int8 sums in int8."""
    return torch._int_mm(a, b)


def attend_in_parts(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` in products and a softmax, as where no fused kernel fits."""
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, *args, **kwargs)[0]


def multiply_by_onednn(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b.t()`` by oneDNN, which torch calls for matrices of other dtypes than float32 alone."""
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


def unscale_gradients_(gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply ``gradients`` in place and set ``found_inf`` for inf or NaN; GradScaler's public methods take all."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def in_transform() -> bool:
    """Return whether a transform of torch.func is active, which Function.apply asks by this private name, too."""
    return torch._C._are_functorch_transforms_active()


def is_traced() -> bool:
    """Return whether operations are recorded, transformed or differentiated forwards, as kernels cannot be."""
    is_scripted: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return torch.compiler.is_compiling() or is_scripted or in_transform() or in_forward_mode()


def is_batched(x: Tensor) -> bool:
    """Return whether ``x`` stands for many tensors, in vmap or in gradients of ``is_grads_batched``."""
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)


def is_transformed(x: Tensor) -> bool:
    """Return whether operations with ``x`` are transformed, batched or differentiated forwards, in eager mode."""
    return not torch.compiler.is_compiling() and (in_transform() or in_forward_mode() or is_batched(x))


def in_forward_mode() -> bool:
    """Return whether derivatives are computed in forward mode, which has no public name outside of its own module."""
    return forward_ad._current_level >= 0


# ---- operations and compilation


def arguments_of(operation: Any) -> Sequence[Any]:
    """Return the declared arguments of a dispatched operation, which only its private schema holds."""
    return operation._schema.arguments


def returns_of(operation: Any) -> Sequence[Any]:
    """Return the declared results of a dispatched operation, which only its private schema holds."""
    return operation._schema.returns


def replace_cpu_kernel(name: str, kernel: Callable[..., Any], key: str) -> Callable[[], None]:
    """Let an operation of torch run ``kernel`` on CPU tensors until the returned function is called.

    ``key`` is ``CPU``, or ``AutogradCPU`` of what records gradients.

    Kernels of a ``torch.library.Library`` go with it, but it has no public method to end. What an export has found to
    compute an operation is kept, which nothing public ends either.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        library.impl(name, kernel, key, with_keyset=True)
    packet, _, overload = name.partition(".")
    getattr(getattr(torch.ops.aten, packet), overload or "default")._dispatch_cache.clear()
    return library._destroy


@contextlib.contextmanager
def foreach_on_cpu() -> Iterator[None]:
    """Let optimizers update lists of tensors at once on the CPU, as they do on CUDA; the choice is made in a list."""
    module: Any = _optimizer
    found = module._get_foreach_kernels_supported_devices
    module._get_foreach_kernels_supported_devices = lambda: [*found(), "cpu"]
    try:
        yield
    finally:
        module._get_foreach_kernels_supported_devices = found


def finished_work(future: Any) -> Any:
    """Return a collective's handle that a future completes; torch makes these for groups in C++ alone."""
    module: Any = torch._C._distributed_c10d
    return module._create_work_from_future(future)


def name_of_group(group: Any) -> str:
    """Return the name of a process group, empty if it has none; groups in Python have to answer it themselves."""
    return str(torch.distributed.distributed_c10d._world.pg_names.get(group, ""))


def group_of(name: Any) -> Any:
    """Return the process group that a functional collective is called with, which it may name."""
    module: Any = torch.distributed.distributed_c10d
    return module._resolve_process_group(name) if isinstance(name, str) else name


def packet_of(operation: Any) -> Any:
    """Return the packet of a dispatched operation's overloads, by which torch's formulas of FLOPs are found."""
    return operation._overloadpacket


def number_read() -> Any:
    """Return the operation by which the host reads a number, which has no public name."""
    return torch.ops.aten._local_scalar_dense.default


def cpu_attention() -> tuple[Any, Any]:
    """Return the packets of fused attention on the CPU, forward and backward."""
    operations = torch.ops.aten
    return (
        operations._scaled_dot_product_flash_attention_for_cpu,
        operations._scaled_dot_product_flash_attention_for_cpu_backward,
    )


def efficient_attention() -> Any:
    """Return the packet of memory-efficient attention, which takes values of another width than queries."""
    return torch.ops.aten._scaled_dot_product_efficient_attention


def grouped_product() -> Any:
    """Return the packet of the product of groups of rows with a matrix each, which ``F.grouped_mm`` calls."""
    return torch.ops.aten._grouped_mm


def is_functional_collective(operation: Any) -> bool:
    """Return whether an operation is a collective that returns new tensors, or waits for one."""
    return str(operation.namespace) == "_c10d_functional"


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that only this storage has while it lives; ``data_ptr()`` is that of others too, if empty."""
    return storage._cdata


def grouped_mm() -> Any:
    """Return the operation that torch.nn.functional.grouped_mm dispatches to, which has no public name."""
    return torch.ops.aten._grouped_mm


def compiled_original(module: Any) -> nn.Module | None:
    """Return what ``torch.compile`` wrapped in ``module``, None if nothing; the wrapper has no public name."""
    return getattr(module, "_orig_mod", None)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what calls of ``module`` run in place of ``forward`` and hooks; ``Module.compile`` sets it unseen."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Set what calls of ``module`` run, None for its ``forward`` and hooks; ``Module.compile`` cannot be undone."""
    module._compiled_call_impl = call


def has_call_hooks(module: nn.Module) -> bool:
    """Return whether calls of ``module`` run more than its ``forward``: hooks, or :func:`compiled_call`."""
    own = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return any(own) or bool(torch.nn.modules.module._has_any_global_hook()) or compiled_call(module) is not None


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Return the call of ``module`` with its hooks, without :func:`compiled_call`, which ``__call__`` prefers."""
    return module._call_impl


def explain_compilation(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return graphs, breaks and reasons of a compilation, which the documentation names by this private module."""
    return torch._dynamo.explain(call)(*args, **kwargs)


def num_compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process, which only its private counters tell."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"].get("unique_graphs", 0)


def profile_with_stacks(activities: Sequence[Any]) -> torch.profiler.profile:
    """Return a profile whose events have the Python stack, for which torch.profiler needs a private option."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or its start and end are lines of the error stream
    config = torch._C._profiler._ExperimentalConfig(verbose=True)
    return torch.profiler.profile(activities=activities, with_stack=True, experimental_config=config)


def event_tree(profiled: torch.profiler.profile) -> Sequence[Any]:
    """Return what a profile saw as trees of calls, with lines; ``events()`` takes a second to make and has no lines."""
    inner: Any = profiled.profiler
    trees: Sequence[Any] = inner.kineto_results.experimental_event_tree()
    return trees


def compilations() -> Sequence[Any]:
    """Return times and reasons of the last 64 compilations of this process, which otherwise go only to a log."""
    return torch._dynamo.utils.get_compilation_metrics()


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Tensor], options: dict[str, bool]
) -> Callable[..., Any]:
    """Compile ``graph`` without dynamo, which checks guards in each call; no public function omits it."""
    with _releasable_constants():
        return torch._inductor.compile(graph, list(inputs), options=options)


@contextlib.contextmanager
def _releasable_constants() -> Iterator[None]:
    """Let the constants of what is compiled while open be freed with it; inductor would keep them for the process."""
    cache = torch._inductor.codecache.PyCodeCache
    num_before = len(cache.modules)
    try:
        yield
    finally:
        shared = {id(one) for one in cache.modules_no_attr.values()}
        for module in cache.modules[num_before:]:
            if id(module) not in shared:  # its functions hold its variables
                cache.modules.remove(module)
                if sys.modules.get(module.__name__) is module:
                    del sys.modules[module.__name__]


def traced_inputs(graph: torch.fx.GraphModule) -> list[Any]:
    """Return the inputs that a program was traced with, whose sizes are unknown, to compile it for all sizes.

    The table of sizes of a program that was read from a file also has products of them, at which inductor fails.
    """
    found = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    for one in found:
        if isinstance(one, torch._subclasses.FakeTensor) and one.fake_mode.shape_env is not None:
            values = one.fake_mode.shape_env.backed_var_to_val
            for size in [size for size in values if not size.is_Symbol]:
                del values[size]
    return found


@contextlib.contextmanager
def frozen_weights() -> Iterator[None]:
    """Make compilations treat weights as constants while open; as an option of torch.compile, dynamo ignores it."""
    with torch._inductor.config.patch(freezing=True), _releasable_constants():
        yield


# ---- modules


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the parameters of ``module`` itself by name, a tenth of the time that its attributes take."""
    return module._parameters


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of submodules itself; ``named_children`` omits empty places and second names."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return the table of parameters itself, to put in a plain tensor, which ``register_parameter`` rejects."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the table of buffers itself; ``named_buffers`` omits empty places, and lists no persistence."""
    return module._buffers


def replicate(module: nn.Module) -> Any:
    """Return a shallow copy of ``module`` for another device, as recurrent layers define it for DataParallel alone."""
    return module._replicate_for_data_parallel()


def apply_to_tensors_(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace each tensor of ``module`` by a function of it; ``Module.to`` does not leave out those on meta."""
    module._apply(function)


def convolve(layer: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Run a convolution with another weight and the layer's padding mode, for which it has no public method."""
    return layer._conv_forward(x, weight, layer.bias)  # type: ignore[operator]


def check_input_dims(layer: nn.Module, x: Tensor) -> None:
    """Raise ValueError if ``x`` has not the dimensions of this kind of batch norm, which only its own check knows."""
    layer._check_input_dim(x)  # type: ignore[operator]


# ---- optimizers and loss scaling


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run at each step of this optimizer or of all; torch registers them, but lists none."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    of_all = _optimizer._global_optimizer_pre_hooks or _optimizer._global_optimizer_post_hooks
    return bool(own or of_all)


def is_counted_by_schedule(step: Any) -> bool:
    """Return whether a learning rate schedule wrapped ``step`` to count its calls, which only a private mark tells."""
    return hasattr(step, "_wrapped_by_lr_sched")


def scale_of(scaler: torch.amp.GradScaler) -> Tensor | None:
    """Return the scale as a tensor on its device; ``get_scale`` would wait for the device."""
    return scaler._scale


def found_inf_by_device(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> dict[torch.device, Tensor]:
    """Return the table of flags, to be changed, that tells ``step`` to skip; it has no public name."""
    found: Any = scaler._found_inf_per_device(optimizer)
    return found


# ---- data, processes and files


def awaited_worker(batches: Any) -> tuple[int, Any] | None:
    """Return number and process of the worker that a loader's iterator waits for, None without; none is public."""
    try:
        worker = batches._task_info[batches._rcvd_idx][0]
        return worker, batches._workers[worker]
    except (AttributeError, LookupError):
        return None


def dataset_of(batches: Any) -> Any:
    """Return the data set of a loader's iterator, None if there is none; it has no public name."""
    return getattr(batches, "_dataset", None)


def makes_own_iterators(loader: DataLoader[Any]) -> bool:
    """Return whether the class of ``loader`` replaces the method by which DataLoader makes its iterators."""
    return type(loader)._get_iterator is not DataLoader._get_iterator


def change_iterators(loader: DataLoader[Any], change: Callable[[DataLoader[Any]], None]) -> None:
    """Make iterators of ``loader`` from a shallow copy of it after ``change``; nothing public comes between the two."""
    loader._get_iterator = partial(_changed_iterator, loader, change)  # type: ignore[method-assign]


def _changed_iterator(loader: DataLoader[Any], change: Callable[[DataLoader[Any]], None]) -> _BaseDataLoaderIter:
    copied = copy.copy(loader)
    del copied.__dict__["_get_iterator"]
    change(copied)
    return copied._get_iterator()


def forget_workers(loader: Any) -> None:
    """Make the next ``iter(loader)`` start workers anew, where it would use those that persist."""
    loader._iterator = None


def default_store() -> Any:
    """Return the store that the process group was made with, which needs no collective; it has no public name."""
    return torch.distributed.distributed_c10d._get_default_store()


def all_to_all(tensor: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    """Exchange rows between processes, with a gradient, which ``torch.distributed.all_to_all_single`` does not have."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    return all_to_all_single_autograd(tensor, received, sent, group)


def storage_info() -> Any:
    """Return the class of places in the pickled table of a distributed checkpoint, which has no public name."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def checkpoint_encodings() -> tuple[Any, Any]:
    """Return what the pickled table of a distributed checkpoint encodes memory formats and layouts by."""
    from torch.distributed.checkpoint import metadata
    from torch.serialization import _get_layout

    return metadata._MEM_FORMAT_ENCODING, _get_layout


def cpu_capabilities() -> Mapping[str, Any]:
    """Return which instructions this CPU has; torch 2.11 has only private functions for it."""
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    return {
        "amx_bf16": torch.cpu._is_amx_tile_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "avx512_vnni": torch.cpu._is_vnni_supported(),
    }


def has_amx() -> bool:
    """Return whether this CPU multiplies tiles of bfloat16 and int8."""
    return bool(cpu_capabilities().get("amx_bf16"))


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16."""
    return has_amx() or bool(cpu_capabilities().get("avx512_bf16"))


def has_vnni() -> bool:
    """Return whether this CPU multiplies int8 without overflow of the sum of two products."""
    found = cpu_capabilities()
    return bool(found.get("avx512_vnni") or found.get("avx_vnni"))


def onednn_has_autocast_dtype() -> bool:
    """Return whether oneDNN runs LSTMs in the dtype of CPU autocast here; else torch still asks it and fails.

    In float16 it runs them without gradients alone, also on CPUs with float16 products.
    """
    supports = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    dtype = torch.get_autocast_dtype("cpu")
    return bool(supports[dtype]()) and not (dtype == torch.float16 and torch.is_grad_enabled())


def onednn_multiplies_float32() -> bool:
    """Return whether oneDNN multiplies float32 matrices if torch asks it to, which it does for other dtypes alone."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def allow_recompilations(number: int) -> None:
    """Let a function be compiled ``number`` times before it stays eager, if that is more than it may now."""
    import torch._dynamo.config as config  # as a whole takes a second to import, which only compiled runs need

    config.recompile_limit = max(config.recompile_limit, number)


def wrapped_frames() -> contextlib.AbstractContextManager[None]:
    """Let Module.compile compile classes of torch.nn, too, whose own frames torch.compile leaves eager, silently."""
    import torch._dynamo.config as config

    return config.patch(wrap_top_frame=True)


def draw_as_eager() -> None:
    """Let compiled functions draw the random numbers that they would draw eagerly, in this process from now on."""
    import torch._inductor.config as config

    config.fallback_random = True
