"""Fake quantization, for quantization-aware training and for the sensitivity of layers; it keeps parameters and names.

Source: B. Jacob et al. 2018, https://arxiv.org/abs/1712.05877, section 3. Departure: batch norms are not folded during
training, since weights have a symmetric grid per output channel: folding scales the grid with the channel and keeps its
integers.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel._private.torch import convolve
from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.quantization.inputs import noise_share
from lightning_accel.compress.quantization.layers import round_input, round_weight
from lightning_accel.compress.uncompiled import uncompile_
from lightning_accel.ops.names import list_of_names

DECAY = 0.99  # of the moving average of input ranges, per step
MAX_INPUTS = 4  # number of calls to measure the error on


class FakeQuantized:
    """Replace the ``forward`` of one linear layer or convolution by one with rounded weights and inputs.

    Its tensors belong to no module, so that ``state_dict`` does not change. The input range is a moving average over
    training steps; call :meth:`update_range` after each.

    Attributes:
        enabled: whether to round; else the layer computes as before.
        ready: whether ``range`` is known.
        range: (2,) float32, ends of the input grid; not finite before the first step.
        seen: (2,) float32, the negative of the largest, and the smallest input of this step.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.enabled = self.ready = False
        device = next(layer.parameters()).device
        self.range = torch.full((2,), torch.nan, device=device)
        self.seen = torch.full((2,), torch.inf, device=device)

    def to(self, device: torch.device) -> None:
        self.range, self.seen = self.range.to(device), self.seen.to(device)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.enabled or not (self.ready or self.layer.training):
            return type(self.layer).forward(self.layer, x)
        if self.layer.training:
            self.observe(x)
        return self.compute(round_input(x, *self.current_range()), round_weight(cast(Tensor, self.layer.weight)))

    # nn.Module calls the attribute ``forward`` of its instance. deepcopy copies a bound method with the object that it
    # is bound to, and so with the copied layer; a closure would refer to the original layer.
    def forward(self, x: Tensor) -> Tensor:
        return self(x)

    def compute(self, x: Tensor, weight: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight, self.layer.bias)
        return convolve(self.layer, x, weight)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        x = x.detach().float()
        self.seen.copy_(torch.minimum(self.seen, torch.stack([-x.amax(), x.amin()])))

    def current_range(self) -> Tensor:
        """Return ``range``, or before the first step, the range of the inputs seen so far."""
        high, low = self.seen.unbind()
        return torch.where(self.range.isfinite(), self.range, torch.stack([low, -high]))

    @torch.no_grad()
    def update_range(self, seen: Tensor) -> None:
        """Update ``range`` by the inputs ``seen`` on all processes in this step, and reset ``self.seen``."""
        high, low = seen.unbind()
        now = torch.stack([low, -high])
        moved = torch.where(self.range.isfinite(), self.range.lerp(now, 1 - DECAY), now)
        self.range.copy_(torch.where(now.isfinite(), moved, self.range))
        self.seen.fill_(torch.inf)
        if not self.ready:  # tested only until it is True, since the test waits for the GPU
            self.ready = bool(self.range.isfinite().all())

    def load(self, range: Tensor) -> None:
        """Load ``range``, such as from a checkpoint."""
        self.range.copy_(range)
        self.ready = bool(self.range.isfinite().all())


def attach(layers: Mapping[str, nn.Module]) -> dict[str, FakeQuantized]:
    """Replace the ``forward`` of each layer by a :class:`FakeQuantized`; return them by layer name."""
    attached = {name: FakeQuantized(layer) for name, layer in layers.items()}
    for one in attached.values():
        one.layer.forward = MethodType(FakeQuantized.forward, one)
    return attached


def detach(module: nn.Module) -> None:
    """Restore the ``forward`` of all layers in ``module``."""
    for layer, _ in list(_attached(module)):
        del layer.forward


def _attached(module: nn.Module) -> Iterator[tuple[nn.Module, FakeQuantized]]:
    for one in module.modules():
        found = getattr(one.__dict__.get("forward"), "__self__", None)
        if isinstance(found, FakeQuantized):
            yield one, found


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
