"""Forms of a module for torch: compiled float32 and bfloat16, and int8, int4 and float8 by torchao."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_accel.compress.calls import Inputs, first_line
from lightning_accel.compress.export.structure import Structure, Unflat, tensors_of
from lightning_accel.compress.quantization.form import CannotConvertError, Compiled, Form, export, size_of
from lightning_accel.compress.quantization.layers import INPUT_LIMIT, WEIGHT_LIMIT, Layers
from lightning_accel.compress.quiet import suppress_output
from lightning_accel.compress.report.forms import InBfloat16
from lightning_accel.ops.extras import require_module

Ranges = Mapping[str, tuple[float, float]]


def compiled_float(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Make a compiled form with constant weights."""
    return _make_form("fp32 compiled", copy.deepcopy(module), inputs)


_INT8_MULTIPLE = 8  # of the sizes of int8 matrices that torch multiplies on a GPU
_GROUP_SIZES = (128, 64, 32)  # numbers of int4 weights with one scale, of those that torch's kernel multiplies


def compiled_bfloat16(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Make a compiled form in bfloat16 that takes and returns float32."""
    return _make_form("bf16 compiled", InBfloat16(module), inputs)


def pt2e_static(module: nn.Module, inputs: Sequence[Inputs], layers: Layers, ranges: Ranges | None = None) -> Form:
    """Make a form with weights and inputs of linear layers and convolutions in int8, and fixed input ranges.

    Args:
        module: module to convert, which is not changed.
        inputs: calls to determine input ranges on.
        layers: layers of ``module`` to quantize.
        ranges: input ranges found in training, by layer name.
    """
    graph = _prepare(module, inputs, layers)
    with torch.no_grad():
        for call in inputs:
            graph(*tensors_of(call))
    if ranges is not None:
        _set_ranges(graph, ranges)
    return _convert(graph, Structure.of(module, inputs[0]), inputs, layers)


def torchao_dynamic(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Make a form with linear layers in int8 and input ranges computed for each row of an input."""
    config = _import_torchao().quantization.Int8DynamicActivationInt8WeightConfig()
    sizes = {
        name: (one.in_features, one.out_features)
        for name, one in layers.quantized.items()
        if isinstance(one, nn.Linear) and one.weight.is_cuda
    }
    left = {
        name: f"GPUs multiply int8 matrices of multiples of {_INT8_MULTIPLE}, not {num_in} by {num_out}"
        for name, (num_in, num_out) in sizes.items()
        if num_in % _INT8_MULTIPLE or num_out % _INT8_MULTIPLE
    }
    chosen = {name: one for name, one in layers.quantized.items() if name not in left}
    layers = layers._replace(quantized=chosen, left_float={**layers.left_float, **left})
    return _quantize_with_torchao("int8 torchao dynamic", module, inputs, layers, lambda name: config)


def torchao_weight_only(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Make a form with weights of linear layers in int8 and products in floating point.

    On CPUs the compiler computes the floats beforehand: the form is as fast as floats, and its file a quarter as large.
    """
    config = _import_torchao().quantization.Int8WeightOnlyConfig()
    return _quantize_with_torchao("int8 torchao weight-only", module, inputs, layers, lambda name: config)


def torchao_int4(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Make a form with weights of linear layers in 4 bits and products in bfloat16; needs GPU compute capability 8.0.

    The values are those of HQQ (Badri & Shaji 2023), 128 with one scale and zero point, or 64 or 32 where the number of
    inputs is no multiple of 128.
    """
    _require_capability("int4", (8, 0))
    group_sizes = {
        name: next((size for size in _GROUP_SIZES if one.in_features % size == 0), 0)
        for name, one in layers.quantized.items()
        if isinstance(one, nn.Linear)
    }
    left = {
        name: f"4 bits need a multiple of {_GROUP_SIZES[-1]} inputs, not {layers.quantized[name].in_features}"
        for name, size in group_sizes.items()
        if not size
    }
    layers = layers._replace(
        quantized={name: one for name, one in layers.quantized.items() if name not in left},
        left_float={**layers.left_float, **left},
    )
    config = _import_torchao().quantization.Int4WeightOnlyConfig
    options = {"int4_packing_format": "tile_packed_to_4d", "int4_choose_qparams_algorithm": "hqq"}
    return _quantize_with_torchao(
        "int4 torchao weight-only", module, inputs, layers, lambda name: config(group_sizes[name], **options)
    )


def torchao_float8(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Make a form with linear layers in float8 (e4m3), one scale per tensor; needs GPU compute capability 8.9."""
    _require_capability("float8", (8, 9))
    config = _import_torchao().quantization.Float8DynamicActivationFloat8WeightConfig()
    return _quantize_with_torchao("float8 torchao dynamic", module, inputs, layers, lambda name: config)


def _require_capability(dtype: str, needed: tuple[int, int]) -> None:
    found = torch.cuda.get_device_capability()
    if found < needed:
        raise CannotConvertError(
            f"{dtype} needs compute capability {'.'.join(map(str, needed))}; this GPU has {'.'.join(map(str, found))}"
        )


def _make_form(
    name: str, module: nn.Module, inputs: Sequence[Inputs], left_float: dict[str, str] | None = None
) -> Form:
    form = Form(name, Compiled(module), left_float=left_float or {})
    try:
        form.program = export(module, inputs)
        form.file_bytes = size_of(form.program)
    except Exception as error:  # the form may still compile; files are optional
        form.program, form.no_file = None, first_line(error)
    args, kwargs = inputs[0]
    form.run(*args, **kwargs)
    return form


def _quantize_with_torchao(
    name: str, module: nn.Module, inputs: Sequence[Inputs], layers: Layers, config_of: Callable[[str], Any]
) -> Form:
    """Make a form with the linear layers among ``layers`` quantized, each by the configuration of its name."""
    linear = [key for key, one in layers.quantized.items() if isinstance(one, nn.Linear)]
    if not linear:
        raise CannotConvertError("no linear layer to quantize")
    copied, prefix = copy.deepcopy(module), ""
    if next(module.parameters()).is_cuda:  # other operations are also faster in bfloat16 there
        copied, prefix = InBfloat16(module), "module."
    with suppress_output():
        for key in linear:
            layer = copied.get_submodule((prefix + key).removesuffix("."))
            _import_torchao().quantization.quantize_(layer, config_of(key), lambda one, _: isinstance(one, nn.Linear))
    left = {key: "this form has linear layers alone" for key in layers.quantized if key not in linear}
    return _make_form(name, copied, inputs, {**layers.left_float, **left})


def _prepare(module: nn.Module, inputs: Sequence[Inputs], layers: Layers) -> Any:
    """Return a graph of ``module`` with observers of ranges."""
    _import_torchao()
    with suppress_output():
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

        if not layers.quantized:
            raise CannotConvertError("no layer that it can quantize")
        # Before torch 2.13, non-strict graphs lack some metadata of their layers, and merge two calls of a layer
        # without weights (the ReLU of a residual block) into one partition with two results, which is rejected
        failure: Exception = CannotConvertError("no layer of its graph was found to be one that can be quantized")
        for strict in (False, True):
            try:
                graph = export(copy.deepcopy(module), inputs, [strict]).module()
                prepared = prepare_pt2e(graph, _quantizer(layers.quantized))
            except Exception as error:
                failure = error
                continue
            if any(True for _ in _input_observers(prepared)):
                return prepared
        raise failure


def _quantizer(names: Iterable[str]) -> Any:
    from torchao.quantization.pt2e import HistogramObserver, PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantizer import QuantizationSpec
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import QuantizationConfig, X86InductorQuantizer

    eps = torch.finfo(torch.float32).eps
    of_input = QuantizationSpec(
        dtype=torch.uint8,
        quant_min=0,
        quant_max=INPUT_LIMIT,
        qscheme=torch.per_tensor_affine,
        is_dynamic=False,
        observer_or_fake_quant_ctr=HistogramObserver.with_args(eps=eps),
    )
    of_weight = QuantizationSpec(
        dtype=torch.int8,
        quant_min=-WEIGHT_LIMIT,
        quant_max=WEIGHT_LIMIT,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
        is_dynamic=False,
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=eps),
    )
    config = QuantizationConfig(of_input, of_input, of_weight, None, False)
    quantizer = X86InductorQuantizer()
    for name in names:
        quantizer.set_module_name_qconfig(f"module.{name}" if name else "module", config)
    return quantizer


def _convert(prepared: Any, structure: Structure, inputs: Sequence[Inputs], layers: Layers) -> Form:
    """Convert an observed graph to int8."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    observed = {layer for layer, _ in _input_observers(prepared)}
    left = {key: "torchao found no pattern that it quantizes" for key in layers.quantized if key not in observed}
    with suppress_output():
        graph = convert_pt2e(prepared)
    _delete_unused(graph)
    return _make_form("int8 PT2E static", Unflat(graph, structure), inputs, {**layers.left_float, **left})


def _delete_unused(graph: torch.fx.GraphModule) -> None:
    """Delete the float weights, which a converted graph keeps beside those in int8, and metadata of its nodes."""
    used = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for path in [name for name, _ in (*graph.named_parameters(), *graph.named_buffers()) if name not in used]:
        holder, _, name = path.rpartition(".")
        delattr(graph.get_submodule(holder), name)
    for node in graph.graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key == "val"}


def _set_ranges(graph: Any, ranges: Ranges) -> None:
    """Set the ranges of the observers of layers' inputs to those found in training."""
    from torchao.quantization.pt2e import MinMaxObserver

    for name, observer in list(_input_observers(graph)):
        if name in ranges:
            low, high = ranges[name]
            options = {key: getattr(observer, key) for key in ("dtype", "qscheme", "quant_min", "quant_max")}
            fixed = MinMaxObserver(**options, eps=float(observer.eps))
            fixed.min_val, fixed.max_val = torch.tensor([min(low, 0.0), max(high, 0.0)])
            for path, part in list(graph.named_modules(remove_duplicate=False)):  # layers may share their input
                if part is observer:
                    graph.set_submodule(path, fixed)


def _input_observers(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of each layer in the graph, and the observer of its input."""
    targets = {
        torch.ops.aten.linear.default,
        torch.ops.aten.conv1d.default,
        torch.ops.aten.conv2d.default,
    }
    for node in graph.graph.nodes:
        if node.target in targets and node.args[0].op == "call_module":
            stack = list(node.meta["nn_module_stack"].values())
            yield stack[-1][0].removeprefix("module").removeprefix("."), graph.get_submodule(node.args[0].target)


def _import_torchao() -> Any:
    with suppress_output():
        require_module("torchao.quantization")
        return require_module("torchao")
