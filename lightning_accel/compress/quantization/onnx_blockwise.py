"""Forms for ONNX Runtime whose weights are integers of 4 or 8 bits, with a scale for each block of inputs."""

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.export.onnx import ONE_FILE
from lightning_accel.compress.pruning.prunable import find_prunable
from lightning_accel.compress.quantization.blockwise import Rounded, has_experts, round_in_blocks, round_layers
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
from lightning_accel.compress.quantization.onnx_products import (
    DOMAIN,
    delete_unused,
    find_products,
    num_bytes,
    replace_product,
)
from lightning_accel.compress.quiet import suppress_output

BLOCK = 128  # inputs of a scale; with 32, prompts take a tenth longer, and 4 bits lose a tenth to a third less


def onnx_int4(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Make a form with weights of products in 4 bits, rounded by GPTQ in linear layers and experts."""
    require_onnxruntime()
    names = [name for name, one in layers.quantized.items() if isinstance(one, nn.Linear)]
    names += [name for name, one in module.named_modules() if has_experts(one) and name not in layers.excluded]
    return _make_form(module, inputs, layers, 4, round_layers(module, inputs, names, 4, BLOCK))


def onnx_int8(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Make a form with weights of products in 8 bits."""
    require_onnxruntime()
    return _make_form(module, inputs, layers, 8, {})


def _left(name: str, wanted: Collection[str]) -> str:
    return "its product has no constant matrix" if name in wanted else "this form has products of layers alone"


def _make_form(
    module: nn.Module, inputs: Sequence[Inputs], layers: Layers, bits: int, known: Mapping[str, Sequence[Rounded]]
) -> Form:
    with tempfile.TemporaryDirectory() as folder:
        with suppress_output():
            files = write_float_files(module, inputs, Path(folder))
        content, done, wanted = _round_products(files, module, layers, bits, known)
    form = Form(f"int{bits} ONNX Runtime weight-only", OnnxCall(content, files.structure, files.dtypes), onnx=content)
    form.file_bytes = len(content)
    form.left_float = {
        name: layers.left_float[name] if name in layers.excluded else _left(name, wanted)
        for name, one in module.named_modules()
        if name not in done and any(True for _ in weights_of(one))
    }
    return form


def _round_products(
    files: FloatFiles, module: nn.Module, layers: Layers, bits: int, known: Mapping[str, Sequence[Rounded]]
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
    products = [one for one in find_products(model.graph, names) if one.layer in wanted]
    if not products:
        raise CannotConvertError("no layer's product has a constant matrix in its graph")
    for one in products:
        matrices = one.matrices(files.ready.parent)
        rounded = _known_of(matrices, one.layer, module, known)
        if rounded is None:
            rounded = [round_in_blocks(matrix, bits, BLOCK) for matrix in matrices]
        replace_product(model.graph, one, rounded, bits)
    delete_unused(model.graph)
    if all(one.domain != DOMAIN for one in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    size = num_bytes(model.graph)
    if size > ONE_FILE:
        raise CannotConvertError(f"its file would have {size / 1e9:.1f} GB, and an ONNX file holds less than 2")
    onnx.load_external_data_for_model(model, str(files.ready.parent))
    return model.SerializeToString(), {one.layer for one in products}, wanted


def _known_of(
    matrices: Sequence[Tensor], layer: str, module: nn.Module, known: Mapping[str, Sequence[Rounded]]
) -> Sequence[Rounded] | None:
    """Return what is known of the weight that the matrices of a product are; None if they are others.

    An operator may have been folded into them, such as a batch norm.
    """
    for name, value in module.get_submodule(layer).named_parameters(recurse=False):
        rounded = known.get(f"{layer}.{name}" if layer else name, [])
        if len(rounded) == len(matrices):
            pairs = zip(value.detach().float().reshape(len(matrices), *value.shape[-2:]), matrices, strict=True)
            if all(torch.equal(one, matrix) or torch.equal(one.mT, matrix) for one, matrix in pairs):
                return rounded
    return None
