"""Private names of Lightning that the package stands on."""

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.plugins import LayerSync, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.optim import Optimizer

# ---- modules


def has_trainer(module: L.LightningModule) -> bool:
    """Return whether ``module`` is in a Trainer; the public property raises, or wraps Fabric's."""
    return module._trainer is not None


def is_compiled(module: L.LightningModule) -> bool:
    """Return whether ``from_compiled`` replaced the steps of ``module``; ``to_uncompiled`` raises if it did not."""
    return module._compiler_ctx is not None


def forget_metric_names(module: L.LightningModule) -> None:
    """Empty the cache of metrics' names, keyed by identity, which a copy of ``module`` takes along unseen."""
    module._metric_attributes = None


def set_device(module: L.LightningModule, device: Any) -> None:
    """Set what ``module.device`` returns; ``to`` would move the tensors as well."""
    module._device = device


# ---- callbacks and loggers


def should_stop_early(callback: EarlyStopping, value: Tensor) -> tuple[bool, str | None]:
    """Return whether ``value`` ends the run, and why; the public hooks read it from the Trainer's metrics."""
    return callback._evaluate_stopping_criteria(value)


def averaged_model(callback: Any) -> Any:
    """Return the average that a weight-averaging callback holds, None before its setup; it has no public name."""
    return callback._average_model


def last_saved_step(keeper: ModelCheckpoint) -> int:
    """Return the step of the newest checkpoint, which the callback's state does not have."""
    return keeper._last_global_step_saved


def set_last_saved_step(keeper: ModelCheckpoint, step: int) -> None:
    """Set the step of the newest checkpoint, at which the callback writes no second one; it has no public setter."""
    keeper._last_global_step_saved = step


def requeue_path(trainer: Trainer) -> str:
    """Return the file that Lightning's handler of Slurm's requeue signal would write now."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def count_queued_files() -> None:
    """Let ModelCheckpoint's public ``file_exists``, by which it chooses names, ask the CheckpointIO first.

    A plug-in with a method ``will_exist`` says whether a file that it has not written, or removed, yet will be there.
    The method is replaced for all of them, since a CheckpointIO does not know the callbacks of its Trainer.
    """
    found = ModelCheckpoint.file_exists
    if getattr(found, "counts_queued_files", False):
        return

    @functools.wraps(found)
    def file_exists(self: ModelCheckpoint, filepath: Any, trainer: Any) -> bool:
        will_exist = getattr(trainer.strategy.checkpoint_io, "will_exist", None)
        if will_exist is None:
            return found(self, filepath, trainer)
        exists = False
        if trainer.is_global_zero:
            queued = will_exist(filepath)
            exists = self._fs.exists(filepath) if queued is None else queued
        return bool(trainer.strategy.reduce_boolean_decision(exists, all=False))

    file_exists.counts_queued_files = True  # type: ignore[attr-defined]
    ModelCheckpoint.file_exists = file_exists  # type: ignore[method-assign]


def finish_other_saves() -> None:
    """Let the public ``Trainer.save_checkpoint`` return when the file is there, unless a ModelCheckpoint calls it.

    A CheckpointIO that writes in the background has a method ``finish``, which all processes call. ModelCheckpoint
    needs no file at once, and anything else may read it, such as Ray's callback, which reports it. The callers are told
    apart in ModelCheckpoint's ``_save_checkpoint``, since a CheckpointIO does not know who calls it.
    """
    save, save_of_keeper = Trainer.save_checkpoint, ModelCheckpoint._save_checkpoint
    if getattr(save, "finishes", False):
        return
    of_keeper = threading.local()

    @functools.wraps(save_of_keeper)
    def _save_checkpoint(self: ModelCheckpoint, trainer: Any, filepath: str) -> None:
        before = getattr(of_keeper, "depth", 0)
        of_keeper.depth = before + 1
        try:
            save_of_keeper(self, trainer, filepath)
        finally:
            of_keeper.depth = before

    @functools.wraps(save)
    def save_checkpoint(self: Trainer, *arguments: Any, **options: Any) -> None:
        save(self, *arguments, **options)
        finish = getattr(self.strategy.checkpoint_io, "finish", None)
        if finish is not None and not getattr(of_keeper, "depth", 0):
            finish(None if self.state.status == TrainerStatus.INTERRUPTED else self.strategy)  # others may be gone

    save_checkpoint.finishes = True  # type: ignore[attr-defined]
    Trainer.save_checkpoint, ModelCheckpoint._save_checkpoint = save_checkpoint, _save_checkpoint  # type: ignore[method-assign]


def last_saved_file(keeper: ModelCheckpoint) -> str:
    """Return the newest checkpoint of any kind; ``best_model_path`` and ``last_model_path`` are other ones."""
    return keeper._last_checkpoint_saved


def set_last_saved_file(keeper: ModelCheckpoint, path: str) -> None:
    """Set the newest checkpoint, to which ``last.ckpt`` becomes a link; it has no public setter."""
    keeper._last_checkpoint_saved = path


def waits_for_validation(keeper: ModelCheckpoint) -> bool:
    """Return whether a save was put off until the next validation, which the callback's state does not have."""
    return keeper._defer_save_until_validation


