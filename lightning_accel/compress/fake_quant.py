"""Layers that train as if they were int8 already, without a change to their parameters or their names.

Source: B. Jacob et al. 2018, https://arxiv.org/abs/1712.05877, section 3. Departure: a batch norm is not folded while
training, since the grid of a weight is symmetric and one per output channel: folding scales the grid with the channel
and leaves its integers as they are.
"""

from collections.abc import Iterator, Mapping
from types import MethodType
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel.compress.quant_layers import round_input, round_weight

DECAY = 0.99  # of the ranges of inputs, at each step


class FakeQuantized:
    """Stands in for the ``forward`` of one linear layer or convolution.

    Its tensors belong to no module, so that ``state_dict`` stays as it was. Ranges follow what steps of training see:
    :meth:`take_seen` between them.

    Attributes:
        enabled: else the layer is as it was.
        ready: whether ``range`` is known.
        range: (2,) float32, lowest and highest input that has an integer of its own; not finite before the first step.
        seen: (2,) float32, the negative of the highest, and the lowest input of this step.
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
            self.see(x)
        return self.compute(round_input(x, *self.range_now()), round_weight(cast(Tensor, self.layer.weight)))

    # nn.Module calls what its instance has as ``forward``. A bound method is copied with the object that it is bound
    # to, and that object with the copied layer; a closure would keep the first layer.
    def forward(self, x: Tensor) -> Tensor:
        return self(x)

    def compute(self, x: Tensor, weight: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight, self.layer.bias)
        return self.layer._conv_forward(x, weight, self.layer.bias)  # type: ignore[operator]  # knows padding modes

    @torch.no_grad()
    def see(self, x: Tensor) -> None:
        x = x.detach().float()
        self.seen.copy_(torch.minimum(self.seen, torch.stack([-x.amax(), x.amin()])))

    def range_now(self) -> Tensor:
        """``range``, or before the first step what this call has seen."""
        high, low = self.seen.unbind()
        return torch.where(self.range.isfinite(), self.range, torch.stack([low, -high]))

    @torch.no_grad()
    def take_seen(self, seen: Tensor) -> None:
        """Move ``range`` towards what was ``seen`` by all processes in this step."""
        high, low = seen.unbind()
        now = torch.stack([low, -high])
        moved = torch.where(self.range.isfinite(), self.range.lerp(now, 1 - DECAY), now)
        self.range.copy_(torch.where(now.isfinite(), moved, self.range))
        self.seen.fill_(torch.inf)
        if not self.ready:  # asked for once or twice alone, since the answer is waited for
            self.ready = bool(self.range.isfinite().all())

    def load(self, range: Tensor) -> None:
        """Take ``range`` from a checkpoint."""
        self.range.copy_(range)
        self.ready = bool(self.range.isfinite().all())


def attach(layers: Mapping[str, nn.Module]) -> dict[str, FakeQuantized]:
    """Put a :class:`FakeQuantized` in place of each ``forward``; by the names of the layers."""
    attached = {name: FakeQuantized(layer) for name, layer in layers.items()}
    for one in attached.values():
        one.layer.forward = MethodType(FakeQuantized.forward, one)
    return attached


def detach(module: nn.Module) -> None:
    """Give all layers in ``module`` their own ``forward`` back."""
    for layer, _ in list(_attached(module)):
        del layer.forward


def _attached(module: nn.Module) -> Iterator[tuple[nn.Module, FakeQuantized]]:
    for one in module.modules():
        found = getattr(one.__dict__.get("forward"), "__self__", None)
        if isinstance(found, FakeQuantized):
            yield one, found
