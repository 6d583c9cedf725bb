"""Export of models to files that run without their classes. Shapes: B samples, C classes, T tokens."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_accel import __version__
from lightning_accel._private.torch import tree_flatten
from lightning_accel.compress.calls import Inputs, Run, first_line, first_samples, num_samples, shorter_call
from lightning_accel.compress.export.archive import METADATA
from lightning_accel.compress.export.flat import FromTensors, outputs_of
from lightning_accel.compress.export.loading import FORMAT_VERSION, load_compressed
from lightning_accel.compress.export.onnx import (
    ONE_FILE,
    add_processing,
    output_names,
    save_onnx,
    to_onnx,
    weight_bytes,
)
from lightning_accel.compress.export.structure import (
    bind,
    changing_values,
    describe,
    describe_changing,
    has_no_default,
    named_tensors,
    plain_values,
    restore,
    sort_keywords,
    tensors_of,
)
from lightning_accel.compress.quantization.form import Form
from lightning_accel.compress.quiet import suppress_output
from lightning_accel.compress.tracing import trace
from lightning_accel.ops.extras import require_module
from lightning_accel.ops.names import list_of_names, require_one_of
from lightning_accel.strategies.checkpoints.atomic import replace_atomically

Format: TypeAlias = Literal["pt2", "onnx"]
SUFFIXES: dict[str, str] = {"pt2": ".pt2", "onnx": ".onnx"}
_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime")}


class ExportError(RuntimeError):
    """Report that a module cannot be exported, or that the outputs of its file differ from the module's."""


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
    path = Path(path)
    require_exportable(format, path)
    _require_calls(inputs)
    if quantized is not None and quantized.program is None and format != "onnx":
        raise ValueError(f"what was quantized is an ONNX file; format={format!r} cannot hold it. Take format='onnx'")
    traced_with = partial(_trace_call, module, inputs, format, dynamic, preprocess, postprocess, quantized)
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
    traced = _trace_call(module, inputs, format, dynamic, preprocess, postprocess, None)
    assert traced.program is not None
    output = traced.flat.module_output()
    restore(output, iter(tensors_of(output)))
    specs = _specs(traced)
    if format == "onnx":
        names = [one["name"] for one in specs]
        with _failures_explained(f"{type(module).__name__} cannot be written as onnx"):
            to_onnx(traced.program, names, traced.flat.kept)
    return specs


class _Traced(NamedTuple):
    flat: FromTensors
    plain: Run
    live: Run  # what the file is compared with, a quantized form if there is one
    calls: list[Inputs]
    example: Inputs
    shapes: list[dict[int, Any]] | None
    program: ExportedProgram | None  # None if the bytes of an ONNX file are written
    free_length: bool


def _trace_call(
    module: nn.Module,
    inputs: Sequence[Inputs],
    format: Format,
    dynamic: bool,
    preprocess: nn.Module | None,
    postprocess: nn.Module | None,
    quantized: Form | None,
    free_length: bool = True,
    unused: Sequence[str] = (),
) -> _Traced:
    """Determine inputs, outputs and dynamic sizes, and trace the module, unless an ONNX file is written."""
    try:
        num_samples(inputs[0])
    except ValueError as error:
        raise ExportError(f"{type(module).__name__} cannot be exported: {error}") from error
    flat = FromTensors(module, preprocess, postprocess, dense=format == "onnx")
    plain = partial(flat.whole, run=flat.module)
    live = plain if quantized is None else partial(flat.whole, run=quantized.run)
    inputs = [sort_keywords(module.forward, call) for call in inputs]
    if changing := changing_values([bind(module.forward, *call) for call in inputs]):
        raise ExportError(
            f"{type(module).__name__} cannot be exported: {describe_changing(changing)} in its calls, and a file holds "
            "what is no tensor as a constant. Let forward take it from its tensors, or name by module a part that is "
            "called with tensors alone"
        )
    calls = [*inputs, *(_calls_of_other_sizes(live, inputs[0]) if dynamic else [])]
    example = max(calls, key=_size) if dynamic else inputs[0]
    flat.keep(live, example, calls)
    flat.unused = list(unused)
    is_sliced = len(calls) > len(inputs)
    other = shorter_call(live, inputs[0]) if dynamic and free_length and quantized is None else None
    all_calls = calls if other is None else [*calls, other]
    shapes = _dynamic_shapes(flat, all_calls, sliced=is_sliced) if dynamic else None
    if quantized is not None:
        if _onnx_content(quantized, format) is not None:
            return _Traced(flat, plain, live, calls, example, shapes, None, False)
        assert quantized.program is not None
        flat.replace_module(quantized.program)
    again = partial(
        _trace_call, module, format=format, dynamic=dynamic, preprocess=preprocess, postprocess=postprocess,
        quantized=quantized,
    )  # fmt: skip
    try:
        program = _trace(flat, example, shapes, type(module).__name__, format)
    except ExportError:
        if other is None:
            raise
        return again(inputs, free_length=False, unused=unused)
    if quantized is None and not unused and (found := _unused_arguments(program, flat, live, inputs)):
        return again([_drop_arguments(call, found, flat) for call in inputs], free_length=free_length, unused=found)
    return _Traced(flat, plain, live, all_calls, example, shapes, program, other is not None)


