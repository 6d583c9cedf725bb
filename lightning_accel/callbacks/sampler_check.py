"""Finds samplers that the Trainer would not use as they were meant."""

from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_accel.strategies.batch_samplers import deals_rows, given_loaders, require_dealable_batches


class SamplerCheck(L.Callback):
    """Say, before training, what the Trainer would do to a loader's sampler without a word.

    It refuses a sampler of batches that Lightning would make anew, for several processes, from a wrong argument. It
    warns of one whose ``set_epoch`` is never called, so that all epochs have one order, and of rows meant to come in
    order that several processes would get shuffled. It looks at loaders given to ``fit`` and the like; what hooks
    return, Lightning checks itself where it is made in the hook. ``ExactResume`` and the strategies of this package
    refuse the same samplers, without the warnings.

    Raises:
        TypeError: in ``setup``, for such a sampler of batches.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        require_dealable_batches(trainer)
        if stage == "fit":
            for loader in given_loaders(trainer, training_only=True):
                _warn_of_epochs(loader.batch_sampler)
                _warn_of_shuffling(loader, trainer)


def _warn_of_epochs(batches: Any) -> None:
    if hasattr(batches, "set_epoch") and not hasattr(getattr(batches, "sampler", None), "set_epoch"):
        rank_zero_warn(
            f"SamplerCheck: Lightning calls set_epoch of samplers, never that of a batch_sampler, so every epoch of "
            f"{type(batches).__qualname__} has one order. Write DataLoader(..., sampler=batches, batch_size=None); for "
            "LengthBatchSampler, length_batch_loader(dataset, sampler)"
        )


def _warn_of_shuffling(loader: DataLoader[Any], trainer: L.Trainer) -> None:
    in_order = isinstance(loader.sampler, SequentialSampler) and type(loader.batch_sampler) is BatchSampler
    if in_order and deals_rows(trainer):
        rank_zero_warn(
            "SamplerCheck: the training loader has shuffle=False, but Lightning shuffles it for several processes. "
            "Write shuffle=True, or, for rows in order, give it sampler=DistributedSampler(dataset, shuffle=False)"
        )
