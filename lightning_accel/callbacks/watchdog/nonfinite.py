"""Steps in which numbers are not finite, and the layer where that begins."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_accel._private.torch import tree_leaves, tree_map_only
from lightning_accel.callbacks.repeated_step import repeat_training_step, without_traces
from lightning_accel.callbacks.resume.random_state import restored_random_state
from lightning_accel.callbacks.trainer_callbacks import has_whole_modules
from lightning_accel.strategies import PipelineStrategy


class NonFiniteError(RuntimeError):
    """Signal that a step was not finite, before it has changed the weights."""


def any_nonfinite(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return a boolean () tensor that says whether any number is not finite, without a wait; None without tensors.

    Sums in float32 or more tell it, which are the fastest to have, and may overflow where all numbers are finite. The
    part of this process counts where tensors are sharded.
    """
    local = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
    local = [one.coalesce().values() if one.is_sparse else one for one in local]
    if not local:
        return None
    first = local[0].device
    sums = [one.detach().sum(dtype=torch.promote_types(one.dtype, torch.float32)) for one in local]
    return ~torch.stack([one.to(first, torch.float64) for one in sums]).isfinite().all()


def torch_random_state(device: torch.device) -> list[Tensor]:
    """Return the state of torch's generators of the CPU and of ``device``."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def why_not_repeated(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Return why a training step cannot run again to find where its numbers cease to be finite, or nothing."""
    if not module.automatic_optimization:
        return f"{type(module).__name__} optimizes by hand"
    if isinstance(trainer.strategy, PipelineStrategy):
        return "a pipeline runs the step in parts"
    return ""


def find_origin(
    trainer: L.Trainer,
    module: L.LightningModule,
    batch: Any,
    random_state: list[Tensor] | None,
    of_all: Callable[[bool], bool] | None,
) -> str:
    """Say where numbers cease to be finite: in the batch, in weights, in the forward or backward pass of a layer.

    Args:
        trainer: in a training step.
        module: whose weights are those of the step.
        batch: of the step, as ``training_step`` got it.
        random_state: that of :func:`torch_random_state` at the begin of the step; None for any.
        of_all: returns whether something holds in any process; then all of them run the step again. None leaves that
            out.

    Returns:
        A sentence without a full stop, or nothing if all numbers of this process are finite.
    """
    where = ""
    bad = [name for name, one in module.named_parameters() if (flag := any_nonfinite([one])) is not None and flag]
    if found := ", ".join(_in_batch(batch)):
        where = f"the batch itself is not finite: {found}"
    elif bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        where = f"weights were not finite before the step: {bad[0]}{more}"
    if of_all is None or not of_all(not where):
        return where
    if reason := why_not_repeated(trainer, module):
        return where or f"the layer is not known, since {reason}"
    try:
        in_step = _repeat(trainer, module, batch, random_state, of_all)
    except Exception as error:  # whatever the module raises
        in_step = f"the layer is not known, since the step cannot be repeated: {type(error).__name__}: {error}"
    return where or in_step


def _repeat(
    trainer: L.Trainer,
    module: L.LightningModule,
    batch: Any,
    random_state: list[Tensor] | None,
    of_all: Callable[[bool], bool],
) -> str:
    trace = _Trace(module)
    buffers = [(one, one.detach().clone()) for one in module.buffers()]
    has_gradients = has_whole_modules(trainer)
    with ExitStack() as contexts:
        contexts.enter_context(restored_random_state())
        contexts.enter_context(without_traces(module))
        contexts.enter_context(torch.compiler.set_stance("force_eager"))
        contexts.enter_context(torch.set_grad_enabled(has_gradients))
        contexts.enter_context(trace)
        contexts.callback(_give_back, buffers)
        contexts.callback(_reshard, trainer.strategy.model)
        if random_state is not None:
            torch.set_rng_state(random_state[0])
            for one in random_state[1:]:
                torch.cuda.set_rng_state(one, trainer.strategy.root_device)
        with trainer.precision_plugin.train_step_context():
            output = repeat_training_step(module, batch, None if has_gradients else trainer.strategy.training_step)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        where = trace.forward
        if not where and isinstance(loss, Tensor) and (kind := _kind(loss)):
            where = f"the outputs of all layers are finite, and training_step makes {kind} of them"
        if of_all(bool(where)) or not (has_gradients and isinstance(loss, Tensor) and loss.requires_grad):
            return where
        named = {name: one for name, one in module.named_parameters() if one.requires_grad}
        gradients = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
        bad = [name for name, one in zip(named, gradients, strict=True) if one is not None and _kind(one)]
        return trace.backward or (f"the gradients of {', '.join(bad[:3])} are not finite" if bad else "")


@torch.no_grad()
def _give_back(buffers: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, held in buffers:
        buffer.copy_(held)


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
            if name:
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
            tensors = [one for one in tree_leaves(outputs) if _is_floating(one)]
            made = {kind for one in tensors if (kind := _kind(one))}
            if made and not self.forward:
                given = {kind for one in tree_leaves((args, kwargs)) if _is_floating(one) and (kind := _kind(one))}
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


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _kind(value: Tensor) -> str:
    value = value.to_local() if hasattr(value, "to_local") else value
    value = value.coalesce().values() if value.is_sparse else value
    return "nan" if value.isnan().any() else "inf" if value.isinf().any() else ""


def _in_batch(value: Any, path: str = "batch") -> Iterator[str]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and (kind := _kind(value)):
            yield f"{kind} in {path}{_samples(value)}"
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _in_batch(each, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            name = f".{value._fields[number]}" if hasattr(value, "_fields") else f"[{number}]"
            yield from _in_batch(each, path + name)
    elif hasattr(value, "__dict__"):
        store = value.to_dict() if callable(getattr(value, "to_dict", None)) else vars(value)
        for key, each in store.items():
            yield from _in_batch(each, f"{path}.{key}")


def _samples(value: Tensor) -> str:
    if value.ndim < 2:
        return ""
    rows = (~value.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    return f", samples {', '.join(map(str, rows[:5]))}{', ...' if len(rows) > 5 else ''} of {len(value)}"
