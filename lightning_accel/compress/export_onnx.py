"""What comes before and after a model, in one ONNX file with a model that others quantized."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.export_flat import FromTensors
from lightning_accel.compress.quant_inputs import tensors_of
from lightning_accel.compress.structure import named_tensors, restore


def around_quantized(content: bytes, flat: FromTensors, calls: Sequence[Inputs]) -> tuple[Any, dict[str, Any]]:
    """The model in ``content``, with the preprocessing and postprocessing of ``flat`` as nodes of the same graph.

    Args:
        content: an ONNX file. Names of its inputs end in ``__`` and the place of the tensor among those of a call of
            the module; its outputs are the tensors that the module returns.
        flat: the whole, from tensors to tensors.
        calls: of the whole, that differ in the sizes that are free.

    Returns:
        An ``onnx.ModelProto``, and what has to be known to run it: ``onnx_inputs``, the tensor of a call for each of
        its inputs, and ``onnx_outputs``, the place among its outputs of each tensor that the file gives.
    """
    import onnx

    model = onnx.load_model_from_string(content)
    output = flat.inner_output()
    names = list(flat.tensors_of(flat.example))
    if flat.preprocess is not None:
        places = {one.name: _place(one.name) for one in model.graph.input}
        before = _Before(flat, list(places.values()))
        made = _graph(before, [tensors_of(call) for call in calls], "raw")
        given = [one.name for one in made.graph.output]
        model = _joined(made, model, dict(zip(given, places, strict=True)))
    inputs = {one.name: names[_place(one.name)] for one in model.graph.input}
    kept = (
        [list(named_tensors(output, others=[])).index(name) for name in flat.kept] if flat.postprocess is None else None
    )
    if flat.postprocess is not None:
        inner = [flat.preprocessed(*call) for call in calls]
        outputs = [tensors_of(flat.module(*args, **kwargs)) for args, kwargs in inner]
        made = _graph(_After(flat, output), outputs, "given")
        model_outputs = [one.name for one in model.graph.output]
        model = _joined(model, made, {model_outputs[_place(one.name)]: one.name for one in made.graph.input})
    return model, {"onnx_inputs": inputs, "onnx_outputs": kept}


class _Before(nn.Module):
    """From the tensors of a call to those of them, preprocessed, that the module uses."""

    def __init__(self, flat: FromTensors, places: Sequence[int]) -> None:
        super().__init__()
        self.flat = flat
        self.places = places

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = restore(self.flat.example, iter(tensors))
        found = tensors_of(self.flat.preprocessed(args, kwargs))
        return tuple(found[place] for place in self.places)


class _After(nn.Module):
    """From the tensors that the module returns to those that the file gives."""

    def __init__(self, flat: FromTensors, output: Any) -> None:
        super().__init__()
        self.postprocess = flat.postprocess
        self.kept = flat.kept
        self.output = output

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert self.postprocess is not None
        found = named_tensors(self.postprocess(restore(self.output, iter(tensors))), others=[])
        return tuple(found[name] for name in self.kept)


def _graph(module: nn.Module, calls: Sequence[Sequence[Tensor]], name: str) -> Any:
    """``module`` as ONNX; its inputs are called ``name`` with ``__`` and their place."""
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
    return program.model_proto


def _joined(first: Any, second: Any, connections: Mapping[str, str]) -> Any:
    """``second`` after ``first``: outputs of one go into inputs of the other."""
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


def _place(name: str) -> int:
    return int(name.rpartition("__")[2])
