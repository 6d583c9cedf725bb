"""Weights rounded to integers in blocks of inputs, each with a scale of its own.

Shapes: M outputs, K inputs of a weight as a matrix, B inputs of a block.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_accel.compress.calibration.change import change_by_products_, compensate
from lightning_accel.compress.calibration.products import Matrix
from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.pruning.prunable import Prunable, find_prunable, is_stacked
from lightning_accel.compress.tracing import has_half_precision, to_float32

_COLUMNS = 128  # after which the remaining ones are updated, as in the paper of GPTQ; blocks divide it
_CLIPPED = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # shares of the largest value of a block that its scale may cover


class Rounded(NamedTuple):
    """Hold a rounded matrix.

    Attributes:
        integers: (M, K) int8.
        scales: (M, ceil(K / B)) float32, which the integers of a block are multiplied with.
        block: B.
    """

    integers: Tensor
    scales: Tensor
    block: int

    def values(self) -> Tensor:
        """Return the matrix that the integers and scales stand for, (M, K) float32."""
        return self.integers * self.scales.repeat_interleave(self.block, 1)[:, : self.integers.shape[1]]


@torch.no_grad()
def round_in_blocks(weight: Tensor, bits: int, block: int, products: Tensor | None = None) -> Rounded:
    """Round a matrix to signed integers.

    With ``products``, columns are rounded one after the other, and those to the right make up for the errors: Frantar
    et al. 2022, GPTQ, https://arxiv.org/abs/2210.17323, algorithm 1, where scales are those of the columns as they are
    then. The scale of a block is that with the smallest squared error among a few, from its largest value down.

    Args:
        weight: (M, K) float.
        bits: 4 or 8.
        block: B, a divisor of 128.
        products: (K, K), sum of ``x.t() @ x`` over the inputs; None if they are not known.
    """
    if products is None:
        return _round_to_nearest(weight.float(), bits, block)
    weight, factor = compensate(weight.float(), products.float())
    importance = products.diagonal().float()
    integers = torch.empty(weight.shape[1], weight.shape[0], dtype=torch.int8, device=weight.device)  # (K, M)
    scales = []
    for begin in range(0, weight.shape[1], _COLUMNS):
        part = weight[:, begin : begin + _COLUMNS].t().contiguous()  # (128, M), in which a column lies together
        rows = factor[begin : begin + _COLUMNS]  # (128, K)
        square = rows[:, begin : begin + _COLUMNS]
        errors = torch.zeros_like(part)
        for column in range(part.shape[0]):
            if column % block == 0:
                places = slice(begin + column, begin + column + block)
                scales.append(_scale(part[column : column + block].t(), importance[places], bits))
            whole = _round(part[column], scales[-1], bits)
            integers[begin + column] = whole
            errors[column] = (part[column] - whole * scales[-1]) / square[column, column]
            part[column + 1 :] -= errors[column] * square[column, column + 1 :, None]
        weight[:, begin + _COLUMNS :] -= errors.t() @ rows[:, begin + _COLUMNS :]
    return Rounded(integers.t().contiguous(), torch.stack(scales, 1), block)


def _round_to_nearest(weight: Tensor, bits: int, block: int) -> Rounded:
    parts = weight.split(block, 1)
    scales = [_scale(part, torch.ones(part.shape[1]).to(part), bits) for part in parts]
    integers = [_round(part, scale[:, None], bits).to(torch.int8) for part, scale in zip(parts, scales, strict=True)]
    return Rounded(torch.cat(integers, 1), torch.stack(scales, 1), block)


def _round(values: Tensor, scales: Tensor, bits: int) -> Tensor:
    return (values / scales).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _scale(block: Tensor, importance: Tensor, bits: int) -> Tensor:
    """Return the scale of each row of a block (M, B): (M,)."""
    largest = block.abs().amax(1) / (2 ** (bits - 1) - 1)
    largest = largest.where(largest > 0, 1)
    if bits > 4:  # of 8 bits, clipping saves none
        return largest
    candidates = torch.stack([largest * share for share in _CLIPPED])  # (C, M)
    errors = (_round(block, candidates[..., None], bits) * candidates[..., None] - block).square() @ importance
    return candidates.gather(0, errors.argmin(0, keepdim=True))[0]


def has_experts(module: nn.Module) -> bool:
    """Return whether a module has parameters with the matrices of several experts."""
    return any(is_stacked(module, one) for one in module.parameters(recurse=False))


def round_layers(
    module: nn.Module, inputs: Sequence[Inputs], names: Sequence[str], bits: int, block: int
) -> dict[str, list[Rounded]]:
    """Round the weights of layers by calibration data, each on what the rounded layers before it make of it.

    Args:
        module: module on the CPU, which is not changed.
        inputs: calls to calibrate on.
        names: linear layers of ``module``, and modules with the stacked matrices of experts.
        bits: 4 or 8.
        block: B.

    Returns:
        The rounded matrices by the name of the weight, several of experts, without weights that no call reaches.
        Experts that get no inputs are rounded to the nearest. A layer that shares its weight with others, such as a
        head with the embedding, is rounded as if it had its own; the others keep theirs.
    """
    module = copy.deepcopy(module)
    if has_half_precision(module):
        module, inputs = module.float(), to_float32(list(inputs))
    for one in module.parameters():  # those that were frozen in training are rounded, too
        one.requires_grad_(one.is_floating_point())
    for name in names:
        layer = module.get_submodule(name)
        if (
            isinstance(layer, nn.Linear)
            and sum(any(layer.weight is value for value in one.parameters(False)) for one in module.modules()) > 1
        ):
            layer.weight = nn.Parameter(layer.weight.detach().clone())
    found = [one for one in find_prunable(module)[0] if one.name.rpartition(".")[0] in names]

    def change(weight: Tensor, products: Tensor | None) -> tuple[Tensor, Rounded]:
        rounded = round_in_blocks(weight, bits, block, products)
        return rounded.values(), rounded

    changes, _ = change_by_products_(module, inputs, found, change, of_pairs=True)
    rounded = {one.name: _join(one, changes[one.name]) for one in found if one.name in changes}
    return {name: made for name, made in rounded.items() if made}


def _join(weight: Prunable, made: Mapping[Matrix, Rounded]) -> list[Rounded]:
    """Return the matrix of each expert, or the only one, joined where its outputs are in several parts."""
    count = weight.weight.shape[0] if is_stacked(weight.module, weight.weight) else 1
    # A product of a part of the inputs has other scales
    if any(matrix.shape[1] != weight.weight.shape[weight.input_dim] for matrix in made):
        return []
    parts: list[list[Rounded]] = [[] for _ in range(count)]
    for matrix in sorted(made, key=lambda one: one.offset):
        parts[matrix.offset * count // weight.weight.numel()].append(made[matrix])
    return [
        Rounded(torch.cat([one.integers for one in own]), torch.cat([one.scales for one in own]), own[0].block)
        for own in parts
    ]
