"""Export of models to files that run without their classes. Shapes: B samples, C classes, T tokens."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lightning_accel import __version__
from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.export.archive import METADATA
from lightning_accel.compress.export.loading import FORMAT_VERSION
from lightning_accel.compress.export.onnx import (
    ONE_FILE,
    add_processing,
    output_names,
    save_onnx,
    to_onnx,
    weight_bytes,
)
from lightning_accel.compress.export.structure import (
    describe,
    is_needed,
    named_tensors,
    plain_values,
    restore,
    tensors_of,
)
from lightning_accel.compress.export.traced import ExportError, Format, Traced, onnx_content, trace_call
from lightning_accel.compress.export.verification import failures_explained, verify
from lightning_accel.compress.quantization.form import Form
from lightning_accel.ops.bounds import local_path
from lightning_accel.ops.extras import require_module
from lightning_accel.ops.names import list_of_names, require_one_of
from lightning_accel.strategies.checkpoints.atomic import replace_atomically

SUFFIXES: dict[str, str] = {"pt2": ".pt2", "onnx": ".onnx"}
_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime")}


class Exported(NamedTuple):
    """Describe a file that was written and verified."""

    path: Path
    format: Format
    file_bytes: int
    outputs: list[str]  # names of the output tensors of the file
    left_out: list[str]  # names of the other output tensors of the module
    largest_difference: float  # of an output from the module's, relative to the output's largest value
    num_checked: int  # number of compared calls
    unused: Sequence[str] = ()  # arguments of the module that the file does not need, such as labels


class Probabilities(nn.Module):
    """Convert scores (B, C), or the first of several outputs, to probabilities; often used as ``postprocess``."""

    def forward(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            return _softmax(output)
        first, *rest = output
        return type(output)(_softmax(first), *rest) if hasattr(output, "_fields") else (_softmax(first), *rest)


def _softmax(scores: Tensor) -> Tensor:
    if scores.ndim < 2 or scores.shape[-1] < 2:
        raise ValueError(
            "probabilities are those of classes, from scores (B, C) of two or more; the model's first output is of "
            f"shape {tuple(scores.shape)}. Leave postprocess='probabilities', or --probabilities, out"
        )
    return scores.softmax(dim=-1)


@torch.no_grad()
def export(
    module: nn.Module,
    inputs: Sequence[Inputs],
    path: str | os.PathLike[str],
    format: Format = "pt2",
    *,
    dynamic: bool = True,
    preprocess: nn.Module | None = None,
    postprocess: nn.Module | None = None,
    class_names: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    quantized: Form | None = None,
) -> Exported:
    """Write ``module`` to a file that runs without its class, after verification of its outputs on ``inputs``.

    The file is written under a temporary name, loaded, and compared with the module on each of ``inputs`` and on 1 and
    an odd number of their samples; then it is renamed. If anything fails, no file is written, and an existing file is
    kept. Outputs may differ by 0.001 of their largest value, or 4 roundings of their dtype if that is more; those of
    ``quantized`` by 0.02, or by twice its own difference from ``module`` if that is more, since rounding in another
    order may differ as much.

    The file returns all outputs whose size depends on that of the batch, which excludes sums over the batch. Arguments
    that no output depends on, and that the module does not need, such as labels for a loss, are removed; a call of the
    file may still pass them. The length of token sequences, integers (B, T), is dynamic if the module accepts others.

    Args:
        module: module to export; it is run in evaluation mode and not changed.
        inputs: calls, each with positional and keyword arguments as the file takes them. Sizes that differ among them
            are dynamic in the file.
        path: file name, with the suffix ``.pt2``, or ``.onnx`` for ONNX.
        format: ``pt2`` is read by ``torch.export.load``, ``onnx`` by ONNX Runtime and others.
        dynamic: whether the batch size is dynamic; else the file takes only the batch size of the first of ``inputs``.
        preprocess: module that converts the first argument to the input of ``module``, such as a normalization.
        postprocess: module that takes the output of ``module``, such as :class:`Probabilities`.
        class_names: names to store in the file, for :meth:`Compressed.predict`.
        metadata: plain values to store in the file.
        quantized: form of the module that is written instead of it, such as the result of :func:`quantize`.

    Raises:
        ValueError: if the format is unknown, ``path`` has another suffix, there are no ``inputs``, or ``quantized``
            does not fit the format.
        TypeError: if arguments or outputs are not made of tensors.
        ModuleNotFoundError: if a package is missing.
        ExportError: if the module cannot be traced, or outputs of the file differ.
    """
    path = local_path(path)
    require_exportable(format, path)
    _require_calls(inputs)
    if quantized is not None and quantized.program is None and format != "onnx":
        raise ValueError(f"what was quantized is an ONNX file; format={format!r} cannot hold it. Take format='onnx'")
    traced_with = partial(trace_call, module, inputs, format, dynamic, preprocess, postprocess, quantized)
    names = None if class_names is None else [str(name) for name in list_of_names(class_names)]
    about = {"module": type(module).__name__, "class_names": names, "metadata": dict(metadata or {})}
    traced = traced_with()
    try:
        return _write_verified(traced, path, format, about, quantized)
    except ExportError:
        if not traced.free_length:
            raise
    return _write_verified(traced_with(free_length=False), path, format, about, quantized)  # the format may not have it


@torch.no_grad()
def try_export(
    module: nn.Module,
    inputs: Sequence[Inputs],
    format: Format = "pt2",
    *,
    dynamic: bool = True,
    preprocess: nn.Module | None = None,
    postprocess: nn.Module | None = None,
) -> list[dict[str, Any]]:
    """Trace ``module`` as :func:`export` does, and translate it to ONNX for that format, but write nothing.

    Returns:
        ``name``, ``dtype`` and ``shape`` of each input tensor of the file, with None for dynamic sizes.

    Raises:
        TypeError: as :func:`export`.
        ExportError: as :func:`export`.
    """
    traced = trace_call(module, inputs, format, dynamic, preprocess, postprocess, None)
    assert traced.program is not None
    output = traced.flat.module_output()
    restore(output, iter(tensors_of(output)))
    specs = _specs(traced)
    if format == "onnx":
        names = [one["name"] for one in specs]
        with failures_explained(f"{type(module).__name__} cannot be written as onnx"):
            to_onnx(traced.program, names, traced.flat.kept)
    return specs


def _require_calls(inputs: Any) -> None:
    def is_call(one: Any) -> bool:
        return len(one) == 2 and isinstance(one[0], tuple | list) and isinstance(one[1], Mapping)

    if not isinstance(inputs, Sequence) or not all(isinstance(one, tuple) and is_call(one) for one in inputs):
        raise TypeError(
            "inputs is a list of calls of the module, each a tuple of its positional arguments and a dict of the named "
            f"ones, such as [((x,), {{}})]; got {type(inputs).__name__}"
        )
    if not inputs:
        raise ValueError("export needs at least one call of the module to trace and to compare with; got none")


def require_exportable(format: str, path: Path | None = None) -> None:
    """Raise if the format is unknown, a package for it is missing, or ``path`` has another suffix."""
    require_one_of("format", format, get_args(Format))
    for package in _PACKAGES.get(format, ()):
        require_module(package)
    if path is not None and path.suffix != SUFFIXES[format]:
        raise ValueError(f"a file of format {format!r} must end in {SUFFIXES[format]}; got {path}")


def _specs(traced: Traced) -> list[dict[str, Any]]:
    """Return name, dtype and shape of each input tensor, with None for dynamic sizes."""
    tensors = traced.flat.tensors_of(traced.example)
    free: Sequence[Mapping[int, Any]] = traced.shapes or [{}] * len(tensors)
    return [
        {
            "name": name,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [None if number in dims else size for number, size in enumerate(value.shape)],
        }
        for (name, value), dims in zip(tensors.items(), free, strict=True)
    ]


def _file_metadata(traced: Traced, format: Format) -> dict[str, Any]:
    """Return the metadata for :func:`load_compressed`, which the file stores as JSON."""
    flat = traced.flat
    return {
        "lightning_accel": __version__,
        "format_version": FORMAT_VERSION,
        "format": format,
        "torch": torch.__version__,
        "arguments": [*flat.arguments, *flat.unused],
        "unused_inputs": flat.unused,
        "inputs": _specs(traced),
        "plain_inputs": plain_values(flat.arguments),
        "required": [name for name, value in flat.arguments.items() if is_needed(flat.signature, name, value)],
        "outputs": describe(flat.output, kept=set(flat.kept)),
        "output_names": flat.kept,
        "probabilities": isinstance(flat.postprocess, Probabilities | nn.Softmax),
    }


def _write_verified(
    traced: Traced, path: Path, format: Format, about: dict[str, Any], quantized: Form | None
) -> Exported:
    flat = traced.flat
    about = about | _file_metadata(traced, format)
    with _temporary_path(path) as written:
        with failures_explained(f"{about['module']} cannot be written as {format}"):
            _write(traced, about, format, written, onnx_content(quantized, format))
        difference = verify(written, traced, path, is_quantized=quantized is not None)
        replace_atomically(written, path)
    size = path.stat().st_size
    return Exported(path, format, size, flat.kept, flat.left_out, difference, len(traced.calls), flat.unused)


def _write(traced: Traced, about: dict[str, Any], format: str, path: Path, content: bytes | None) -> None:
    program = traced.program
    if program is None:
        assert content is not None
        model = add_processing(content, traced.flat, traced.calls)
        entry = model.metadata_props.add()
        tensors = named_tensors(traced.flat.output, others=[])
        dtypes = [str(tensors[name].dtype).removeprefix("torch.") for name in traced.flat.kept]
        entry.key, entry.value = METADATA, json.dumps(about | {"onnx_dtypes": dtypes})
        path.write_bytes(model.SerializeToString())
    elif format == "onnx":
        inputs = [one["name"] for one in about["inputs"]]
        made = to_onnx(program, inputs, output_names(inputs, about["output_names"]))
        if (size := weight_bytes(made)) > ONE_FILE:
            raise ValueError(
                f"it has {size / 1e9:.1f} GB of weights, and an ONNX file holds less than 2. Take format='pt2', or "
                "Quantization(mode='weight_only'), whose files are smaller"
            )
        made.model.metadata_props[METADATA] = json.dumps(about)
        save_onnx(made, path)
    else:
        program.example_inputs = None  # they would be written as a pickle
        torch.export.save(program, path, extra_files={METADATA: json.dumps(about)})


@contextmanager
def _temporary_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder with the same suffix, which loaders require, and delete it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.stem}.partial{path.suffix}")
    written.unlink(missing_ok=True)  # left by a killed process
    try:
        yield written
    finally:
        written.unlink(missing_ok=True)
