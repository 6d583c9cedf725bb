"""Checks of config values that fit their types but cannot work, before training starts."""

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import lightning as L
from jsonargparse import Namespace
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.lr_scheduler import LRScheduler

from lightning_accel.callbacks.trainer_callbacks import callbacks_of
from lightning_accel.cli.errors import UsageError, import_class, nearest, not_options

_LARGEST_RATE = 1e6  # for learning rates, decays and loss weights; values in use reach about 10
_RATES = ("lr", "weight_decay", "eta_min", "eta_max", "base_lr", "momentum", "eps", "gamma", "factor")
# 0 would divide by zero in mid-run
_COUNTS = ("accumulate_grad_batches", "check_val_every_n_epoch", "step_size", "val_check_interval")
_LOWEST = {"patience": 0, "cooldown": 0, "num_sanity_val_steps": -1}
_LARGEST_SEED = 2**32 - 1  # of NumPy
_LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "export": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
_SECTIONS = ("model", "data", "optimizer", "lr_scheduler", "trainer")


def require_valid_values(config: Namespace) -> None:
    """Reject numbers that are not finite, absurdly large rates, and strategies that do not exist.

    Args:
        config: the parsed options of a subcommand.

    Raises:
        UsageError: naming the option, its value and what to give.
    """
    for section in _SECTIONS:
        for place, value in _numbers(config.get(section), section):
            name = re.sub(r"\[\d+\]", "", place).rpartition(".")[2]
            if not math.isfinite(value):
                raise UsageError(f"{place}: expected a finite number; got {value}")
            is_rate = name in _RATES or name.endswith(("_lr", "_rate", "_weight"))
            if is_rate and not 0 <= value <= _LARGEST_RATE:
                raise UsageError(f"{place}: expected a number from 0 to {_LARGEST_RATE:g}; got {value:g}")
            if name in _COUNTS and value <= 0:
                raise UsageError(f"{place}: expected more than 0; got {value}")
            lowest = _LOWEST.get(name, -math.inf) if section in ("lr_scheduler", "trainer") else -math.inf
            if value < lowest:
                raise UsageError(f"{place}: expected {lowest} or more; got {value}")
    every = config.get("trainer.log_every_n_steps")
    if every is not None and every < 0:
        raise UsageError(f"trainer.log_every_n_steps: expected 0, which logs nothing, or more; got {every}")
    clip = config.get("trainer.gradient_clip_val")
    if clip is not None and clip < 0:
        raise UsageError(f"trainer.gradient_clip_val: expected 0, which clips nothing, or more; got {clip}")
    strategy = config.get("trainer.strategy")
    known = [*StrategyRegistry.available_strategies(), "auto"]
    if isinstance(strategy, str) and strategy.lower() not in known:
        ours = ", ".join(sorted(name for name in known if name.startswith("accel_")))
        hint = nearest(strategy, known)
        raise UsageError(
            f"trainer.strategy: no strategy {strategy!r}{hint}\nOurs are: {ours}; Lightning's: ddp, fsdp, ..."
        )


def require_seed(seed: int | bool | None) -> None:
    """Reject a seed that NumPy does not take.

    Raises:
        UsageError: with the range of seeds.
    """
    if seed is not None and not 0 <= seed <= _LARGEST_SEED:
        raise UsageError(f"seed_everything: expected an int from 0 to {_LARGEST_SEED}; got {seed}")


def require_groups(config: Namespace) -> None:
    """Reject a single value where the argument of a class is a group of options, which the parser lets pass.

    Raises:
        UsageError: with the options of the group.
    """
    for section in _SECTIONS:
        _require_groups(config.get(section), section)


def _require_groups(value: Any, place: str) -> None:
    if isinstance(value, list):
        for number, part in enumerate(value):
            _require_groups(part, f"{place}[{number}]")
    elif isinstance(value, Namespace) and "class_path" in value:
        cls, arguments = import_class(value.class_path), vars(value.get("init_args") or Namespace())
        for name, parameter in inspect.signature(cls).parameters.items():
            part = arguments.get(name)
            if is_dataclass(parameter.default) and part is not None and not isinstance(part, Namespace):
                raise UsageError(not_options(f"{place}.{name}", part, cls))
            _require_groups(part, f"{place}.{name}")


