"""Quantization of a module: creation, measurement and choice among forms for this machine."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import nn

from lightning_accel.compress.calls import Inputs, Run, device_of, first_line, smallest_call
from lightning_accel.compress.export.onnx import ONE_FILE
from lightning_accel.compress.export.structure import sort_keywords
from lightning_accel.compress.quantization.fake_quant import rank_layers
from lightning_accel.compress.quantization.form import (
    CannotConvertError,
    Form,
    describe_failure,
    nbytes_of,
    require_memory,
)
from lightning_accel.compress.quantization.inputs import noise_share
from lightning_accel.compress.quantization.layers import Layers, find_layers
from lightning_accel.compress.quantization.onnx import onnx_dynamic, onnx_float, onnx_static, sharing_export
from lightning_accel.compress.quantization.onnx_blockwise import onnx_int4, onnx_int8
from lightning_accel.compress.quantization.pt2e import (
    Ranges,
    compiled_bfloat16,
    compiled_float,
    pt2e_static,
    torchao_dynamic,
    torchao_float8,
    torchao_int4,
    torchao_weight_only,
)
from lightning_accel.compress.report.forms import measure_forms
from lightning_accel.compress.report.latency import Latency, speedup, ties
from lightning_accel.compress.report.progress import Progress
from lightning_accel.compress.report.report import Layer, Report, Row, describe_layers
from lightning_accel.ops.extras import require_module
from lightning_accel.ops.names import Exclusion, list_of_names, require_one_of
from lightning_accel.ops.renames import renamed_arguments

Mode: TypeAlias = Literal["auto", "static", "dynamic", "weight_only"]
Backend: TypeAlias = Literal["auto", "pt2e", "onnxruntime", "torchao", "inductor"]


class _Maker(NamedTuple):
    kind: str
    backend: str
    make: Callable[..., Form]
    devices: tuple[str, ...] = ("cpu",)
    files: tuple[str, ...] = ("pt2",)
    float_row: str = ""  # for a quantized form, the name of the float form of the same runtime
    copies: float = 2.0  # memory that is needed at most to make and run it, in multiples of the weights
    needs_limit: bool = False  # what it loses is more than rounding, so that somebody has to say how much it may be


_ANY = ("cpu", "cuda")


MAKERS = {
    "fp32 compiled": _Maker("float", "inductor", compiled_float, _ANY, ("pt2", "onnx"), copies=2.7),
    "bf16 compiled": _Maker("float", "inductor", compiled_bfloat16, _ANY, copies=1.3),
    "fp32 ONNX Runtime": _Maker("float", "onnxruntime", onnx_float, files=("onnx",)),
    "int8 PT2E static": _Maker("static", "pt2e", pt2e_static, float_row="fp32 compiled"),
    "int8 torchao dynamic": _Maker("dynamic", "torchao", torchao_dynamic, _ANY, float_row="fp32 compiled"),
    "int8 torchao weight-only": _Maker(
        "weight_only", "torchao", torchao_weight_only, _ANY, float_row="fp32 compiled", copies=5.5
    ),
    "int4 torchao weight-only": _Maker(
        "weight_only", "torchao", torchao_int4, ("cuda",), float_row="fp32 compiled", needs_limit=True
    ),
    "float8 torchao dynamic": _Maker("dynamic", "torchao", torchao_float8, ("cuda",), float_row="fp32 compiled"),
    "int8 ONNX Runtime static": _Maker(
        "static", "onnxruntime", onnx_static, files=("onnx",), float_row="fp32 ONNX Runtime"
    ),
    "int8 ONNX Runtime dynamic": _Maker(
        "dynamic", "onnxruntime", onnx_dynamic, files=("onnx",), float_row="fp32 ONNX Runtime"
    ),
    "int8 ONNX Runtime weight-only": _Maker(
        "weight_only", "onnxruntime", onnx_int8, files=("onnx",), float_row="fp32 ONNX Runtime"
    ),
    "int4 ONNX Runtime weight-only": _Maker(
        "weight_only", "onnxruntime", onnx_int4, files=("onnx",), float_row="fp32 ONNX Runtime", needs_limit=True
    ),
}
_COPIES_IN_ONE_FILE = 6.0  # of weights that an ONNX file holds beside its graph; larger ones stay outside of it
# From the simplest: weight-only forms have no integers between layers, and dynamic ones need no calibration
_SIMPLEST_FIRST = ("float", "weight_only", "dynamic", "static")
_SIMILAR = 1.05  # files within this factor count as equally large, and tied medians as equally fast
EAGER = "fp32 eager"


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


class Limit(NamedTuple):
    """Limit how much worse than the float module a form may be.

    Attributes:
        evaluate: function that returns the metrics of a form that runs in place of the module.
        monitor: name of the metric to compare.
        max_drop: largest deterioration of the metric, in its unit; None for any.
        higher_is_better: whether higher values of the metric are better.
    """

    evaluate: Callable[[Run], Mapping[str, float]]
    monitor: str | None = None
    max_drop: float | None = None
    higher_is_better: bool = True

    def drop(self, float_figures: Mapping[str, float], figures: Mapping[str, float]) -> float:
        """Return by how much the metric in ``figures`` is worse; infinity for NaN."""
        if self.monitor is None:
            return 0.0
        worse = float_figures[self.monitor] - figures[self.monitor]
        worse = worse if self.higher_is_better else -worse
        return math.inf if math.isnan(worse) else worse

    def allows(self, float_figures: Mapping[str, float], figures: Mapping[str, float]) -> bool:
        # Metrics are float32 means: a difference within their rounding is no drop
        return self.max_drop is None or self.drop(float_figures, figures) <= self.max_drop + 1e-7


@renamed_arguments(skip="exclude")
def quantize(
    module: nn.Module,
    inputs: Sequence[Inputs],
    mode: Mode = "auto",
    backend: Backend = "auto",
    *,
    exclude: Iterable[Exclusion] = (),
    limit: Limit | None = None,
    batch_sizes: Sequence[int] | None = None,
    seconds: float = 0.5,
    ranges: Ranges | None = None,
    file_format: str | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Make the forms of ``module`` that this machine can run, measure them, and pick the fastest.

    Compiled fp32 and bfloat16 are always measured, and are picked under ``mode="auto"`` if they are fastest. Int8 forms
    are also compared with the float form of their runtime. Forms are measured in turns, in blocks of repeated calls;
    one is faster only if its speedup is significant (its 98% interval excludes a tie). Ties are measured again, at most
    twice; of remaining ties within 5% of the fastest median, the smallest file is picked, and of equally large files
    the simplest form.

    Args:
        module: module in evaluation mode, on a CPU or GPU, which is not changed.
        inputs: calls, as positional and keyword arguments; input ranges are determined on all, latency on the first.
        mode: ``static`` fixes the input ranges of layers, ``dynamic`` computes them in each call, ``weight_only``
            rounds only weights, to 8 or 4 bits (in ONNX Runtime, whose products of these round inputs to 8 bits as they
            go), ``auto`` is any.
        backend: runtime: ``pt2e`` (torchao's graphs, compiled), ``torchao``, ``onnxruntime``, ``inductor`` (no int8),
            or ``auto`` for any. On GPUs, ``torchao`` and ``inductor``.
        exclude: layers to keep in float: names or patterns of them (``"head"``, ``"blocks.*"``), or classes.
        limit: metrics of forms, and how much worse they may be. If a static form is too bad, its most sensitive layers
            are kept in float until it is not. The form in 4 bits is picked only within a limit.
        batch_sizes: batch sizes to measure, by default 1 and that of the first input. The last one decides.
        seconds: measurement time per form and batch size.
        ranges: input ranges of layers, where training found them.
        file_format: ``pt2`` or ``onnx``, if the picked form must be written in that format.
        progress: reporter of progress.

    Raises:
        ValueError: if an option has an unknown value, no form has this mode and backend on this device, there are no
            inputs, or ``exclude`` matches no layer.
        ModuleNotFoundError: if a package of ``backend`` is missing.
        NothingPickedError: if no form of this mode and backend can be made, or none is within ``limit``, with the
            reasons; a RuntimeError.

    >>> quantize(nn.Linear(2, 3), [], mode="static")
    Traceback (most recent call last):
        ...
    ValueError: inputs are needed: at least one call of the module, as (args, kwargs)
    """
    trial = judge(
        module, inputs, mode, backend, exclude=exclude, limit=limit, ranges=ranges, file_format=file_format,
        progress=progress,
    )  # fmt: skip
    return pick(trial, batch_sizes, seconds)


