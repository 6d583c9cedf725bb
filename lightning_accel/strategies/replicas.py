"""Replicas of a module on several devices of one process, and of its metrics."""

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import MethodType
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_accel._private.lightning import set_device
from lightning_accel._private.torch import buffers_of, children_of, parameters_of, replicate


class ReplicaMetric:
    """Stand for a metric in a replica, recording its updates to apply them to the metric afterwards."""

    def __init__(self, metric: Any, device: torch.device) -> None:
        self.metric = metric
        self.device = device
        self.updates: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.updates.append((args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Update, and return the value for these samples alone."""
        self.update(*args, **kwargs)
        alone = copy.deepcopy(self.metric).to(self.device)
        alone.reset()
        alone.update(*args, **kwargs)
        return alone.compute()

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.metric, name)

    def replay(self, device: torch.device) -> None:
        for args, kwargs in self.updates:
            args, kwargs = move_data_to_device((args, kwargs), device)
            self.metric.update(*args, **kwargs)


class Replica:
    """Copy ``module`` to ``device``, with its parameters or differentiable copies of them.

    Buffers are copied, and the copies discarded. Other attributes, and the objects they refer to, are shared.
    """

    def __init__(self, module: L.LightningModule, device: torch.device) -> None:
        self.metrics: list[ReplicaMetric] = []
        self._device = device
        self._copies: dict[int, Any] = {}  # by id of the original, so that shared parts stay shared
        self.module = self._copy_module(module)

    def _copy_module(self, module: nn.Module) -> Any:
        if id(module) not in self._copies:
            if isinstance(module, (Metric, MetricCollection)):
                self._copies[id(module)] = ReplicaMetric(module, self._device)
                self.metrics.append(self._copies[id(module)])
            else:
                self._copies[id(module)] = self._copy_layer(module)
        return self._copies[id(module)]

    def _copy_layer(self, module: nn.Module) -> nn.Module:
        replica: Any = replicate(module)
        if isinstance(module, L.LightningModule):
            set_device(replica, self._device)
        for name, value in list(vars(module).items()):
            if isinstance(value, MethodType) and value.__self__ is module:  # overrides the class's method
                vars(replica)[name] = MethodType(value.__func__, replica)
        for name, parameter in parameters_of(module).items():
            if parameter is None:
                parameters_of(replica)[name] = None
            else:  # a copy is no Parameter: its gradient flows to the original
                setattr(replica, name, self._copies.setdefault(id(parameter), parameter.to(self._device)))
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                buffer = self._copies.setdefault(id(buffer), buffer.detach().to(self._device, copy=True))
            buffers_of(replica)[name] = buffer
        for name, child in children_of(module).items():
            children_of(replica)[name] = None if child is None else self._copy_module(child)
        return replica


def run_in_threads(calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]) -> list[Any]:
    """Run each call in a thread of its own, under the caller's autocast and gradient modes, which are thread-local.

    Calls on the same device run one after another, so that they draw the same random numbers each time.

    Raises:
        BaseException: the exception of the first call that raised one.
    """
    modes = _ThreadModes(devices[0].type)
    results: list[Any] = [None] * len(calls)
    failures: dict[int, BaseException] = {}

    def run(number: int) -> None:
        try:
            with modes.enter(devices[number]):
                results[number] = calls[number]()
        except BaseException as failure:
            failures[number] = failure

    threads = [threading.Thread(target=run, args=(number,), name=f"replica {number}") for number in range(len(calls))]
    one_by_one = len(set(devices)) < len(devices)
    for thread in threads:
        thread.start()
        if one_by_one:
            thread.join()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return results


class _ThreadModes:
    """Capture torch's thread-local modes, to enter them in other threads."""

    def __init__(self, device_type: str) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.cache = torch.is_autocast_cache_enabled()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(("cpu", device_type))
        ]

    def enter(self, device: torch.device) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for kind, dtype, enabled in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype, enabled, self.cache))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        return stack
