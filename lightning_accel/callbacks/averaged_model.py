"""Weights that callbacks of Lightning's average over a run."""

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from lightning_accel.compress.prunable import clean_name


def averaged_weights(trainer: L.Trainer) -> list[dict[str, Tensor]]:
    """Of each callback that averages: its weights, by their names in the module that trains."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    found: list[dict[str, Tensor]] = []
    for callback in callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            average = callback._average_model  # it shows its average in no other way
            if average is not None:
                inner = average.module if isinstance(average, AveragedModel) else average
                found.append({clean_name(name): value for name, value in inner.named_parameters()})
    return found
