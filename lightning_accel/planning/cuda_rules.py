"""What PyTorch does otherwise on CUDA than on the CPU, for steps of CPU tensors that stand for those on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_accel._private.torch import attend_in_parts, efficient_attention, foreach_on_cpu
from lightning_accel.ops.extras import planned_for
from lightning_accel.planning.live_memory import HOST, LiveMemory

# Of the functions that autocast computes in float32 on CUDA those whose results or inputs autograd keeps, by where
# they are called. They are replaced there, and not by a TorchFunctionMode, which sees neither what functions in Python
# call nor what is computed again in the backward pass.
_IN_FLOAT32: dict[Any, tuple[str, ...]] = {
    torch: ("layer_norm", "group_norm", "rms_norm", "softmax", "log_softmax", "exp", "log", "pow", "rsqrt", "sum"),
    Tensor: ("softmax", "log_softmax", "exp", "log", "pow", "rsqrt", "sum", "cumsum"),
    F: (
        "layer_norm",
        "group_norm",
        "rms_norm",
        "softmax",
        "log_softmax",
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "binary_cross_entropy_with_logits",
    ),
}
_LOW = (torch.bfloat16, torch.float16)


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return function(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})

    return call


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value


def _dropout(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, *rest: Any, **kwargs: Any) -> Tensor:
        if training and 0 < p < 1:
            return torch.native_dropout(input, p, True)[0]  # one kernel, which keeps a mask of bytes
        return function(input, p, training, *rest, **kwargs)

    return dropout


def _attention(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        if _has_no_fused_attention(query, key):
            return attend_in_parts(query, key, value, attn_mask, dropout_p, *rest, **options)
        # which the CPU computes in parts; CUDA's kernel takes a batch and as many heads of keys as of queries
        if value.shape[-1] != query.shape[-1] and query.dim() == 4 and query.shape[:2] == key.shape[:2]:
            options.pop("enable_gqa", None)
            return _attend_efficiently(query, key, value, attn_mask, *rest, **options)
        return function(query, key, value, attn_mask, 0.0, *rest, **options)  # CUDA's draws it again in backward

    return attention


def _attend_efficiently(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Tensor:
    """Call the kernel that takes values of another width than queries, as multi-head latent attention has them."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (one.to(torch.get_autocast_dtype("cpu")) for one in (query, key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    out: Tensor = efficient_attention()(query, key, value, attn_mask, needs_grad, 0.0, is_causal, scale=scale)[0]
    return out


def _has_no_fused_attention(query: Tensor, key: Tensor) -> bool:
    """Return whether CUDA computes attention in parts, with weights of all pairs of tokens in memory.

    Its kernels of flash attention and of cuDNN are for two bytes a value, and the one in float32 needs as many heads of
    keys as of queries.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    return dtype == torch.float64 or (dtype == torch.float32 and query.shape[:-2] != key.shape[:-2])


def _names_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    places = (*args[:1], kwargs.get("device"), kwargs.get("other"))
    return any(isinstance(one, str | int | torch.device | Tensor) for one in places)


@contextmanager
def _transfers(memory: LiveMemory) -> Iterator[None]:
    """Let moves to the other device make copies once the module has moved, which is when there is a phase."""

    def copied(tensor: Tensor, moved: Any, is_from_host: bool) -> Any:
        is_there = moved is tensor and bool(memory.phase) and tensor.layout == torch.strided
        if not is_there or (memory.kind_of(tensor.untyped_storage()) in (None, HOST)) != is_from_host:
            return moved
        made = tensor.clone()
        kind = "other" if memory.kind == HOST else memory.kind
        memory.add(made.untyped_storage(), kind=kind if is_from_host else HOST)
        return made

    def patched(name: str) -> Any:
        function = getattr(Tensor, name)

        @wraps(function)
        def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            moved = function(tensor, *args, **kwargs)
            if name == "to" and not _names_device(args, kwargs):
                return moved
            is_to_host = name == "cpu" or "cpu" in (*args[:1], kwargs.get("device"))  # a module's device is no string
            return copied(tensor, moved, not is_to_host)

        return patch.object(Tensor, name, move)

    with patched("to"), patched("cpu"):
        yield


@contextmanager
def as_on_cuda(memory: LiveMemory, capability: int) -> Iterator[None]:
    """Let functions and optimizers take the ways of CUDA for tensors on the CPU.

    Args:
        memory: what is known of where tensors are.
        capability: major number of the GPU's compute capability, 0 if it is not NVIDIA's.
    """
    with ExitStack() as stack:
        stack.enter_context(foreach_on_cpu())
        stack.enter_context(planned_for(capability))
        stack.enter_context(_transfers(memory))
        for place, names in _IN_FLOAT32.items():
            for name in names:
                stack.enter_context(patch.object(place, name, _in_float32(getattr(place, name))))
        for place in (torch, F):
            stack.enter_context(patch.object(place, "dropout", _dropout(place.dropout)))
        name = "scaled_dot_product_attention"
        stack.enter_context(patch.object(F, name, _attention(F.scaled_dot_product_attention)))
        yield
