"""Forms of a module for ONNX Runtime on CPUs, in float and int8."""

import copy
import os
import tempfile
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_accel._private.torch import has_vnni
from lightning_accel.compress.calls import Inputs, first_line, first_samples, num_samples, shorter_call
from lightning_accel.compress.export.loading import onnx_session
from lightning_accel.compress.export.onnx import save_onnx, to_onnx
from lightning_accel.compress.export.structure import Flat, Structure, bind, named_tensors, tensors_of
from lightning_accel.compress.quantization.form import CannotConvertError, Form, require_same_values
from lightning_accel.compress.quantization.inputs import dynamic_shapes, noise_share
from lightning_accel.compress.quantization.layers import Layers
from lightning_accel.compress.quantization.pt2e import Ranges
from lightning_accel.compress.quiet import suppress_output
from lightning_accel.compress.tracing import (
    copy_with_same_parameters,
    has_half_precision,
    make_experts_dense_,
    to_float32,
    trace,
)
from lightning_accel.nn.recurrent.layer import RecurrentLayer
from lightning_accel.ops.extras import require_module

_SAME_GRID = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")  # output has the input's grid
_STATIC = [  # operators to quantize: products, and those between them that are as accurate in int8
    *("Conv", "Gemm", "MatMul", "Relu", "Clip", "AveragePool", "GlobalAveragePool", "Add", "Concat"),
    *_SAME_GRID,
]
_WITH_PRODUCTS = ("Conv", "Gemm", "MatMul", "LSTM")
TOO_LARGE = "an ONNX file holds less than 2 GB, and the float one has more"


class FloatFiles(NamedTuple):
    structure: Structure
    dtypes: Sequence[torch.dtype] | None  # of the outputs of a module in bfloat16 or float16, written in float32
    is_split: bool  # whether both files need the weights of a further one beside them
    written: Path
    ready: Path  # after ONNX Runtime's optimization


class _ExportCache(NamedTuple):
    folder: Path
    made: dict[Any, FloatFiles]


_EXPORT_CACHE: ContextVar[_ExportCache | None] = ContextVar("float files that forms share", default=None)


class _Plan(NamedTuple):
    excluded: list[str]  # nodes to keep in float
    inputs: dict[str, str]  # by tensor, the layer that it is the input of, possibly after a change of shape


class OnnxCall:
    """Run an ONNX file, or the bytes of one, with the inputs and outputs of the module that it was made from."""

    def __init__(self, content: bytes | Path, structure: Structure, dtypes: Sequence[torch.dtype] | None) -> None:
        self.session = onnx_session(content, ["CPUExecutionProvider"])
        self.names = [one.name for one in self.session.get_inputs()]
        self.kept = [int(name.rpartition("__")[2]) for name in self.names]  # unused tensors have no input
        self.structure = structure
        self.dtypes = dtypes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.structure.tensors_of(args, kwargs)
        tensors = tensors if self.dtypes is None else to_float32(list(tensors))
        feed = {name: tensors[place].detach().numpy() for name, place in zip(self.names, self.kept, strict=True)}
        outputs = [torch.from_numpy(value) for value in self.session.run(None, feed)]
        if self.dtypes is not None:
            outputs = [value.to(dtype) for value, dtype in zip(outputs, self.dtypes, strict=True)]
        return self.structure.rebuild(outputs)


@contextmanager
def sharing_export() -> Iterator[None]:
    """Write a module as ONNX only once for all forms made of it in this context, in which it must not change."""
    with tempfile.TemporaryDirectory() as folder:
        token = _EXPORT_CACHE.set(_ExportCache(Path(folder), {}))
        try:
            yield
        finally:
            _EXPORT_CACHE.reset(token)


