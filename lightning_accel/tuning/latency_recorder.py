"""What a trial of latency writes down: how long each sample takes, the outputs, and facts about the model."""

import json
import math
import time
from pathlib import Path
from typing import IO, Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_accel.strategies.batch_splitting import leaves
from lightning_accel.strategies.checkpoints.atomic import write_atomically
from lightning_accel.tuning.recorder import TrialEnd, model_facts_of, perturb_
from lightning_accel.tuning.variant import Step

_MOST_VALUES = 65_536  # of each tensor of a sample, evenly drawn from larger ones


class LatencyRecorder(L.Callback):
    """Write how long each sample takes through ``predict_step`` or ``validation_step`` as a line of a file.

    A line holds the times at which the step began and ended, see :class:`lightning_accel.tuning.recorder.StepRecorder`;
    loading and copies to the device are left out.

    Args:
        folder: where ``steps.csv`` and ``facts.json`` are written, by the first process of the run, or ``outputs.pt``.
        with_outputs: write the outputs of the first pass over the samples, and raise :class:`TrialEnd`. Outputs are
            numbers and tensors that the step returns, and in validation those that it logs.
        perturb: move each weight by one rounding at the beginning, to learn what rounding does to the outputs.
    """

    def __init__(self, folder: Path, with_outputs: bool = False, perturb: bool = False) -> None:
        self.folder = folder
        self.with_outputs = with_outputs
        self.perturb = perturb
        self.num_recorded = 0
        self._begin = 0.0
        self._file: IO[str] | None = None
        self._logged: list[Any] = []
        self._outputs: list[list[Tensor]] = []

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.perturb:
            perturb_(pl_module)

    def on_predict_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.validating and self._takes_outputs:
            self._listen(pl_module)
        _wait_for(trainer)
        self._begin = time.monotonic()

    def on_predict_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        _wait_for(trainer)
        end = time.monotonic()
        if self._takes_outputs:
            vars(pl_module).pop("log", None)
            self._outputs.append(_values_of([outputs, self._logged]))
            self._logged = []
            if not self._outputs[-1]:
                nothing = "validation_step returns and logs" if trainer.validating else "predict_step returns"
                raise ValueError(f"{nothing} no number or tensor, by which variants could be compared")
        self.num_recorded += 1
        if self.with_outputs or not trainer.is_global_zero:
            return
        if self._file is None:
            self._file = open(self.folder / "steps.csv", "a", buffering=1)  # noqa: SIM115  # the trial's last act
        self._file.write(Step(self._begin, end, waited=0.0, loss=math.nan).to_line())
        if self.num_recorded == 1:
            facts = {"stage": "validate" if trainer.validating else "predict", "planned_steps": None}
            with write_atomically(self.folder / "facts.json") as part:
                part.write_text(json.dumps(model_facts_of(trainer, pl_module) | facts))

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.with_outputs:
            if trainer.is_global_zero:
                torch.save(self._outputs, self.folder / "outputs.pt")
            raise TrialEnd

    on_validation_start = on_predict_start
    on_validation_batch_start = on_predict_batch_start  # type: ignore[assignment]  # arguments have other names
    on_validation_batch_end = on_predict_batch_end  # type: ignore[assignment]
    on_validation_end = on_predict_end

    @property
    def _takes_outputs(self) -> bool:
        return self.with_outputs or self.num_recorded == 0

    def _listen(self, module: L.LightningModule) -> None:
        """Keep what the module logs in this step; values of ``on_epoch`` are not in the Trainer's metrics yet."""
        log = module.log

        def listening(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            log(name, value, *args, **kwargs)
            self._logged.append(value.compute() if callable(getattr(value, "compute", None)) else value)

        module.log = listening  # type: ignore[method-assign]


def _wait_for(trainer: L.Trainer) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.root_device)


def _values_of(outputs: Any) -> list[Tensor]:
    """Return the numbers and tensors in outputs, of float64 and int64, on the CPU."""
    found = []
    for leaf in leaves(outputs):
        if not isinstance(leaf, Tensor | np.ndarray | np.number | float | int):
            continue
        value = torch.as_tensor(leaf).detach()
        value = torch.view_as_real(value) if value.is_complex() else value
        value = value.to("cpu", torch.float64 if value.is_floating_point() else torch.int64, copy=True)
        found.append(value if value.numel() <= _MOST_VALUES else _thinned(value))
    return found


def _thinned(value: Tensor) -> Tensor:
    places = torch.linspace(0, value.numel() - 1, _MOST_VALUES, dtype=torch.float64).long()
    return value.flatten()[places]
