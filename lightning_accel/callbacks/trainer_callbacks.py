"""Access to the callbacks of a Trainer, to averaged weights and to loggers; errors that several callbacks raise."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_accel._private.lightning import averaged_model
from lightning_accel.ops.names import clean_name
from lightning_accel.strategies import FullyShardedStrategy, PipelineStrategy

CallbackT = TypeVar("CallbackT", bound=L.Callback)


def callbacks_of(trainer: L.Trainer, kind: type[CallbackT]) -> list[CallbackT]:
    """Return the callbacks of a class, in their order."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [one for one in callbacks if isinstance(one, kind)]


def move_last(trainer: L.Trainer, callback: L.Callback) -> None:
    """Move ``callback`` behind all others, or add it there.

    The list is replaced, since the Trainer iterates over the old one meanwhile.
    """
    others = [one for one in callbacks_of(trainer, L.Callback) if one is not callback]
    trainer.callbacks = [*others, callback]  # type: ignore[attr-defined]


def averaged_modules(trainer: L.Trainer) -> list[nn.Module]:
    """Return the averaged copy of the module that each weight-averaging callback holds."""
    found: list[nn.Module] = []
    for callback in callbacks_of(trainer, L.Callback):
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            average = averaged_model(callback)
            if average is not None:
                found.append(average.module if isinstance(average, AveragedModel) else average)
    return found


def averaged_weights(trainer: L.Trainer) -> list[dict[str, Tensor]]:
    """Return the averaged parameters of each weight-averaging callback, by their names in the trained module."""
    return [
        {clean_name(name): value for name, value in average.named_parameters()} for average in averaged_modules(trainer)
    ]


def log_figure(trainer: L.Trainer, name: str, figure: Any) -> None:
    """Give a matplotlib figure, drawn by Agg, to every logger that takes images."""
    logger: Any
    for logger in trainer.loggers:
        if callable(add_figure := getattr(logger.experiment, "add_figure", None)):
            add_figure(name, figure, trainer.global_step)
        elif callable(log_image := getattr(logger, "log_image", None)):
            log_image(key=name, images=[np.asarray(figure.canvas.buffer_rgba())], step=trainer.global_step)


def has_whole_modules(trainer: L.Trainer) -> bool:
    """Return whether each process has a whole module, which needs no others in its forward pass."""
    strategy = trainer.strategy
    is_split = isinstance(strategy, FullyShardedStrategy | PipelineStrategy)
    return isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not is_split


def require_own_steps(trainer: L.Trainer, pl_module: L.LightningModule, caller: str, by_hand: str) -> None:
    """Reject manual optimization and pipelines on behalf of the callback ``caller``, which changes training steps.

    Raises:
        TypeError: saying what to do; ``by_hand`` is what to do with manual optimization.
    """
    if not pl_module.automatic_optimization:
        raise TypeError(
            f"{caller} needs automatic optimization, but {type(pl_module).__name__} optimizes by hand; take the "
            f"callback out, and {by_hand}"
        )
    if isinstance(trainer.strategy, PipelineStrategy):
        raise TypeError(
            f"{caller} does not work under accel_pipeline, whose schedule runs the micro-batches; take the callback "
            "out, or train with 'accel_fsdp2'"
        )


def not_logged(caller: str, monitor: str, logged: Iterable[str], hint: str = "") -> ValueError:
    """Return the error of the callback ``caller`` whose metric ``monitor`` is not among the names ``logged``."""
    known = sorted(logged)
    near = get_close_matches(monitor, known, n=1)
    return ValueError(
        f"{caller} monitors {monitor!r}, which is not logged"
        + (f"; did you mean {near[0]!r}? " if near else ". ")
        + f"Logged so far: {', '.join(known) or 'nothing'}.{hint}"
    )
