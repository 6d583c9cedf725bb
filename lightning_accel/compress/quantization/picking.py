"""Choice of one form among those of a trial, by time and quality."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_accel.compress.calls import Inputs, device_of, smallest_call
from lightning_accel.compress.quantization.form import (
    Form,
)
from lightning_accel.compress.quantization.trial import EAGER, MAKERS, Trial
from lightning_accel.compress.report.forms import measure_forms
from lightning_accel.compress.report.latency import Latency, speedup, ties
from lightning_accel.compress.report.report import Layer, Report, Row, describe_layers

# From the simplest: weight-only forms have no integers between layers, and dynamic ones need no calibration
_SIMPLEST_FIRST = ("float", "weight_only", "dynamic", "static")
_SIMILAR = 1.05  # files within this factor count as equally large, and tied medians as equally fast


@dataclass
class Quantized(Form):
    """Hold the picked form, and the measurements of all forms.

    Attributes:
        report: rows of all forms; the note of one without latency has the reason.
        refused: reason by name, for forms that could not be made, or may not be picked.
        ties: forms that are not significantly slower or faster; of those whose median is within 5% of the fastest, the
            smallest file was picked, and of equally large files the simplest form.
        faster_float: a faster form without quantization, if ``mode`` or ``backend`` excluded it.
        deployed: name of the module within its parent.
        device: device of the module.
        picks: the form that would be picked if each batch size that was measured decided.
    """

    report: Report | None = field(default=None, repr=False)
    refused: Mapping[str, str] | None = field(default=None, repr=False)
    ties: Sequence[str] = ()
    faster_float: str | None = None
    deployed: str = ""
    device: str = "cpu"
    picks: Mapping[int, Form] = field(default_factory=dict)


class NothingPickedError(RuntimeError):
    """Report that no form could be picked; ``report`` has the measurements, and the reason for each form."""

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


def _float_row(name: str, device: torch.device) -> str:
    """Return the name of the float form of the runtime of form ``name``, or "" if it is one itself."""
    found = MAKERS[name].float_row if name in MAKERS else ""
    # On GPUs, other operations of torchao's forms are in bfloat16
    return "bf16 compiled" if found and device.type == "cuda" else found


def pick(trial: Trial, batch_sizes: Sequence[int] | None, seconds: float, timed: Inputs | None = None) -> Quantized:
    """Measure the forms on ``timed``, by default the first call, and pick the fastest of those that are wanted."""
    made, refused = trial.made, trial.refused
    candidates = [name for name in made if name in trial.wanted and name not in refused]
    rows = measure_forms(
        trial.module,
        trial.inputs[0] if timed is None else timed,
        {EAGER: trial.module} | {name: form.run for name, form in made.items()},
        batches=batch_sizes,
        seconds=seconds,
        contenders=candidates,
        progress=trial.progress,
    )
    refused.update({name: row.note for name, row in rows.items() if row.status == "failed"})
    picks: dict[int, Form] = {}
    latencies: dict[str, Latency] = {}
    close: list[str] = []
    chosen: str | None = None
    for size in dict.fromkeys(size for row in rows.values() for size in row.latencies):
        latencies = {name: row.latencies[size] for name, row in rows.items() if size in row.latencies}
        close = ties(latencies, [name for name in candidates if name in latencies and name not in refused])
        near = [name for name in close if latencies[name].p50_ms <= _SIMILAR * latencies[close[0]].p50_ms]
        chosen = min(near, key=lambda name: _preference(name, near, made), default=None)
        if chosen is not None:
            picks[size] = made[chosen]
    report = Report("quantization", device_of(trial.module))
    report.quality = quality_of(trial)
    for name in [*rows, *(name for name in refused if name not in rows)]:
        row = rows.get(name, Row(name, status="failed"))
        note = refused.get(name) or _note(made.get(name))
        if name in refused and row.status != "failed":
            row = row._replace(status="refused")
        elif name in close:
            row = row._replace(status="picked" if name == chosen else "tie")
        report.add(
            row._replace(
                file_bytes=made[name].file_bytes if name in made else None,
                metrics=trial.figures.get(name, {}),
                note=note,
                float_row=_float_row(name, report.device),
            )
        )
    if chosen is None:
        reasons = "; ".join(f"{name}: {refused[name]}" for name in trial.wanted)
        raise NothingPickedError(f"no form can be picked. {reasons}", report)
    form = made[chosen]
    report.layers = _layers(trial.module, trial.inputs[0], chosen, form)
    return Quantized(
        **form.__dict__,
        report=report,
        refused=refused,
        ties=[name for name in close if name != chosen],
        faster_float=_faster_float(chosen, latencies, refused),
        device=str(report.device),
        picks=picks,
    )


def quality_of(trial: Trial) -> tuple[str, bool] | None:
    """Return the metric that forms are compared by, and whether higher values are better; None if that is not known."""
    if trial.limit is not None and trial.limit.monitor is not None:
        return trial.limit.monitor, trial.limit.higher_is_better
    names = trial.figures.get(EAGER, {})
    known = (("perplexity", False), ("acc", True), ("loss", False))
    return next(((name, better) for part, better in known for name in names if part in name.lower()), None)


def _preference(name: str, close: Sequence[str], made: Mapping[str, Form]) -> tuple[bool, int, int]:
    """Return a sort key of tied forms: smallest files first, of those the simplest form, then the fastest median."""
    sizes = [size for other in close if (size := made[other].file_bytes) is not None]
    own = made[name].file_bytes
    is_large = own is None or own > _SIMILAR * min(sizes)
    return is_large, _SIMPLEST_FIRST.index(MAKERS[name].kind), 0 if name == close[0] else 1


def _faster_float(chosen: str, latencies: Mapping[str, Latency], refused: Mapping[str, str]) -> str | None:
    """Return the fastest float form that is not excluded and significantly faster than the picked form."""
    faster = [
        name
        for name in latencies
        if (name == EAGER or MAKERS[name].kind == "float")
        and name not in refused
        and speedup(latencies[name], latencies[chosen]).is_faster
    ]
    return min(faster, key=lambda name: latencies[name].p50_ms, default=None)


def _layers(module: nn.Module, inputs: Inputs, name: str, form: Form) -> list[Layer]:
    """Describe the layers of ``module`` in the dtypes that ``form`` computes them in."""
    found = []
    weights = {key: [w for w in one.parameters(recurse=False) if w.ndim > 1] for key, one in module.named_modules()}
    for layer in describe_layers(module, *smallest_call(module, inputs), notes=form.left_float):
        if MAKERS[name].float_row and weights[layer.name] and layer.name not in form.left_float:
            layer = layer._replace(dtype=name.split()[0])
        elif layer.dtype and name.startswith("bf16"):
            layer = layer._replace(dtype="bfloat16")
        found.append(layer)
    return found


def _note(form: Form | None) -> str:
    if form is None:
        return ""
    parts = [f"{len(form.left_float)} layers in float: {', '.join(form.left_float)}"] if form.left_float else []
    return "; ".join([*parts, *([f"no file: {form.no_file}"] if form.no_file else [])])
