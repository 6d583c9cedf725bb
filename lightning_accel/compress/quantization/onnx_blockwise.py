"""Forms for ONNX Runtime whose weights are integers of 4 or 8 bits, with a scale for each block of inputs."""

import math
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.export.onnx import ONE_FILE
from lightning_accel.compress.pruning.prunable import find_prunable
from lightning_accel.compress.quantization.blockwise import Rounded, round_in_blocks, round_linear_layers
from lightning_accel.compress.quantization.form import CannotConvertError, Form
from lightning_accel.compress.quantization.layers import Layers
from lightning_accel.compress.quantization.onnx import (
    FloatFiles,
    OnnxCall,
    find_product_nodes,
    require_onnxruntime,
    weights_of,
    write_float_files,
)
from lightning_accel.compress.quiet import suppress_output

_DOMAIN = "com.microsoft"
BLOCK = 128  # inputs of a scale; with 32, prompts take a tenth longer, and 4 bits lose a tenth to a third less
_IN_INT8 = 4  # the accuracy level at which inputs are rounded to int8, block by block; others are no faster than floats


def onnx_int4(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Make a form with weights of products in 4 bits, rounded by GPTQ in linear layers."""
    require_onnxruntime()
    linear = [name for name, one in layers.quantized.items() if isinstance(one, nn.Linear)]
    return _make_form(module, inputs, layers, 4, round_linear_layers(module, inputs, linear, 4, BLOCK))


def onnx_int8(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Make a form with weights of products in 8 bits."""
    require_onnxruntime()
    return _make_form(module, inputs, layers, 8, {})


def _left(name: str, wanted: Collection[str]) -> str:
    return "its product has no constant matrix" if name in wanted else "this form has products of layers alone"


class _Product(NamedTuple):
    """Hold a node of a product with a constant matrix (M, K), whose values may be in a file that is not read yet."""

    node: Any
    layer: str  # name of the module that it was traced from, "" if it is not known
    constant: Any  # (M, K) or (K, M)
    is_transposed: bool  # whether it is (K, M)
    bias: str  # name of the tensor that is added, "" if there is none

    def matrix(self, folder: Path) -> Tensor:
        """Read the matrix; ``folder`` has the files that the constant may refer to."""
        from onnx import TensorProto, numpy_helper

        read = TensorProto()  # the values are read into it, and go with it
        read.CopyFrom(self.constant)
        values = torch.from_numpy(numpy_helper.to_array(read, str(folder)).copy())
        return values.t() if self.is_transposed else values


def _make_form(
    module: nn.Module, inputs: Sequence[Inputs], layers: Layers, bits: int, known: Mapping[str, Rounded]
) -> Form:
    with tempfile.TemporaryDirectory() as folder:
        with suppress_output():
            files = write_float_files(module, inputs, Path(folder))
        content, done, wanted = _round_products(files, module, layers, bits, known)
    form = Form(f"int{bits} ONNX Runtime weight-only", OnnxCall(content, files.structure), onnx=content)
    form.file_bytes = len(content)
    form.left_float = {
        name: layers.left_float[name] if name in layers.excluded else _left(name, wanted)
        for name, one in module.named_modules()
        if name not in done and any(True for _ in weights_of(one))
    }
    return form


def _round_products(
    files: FloatFiles, module: nn.Module, layers: Layers, bits: int, known: Mapping[str, Rounded]
) -> tuple[bytes, set[str], set[str]]:
    """Return the bytes of a file with integers, the layers that they are in, and those that they should be in."""
    import onnx

    names = {node.name: name for node, name in find_product_nodes(files.written, files.ready)}
    model = onnx.load(files.ready, load_external_data=False)
    found, reasons = find_prunable(module)  # no gates of experts
    names_of_weights = [one.name for one in found] + [name for name, why in reasons.items() if why == "frozen"]
    tied = {id(one.weight) for one in module.modules() if isinstance(one, nn.Embedding)}
    wanted = {name.rpartition(".")[0] for name in names_of_weights}
    wanted |= {name for name, one in layers.quantized.items() if id(one.weight) in tied}
    wanted -= layers.excluded
    products = [one for one in _find_products(model.graph, names) if one.layer in wanted]
    if not products:
        raise CannotConvertError("no layer's product has a constant matrix in its graph")
    for one in products:
        matrix, rounded = one.matrix(files.ready.parent), known.get(one.layer)
        if rounded is None or not torch.equal(module.get_submodule(one.layer).weight, matrix):  # type: ignore[arg-type]
            rounded = round_in_blocks(matrix, bits, BLOCK)  # an operator was folded into it, say
        _replace(model.graph, one, rounded, bits)
    _delete_unused(model.graph)
    if all(one.domain != _DOMAIN for one in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    size = sum(_num_bytes(one) for one in model.graph.initializer)
    if size > ONE_FILE:
        raise CannotConvertError(f"its file would have {size / 1e9:.1f} GB, and an ONNX file holds less than 2")
    onnx.load_external_data_for_model(model, str(files.ready.parent))
    return model.SerializeToString(), {one.layer for one in products}, wanted


def _delete_unused(graph: Any) -> None:
    """Delete transposes of constants, and constants, that no node uses any more."""
    for part in (graph.node, graph.initializer):
        used = {name for node in graph.node for name in node.input} | {one.name for one in graph.output}
        for place in reversed(range(len(part))):  # what was kept would be copied by extend
            one = part[place]
            name = one.name if part is graph.initializer else one.output[0] if one.op_type == "Transpose" else ""
            if name and name not in used:
                del part[place]


def _num_bytes(tensor: Any) -> int:
    from onnx.helper import tensor_dtype_to_np_dtype

    return math.prod(tensor.dims) * tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _find_products(graph: Any, names: Mapping[str, str]) -> Iterator[_Product]:
    import onnx

    constants = {one.name: (one, False) for one in graph.initializer}
    for node in graph.node:  # those of weights in a further file are not computed beforehand
        permutation = [list(one.ints) for one in node.attribute]
        if node.op_type == "Transpose" and node.input[0] in constants and permutation in ([], [[1, 0]]):
            constants[node.output[0]] = constants[node.input[0]][0], True
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in constants:
            continue
        options = {one.name: one.f if one.name in ("alpha", "beta") else one.i for one in node.attribute}
        if options.get("transA", 0) or options.get("alpha", 1) != 1 or options.get("beta", 1) != 1:
            continue
        constant, is_turned = constants[node.input[1]]
        if len(constant.dims) != 2 or constant.data_type != onnx.TensorProto.FLOAT:
            continue
        is_transposed = is_turned == bool(options.get("transB", 0))
        bias = node.input[2] if len(node.input) > 2 else ""
        if not bias or (bias in constants and list(constants[bias][0].dims) == [constant.dims[int(is_transposed)]]):
            yield _Product(node, names.get(node.name, ""), constant, is_transposed, bias)


def _replace(graph: Any, product: _Product, rounded: Rounded, bits: int) -> None:
    """Put a product with integers in place of that with floats."""
    from onnx import helper, numpy_helper

    node, (num_out, num_in) = product.node, rounded.integers.shape
    stem = f"{node.input[1]}_{node.output[0]}"
    added = {f"{stem}_int{bits}": pack(rounded.integers, bits, rounded.block), f"{stem}_scales": rounded.scales}
    graph.initializer.extend(numpy_helper.from_array(value.contiguous().numpy(), name) for name, value in added.items())
    tensors = [node.input[0], *added, *(["", "", product.bias] if product.bias else [])]
    new = helper.make_node(
        "MatMulNBits", tensors, list(node.output), node.name, domain=_DOMAIN,
        K=num_in, N=num_out, bits=bits, block_size=rounded.block, accuracy_level=_IN_INT8,
    )  # fmt: skip
    graph.node.insert(list(graph.node).index(node), new)
    graph.node.remove(node)


def pack(integers: Tensor, bits: int, block: int) -> Tensor:
    """Pack signed integers (M, K) as ONNX Runtime's MatMulNBits reads them, (M, ceil(K / B), B * bits / 8) uint8."""
    num_out, num_in = integers.shape
    zero = 2 ** (bits - 1)  # integers are unsigned there, with this one in the middle
    padded = integers.new_zeros(num_out, -(-num_in // block) * block)
    padded[:, :num_in] = integers
    unsigned = (padded.int() + zero).to(torch.uint8).view(num_out, -1, block)
    return unsigned if bits == 8 else unsigned[..., ::2] | unsigned[..., 1::2] << 4
