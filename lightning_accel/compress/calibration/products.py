"""Inputs of the matrix products that a module computes with its weights, whatever layer or function computes them."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_accel._private.torch import TorchDispatchMode
from lightning_accel.ops import grouped_products
from lightning_accel.ops.native import KERNELS


class Matrix(NamedTuple):
    """Name a matrix of (outputs, inputs) within the memory of a weight, such as that of one expert.

    Attributes:
        name: name of the weight.
        offset: its first element in the weight's memory.
        shape: (outputs, inputs).
        strides: distance of rows and of columns in memory.
    """

    name: str
    offset: int
    shape: tuple[int, int]
    strides: tuple[int, int]

    def of(self, weight: Tensor) -> Tensor:
        """Return the matrix within ``weight``, or within another contiguous tensor of its shape."""
        return weight.detach().as_strided(self.shape, self.strides, weight.storage_offset() + self.offset)


class ProductRecorder(TorchDispatchMode):
    """Pass on the inputs of each product with one of the given weights, while entered.

    It sees the operations of ATen, and so ``F.linear``, matrix products, convolutions and what computes by them, such
    as attention, recurrent layers and experts; no products within kernels of other libraries. Kernels of this package
    are switched off meanwhile.

    Args:
        weights: contiguous tensors by name.
        record: called with the matrix that is multiplied, and its inputs of shape (products, inputs).
    """

    def __init__(self, weights: Mapping[str, Tensor], record: Callable[[Matrix, Tensor], None]) -> None:
        super().__init__()
        self._without_kernels = ExitStack()  # whose products it does not see
        self._record = record
        self._weights: dict[int, list[tuple[str, Tensor]]] = {}
        for name, weight in weights.items():
            self._weights.setdefault(weight.untyped_storage().data_ptr(), []).append((name, weight))

    def __enter__(self) -> "ProductRecorder":
        self._without_kernels.enter_context(KERNELS.switched_off())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._without_kernels.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        find = _PRODUCTS.get(func)
        if find is not None:
            for left, right in find(*args, **(kwargs or {})):
                if matrix := self._find(right):
                    self._record(matrix, left.reshape(-1, left.shape[-1]))
                elif matrix := self._find(left.mT):  # the weight from the left
                    self._record(matrix, right.mT)
        elif func is torch.ops.aten.convolution.default:
            self._record_convolution(*args)
        return func(*args, **(kwargs or {}))

    def _find(self, operand: Tensor) -> Matrix | None:
        """Return the matrix of a weight whose transpose, of shape (inputs, outputs), ``operand`` is."""
        for name, weight in self._weights.get(operand.untyped_storage().data_ptr(), ()):
            offset = int(operand.storage_offset()) - int(weight.storage_offset())
            if 0 <= offset < weight.numel() and operand.dtype == weight.dtype:
                inputs, outputs = operand.shape
                return Matrix(name, offset, (outputs, inputs), (operand.stride(1), operand.stride(0)))
        return None

    def _record_convolution(
        self, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
        output_padding: Any, groups: int,
    ) -> None:  # fmt: skip
        found = self._find(weight.flatten(1).t()) if weight.is_contiguous() and not transposed else None
        if found is None:
            return
        outputs, inputs = weight.shape[0] // groups, math.prod(weight.shape[1:])
        for patches in _patches(x, weight.shape[2:], stride, padding, dilation):  # (positions, C, *kernel)
            for group, part in enumerate(patches.chunk(groups, 1)):
                matrix = Matrix(found.name, found.offset + group * outputs * inputs, (outputs, inputs), (inputs, 1))
                self._record(matrix, part.flatten(1))


def _patches(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Iterator[Tensor]:
    """Yield what the kernel of a convolution is multiplied with, for one sample after the other."""
    pads = [value for each in reversed(padding) for value in (each, each)]
    for sample in F.pad(x, pads):
        for dim, (size, step, spread) in enumerate(zip(kernel, stride, dilation, strict=True), 1):
            sample = sample.unfold(dim, (size - 1) * spread + 1, step)[..., ::spread]
        positions = [*range(1, 1 + len(kernel))]
        yield sample.permute(*positions, 0, *range(1 + len(kernel), sample.dim())).flatten(0, len(kernel) - 1)


def _linear(x: Tensor, weight: Tensor, bias: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
    yield x, weight.t()


def _mm(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield a, b


def _addmm(bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Iterator[tuple[Tensor, Tensor]]:
    yield a, b


def _bmm(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(a, b, strict=True)


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(a, b, strict=True)


def _mv(a: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield x.unsqueeze(0), a.t()


def _addmv(bias: Tensor, a: Tensor, x: Tensor, **_: Any) -> Iterator[tuple[Tensor, Tensor]]:
    yield x.unsqueeze(0), a.t()


def _grouped_mm(
    a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    if offsets is not None and a.dim() == 2 and b.dim() == 3:
        yield from zip(_groups(a, offsets), b, strict=True)


def _multiply_rows(
    x: Tensor, weight: Tensor, ends: Tensor, bias: Any, source: Tensor | None, *_: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    groups = _groups(x if source is None else source, ends)
    yield from zip(groups if source is None else [x[group] for group in groups], weight.mT, strict=True)


def _groups(x: Tensor, ends: Tensor) -> list[Tensor]:
    bounds = ends.tolist()
    return [x[begin:end] for begin, end in zip([0, *bounds[:-1]], bounds, strict=True)]


_ATEN = torch.ops.aten
_PRODUCTS: dict[Any, Callable[..., Iterator[tuple[Tensor, Tensor]]]] = {
    _ATEN.linear.default: _linear,
    _ATEN.mm.default: _mm,
    _ATEN.mm.out: lambda a, b, out: _mm(a, b),
    _ATEN.addmm.default: _addmm,
    _ATEN.addmm.out: lambda bias, a, b, out, **_: _mm(a, b),
    _ATEN.bmm.default: _bmm,
    _ATEN.baddbmm.default: _baddbmm,
    _ATEN.mv.default: _mv,
    _ATEN.addmv.default: _addmv,
    _ATEN._grouped_mm.default: _grouped_mm,
    grouped_products.MULTIPLY_ROWS: _multiply_rows,
}
