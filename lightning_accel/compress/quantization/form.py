"""Forms that run in place of a module, their compilation and export."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lightning_accel._private.torch import frozen_weights
from lightning_accel.compress.autotuning import autotuned, compile_frozen
from lightning_accel.compress.calls import Inputs, first_line
from lightning_accel.compress.export.structure import (
    Flat,
    Structure,
    bind,
    changing_values,
    describe,
    describe_changing,
    named_tensors,
    tensors_of,
)
from lightning_accel.compress.quantization.inputs import dynamic_shapes
from lightning_accel.compress.quiet import suppress_output
from lightning_accel.compress.report.report import ByteCounter
from lightning_accel.compress.tracing import trace

MAX_SIZES = 16
_MEMORY = Path("/proc/meminfo")
MAX_NODES = 3000  # of a graph to compile; more would take many minutes


@dataclass
class Form:
    """Hold a form of a module that runs in its place.

    Attributes:
        name: such as ``"int8 PT2E static"``.
        run: function with the inputs and outputs of the module's ``forward``.
        program: program that can be saved as a ``.pt2`` file, if there is one; from the tensors of a call to those of
            the output.
        onnx: bytes of an ``.onnx`` file, if there is one.
        file_bytes: size of the file in bytes.
        left_float: reason by name, for layers that were not quantized.
        no_file: why it has no program, where one was to be had.
    """

    name: str
    run: Callable[..., Any] = field(repr=False)
    program: ExportedProgram | None = field(default=None, repr=False)
    onnx: bytes | None = field(default=None, repr=False)
    file_bytes: int | None = None
    left_float: dict[str, str] = field(default_factory=dict)
    no_file: str = ""


def require_memory(module: nn.Module, copies: float) -> None:
    """Raise if less memory is free than ``copies`` times the weights of ``module``; systems but Linux are not asked.

    Without this the system would end the process, with the training.

    Raises:
        CannotConvertError: if the memory is too small.
    """
    try:
        lines = _MEMORY.read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return
    needed = copies * nbytes_of(module)
    if needed > free:
        raise CannotConvertError(f"it needs about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} are free")


def nbytes_of(module: nn.Module) -> int:
    """Return the bytes that the parameters of ``module`` take in the memory of the CPU."""
    return sum(value.nbytes for value in module.parameters() if value.device.type == "cpu")


class CannotConvertError(RuntimeError):
    """Report that a form is not available on this machine or for this module."""


def describe_failure(error: Exception) -> str:
    """Return the message of a :class:`CannotConvertError`, or the type and first line of another exception."""
    return str(error) if isinstance(error, CannotConvertError) else first_line(error)


class Compiled:
    """Compile a module by inductor with constant weights, once for each size of inputs.

    Calls of more than :data:`MAX_SIZES` sizes run uncompiled.

    Args:
        module: module to compile. It is not changed, and must not be changed later: its weights become constants.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._compiled: dict[Any, tuple[Callable[..., Any], Structure]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: Sequence[Tensor] = [*args, *kwargs.values()]
        key: Any = tuple(kwargs)
        if not all(isinstance(one, Tensor) for one in tensors):  # else it is faster by microseconds
            others: list[str] = []
            tensors = list(named_tensors((args, kwargs), others=others).values())
            if others:  # what else is in them may differ from call to call
                return self.module(*args, **kwargs)
            key = str(describe((args, kwargs)))
        tensors = [one if _is_dense(one) else one.contiguous() for one in tensors]  # strides are compiled in
        key = (key, *((one.shape, one.dtype, one.is_contiguous()) for one in tensors))
        # Tensors of inference mode would need a second compilation
        with torch.inference_mode(False), torch.no_grad():
            if key not in self._compiled:
                if len(self._compiled) == MAX_SIZES:
                    return self.module(*args, **kwargs)
                self._compiled[key] = self._compile((args, kwargs))
            run, structure = self._compiled[key]
            return structure.rebuild(run(*tensors))

    def _compile(self, inputs: Inputs) -> tuple[Callable[..., Any], Structure]:
        structure = Structure.of(self.module, inputs)
        with suppress_output():
            return compile_flat(Flat(self.module, structure), [one.clone() for one in tensors_of(inputs)]), structure


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def compile_flat(flat: Flat, tensors: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile ``flat`` for tensors of these sizes.

    An exported graph is compiled by inductor directly: through dynamo, whose guards are checked in each call, a small
    model takes twice as long. Modules that cannot be exported are compiled through dynamo.
    """
    try:
        graph = trace(flat, tensors, strict=[False]).module()
    except Exception:
        compiled = torch.compile(flat, dynamic=False)

        def run(*tensors: Tensor) -> Sequence[Tensor]:
            with frozen_weights():  # in each call: torch.export drops what dynamo has compiled, and it compiles again
                return compiled(*tensors)

        run(*tensors)
        return run
    assert isinstance(graph, torch.fx.GraphModule)
    if len(graph.graph.nodes) > MAX_NODES:
        raise CannotConvertError(
            f"its graph has {len(graph.graph.nodes)} nodes, recurrent steps one by one perhaps: too many to compile"
        )
    plain = compile_frozen(graph, tensors)
    plain(*tensors)
    return autotuned(graph, tensors, plain, lambda: compile_frozen(graph, tensors, True))


def export(module: nn.Module, inputs: Sequence[Inputs], strict: Sequence[bool] = (False, True)) -> ExportedProgram:
    """Trace ``module`` from tensors to tensors, with dynamic sizes as far as possible.

    Raises:
        CannotConvertError: if it cannot be traced at all, or calls differ in what is no tensor.
    """
    require_same_values(module, inputs)
    flat, tensors = Flat(module, Structure.of(module, inputs[0])), tuple(tensors_of(inputs[0]))
    failure: Exception | None = None
    for shapes in ((dynamic_shapes(inputs),), (dynamic_shapes(inputs, named=False),), None):
        try:
            with suppress_output(), torch.no_grad():
                program = trace(flat, tensors, shapes, strict)
                if any("access_subclass" in str(node.target) for node in program.graph.nodes):
                    program = program.run_decompositions({})  # torchao's classes of weights to plain tensors
                program.example_inputs = None  # the user's data, which a file would include
                return program
        except Exception as error:
            failure = failure or error
    raise CannotConvertError(f"torch.export cannot trace it: {first_line(failure)}") from failure


def require_same_values(module: nn.Module, inputs: Sequence[Inputs]) -> None:
    """Raise a :class:`CannotConvertError` if calls differ in what is no tensor, which a graph holds as a constant."""
    if changing := changing_values([bind(module.forward, *call) for call in inputs]):
        raise CannotConvertError(
            f"{describe_changing(changing)} in its calls, and a graph holds what is no tensor as a constant: let "
            "forward take it from its tensors"
        )


def size_of(program: ExportedProgram) -> int:
    """Return the size in bytes of the ``.pt2`` file of a program."""
    counter = ByteCounter()
    with suppress_output():
        torch.export.save(program, counter)
    return counter.num_bytes