def _onnx_content(quantized: Form | None, format: str) -> bytes | None:
    """Return the bytes of the ONNX file to write, if that is what a form has."""
    return quantized.onnx if quantized is not None and format == "onnx" else None


def _unused_arguments(program: ExportedProgram, flat: FromTensors, live: Run, inputs: Sequence[Inputs]) -> list[str]:
    """Return arguments that no kept output depends on, and without which the module returns the same outputs."""
    nodes = {node.name: node for node in program.graph.nodes}
    needed, left = set(), [node for node in program.graph.nodes if node.op == "output"]
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            if node.target is not torch.ops.aten.sym_size.int:  # any tensor of the size will do
                left += node.all_input_nodes
    names = list(flat.tensors_of(flat.example))
    used = {
        name for name, own in zip(names, program.graph_signature.user_inputs, strict=True) if nodes[str(own)] in needed
    }
    arguments = [name for name, value in flat.arguments.items() if named_tensors(value, name)]
    found = [one for one in arguments if not any(name == one or name.startswith(f"{one}.") for name in used)]
    if not found or len(found) == len(arguments):
        return []
    try:
        for call in inputs:
            expected, given = outputs_of(live, call), outputs_of(live, _drop_arguments(call, found, flat))
            if not all(name in given and torch.equal(given[name], expected[name]) for name in flat.kept):
                return []
    except Exception:  # forward requires them nevertheless
        return []
    return found


def _drop_arguments(call: Inputs, names: Sequence[str], flat: FromTensors) -> Inputs:
    """Return ``call`` without the arguments ``names``, as far as they are the last positional ones or keywords."""
    args, kwargs = call
    order = list(bind(flat.signature, *call))
    while args and order[len(args) - 1] in names:
        args = args[:-1]
    return args, {name: value for name, value in kwargs.items() if name not in names}


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


def _size(call: Inputs) -> int:
    return sum(value.numel() for value in tree_flatten(call)[0] if isinstance(value, Tensor))


def _calls_of_other_sizes(live: Run, call: Inputs) -> list[Inputs]:
    """Return the call with 1 and an odd number of samples; none if samples cannot be separated, as nodes of graphs."""
    rows = num_samples(call)
    sizes = [size for size in (1, 3 if rows != 3 else 5) if size != rows]
    calls = [first_samples(call, size) for size in sizes]
    try:
        shapes = [[value.shape for value in outputs_of(live, one).values()] for one in (call, *calls)]
    except Exception:
        return []
    return calls if all(one != shapes[0] for one in shapes[1:]) else []


def _dynamic_shapes(flat: FromTensors, calls: Sequence[Inputs], sliced: bool) -> list[dict[int, Any]]:
    """Return the dynamic dimensions of each tensor of a call: that of the batch, and those in which calls differ."""
    found = [flat.tensors_of(call) for call in calls]
    names = list(found[0])
    for one in found[1:]:
        if list(one) != names or any(one[name].dim() != found[0][name].dim() for name in names):
            raise ValueError(
                f"all calls must take the same tensors; one takes {', '.join(names)}, another {', '.join(one)}, or "
                "with other numbers of dimensions"
            )
    rows = Dim("rows", min=1)
    counts = [num_samples(call) for call in calls]
    free: list[dict[int, Any]] = []
    for name in names:
        sizes = list(zip(*(one[name].shape for one in found), strict=True))
        free.append({number: Dim.DYNAMIC for number, taken in enumerate(sizes) if len(set(taken)) > 1})
        if sliced and sizes and list(sizes[0]) == counts:
            free[-1][0] = rows
    return free


