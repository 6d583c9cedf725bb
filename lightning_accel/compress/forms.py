"""The plain forms of a model that any smaller one is held to, and the latency of all, measured side by side."""

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lightning_accel.compress.calls import Inputs, Run, first_line, first_rows, num_rows, smallest_call
from lightning_accel.compress.latency import Stopwatch, ties
from lightning_accel.compress.macs import count_macs
from lightning_accel.compress.progress import Progress
from lightning_accel.compress.quant_form import Compiled
from lightning_accel.compress.report import Row, count_parameters
from lightning_accel.ops.names import list_of_names

MAX_REPEATS = 2  # of what is too close to call


def plain_forms(module: nn.Module, compiled: bool = True) -> dict[str, Run]:
    """``module`` as it is, compiled, and both in bfloat16, by the names of their rows in a report.

    Each takes what ``module`` takes and returns the same, in the same dtypes. What cannot be compiled fails when it is
    first called.
    """
    forms: dict[str, Run] = {"fp32 eager": module, "bf16 eager": InBfloat16(module)}
    if compiled:
        forms["fp32 compiled"] = Compiled(copy.deepcopy(module))
        forms["bf16 compiled"] = Compiled(InBfloat16(module))
    return forms


class InBfloat16(nn.Module):
    """A copy of ``module`` in bfloat16 that takes and returns floats."""

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
    plain: Mapping[str, Run] | None = None,
    batches: Sequence[int] | None = None,
    seconds: float = 0.5,
    contenders: Collection[str] = (),
    progress: Progress | None = None,
) -> dict[str, Row]:
    """Latency of ``module``, of its plain forms and of ``forms``, side by side, at batch 1 and at the user's batch.

    A form that cannot run has a row that says so, and no latency. Where the rows of a call cannot be taken apart, as
    the nodes of graphs, the whole call is measured alone.

    Args:
        module: the float one, in evaluation mode.
        inputs: positional and keyword arguments of one call, on the device of ``module``.
        forms: others, by name; each takes what ``module`` takes.
        plain: what :func:`plain_forms` makes of ``module``, if it has been called already.
        batches: rows of a batch; by default 1, and as many as ``inputs`` have.
        seconds: of measurement for each form and batch.
        contenders: names of forms whose fastest at the last batch is to be known: those that are too close to call are
            measured again, at most twice.
        progress: tells what is being done.

    Returns:
        Rows by name: latencies and notes of all, and of the plain ones parameters and multiply-accumulates too.
    """
    contenders = list_of_names(contenders)
    plain = plain_forms(module) if plain is None else plain
    runs = {**plain, **(forms or {})}
    progress = Progress(None) if progress is None else progress
    parameters, nonzero = count_parameters(module.parameters())
    smallest = smallest_call(module, inputs)
    macs = count_macs(module, *smallest).total // num_rows(smallest)
    rows = {name: Row(name, parameters, nonzero, macs=macs) if name in plain else Row(name) for name in runs}
    sizes = list(dict.fromkeys(batches if batches is not None else (1, num_rows(inputs))))
    if num_rows(smallest) > 1:
        sizes = [num_rows(inputs)]
    for batch in sizes:
        calls = _running(runs, rows, first_rows(inputs, batch), batch, progress)
        progress(f"measures {len(calls)} forms at batch {batch}, {seconds:g} s each")
        stopwatch = Stopwatch(calls)
        stopwatch.run(seconds)
        for _ in range(MAX_REPEATS if batch == sizes[-1] else 0):
            close = ties(stopwatch.latencies(), [name for name in contenders if name in calls])
            if len(close) > 1:
                progress(f"measures {', '.join(close)} again: too close to call")
                stopwatch.run(seconds, names=close)
        for name, latency in stopwatch.latencies().items():
            rows[name] = rows[name]._replace(latencies={**rows[name].latencies, batch: latency})
    return rows


def _running(
    runs: Mapping[str, Run], rows: dict[str, Row], inputs: Inputs, batch: int, progress: Progress
) -> dict[str, Run]:
    """Call each form once; those that fail get a note in ``rows``, and are left out from then on."""
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
