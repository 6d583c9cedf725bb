"""Parts of ONNX files beside torch's exporter: processing around a quantized model, and this library's operators.

Shapes of the operators: S steps, B sequences, I inputs, H hidden, G gates.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import lightning_accel.ops  # noqa: F401  # its operators
from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.export.flat import FromTensors
from lightning_accel.compress.export.structure import named_tensors, restore, tensors_of

# The indices in torch of the gates in the order of ONNX: input, output, forget, cell; update, reset, hidden.
_GATES = {"rnn": (0,), "gru": (1, 0, 2), "lstm": (0, 3, 1, 2)}

# usual names of dynamic sizes by the number of dimensions; channels and features are static
_SIZES = {1: ("batch",), 2: ("batch", "length"), 3: ("batch", "length", "length"), 4: ("batch", "", "height", "width")}
ONE_FILE = 2**31 - 2**25  # bytes of weights that a file holds beside its graph: a protobuf has less than 2 GB


def to_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str] | None = None) -> Any:
    """Return the ``torch.onnx.ONNXProgram`` of a program, with the names of its inputs and outputs."""
    from onnx_ir.passes import PassError
    from onnxscript.optimizer import optimize_ir

    write = partial(
        torch.onnx.export,
        program,
        dynamo=True,
        custom_translation_table=translations(),
        input_names=inputs,
        output_names=outputs,
        verbose=False,
    )
    is_large = sum(value.nbytes for value in program.state_dict.values()) > ONE_FILE
    try:
        made = write(optimize=not is_large)
    except PassError:  # onnxscript cannot fold a split into parts of computed sizes; runtimes optimize themselves
        made, is_large = write(optimize=False), False
    assert made is not None
    if is_large:
        with suppress(PassError):
            optimize_ir(made.model, should_fold=_leave_transposes)
    name_sizes_(made.model)
    return made


def _leave_transposes(node: Any) -> bool | None:
    """Return whether the optimizer has to keep a node: weights that it transposes need memory a second time."""
    return False if node.op_type == "Transpose" else None


def name_sizes_(model: Any) -> None:
    """Name the dynamic sizes of an ``onnx_ir.Model``, which are those of torch's symbolic shapes, such as ``s95``.

    Sizes of inputs are ``batch`` and, by the number of dimensions, ``length`` or ``height`` and ``width``; sizes that
    these names do not fit are called by the input and the dimension. Outputs have the sizes of the inputs they follow.
    """
    import onnx_ir

    names: dict[str, str] = {}

    def name_of(value: Any, dim: int) -> str:
        usual = _SIZES.get(len(value.shape), ())
        own = f"{value.name}_{dim}"
        name = usual[dim] if dim < len(usual) else ""
        return own if not name or name in names.values() else name  # equal names stand for equal sizes

    for value in model.graph.inputs:
        for dim, size in enumerate(value.shape or ()):
            if isinstance(size, onnx_ir.SymbolicDim) and size.value and size.value not in names:
                names[size.value] = name_of(value, dim)
    inner = (value for node in model.graph.all_nodes() for value in node.outputs)
    for value in {*model.graph.inputs, *model.graph.outputs, *inner}:
        if value.shape is None or value.shape.is_static():
            continue
        # also terms, such as s95*s27; a new shape, since some are frozen
        sizes = [getattr(size, "value", size) for size in value.shape]
        value.shape = onnx_ir.Shape(
            [
                re.sub(r"\w+", lambda found: names.get(found[0], found[0]), size) if isinstance(size, str) else size
                for size in sizes
            ]
        )


def weight_bytes(made: Any) -> int:
    """Return the size of the weights in a ``torch.onnx.ONNXProgram``."""
    return sum(int(one.const_value.nbytes) for one in made.model.graph.initializers.values())


def save_onnx(made: Any, path: Path) -> bool:
    """Write a ``torch.onnx.ONNXProgram``, weights that a file cannot hold to one beside it, and return whether it is.

    Files refer to that beside them by its name, that of ``path`` with a further ``.data``.
    """
    import onnx_ir

    is_split = weight_bytes(made) > ONE_FILE
    onnx_ir.save(made.model, path, external_data=f"{path.name}.data" if is_split else None)
    return is_split


def add_processing(content: bytes, flat: FromTensors, calls: Sequence[Inputs]) -> Any:
    """Return the ONNX model in ``content`` with the preprocessing, the postprocessing and the names of ``flat``.

    Args:
        content: an ONNX file. Names of its inputs end in ``__`` and the index of the tensor in a call of the module;
            its outputs are the tensors that the module returns.
        flat: the whole model as a function of tensors.
        calls: calls of the whole model, which differ in dynamic sizes.

    Returns:
        An ``onnx.ModelProto``, whose inputs and outputs are named as those of files that torch's exporter writes.
    """
    import onnx

    model = onnx.load_model_from_string(content)
    output = flat.module_output()
    names = list(flat.tensors_of(flat.example))
    if flat.preprocess is not None:
        places = {one.name: _index_of(one.name) for one in model.graph.input}
        before = _Preprocess(flat, list(places.values()))
        made = _export_onnx(before, [tensors_of(call) for call in calls], "raw")
        given = [one.name for one in made.graph.output]
        model = _compose(made, model, dict(zip(given, places, strict=True)))
    inputs = [names[_index_of(one.name)] for one in model.graph.input]
    if flat.postprocess is None:
        returned = list(named_tensors(output, others=[]))
        kept = [returned.index(name) for name in flat.kept]
    else:
        kept = list(range(len(flat.kept)))
        inner = [flat.preprocessed(*call) for call in calls]
        outputs = [tensors_of(flat.module(*args, **kwargs)) for args, kwargs in inner]
        made = _export_onnx(_Postprocess(flat, output), outputs, "given")
        model_outputs = [one.name for one in model.graph.output]
        model = _compose(model, made, {model_outputs[_index_of(one.name)]: one.name for one in made.graph.input})
    return _rename(model, inputs, dict(zip(output_names(inputs, flat.kept), kept, strict=True)))


def output_names(inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """Return the names of outputs in a file, where they differ from those of the inputs."""
    return [f"{name}_out" if name in inputs else name for name in outputs]


def _rename(model: Any, inputs: Sequence[str], outputs: Mapping[str, int]) -> Any:
    """Name the inputs, and those outputs that are kept by their places, through nodes of the kind Identity."""
    import onnx
    from onnx.compose import add_prefix

    model = add_prefix(model, "model/")
    graph = model.graph
    inner_inputs, inner_outputs = list(graph.input), list(graph.output)
    del graph.input[:], graph.output[:], graph.value_info[:]  # parts may call sizes alike that differ
    for place, (name, inner) in enumerate(zip(inputs, inner_inputs, strict=True)):
        graph.node.insert(place, onnx.helper.make_node("Identity", [name], [inner.name]))
        graph.input.add(name=name, type=inner.type)
    for name, number in outputs.items():
        graph.node.append(onnx.helper.make_node("Identity", [inner_outputs[number].name], [name]))
        graph.output.add(name=name, type=inner_outputs[number].type)
    return model


class _Preprocess(nn.Module):
    """Map the tensors of a call to those that the quantized model uses, after preprocessing."""

    def __init__(self, flat: FromTensors, places: Sequence[int]) -> None:
        super().__init__()
        self.flat = flat
        self.places = places

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = restore(self.flat.example, iter(tensors))
        found = tensors_of(self.flat.preprocessed(args, kwargs))
        return tuple(found[place] for place in self.places)


class _Postprocess(nn.Module):
    """Map the output tensors of the quantized model to those of the file, after postprocessing."""

    def __init__(self, flat: FromTensors, output: Any) -> None:
        super().__init__()
        self.postprocess = flat.postprocess
        self.kept = flat.kept
        self.output = output

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert self.postprocess is not None
        found = named_tensors(self.postprocess(restore(self.output, iter(tensors))), others=[])
        return tuple(found[name] for name in self.kept)


def _export_onnx(module: nn.Module, calls: Sequence[Sequence[Tensor]], name: str) -> Any:
    """Export ``module`` to ONNX; its inputs are named ``name__0``, ``name__1``, ..."""
    largest = max(calls, key=lambda tensors: sum(one.numel() for one in tensors))
    shapes = []
    for number in range(len(largest)):
        sizes = list(zip(*(tensors[number].shape for tensors in calls), strict=True))
        shapes.append({dim: Dim.DYNAMIC for dim, seen in enumerate(sizes) if len(set(seen)) > 1})
    program = torch.onnx.export(
        module.eval(),
        tuple(largest),
        dynamo=True,
        dynamic_shapes=(tuple(shapes),),
        input_names=[f"{name}__{place}" for place in range(len(largest))],
        verbose=False,
    )
    assert program is not None
    name_sizes_(program.model)
    return program.model_proto


def _compose(first: Any, second: Any, connections: Mapping[str, str]) -> Any:
    """Compose two models: outputs of ``first`` become inputs of ``second``, as ``connections`` maps their names."""
    import onnx
    from onnx.compose import add_prefix

    opsets = {one.domain: one for model in (second, first) for one in model.opset_import}
    for model in (first, second):
        model.ir_version = max(first.ir_version, second.ir_version)
        del model.opset_import[:]
        model.opset_import.extend(opsets.values())
    first = add_prefix(first, "first/", rename_inputs=False)
    pairs = [(f"first/{source}", target) for source, target in connections.items()]
    return onnx.compose.merge_models(first, second, io_map=pairs)


def _index_of(name: str) -> int:
    return int(name.rpartition("__")[2])


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ``custom_translation_table`` for ``torch.onnx.export``, which needs onnxscript."""
    return {torch.ops.lightning_accel.recurrent_layer.default: _recurrent_layer}


