"""Which layers cost most when they are quantized."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.fake_quant import FakeQuantized, attach
from lightning_accel.compress.quant_inputs import noise_share
from lightning_accel.compress.uncompiled import uncompile_
from lightning_accel.ops.names import list_of_names

MAX_INPUTS = 4  # calls that the error is measured on


@torch.no_grad()
def rank_layers(
    module: nn.Module,
    inputs: Sequence[Inputs],
    names: Sequence[str] | Mapping[str, nn.Module],
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> dict[str, float]:
    """Share of the power of the output that is error if one layer alone is int8, by its name; the worst first.

    Args:
        module: in evaluation mode; not changed.
        inputs: calls of it.
        names: of layers.
        ranges: of what goes into them, where training found them.
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
    hook = layer.layer.register_forward_pre_hook(lambda _, args: layer.see(args[0]))
    for args, kwargs in inputs:
        module(*args, **kwargs)
    hook.remove()
    layer.take_seen(layer.seen.clone())
