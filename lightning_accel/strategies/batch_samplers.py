"""Checks of batch samplers that Lightning would distribute wrongly over processes."""

import inspect
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_accel._private.lightning import data_source_of, distributes_samples_by_default
from lightning_accel._private.torch import tree_leaves


def require_distributable_batches(trainer: L.Trainer) -> None:
    """Reject a loader whose ``batch_sampler`` Lightning would rebuild, for several processes, from a wrong argument.

    Lightning passes a sampler of indices as the first parameter of the class, whatever that parameter means. If it
    means something else, nothing fails: each process may train on all samples, or on meaningless batches. Lightning
    itself reports this for loaders created in a hook such as ``train_dataloader``, not for those created elsewhere.

    Raises:
        TypeError: if there is such a loader among those passed to ``fit``, ``validate``, ``test`` or ``predict``.
    """
    if not (distributes_samples(trainer) or trainer.state.fn == TrainerFn.PREDICTING):
        return
    for loader in given_loaders(trainer):
        batches = loader.batch_sampler
        if type(batches) in (BatchSampler, type(None)) or isinstance(loader.sampler, DistributedSampler):
            continue
        if hasattr(batches, "__pl_saved_args") or isinstance(loader.dataset, IterableDataset):
            continue  # Lightning knows the arguments of one made in a hook; iterable data sets have no indices
        if isinstance(batches, DistributedSampler) or _takes_no_sampler(batches):
            raise TypeError(_message(type(batches).__qualname__, isinstance(batches, DistributedSampler)))


def distribute_sampler(loader: Any, num_replicas: int, rank: int) -> Any:
    """Set up the sampler of ``loader`` for ``num_replicas`` processes with different samples, or reject it.

    If several processes work on the same samples, a sampler that asks torch.distributed would give each of them others.
    A sampler with a method ``deal_to(num_replicas, rank)`` is set up by it. Workers that
    ``seed_everything(workers=True)`` makes Lightning seed by process are seeded alike where processes load the same
    samples.

    Raises:
        ValueError: if the sampler was made for another number of processes.
    """
    if int(os.environ.get("PL_SEED_WORKERS", "0")) and getattr(loader, "worker_init_fn", 0) is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return loader
    if hasattr(sampler, "deal_to"):
        sampler.deal_to(num_replicas, rank)
    elif (sampler.num_replicas, sampler.rank) != (num_replicas, rank):
        raise ValueError(
            f"the {type(sampler).__name__} of a loader deals rows to {sampler.num_replicas} processes, of which this "
            f"is number {sampler.rank}, but the strategy has {num_replicas} groups of processes with the same rows, "
            f"this in number {rank}. Leave the sampler out, and Lightning makes one that fits, or make it with "
            "**trainer.distributed_sampler_kwargs"
        )
    return loader


def distributes_samples(trainer: L.Trainer) -> bool:
    """Return whether Lightning replaces samplers in loaders so that each process gets different samples."""
    wanted = distributes_samples_by_default(trainer)
    return wanted and trainer.distributed_sampler_kwargs is not None and trainer.world_size > 1


def given_loaders(trainer: L.Trainer, training_only: bool = False) -> Iterator[DataLoader[Any]]:
    """Yield the loaders passed to a method of ``trainer``, before it unpacks them; not those that hooks return."""
    fit: Any = trainer.fit_loop
    loops = [fit] if training_only else [fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]
    if trainer.state.fn == TrainerFn.PREDICTING:
        loops = [trainer.predict_loop]
    for loop in loops:
        given = data_source_of(loop).instance
        if not isinstance(given, L.LightningModule | L.LightningDataModule):
            yield from (one for one in tree_leaves(getattr(given, "iterables", given)) if isinstance(one, DataLoader))


def _takes_no_sampler(batches: object) -> bool:
    """Return whether the first argument that the class of ``batches`` was called with was no sampler."""
    parameters = list(inspect.signature(type(batches)).parameters)
    if not (hasattr(batches, "batch_size") and hasattr(batches, "drop_last")):
        return False  # Lightning rejects it
    return (
        bool(parameters)
        and parameters[0] != "sampler"
        and not isinstance(getattr(batches, parameters[0], None), Sampler)
    )


def _message(name: str, deals_itself: bool) -> str:
    write = "DataLoader(dataset, sampler=batches, batch_size=None), where dataset[list_of_rows] is a batch"
    if deals_itself:
        return (
            f"{name}, a DistributedSampler, was given to a loader as batch_sampler, where Lightning would make it anew "
            f"around a sampler of its own. Write {write}; with LengthBatchSampler, length_batch_loader(dataset, it)"
        )
    return (
        f"Lightning would make {name}, the batch_sampler of a loader, anew for each process, with a DistributedSampler "
        "as its first argument, which is no sampler: processes would train on the same rows, or on wrong batches. Use "
        "lightning_accel's LengthBatchSampler with length_batch_loader(dataset, sampler); or make yours a "
        f"DistributedSampler that deals lists of rows and write {write}; or deal batches to processes yourself and set "
        "Trainer(use_distributed_sampler=False)"
    )
