"""Continuation of a stopped fit, starting with what remained to do when its checkpoint was written."""

import os
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging

from lightning_accel._private.lightning import (
    begin_without_restart,
    combined_loader_of,
    data_fetcher_of,
    end_restart,
    has_logged_outputs,
    has_read_all_batches,
    in_step_before,
    last_saved_file,
    last_saved_step,
    logger_connector,
    restart_within_epoch,
    save_last,
    set_first_batch,
    set_last_saved_file,
    set_last_saved_step,
    set_waits_for_validation,
    skip_next_validation,
    waits_for_validation,
)
from lightning_accel.callbacks.trainer_callbacks import callbacks_of

Moment = Literal["between epochs", "within a batch", "batch end", "validation", "validation end", "epoch end"]


def moment_of(trainer: L.Trainer) -> Moment:
    """Return the part of a fit that its counters are in, whether it runs or was restored from a checkpoint."""
    loop: Any = trainer.fit_loop
    epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
    if epochs.ready != epochs.started or not epochs.ready:
        return "between epochs"
    if epochs.processed == epochs.started:
        return "between epochs" if epochs.completed == epochs.processed else "epoch end"
    if not batches.ready == batches.started == batches.processed or not batches.ready:
        return "within a batch"
    if batches.completed < batches.processed:
        return "batch end"
    validation = loop.epoch_loop.val_loop
    seen = validation.batch_progress
    is_whole = seen.is_last_batch and 0 < seen.current.ready == seen.current.completed
    return "validation end" if is_whole and not has_logged_outputs(validation) else "validation"


class ModelCheckpointState:
    """Save what Lightning's ModelCheckpoint omits from its state, and let each callback finish when resumed."""

    def __init__(self) -> None:
        self._files: dict[str, set[str]] = {}  # of each callback, when its state was last saved

    def state_dict(self, trainer: L.Trainer) -> dict[str, Any]:
        states = {}
        named = {os.path.realpath(trainer.ckpt_path)} if trainer.ckpt_path else set()  # the user's file is kept
        for keeper in callbacks_of(trainer, ModelCheckpoint):
            files = _files_of(keeper)
            states[keeper.state_key] = {
                "dirpath": keeper.dirpath,
                "current_score": keeper.current_score,
                "last_step": last_saved_step(keeper),
                "last_file": last_saved_file(keeper),
                "waits_for_validation": waits_for_validation(keeper),
                # Lightning removes them once the new file is written
                "superseded": sorted(self._files.get(keeper.state_key, set()) - files - named),
            }
            self._files[keeper.state_key] = files
        return states

    def load_state_dict(self, states: dict[str, Any], trainer: L.Trainer) -> None:
        for keeper in callbacks_of(trainer, ModelCheckpoint):
            state = states.get(keeper.state_key)
            if state is None:
                continue
            keeper.current_score = state["current_score"]
            set_last_saved_step(keeper, state["last_step"])
            set_waits_for_validation(keeper, state["waits_for_validation"])
            if state["dirpath"] == keeper.dirpath:
                set_last_saved_file(keeper, state["last_file"])
                for file in state["superseded"]:
                    if Path(keeper.dirpath or "") in Path(file).parents:
                        trainer.strategy.remove_checkpoint(file)
            self._files[keeper.state_key] = _files_of(keeper)

    def finish(self, trainer: L.Trainer, hook: str, *arguments: Any, ckpt_path: str) -> None:
        """Run ``hook`` of the ModelCheckpoint callbacks that had not run it yet.

        The one that wrote the checkpoint ``ckpt_path`` gets the state that it has after writing, and then performs its
        last action: writing ``last.ckpt``.
        """
        module = trainer.lightning_module
        for keeper in callbacks_of(trainer, ModelCheckpoint):
            if os.path.realpath(ckpt_path) not in map(os.path.realpath, _files_of(keeper)):
                getattr(keeper, hook)(trainer, module, *arguments)
                continue
            set_last_saved_step(keeper, trainer.global_step)
            set_last_saved_file(keeper, ckpt_path)
            if os.path.realpath(ckpt_path) != os.path.realpath(keeper.last_model_path):
                save_last(keeper, trainer)


