"""Copies of a LightningModule in training, and work on them in the first process while the others wait."""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_accel._private.lightning import forget_metric_names, is_compiled
from lightning_accel._private.torch import tree_leaves
from lightning_accel.callbacks.resume.random_state import restored_random_state
from lightning_accel.compress.adapters import has_adapters, is_packed, merge_adapters_
from lightning_accel.compress.uncompiled import uncompile_

_HALF = {torch.bfloat16, torch.float16}


class WholeCopy:
    """Copy a module that may be sharded or compiled to the CPU, eager and detached from its Trainer.

    Adapters are merged into the weights of copies. Create it in ``setup``, before a strategy shards the parameters; it
    holds no second set of weights.

    Raises:
        TypeError: if ``configure_model`` of the module splits its weights, so that a copy would need all processes.
    """

    def __init__(self, pl_module: L.LightningModule) -> None:
        pl_module.configure_model()  # it may build submodules, and does so only once
        if any(isinstance(value, DTensor) for value in _tensors(pl_module)):
            raise TypeError(
                f"configure_model of {type(pl_module).__name__} splits its weights over processes, as for "
                "ModelParallelStrategy, and what is measured, pruned, quantized and exported is a whole copy. Train "
                "with 'accel_fsdp2', which shards modules that are written for one device, or use "
                "lightning_accel.compress on the module after training"
            )
        self._skeleton = _copy(pl_module, {id(value): _empty(value, "meta") for value in _tensors(pl_module)})

    def with_original_shapes(self) -> L.LightningModule:
        """Return the module with its original shapes and arbitrary weights."""
        made = self._with_empty_tensors()
        with torch.no_grad():
            for value in filter(lambda one: not is_packed(one), _tensors(made)):
                value.fill_(0.01 if value.is_floating_point() else 0)
        return _detach_from_run(made)

    def _with_empty_tensors(self) -> L.LightningModule:
        """Return a copy of the skeleton with uninitialized tensors; ``to_empty`` would untie shared weights."""
        return copy.deepcopy(self._skeleton, {id(value): _empty(value, "cpu") for value in _tensors(self._skeleton)})

    def make(
        self, trainer: L.Trainer, pl_module: L.LightningModule, everywhere: bool = False
    ) -> L.LightningModule | None:
        """Return a copy with the current weights of ``pl_module``, in evaluation mode; all processes must call it.

        Args:
            trainer: the Trainer of ``pl_module``.
            pl_module: the module whose weights are copied.
            everywhere: return the copy in every process, which a pipeline does not support.

        Returns:
            the copy in the first process, or in all with ``everywhere``; None in the others.
        """
        is_wanted = everywhere or trainer.is_global_zero
        tensors = _tensors(pl_module)
        if any(value.is_meta for value in tensors):  # pipeline stages of other processes
            state = trainer.strategy.lightning_module_state_dict()
        elif any(isinstance(value, DTensor) for value in tensors):
            state = {name: gather_to_cpu(value) for name, value in pl_module.state_dict().items()}
        else:
            return _detach_from_run(_copy(pl_module, {}).cpu()) if is_wanted else None
        if not is_wanted:
            return None
        made = self._with_empty_tensors()
        for name, buffer in pl_module.named_buffers():  # including those not in state_dict
            if not buffer.is_meta:
                made.get_buffer(name).copy_(buffer)
        made.load_state_dict(state)
        return _detach_from_run(made)

    def for_dry_run(self, trainer: L.Trainer, pl_module: L.LightningModule) -> L.LightningModule | None:
        """Return a copy in the first process, None in others; weights are arbitrary where those of a run are split."""
        if not trainer.is_global_zero:
            return None
        is_split = any(value.is_meta or isinstance(value, DTensor) for value in _tensors(pl_module))
        return self.with_original_shapes() if is_split else self.make(trainer, pl_module)

    def has_adapters(self) -> bool:
        """Return whether the module had adapters when this was created."""
        return has_adapters(self._skeleton)


def in_float32(trainer: L.Trainer, module: L.LightningModule) -> L.LightningModule:
    """Undo the dtype cast of a precision plugin in place, so that the module takes batches as loaders yield them."""
    dtypes = {value.dtype for value in module.parameters() if value.is_floating_point()}
    was_cast = len(dtypes) == 1 and (dtypes < _HALF or trainer.precision == "64-true")
    return module.float() if was_cast else module


