"""Forms that run in place of a module, their compilation and export."""

import inspect
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten

from lightning_accel.compress.calls import Inputs, first_line
from lightning_accel.compress.quantization.inputs import Flat, shapes_to_export, tensors_of
from lightning_accel.compress.quiet import suppress_output

MAX_NODES = 3000  # of a graph to compile; more would take many minutes


@dataclass
class Form:
    """Hold a form of a module that runs in its place.

    Attributes:
        name: such as ``"int8 PT2E static"``.
        run: function with the inputs and outputs of the module's ``forward``.
        program: program that can be saved as a ``.pt2`` file, if there is one.
        onnx: bytes of an ``.onnx`` file, if there is one.
        file_bytes: size of the file in bytes.
        left_float: reason by name, for layers that were not quantized.
        no_file: why it has no program, where one was to be had.
    """

    name: str
    run: Callable[..., Any]
    program: ExportedProgram | None = None
    onnx: bytes | None = None
    file_bytes: int | None = None
    left_float: dict[str, str] = field(default_factory=dict)
    no_file: str = ""


class CannotConvertError(RuntimeError):
    """Report that a form is not available on this machine or for this module."""


class Compiled:
    """Compile a module by inductor with constant weights, once for each size of inputs.

    Args:
        module: module to compile. It is not changed, and must not be changed later: its weights become constants.
        max_sizes: number of sizes to compile for; calls of further sizes run uncompiled.
    """

    def __init__(self, module: nn.Module, max_sizes: int = 16) -> None:
        self.module = module
        self.max_sizes = max_sizes
        self._compiled: dict[Any, tuple[Callable[..., Any], Flat]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves: Sequence[Any] = args
        key: Any
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # the usual call, faster by microseconds
            key = (args[0].shape, args[0].dtype)
        else:
            leaves, spec = tree_flatten((args, kwargs))
            key = (spec, *((one.shape, one.dtype) if isinstance(one, Tensor) else one for one in leaves))
        # Tensors of inference mode would need a second compilation
        with torch.inference_mode(False), torch.no_grad():
            if key not in self._compiled:
                if len(self._compiled) == self.max_sizes:
                    return self.module(*args, **kwargs)
                self._compiled[key] = self._compile((args, kwargs))
            run, flat = self._compiled[key]
            return flat.rebuild(run(*(one for one in leaves if isinstance(one, Tensor))))

    def _compile(self, inputs: Inputs) -> tuple[Callable[..., Any], Flat]:
        tensors = [tensor.clone() for tensor in tensors_of(inputs)]
        flat = Flat(self.module, inputs)
        flat.record_result(inputs)
        with suppress_output():
            return compile_flat(flat, tensors), flat


def compile_flat(flat: Flat, tensors: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile ``flat`` for tensors of these sizes.

    An exported graph is compiled by inductor directly: through dynamo, whose guards are checked in each call, a small
    model takes twice as long. Modules that cannot be exported are compiled through dynamo.
    """
    try:
        graph = torch.export.export(flat, tuple(tensors), strict=False).module()
    except Exception:
        compiled = torch.compile(flat, dynamic=False)
        with torch._inductor.config.patch(freezing=True):  # an option of torch.compile has no effect here
            compiled(*tensors)
        return compiled
    assert isinstance(graph, torch.fx.GraphModule)
    if len(graph.graph.nodes) > MAX_NODES:
        raise CannotConvertError(
            f"its graph has {len(graph.graph.nodes)} nodes, recurrent steps one by one perhaps: too many to compile"
        )
    run = torch._inductor.compile(graph, list(tensors), options={"freezing": True})
    run(*tensors)
    return run


def export(module: nn.Module, inputs: Sequence[Inputs], strict: bool = False) -> ExportedProgram:
    """Trace ``module`` with a dynamic batch size, and dynamic sizes that differ among ``inputs``, if possible.

    Raises:
        CannotConvertError: if it cannot be traced at all.
    """
    args, kwargs = inputs[0]
    failure: Exception | None = None
    given: list[Any] = [shapes_to_export(inputs), shapes_to_export(inputs, named=False), None]
    for shapes in given:
        try:
            with suppress_output(), torch.no_grad(), _named_arguments(module, inputs[0]):
                program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=strict)
                program.example_inputs = None  # the user's data, which a file would include
                return program
        except Exception as error:
            failure = failure or error
    raise CannotConvertError(f"torch.export cannot trace it: {first_line(failure)}") from failure


@contextmanager
def _named_arguments(module: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Temporarily name the arguments of ``*args`` and ``**kwargs`` of ``forward``, whose sizes cannot be dynamic."""
    args, kwargs = inputs
    own = module.forward
    starred = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    if not starred & {one.kind for one in inspect.signature(own).parameters.values()}:
        yield
        return

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    positional = [
        inspect.Parameter(f"argument{place}", inspect.Parameter.POSITIONAL_ONLY) for place in range(len(args))
    ]
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs]
    forward.__signature__ = inspect.Signature([*positional, *named])  # type: ignore[attr-defined]
    had = "forward" in module.__dict__
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if had:
            module.__dict__["forward"] = own
        else:
            del module.__dict__["forward"]


def size_of(program: ExportedProgram, inputs: Inputs) -> int:
    """Return the size in bytes of the ``.pt2`` file of a program that takes the tensors of a call one by one."""
    flat = Flat(program.module(), inputs)  # a file cannot hold the classes of results
    flat.record_result(inputs)
    file = io.BytesIO()
    with suppress_output(), torch.no_grad():
        traced = torch.export.export(flat, tuple(tensors_of(inputs)), strict=False)
        traced.example_inputs = None
        torch.export.save(traced, file)
    return len(file.getbuffer())
