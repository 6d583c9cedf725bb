"""What PyTorch does otherwise on CUDA than on the CPU, for steps of CPU tensors that stand for those on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_accel._private.torch import foreach_on_cpu

# of the functions that autocast computes in float32 on CUDA, those whose results or inputs autograd keeps
_IN_FLOAT32 = {
    torch.layer_norm,
    torch.native_layer_norm,
    torch.group_norm,
    torch.rms_norm,
    torch.softmax,
    torch.log_softmax,
    Tensor.softmax,
    Tensor.log_softmax,
    F.softmax,
    F.log_softmax,
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.binary_cross_entropy_with_logits,
    F.layer_norm,
    F.group_norm,
    F.rms_norm,
    torch.exp,
    torch.log,
    torch.pow,
    torch.rsqrt,
    torch.sum,
    torch.cumsum,
    Tensor.exp,
    Tensor.log,
    Tensor.pow,
    Tensor.rsqrt,
    Tensor.sum,
    Tensor.cumsum,
}
_LOW = (torch.bfloat16, torch.float16)


class _CudaFunctions(TorchFunctionMode):
    """Call functions as CUDA does: float32 where autocast asks for it, dropout and attention in one kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            return func(*args, **{**kwargs, "dropout_p": 0.0})  # kernels of CUDA draw it again in the backward pass
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(_widened(value) for value in args)
            with torch.autocast("cpu", enabled=False):
                return func(*args, **{name: _widened(value) for name, value in kwargs.items()})
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training and 0 < p < 1:
        return torch.native_dropout(input, p, True)[0]
    return torch.dropout(input, p, training)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let functions and optimizers take the ways of CUDA for tensors on the CPU."""
    with foreach_on_cpu(), _CudaFunctions():
        yield
