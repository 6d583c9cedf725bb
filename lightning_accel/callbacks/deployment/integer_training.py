"""Training for int8, for ``Quantization(mode="qat")``."""

import math
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_accel.callbacks.compression_phase import announce_change
from lightning_accel.compress.quantization.fake_quant import FakeQuantized, attach, detach
from lightning_accel.compress.quantization.layers import find_layers


class IntegerTraining:
    """Round the weights and inputs of layers to int8 in a run, from a step on, with ranges that all processes share.

    Args:
        begin: the optimizer step to begin at, or a share of the run if a float in [0, 1).
        epoch: the epoch to begin in, in place of ``begin``.

    Attributes:
        layers: what replaces the ``forward`` of layers, by their names.
        enabled: whether the layers round.
    """

    def __init__(self, begin: int | float, epoch: int | None = None) -> None:
        self.begin, self.epoch = begin, epoch
        self.layers: dict[str, FakeQuantized] = {}
        self.enabled = False
        self._loaded: dict[str, Tensor] = {}
        self._start_step = math.inf
        self._in_batch: L.Trainer | None = None  # set until the ranges are updated from this batch

    @property
    def has_begun(self) -> bool:
        """Return whether some layer knows its range."""
        return any(layer.ready for layer in self.layers.values())

    def attach(self, pl_module: L.LightningModule, exclude: Sequence[str | type[nn.Module]], name: str | None) -> None:
        """Replace the ``forward`` of the layers in the submodule ``name``, or in the whole module."""
        inside = f"{name}." if name else ""
        found = find_layers(pl_module, exclude)
        chosen = {name: one for name, one in found.quantized.items() if f"{name}.".startswith(inside)}
        detach(pl_module)  # from a run that was interrupted
        self.layers = attach(chosen)
        for name, layer in self.layers.items():
            layer.to(pl_module.device)
            if name in self._loaded:
                layer.load(self._loaded[name])
        self._loaded = {}
        left = "; ".join(f"{name}: {why}" for name, why in found.left_float.items())
        rank_zero_info(f"{len(chosen)} layers train for int8" + (f"; left in float: {left}" if left else ""))

    def schedule(self, trainer: L.Trainer) -> None:
        """Find the step to begin at.

        Raises:
            ValueError: if the run ends before it, or ``begin`` is a share of a run without an end.
        """
        steps = trainer.estimated_stepping_batches
        if math.isinf(steps) and isinstance(self.begin, float) and self.epoch is None:
            raise ValueError("begin is a share of a run that has no end; give max_epochs or max_steps, or a step")
        self._start_step = self.begin if isinstance(self.begin, int) else math.ceil(self.begin * steps)
        is_late = self._start_step >= steps
        if self.epoch is not None:
            self._start_step, last = math.inf, trainer.max_epochs
            is_late = last is not None and 0 <= last <= self.epoch
        if is_late and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
            name = f"begin={self.begin}" if self.epoch is None else f"start={self.epoch}"
            raise ValueError(f"{name} leaves none of the run's {steps:.0f} steps for int8; lower it")

    def start_batch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let the layers round if their time has come."""
        if self.layers and not self.enabled:
            starts = trainer.global_step >= self._start_step
            if self.epoch is not None:
                starts = trainer.current_epoch >= self.epoch
            if starts:
                announce_change(trainer, pl_module)
            self.enabled = starts
            for layer in self.layers.values():
                layer.enabled = starts
        self._in_batch = trainer

    def update_ranges(self) -> None:
        """Update the ranges from the inputs of this batch, once; all processes must call it."""
        trainer, self._in_batch = self._in_batch, None
        if trainer is not None and self.enabled and self.layers:
            seen = torch.stack([layer.seen for layer in self.layers.values()])
            seen = trainer.strategy.reduce(seen, reduce_op="min")  # as one process with all samples would see
            for layer, own in zip(self.layers.values(), seen, strict=True):
                layer.update_range(own)

    def abandon_batch(self) -> None:
        """Leave the ranges as they are, since other processes may not have got as far."""
        self._in_batch = None

    def ranges_in(self, name: str) -> dict[str, tuple[float, float]]:
        """Return the input ranges of the layers in the submodule ``name``, by their names there.

        Raises:
            RuntimeError: if there is none.
        """
        prefix = f"{name}." if name else ""
        ranges = {
            layer_name.removeprefix(prefix): (float(layer.range[0]), float(layer.range[1]))
            for layer_name, layer in self.layers.items()
            if layer_name.startswith(prefix) and layer.ready
        }
        if not ranges:
            raise RuntimeError("no step was trained in int8: the run ended before begin, or no layer was called")
        return ranges

    def state_dict(self) -> dict[str, Any]:
        self.update_ranges()  # an earlier callback may save at the end of a batch
        return {"ranges": {name: layer.range.cpu().clone() for name, layer in self.layers.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = dict(state_dict["ranges"])
