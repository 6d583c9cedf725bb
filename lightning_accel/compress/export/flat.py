"""A module with preprocessing and postprocessing as a function from tensors to tensors, as files hold it."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from lightning_accel.compress.calls import Inputs, Run
from lightning_accel.compress.export.structure import Structure, Unflat, bind, named_tensors, restore
from lightning_accel.compress.tracing import copy_with_same_parameters, make_experts_dense_


class FromTensors(nn.Module):
    """Wrap ``module``, its preprocessing and its postprocessing as a function from tensors to a tuple of tensors."""

    def __init__(
        self, module: nn.Module, preprocess: nn.Module | None, postprocess: nn.Module | None, dense: bool
    ) -> None:
        super().__init__()
        self.module = copy_with_same_parameters(module)
        self.preprocess = copy.deepcopy(preprocess)
        self.postprocess = copy.deepcopy(postprocess)
        for one in self.modules():
            one.training = False  # programs of torch.export reject eval()
        if dense:
            make_experts_dense_(self)
        self.signature = module.forward
        self.example: Inputs = (), {}
        self.arguments: dict[str, Any] = {}
        self.output: Any = None
        self.kept: list[str] = []
        self.left_out: list[str] = []
        self.unused: list[str] = []  # arguments that the file does not need

    def keep(self, live: Run, example: Inputs, calls: Sequence[Inputs]) -> None:
        """Choose the outputs of the file: those whose size depends on that of the call, or all."""
        self.example = example
        self.arguments = bind(self.signature, *example)
        self.output = live(*example[0], **example[1])
        found = [{name: value.shape for name, value in outputs_of(live, call).items()} for call in calls]
        known = list(found[0])
        follow = [name for name in known if any(one.get(name) != found[0][name] for one in found)]
        self.kept = follow or known
        self.left_out = [name for name in known if name not in self.kept]

    def tensors_of(self, call: Inputs) -> dict[str, Tensor]:
        return named_tensors(bind(self.signature, *call))

    def whole(self, *args: Any, run: Run | None = None, **kwargs: Any) -> Any:
        args, kwargs = self.preprocessed(args, kwargs)
        output = (run or self.module)(*args, **kwargs)
        return output if self.postprocess is None else self.postprocess(output)

    def preprocessed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Return the arguments of the module, after preprocessing."""
        if self.preprocess is None:
            return args, kwargs
        if args:
            return (self.preprocess(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: self.preprocess(kwargs[first])}

    def module_output(self) -> Any:
        """Return the output of the module for the example."""
        args, kwargs = self.preprocessed(*self.example)
        return self.module(*args, **kwargs)

    def replace_module(self, program: ExportedProgram) -> None:
        """Replace the module by a program from the tensors of a call to those of the output."""
        structure = Structure.of(self.module, self.preprocessed(*self.example))
        self.module = Unflat(program.module(check_guards=False), structure)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = restore(self.example, iter(tensors))
        found = named_tensors(self.whole(*args, **kwargs), others=[])
        return tuple(found[name] for name in self.kept)


def outputs_of(run: Run, call: Inputs) -> dict[str, Tensor]:
    """Return the output tensors of ``run`` by name; other outputs, such as a cache, are dropped."""
    args, kwargs = call
    return named_tensors(run(*args, **kwargs), others=[])
