"""Logged values of a run within an epoch, in a form that checkpoints can hold."""

import builtins
import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_accel._private.lightning import (
    FIGURES,
    forward_value_of,
    logged_hook,
    logger_connector,
    make_result,
    results_of,
    set_logged_hook,
)
from lightning_accel._private.others import set_forward_value, set_update_count
from lightning_accel._private.torch import tree_map

_OPTIONS = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


def write_metrics_atomically(trainer: L.Trainer) -> None:
    """Make CSVLoggers replace their file atomically when columns are added, so that a kill never leaves it empty."""
    for logger in trainer.loggers:
        if not isinstance(logger, CSVLogger) or not trainer.is_global_zero or "://" in str(logger.log_dir):
            continue
        if type(logger.experiment) is ExperimentWriter:
            logger.experiment.__class__ = _AtomicWriter


class _AtomicWriter(ExperimentWriter):
    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        """Write the rows so far under the header ``fieldnames``; Lightning's method empties the file first."""
        path = Path(self.metrics_file_path)
        partial = path.with_name(f".{path.name}.partial")
        with path.open(newline="") as old, partial.open("w", newline="") as new:
            writer = csv.DictWriter(new, fieldnames=fieldnames)
            writer.writeheader()
            writer.writerows(csv.DictReader(old))
        os.replace(partial, path)


def logged_state(trainer: L.Trainer, in_validation: bool) -> dict[str, Any]:
    """Return this process's running sums of the epoch, states of the module's metrics, and latest values.

    Args:
        trainer: a Trainer between the steps of a fit.
        in_validation: whether a validation runs; its sums and metrics are omitted, since Lightning resets them after
            it.
    """
    connector = logger_connector(trainer)
    loop: Any = trainer.fit_loop.epoch_loop
    of_validation = results_of(loop.val_loop).values() if in_validation else ()
    own = {id(each.value) for each in of_validation if not each.is_tensor}
    return {
        "hook": None if in_validation else logged_hook(connector),
        "figures": {name: _copy_to_cpu(getattr(connector, name)) for name in FIGURES},
        "sums": {key: _sum_state(each) for key, each in results_of(loop).items() if _can_be_saved(each)},
        "metrics": {
            name: _metric_state(metric)
            for name, metric in _metrics_of(trainer.lightning_module)
            if metric.update_count and id(metric) not in own
        },
    }


def set_logged_state(trainer: L.Trainer, state: dict[str, Any]) -> None:
    """Restore ``state``, a :func:`logged_state` of the process of this rank."""
    connector = logger_connector(trainer)
    device = trainer.strategy.root_device
    set_logged_hook(connector, state["hook"])
    for name, figures in state["figures"].items():
        setattr(connector, name, dict(figures))
    metrics = dict(_metrics_of(trainer.lightning_module))
    for name, of_metric in state["metrics"].items():
        if name in metrics:
            _restore_metric(metrics[name], of_metric)
    results = results_of(trainer.fit_loop.epoch_loop)
    results.clear()
    for key, one in state["sums"].items():
        if one["is_tensor"] or one["options"]["metric_attribute"] in metrics:
            results[key] = _restored_sum(one, trainer, metrics).to(device)


def _metrics_of(module: L.LightningModule) -> Iterator[tuple[str, Metric]]:
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.items(copy_state=False)  # metrics of one compute group share states only after being read
    return ((name, part) for name, part in module.named_modules() if isinstance(part, Metric))


def _metric_state(metric: Metric) -> dict[str, Any]:
    return {"update_count": metric.update_count, "state": tree_map(_copy_to_cpu, metric.metric_state)}


def _restore_metric(metric: Metric, state: dict[str, Any]) -> None:
    for name, value in state["state"].items():
        setattr(metric, name, tree_map(lambda one: one.to(metric.device) if isinstance(one, Tensor) else one, value))
    set_update_count(metric, state["update_count"])


def _can_be_saved(one: Any) -> bool:
    return not one.has_reset and one.meta.sync.group is None  # process groups cannot be saved


def _sum_state(one: Any) -> dict[str, Any]:
    meta = one.meta
    state = {
        "is_tensor": one.is_tensor,
        "options": {name: getattr(meta, name) for name in _OPTIONS},
        "reduction": (meta.reduce_fx in (sum, min, max), meta.reduce_fx.__name__),
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only, "_op": meta.sync.op},
        "update_count": one.update_count,
        "last": _copy_to_cpu(forward_value_of(one)),
    }
    if one.is_tensor:
        state["value"] = _copy_to_cpu(one.value)
        if meta.is_mean_reduction:
            state["batch_size"] = _copy_to_cpu(torch.as_tensor(one.cumulated_batch_size))
    return state


def _restored_sum(state: dict[str, Any], trainer: L.Trainer, metrics: dict[str, Metric]) -> Any:
    is_builtin, name = state["reduction"]
    reduction = getattr(builtins if is_builtin else torch, name)
    one = make_result(state["options"], reduction, trainer.strategy.reduce, state["sync"], state["is_tensor"])
    one.value = state["value"] if state["is_tensor"] else metrics[state["options"]["metric_attribute"]]
    if "batch_size" in state:
        one.cumulated_batch_size = state["batch_size"]
    set_forward_value(one, state["last"])
    set_update_count(one, state["update_count"])
    return one


def _copy_to_cpu(value: Any) -> Any:
    """Return a copy on the CPU, since training changes the original while a checkpoint may still be written."""
    if isinstance(value, dict):
        return {name: _copy_to_cpu(each) for name, each in value.items()}
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
