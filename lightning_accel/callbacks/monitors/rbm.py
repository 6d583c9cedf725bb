"""Monitoring of restricted Boltzmann machines in figures. Shapes: B samples, V visible units, H hidden units."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from matplotlib.figure import Figure
from torch import Tensor

from lightning_accel.callbacks.contrastive_divergences import find_contrastive_divergences
from lightning_accel.callbacks.deployment.copies import run_folder
from lightning_accel.callbacks.fit_end import failures_as_warnings
from lightning_accel.callbacks.monitors.rbm_pictures import RBMView, draw_rbm, picture_shape, plain_copy
from lightning_accel.nn import RBM, ContrastiveDivergence
from lightning_accel.ops.float32 import at_least_float32

_MOST_POINTS = 400  # of a curve; beyond that, every second is dropped


class Samples(NamedTuple):
    """Hold some samples of the data on the CPU."""

    values: Tensor  # (B, ...) at least float32
    labels: Tensor | None  # (B,) class indices


class RBMMonitor(L.Callback):
    """Draw each restricted Boltzmann machine of a module, any that has :class:`~lightning_accel.nn.RBM`.

    After validation and at the end, a figure of each machine goes to ``rbm_<name>.png`` in ``folder``, by the name of
    its attribute, such as ``rbm_stack.rbms.0.png``, and to every logger that takes images (TensorBoard as
    ``rbm/<name>``):

    - filters, the contribution of each hidden unit to the visible ones;
    - means of the visible units given the chains of the module's :class:`~lightning_accel.nn.ContrastiveDivergence`: an
      attribute, or a list with one for each machine;
    - validation samples (training samples if there is no validation) and their reconstructions;
    - a histogram of the mean activity of the hidden units;
    - the mean free energy of validation samples minus that of training samples, always the same ones: if it rises, the
      machine overfits (Hinton 2012, A Practical Guide to Training Restricted Boltzmann Machines, section 6).

    The last number is logged as ``val/free_energy_gap/<name>``, by the first process alone, so that callbacks should
    monitor it only in runs of one process.

    Samples are the first part of a batch (a tensor, tuple, list or dict), (B, ...) flattened to (B, V); for a machine
    with label units the second part is the class. A machine with as many visible units as the previous one has hidden
    units is taken to be stacked on it: it gets the means of that one as input, and its figures show the corresponding
    visible units of the lowest machine.

    Args:
        folder: folder of the figures, absolute, or relative to the run folder (the Trainer's ``log_dir``).
        image_shape: shape of a sample, such as (28, 28); by default that of batches (B, C, height, width) or (B,
            height, width), else a square if there is one, else a line.
        num_rows: number of training samples, the first of the run, and of validation samples to compare; checkpoints
            hold the training samples, so that a resumed run uses the same ones.
        every_n_validations: draw figures every this number of validations, besides at the end; takes about half a
            second for each machine.

    Raises:
        TypeError: before training, if the module has no RBM.
        ValueError: if a number is below 1; before training, if ``image_shape`` fits no RBM, or if the strategy flattens
            the weights (FSDP1).
    """

    def __init__(
        self,
        folder: str = "figures",
        image_shape: tuple[int, ...] | None = None,
        num_rows: int = 200,
        every_n_validations: int = 1,
    ) -> None:
        if min(num_rows, every_n_validations) < 1:
            raise ValueError(
                f"num_rows and every_n_validations must be at least 1; got num_rows={num_rows}, "
                f"every_n_validations={every_n_validations}"
            )
        self.folder = folder
        self.image_shape = image_shape
        self.num_rows = num_rows
        self.every_n_validations = every_n_validations
        self.gaps: dict[str, list[tuple[int, float]]] = {}  # (optimizer step, nats) by name
        self._training: Samples | None = None
        self._gathering = True  # collect training samples until they are compared, or an epoch is over
        self._validation: Samples | None = None
        self._num_validations = 0
        self._drawn_at: int | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rbms = _named_rbms(pl_module)
        if not rbms:
            raise TypeError(
                f"RBMMonitor found no RBM in {type(pl_module).__name__}; take the callback out, or put such layers in"
            )
        sizes = [rbm.num_visible - rbm.num_labels for rbm in rbms.values()]
        if self.image_shape is not None and int(np.prod(self.image_shape)) not in sizes:
            raise ValueError(
                f"image_shape must have as many pixels as an RBM of {type(pl_module).__name__} has visible units, "
                f"{', '.join(map(str, sizes))}; got {tuple(self.image_shape)}, {int(np.prod(self.image_shape))} pixels"
            )
        for name, rbm in rbms.items():
            if rbm.weight.shape != (rbm.num_hidden, rbm.num_visible):
                raise ValueError(
                    f"RBMMonitor draws whole weights, and under {type(trainer.strategy).__name__} a process holds "
                    f"{tuple(rbm.weight.shape)} of {name}.weight, ({rbm.num_hidden}, {rbm.num_visible}); take another "
                    "strategy, such as FullyShardedStrategy, or take the callback out"
                )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reset the state for a new run, or keep that of a resumed one."""
        step = trainer.global_step
        if step == 0 or self._training is None:
            self._training, self._gathering, self._num_validations = None, True, 0
        names = _named_rbms(pl_module)
        self.gaps = {name: [point for point in self.gaps.get(name, []) if point[0] <= step] for name in names}
        self._validation, self._drawn_at = None, None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and self._gathering:
            self._training = self._add_samples(self._training, batch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._gathering = False

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if _validates_in_fit(trainer):
            self._gathering = False
            self._validation = None

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.is_global_zero and dataloader_idx == 0 and _validates_in_fit(trainer):
            self._validation = self._add_samples(self._validation, batch)

    def _add_samples(self, rows: Samples | None, batch: Any) -> Samples | None:
        """Add samples of ``batch`` to ``rows``, up to ``num_rows``."""
        missing = self.num_rows - (0 if rows is None else len(rows.values))
        more = _extract_samples(batch, missing) if missing > 0 else None
        if rows is None or more is None:
            return more if rows is None else rows
        labels = None if rows.labels is None or more.labels is None else torch.cat([rows.labels, more.labels])
        return Samples(torch.cat([rows.values, more.values]), labels)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not _validates_in_fit(trainer):
            return
        views = self._compute_views(pl_module)
        if trainer.is_global_zero:
            self._measure(trainer, pl_module, views)
        self._num_validations += 1
        if self._num_validations % self.every_n_validations == 0:
            self._try_to_draw(trainer, run_folder(trainer), lambda: views)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._drawn_at != trainer.global_step:
            self._try_to_draw(trainer, run_folder(trainer), lambda: self._compute_views(pl_module))

    def _try_to_draw(self, trainer: L.Trainer, folder: Path, look: Callable[[], Mapping[str, RBMView]]) -> None:
        self._drawn_at = trainer.global_step
        with failures_as_warnings("RBMMonitor drew no picture"):
            views = look()
            if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                self._draw(trainer, views, folder / self.folder)

    def _compute_views(self, pl_module: L.LightningModule) -> dict[str, RBMView]:
        """Return what to draw, by name; every process must call it, since weights may be sharded."""
        rbms = _named_rbms(pl_module)
        plain = {name: plain_copy(rbm) for name, rbm in rbms.items()}
        chains = dict(zip(rbms, _chains_of(list(rbms.values()), pl_module), strict=True))
        shown = self._validation or self._training
        seen = {} if shown is None else _compute_inputs(plain, shown)
        views, below = {}, list[str]()
        for name, rbm in plain.items():
            below = [*below, name] if below and _is_stacked_on(rbm, plain[below[-1]]) else [name]
            pixels = seen.get(below[0])
            views[name] = RBMView(rbm, [plain[lower] for lower in below[:-1]], seen.get(name), pixels, chains[name])
        return views

    def _measure(self, trainer: L.Trainer, pl_module: L.LightningModule, views: Mapping[str, RBMView]) -> None:
        if self._training is None or self._validation is None:
            return
        training = _compute_inputs({name: view.rbm for name, view in views.items()}, self._training)
        if not training:
            rank_zero_warn(
                f"RBMMonitor: rows of {self._training.values[0].numel()} values, the first part of a batch, fit no RBM "
                f"of {type(pl_module).__name__}, so that neither reconstructions nor free energies are drawn"
            )
        for name, view in views.items():
            if view.rows is None or name not in training:
                continue
            gap = float(view.rbm.free_energy(view.rows).mean() - view.rbm.free_energy(training[name]).mean())
            points = [point for point in self.gaps[name] if point[0] != trainer.global_step]
            self.gaps[name] = [*(points[::2] if len(points) >= _MOST_POINTS else points), (trainer.global_step, gap)]
            pl_module.log(f"val/free_energy_gap/{name}", gap, rank_zero_only=True)

    def _draw(self, trainer: L.Trainer, views: Mapping[str, RBMView], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, view in views.items():
            lowest = (*view.below, view.rbm)[0]
            shape = picture_shape(lowest.num_visible - lowest.num_labels, self._shape())
            steps, gaps = zip(*self.gaps[name], strict=True) if self.gaps[name] else ((), ())
            figure = draw_rbm(view, name, shape, steps, gaps)
            figure.savefig(folder / f"rbm_{name}.png")
            _log_figure(trainer, f"rbm/{name}", figure)

    def _shape(self) -> Sequence[int] | None:
        if self.image_shape is not None:
            return self.image_shape
        rows = self._validation or self._training
        return None if rows is None else rows.values.shape[1:]

    def state_dict(self) -> dict[str, Any]:
        training = None if self._training is None else tuple(self._training)
        return {
            "gaps": self.gaps,
            "training rows": training,
            "gathering": self._gathering,
            "validations": self._num_validations,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.gaps = {name: [(int(at), float(gap)) for at, gap in points] for name, points in state_dict["gaps"].items()}
        training = state_dict["training rows"]
        self._training = None if training is None else Samples(*training)
        self._gathering, self._num_validations = state_dict["gathering"], state_dict["validations"]


def _validates_in_fit(trainer: L.Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking


def _named_rbms(module: L.LightningModule) -> dict[str, RBM]:
    return {name: part for name, part in module.named_modules() if isinstance(part, RBM)}


def _extract_samples(batch: Any, most: int) -> Samples | None:
    """Return the first ``most`` samples of ``batch``: its first part, and the second if it holds class indices."""
    batch = list(batch.values()) if isinstance(batch, Mapping) else batch
    parts = [batch] if isinstance(batch, Tensor) else list(batch) if isinstance(batch, Sequence) else []
    values, labels = (*parts, None, None)[:2]
    if not isinstance(values, Tensor) or values.ndim < 2:
        return None
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    is_class = isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
    # a copy, since a view would keep the batch in memory
    kept = labels[:most].to("cpu", torch.int64, copy=True) if isinstance(labels, Tensor) and is_class else None
    return Samples(values[:most].detach().to("cpu", dtype, copy=True), kept)


def _is_stacked_on(rbm: RBM, lower: RBM) -> bool:
    return rbm.num_visible - rbm.num_labels == lower.num_hidden


def _compute_inputs(rbms: Mapping[str, RBM], rows: Samples) -> dict[str, Tensor]:
    """Return the inputs (B, V) of each machine that the samples fit, by name."""
    values = rows.values.flatten(1)
    seen: dict[str, Tensor] = {}
    below: RBM | None = None
    state: Tensor | None = values
    for name, rbm in rbms.items():
        if below is None or not _is_stacked_on(rbm, below):
            state = values if rbm.num_visible - rbm.num_labels == values.shape[1] else None
        below = rbm
        if state is not None:
            state = _with_labels(state.to(rbm.weight.dtype), rows.labels, rbm)
        if state is not None:
            seen[name] = state
            state = rbm(state)
    return seen


def _with_labels(state: Tensor, labels: Tensor | None, rbm: RBM) -> Tensor | None:
    """Append one-hot classes to ``state`` if ``rbm`` has label units; return None if the classes do not fit."""
    if not rbm.num_labels:
        return state
    if labels is None or int(labels.min()) < 0 or int(labels.max()) >= rbm.num_labels:
        return None
    return torch.cat([state, F.one_hot(labels, rbm.num_labels).to(state.dtype)], dim=1)


def _chains_of(rbms: Sequence[RBM], module: L.LightningModule) -> list[Tensor | None]:
    """Return the hidden states (C, H) of each machine's chains on the CPU, None for machines without."""
    trainings = find_contrastive_divergences(module)
    if len(trainings) != len(rbms):  # match them by size
        fitting = [[one for one in trainings if _fits(one, rbm)] for rbm in rbms]
        return [_states(ones[0]) if len(ones) == 1 else None for ones in fitting]
    return [_states(one) if _fits(one, rbm) else None for one, rbm in zip(trainings, rbms, strict=True)]


def _fits(training: ContrastiveDivergence, rbm: RBM) -> bool:
    return training.chains is not None and training.chains.shape[-1] == rbm.num_hidden


def _states(training: ContrastiveDivergence) -> Tensor:
    assert training.chains is not None
    return at_least_float32(training.chains.detach().cpu())


def _log_figure(trainer: L.Trainer, name: str, figure: Figure) -> None:
    logger: Any
    for logger in trainer.loggers:
        if callable(add_figure := getattr(logger.experiment, "add_figure", None)):
            add_figure(name, figure, trainer.global_step)
        elif callable(log_image := getattr(logger, "log_image", None)):
            canvas: Any = figure.canvas
            log_image(key=name, images=[np.asarray(canvas.buffer_rgba())], step=trainer.global_step)