def _trace(
    flat: FromTensors, example: Inputs, shapes: list[dict[int, Any]] | None, name: str, format: str
) -> ExportedProgram:
    tensors = tuple(flat.tensors_of(example).values())
    try:
        with suppress_output():
            return trace(flat, tensors, None if shapes is None else (tuple(shapes),))
    except Exception as error:
        raise ExportError(f"{name} cannot be exported as {format}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    text = str(error)
    if "specialized it to be a constant" in text:
        sizes = ", ".join(dict.fromkeys(re.findall(r"specialized it to be a constant \((\d+)\)", text)))
        return (
            f"its forward takes only the size {sizes} that it is traced with, where batches differ in it; a Python "
            "loop over that dimension, or len() of a tensor, is the usual cause. Bring all batches to one size there "
            "(pad sequences to one length), or take dynamic=False, whose file takes batches of that one size"
        )
    if "data-dependent" in text or "data dependent" in text:
        return (
            "what it does depends on values, not on shapes alone, as with .item(), nonzero() or a search for triangles "
            f"({first_line(error)}). Export the part that does not: module='name of the submodule'"
        )
    return first_line(error)


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _specs(traced: _Traced) -> list[dict[str, Any]]:
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


def _file_metadata(traced: _Traced, format: Format) -> dict[str, Any]:
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
        "required": [name for name in flat.arguments if has_no_default(flat.signature, name)],
        "outputs": describe(flat.output, kept=set(flat.kept)),
        "output_names": flat.kept,
        "probabilities": isinstance(flat.postprocess, Probabilities | nn.Softmax),
    }


def _write_verified(
    traced: _Traced, path: Path, format: Format, about: dict[str, Any], quantized: Form | None
) -> Exported:
    flat = traced.flat
    about = about | _file_metadata(traced, format)
    with _temporary_path(path) as written:
        with _failures_explained(f"{about['module']} cannot be written as {format}"):
            _write(traced, about, format, written, _onnx_content(quantized, format))
        difference = _verify(written, traced, path, is_quantized=quantized is not None)
        replace_atomically(written, path)
    size = path.stat().st_size
    return Exported(path, format, size, flat.kept, flat.left_out, difference, len(traced.calls), flat.unused)


def _write(traced: _Traced, about: dict[str, Any], format: str, path: Path, content: bytes | None) -> None:
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
def _failures_explained(failed: str) -> Iterator[None]:
    """Raise an ExportError in place of any exception, and suppress output."""
    try:
        with suppress_output():
            yield
    except Exception as error:
        raise ExportError(f"{failed}: {first_line(_innermost(error))}") from error


def _verify(written: Path, traced: _Traced, path: Path, is_quantized: bool) -> float:
    """Compare the file with the module; return the largest difference."""
    try:
        loaded = load_compressed(written)
    except ValueError as error:
        raise ExportError(f"{path} was not written: it cannot be read: {first_line(error)}") from error
    largest = 0.0
    for call in traced.calls:
        expected = outputs_of(traced.live, call)
        exact = outputs_of(traced.plain, call) if is_quantized else {}
        sizes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in traced.flat.tensors_of(call).items())
        try:
            found = outputs_of(loaded, call)
        except Exception as error:
            raise ExportError(f"{path} was not written: the file fails on {sizes}: {first_line(error)}") from error
        for name in traced.flat.kept:
            difference = difference_of(found[name], expected[name])
            allowed = tolerance_of(expected[name].dtype)
            if is_quantized and allowed:
                allowed = max(0.02, min(0.5, 2 * difference_of(exact[name], expected[name])))
            if not difference <= allowed:
                raise ExportError(
                    f"{path} was not written: its output {name!r} differs from the module's by {difference:.3g} of the "
                    f"largest value, on {sizes}; the tolerance is {allowed:.3g}. A layer that draws random numbers, or "
                    "a Python branch that torch.export followed on the traced batch alone, would do that"
                )
            largest = max(largest, difference)
    return largest


def tolerance_of(dtype: torch.dtype) -> float:
    """Return by which share of the largest value outputs of two programs for the same computation may differ."""
    return max(1e-3, 4 * torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def difference_of(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest finite value; inf if shapes or non-finite values differ."""
    if found.shape != expected.shape:
        return math.inf
    a, b = (value.detach().to("cpu", torch.float64) for value in (found, expected))
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return math.inf
    if not finite.any():
        return 0.0
    return float((a - b)[finite].abs().max() / b[finite].abs().max().clamp(min=1e-6))


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
