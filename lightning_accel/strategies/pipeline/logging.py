"""Logged values and metrics of a step, sent from the last stage to all stages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_accel._private.others import set_update_count
from lightning_accel.strategies.batch_splitting import RecordedLog
from lightning_accel.strategies.pipeline.engine import Pipeline
from lightning_accel.strategies.pipeline.stage import materialize, to_cpu


class StepLog:
    """Record calls of ``self.log`` in the micro-batches of one step, and repeat them, once, on every stage.

    Metrics are made equal on all stages, too, since only the last stage updates them.

    Args:
        module: module whose calls are recorded.
        metrics: metrics by their names in the module.
        pipeline: the stages.
    """

    def __init__(self, module: pl.LightningModule, metrics: dict[str, Metric], pipeline: Pipeline) -> None:
        self.module = module
        self.metrics = metrics
        self.pipeline = pipeline
        self.log = RecordedLog()
        self.before = {name: _progress(metric) for name, metric in metrics.items()}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of one micro-batch on one stage."""
        self.module.log = self.log.recorder()  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.module.log

    def share(self, result: Any, numbers: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Repeat the calls on every stage; return what the last stage passed, an object and scalar tensors."""
        ranks, last = self.pipeline.ranks, self.pipeline.ranks.world_rank(self.pipeline.last)
        payload: list[Any] = [None]
        values = numbers
        if self.pipeline.on_last:
            calls, logged = self._merge_calls()
            states = {name: _state_changes(metric, self.before[name]) for name, metric in self._updated().items()}
            values = numbers + logged
            payload = [(calls, states, result, [one.dtype for one in values])]
        dist.broadcast_object_list(payload, src=last, group=ranks.objects)
        calls, states, result, dtypes = payload[0]
        wide = torch.float32 if ranks.device.type == "mps" else torch.float64
        row = torch.empty(len(dtypes), dtype=wide, device=ranks.device)
        if self.pipeline.on_last and values:
            row = torch.stack([one.detach().to(row) for one in values])
        if dtypes:
            dist.broadcast(row, src=last, group=ranks.group)
        if not self.pipeline.on_last:
            for name, state in states.items():
                _apply_state(self.metrics[name], *state)
        values = [one.to(dtype) for one, dtype in zip(row, dtypes, strict=True)]
        self._repeat(calls, values[len(numbers) :])
        return result, values[: len(numbers)]

    def _merge_calls(self) -> tuple[list[dict[str, Any]], list[Tensor]]:
        """Merge the calls of all micro-batches; return them and the logged numbers, in order."""
        names = {id(metric): name for name, metric in self.metrics.items()}
        for calls in self.log.parts:
            for call in calls.values():
                call["value"] = materialize(call["value"])
        merged, numbers = self.log.merged(self.pipeline.ranks.device), []
        for call in merged:
            value = call.pop("value")
            if isinstance(value, Metric):
                call["value"] = names[id(value)]
            else:
                numbers.append(value)
        return merged, numbers

    def _repeat(self, calls: list[dict[str, Any]], numbers: list[Tensor]) -> None:
        coming = iter(numbers)
        for call in calls:
            name = call.pop("value", None)
            self.module.log(value=next(coming) if name is None else self.metrics[name], **call)

    def _updated(self) -> dict[str, Metric]:
        for module in self.module.modules():
            if isinstance(module, MetricCollection):
                list(module.items(copy_state=False))  # metrics of a compute group share states once read
        return {name: one for name, one in self.metrics.items() if one.update_count != self.before[name][0]}


def _progress(metric: Metric) -> tuple[int, dict[str, int]]:
    """Return how often a metric was updated, and the lengths of its list states."""
    lengths = {key: len(value) for key, value in metric.metric_state.items() if isinstance(value, list)}
    return metric.update_count, lengths


def _state_changes(metric: Metric, before: tuple[int, dict[str, int]]) -> tuple[int, dict[str, Any]]:
    """Return the update count and the changed states that :func:`_apply_state` applies elsewhere."""
    state = {
        key: (min(before[1][key], len(value)), to_cpu(value[before[1][key] :]))
        if isinstance(value, list)
        else to_cpu(value)
        for key, value in metric.metric_state.items()
    }
    return metric.update_count, state


def _apply_state(metric: Metric, update_count: int, state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, tuple):
            kept, added = value
            setattr(metric, key, [*getattr(metric, key)[:kept], *[one.to(metric.device) for one in added]])
        else:
            setattr(metric, key, value.to(metric.device))
    set_update_count(metric, update_count)