def onnx_float(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Make a float form for ONNX Runtime, the baseline of its int8 forms."""
    require_onnxruntime()
    with tempfile.TemporaryDirectory() as folder, suppress_output():
        made = write_float_files(module, inputs, Path(folder))
        if made.is_split:
            form = Form("fp32 ONNX Runtime", OnnxCall(made.ready, made.structure, made.dtypes), no_file=TOO_LARGE)
            form.file_bytes = sum(one.stat().st_size for one in (made.ready, _data_of(made.written)))
            return form
        content = made.ready.read_bytes()
    return Form(
        "fp32 ONNX Runtime", OnnxCall(content, made.structure, made.dtypes), onnx=content, file_bytes=len(content)
    )


def onnx_dynamic(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Make a form with linear layers and LSTMs in int8 and input ranges computed in each call."""
    require_onnxruntime()
    from onnxruntime.quantization import QuantType, quantize_dynamic

    def convert(source: Path, target: Path, plan: _Plan) -> None:
        # Without convolutions, whose dynamic kernel is several times slower than the float one
        kinds = ["MatMul", "Gemm", "LSTM"]
        quantize_dynamic(
            source,
            target,
            kinds,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=plan.excluded,
            reduce_range=not has_vnni(),
        )

    def left_float(name: str, one: nn.Module) -> str:
        return "" if isinstance(one, nn.Linear) or _is_lstm(one) else "this form has linear layers and LSTMs alone"

    return _make_form("int8 ONNX Runtime dynamic", module, inputs, layers, convert, left_float)


def onnx_static(module: nn.Module, inputs: Sequence[Inputs], layers: Layers, ranges: Ranges | None = None) -> Form:
    """Make a form with weights (int8) and inputs (uint8) of linear layers and convolutions, and fixed input ranges.

    Arguments are those of :func:`lightning_accel.compress.quantization.pt2e.pt2e_static`.
    """
    require_onnxruntime()
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    def convert(source: Path, target: Path, plan: _Plan) -> None:
        quantize_static(
            source,
            target,
            _CalibrationReader(source, inputs),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_STATIC,
            per_channel=True,
            reduce_range=not has_vnni(),
            activation_type=QuantType.QUInt8,  # int8 inputs have no fast kernels on CPUs
            weight_type=QuantType.QInt8,
            nodes_to_exclude=plan.excluded,
            calibrate_method=CalibrationMethod.MinMax,
            extra_options={
                "TensorQuantOverrides": _range_overrides(plan.inputs, ranges or {}),
            },
        )

    def left_float(name: str, one: nn.Module) -> str:
        return "" if name in layers.quantized else layers.left_float.get(name, "")

    return _make_form("int8 ONNX Runtime static", module, inputs, layers, convert, left_float)


def _make_form(
    name: str,
    module: nn.Module,
    inputs: Sequence[Inputs],
    layers: Layers,
    convert: Callable[[Path, Path, _Plan], None],
    left_float: Callable[[str, nn.Module], str],
) -> Form:
    with tempfile.TemporaryDirectory() as folder, suppress_output():
        made = write_float_files(module, inputs, Path(folder))
        if made.is_split:
            raise CannotConvertError(f"{TOO_LARGE}, and its quantizer needs it; weight-only forms can be made")
        int8 = Path(folder, "int8.onnx")
        nodes = list(find_product_nodes(made.written, made.ready))
        # quantize_dynamic replaces Gemm by MatMul and Add first
        left = [key for node, name in nodes if name in layers.excluded for key in (node.name, f"{node.name}_MatMul")]
        convert(made.ready, int8, _Plan(left, _input_tensors(made.ready, nodes)))
        content = int8.read_bytes()

    def reason(key: str, one: nn.Module) -> str:
        return layers.left_float[key] if key in layers.excluded else left_float(key, one)

    reasons = {key: reason(key, one) for key, one in module.named_modules() if any(True for _ in weights_of(one))}
    form = Form(name, OnnxCall(content, made.structure, made.dtypes), onnx=content, file_bytes=len(content))
    form.left_float = {key: why for key, why in reasons.items() if why}
    return form


def write_float_files(module: nn.Module, inputs: Sequence[Inputs], folder: Path) -> FloatFiles:
    """Write ``module`` to ``folder``, or return the files of an earlier call within :func:`sharing_export`."""
    shared = _EXPORT_CACHE.get()
    key = module, *map(id, inputs)
    if shared is not None:
        if key in shared.made:
            return shared.made[key]
        folder = shared.folder / str(len(shared.made))
        folder.mkdir(exist_ok=True)  # an earlier attempt may have failed
    written, ready = folder / "float.onnx", folder / "ready.onnx"
    made = FloatFiles(*write_float(module, inputs, written), written, ready)
    _optimize(written, ready)
    if shared is not None:
        shared.made[key] = made
    return made


def _optimize(source: Path, target: Path) -> None:
    """Write the graph after ONNX Runtime's optimization and shape inference.

    Weights in a file beside ``source`` are not read: they are inputs of the graph meanwhile, and ``target`` refers to
    the same file.
    """
    import onnx

    model = onnx.load(source, load_external_data=False)
    weights = [one for one in model.graph.initializer if one.data_location == onnx.TensorProto.EXTERNAL]
    if not weights:
        _optimize_file(source, target)
        return
    names = {one.name for one in weights}
    for place in reversed(range(len(model.graph.initializer))):
        if model.graph.initializer[place].name in names:
            del model.graph.initializer[place]
    model.graph.input.extend(onnx.helper.make_tensor_value_info(one.name, one.data_type, one.dims) for one in weights)
    graph = source.with_name("graph.onnx")
    onnx.save(model, graph)
    _optimize_file(graph, target)
    model = onnx.load(target)
    for place in reversed(range(len(model.graph.input))):
        if model.graph.input[place].name in names:
            del model.graph.input[place]
    model.graph.initializer.extend(weights)
    onnx.save(model, target)


def _data_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _optimize_file(source: Path, target: Path) -> None:
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    here = os.getcwd()
    os.chdir(source.parent)  # a failed inference of shapes leaves a file in the working directory
    try:
        quant_pre_process(source, target)
    except Exception:  # symbolic shapes fail at a Range up to a dynamic size, as torch 2.11 writes it
        model = onnx.load(source)
        del model.graph.value_info[:]  # they contradict the shapes inferred without them
        onnx.save(model, source)
        quant_pre_process(source, target, skip_symbolic_shape=True)
    finally:
        os.chdir(here)


def write_float(
    module: nn.Module, inputs: Sequence[Inputs], path: Path
) -> tuple[Structure, Sequence[torch.dtype] | None, bool]:
    """Write ``module`` as ONNX; names of inputs end in ``__`` and the index of the tensor in a call.

    Modules in bfloat16 or float16, which ONNX Runtime has no products for on CPUs, are written in float32.

    Returns:
        The structure of a call; the dtypes of the outputs of such a module, None of others; and whether the weights
        are in a further file, see :func:`~lightning_accel.compress.export.onnx.save_onnx`.
    """
    require_same_values(module, inputs)
    dtypes = None
    if has_half_precision(module):
        with torch.no_grad():
            dtypes = [one.dtype for one in tensors_of(module(*inputs[0][0], **inputs[0][1]))]
        module, inputs = copy.deepcopy(module).float(), to_float32(list(inputs))
    else:
        module = copy_with_same_parameters(module)
    make_experts_dense_(module)
    structure = Structure.of(module, inputs[0])
    flat, whole = Flat(module, structure), tuple(tensors_of(inputs[0]))
    dims = _dynamic_dims(inputs)
    tries: list[tuple[tuple[Tensor, ...], Any, Inputs | None]] = [(whole, dims, None), (whole, None, None)]
    with suppress(ValueError):  # no tensor has a dimension
        if num_samples(inputs[0]) == 1:  # sizes of 1 would be fixed in the file
            tries.insert(0, (tuple(tensors_of(first_samples(inputs[0], 2))), dims, None))
    if (shorter := shorter_call(module, inputs[0])) is not None:  # validation may have texts of other lengths
        free = _dynamic_dims([*inputs, shorter])
        tries = [(tensors, free, shorter) for tensors, shapes, _ in tries if shapes is not None] + tries
    arguments = named_tensors(bind(module.forward, *inputs[0]), others=[])
    names = [f"{name.replace('.', '_')}__{place}" for place, name in enumerate(arguments)]
    for tensors, shapes, other in tries:
        try:
            with torch.no_grad(), suppress_output():
                traced = trace(flat, tensors, shapes)
                if other is not None:
                    _require_equal(traced, flat, tensors_of(other))
                program = to_onnx(traced, names)
            break
        except Exception as error:
            failure = error
    else:
        raise CannotConvertError(f"torch.onnx cannot export it: {first_line(failure)}") from failure
    return structure, dtypes, save_onnx(program, path)


def _require_equal(program: torch.export.ExportedProgram, flat: Flat, tensors: Sequence[Tensor]) -> None:
    """Raise if a program gives something else than what it was traced from, as where that branches on a size."""
    if noise_share(flat(*tensors), program.module()(*tensors)) > 1e-6:
        raise CannotConvertError("its graph gives something else for texts of another length")


def _dynamic_dims(inputs: Sequence[Inputs]) -> tuple[tuple[dict[int, Any], ...]]:
    return (tuple(dict.fromkeys(one, torch.export.Dim.DYNAMIC) for one in dynamic_shapes(inputs)),)


def require_onnxruntime() -> None:
    """Raise a ModuleNotFoundError where a package for forms of ONNX Runtime is missing."""
    for package in ("onnx", "onnxruntime", "onnxscript"):
        require_module(package)


class _CalibrationReader:
    """Provide calls to ONNX Runtime's calibration."""

    def __init__(self, path: Path, inputs: Sequence[Inputs]) -> None:
        import onnx

        names = [one.name for one in onnx.load(path).graph.input]
        self.calls = iter(
            [
                {name: tensors_of(one)[int(name.rpartition("__")[2])].detach().numpy() for name in names}
                for one in inputs
            ]
        )

    def get_next(self) -> dict[str, Any] | None:
        return next(self.calls, None)


def find_product_nodes(floating: Path, ready: Path) -> Iterator[tuple[Any, str]]:
    """Yield the nodes of ``ready`` with products, and the names of the modules that they were traced from.

    The optimization drops the metadata of nodes, but keeps their names as prefixes of fused ones.
    """
    import onnx

    origins = {
        node.name: _source_module(node)
        for node in onnx.load(floating, load_external_data=False).graph.node
        if node.op_type in _WITH_PRODUCTS
    }
    for node in onnx.load(ready, load_external_data=False).graph.node:
        if node.op_type in _WITH_PRODUCTS:
            found = max((name for name in origins if node.name.startswith(name)), key=len, default=None)
            yield node, "" if found is None else origins[found]


def _input_tensors(path: Path, nodes: Sequence[tuple[Any, str]]) -> dict[str, str]:
    """Map the input tensor of each node to the name of its layer, with tensors that differ from it only in shape."""
    import onnx

    makers = {node.output[0]: node for node in onnx.load(path).graph.node}
    found = {}
    for node, name in nodes:
        tensor = node.input[0]
        found[tensor] = name
        while tensor in makers and makers[tensor].op_type in _SAME_GRID:
            tensor = makers[tensor].input[0]
            found.setdefault(tensor, name)
    return found


def _source_module(node: Any) -> str:
    """Return the name of the module that a node was traced from: the owner of its weight, as batch norms are folded."""
    for name in node.input:
        if name.startswith("module.") and name.endswith(".weight"):
            return name.removeprefix("module.").removesuffix(".weight")
    found = {one.key: one.value for one in node.metadata_props}.get("pkg.torch.onnx.name_scopes", "[]")
    scopes = [scope for scope in literal_eval(found)[:-1] if scope]
    return scopes[-1].removeprefix("module").removeprefix(".") if scopes else ""


def _is_lstm(module: nn.Module) -> bool:
    """Return whether a module becomes an LSTM node, which ONNX Runtime quantizes, unlike GRU and RNN."""
    return isinstance(module, nn.LSTM) or (isinstance(module, RecurrentLayer) and module.cell == "lstm")


def weights_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the own parameters of a module that have at least two dimensions."""
    return (value for value in module.parameters(recurse=False) if value.ndim > 1)


def _range_overrides(inputs: Mapping[str, str], ranges: Ranges) -> dict[str, Any]:
    """Return ONNX Runtime's overrides of the ranges of the layers' input tensors."""
    return {
        tensor: [{"rmin": np.float32(min(ranges[name][0], 0.0)), "rmax": np.float32(max(ranges[name][1], 0.0))}]
        for tensor, name in inputs.items()
        if name in ranges
    }
