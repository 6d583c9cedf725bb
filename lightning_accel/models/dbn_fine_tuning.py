"""Fine-tuning of deep belief networks. Shapes: B samples."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_accel.models.dbn_metrics import Batch, classes_of
from lightning_accel.nn.boltzmann.stack import UNKNOWN


@dataclass(frozen=True)
class FineTuning:
    """Hold how all layers of a deep belief network are trained together, after one another.

    Args:
        method: ``none``; ``classifier``, by back-propagation with a linear head; or ``updown``, by the up-down
            algorithm.
        epochs: number of epochs of the joint training.
        lr: initial learning rate, which falls to 0; by default 0.5 for ``classifier``, 0.01 for ``updown``.
        dropout: probability with which ``classifier`` leaves out each hidden unit.
        unlabeled: weight of the samples of unknown class, for which ``classifier`` minimizes the cross entropy of its
            predictions with dropout to those without (Laine and Aila 2017, Temporal Ensembling,
            https://arxiv.org/abs/1610.02242, with dropout as the only noise); it grows from 0 within the first half of
            the epochs, and is whole in a single one. Without dropout it has no effect.

    Raises:
        ValueError: if a number is out of range, or ``dropout`` is given for another method.

    Example:
        >>> from lightning_accel import DeepBeliefNetwork
        >>> model = DeepBeliefNetwork(fine_tuning=FineTuning("classifier", epochs=10, dropout=0.2))
    """

    method: Literal["none", "classifier", "updown"] = "none"
    epochs: int = 10
    lr: float | None = None
    dropout: float = 0.0
    unlabeled: float = 1.0

    def __post_init__(self) -> None:
        if self.dropout and self.method != "classifier":
            raise ValueError(f"dropout is for the method 'classifier'; got {self.method!r}")
        if not 0 <= self.dropout < 1 or not 0 <= self.unlabeled < math.inf:
            raise ValueError(
                "dropout must lie in [0, 1), and unlabeled be finite and at least 0; got "
                f"dropout={self.dropout}, unlabeled={self.unlabeled}"
            )


def split_batch(batch: Batch, size: int, needs_classes: bool) -> list[Batch]:
    """Split a batch into mini-batches of ``size`` samples.

    With ``needs_classes``, each part of the samples of unknown class has up to ``size`` of known class beside it, which
    repeat.
    """
    if isinstance(batch, Tensor):
        return list(batch.split(size))
    unknown = classes_of(batch) == UNKNOWN if needs_classes else None
    if unknown is None or not 0 < int(unknown.sum()) < len(unknown):
        return list(zip(*(one.split(size) for one in batch), strict=True))
    with_class, without = (~unknown).nonzero()[:, 0], unknown.nonzero()[:, 0]
    num_parts = math.ceil(len(unknown) / size)  # as many in each process, whatever classes its samples have
    size = min(size, len(with_class))
    again = with_class.repeat(math.ceil(num_parts * size / len(with_class)))[: num_parts * size].split(size)
    chosen = [torch.cat(pair) for pair in zip(again, without.tensor_split(num_parts), strict=True)]
    return [tuple(one[rows] for one in batch) for rows in chosen]
