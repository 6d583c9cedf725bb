"""A module as a function from tensors to tensors, which is what files hold. Shapes: B rows."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from lightning_accel.compress.calls import Inputs, Run
from lightning_accel.compress.structure import bind, named_tensors, restore
from lightning_accel.nn.moe import Experts
from lightning_accel.ops.names import list_of_names


class FromTensors(nn.Module):
    """``module``, and what comes before and after it, as a function from tensors to a tuple of tensors."""

    def __init__(
        self, module: nn.Module, preprocess: nn.Module | None, postprocess: nn.Module | None, dense: bool
    ) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)
        self.preprocess = copy.deepcopy(preprocess)
        self.postprocess = copy.deepcopy(postprocess)
        for one in self.modules():
            one.training = False  # programs of torch.export refuse eval()
            if dense and isinstance(one, Experts):
                one.backend = "dense"  # of operators that every runtime has
        self.signature = module.forward
        self.example: Inputs = (), {}
        self.arguments: dict[str, Any] = {}
        self.output: Any = None
        self.kept: list[str] = []
        self.left_out: list[str] = []
        self.unused: list[str] = []  # arguments that the file does without

    def keep(self, live: Run, example: Inputs, calls: Sequence[Inputs], outputs: Sequence[str] | None) -> None:
        """Decide which outputs the file gives: ``outputs``, or those whose size follows that of the call."""
        outputs = None if outputs is None else list_of_names(outputs)
        self.example = example
        self.arguments = bind(self.signature, *example)
        self.output = live(*example[0], **example[1])
        found = [{name: value.shape for name, value in outputs_of(live, call).items()} for call in calls]
        known = list(found[0])
        if outputs is not None and (unknown := [name for name in outputs if name not in known]):
            raise ValueError(f"no output {unknown[0]!r}; there are: {', '.join(known)}")
        follow = [name for name in known if any(one.get(name) != found[0][name] for one in found)]
        self.kept = outputs if outputs is not None else follow or known
        self.left_out = [name for name in known if name not in self.kept]

    def tensors_of(self, call: Inputs) -> dict[str, Tensor]:
        return named_tensors(bind(self.signature, *call))

    def whole(self, *args: Any, run: Run | None = None, **kwargs: Any) -> Any:
        args, kwargs = self.preprocessed(args, kwargs)
        output = (run or self.module)(*args, **kwargs)
        return output if self.postprocess is None else self.postprocess(output)

    def preprocessed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """The call of the module that a call of the whole leads to."""
        if self.preprocess is None:
            return args, kwargs
        if args:
            return (self.preprocess(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: self.preprocess(kwargs[first])}

    def inner_output(self) -> Any:
        """What the module returns, in a call like the example."""
        args, kwargs = self.preprocessed(*self.example)
        return self.module(*args, **kwargs)

    def replace_module(self, program: ExportedProgram) -> None:
        """Let a program from tensors to tensors stand in the place of the module."""
        self.module = _Structured(program, self.inner_output())

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = restore(self.example, iter(tensors))
        found = named_tensors(self.whole(*args, **kwargs), others=[])
        return tuple(found[name] for name in self.kept)


class _Structured(nn.Module):
    """A program whose output is in the classes of the module's that it stands for."""

    def __init__(self, program: ExportedProgram, output: Any) -> None:
        super().__init__()
        self.program = program.module(check_guards=False)
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return restore(self.output, iter(named_tensors(self.program(*args, **kwargs), others=[]).values()))


def outputs_of(run: Run, call: Inputs) -> dict[str, Tensor]:
    """Return the tensors that ``run`` gives, by name; what else it gives, such as a cache, no file can hold."""
    args, kwargs = call
    return named_tensors(run(*args, **kwargs), others=[])