def judge(
    module: nn.Module,
    inputs: Sequence[Inputs],
    mode: Mode = "auto",
    backend: Backend = "auto",
    *,
    exclude: Iterable[Exclusion] = (),
    limit: Limit | None = None,
    ranges: Ranges | None = None,
    file_format: str | None = None,
    progress: Progress | None = None,
) -> "Trial":
    """Make the forms of ``module`` that this machine can run, and refuse those that are not within ``limit``.

    Arguments and errors are those of :func:`quantize`.
    """
    device = device_of(module)
    require_form(mode, backend, device.type, file_format)
    if not inputs:
        raise ValueError("inputs are needed: at least one call of the module, as (args, kwargs)")
    exclude = list_of_names(exclude)
    layers = find_layers(module, exclude)
    inputs = [sort_keywords(module.forward, call) for call in inputs]
    is_limited = mode == "weight_only" or (limit is not None and limit.max_drop is not None)
    makers = {
        name: maker
        for name, maker in MAKERS.items()
        if device.type in maker.devices and (is_limited or not maker.needs_limit)
    }
    wanted = [name for name, maker in makers.items() if is_wanted(maker, mode, backend, file_format)]
    trial = Trial(module, inputs, wanted, limit, ranges, Progress(None) if progress is None else progress)
    with sharing_export():
        trial.make({name: layers for name in makers if name in wanted or is_compared(name, wanted)})
        trial.evaluate()
        trial.refuse_worse(wanted, exclude)
        trial.refuse_unlimited()
    return trial


