"""Baseline forms of a model, compiled and in bfloat16, and latency measurements of all forms."""

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_accel._private.torch import tree_map_only
from lightning_accel.compress.calls import Inputs, Run, first_line, first_samples, num_samples, smallest_call
from lightning_accel.compress.quantization.form import Compiled
from lightning_accel.compress.report.latency import Stopwatch, ties
from lightning_accel.compress.report.macs import count_macs
from lightning_accel.compress.report.progress import Progress
from lightning_accel.compress.report.report import Row, count_parameters
from lightning_accel.ops.names import list_of_names

PLAIN = ("fp32 eager", "bf16 eager", "fp32 compiled", "bf16 compiled")
MAX_REPEATS = 2  # further measurements of forms that are tied


def plain_forms(module: nn.Module, compiled: bool = True) -> dict[str, Run]:
    """Return ``module``, a compiled copy, and both in bfloat16, by their row names in a report.

    Each takes the inputs of ``module`` and returns its outputs, in the same dtypes. A form that cannot be compiled
    fails at its first call.
    """
    forms: dict[str, Run] = {"fp32 eager": module, "bf16 eager": InBfloat16(module)}
    if compiled:
        forms["fp32 compiled"] = Compiled(copy.deepcopy(module))
        forms["bf16 compiled"] = Compiled(InBfloat16(module))
    return forms


class InBfloat16(nn.Module):
    """Run a copy of ``module`` in bfloat16 that takes and returns float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).to(torch.bfloat16)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, partial(_cast, torch.float32, torch.bfloat16), (args, kwargs))
        return tree_map_only(torch.Tensor, partial(_cast, torch.bfloat16, torch.float32), self.module(*args, **kwargs))


def measure_forms(
    module: nn.Module,
    inputs: Inputs,
    forms: Mapping[str, Run] | None = None,
    *,
    batches: Sequence[int] | None = None,
    seconds: float = 0.5,
    contenders: Collection[str] = (),
    progress: Progress | None = None,
) -> dict[str, Row]:
    """Measure the latency of forms of ``module`` together, at batch size 1 and that of ``inputs``.

    A form that cannot run gets a row with a note and no latency. If the samples of a call cannot be separated, such as
    the nodes of graphs, only the whole call is measured.

    Args:
        module: the floating-point module, in evaluation mode.
        inputs: positional and keyword arguments of a call, on the device of ``module``.
        forms: forms by name, which take the inputs of ``module``; by default those of :func:`plain_forms`.
        batches: batch sizes; by default 1 and that of ``inputs``.
        seconds: measurement time per form and batch size.
        contenders: names of forms of which the fastest is needed: ties among them are measured again, at most twice.
        progress: reporter of progress.

    Returns:
        Rows by name: latencies and notes of all forms; for those of :func:`plain_forms` also parameters and
        multiply-accumulates.
    """
    contenders = list_of_names(contenders)
    runs = plain_forms(module) if forms is None else forms
    progress = Progress(None) if progress is None else progress
    parameters, nonzero = count_parameters(module.parameters())
    smallest = smallest_call(module, inputs)
    macs = count_macs(module, *smallest).total // num_samples(smallest)
    rows = {name: Row(name, parameters, nonzero, macs=macs) if name in PLAIN else Row(name) for name in runs}
    sizes = list(dict.fromkeys(batches if batches is not None else (1, num_samples(inputs))))
    if num_samples(smallest) > 1:
        sizes = [num_samples(inputs)]
    for batch in sizes:
        calls = _call_all(runs, rows, first_samples(inputs, batch), batch, progress)
        progress(f"measures {len(calls)} forms at batch {batch}, {seconds:g} s each")
        stopwatch = Stopwatch(calls)
        stopwatch.run(seconds)
        for _ in range(MAX_REPEATS):
            close = ties(stopwatch.latencies(), [name for name in contenders if name in calls])
            if len(close) > 1:
                progress(f"measures {', '.join(close)} again: too close to call")
                stopwatch.run(seconds, names=close)
        for name, latency in stopwatch.latencies().items():
            rows[name] = rows[name]._replace(latencies={**rows[name].latencies, batch: latency})
    return rows


def _call_all(
    runs: Mapping[str, Run], rows: dict[str, Row], inputs: Inputs, batch: int, progress: Progress
) -> dict[str, Run]:
    """Call each form once and return those that run; others get a note in ``rows`` and are not tried again."""
    args, kwargs = inputs
    calls: dict[str, Run] = {}
    for name, run in runs.items():
        if rows[name].note:
            continue
        progress(f"runs {name} at batch {batch}", if_slow=True)
        try:
            with torch.inference_mode():
                run(*args, **kwargs)
        except Exception as error:
            note = f"cannot run at batch {batch}: {first_line(error)}"
            rows[name] = rows[name]._replace(note=note, status="failed")
        else:
            calls[name] = partial(run, *args, **kwargs)
    return calls


def _cast(source: torch.dtype, target: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(target) if value.dtype == source else value