def _recurrent_layer(
    x: Any,
    lengths: Any,
    h: Any,
    c: Any,
    weight_ih: Any,
    weight_hh: Any,
    bias_ih: Any,
    bias_hh: Any,
    cell: str,
    backwards: bool,
) -> Sequence[Any]:
    """Translate a recurrent layer in one direction to ``RNN``, ``GRU`` or ``LSTM``."""
    import onnxscript

    op: Any = onnxscript.opset18  # its annotations do not allow lists
    hidden_size = weight_hh.shape[1]
    order = _GATES[cell]

    def gates(value: Any) -> Any:
        parts = [op.Slice(value, [gate * hidden_size], [(gate + 1) * hidden_size], [0]) for gate in order]
        return op.Concat(*parts, axis=0)

    weights = [op.Unsqueeze(gates(one), [0]) for one in (weight_ih, weight_hh)]
    biases = op.Unsqueeze(op.Concat(gates(bias_ih), gates(bias_hh), axis=0), [0])
    steps = None if lengths is None else op.Cast(lengths, to=6)  # int32
    initial = [None if one is None else op.Unsqueeze(one, [0]) for one in ((h, c) if cell == "lstm" else (h,))]
    options: dict[str, Any] = {"linear_before_reset": 1} if cell == "gru" else {}
    operator = getattr(op, cell.upper())
    out, *new = operator(
        x,
        *weights,
        biases,
        steps,
        *initial,
        hidden_size=hidden_size,
        direction="reverse" if backwards else "forward",
        **options,
    )
    last = [op.Squeeze(one, [0]) for one in new]
    if lengths is not None:  # for a sequence of length 0, ONNX Runtime returns 0 instead of the initial state
        empty = op.Unsqueeze(op.Equal(lengths, op.Constant(value_ints=[0])), [1])
        last = [one if given is None else op.Where(empty, given, one) for one, given in zip(last, (h, c), strict=False)]
    return op.Squeeze(out, [1]), *last, *(op.Constant(value_floats=[]) for _ in range(2 - len(last)))
