"""Samples that go one by one through a model as it is used after training, again and again."""

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn

import lightning as L
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, ProgressBar
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_accel.measure import isolate
from lightning_accel.strategies.batch_splitting import count_samples, split_batch

NUM_SAMPLES = 16  # of each DataLoader
_ROUNDS = 32  # over the samples, before a validation ends and frees what the module has collected
_LOADERS_OF = {"predict": "predict_dataloader", "validate": "val_dataloader"}

Stage = Literal["predict", "validate"]


class ServingError(Exception):
    """Say why a model cannot be used as it is."""


def stage_of(module: L.LightningModule, data: Any) -> Stage:
    """Return ``predict`` if there is data for it, ``validate`` if there is some for that alone.

    Raises:
        ServingError: if there is neither.
    """
    sources = [one for one in (data, module) if isinstance(one, L.LightningDataModule | L.LightningModule)]
    if any(is_overridden("predict_dataloader", one) for one in sources):
        return "predict"
    if any(is_overridden("val_dataloader", one) for one in sources) and is_overridden("validation_step", module):
        return "validate"
    raise ServingError(
        "latency is that of one sample in predict or validate, and there is no data for either: give the "
        "LightningDataModule (or the module) a predict_dataloader whose batches predict_step takes, or a "
        "val_dataloader, and the module a validation_step"
    )


def serve_isolated(trainer: L.Trainer, module: L.LightningModule, data: Any, folder: Path, **weights: Any) -> NoReturn:
    """Run samples one by one, until a callback raises an exception, without files outside of a folder.

    Args:
        trainer: the user's.
        module: the module.
        data: a datamodule, None if the module has its own loaders.
        folder: where loggers of files and callbacks write.
        weights: ``ckpt_path`` and ``weights_only`` of the Trainer's methods, if the weights are those of a checkpoint.

    Raises:
        ServingError: if there is no data, or the first sample fails.
    """
    stage = stage_of(module, data)
    isolate(trainer, folder, max_val_batches=1)
    unwanted = EarlyStopping | ProgressBar | BasePredictionWriter
    served = _Served()
    kept = [one for one in trainer.callbacks if not isinstance(one, unwanted)]  # type: ignore[attr-defined]
    trainer.callbacks = [served, *kept]  # type: ignore[attr-defined]
    trainer.limit_predict_batches = trainer.limit_val_batches = 1.0
    datamodule = data if isinstance(data, L.LightningDataModule) else None
    source = datamodule if datamodule is not None and is_overridden(_LOADERS_OF[stage], datamodule) else module
    loaders = _cut_loaders(source, _LOADERS_OF[stage])
    owners = [one for one in (module, datamodule) if one is not None]
    for one in owners:
        one.teardown = _nothing  # type: ignore[method-assign]

    def run(**more: Any) -> None:
        if stage == "predict":
            trainer.predict(module, datamodule=datamodule, return_predictions=False, **more)
        else:
            trainer.validate(module, datamodule=datamodule, verbose=False, **more)

    try:
        run(**weights)
    except Exception as error:
        if served.has_any or isinstance(error, ServingError):
            raise
        raise ServingError(f"{stage} fails on its first sample: {type(error).__name__}: {error}") from error
    assert served.has_any
    for one in owners:  # which may take seconds, and make other layers
        one.prepare_data = one.setup = _nothing  # type: ignore[method-assign]
    if len(loaders) == 1:
        loaders[0].rounds = _ROUNDS
    while True:
        run()


class _Served(L.Callback):
    """Note that a sample has been through the model."""

    has_any = False

    def on_predict_batch_end(self, *_: Any) -> None:
        self.has_any = True

    on_validation_batch_end = on_predict_batch_end  # type: ignore[assignment]  # its outputs have another type


class _OneByOne:
    """Iterate over batches of one sample each, several times; copies, since steps may change them."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.rounds = 1

    def __len__(self) -> int:
        return self.rounds * len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.rounds):
            yield from map(copy.deepcopy, self.batches)


def _cut_loaders(source: Any, name: str) -> list[_OneByOne]:
    """Let a method of a module or datamodule return its loaders cut to single samples, which the list receives."""
    loaders: list[_OneByOne] = []
    combined: list[CombinedLoader] = []
    make: Callable[[], Any] = getattr(source, name)

    def made() -> CombinedLoader:
        if not combined:
            one = make()
            combined.append(one if isinstance(one, CombinedLoader) else CombinedLoader(one, "sequential"))
            loaders.extend(_OneByOne(one_by_one(loader)) for loader in combined[0].flattened)
            if not all(len(one) for one in loaders):
                raise ServingError(f"a loader of {name} has no samples")
        combined[0].flattened = list(loaders)
        return combined[0]

    if name == "predict_dataloader":
        source.predict_dataloader = made
    else:
        source.val_dataloader = made
    return loaders


def one_by_one(loader: Any, number: int = NUM_SAMPLES) -> list[Any]:
    """Return the first samples of a DataLoader or another iterable of batches, each as a batch of its own.

    A DataLoader collates each sample alone, so that nothing is padded; batches from elsewhere are split.

    Raises:
        TypeError: if such a batch holds something that cannot be split.
        ValueError: if its numbers of samples disagree.
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    if isinstance(before := getattr(sampler, "batch_size", None), int):
        sampler.batch_size = 1
        try:
            if len(next(iter(sampler), [])) == 1:
                return list(islice(loader, number))
        finally:
            sampler.batch_size = before
    instead = "give a DataLoader with a batch_size, which collates single samples"
    found: list[Any] = []
    for batch in loader:
        found += [part.batch for part in split_batch(batch, count_samples(batch, instead), instead)]
        if len(found) >= number:
            break
    return found[:number]


def _nothing(*_: Any, **__: Any) -> None:
    """Take the place of a hook that has done what it is for."""
