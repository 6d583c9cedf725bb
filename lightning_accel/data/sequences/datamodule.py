"""Sequences of unequal lengths. Shapes: B sequences, T steps of the longest, F features, K values of a target."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accel.data.bounds import require_shares
from lightning_accel.data.digest import DIGEST, require_same_data
from lightning_accel.data.in_memory import in_memory_loader, resumable_loader
from lightning_accel.data.quoting import listed
from lightning_accel.data.samplers import ResumableLoader, replicas_and_rank
from lightning_accel.data.sequences.dataset import SequenceDataset
from lightning_accel.data.sequences.files import SequenceLayout, TargetKind
from lightning_accel.data.sequences.length_sampler import LengthBatchSampler
from lightning_accel.data.sequences.sharded import ShardedSequences
from lightning_accel.data.sequences.splits import (
    GeneratedSequences,
    Length,
    SequenceSplits,
    TaskName,
    digit_splits,
    file_splits,
    file_to_predict,
    generated_splits,
)
from lightning_accel.data.shards.files import is_sharded
from lightning_accel.data.shards.loader import datamodule_loader
from lightning_accel.data.shards.options import ShardOptions
from lightning_accel.data.shards.splits import Split
from lightning_accel.data.tables.files import existing_file
from lightning_accel.ops.bounds import if_set, require_integers
from lightning_accel.ops.names import list_of_names
from lightning_accel.ops.options import options_of, read_options
from lightning_accel.ops.renames import renamed_arguments


class SequenceDataModule(L.LightningDataModule):
    """Load sequences from a file, or from a generated task, as batches of similar length (:class:`SequenceBatch`).

    Batching by length needs little padding; a run resumed in mid-epoch continues with the next batch, also on another
    number of processes (:class:`LengthBatchSampler`).

    **Files.** ``.jsonl`` files have one object per line, with ``values`` (a list of numbers, or of lists of F numbers),
    ``tokens`` (a list of whole numbers) or ``text`` (whose bytes are the steps), a ``target``, and optionally an
    ``id``. ``.csv`` and ``.parquet`` files have one row per step, with ``id``, ``step``, ``target`` and numeric
    columns, in any order. All but Parquet may be gzipped, ``.gz``. Values are standardized to mean 0 and variance 1
    over the steps of the training sequences.

    **More than fits in memory.** A folder, a pattern or a URL of Parquet, Arrow or JSON lines files (see
    :func:`lightning_accel.data.shard_loader`) has one row per sequence, with the columns of a ``.jsonl`` file. It is
    read ahead of training, and what is read together is sorted by length. The first run reads all of it once, for the
    statistics, and keeps these in ``layout.shards.cache_dir``. Files whose path or name has the word ``train``, ``val``
    (``valid``, ``validation``, ``dev``) or ``test`` are for what it says; else whole blocks of files are the splits.

    **Splits** consist of whole sequences, stratified by class; the same file and ``seed`` give the same splits.

    After ``setup``: ``target_kind``; ``num_features``, None for tokens; ``vocab_size``, None for values;
    ``num_classes`` and ``class_names``, None unless targets are classes; ``num_targets``, K, None unless targets are
    numbers, which are not standardized, with ``target_mean`` and ``target_std`` (K,) over the training sequences, the
    latter 1 for constant targets; ``feature_names``, ``feature_mean`` and ``feature_std``; ``predict_ids``, in the
    order of ``predict``. For forecasting, batches have no target: it is the sequence itself, shifted by one step.

    Args:
        path: file of sequences, or a folder, pattern or URL of files; by default, ``task`` is used.
        task: a generated task, if there is no ``path``: ``digits_rows`` (the default), the 8 x 8 digits as 8 rows,
            ``digits_pixels``, as 64 pixels, ``digits_permuted``, as 64 pixels in a fixed random order; ``adding``, the
            sum of two marked numbers.
        generated: number and lengths of the sequences of ``adding``, see
            :class:`lightning_accel.data.GeneratedSequences`.
        layout: target of a file, and which of its columns or fields hold what, see
            :class:`lightning_accel.data.SequenceLayout`.
        global_batch_size: sequences per step, over all processes; with ``max_tokens``, the largest number.
        max_tokens: largest number of steps of a batch, including padding.
        chunk_steps: steps per chunk of training sequences, for truncated back-propagation through time.
        val_share: share of the sequences that validate.
        test_share: share of the sequences that test.
        seed: seed of the generated sequences, the split and the order.
        num_workers: workers that load batches; 0 is fastest, since the sequences are in memory.
        predict_path: file of sequences to predict, in the format of ``path``, with or without targets; by default the
            test sequences. Where ``path`` is a folder, this is one, too.

    Raises:
        TypeError: if an option has another type.
        FileNotFoundError: if a file does not exist.
        ValueError: if an option is out of range, or has no effect; in ``setup``, if a file is not as described; in
            ``load_state_dict``, if the checkpoint was trained on other sequences.

    Example:
        >>> data = SequenceDataModule(task="digits_rows", global_batch_size=32)
        >>> data.setup("fit")
        >>> next(iter(data.train_dataloader())).x.shape
        torch.Size([32, 8, 8])
    """

    target_kind: TargetKind
    num_features: int | None
    vocab_size: int | None
    num_classes: int | None
    num_targets: int | None
    class_names: list[str] | None
    feature_names: list[str] | None
    feature_mean: list[float] | None
    feature_std: list[float] | None
    target_mean: list[float] | None
    target_std: list[float] | None
    _predict_ids: list[str] | None = None

    @renamed_arguments(
        batch_size="global_batch_size",
        **{name: f"generated.{name}" for name in options_of(GeneratedSequences())},
        **{name: f"layout.{name}" for name in options_of(SequenceLayout())},
    )
    def __init__(
        self,
        path: str | Path | None = None,
        task: TaskName | None = None,
        *,
        generated: GeneratedSequences = GeneratedSequences(),
        layout: SequenceLayout = SequenceLayout(),
        global_batch_size: int = 64,
        max_tokens: int | None = None,
        chunk_steps: int | None = None,
        val_share: float = 0.1,
        test_share: float = 0.2,
        seed: int = 0,
        num_workers: int = 0,
        predict_path: str | Path | None = None,
    ) -> None:
        super().__init__()
        require_integers(
            1, global_batch_size=global_batch_size, **if_set(max_tokens=max_tokens, chunk_steps=chunk_steps)
        )
        require_integers(0, seed=seed, num_workers=num_workers)
        require_shares(val_share, test_share)
        generated, layout = read_options(GeneratedSequences, generated), read_options(SequenceLayout, layout)
        if layout.target_kind not in get_args(TargetKind):
            kinds = ", ".join(get_args(TargetKind))
            raise ValueError(f"layout.target_kind must be one of {kinds}; got {layout.target_kind!r}")
        self.is_sharded = path is not None and is_sharded(path)
        self.path, self.predict_path = path, predict_path
        if not self.is_sharded:
            self.path = None if path is None else existing_file(path)
            self.predict_path = None if predict_path is None else existing_file(predict_path)
        elif chunk_steps is not None or max_tokens is not None:
            raise ValueError(
                f"{path} is a folder or URL of files, on which chunk_steps and max_tokens have no effect; leave "
                "them out"
            )
        self.task: TaskName | None = "digits_rows" if task is None and path is None else task
        shards = read_options(ShardOptions, layout.shards)
        self.layout = replace(layout, values=tuple(list_of_names(layout.values)), shards=shards)
        if self.task not in (None, *get_args(TaskName)):
            raise ValueError(f"task must be one of {', '.join(get_args(TaskName))}; got {task!r}")
        length = 100 if generated.length is None else generated.length
        self.lengths: tuple[Length, Length] | None = None
        if self.task == "adding":
            self.lengths = length, length if generated.test_length is None else generated.test_length
        given = [f"generated.{name}" for name, value in options_of(generated).items() if value is not None]
        self._require_effect(given)
        self.num_sequences = 10_000 if generated.num_sequences is None else generated.num_sequences
        self.global_batch_size = global_batch_size
        self.max_tokens = max_tokens
        self.chunk_steps = chunk_steps
        self.shares = val_share, test_share
        self.seed = seed
        self.num_workers = num_workers

    def _require_effect(self, given: list[str]) -> None:
        """Raise a ValueError if an option would have no effect."""
        if self.path is not None and self.task is not None:
            raise ValueError(f"give path or task, not both; got path={self.path}, task={self.task!r}")
        if given and self.lengths is None:
            what = f"the file {self.path}" if self.task is None else f"task={self.task!r}"
            raise ValueError(f"{', '.join(given)} would have no effect on {what}, which is not generated")
        if self.path is None and (self.layout != SequenceLayout() or self.predict_path is not None):
            raise ValueError(
                f"layout and predict_path describe files; without a path, task={self.task!r} alone is read. "
                "Give path, or leave them out"
            )

    @property
    def predict_ids(self) -> list[str]:
        """Return the names of what is predicted, in order; those of a folder are read when they are first asked for."""
        if self._predict_ids is None:
            self._predict_ids = self._sequences.ids(self._predicted)
        return self._predict_ids

    @predict_ids.setter
    def predict_ids(self, names: list[str]) -> None:
        self._predict_ids = names

    def prepare_data(self) -> None:
        """List the blocks of a folder and collect its statistics, in one process per machine."""
        if self.is_sharded:
            self._sharded_sequences()

    def _sharded_sequences(self) -> ShardedSequences:
        assert self.path is not None
        return ShardedSequences(self.path, self.layout, self.shares, self.seed)

    def setup(self, stage: str | None = None) -> None:
        if hasattr(self, "train_rows") or hasattr(self, "_sequences"):  # the Trainer calls setup once per stage
            return
        if self.is_sharded:
            self._setup_shards()
            return
        splits = self._read()
        self.predict_rows, self.predict_ids = splits.test.without_targets(), splits.test_ids
        if self.predict_path is not None:
            assert isinstance(self.predict_path, Path)
            self.predict_rows, self.predict_ids = file_to_predict(self.predict_path, self.layout, splits)
        self._describe(splits)
        self._digest = splits.digest
        self._sampler(splits.train)  # raises where a sequence is longer than max_tokens
        self.train_rows, self.val_rows, self.test_rows = splits.train, splits.val, splits.test
        if self.path is not None:
            rows = splits.train, splits.val, splits.test
            self._report([*map(len, rows)], torch.cat([each.lengths for each in rows]))

    def _read(self) -> SequenceSplits:
        if self.task is None:
            assert isinstance(self.path, Path)
            return file_splits(self.path, self.layout, self.shares, self.seed)
        if self.lengths is None:
            return digit_splits(self.task, self.shares, self.seed)
        return generated_splits(self.lengths, self.num_sequences, self.shares, self.seed)

    def _setup_shards(self) -> None:
        found = self._sharded_sequences()
        statistics = found.statistics
        self._predicted = found.splits["test"] if self.predict_path is None else found.to_predict(self.predict_path)
        self.vocab_size, self.feature_names = statistics.vocab_size, found.feature_names
        self.num_features = None if statistics.mean is None else len(statistics.mean)
        self.feature_mean, self.feature_std = statistics.mean, statistics.std
        self.class_names = statistics.classes
        self.num_classes = None if statistics.classes is None else len(statistics.classes)
        self.target_mean, self.target_std = statistics.target_mean, statistics.target_std
        self.num_targets = None if statistics.target_mean is None else len(statistics.target_mean)
        self._digest = found.digest
        self.target_kind = self.layout.target_kind
        self._sequences = found
        self._report([int(found.splits[split].rows.sum()) for split in ("train", "val", "test")])

    def _report(self, num_sequences: Sequence[int], lengths: Tensor | None = None) -> None:
        """Tell how the file is read, in a run."""
        if self.trainer is None:
            return
        target = "no target"
        if self.class_names is not None:
            target = f"target of {len(self.class_names)} classes, {listed(self.class_names, 10)}"
        elif self.num_targets is not None:
            target = f"target of {self.num_targets} numbers"
        steps = f"tokens below {self.vocab_size}"
        if self.feature_names is not None:
            steps = f"features of a step: {listed(self.feature_names, 10)}"
        length = ""
        if lengths is not None:
            shortest, longest = int(lengths.min()), int(lengths.max())
            length = f", of {shortest} to {longest} steps" if shortest < longest else f", of {longest} steps"
        rank_zero_info(
            f"{self.path}: {target}; {steps}; "
            + "{:,} sequences train, {:,} validate, {:,} test".format(*num_sequences)
            + length
            + ("" if self.predict_path is None else f"; predict_path: {self.predict_path}")
        )

    def _describe(self, splits: SequenceSplits) -> None:
        self.target_kind = splits.kind
        self.vocab_size = splits.vocab_size
        self.feature_names = splits.feature_names
        self.num_features = None if splits.feature_names is None else len(splits.feature_names)
        self.feature_mean = None if splits.mean is None else splits.mean.tolist()
        self.feature_std = None if splits.std is None else splits.std.tolist()
        self.class_names = splits.class_names
        self.num_classes = None if splits.class_names is None else len(splits.class_names)
        self.num_targets = self.target_mean = self.target_std = None
        if splits.kind == "regression":
            assert splits.train.target is not None
            target = splits.train.target.double().view(len(splits.train), -1)
            self.num_targets = target.shape[1]
            self.target_mean = target.mean(dim=0).tolist()
            std = target.std(dim=0, correction=0)
            self.target_std = torch.where(std > 0, std, 1).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {
            "task": [self.task, self.lengths and self.lengths[0], self.num_sequences],
            "target": [self.target_kind, self.class_names],
            "features": [self.vocab_size, self.feature_names],
            "split": [self.seed, *self.shares],
            "means of the training steps": self.feature_mean,
            "deviations of the training steps": self.feature_std,
            DIGEST: self._digest,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer: Any = self.trainer
        resuming = trainer is None or trainer.state.fn == TrainerFn.FITTING
        now = self.state_dict()
        if self.lengths is not None and not resuming:
            del now["task"], now["split"]  # generated sequences of another length or seed are new to the model
        remedy = "Give the file and the split of its run; new sequences go in predict_path"
        require_same_data(state_dict, now, f"sequences than those of {self.path or self.task}", remedy)

    def _sampler(self, rows: SequenceDataset) -> LengthBatchSampler:
        replicas, rank = replicas_and_rank(self)
        return LengthBatchSampler(
            rows.lengths,
            self.global_batch_size,
            max_tokens=self.max_tokens,
            seed=self.seed,
            chunk_steps=self.chunk_steps,
            num_replicas=replicas,
            rank=rank,
        )

    def train_dataloader(self) -> DataLoader[Any]:
        if self.is_sharded:
            return self._shard_loader("train")
        return self._loader(self.train_rows, self._sampler(self.train_rows))

    def val_dataloader(self) -> DataLoader[Any]:
        if self.is_sharded:
            return self._shard_loader("val")
        return self._loader(self.val_rows, self._longest_first(self.val_rows))

    def test_dataloader(self) -> DataLoader[Any]:
        if self.is_sharded:
            return self._shard_loader("test")
        return self._loader(self.test_rows, self._longest_first(self.test_rows))

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return a loader of batches in the order of ``predict_ids``."""
        if self.is_sharded:
            return self._shard_loader("predict")
        size = max(1, self.global_batch_size // replicas_and_rank(self)[0])
        return in_memory_loader(self.predict_rows, self, size, self.num_workers)

    def _shard_loader(self, split: Split | Literal["predict"]) -> DataLoader[Any]:
        replicas = replicas_and_rank(self)[0]
        if self.global_batch_size % replicas:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} must be a multiple of the {replicas} processes, each of "
                "which takes as many sequences of a folder of files"
            )
        predicts = split == "predict"
        blocks = self._predicted if split == "predict" else self._sequences.splits[split]
        reading = self._sequences.reading(self.global_batch_size, with_target=not predicts, in_order=predicts)
        size = self.global_batch_size // replicas
        return datamodule_loader(self, blocks, reading, size, self.num_workers, self.layout.shards, self.seed, split)

    def _longest_first(self, rows: SequenceDataset) -> LengthBatchSampler:
        max_tokens = None if self.chunk_steps else self.max_tokens  # may be less than a whole sequence
        replicas, rank = replicas_and_rank(self)
        return LengthBatchSampler(
            rows.lengths, self.global_batch_size, max_tokens=max_tokens, shuffle=False, num_replicas=replicas, rank=rank
        )

    def _loader(self, rows: SequenceDataset, sampler: LengthBatchSampler) -> ResumableLoader:
        return resumable_loader(rows, sampler, self, self.num_workers)
