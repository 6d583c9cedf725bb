"""Quantization of a module: creation, measurement and choice among forms for this machine."""

from collections.abc import Iterable, Sequence

from torch import nn

from lightning_accel.compress.calls import Inputs, device_of
from lightning_accel.compress.export.structure import sort_keywords
from lightning_accel.compress.quantization.layers import find_layers
from lightning_accel.compress.quantization.onnx import sharing_export
from lightning_accel.compress.quantization.picking import Quantized, pick
from lightning_accel.compress.quantization.pt2e import (
    Ranges,
)
from lightning_accel.compress.quantization.trial import (
    MAKERS,
    Backend,
    Limit,
    Mode,
    Trial,
    is_compared,
    is_wanted,
    require_form,
)
from lightning_accel.compress.report.progress import Progress
from lightning_accel.ops.names import Exclusion, list_of_names
from lightning_accel.ops.renames import renamed_arguments


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