class ResumedFit:
    """Continue a fit from its checkpoint, in place of Lightning's ``fit_loop.run``.

    Lightning's own method skips what remained between the checkpoint and the next batch: the metrics row of that step,
    a validation that was due, the remaining callbacks, plateau schedulers at the end of the epoch; and it may assign
    wrong steps to all further rows. Here counters stay as they were saved, and the functions that Lightning would have
    called complete the interrupted iteration.

    Args:
        trainer: the Trainer with restored counters.
        moment: when the checkpoint was written.
        kept: state of the ModelCheckpoint callbacks at that moment.
    """

    def __init__(self, trainer: L.Trainer, moment: Moment, kept: ModelCheckpointState) -> None:
        self.trainer = trainer
        self.moment = moment
        self.kept = kept
        self.loop: Any = trainer.fit_loop
        self.batches: Any = self.loop.epoch_loop
        self.ckpt_path = str(trainer.ckpt_path)
        self._continues_epoch = moment != "between epochs"  # the fit continues within an epoch
        self._has_read = False

    def run(self) -> None:
        """Run the rest of the fit; :meth:`restore_counters` must be called after all hooks of the start."""
        loop = self.loop
        loop.setup_data()
        if loop.max_batches == 0 or self.trainer.limit_train_batches == 0:
            return
        if self.moment == "between epochs":
            if loop.done:
                return
            self._continues_epoch = self._had_ended_within_an_epoch()
        torch.set_grad_enabled(True)
        loop.on_run_start()
        begin_without_restart(loop, self.batches, self.batches.val_loop)
        if self._continues_epoch:
            self._set_up_epoch_again()
        if self.moment == "epoch end" and self.batches.done:
            self._finish_epoch()
        elif self._continues_epoch:
            self._run_rest_of_epoch()
            loop.on_advance_end()
        end_restart(loop, self._has_begun_next_epoch())
        while not loop.done:
            try:
                loop.on_advance_start()
                loop.advance()
                loop.on_advance_end()
            except StopIteration:
                break
            finally:
                loop.on_iteration_done()
        loop.on_run_end()

    def _had_ended_within_an_epoch(self) -> bool:
        """Return whether max_steps or a callback had ended the fit before the last batch of an epoch."""
        epochs, progress = self.loop.epoch_progress.current, self.batches.batch_progress.current
        return progress.ready > 0 and epochs.started == epochs.ready and not has_read_all_batches(self.batches)

    @property
    def is_mid_epoch(self) -> bool:
        """Return whether batches of the epoch have been trained on and others remain."""
        return self._continues_epoch and self.batches.batch_progress.current.processed > 0 and not self.batches.done

    def restore_counters(self) -> None:
        """Restore the counters of the epoch, or before the next; undo an interrupted batch or validation."""
        epochs, progress = self.loop.epoch_progress, self.batches.batch_progress
        if not self._continues_epoch:
            _reset_to_completed(epochs)
        elif self.moment == "epoch end":
            _subtract_one(epochs, "processed")
            epochs.current.completed = epochs.current.processed  # the start of the loop has advanced it
        elif self.moment == "between epochs":
            _subtract_one(epochs, "processed", "completed")
        elif self.moment == "within a batch":
            _reset_to_completed(progress)
            self.batches.scheduler_progress.reset_on_restart()
            self.batches.automatic_optimization.optim_progress.reset_on_restart()
        elif self.moment == "validation":
            seen = self.batches.val_loop.batch_progress
            for name, count in vars(seen.current).items():
                setattr(seen.total, name, getattr(seen.total, name) - count)

    def _set_up_epoch_again(self) -> None:
        """Call ``on_train_epoch_start`` of callbacks that set up there what no checkpoint restores."""
        trainer = self.trainer
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        for callback in callbacks_of(trainer, L.Callback):
            if isinstance(callback, StochasticWeightAveraging) and trainer.current_epoch > callback.swa_end:
                raise ValueError(
                    "StochasticWeightAveraging: the checkpoint was written within the epoch that measures the "
                    "statistics of batch norms after training, which cannot be entered in its midst. Resume from an "
                    "earlier one, or take EMAWeightAveraging"
                )
            if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
                callback.on_train_epoch_start(trainer, trainer.lightning_module)
        for group, rate in zip(groups, rates, strict=True):  # a new scheduler sets the rate of its first step
            group["lr"] = rate

    def _run_rest_of_epoch(self) -> None:
        loop, batches, fetcher = self.loop, self.batches, data_fetcher_of(self.loop)
        restart_within_epoch(loop)  # hooks of the epoch's start were called already
        loop.on_advance_start()
        loop.reset_restart_stage()
        batches.on_run_start(fetcher)
        ready = batches.batch_progress.current.ready
        set_first_batch(logger_connector(self.trainer), ready == 1 if ready else None)
        if self.moment == "batch end":
            self._finish_batch()
            batches.on_advance_end(fetcher)
        elif self.moment == "validation":
            batches.on_advance_end(fetcher)
        elif self.moment == "validation end":
            self.trainer.validating = True
            self.kept.finish(self.trainer, "on_validation_end", ckpt_path=self.ckpt_path)
            self.trainer.training = True
            skip_next_validation(batches)
            batches.on_advance_end(fetcher)
        while not batches.done:
            try:
                self._has_read = True
                batches.advance(fetcher)
                batches.on_advance_end(fetcher)
            except StopIteration:
                break
            finally:
                batches.on_iteration_done()

    def _finish_batch(self) -> None:
        connector = logger_connector(self.trainer)
        number = self.batches.batch_idx
        self.kept.finish(self.trainer, "on_train_batch_end", None, None, number, ckpt_path=self.ckpt_path)
        connector.on_batch_end()
        self.batches.batch_progress.increment_completed()
        connector.update_train_step_metrics()

    def _finish_epoch(self) -> None:
        """Complete ``fit_loop.on_advance_end`` from the point where callbacks save at the end of the epoch."""
        loop, batches, connector = self.loop, self.batches, logger_connector(self.trainer)
        loop.epoch_progress.increment_processed()
        self.kept.finish(self.trainer, "on_train_epoch_end", ckpt_path=self.ckpt_path)
        connector.on_epoch_end()
        if has_read_all_batches(batches):
            batches.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        with in_step_before(batches):
            connector.update_train_epoch_metrics()
        loop.epoch_progress.increment_completed()

    def _has_begun_next_epoch(self) -> bool:
        """Return whether the loaders' iteration is already that of the next epoch, with nothing of this one remaining.

        A loader without a length is read to its end before the last batch is trained on; if it restores its position
        itself, the first iteration after that is the next epoch's.
        """
        fetcher = data_fetcher_of(self.loop)
        loaders = combined_loader_of(self.loop).flattened
        is_stateful = any(hasattr(loader, "load_state_dict") for loader in loaders)
        return is_stateful and fetcher.length is None and not self._has_read


def _reset_to_completed(progress: Any) -> None:
    for counter in (progress.current, progress.total):  # Lightning's reset_on_restart does not reset totals
        counter.ready = counter.started = counter.processed = counter.completed


def _subtract_one(progress: Any, *counts: str) -> None:
    for counter in (progress.current, progress.total):
        for count in counts:
            setattr(counter, count, getattr(counter, count) - 1)


def _files_of(keeper: ModelCheckpoint) -> set[str]:
    return {*keeper.best_k_models, keeper.best_model_path, keeper.last_model_path} - {""}