def run_in_first_process(
    trainer: L.Trainer,
    make: Callable[[], L.LightningModule | None],
    use: Callable[[L.LightningModule], None],
    purpose: str,
) -> None:
    """Call ``use`` with the result of ``make`` while other processes wait; raise a failure in all processes.

    The state of the random number generators is restored afterwards.

    Args:
        trainer: the Trainer of the run.
        make: called in all processes, such as :meth:`WholeCopy.make`; returns a module in the first process only.
        use: called where ``make`` returned a module.
        purpose: a verb for the error message in the other processes.

    Raises:
        Exception: what ``make`` or ``use`` raises; in the other processes a RuntimeError with its message and the
            ``purpose``.
    """

    def run() -> None:
        with restored_random_state():  # other processes draw no random numbers meanwhile
            made = make()
            if made is not None:
                use(in_float32(trainer, made))

    raise_in_all_processes(trainer, run, purpose)


def raise_in_all_processes(trainer: L.Trainer, run: Callable[[], None], purpose: str) -> None:
    """Call ``run`` in all processes, wait for the first one, and raise in all if it fails there.

    Raises:
        Exception: what ``run`` raises; in the other processes a RuntimeError with the first process's message and the
            ``purpose``.
    """
    failure: Exception | None = None
    try:
        run()
    except Exception as error:
        failure = error
    message = trainer.strategy.broadcast(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if message is not None:
        raise RuntimeError(f"the first process could not {purpose}: {message}")


def run_folder(trainer: L.Trainer) -> Path:
    """Return the folder for files of the run; all processes must call it, since it is broadcast."""
    log_dir = trainer.log_dir
    return Path(trainer.default_root_dir if log_dir is None else log_dir)


def gather_to_cpu(value: Any) -> Any:
    """Return a tensor detached, on the CPU and gathered if sharded; other values unchanged."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _detach_from_run(module: L.LightningModule) -> L.LightningModule:
    if is_compiled(module):  # its compiled steps belong to the original module
        to_uncompiled(module)
    uncompile_(module)
    for one in module.modules():
        if isinstance(one, Metric):
            one.reset()
            one.distributed_available_fn = _is_never_distributed  # other processes do not take part
    merge_adapters_(module)
    return module.eval()


def _is_never_distributed() -> bool:
    return False


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _empty(value: torch.Tensor, device: str) -> torch.Tensor:
    if is_packed(value):
        return value  # frozen, so that copies may share it; its scales are no entries of a state dict
    empty = torch.empty_like(value, device=device)
    return nn.Parameter(empty, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else empty


def _copy(module: L.LightningModule, memo: Mapping[int, Any]) -> L.LightningModule:
    """Return a deep copy without a Trainer; ``memo`` maps ids of tensors to their replacements.

    Factories that a config provides, such as those of optimizers, are dropped too, since they refer to the whole
    command line and its Trainer.
    """
    ties = [vars(one)[name] for one in module.modules() for name in ("_trainer", "_fabric") if name in vars(one)]
    kept = [value for one in module.modules() for value in vars(one).values()]
    ties += [value for value in kept if _is_config_factory(value)]
    # such as the last loss, which refers to its graph
    results = [value for value in tree_leaves(kept) if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    replaced = {id(value): value.detach().clone() for value in results} | {
        id(tie): None for tie in ties if tie is not None
    }
    try:
        made = copy.deepcopy(module, {**memo, **replaced})
    except Exception as error:
        raise TypeError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}), which is how it is measured, "
            "quantized and exported while it stays as it is. Keep what cannot be copied, such as locks, files and "
            "connections, out of its attributes, or give their class a __deepcopy__"
        ) from error
    forget_metric_names(made)
    _unwrap_step(made)
    return made


def _unwrap_step(made: L.LightningModule) -> None:
    """Take off what callbacks have put around ``training_step``: in a copy it would run the original module."""
    wrapped = vars(made).get("training_step")
    if wrapped is None or (step := inspect.unwrap(wrapped)) is wrapped:
        return
    function = getattr(step, "__func__", step)
    if function is type(made).training_step:
        del vars(made)["training_step"]
    else:  # somebody has set it on the instance
        vars(made)["training_step"] = MethodType(function, made) if isinstance(step, MethodType) else step


def _is_config_factory(value: Any) -> bool:
    if not isinstance(value, partial):
        return False
    return any(str(getattr(one, "__module__", "")).startswith("jsonargparse") for one in (value.func, type(value.func)))
