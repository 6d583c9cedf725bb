"""Steps in which numbers are not finite, and the layer where that begins."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_accel._private.torch import tree_leaves, tree_map_only
from lightning_accel.callbacks.repeated_step import BufferCopies, repeat_training_step, without_traces
from lightning_accel.callbacks.resume.random_state import restored_random_state
from lightning_accel.callbacks.trainer_callbacks import has_whole_modules
from lightning_accel.strategies import PipelineStrategy

_DEPTH = 6  # of batches

Agree = Callable[[bool], bool]


class NonFiniteError(RuntimeError):
    """Signal that a step was not finite, before it has changed the weights."""


class StepBegin(NamedTuple):
    """Hold what a training step began with.

    Attributes:
        number: of its batch in the fit.
        batch: as ``training_step`` got it.
        batch_idx: of its batch in the epoch.
        draws: states of the global generators of torch, of those on the GPU, of NumPy and of Python; None if they were
            not kept.
    """

    number: int
    batch: Any
    batch_idx: int
    draws: tuple[Tensor, Tensor | None, Any, Any] | None


def draws_of(device: torch.device) -> tuple[Tensor, Tensor | None, Any, Any]:
    """Return the states of the global generators, those of ``device`` among them."""
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    legacy = np.random.get_state(legacy=False)  # noqa: NPY002  # user code draws from the global one
    return torch.get_rng_state(), on_gpu, legacy, random.getstate()


def any_nonfinite(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return a boolean () tensor that says whether any number is not finite, without a wait; None without numbers.

    Sums in float32 or more tell it, which are the fastest to have, and may overflow where all numbers are finite. The
    part of this process counts where tensors are sharded.
    """
    dense = [found for one in tensors if (found := _numbers(one)) is not None]
    if not dense:
        return None
    sums = [one.sum(dtype=torch.promote_types(one.dtype, torch.float32)) for one in dense]
    return ~torch.stack([one.to(dense[0].device, torch.float64) for one in sums]).isfinite().all()


def find_origin(trainer: L.Trainer, module: L.LightningModule, begin: StepBegin, of_all: Agree | None) -> str:
    """Say where numbers cease to be finite: in the batch, in weights, in the forward or backward pass of a layer.

    Args:
        trainer: in a training step, before its update.
        module: whose weights are those of the step.
        begin: what the step began with.
        of_all: returns whether something holds in any process; then all of them run the step again. None leaves that
            out.

    Returns:
        A sentence without a full stop, or nothing if all numbers of this process are finite.
    """
    try:
        where = _at_begin(module, begin.batch)
    except Exception:  # batches may hold anything
        where = ""
    if of_all is None or not of_all(not where):
        return where
    if reason := _why_not_repeated(trainer, module):
        return where or f"the layer is not known, since {reason}"
    in_step = _repeat(trainer, module, begin, of_all)
    return where or in_step


def _at_begin(module: nn.Module, batch: Any) -> str:
    if found := ", ".join(_in_batch(batch)):
        return f"the batch itself is not finite: {found}"
    bad = [name for name, one in module.named_parameters() if (flag := any_nonfinite([one])) is not None and flag]
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"weights were not finite before the step: {bad[0]}{more}" if bad else ""


