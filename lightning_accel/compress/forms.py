"""The plain forms of a model that any smaller one is held to, and the latency of all, measured in turns."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lightning_accel.compress.calls import Inputs, Run, first_line, first_rows, num_rows
from lightning_accel.compress.latency import measure_latency
from lightning_accel.compress.macs import count_macs
from lightning_accel.compress.quant_form import Compiled
from lightning_accel.compress.report import Row, count_parameters


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
) -> dict[str, Row]:
    """Latency of ``module``, of its plain forms and of ``forms``, all in turns, at batch 1 and at the user's batch.

    A form that cannot run has a row that says so, and no latency.

    Args:
        module: the float one, in evaluation mode.
        inputs: positional and keyword arguments of one call, on the device of ``module``.
        forms: others, by name; each takes what ``module`` takes.
        plain: what :func:`plain_forms` makes of ``module``, if it has been called already.
        batches: rows of a batch; by default 1, and as many as ``inputs`` have.
        seconds: of measurement for each form and batch.

    Returns:
        Rows by name: latencies and notes of all, and of the plain ones parameters and multiply-accumulates too.
    """
    plain = plain_forms(module) if plain is None else plain
    runs = {**plain, **(forms or {})}
    parameters, nonzero = count_parameters(module.parameters())
    macs = count_macs(module, *first_rows(inputs, 1)).total
    rows = {name: Row(name, parameters, nonzero, macs=macs) if name in plain else Row(name) for name in runs}
    sizes = dict.fromkeys(batches if batches is not None else (1, num_rows(inputs)))
    for batch in sizes:
        args, kwargs = first_rows(inputs, batch)
        calls: dict[str, Run] = {}
        for name, run in runs.items():
            if rows[name].note:
                continue
            calls[name] = partial(run, *args, **kwargs)
            try:
                with torch.inference_mode():
                    calls[name]()
            except Exception as error:
                del calls[name]
                rows[name] = rows[name]._replace(note=f"cannot run: {first_line(error)}")
        for name, latency in measure_latency(calls, seconds).items():
            rows[name] = rows[name]._replace(latencies={**rows[name].latencies, batch: latency})
    return rows


def _cast(source: torch.dtype, target: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(target) if value.dtype == source else value
