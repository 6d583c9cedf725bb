"""Monitoring of expert load, as metrics and as a figure. Shapes: E experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lightning_accel.callbacks.deployment.copies import run_folder
from lightning_accel.callbacks.fit_end import failures_as_warnings
from lightning_accel.callbacks.trainer_callbacks import log_figure
from lightning_accel.nn import ExpertLoad, MixtureOfExperts, summarise_load
from lightning_accel.ops.bounds import require_filename
from lightning_accel.ops.extras import import_on_use, require_module
from lightning_accel.ops.figures import DIVERGING, new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

colors = import_on_use("matplotlib.colors")

_MOST_COLUMNS = 400  # of the figure; beyond that, neighbours are averaged
_MOST_NUMBERS = 16  # of experts beside a panel


class ExpertLoadMonitor(L.Callback):
    """Draw the load of each expert over training, for any module with :class:`~lightning_accel.MixtureOfExperts`.

    The figure has a row per expert and a column every ``log_every_n_steps`` optimizer steps. It is written to
    ``filename`` and to every logger that takes images (TensorBoard as ``expert_load``), after each validation and at
    the end.

    For mixtures that are not tracked by the module's own ``expert_load``, an :class:`~lightning_accel.nn.ExpertLoad`,
    it also does what this package's models do for theirs: balance losses and biases of the gates use whole optimizer
    steps, over micro-batches and processes; the summary of :func:`~lightning_accel.nn.summarise_load` is logged under
    ``train/``; and a collapsed gate causes a warning.

    Args:
        filename: path of the figure, absolute, or relative to the run folder (the Trainer's ``log_dir``).

    Raises:
        TypeError: before training, if the module has no mixture of experts.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import ExpertLoadMonitor
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[ExpertLoadMonitor()])
    """

    def __init__(self, filename: str = "figures/expert_load.png") -> None:
        require_filename("filename", filename, "figures/expert_load.png")
        self.filename = filename
        self.steps: list[int] = []
        self.loads: list[list[Tensor]] = []  # for each step, the load of each mixture, (E,) float32
        self.names: list[str] = []  # of the mixtures, in the order of the loads
        self._theirs, self._own = ExpertLoad([]), ExpertLoad([])
        self._hooks: list[Any] = []
        self._recomputing = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        require_module("matplotlib")
        if not any(isinstance(part, MixtureOfExperts) for part in pl_module.modules()):
            raise TypeError(
                f"ExpertLoadMonitor found no MixtureOfExperts in {type(pl_module).__name__}; take the callback out, or "
                "put such layers in"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Track the mixtures that the module itself does not, and start or continue the figure."""
        named = {
            part.gate: (name, part) for name, part in pl_module.named_modules() if isinstance(part, MixtureOfExperts)
        }
        theirs = getattr(pl_module, "expert_load", None)
        self._theirs = theirs if isinstance(theirs, ExpertLoad) else ExpertLoad([])
        tracked = [gate for gate in self._theirs.gates if gate in named]
        untracked = [gate for gate in named if gate not in tracked]
        self.names = [named[gate][0] for gate in [*tracked, *untracked]]
        self._own = ExpertLoad(untracked)
        self._own.start()
        self._recomputing = False  # still True after a backward pass that failed
        self._hooks = [named[gate][1].register_forward_hook(self._make_hook(i)) for i, gate in enumerate(untracked)]
        # drop steps that another fit, or a resumed run, runs again
        kept = [at for at, step in enumerate(self.steps) if step <= trainer.global_step]
        self.steps, self.loads = [self.steps[at] for at in kept], [self.loads[at] for at in kept]

    def after_removal(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the figure anew, see :func:`~lightning_accel.callbacks.compression_phase.announce_removal`."""
        for hook in self._hooks:
            hook.remove()
        self.steps, self.loads = [], []
        self.on_train_start(trainer, pl_module)

    def _make_hook(self, number: int) -> Any:
        def hook(mixture: nn.Module, args: object, output: Any) -> None:
            # activation checkpointing runs the forward pass again in the backward pass
            if mixture.training and not self._recomputing:
                self._own.add_one(number, output.report)

        return hook

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._recomputing = True

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._recomputing = False

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        update_gates(self._own, trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        step = trainer.global_step
        if step and _logs_at(trainer, step) and step not in self.steps[-1:]:  # skips further micro-batches of a step
            self._record(step)

    def _record(self, step: int) -> None:
        loads = []
        for tracker in (self._theirs, self._own):
            for number, gate in enumerate(tracker.gates):
                known = tracker.last_step.get(number)
                equal = torch.full((gate.num_experts,), 1 / gate.num_experts)
                loads.append(equal if known is None else known.load.to("cpu", torch.float32))  # None if it never ran
        self._append(step, loads)

    def _append(self, step: int, loads: list[Tensor]) -> None:
        self.steps.append(step)
        self.loads.append(loads)
        if len(self.steps) > _MOST_COLUMNS:
            pairs = range(1, len(self.steps), 2)
            self.loads = [[(a + b) / 2 for a, b in zip(self.loads[i - 1], self.loads[i], strict=True)] for i in pairs]
            self.steps = [self.steps[i] for i in pairs]

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._try_to_draw(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._try_to_draw(trainer)
        self._remove_hooks()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._own = [], ExpertLoad([])

    def _try_to_draw(self, trainer: L.Trainer) -> None:
        folder = run_folder(trainer)
        if not (trainer.is_global_zero and self.steps and self.names) or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        with failures_as_warnings("ExpertLoadMonitor drew no picture"):
            figure = draw_load(self.steps, self.loads, self.names)
            path = folder / self.filename
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
            log_figure(trainer, "expert_load", figure)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "loads": self.loads, "names": self.names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps, self.loads = list(state_dict["steps"]), list(state_dict["loads"])
        self.names = list(state_dict.get("names", []))  # for a finished run, which does not train again


def draw_load(steps: list[int], loads: list[list[Tensor]], names: list[str]) -> Figure:
    """Draw a panel per mixture: colour is the load of expert (row) at step (column), relative to equal shares."""
    panels = [torch.stack(of_mixture, dim=1) * len(of_mixture[0]) for of_mixture in zip(*loads, strict=True)]
    heights = [0.6 + max(0.08 * len(panel), 0.16 * min(len(panel), _MOST_NUMBERS)) for panel in panels]
    size = 8, min(0.7 + sum(heights), 40)
    figure, axes = new_axes(size, len(names), sharex=True, height_ratios=heights)
    greatest = max(2.0, *(float(panel.max()) for panel in panels))
    # linear from 0 to equal shares, which are neutral, then logarithmic; no load is beyond the scale
    scale = (
        lambda load: np.where(load < 1, load - 1, np.log(np.maximum(load, 1)) / np.log(greatest)),
        lambda place: np.where(place < 0, place + 1, greatest ** np.maximum(place, 0)),
    )
    norm = colors.FuncNorm(scale, vmin=0, vmax=greatest)
    for name, axis, panel in zip(names, axes, panels, strict=True):
        extent = (0, steps[-1], len(panel) - 0.5, -0.5)
        image = axis.imshow(panel.numpy(), aspect="auto", cmap=DIVERGING, norm=norm, extent=extent)
        last = panel[:, -1]
        axis.set_title(f"{name}, loads at step {steps[-1]}: {last.min():.2f} to {last.max():.2f}", fontsize="small")
        axis.set_ylabel("expert")
        axis.set_yticks(range(0, len(panel), -(-len(panel) // _MOST_NUMBERS)))
        axis.tick_params(axis="y", labelsize="x-small")
    axes[-1].set_xlabel("optimizer step")
    ticks = [0, 0.5, *(2**power for power in range(int(np.log2(greatest)) + 1))]
    figure.colorbar(image, ax=axes, label="load, in equal shares", ticks=ticks, format="%g")
    return figure


def update_gates(load: ExpertLoad, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Update gates before an optimizer step, and where that is logged, log the summary of their load."""
    statistics = load.step()
    if statistics and _logs_at(trainer, trainer.global_step + 1):
        pl_module.log_dict({f"train/{name}": value for name, value in summarise_load(statistics).items()})
        load.warn_if_collapsed()


def _logs_at(trainer: L.Trainer, step: int) -> bool:
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
    return every > 0 and step % every == 0