@dataclass
class Trial:
    """Hold the forms that were made, their figures, and the reasons for those that may not be picked, by name.

    Attributes:
        wanted: names of the forms that ``mode`` and ``backend`` allow; others are made for comparison.
        sensitive: by form, the layers that stay in float to keep it within the limit, with the reason for each.
    """

    module: nn.Module
    inputs: Sequence[Inputs]
    wanted: Sequence[str]
    limit: Limit | None
    ranges: Ranges | None
    progress: Progress
    made: dict[str, Form] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Mapping[str, float]] = field(default_factory=dict)
    sensitive: dict[str, dict[str, str]] = field(default_factory=dict)

    def make(self, layers_of: Mapping[str, Layers]) -> None:
        """Make forms, by their names, of these layers.

        They stay in memory, so that those that may be picked come before those for comparison, the smallest first.
        """
        order = sorted(layers_of, key=lambda name: (name not in self.wanted, self._copies(name)))
        for number, name in enumerate(order, start=1):
            self.progress(f"form {number} of {len(order)}: {name}")
            try:
                form = self._make(name, layers_of[name])
                if self.limit is None or self.limit.max_drop is None:  # else limit.evaluate finds wrong outputs
                    require_similar_outputs(form, self.module, self.inputs[0])
                self.made[name] = form
            except Exception as error:  # exporters and compilers raise all kinds of exceptions
                self.refused[name] = describe_failure(error)
        for found in (self.made, self.refused):
            _sort_as_listed(found)

    def _copies(self, name: str) -> float:
        is_one_file = MAKERS[name].backend == "onnxruntime" and nbytes_of(self.module) <= ONE_FILE
        return _COPIES_IN_ONE_FILE if is_one_file else MAKERS[name].copies

    def _make(self, name: str, layers: Layers) -> Form:
        options = {"ranges": self.ranges} if MAKERS[name].kind == "static" else {}
        require_memory(self.module, self._copies(name))
        return MAKERS[name].make(self.module, self.inputs, layers, **options)

    def evaluate(self) -> None:
        if self.limit is None:
            return
        self.progress("validates fp32 eager")
        self.figures[EAGER] = self.limit.evaluate(self.module)
        if self.limit.monitor is not None and self.limit.monitor not in self.figures[EAGER]:
            known = ", ".join(self.figures[EAGER])
            raise ValueError(f"monitor={self.limit.monitor!r} is not logged in validation; what is: {known}")
        for name in list(self.made):
            self.progress(f"validates {name}", if_slow=True)
            try:
                self.figures[name] = self.limit.evaluate(self.made[name].run)
            except Exception as error:
                self.refused[name] = f"fails in validation: {first_line(error)}"
                del self.made[name]

    def refuse_worse(self, wanted: Sequence[str], exclude: Iterable[Exclusion]) -> None:
        """Refuse the forms that are not within the limit, unless a wanted static one is with layers in float."""
        for name in list(self.made):
            if self.limit is None or self.limit.allows(self.figures[EAGER], self.figures[name]):
                continue
            worse = self.limit.drop(self.figures[EAGER], self.figures[name])
            self.refused[name] = f"{self.limit.monitor} is {worse:.4g} worse"
            if name in wanted and MAKERS[name].kind == "static":
                self.progress(f"{name}: {self.refused[name]}; leaves layers in float")
                try:
                    self._keep_sensitive_in_float(name, exclude, self.limit)
                except Exception as error:
                    self.refused[name] += f", and with layers in float it fails: {describe_failure(error)}"

    def refuse_unlimited(self) -> None:
        """Refuse the forms that lose more than rounding where no limit says how much they may."""
        if self.limit is None or self.limit.max_drop is None:
            reason = "it is picked only within a limit on what it may lose: give max_drop"
            self.refused |= {name: reason for name in self.made if MAKERS[name].needs_limit}

    def _keep_sensitive_in_float(self, name: str, exclude: Iterable[Exclusion], limit: Limit) -> None:
        """Make the form with the fewest sensitive layers in float that is within the limit, if any is."""
        ranked = rank_layers(self.module, self.inputs, find_layers(self.module, exclude).quantized, self.ranges)
        for count in _powers_of_two(len(ranked)):
            left = list(ranked)[:count]
            layers = find_layers(self.module, [*exclude, *left])
            reasons = {key: f"sensitive: {ranked[key]:.2g} of the output is error" for key in left}
            layers.left_float.update(reasons)
            form = self._make(name, layers)
            figures = limit.evaluate(form.run)
            if limit.allows(self.figures[EAGER], figures):
                self.made[name], self.figures[name], self.sensitive[name] = form, figures, reasons
                del self.refused[name]
                return