def require_data(subcommand: str | None, model: L.LightningModule, data: L.LightningDataModule | None) -> None:
    """Reject a run without data: no ``--data``, and a model that makes no loader itself.

    Raises:
        UsageError: with how to give data.
    """
    loader = _LOADERS.get(subcommand or "")
    if loader is not None and data is None and not is_overridden(loader, model):
        raise UsageError(
            f"no data: {type(model).__name__} has no {loader}(); give a datamodule, such as --data DigitsDataModule, "
            "or your own, as in --data my_file.MyData"
        )


def require_even_processes(trainer: L.Trainer) -> None:
    """Reject a launcher that starts other processes than those to which Lightning's DDPStrategy deals rows.

    Raises:
        UsageError: with both numbers.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    rows = getattr(type(trainer.strategy), "distributed_sampler_kwargs", None)
    expected = trainer.num_nodes * trainer.num_devices
    if rows is not DDPStrategy.distributed_sampler_kwargs or not isinstance(environment, ClusterEnvironment):
        return
    if environment.creates_processes_externally and trainer.world_size != expected:
        raise UsageError(
            f"{trainer.world_size} processes were started, but rows would be dealt to {expected}: the Trainer has "
            f"num_nodes={trainer.num_nodes} and devices={trainer.num_devices}. Start as many on each machine, or take "
            "accel_ddp, accel_fsdp2 or accel_pipeline, which take what was started"
        )


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    """Yield each number of a nested config with the name of its option."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(part, place if key in ("init_args", "dict_kwargs") else f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _numbers(part, f"{place}[{number}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, value


def report_unused_schedule(scheduler: LRScheduler, steps: float, interval: str) -> None:
    """Report a schedule that is much longer than the run.

    Args:
        scheduler: the scheduler, whose length is its ``total_steps``, ``T_max`` or ``total_iters``.
        steps: how often the run steps it.
        interval: ``epoch`` or ``step``.
    """
    lengths = {name: getattr(scheduler, name, None) for name in ("total_steps", "T_max", "total_iters")}
    name, total = next(((name, total) for name, total in lengths.items() if isinstance(total, int)), ("", 0))
    if 0 < steps < 0.9 * total:  # -1 means unknown
        rank_zero_info(
            f"{type(scheduler).__name__} is planned for {total} of its lr_interval, {interval!r}, and the run takes "
            f"{steps:.0f}: the learning rate goes through the first {100 * steps / total:.0f} % of its schedule alone. "
            f"Give the scheduler the length of the run, in {name} or epochs, if that is not what you want"
        )


class MonitorCheck(L.Callback):
    """Reject callbacks that monitor a validation metric which no validation logs, after the sanity check.

    Raises:
        UsageError: with the nearest name that is logged.
    """

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logged = list(trainer.callback_metrics)
        stages = tuple({_stage(name) for name in logged if re.search("[/_]", name)})  # val of val/loss
        for asker, monitor in _monitors(trainer):
            if not logged or monitor in logged:
                continue
            # train/loss is similar to val/loss and may be logged later: the stage must be similar, too
            is_misspelt = nearest(monitor, logged) and nearest(_stage(monitor), [_stage(name) for name in logged])
            if monitor.startswith(stages) or is_misspelt:
                raise UsageError(
                    f"{asker} monitors {monitor!r}, which validation does not log{nearest(monitor, logged)}\n"
                    f"It logs: {', '.join(sorted(logged))}"
                )


def _stage(name: str) -> str:
    return re.split("[/_]", name)[0]


def _monitors(trainer: L.Trainer) -> Iterator[tuple[str, str]]:
    """Yield the name of each object that requires a logged metric, and the metric."""
    for callback in callbacks_of(trainer, L.Callback):
        monitor = callback.monitor if isinstance(callback, EarlyStopping | ModelCheckpoint) else None
        if monitor is not None and getattr(callback, "strict", True):
            yield type(callback).__name__, monitor
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor is not None and config.strict:
            yield type(config.scheduler).__name__, config.monitor
