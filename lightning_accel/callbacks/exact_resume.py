"""A run that is killed and resumed ends with the bits of one that never was."""

import math
import warnings
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, initial_seed
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_accel.callbacks.epoch_order import EpochOrder, can_be_entered_anywhere
from lightning_accel.callbacks.random_state import derived_seed, random_state, seed_random_state, set_random_state
from lightning_accel.data.length_sampler import LengthBatchSampler
from lightning_accel.data.samplers import ResumableLoader, progress_of
from lightning_accel.nn import ContrastiveDivergence
from lightning_accel.strategies.batch_samplers import require_dealable_batches
from lightning_accel.strategies.rank_states import RankStates


class ExactResume(L.Callback):
    """Make a resumed run go on as if it had not been stopped, for any module, strategy and map-style DataLoader.

    A checkpoint holds the states of every process's random generators (torch, CUDA, NumPy, Python), and of the
    :class:`~lightning_accel.nn.ContrastiveDivergence` that are attributes of the module, so dropout and sampling go on
    bit for bit, on a processor of the same kind with as many threads: other kernels round otherwise. A resumed epoch
    begins with the first batch that was not trained on; earlier ones are left out without being loaded. For that the
    order of batches becomes a function of the seed and the epoch, and validation leaves the generators as it found
    them. Processes that train on different rows draw different numbers, for dropout say, where Lightning has all of
    them draw the same once a seed is set. With this callback a run draws other numbers than without it, and the same
    ones whether or not it was stopped.

    Loaders with a ``state_dict`` of their own (this package's data modules) keep their position themselves. An
    iterable dataset without one starts anew, which a warning says. Random numbers that a dataset draws in worker
    processes are drawn anew in the rest of a resumed epoch; those drawn with ``num_workers=0`` go on.

    On another number of processes the order goes on, to whole steps of all of them, and a warning says what is drawn
    anew.
    """

    def __init__(self) -> None:
        self._seed = 0
        self._saved: list[dict[str, Any]] = []  # by rank
        self._ranks = RankStates()
        self._orders: list[EpochOrder] = []
        self._entered_at: int | None = None
        self._before_validation: dict[str, Any] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer = trainer  # in other stages, too, which read checkpoints
        if stage != "fit":
            return
        require_dealable_batches(trainer)
        self._seed, self._saved = initial_seed(), []
        # Methods of the strategy, which are public, stand where no hook of a callback does: between a loader and its
        # first iteration, and after every other on_train_start.
        trainer.strategy.process_dataloader = self._process_dataloader  # type: ignore[method-assign]
        trainer.strategy.on_train_start = self._on_train_start  # type: ignore[method-assign]

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for order in self._orders:
            order.release()
        self._orders = []
        for name in ("process_dataloader", "on_train_start"):
            vars(trainer.strategy).pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        generators = self._before_validation or random_state()
        mine = {"seed": self._seed, "generators": generators, "shared_order": self._shares_one_order()}
        if samplings := self._samplings():
            mine["samplings"] = [one.state_dict() for one in samplings]
        return {"ranks": self._ranks.gather(mine, self._trainer) or [mine]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["ranks"]
        self._seed = self._saved[min(self._trainer.global_rank, len(self._saved) - 1)]["seed"]

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._before_validation = random_state()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._before_validation is not None:  # a run that resumes after the last batch of an epoch leaves it out
            set_random_state(self._before_validation)
            self._before_validation = None

    def _process_dataloader(self, dataloader: object) -> object:
        strategy = self._trainer.strategy
        loader = type(strategy).process_dataloader(strategy, dataloader)
        if self._trainer.training and isinstance(loader, ResumableLoader) and loader.progress is None:
            loader.progress = progress_of(self._trainer)
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if self._trainer.training and not stateful:
            if can_be_entered_anywhere(loader):
                self._orders.append(EpochOrder(loader, lambda: self._seed, self._position))  # type: ignore[arg-type]
                return loader
            rank_zero_warn(
                f"ExactResume: a run resumed within an epoch starts {_described(loader)} from its beginning, since it "
                "has no indices. Give the loader state_dict() and load_state_dict(), or save at ends of epochs only"
            )
        if isinstance(loader, DataLoader) and loader.generator is None:  # its iterators draw from the global one
            loader.generator = Generator().manual_seed(self._seed)
        return loader

    def _position(self) -> tuple[int, float]:
        """The epoch that runs or is about to, and how many of its batches are done; infinite for all of them."""
        loop = self._trainer.fit_loop
        done = _current(loop.epoch_loop.batch_progress).processed if self._entered_at is None else self._entered_at
        # Where validation does not fall on the end of an epoch, a loop that resumes there would ask for a batch more.
        return _current(loop.epoch_progress).processed, done if done < self._trainer.num_training_batches else math.inf

    def _on_train_start(self) -> None:
        strategy, loop = self._trainer.strategy, self._trainer.fit_loop
        type(strategy).on_train_start(strategy)
        if not loop.is_resuming:
            self._part_noise()
            return
        self._correct_counters()
        if not self._saved:
            rank_zero_warn(
                "ExactResume: the checkpoint was written without this callback. The order of batches and all random "
                "draws differ from those of the run that wrote it"
            )
        elif len(self._saved) != self._trainer.world_size:
            self._spread_over_other_processes()
        self._start_loaders_again()
        if len(self._saved) > self._trainer.global_rank:
            mine = self._saved[self._trainer.global_rank]
            set_random_state(mine["generators"])
            if len(self._saved) == self._trainer.world_size:  # else chains begin anew
                for sampling, state in zip(self._samplings(), mine.get("samplings", []), strict=False):
                    sampling.load_state_dict(state, self._trainer.lightning_module.device)
        self._saved = []

    def _part_noise(self) -> None:
        """Let processes that train on different rows draw different numbers; those that share rows draw the same."""
        deal = self._trainer.distributed_sampler_kwargs
        if deal and deal["rank"]:
            seed_random_state(derived_seed(self._seed, deal["rank"]))

    def _correct_counters(self) -> None:
        loop = self._trainer.fit_loop
        batches, epochs = loop.epoch_loop, loop.epoch_progress
        done = _current(batches.batch_progress).processed
        if loop.restarted_on_epoch_end:  # with max_steps: the loop ends the epoch a second time, and counts it twice
            _count_back(epochs, "processed")
        elif 0 < done < self._trainer.num_training_batches and _current(epochs).completed == _current(epochs).started:
            # saved after a fit that max_steps ended within an epoch: the loop would enter the next one in its middle
            _count_back(epochs, "processed", "completed")
            loop.update_restart_stage()
        if loop.restarted_mid_epoch and batches.restarted_on_train_batch_end and batches.batch_progress.is_last_batch:
            loop.reset_restart_stage()  # saved after the last batch: the loop would begin an epoch without its hooks

    def _start_loaders_again(self) -> None:
        """Begin the epoch's iteration anew, now that the Trainer's counters are restored and corrected.

        The Trainer begins it earlier: before a checkpoint is read where a scheduler asks for the number of steps, so
        that it never gives loaders the state that it saved for them.
        """
        loop = self._trainer.fit_loop
        assert loop._combined_loader is not None  # no public name leads to the loaders' iteration
        late = loop._combined_loader_states_to_load
        if late:
            loop._load_combined_loader_states()
        if late or len(self._orders) == len(loop._combined_loader.flattened):
            assert loop._data_fetcher is not None
            done = _current(loop.epoch_loop.batch_progress).processed
            within = done < self._trainer.num_training_batches or loop.restarted_on_epoch_end
            self._entered_at = done if loop.restarting and within else 0
            iter(loop._data_fetcher)
            self._entered_at = None  # from here on the loop's own count is right
            warnings.filterwarnings("ignore", message=".*dataloader is not resumable", category=UserWarning)

    def _samplings(self) -> list[ContrastiveDivergence]:
        """Attributes of the module and its parts, whose chains and generators nothing else would keep."""
        parts = self._trainer.lightning_module.modules()
        values = [value for part in parts for value in vars(part).values()]
        return [value for value in values if isinstance(value, ContrastiveDivergence)]

    def _shares_one_order(self) -> bool:
        """Whether all processes take their rows from one order, the same for any number of them."""
        return bool(self._orders) and all(isinstance(order.rows, DistributedSampler) for order in self._orders)

    def _spread_over_other_processes(self) -> None:
        before, now, rank = len(self._saved), self._trainer.world_size, self._trainer.global_rank
        progress = _current(self._trainer.fit_loop.epoch_loop.batch_progress)
        goes_on = self._saved[0]["shared_order"] and self._shares_one_order()
        keeps_steps = all(isinstance(order.rows, LengthBatchSampler) for order in self._orders)  # whoever shares them
        steps, repeated = (progress.processed, 0) if keeps_steps else divmod(progress.processed * before, now)
        ahead = steps - progress.processed if self._orders and (now == 1 or self._shares_one_order()) else 0
        lines = ["dropout and other random numbers of some processes"]
        lines += ["the order of batches, so that rows of this epoch repeat and others are left out"] * (
            progress.processed > 0 and not goes_on and bool(self._orders)
        )
        lines += [f"{repeated} batches of this epoch, a second time"] * (goes_on and repeated > 0)
        for count in ("ready", "started", "processed", "completed"):
            setattr(progress, count, getattr(progress, count) + ahead)
        rank_zero_warn(
            f"ExactResume: the checkpoint was written by {before} processes, this run has {now}. Drawn anew: "
            + "; ".join(lines)
        )
        if rank >= before:
            seed_random_state(derived_seed(self._seed, rank))


def _described(loader: object) -> str:
    return f"the {type(loader.dataset).__name__}" if isinstance(loader, DataLoader) else f"a {type(loader).__name__}"


def _count_back(progress: Any, *counts: str) -> None:
    for counter in (progress.current, progress.total):  # by the totals the loop tells at which stage it was stopped
        for count in counts:
            setattr(counter, count, getattr(counter, count) - 1)


def _current(progress: Any) -> Any:
    """Counters of the epoch, or of its batches; which there are is known at run time."""
    return progress.current
