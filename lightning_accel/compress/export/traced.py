"""Traces of calls of a module, which files are written of."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_accel._private.torch import tree_flatten
from lightning_accel.compress.calls import Inputs, Run, first_line, first_samples, num_samples, shorter_call
from lightning_accel.compress.export.flat import FromTensors, outputs_of
from lightning_accel.compress.export.structure import (
    bind,
    changing_values,
    describe_changing,
    named_tensors,
    sort_keywords,
)
from lightning_accel.compress.quantization.form import Form
from lightning_accel.compress.quiet import suppress_output
from lightning_accel.compress.tracing import trace

Format: TypeAlias = Literal["pt2", "onnx"]


class ExportError(RuntimeError):
    """Report that a module cannot be exported, or that the outputs of its file differ from the module's."""


class Traced(NamedTuple):
    """Hold a module as a function of tensors, its trace, and the calls that the file is compared on."""

    flat: FromTensors
    plain: Run
    live: Run  # what the file is compared with, a quantized form if there is one
    calls: list[Inputs]
    example: Inputs
    shapes: list[dict[int, Any]] | None
    program: ExportedProgram | None  # None if the bytes of an ONNX file are written
    free_length: bool


def trace_call(
    module: nn.Module,
    inputs: Sequence[Inputs],
    format: Format,
    dynamic: bool,
    preprocess: nn.Module | None,
    postprocess: nn.Module | None,
    quantized: Form | None,
    free_length: bool = True,
    unused: Sequence[str] = (),
) -> Traced:
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
        if onnx_content(quantized, format) is not None:
            return Traced(flat, plain, live, calls, example, shapes, None, False)
        assert quantized.program is not None
        flat.replace_module(quantized.program)
    again = partial(
        trace_call, module, format=format, dynamic=dynamic, preprocess=preprocess, postprocess=postprocess,
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
    return Traced(flat, plain, live, all_calls, example, shapes, program, other is not None)


def onnx_content(quantized: Form | None, format: str) -> bytes | None:
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


def innermost(error: BaseException) -> BaseException:
    """Return the error that the others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
