"""Access to the averaged weights of Lightning's weight-averaging callbacks."""

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_accel.compress.prunable import clean_name


def averaged_modules(trainer: L.Trainer) -> list[nn.Module]:
    """Return the averaged copy of the module that each weight-averaging callback holds."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    found: list[nn.Module] = []
    for callback in callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            average = callback._average_model  # there is no public access
            if average is not None:
                found.append(average.module if isinstance(average, AveragedModel) else average)
    return found


def averaged_weights(trainer: L.Trainer) -> list[dict[str, Tensor]]:
    """Return the averaged parameters of each weight-averaging callback, by their names in the trained module."""
    return [
        {clean_name(name): value for name, value in average.named_parameters()} for average in averaged_modules(trainer)
    ]
