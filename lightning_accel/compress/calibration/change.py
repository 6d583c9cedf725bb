"""Changes of a network's weights, layer by layer, by the inputs that they are multiplied with.

Shapes: M outputs, K inputs of a weight as a matrix.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha

from lightning_accel._private.torch import ConvTransposeBase, tree_map_only
from lightning_accel.compress.calibration.layerwise import find_layers_of, visit_layerwise
from lightning_accel.compress.calibration.products import Matrix, ProductRecorder
from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.pruning.prunable import Prunable, is_stacked

_DAMPING = 0.01  # share of the mean of the diagonal, as in the papers of SparseGPT and GPTQ
_SMALLEST = 1e-30  # mean square of inputs in the range of float32
_UNSEEN = "no product with it was seen"

Change = Callable[[Tensor, Tensor | None], tuple[Tensor, Any]]


def change_by_products_(
    module: nn.Module,
    inputs: Sequence[Inputs],
    found: Sequence[Prunable],
    change: Change,
    of_pairs: bool,
    multiple: int = 1,
) -> tuple[dict[str, dict[Matrix, Any]], dict[str, str]]:
    """Change the weights ``found`` in ``module``, each on what the changed layers before it make of the ``inputs``.

    Args:
        module: any module. It is called several times in evaluation mode, without gradients and autocast, on copies of
            the inputs' tensors; random numbers of the process stay as they are.
        inputs: positional and keyword arguments of calls.
        found: weights of ``module``.
        change: called with a matrix (M, K) and statistics of its inputs, None for experts that got none; returns the
            new matrix, and a note on it for the caller.
        of_pairs: whether the statistics are the sum of ``x.t() @ x``, (K, K), in place of that of squares, (K,).
        multiple: of which K has to be one.

    Returns:
        The notes on each matrix, by the name of the weight; and the reason for each weight that was not changed.

    Raises:
        ValueError: if a layer gets NaN or infinity; layers before it are changed then.
    """
    missed = _find_shared(module, found)
    found = [one for one in found if one.name not in missed]
    notes: dict[str, dict[Matrix, Any]] = {}
    with _ready_for_calibration(module), _contiguous([one.weight for one in found]):
        layers = find_layers_of(module, [one.module for one in found], inputs)

        def visit(layer: nn.Module, run: Callable[[], None]) -> None:
            weights = {found[number].name: found[number] for number in layers[layer]}
            statistics: dict[Matrix, Tensor] = {}
            tensors = {name: one.weight for name, one in weights.items()}
            with ProductRecorder(tensors, partial(_add_products, statistics, of_pairs)):
                run()
            for name, one in weights.items():
                own = {matrix: value for matrix, value in statistics.items() if matrix.name == name}
                if reason := _reason_not_changed(one, own, multiple):
                    missed[name] = reason
                else:
                    notes[name] = _change_weight(one, own, change)

        visit_layerwise(module, inputs, [*layers], visit)
    missed |= {one.name: _UNSEEN for one in found if one.name not in notes and one.name not in missed}
    return {one.name: notes[one.name] for one in found if one.name in notes}, missed


def record_products(
    module: nn.Module, inputs: Sequence[Inputs], weights: Mapping[str, Tensor], record: Callable[[Matrix, Tensor], None]
) -> None:
    """Call ``record`` with each matrix within ``weights`` that is multiplied, and its inputs (products, K).

    Args:
        module: called as by :func:`change_by_products_`; not changed.
        inputs: positional and keyword arguments of calls.
        weights: contiguous parameters of ``module`` by name.
        record: the function.
    """
    with _ready_for_calibration(module), ProductRecorder(weights, record):
        for args, kwargs in inputs:
            args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))  # the module may change them in place
            module(*args, **kwargs)


def _find_shared(module: nn.Module, found: Sequence[Prunable]) -> dict[str, str]:
    """Return why weights cannot be changed that several modules hold, as one parameter or in the same memory."""
    holders: dict[int, set[nn.Module]] = {}
    for one in module.modules():
        for value in one.parameters(recurse=False):
            holders.setdefault(value.data_ptr(), set()).add(one)
    return {one.name: "several layers share its memory" for one in found if len(holders[one.weight.data_ptr()]) > 1}


@contextmanager
def _ready_for_calibration(module: nn.Module) -> Iterator[None]:
    """Let calls run in evaluation mode, as operations that show their products."""
    training = {one: one.training for one in module.modules()}
    module.eval()
    onednn: Any = torch.backends.mkldnn  # whose recurrent layers are one operation, as attention's fast path
    has_onednn, onednn.enabled = onednn.enabled, False
    has_fast_path = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            gpus = {value.device for value in module.parameters() if value.is_cuda}
            stack.enter_context(torch.random.fork_rng(gpus))
            for device in {"cpu", *(one.type for one in gpus)}:
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        onednn.enabled = has_onednn
        mha.set_fastpath_enabled(has_fast_path)
        for one, was_training in training.items():
            one.training = was_training


@contextmanager
def _contiguous(weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Give weights the memory of rows while open, whose matrices have strides."""
    strides = {weight: weight.stride() for weight in weights if not weight.is_contiguous()}
    for weight in strides:
        weight.data = weight.data.contiguous()
    try:
        yield
    finally:
        for weight, stride in strides.items():
            own = torch.empty_strided(weight.shape, stride, dtype=weight.dtype, device=weight.device)
            weight.data = own.copy_(weight.data)