def _why_not_repeated(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Return why a training step cannot run again, or nothing."""
    if not module.automatic_optimization:
        return f"{type(module).__name__} optimizes by hand"
    if isinstance(trainer.strategy, PipelineStrategy):
        return "a pipeline runs the step in parts"
    if is_param_in_hook_signature(type(module).training_step, "dataloader_iter", explicit=True):
        return f"{type(module).__name__} takes batches from the loader itself"
    return ""


def _repeat(trainer: L.Trainer, module: L.LightningModule, begin: StepBegin, of_all: Agree) -> str:
    """Run the step again; all processes come to ``of_all`` once, whatever happens in them."""
    trace = _Trace(module)
    buffers = BufferCopies(module)
    has_gradients = has_whole_modules(trainer)
    loss: Any = None
    with ExitStack() as contexts:
        try:
            buffers.take()
            contexts.callback(buffers.give_back)
            contexts.callback(_reshard, trainer.strategy.model)
            contexts.enter_context(restored_random_state())
            contexts.enter_context(without_traces(module))
            contexts.enter_context(torch.compiler.set_stance("force_eager"))
            contexts.enter_context(torch.set_grad_enabled(has_gradients))
            contexts.enter_context(trace)
            if begin.draws is not None:
                _draw_again(begin.draws, trainer.strategy.root_device)
            step = None if has_gradients else trainer.strategy.training_step
            with trainer.precision_plugin.train_step_context():
                output = repeat_training_step(module, begin.batch, begin.batch_idx, step)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            where = trace.forward
            if not where and isinstance(loss, Tensor) and (kind := _kind(loss)):
                where = f"the outputs of all layers are finite, and training_step makes {kind} of them"
        except Exception as error:  # whatever the module raises
            where = _not_repeated(error)
        if of_all(bool(where)) or not (has_gradients and isinstance(loss, Tensor) and loss.requires_grad):
            return where
        try:
            named = {name: one for name, one in module.named_parameters() if one.requires_grad}
            gradients = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
        except Exception as error:
            return _not_repeated(error)
        bad = [name for name, one in zip(named, gradients, strict=True) if one is not None and _kind(one)]
        return trace.backward or (f"the gradients of {', '.join(bad[:3])} are not finite" if bad else "")


def _not_repeated(error: Exception) -> str:
    return f"the layer is not known, since the step cannot be repeated: {type(error).__name__}: {error}"


def _draw_again(draws: tuple[Tensor, Tensor | None, Any, Any], device: torch.device) -> None:
    of_torch, on_gpu, of_numpy, of_python = draws
    torch.set_rng_state(of_torch)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu, device)
    np.random.set_state(of_numpy)  # noqa: NPY002
    random.setstate(of_python)


def _reshard(model: nn.Module | None) -> None:
    for one in model.modules() if model is not None else ():
        if isinstance(one, FSDPModule):
            one.reshard()  # as the backward pass does, and no other does for the outermost one


class _Trace:
    """Follow one forward and backward pass, and keep the first layer whose numbers are not finite."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward = self.backward = ""
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for name, one in self.module.named_modules():
            if name and not isinstance(one, torch.jit.ScriptModule):  # which takes no hooks
                who = f"{name} ({type(one).__name__})"
                self._hooks.append(one.register_forward_pre_hook(self._before(who), with_kwargs=True))
                self._hooks.append(one.register_forward_hook(self._after(who), with_kwargs=True))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, who: str) -> Any:
        def follow(value: Tensor) -> Tensor:
            if not value.requires_grad or value.layout != torch.strided:
                return value
            own = value.view_as(value)  # other layers may get the same tensor
            own.register_hook(self._check(who))
            return own

        return lambda layer, args, kwargs: tree_map_only(Tensor, follow, (args, kwargs))

    def _after(self, who: str) -> Any:
        def check(layer: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
            made = {kind for one in tensors if (kind := _kind(one))}
            if made and not self.forward:
                inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
                given = {kind for one in inputs if (kind := _kind(one))}
                self.forward = (
                    f"{who} is given {' and '.join(sorted(given))} by what stands before it in the forward pass"
                    if given
                    else f"{who} makes {' and '.join(sorted(made))} of finite numbers in the forward pass"
                )
            for one in tensors:
                if one.requires_grad:
                    one.register_hook(self._check(f"what follows {who}"))

        return check

    def _check(self, who: str) -> Callable[[Tensor], None]:
        def check(gradient: Tensor) -> None:
            if not self.backward and (kind := _kind(gradient)):
                self.backward = f"the backward pass of {who} makes {kind}"

        return check


def _numbers(value: Tensor) -> Tensor | None:
    """Return the floating-point numbers of a tensor of any layout, in this process; None if it has none."""
    value = value.detach()
    value = value.to_local() if hasattr(value, "to_local") else value
    if value.layout == torch.sparse_coo:
        value = value.coalesce().values()
    elif value.layout != torch.strided:
        value = value.values()  # compressed ones, and nested ones with rows of unequal lengths
    if value.is_complex():
        value = torch.view_as_real(value)
    if not value.is_floating_point() or not value.numel():
        return None
    return value.float() if value.dtype.itemsize == 1 else value


def _kind(value: Tensor) -> str:
    numbers = _numbers(value)
    if numbers is None:
        return ""
    return "nan" if numbers.isnan().any() else "inf" if numbers.isinf().any() else ""


def _in_batch(value: Any, path: str = "batch", depth: int = 0) -> Iterator[str]:
    if isinstance(value, Tensor):
        if kind := _kind(value):
            yield f"{kind} in {path}{_samples(value)}"
        return
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        parts = [(f"[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        names = getattr(value, "_fields", None)
        parts = [(f".{names[number]}" if names else f"[{number}]", each) for number, each in enumerate(value)]
    elif is_dataclass(value):
        parts = [(f".{field.name}", getattr(value, field.name)) for field in fields(value)]
    elif callable(to_dict := getattr(value, "to_dict", None)) and not isinstance(value, type):  # graphs
        parts = [(f".{key}", each) for key, each in to_dict().items()]
    for name, each in parts if depth < _DEPTH else ():
        yield from _in_batch(each, path + name, depth + 1)


def _samples(value: Tensor) -> str:
    if value.ndim < 2 or value.layout != torch.strided or not value.is_floating_point():
        return ""
    rows = (~value.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    return f", samples {', '.join(map(str, rows[:5]))}{', ...' if len(rows) > 5 else ''} of {len(value)}"
