"""Conversion between calls of a module and flat lists of tensors."""

import inspect
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection
from torch.utils._pytree import (
    SUPPORTED_NODES,
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from lightning_accel.compress.calls import Inputs, num_samples


class Flat(nn.Module):
    """Call a module with the tensors of a call as separate arguments, and return those of its result as a tuple.

    Args:
        module: module to call.
        inputs: positional and keyword arguments; values other than tensors are the same in every call.
    """

    out_spec: TreeSpec
    out_leaves: list[Any]  # of the last call, with None in place of tensors

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.module = module
        leaves, self.in_spec = tree_flatten(inputs)
        self.fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        leaves = [next(rest) if own else leaf for own, leaf in zip(self.is_tensor, self.fixed, strict=True)]
        args, kwargs = tree_unflatten(leaves, self.in_spec)
        out, self.out_spec = tree_flatten(self.module(*args, **kwargs))
        self.out_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in out]
        self.is_out_tensor = [isinstance(leaf, Tensor) for leaf in out]
        return tuple(leaf for leaf in out if isinstance(leaf, Tensor))

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the result of ``module`` with its structure, from its tensors."""
        if self.out_spec.is_leaf() and self.is_out_tensor[0]:
            return tensors[0]
        rest = iter(tensors)
        leaves = [next(rest) if own else leaf for own, leaf in zip(self.is_out_tensor, self.out_leaves, strict=True)]
        return tree_unflatten(leaves, self.out_spec)

    @torch.no_grad()
    def record_result(self, inputs: Inputs) -> Any:
        """Call the module and return its result, whose structure :meth:`rebuild` needs."""
        args, kwargs = inputs
        out = self.module(*args, **kwargs)
        register_dataclasses(out)
        self(*tensors_of(inputs))
        return out


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors in a structure, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def register_dataclasses(value: Any) -> None:
    """Register dataclasses with ``torch.export``, for which they are opaque objects otherwise."""
    for leaf in tree_flatten(value)[0]:
        if is_dataclass(leaf) and not isinstance(leaf, type) and type(leaf) not in SUPPORTED_NODES:
            torch.export.register_dataclass(type(leaf))
            register_dataclasses(leaf)


def dynamic_sizes(inputs: Sequence[Inputs]) -> list[dict[int, tuple[int, ...]]]:
    """Return the dynamic dimensions of each tensor, with their sizes in ``inputs``.

    They are the batch dimension, and those that differ among ``inputs``; dimensions with equal tuples are equal.
    """
    calls = [tensors_of(one) for one in inputs]
    rows = tuple(num_samples(one) for one in inputs)
    found = []
    for same in zip(*calls, strict=True):
        sizes = {dim: tuple(tensor.shape[dim] for tensor in same) for dim in range(same[0].ndim)}
        found.append({dim: seen for dim, seen in sizes.items() if (dim == 0 and seen == rows) or len(set(seen)) > 1})
    return found


def shapes_to_export(inputs: Sequence[Inputs], named: bool = True) -> ShapesCollection:
    """Return the dynamic shapes for ``torch.export``: batch dimensions, and those that differ among ``inputs``.

    Args:
        inputs: calls, of which the first is traced.
        named: specify which dimensions are equal; else the tracer infers it, and may specialize some.
    """
    dims: dict[tuple[int, ...], Any] = {}
    shapes = ShapesCollection()
    for tensor, dynamic in zip(tensors_of(inputs[0]), dynamic_sizes(inputs), strict=True):
        for seen in dynamic.values():
            dims.setdefault(seen, Dim(f"size{len(dims)}", min=1) if named else Dim.AUTO)
        if dynamic:
            shapes[tensor] = {dim: dims[seen] for dim, seen in dynamic.items()}
    return shapes


def argument_names(module: nn.Module, inputs: Inputs) -> list[str]:
    """Return a name for each tensor of a call, from the signature of ``forward``."""
    args, kwargs = inputs
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {f"argument{number}": value for number, value in enumerate([*args, *kwargs.values()])}
    found = []
    for path, leaf in tree_flatten_with_path(bound)[0]:
        if isinstance(leaf, Tensor):
            found.append("_".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
                                  for key in path))  # fmt: skip
    return found


def noise_share(wanted: Any, found: Any) -> float:
    """Return the squared error of floating outputs relative to their squared deviations from the mean."""
    error = power = 0.0
    for one, other in zip(tensors_of(wanted), tensors_of(found), strict=True):
        if one.is_floating_point():
            one, other = one.double(), other.double()
            error += float((one - other).square().sum())
            power += float((one - one.mean()).square().sum())
    return error / power if power else float(error > 0)