def _add_products(statistics: dict[Matrix, Tensor], squares_of_pairs: bool, matrix: Matrix, x: Tensor) -> None:
    """Add to the sums of the inputs' squares, (K,), or of the products of all pairs of inputs, (K, K)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    own = x.t() @ x if squares_of_pairs else x.square().sum(0)
    known = statistics.get(matrix)
    statistics[matrix] = own if known is None else known.add_(own)


def _reason_not_changed(one: Prunable, statistics: Mapping[Matrix, Tensor], multiple: int) -> str | None:
    weight = one.weight
    if isinstance(one.module, ConvTransposeBase):
        return "the inputs of a transposed convolution are not looked at"
    if not statistics:
        return _UNSEEN
    if any(not value.isfinite().all() for value in statistics.values()):
        raise ValueError(
            f"{one.name} is multiplied with NaN, infinity or what is too large to be squared on the calibration data, "
            "which cannot tell what matters. Look for a layer that overflows, or leave out the inputs for which it does"
        )
    if any(matrix.shape[1] % multiple for matrix in statistics):
        return f"its inputs are no multiple of {multiple}"
    uses = torch.zeros_like(weight, dtype=torch.int32)
    for matrix in statistics:
        matrix.of(uses).add_(1)
    if bool((uses > 1).any()) or len({matrix.shape[1] for matrix in statistics}) > 1:
        return "it is multiplied in several ways"
    if not is_stacked(one.module, weight) and not bool((uses == 1).all()):
        return "only a part of it is multiplied"
    return None


def _change_weight(one: Prunable, statistics: Mapping[Matrix, Tensor], change: Change) -> dict[Matrix, Any]:
    """Change each matrix of a weight, and return the notes; experts without data have no statistics."""
    weight = one.weight
    notes: dict[Matrix, Any] = {}
    matrices: dict[Matrix, Tensor | None] = dict(statistics)
    if is_stacked(one.module, weight):
        size = weight.stride(0)
        for matrix in statistics:
            for number in range(weight.shape[0]):
                matrices.setdefault(matrix._replace(offset=number * size + matrix.offset % size), None)
    for matrix, value in matrices.items():
        own = matrix.of(weight)
        values, notes[matrix] = change(own.to(torch.promote_types(own.dtype, torch.float32)), value)
        if not values.isfinite().all():
            raise ValueError(f"{one.name} would get NaN or infinity: it has weights that are not finite")
        own.copy_(values)
    return notes


def compensate(weight: Tensor, products: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a copy of a weight without inputs that are always 0, and how the errors of a column are made up for.

    Args:
        weight: (M, K).
        products: (K, K), sum of ``x.t() @ x`` over the inputs; None if they are not known.

    Returns:
        The copy, and the upper Cholesky factor of the inverse of ``products``, damped and scaled, (K, K); the identity
        where these are not known, or too small.
    """
    if products is None or products.diagonal().mean() < _SMALLEST:
        return weight.clone(), torch.eye(weight.shape[1]).to(weight)
    weight = weight.masked_fill(products.diagonal() == 0, 0)
    products = products / products.diagonal().mean()
    is_dead = (products.diagonal() == 0).to(products)
    damping = _DAMPING
    while True:
        lower, failed = torch.linalg.cholesky_ex(products + torch.diag(is_dead + damping))
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return weight, factor
        damping *= 10  # float32 cannot tell so small eigenvalues from 0