def set_waits_for_validation(keeper: ModelCheckpoint, waits: bool) -> None:
    """Set whether a save was put off until the next validation; it has no public setter."""
    keeper._defer_save_until_validation = waits


def save_last(keeper: ModelCheckpoint, trainer: L.Trainer) -> None:
    """Write ``last.ckpt`` alone; the public hooks save the best checkpoints first."""
    keeper._save_last_checkpoint(trainer, keeper._monitor_candidates(trainer))


def given_version(logger: Any) -> int | str | None:
    """Return the version that a logger has so far, None if free; its public property would choose one."""
    version: int | str | None = logger._version
    return version


def set_version(logger: Any, version: int) -> None:
    """Set the version of a logger, which is public only when it is made."""
    logger._version = version


def copy_into(logger: Any, folder: str) -> Any:
    """Return a copy of a logger of files that writes to ``folder``, which is public only when it is made."""
    copied = copy.copy(logger)
    copied._save_dir = copied._root_dir = folder
    copied._experiment = None
    return copied


# ---- the Trainer, its command line and its strategy


def leave_subcommand_empty(cli: Any, subcommand: str) -> None:
    """Note that a subcommand takes no arguments of its method, as LightningCLI notes them for each parser unseen."""
    cli._subcommand_method_arguments[subcommand] = []


def set_default_folder(trainer: L.Trainer, folder: str) -> None:
    """Set what ``trainer.default_root_dir`` returns, which is public only when the Trainer is made."""
    trainer._default_root_dir = folder  # type: ignore[attr-defined]  # set by a connector


def distributes_samples_by_default(trainer: L.Trainer) -> bool:
    """Return the Trainer's flag ``use_distributed_sampler``, which it keeps in a private connector."""
    flag: bool = getattr(getattr(trainer, "_accelerator_connector", None), "use_distributed_sampler", True)
    return flag


def logger_connector(trainer: L.Trainer) -> Any:
    """Return the connector that holds logged metrics and writes their rows; the Trainer shows only merged metrics."""
    return trainer._logger_connector


def timeout_of(strategy: Any) -> timedelta | None:
    """Return the time after which a strategy's processes stop waiting, which is public only when it is made."""
    timeout: timedelta | None = strategy._timeout
    return timeout


def saves_sharded(strategy: Any) -> bool:
    """Return whether a strategy of Lightning's writes sharded checkpoints, which is public only when it is made."""
    if isinstance(strategy, FSDPStrategy):
        return bool(strategy._state_dict_type == "sharded")
    return isinstance(strategy, DeepSpeedStrategy) or bool(getattr(strategy, "_save_distributed_checkpoint", False))


def starts_scripts(strategy: Any) -> bool:
    """Return whether each process of a strategy runs the whole script, not a spawned function; no public name tells."""
    return getattr(strategy, "_start_method", "popen") == "popen"


def layer_sync_of(strategy: Any) -> LayerSync | None:
    """Return the LayerSync plug-in, which the Trainer gives a strategy by this private name alone."""
    sync: LayerSync | None = strategy._layer_sync
    return sync


def leave_layer_sync_out(strategy: Any) -> None:
    """Take the LayerSync plug-in from a strategy, for which there is no public way after the Trainer has given it."""
    strategy._layer_sync = None


def call_step_hooks(precision: Precision, module: L.LightningModule, optimizer: Optimizer) -> None:
    """Call ``on_before_optimizer_step`` and clip gradients; ``optimizer_step`` does so within the step alone."""
    precision._after_closure(module, optimizer)


# ---- loops: what a resumed fit reads and sets is private in all of them


def data_source_of(loop: Any) -> Any:
    """Return the source of a loop's loaders: the only place of loaders that were passed to a method of the Trainer."""
    return loop._data_source


def combined_loader_of(loop: Any) -> Any:
    """Return the CombinedLoader of a fit, None before its setup; the Trainer shows only what it combines."""
    return loop._combined_loader


def data_fetcher_of(loop: Any) -> Any:
    """Return the iterator over batches of a fit, None before its setup; no public name leads to it."""
    return loop._data_fetcher


