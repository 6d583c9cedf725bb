"""Sensitivity of the output to the quantization of single layers."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.fake_quant import FakeQuantized, attach
from lightning_accel.compress.quant_inputs import noise_share
from lightning_accel.compress.uncompiled import uncompile_
from lightning_accel.ops.names import list_of_names

MAX_INPUTS = 4  # number of calls to measure the error on


@torch.no_grad()
def rank_layers(
    module: nn.Module,
    inputs: Sequence[Inputs],
    names: Sequence[str] | Mapping[str, nn.Module],
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> dict[str, float]:
    """Return the relative error power of the output if a single layer is int8, by layer name, the largest first.

    Args:
        module: module in evaluation mode, which is not changed.
        inputs: calls to measure on.
        names: names of the layers.
        ranges: input ranges of layers, where training found them.
    """
    copied = uncompile_(copy.deepcopy(module))
    attached = attach({name: copied.get_submodule(name) for name in list_of_names(names)})
    inputs = inputs[:MAX_INPUTS]
    wanted = [copied(*args, **kwargs) for args, kwargs in inputs]
    errors = {}
    for name, layer in attached.items():
        _find_range(layer, copied, inputs, (ranges or {}).get(name))
        layer.enabled = True
        found = [copied(*args, **kwargs) for args, kwargs in inputs]
        layer.enabled = False
        errors[name] = noise_share(wanted, found)
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def _find_range(
    layer: FakeQuantized, module: nn.Module, inputs: Sequence[Inputs], known: tuple[float, float] | None
) -> None:
    if known is not None:
        layer.load(torch.tensor(known))
        return
    hook = layer.layer.register_forward_pre_hook(lambda _, args: layer.observe(args[0]))
    for args, kwargs in inputs:
        module(*args, **kwargs)
    hook.remove()
    layer.update_range(layer.seen.clone())
