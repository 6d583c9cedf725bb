"""Forms that can be made of a module, and a trial of those that a machine can run."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import nn

from lightning_accel.compress.calls import Inputs, Run, first_line
from lightning_accel.compress.export.onnx import ONE_FILE
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
from lightning_accel.compress.quantization.onnx import onnx_dynamic, onnx_float, onnx_static
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
from lightning_accel.compress.report.progress import Progress
from lightning_accel.ops.extras import require_module
from lightning_accel.ops.names import Exclusion, require_one_of

Mode: TypeAlias = Literal["auto", "static", "dynamic", "weight_only"]
Backend: TypeAlias = Literal["auto", "pt2e", "onnxruntime", "torchao", "inductor"]


class Maker(NamedTuple):
    """Make a form, and say what it is."""

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
    "fp32 compiled": Maker("float", "inductor", compiled_float, _ANY, ("pt2", "onnx"), copies=2.7),
    "bf16 compiled": Maker("float", "inductor", compiled_bfloat16, _ANY, copies=1.3),
    "fp32 ONNX Runtime": Maker("float", "onnxruntime", onnx_float, files=("onnx",)),
    "int8 PT2E static": Maker("static", "pt2e", pt2e_static, float_row="fp32 compiled"),
    "int8 torchao dynamic": Maker("dynamic", "torchao", torchao_dynamic, _ANY, float_row="fp32 compiled"),
    "int8 torchao weight-only": Maker(
        "weight_only", "torchao", torchao_weight_only, _ANY, float_row="fp32 compiled", copies=5.5
    ),
    "int4 torchao weight-only": Maker(
        "weight_only", "torchao", torchao_int4, ("cuda",), float_row="fp32 compiled", needs_limit=True
    ),
    "float8 torchao dynamic": Maker("dynamic", "torchao", torchao_float8, ("cuda",), float_row="fp32 compiled"),
    "int8 ONNX Runtime static": Maker(
        "static", "onnxruntime", onnx_static, files=("onnx",), float_row="fp32 ONNX Runtime"
    ),
    "int8 ONNX Runtime dynamic": Maker(
        "dynamic", "onnxruntime", onnx_dynamic, files=("onnx",), float_row="fp32 ONNX Runtime"
    ),
    "int8 ONNX Runtime weight-only": Maker(
        "weight_only", "onnxruntime", onnx_int8, files=("onnx",), float_row="fp32 ONNX Runtime"
    ),
    "int4 ONNX Runtime weight-only": Maker(
        "weight_only", "onnxruntime", onnx_int4, files=("onnx",), float_row="fp32 ONNX Runtime", needs_limit=True
    ),
}
_COPIES_IN_ONE_FILE = 6.0  # of weights that an ONNX file holds beside its graph; larger ones stay outside of it
EAGER = "fp32 eager"


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


def is_wanted(maker: Maker, mode: str, backend: str, file_format: str | None) -> bool:
    """Return whether a form of this kind may be picked under these options."""
    fits = file_format is None or file_format in maker.files
    return fits and backend in ("auto", maker.backend) and (mode in ("auto", maker.kind) or backend == "inductor")


def is_compared(name: str, wanted: Sequence[str]) -> bool:
    """Return whether a form is a baseline: a compiled float one, or the float form of a wanted runtime."""
    maker = MAKERS[name]
    if maker.kind != "float":
        return False
    return maker.backend != "onnxruntime" or any(MAKERS[other].float_row == name for other in wanted)


def _sort_as_listed(values: dict[str, Any]) -> None:
    """Sort what is held by names of forms as these are listed."""
    for name in MAKERS:
        if name in values:
            values[name] = values.pop(name)


def _powers_of_two(total: int) -> list[int]:
    """Return the powers of 2 below ``total``, and ``total - 1``."""
    return sorted({*(2**power for power in range(20) if 2**power < total), total - 1} - {0})