def repeat_batches(loop: Any, is_wanted: Callable[[Any], bool], number: int) -> None:
    """Let the first epoch of a fit have ``number`` batches that are wanted, repeated; loops make their iterators."""
    fetcher = loop._data_fetcher
    begun: Iterator[Any] = fetcher.iterator
    end: Any = object()
    for batch, *_ in getattr(fetcher, "batches", ()):  # fetched already
        is_wanted(batch)

    def batches() -> Iterator[Any]:
        while (batch := next(begun, end)) is not end:  # a for-loop would begin anew
            if is_wanted(batch[0]):
                yield batch
        has_more = True
        while has_more:
            has_more = False
            for batch in iter(fetcher.combined_loader):
                if is_wanted(batch[0]):
                    has_more = True
                    yield batch

    fetcher.iterator, fetcher.length, fetcher.done = batches(), None, False
    loop.max_batches = max(loop.max_batches, number)


def restore_loaders(loop: Any) -> bool:
    """Give loaders the states of the checkpoint that wait for them, and return whether there were any."""
    waiting = bool(loop._combined_loader_states_to_load)
    if waiting:
        loop._load_combined_loader_states()
    return waiting


def results_of(loop: Any) -> Any:
    """Return the running sums of what is logged, by key; the Trainer shows only their means."""
    return loop._results


def has_logged_outputs(loop: Any) -> bool:
    """Return whether a validation has metrics that its end has not handed out; no public name tells."""
    return bool(loop._logged_outputs)


def seen_batches_of(loop: Any) -> dict[int, int]:
    """Return the table itself of batches seen per loader, which numbers the steps of logged metrics."""
    seen: dict[int, int] = loop._seen_batches_per_dataloader
    return seen


def has_read_all_batches(epoch_loop: Any) -> bool:
    """Return whether the last batch of the epoch was reached; ``done`` is True at max_steps, too."""
    reached: bool = epoch_loop._num_ready_batches_reached()
    return reached


def begin_without_restart(*loops: Any) -> None:
    """Make loops keep their counters, which they reset when restarting; ``restarting`` resets more when set."""
    for loop in loops:
        loop._restarting = False


def restart_within_epoch(loop: Any) -> None:
    """Make the next epoch one whose first hooks were called already; ``update_restart_stage`` guesses from counters."""
    loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH


def end_restart(loop: Any, keeps_iterator: bool) -> None:
    """Make further epochs ordinary ones; with ``keeps_iterator`` the first takes the loaders' iteration as it is."""
    loop._loaded_from_state_dict, loop._resuming_from_checkpoint = False, keeps_iterator


def skip_next_validation(epoch_loop: Any) -> None:
    """Skip the validation that is due, which was run before the checkpoint; only a constructor of its own sets it."""
    epoch_loop._skip_next_val = True


@contextlib.contextmanager
def in_step_before(epoch_loop: Any) -> Iterator[None]:
    """Give rows that are logged while open the number of the step before, as Lightning does at ends of epochs."""
    epoch_loop._batches_that_stepped -= 1
    yield
    epoch_loop._batches_that_stepped += 1


def set_first_batch(connector: Any, is_first: bool | None) -> None:
    """Set whether logging is in the first batch of the loop, None outside of batches; only a batch's start sets it."""
    connector._first_loop_iter = is_first


def logged_hook(connector: Any) -> str | None:
    """Return the hook whose metrics are logged at the moment, after whose change Lightning empties them."""
    hook: str | None = connector._current_fx
    return hook


def set_logged_hook(connector: Any, hook: str | None) -> None:
    """Set the hook whose metrics are logged at the moment; only hooks that log set it."""
    connector._current_fx = hook


FIGURES = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")  # of a connector; properties of them merge


def forward_value_of(result: Any) -> Any:
    """Return the value of the last step of a running sum, which its public ``compute`` does not give."""
    return result._forward_cache


def make_result(
    options: Mapping[str, Any],
    reduction: Callable[..., Any],
    reduce: Callable[..., Any],
    sync: Mapping[str, Any],
    is_tensor: bool,
) -> Any:
    """Make an empty running sum as ``log`` makes it, whose classes have no public names."""
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

    meta = _Metadata(**options, reduce_fx=reduction)
    meta.sync = _Sync(fn=reduce, **sync)
    return _ResultMetric(meta, is_tensor)


def ddp_options(strategy: DDPStrategy) -> dict[str, Any]:
    """Return the arguments that ``strategy`` will give to DistributedDataParallel; its constructor alone takes them."""
    return strategy._ddp_kwargs


# ---- progress bars


def omit_unknown_epochs(trainer: Trainer) -> None:
    """Leave the last epoch out of the bar of a run that steps or time end, where RichProgressBar writes ``/-2``."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, RichProgressBar):  # max_epochs may be None until the fit makes it -1
        describe = bar._get_train_description
        bar._get_train_description = lambda current_epoch: describe(current_epoch).replace("/-2", "")  # type: ignore[method-assign]
