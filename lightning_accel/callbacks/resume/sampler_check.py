"""Check for samplers that the Trainer would not use as intended."""

from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_accel.strategies.batch_samplers import distributes_samples, given_loaders, require_distributable_batches


class SamplerCheck(L.Callback):
    """Report, before training, what the Trainer would silently do to a loader's sampler.

    It rejects a batch sampler that Lightning would rebuild from a wrong argument for several processes. It warns of one
    whose ``set_epoch`` is never called, so that all epochs have the same order, and of unshuffled data that several
    processes would get shuffled. It checks loaders given to ``fit`` and the like; loaders that hooks return are checked
    by Lightning itself. ``ExactResume`` and the strategies of this package reject the same samplers, without the
    warnings.

    Raises:
        TypeError: in ``setup``, for such a batch sampler.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import SamplerCheck
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[SamplerCheck()])
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        require_distributable_batches(trainer)
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
    if in_order and distributes_samples(trainer):
        rank_zero_warn(
            "SamplerCheck: the training loader has shuffle=False, but Lightning shuffles it for several processes. "
            "Write shuffle=True, or, for rows in order, give it sampler=DistributedSampler(dataset, shuffle=False)"
        )