def require_form(mode: str, backend: str, device_type: str, file_format: str | None = None) -> None:
    """Check that a form of this mode and backend exists.

    Raises:
        ValueError: if an option has an unknown value, or no form of this mode and backend runs on this device and can
            be written in this format.
        ModuleNotFoundError: if a package of ``backend`` is missing; the message says what to install.
    """
    require_one_of("mode", mode, get_args(Mode))
    require_one_of("backend", backend, get_args(Backend))
    here = [maker for maker in MAKERS.values() if device_type in maker.devices]
    if not any(is_wanted(maker, mode, backend, file_format) for maker in here):
        fitting = [maker for maker in here if maker.kind != "float" and is_wanted(maker, "auto", "auto", file_format)]
        pairs = sorted({f"mode={maker.kind!r}, backend={maker.backend!r}" for maker in fitting})
        file = "" if file_format is None else f" that a file of format {file_format!r} can hold"
        raise ValueError(
            f"mode={mode!r}, backend={backend!r} has no form on {device_type}{file}; there are: {'; '.join(pairs)}; or "
            "backend='inductor' for compiled floats"
        )
    needs = {"pt2e": ["torchao"], "torchao": ["torchao"], "onnxruntime": ["onnx", "onnxruntime", "onnxscript"]}
    for package in needs.get(backend, []):
        require_module(package)


def require_similar_outputs(form: Form, module: nn.Module, inputs: Inputs) -> Form:
    """Raise a CannotConvertError if outputs of a form are unlike those of ``module``: some compilers fail silently."""
    args, kwargs = inputs
    with torch.no_grad():
        noise = noise_share(module(*args, **kwargs), form.run(*args, **kwargs))
    if not noise < 0.5:
        raise CannotConvertError(
            f"its outputs are wrong: their error is {noise:.2g} of what the float module's vary by"
        )
    return form


def is_wanted(maker: _Maker, mode: str, backend: str, file_format: str | None) -> bool:
    """Return whether a form of this kind may be picked under these options."""
    fits = file_format is None or file_format in maker.files
    return fits and backend in ("auto", maker.backend) and (mode in ("auto", maker.kind) or backend == "inductor")


def is_compared(name: str, wanted: Sequence[str]) -> bool:
    """Return whether a form is a baseline: a compiled float one, or the float form of a wanted runtime."""
    maker = MAKERS[name]
    if maker.kind != "float":
        return False
    return maker.backend != "onnxruntime" or any(MAKERS[other].float_row == name for other in wanted)


def _float_row(name: str, device: torch.device) -> str:
    """Return the name of the float form of the runtime of form ``name``, or "" if it is one itself."""
    found = MAKERS[name].float_row if name in MAKERS else ""
    # On GPUs, other operations of torchao's forms are in bfloat16
    return "bf16 compiled" if found and device.type == "cuda" else found


def _sort_as_listed(values: dict[str, Any]) -> None:
    """Sort what is held by names of forms as these are listed."""
    for name in MAKERS:
        if name in values:
            values[name] = values.pop(name)


def _powers_of_two(total: int) -> list[int]:
    """Return the powers of 2 below ``total``, and ``total - 1``."""
    return sorted({*(2**power for power in range(20) if 2**power < total), total - 1} - {0})


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
