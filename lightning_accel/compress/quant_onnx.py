"""Forms that ONNX Runtime runs on CPUs."""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_accel.compress.forms import Inputs
from lightning_accel.compress.quant_form import CannotConvertError, Form, first_line, quietly
from lightning_accel.compress.quant_inputs import Flat, argument_names, dynamic_sizes, tensors_of
from lightning_accel.compress.quant_layers import Layers
from lightning_accel.compress.quant_torch import Ranges, has_vnni

_RECURRENT = (nn.LSTM,)  # that ONNX Runtime quantizes; its GRU and RNN stay float
_WITH_PRODUCTS = ("Conv", "Gemm", "MatMul", "LSTM")


class OnnxCall:
    """Runs the bytes of an ONNX file; takes and returns what the module that it was made of does."""

    def __init__(self, content: bytes, flat: Flat) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self.names = [one.name for one in self.session.get_inputs()]
        self.kept = [int(name.rpartition("__")[2]) for name in self.names]  # what is not used has no input
        self.flat = flat

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of((args, kwargs))
        feed = {name: tensors[place].detach().numpy() for name, place in zip(self.names, self.kept, strict=True)}
        return self.flat.rebuild([torch.from_numpy(value) for value in self.session.run(None, feed)])


def onnx_dynamic(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Weights of linear layers and LSTMs in int8, inputs rounded by the range that each call has."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    def convert(source: Path, target: Path, nodes: list[str]) -> None:
        # Of convolutions, its dynamic kernel is several times slower than that in floats
        kinds = ["MatMul", "Gemm", "LSTM"]
        quantize_dynamic(
            source, target, kinds, weight_type=QuantType.QInt8, nodes_to_exclude=nodes, reduce_range=not has_vnni()
        )

    def left_float(name: str, one: nn.Module) -> str:
        return "" if isinstance(one, (nn.Linear, *_RECURRENT)) else "this form has linear layers and LSTMs alone"

    return _form("int8 ONNX Runtime dynamic", module, inputs, layers, convert, left_float)


def onnx_static(module: nn.Module, inputs: Sequence[Inputs], layers: Layers, ranges: Ranges | None = None) -> Form:
    """Weights (int8) and inputs (uint8) of linear layers and convolutions, the ranges of inputs fixed.

    Args: as :func:`lightning_accel.compress.quant_torch.pt2e_static` takes them.
    """
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    def convert(source: Path, target: Path, nodes: list[str]) -> None:
        quantize_static(
            source,
            target,
            _Reader(source, inputs),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],
            per_channel=True,
            reduce_range=not has_vnni(),
            activation_type=QuantType.QUInt8,  # with int8 there are no quick kernels on CPUs
            weight_type=QuantType.QInt8,
            nodes_to_exclude=nodes,
            calibrate_method=CalibrationMethod.MinMax,
            extra_options={"TensorQuantOverrides": _overrides(source, ranges or {})},
        )

    def left_float(name: str, one: nn.Module) -> str:
        return "" if name in layers.quantized else layers.left_float.get(name, "")

    return _form("int8 ONNX Runtime static", module, inputs, layers, convert, left_float)


def _form(
    name: str,
    module: nn.Module,
    inputs: Sequence[Inputs],
    layers: Layers,
    convert: Callable[[Path, Path, list[str]], None],
    left_float: Callable[[str, nn.Module], str],
) -> Form:
    require_onnxruntime()
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder, quietly(), _silent():
        paths = [Path(folder, name) for name in ("float.onnx", "ready.onnx", "int8.onnx")]
        flat = write_float(module, inputs, paths[0])
        quant_pre_process(paths[0], paths[1])
        skipped = [key for key, why in layers.left_float.items() if why.startswith("left out by skip")]
        convert(paths[1], paths[2], _nodes_of(paths[1], skipped))
        content = paths[2].read_bytes()
    left = {key: left_float(key, one) for key, one in module.named_modules() if any(True for _ in _weights(one))}
    form = Form(name, OnnxCall(content, flat), onnx=content, file_bytes=len(content))
    form.left_float = {key: why for key, why in left.items() if why}
    return form


def write_float(module: nn.Module, inputs: Sequence[Inputs], path: Path) -> Flat:
    """Write ``module`` as ONNX. Names of inputs end in ``__`` and the place of the tensor among those of a call."""
    flat = Flat(module, inputs[0])
    flat.see_result(inputs[0])
    tensors = tuple(tensors_of(inputs[0]))
    names = [f"{name}__{place}" for place, name in enumerate(argument_names(module, inputs[0]))]
    dims = [dict.fromkeys(one, torch.export.Dim.DYNAMIC) or None for one in dynamic_sizes(inputs)]
    for shapes in ((tuple(dims),), None):
        try:
            with torch.no_grad():
                program = torch.onnx.export(
                    flat, tensors, dynamo=True, dynamic_shapes=shapes, input_names=names, verbose=False
                )
            break
        except Exception as error:
            failure = error
    else:
        raise CannotConvertError(f"torch.onnx cannot export it: {first_line(failure)}") from failure
    assert program is not None
    program.save(path)
    return flat


def require_onnxruntime() -> None:
    """Refuse where one of the packages is missing."""
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]
    if missing:
        raise CannotConvertError(f'needs {", ".join(missing)}: pip install "lightning_accel[compress]"')


class _Reader:
    """Calls, as ONNX Runtime's calibration reads them."""

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


def _nodes_of(path: Path, names: Sequence[str]) -> list[str]:
    """Nodes with products that come from the modules of these names."""
    import onnx

    return [
        node.name for node in onnx.load(path).graph.node if node.op_type in _WITH_PRODUCTS and _module_of(node) in names
    ]


def _overrides(path: Path, ranges: Ranges) -> Mapping[str, Any]:
    """Ranges of the tensors that go into layers, in ONNX Runtime's terms."""
    import onnx

    return {
        node.input[0]: [{"rmin": np.float32(min(ranges[name][0], 0.0)), "rmax": np.float32(max(ranges[name][1], 0.0))}]
        for node in onnx.load(path).graph.node
        if node.op_type in _WITH_PRODUCTS and (name := _module_of(node)) in ranges
    }


def _module_of(node: Any) -> str:
    """Name of the module that a node was traced from, ``""`` if it is not known."""
    import ast

    found = {one.key: one.value for one in node.metadata_props}.get("pkg.torch.onnx.name_scopes", "[]")
    scopes = [scope for scope in ast.literal_eval(found)[:-1] if scope]
    return scopes[-1].removeprefix("module").removeprefix(".") if scopes else ""


def _weights(module: nn.Module) -> Iterator[Tensor]:
    return (value for value in module.parameters(recurse=False) if value.ndim > 1)


@contextmanager
def _silent() -> Iterator[None]:
    """Without what exporters log and print of their own doings."""
    levels = {name: logging.getLogger(name).level for name in ("torch.onnx", "onnxscript", "root", "")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
