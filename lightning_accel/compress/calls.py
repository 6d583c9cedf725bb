"""Arguments of calls of a module, for any number of samples, and messages of their errors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_accel._private.torch import tree_flatten, tree_map_only

Run = Callable[..., Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def num_samples(inputs: Inputs) -> int:
    """Return the number of samples of a batch: the first dimension of the first tensor that has one.

    Raises:
        ValueError: if no tensor has a dimension.
    """
    leaves = tree_flatten(inputs)[0]
    for value in leaves:
        if isinstance(value, torch.Tensor) and value.dim():
            return len(value)
    found = ", ".join(type(value).__name__ for value in leaves) or "no argument"
    raise ValueError(
        f"a call needs a tensor with a dimension for the rows of its batch; it has {found}. Choose a submodule "
        "that is called with tensors, by the option module of Export or Quantization"
    )


def first_samples(inputs: Inputs, count: int) -> Inputs:
    """Return ``inputs`` with the first ``count`` samples of each tensor, repeated if there are fewer.

    Inputs are returned whole if an integer tensor has another first dimension, as the edges of graphs have: it may hold
    indices of samples that would be dropped.

    >>> first_samples(((torch.arange(3),), {}), 4)
    ((tensor([0, 1, 2, 0]),), {})
    """
    whole = num_samples(inputs)
    if count == whole or any(_has_other_length(value, whole) for value in tree_flatten(inputs)[0]):
        return inputs
    taken = torch.arange(count) % whole
    return tree_map_only(
        torch.Tensor,
        lambda value: value[taken.to(value.device)] if value.dim() and len(value) == whole else value,
        inputs,
    )


def smallest_call(module: nn.Module, inputs: Inputs) -> Inputs:
    """Return ``inputs`` with one sample, or whole if ``module`` cannot run on one, such as one node of a graph."""
    args, kwargs = one = first_samples(inputs, 1)
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    except Exception:
        return inputs
    return one


def shorter_call(run: Run, call: Inputs) -> Inputs | None:
    """Return ``call`` with shorter token sequences, integers (B, T); None if there are none or ``run`` fails on it."""
    tensors = [value for value in tree_flatten(call)[0] if isinstance(value, torch.Tensor)]
    tokens = [value for value in tensors if value.dim() == 2 and not value.is_floating_point()]
    lengths = {value.shape[1] for value in tokens if value.dtype != torch.bool}
    if len(lengths) != 1 or (length := lengths.pop()) < 3:
        return None
    shorter = max(2, length // 2)
    whole = num_samples(call)
    cut: Inputs = tree_map_only(
        torch.Tensor,
        lambda value: value[:, :shorter] if value.dim() > 1 and value.shape[:2] == (whole, length) else value,
        call,
    )
    try:
        with torch.no_grad():
            run(*cut[0], **cut[1])
    except Exception:  # it requires one length
        return None
    return cut


@contextmanager
def replaced_forward(module: nn.Module, run: Run) -> Iterator[None]:
    """Let calls of ``module`` call ``run`` while open."""
    own = module.__dict__.get("forward")
    object.__setattr__(module, "forward", run)
    try:
        yield
    finally:
        object.__delattr__(module, "forward")
        if own is not None:
            object.__setattr__(module, "forward", own)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters, the CPU if it has none."""
    return next((one.device for one in module.parameters()), torch.device("cpu"))


def first_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _has_other_length(value: Any, whole: int) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        return False
    return value.dim() > 0 and len(value) not in (1, whole)
