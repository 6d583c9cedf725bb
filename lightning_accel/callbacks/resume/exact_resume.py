"""Exact resumption: a run that is killed and resumed ends bit for bit like an uninterrupted one."""

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, initial_seed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_accel._private.lightning import combined_loader_of, data_fetcher_of, restore_loaders, seen_batches_of
from lightning_accel.callbacks.contrastive_divergences import find_contrastive_divergences
from lightning_accel.callbacks.resume.logged_state import logged_state, set_logged_state, write_metrics_atomically
from lightning_accel.callbacks.resume.random_state import (
    RandomStream,
    derived_seed,
    random_state,
    seed_random_state,
    set_random_state,
)
from lightning_accel.callbacks.resume.resumed_fit import ModelCheckpointState, Moment, ResumedFit, moment_of
from lightning_accel.callbacks.resume.schedule_length import require_long_schedules
from lightning_accel.data.samplers import ResumableLoader, progress_of
from lightning_accel.data.sequences.length_sampler import LengthBatchSampler
from lightning_accel.nn import ContrastiveDivergence
from lightning_accel.strategies.batch_samplers import require_distributable_batches
from lightning_accel.strategies.checkpoints.rank_states import RankStates

_DRAW_AT_THE_START = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


class ExactResume(L.Callback):
    """Make a resumed run continue as if it had not been stopped, with any module, strategy and map-style DataLoader.

    A checkpoint holds the states of every process's random generators (torch, CUDA, NumPy, Python), and of each
    :class:`~lightning_accel.nn.ContrastiveDivergence` in the module, in lists, tuples and dicts too. Dropout and
    sampling therefore continue bit for bit on a processor of the same kind with as many threads (other kernels round
    differently). A resumed epoch begins with the first batch that was not trained on; earlier ones are skipped without
    being loaded. For that, the order of batches becomes a function of the seed and the epoch, and validation leaves the
    generators as they were. Processes that train on different samples draw different random numbers, for dropout say,
    whereas Lightning makes them all draw the same once a seed is set. With this callback a run draws other numbers than
    without it, but the same ones whether or not it was stopped.

    Logged values are equal, too. A checkpoint holds every process's running sums of the epoch and states of the
    module's torchmetrics, so that means cover the whole epoch. The iteration in which it was written is completed
    first: the metrics row of that step, a validation that was due, the remaining ModelCheckpoint callbacks, plateau
    schedulers. An interrupted validation runs again from its beginning. Metrics rows that were logged after the
    checkpoint are logged again, with equal values.

    These differ from an uninterrupted run: the module's own ``on_train_batch_end`` of the batch at whose end the
    checkpoint was written, which Lightning calls after saving, is skipped. Means logged with a ``sync_dist_group``
    cover only the rest of the epoch, and so do all means if an exception within a batch caused the checkpoint. Within
    an epoch, callbacks' ``on_train_epoch_start`` is not called a second time, except for Lightning's
    GradientAccumulationScheduler and StochasticWeightAveraging, whose last epoch, which updates batch norms, is
    rejected.

    Loaders with their own ``state_dict`` (as in this package's data modules) restore their position themselves. An
    iterable data set without one starts from its beginning, with a warning. Random numbers that a data set draws in
    worker processes are drawn anew in the rest of a resumed epoch; those drawn with ``num_workers=0`` continue.

    A schedule of fixed length, such as OneCycleLR, that ends before the resumed run does is rejected before training.

    On another number of processes the order continues after the last whole step of all of them, and a warning lists
    what is drawn or started anew.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import ExactResume
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[ExactResume(), ModelCheckpoint(every_n_train_steps=100)])
    """

    def __init__(self) -> None:
        self._seed = 0
        self._saved: list[dict[str, Any]] = []  # by rank
        self._saved_once: dict[str, Any] = {}  # equal on all ranks
        self._sampler_seeds: list[Any] = []  # of the checkpoint, one per sampler
        self._ranks = RankStates()
        self._kept = ModelCheckpointState()
        self._resumed: ResumedFit
        self._samplers: list[_ResumableSampler] = []
        self._replaced: Callable[[], object] = lambda: None  # weak reference to the loaders that _samplers belong to
        self._before_validation: dict[str, Any] | None = None
        self._before_sanity_check: dict[str, Any] | None = None  # counters of the last validation

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer = trainer  # in other stages, too, since they read checkpoints
        if stage != "fit":
            return
        require_distributable_batches(trainer)
        if trainer.precision == "64-true":  # else weights are read before the Trainer converts it, and rounded
            pl_module.double()
        self._seed, self._saved, self._saved_once, self._sampler_seeds = initial_seed(), [], {}, []
        self._kept, self._before_sanity_check = ModelCheckpointState(), None
        write_metrics_atomically(trainer)
        # These public methods of the strategy are called where callbacks have no hook: between a loader and its first
        # iteration, and after every other on_train_start. There is no public method around the loop.
        trainer.strategy.process_dataloader = self._process_dataloader  # type: ignore[method-assign]
        trainer.strategy.on_train_start = self._on_train_start  # type: ignore[method-assign]
        trainer.fit_loop.run = self._run  # type: ignore[method-assign]

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._release_loaders()
        for name in ("process_dataloader", "on_train_start"):
            vars(trainer.strategy).pop(name, None)
        vars(trainer.fit_loop).pop("run", None)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the loaders' samplers: no teardown follows, and a notebook may give the loaders to a new fit."""
        for sampler in self._samplers:  # which checkpoints of this moment still describe
            sampler.release()

    def state_dict(self) -> dict[str, Any]:
        trainer, moment = self._trainer, moment_of(self._trainer)
        seen = self._seen_in_validation()
        generators = random_state()
        if self._before_validation is not None:
            generators, seen = self._before_validation["generators"], self._before_validation["seen"]
        mine = {"seed": self._seed, "generators": generators, "shared_order": self._shares_one_order()}
        mine["sampler_seeds"] = [getattr(sampler.index_sampler, "seed", None) for sampler in self._samplers]
        if samplings := self._contrastive_divergences():
            mine["samplings"] = [one.state_dict() for one in samplings]
        if moment in ("batch end", "validation", "validation end", "epoch end"):
            mine["logged"] = logged_state(trainer, moment in ("validation", "validation end"))
            mine["seen_in_validation"] = seen
        everyone = self._ranks.gather(mine, trainer) or [mine]
        return {"ranks": everyone, "moment": moment, "kept": self._kept.state_dict(trainer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved, self._saved_once = state_dict["ranks"], state_dict
        mine = self._saved[min(self._trainer.global_rank, len(self._saved) - 1)]
        self._seed, self._sampler_seeds = mine["seed"], mine.get("sampler_seeds", [])

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
        self._before_sanity_check = copy.deepcopy(progress.state_dict())

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._before_validation = {"generators": random_state(), "seen": self._seen_in_validation()}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._before_validation is not None:  # None in a validation outside of a fit
            set_random_state(self._before_validation["generators"])
            self._before_validation = None

    def _process_dataloader(self, dataloader: object) -> object:
        strategy = self._trainer.strategy
        loader = type(strategy).process_dataloader(strategy, dataloader)
        if self._trainer.training and isinstance(loader, ResumableLoader) and loader.progress is None:
            loader.progress = progress_of(self._trainer)
        if self._trainer.training and self._replaced() is not (replaced := combined_loader_of(self._trainer.fit_loop)):
            self._release_loaders()  # of an earlier epoch, with reload_dataloaders_every_n_epochs
            self._replaced = (lambda: None) if replaced is None else weakref.ref(replaced)
        if self._trainer.training and not _is_stateful(loader):
            if _is_map_style(loader):
                self._samplers.append(_ResumableSampler(loader, lambda: self._seed, self._position))  # type: ignore[arg-type]
                self._restore_sampler_seeds()
                return loader
            rank_zero_warn(
                f"ExactResume: a run resumed within an epoch starts {_describe(loader)} from its beginning, since it "
                "has no indices. Give the loader state_dict() and load_state_dict(), or save at ends of epochs only"
            )
        if isinstance(loader, DataLoader) and loader.generator is None:  # its iterators would use the global one
            loader.generator = Generator().manual_seed(self._seed)
        return loader

    def _warn_of_repeated_samples(self) -> None:
        loaders = combined_loader_of(self._trainer.fit_loop)
        assert loaders is not None
        anew = [one for one in loaders.flattened if not (_is_stateful(one) or _is_map_style(one))]
        if anew and self._resumed.is_mid_epoch:
            rank_zero_warn(
                f"ExactResume: {' and '.join(map(_describe, anew))} began anew within the epoch. Rows of it are "
                "trained on again, and count twice in its means"
            )

    def _release_loaders(self) -> None:
        for sampler in self._samplers:
            sampler.release()
        self._samplers = []

    def _position(self) -> tuple[int, float]:
        """Return the current or next epoch, and how many of its batches are done; infinite for all of them."""
        loop: Any = self._trainer.fit_loop
        done = loop.epoch_loop.batch_progress.current.processed
        return loop.epoch_progress.current.processed, done if done < self._trainer.num_training_batches else math.inf

    def _run(self) -> None:
        loop = self._trainer.fit_loop
        if not loop.is_resuming:
            type(loop).run(loop)
            return
        require_long_schedules(self._trainer)
        if self._before_sanity_check is not None:  # resumed fits run it too, and it overwrites the counters
            loop.epoch_loop.val_loop.batch_progress.load_state_dict(self._before_sanity_check)
        moment: Moment = self._saved_once.get("moment") or moment_of(self._trainer)
        self._resumed = ResumedFit(self._trainer, moment, self._kept)
        self._resumed.run()

    def _on_train_start(self) -> None:
        strategy, loop = self._trainer.strategy, self._trainer.fit_loop
        type(strategy).on_train_start(strategy)
        if not loop.is_resuming:
            self._seed_by_rank()
            return
        self._resumed.restore_counters()
        self._warn_of_repeated_samples()
        if not self._saved:
            rank_zero_warn(
                "ExactResume: the checkpoint was written without this callback. The order of batches and all random "
                "draws differ from those of the run that wrote it, and means of this epoch cover the rest of it"
            )
        elif len(self._saved) != self._trainer.world_size:
            self._resume_on_other_world_size()
        self._restore_sampler_seeds()
        self._restart_loaders()
        self._kept.load_state_dict(self._saved_once.get("kept", {}), self._trainer)
        if len(self._saved) > self._trainer.global_rank:
            mine = self._saved[self._trainer.global_rank]
            set_random_state(mine["generators"])
            if len(self._saved) == self._trainer.world_size:  # else chains and sums start anew
                for sampling, state in zip(self._contrastive_divergences(), mine.get("samplings", []), strict=False):
                    sampling.load_state_dict(state, self._trainer.lightning_module.device)
                if "logged" in mine:
                    set_logged_state(self._trainer, mine["logged"])
                    self._set_seen_in_validation(mine["seen_in_validation"])
        self._saved, self._saved_once = [], {}

    def _seed_by_rank(self) -> None:
        """Seed processes that train on different samples differently, and those that share samples equally."""
        deal = self._trainer.distributed_sampler_kwargs
        if deal and deal["rank"]:
            seed_random_state(derived_seed(self._seed, deal["rank"]))

    def _restart_loaders(self) -> None:
        """Restart the epoch's iteration, now that the Trainer's counters are restored and corrected.

        The Trainer starts it earlier: if a scheduler asks for the number of steps, even before a checkpoint is read, so
        that loaders never get the state that was saved for them.
        """
        loop = self._trainer.fit_loop
        if restore_loaders(loop) or len(self._samplers) == len(combined_loader_of(loop).flattened):
            iter(data_fetcher_of(loop))

    def _restore_sampler_seeds(self) -> None:
        """Give Lightning's distributed samplers the seed of the checkpoint in place of this start's."""
        for sampler, seed in zip(self._samplers, self._sampler_seeds, strict=False):
            # None from a run of one process
            if isinstance(sampler.index_sampler, DistributedSampler) and seed is not None:
                sampler.index_sampler.seed = seed

    def _seen_in_validation(self) -> dict[int, int]:
        """Return how many batches of each validation loader have been seen, the step number of their logged metrics."""
        return dict(seen_batches_of(self._trainer.fit_loop.epoch_loop.val_loop))

    def _set_seen_in_validation(self, seen: dict[int, int]) -> None:
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop.val_loop
        if trainer.enable_validation and trainer.val_dataloaders is None:  # setting them up resets the counts
            trainer.validating = True
            loop.setup_data()
            trainer.training = True
        seen_batches_of(loop).update(seen)

    def _contrastive_divergences(self) -> list[ContrastiveDivergence]:
        """Return the samplers of the module and its parts, whose chains and generators are saved nowhere else."""
        found = [one for part in self._trainer.lightning_module.modules() for one in find_contrastive_divergences(part)]
        own = [one for part in self._trainer.lightning_module.modules() for one in vars(part).values()]
        direct = {id(one) for one in own}
        return sorted(found, key=lambda one: id(one) not in direct)  # older checkpoints hold attributes only

    def _shares_one_order(self) -> bool:
        """Return whether all processes share one order of samples, the same for any number of processes."""
        return bool(self._samplers) and all(
            isinstance(sampler.index_sampler, DistributedSampler) for sampler in self._samplers
        )

    def _resume_on_other_world_size(self) -> None:
        before, now, rank = len(self._saved), self._trainer.world_size, self._trainer.global_rank
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        continues = self._saved[0]["shared_order"] and self._shares_one_order()
        # its steps are the same for any number of processes
        keeps_steps = all(isinstance(sampler.index_sampler, LengthBatchSampler) for sampler in self._samplers)
        steps, repeated = (progress.processed, 0) if keeps_steps else divmod(progress.processed * before, now)
        ahead = steps - progress.processed if self._samplers and (now == 1 or self._shares_one_order()) else 0
        lines = ["dropout and other random numbers of some processes"]
        lines += ["the order of batches, so that rows of this epoch repeat and others are left out"] * (
            progress.processed > 0 and not continues and bool(self._samplers)
        )
        lines += [f"{repeated} batches of this epoch, a second time"] * (continues and repeated > 0)
        lines += ["means of this epoch, of what is left of it"] * (progress.processed > 0)
        for count in ("ready", "started", "processed", "completed"):
            setattr(progress, count, getattr(progress, count) + ahead)
        rank_zero_warn(
            f"ExactResume: the checkpoint was written by {before} processes, this run has {now}. Drawn anew: "
            + "; ".join(lines)
        )
        if rank >= before:
            seed_random_state(derived_seed(self._seed, rank))


def _is_stateful(loader: object) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _describe(loader: object) -> str:
    return f"the {type(loader.dataset).__name__}" if isinstance(loader, DataLoader) else f"a {type(loader).__name__}"


class _ResumableSampler:
    """Replace a DataLoader's sampler with one that has its own random state and starts at the first batch not yet done.

    The sampler is replaced inside the loader, since other objects hold the loader itself.

    Args:
        loader: a loader over a map-style data set.
        seed: returns the seed of this process; a generator that the user gave to the loader overrides it.
        position: returns the epoch and how many of its batches have been trained on, infinite for all.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: Callable[[], int], position: Callable[[], tuple[int, float]]
    ) -> None:
        self._loader = loader
        self._slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._inner: Any = getattr(loader, self._slot)
        self._given = loader.generator
        given = [g for g in (loader.generator, *_generators(self._inner)) if g is not None]
        first_seed = given[0].initial_seed() if given else None
        self._seed = seed if first_seed is None else lambda: first_seed
        self._position = position
        own = Generator() if loader.generator is None else loader.generator  # it seeds the workers
        loader.generator = own
        self._reseeded = {id(generator): generator for generator in (own, *given)}.values()
        # DataLoader.__setattr__ rejects another sampler, since a running iteration would ignore it
        object.__setattr__(loader, self._slot, self)

    @property
    def index_sampler(self) -> Any:
        """Return the sampler of item indices, or the user's batch sampler."""
        return self._inner.sampler if type(self._inner) is BatchSampler else self._inner

    def release(self) -> None:
        """Restore the loader's own sampler."""
        object.__setattr__(self._loader, self._slot, self._inner)
        self._loader.generator = self._given

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        self._reseed()  # the loader draws the seeds of its workers before the first batch
        return self._batches()

    def _reseed(self) -> tuple[int, float]:
        """Seed all generators for the current epoch; return the seed and the number of batches to skip."""
        epoch, skipped = self._position()
        cycle = 0
        if isinstance(skipped, int) and hasattr(self._inner, "__len__"):
            cycle, skipped = divmod(skipped, max(1, len(self._inner)))  # a shorter loader beside others starts over
        seed = derived_seed(self._seed(), epoch, cycle)
        for generator in self._reseeded:
            generator.manual_seed(seed)
        for sampler in (self._inner, getattr(self._inner, "sampler", None)):
            if set_epoch := getattr(sampler, "set_epoch", None):
                set_epoch(epoch)  # the Trainer calls it only after workers have got their first batches
        return seed, skipped

    def _batches(self) -> Iterator[Any]:
        seed, skipped = self._reseed()
        if skipped == math.inf:
            return
        stream = RandomStream(seed)
        with stream.drawing():
            batches = iter(self._inner)
            batch = next(batches, self)
        while batch is not self:
            if skipped == 0:
                yield batch
            skipped = max(0, skipped - 1)
            if type(self.index_sampler) in _DRAW_AT_THE_START:
                batch = next(batches, self)
            else:
                with stream.drawing():
                    batch = next(batches, self)


def _is_map_style(loader: object) -> bool:
    """Return whether batches of ``loader`` can be skipped without loading them."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _generators(sampler: Any) -> Iterable[Generator | None]:
    for owner in (sampler, getattr(sampler, "sampler", None)):
        generator = getattr(owner, "generator", None)
        yield generator if isinstance(generator, Generator) else None
