"""Monitoring of restricted Boltzmann machines in figures. Shapes: B samples, V visible units, H hidden units."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_accel.callbacks.contrastive_divergences import find_contrastive_divergences
from lightning_accel.callbacks.deployment.copies import run_folder
from lightning_accel.callbacks.fit_end import failures_as_warnings
from lightning_accel.callbacks.monitors.rbm_pictures import RBMView, draw_rbm, picture_shape, plain_copy
from lightning_accel.callbacks.trainer_callbacks import log_figure
from lightning_accel.nn import RBM, ContrastiveDivergence
from lightning_accel.ops.extras import require_module
from lightning_accel.ops.float32 import at_least_float32

_MOST_SAMPLES = 32  # in a figure


class Samples(NamedTuple):
    """Hold some samples of the data on the CPU."""

    values: Tensor  # (B, ...) at least float32
    labels: Tensor | None  # (B,) class indices


class RBMMonitor(L.Callback):
    """Draw each restricted Boltzmann machine of a module, any that has :class:`~lightning_accel.RBM`.

    After validation and at the end, a figure of each machine goes to ``rbm_<name>.png`` in ``folder``, by the name of
    its attribute, such as ``rbm_stack.rbms.0.png``, and to every logger that takes images (TensorBoard as
    ``rbm/<name>``):

    - filters, the contribution of each hidden unit to the visible ones;
    - where there are chains, samples: means of the visible units given the chains of the module's
      :class:`~lightning_accel.nn.ContrastiveDivergence`, an attribute, or a list with one for each machine;
    - samples of the first validation batch (training batch if there is no validation) and their reconstructions.

    Samples are the first part of a batch (a tensor, tuple, list or dict), (B, ...) flattened to (B, V); for a machine
    with label units the second part is the class. A machine with as many visible units as the previous one has hidden
    units is taken to be stacked on it: it gets the means of that one as input, and its figures show the corresponding
    visible units of the lowest machine. A module that trains its machines in stages may have an attribute
    ``trained_rbms``, those of the current epoch, as :class:`~lightning_accel.DeepBeliefNetwork` has: others are not
    drawn.

    Args:
        folder: folder of the figures, absolute, or relative to the run folder (the Trainer's ``log_dir``).
        image_shape: shape of a sample, such as (28, 28); by default that of batches (B, C, height, width) or (B,
            height, width), else a square if there is one, else a line.

    Raises:
        TypeError: before training, if the module has no RBM.
        ValueError: before training, if ``image_shape`` fits no RBM, or if the strategy flattens the weights (FSDP1).
    """

    def __init__(self, folder: str = "figures", image_shape: tuple[int, ...] | None = None) -> None:
        self.folder = folder
        self.image_shape = image_shape
        self._samples: Samples | None = None
        self._drawn_at: int | None = None
        self._trained: list[str] = []  # names of the machines that the current epoch trains

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        require_module("matplotlib")
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
        self._samples, self._drawn_at, self._trained = None, None, _trained_rbms(pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trained = _trained_rbms(pl_module)
        if trained != self._trained and self._drawn_at != trainer.global_step:  # before the next stage changes them
            self._try_to_draw(trainer, pl_module)
        self._trained = trained

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._samples is None:
            self._samples = _extract_samples(batch)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if _validates_in_fit(trainer) and dataloader_idx == batch_idx == 0:
            self._samples = _extract_samples(batch)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if _validates_in_fit(trainer):
            self._try_to_draw(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._drawn_at != trainer.global_step:
            self._try_to_draw(trainer, pl_module)

    def _try_to_draw(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._drawn_at, folder = trainer.global_step, run_folder(trainer) / self.folder
        with failures_as_warnings("RBMMonitor drew no picture"):
            views = self._compute_views(pl_module)  # in every process, since weights may be sharded
            views = {name: view for name, view in views.items() if name in self._trained}
            if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
                return
            if self._samples is not None and views and all(view.rows is None for view in views.values()):
                rank_zero_warn(
                    f"RBMMonitor: rows of {self._samples.values[0].numel()} values, the first part of a batch, fit no "
                    f"RBM of {type(pl_module).__name__}, so that no reconstructions are drawn"
                )
            folder.mkdir(parents=True, exist_ok=True)
            for name, view in views.items():
                lowest = (*view.below, view.rbm)[0]
                shape = picture_shape(lowest.num_visible - lowest.num_labels, self._shape())
                figure = draw_rbm(view, f"{name} after {trainer.global_step} steps", shape)
                figure.savefig(folder / f"rbm_{name}.png")
                log_figure(trainer, f"rbm/{name}", figure)

    def _compute_views(self, pl_module: L.LightningModule) -> dict[str, RBMView]:
        """Return what to draw, by name; every process must call it, since weights may be sharded."""
        rbms = _named_rbms(pl_module)
        plain = {name: plain_copy(rbm) for name, rbm in rbms.items()}
        chains = dict(zip(rbms, _chains_of(list(rbms.values()), pl_module), strict=True))
        seen = {} if self._samples is None else _compute_inputs(plain, self._samples)
        views, below = {}, list[str]()
        for name, rbm in plain.items():
            below = [*below, name] if below and _is_stacked_on(rbm, plain[below[-1]]) else [name]
            pixels = seen.get(below[0])
            views[name] = RBMView(rbm, [plain[lower] for lower in below[:-1]], seen.get(name), pixels, chains[name])
        return views

    def _shape(self) -> Sequence[int] | None:
        if self.image_shape is not None:
            return self.image_shape
        return None if self._samples is None else self._samples.values.shape[1:]


def _validates_in_fit(trainer: L.Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking


def _named_rbms(module: L.LightningModule) -> dict[str, RBM]:
    return {name: part for name, part in module.named_modules() if isinstance(part, RBM)}


def _trained_rbms(module: L.LightningModule) -> list[str]:
    """Return the names of the machines that the current epoch trains as such; all where the module does not say so."""
    rbms = _named_rbms(module)
    trained = getattr(module, "trained_rbms", rbms.values())
    return [name for name, rbm in rbms.items() if any(rbm is one for one in trained)]


def _extract_samples(batch: Any) -> Samples | None:
    """Return the first samples of ``batch``: its first part, and the second if it holds class indices."""
    batch = list(batch.values()) if isinstance(batch, Mapping) else batch
    parts = [batch] if isinstance(batch, Tensor) else list(batch) if isinstance(batch, Sequence) else []
    values, labels = (*parts, None, None)[:2]
    if not isinstance(values, Tensor) or values.ndim < 2:
        return None
    is_class = isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
    # clones, since views would keep the batch in memory
    kept = labels[:_MOST_SAMPLES].cpu().long().clone() if isinstance(labels, Tensor) and is_class else None
    return Samples(at_least_float32(values[:_MOST_SAMPLES].detach().cpu()).clone(), kept)


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
