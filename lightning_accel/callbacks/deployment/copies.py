"""Search, copy and evaluation of the part of a LightningModule that is deployed."""

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_accel._private.lightning import data_source_of, forget_metric_names, is_compiled
from lightning_accel._private.torch import tree_leaves, tree_map_only
from lightning_accel.callbacks.deployment.loaders import first_batch_of, has_plain_order, undistributed
from lightning_accel.callbacks.recorded_calls import callable_parts, outermost
from lightning_accel.callbacks.resume.random_state import restored_random_state
from lightning_accel.callbacks.trainer_callbacks import callbacks_of
from lightning_accel.compress.adapters import has_adapters, is_packed, merge_adapters_
from lightning_accel.compress.calls import Inputs, replaced_forward
from lightning_accel.compress.calls import num_samples as samples_of
from lightning_accel.compress.uncompiled import uncompile_
from lightning_accel.ops.names import clean_name

_HALF = {torch.bfloat16, torch.float16}


class Deployed(NamedTuple):
    """Hold the module to deploy and the inputs that validation batches call it with."""

    name: str  # "" for the LightningModule itself
    module: nn.Module
    inputs: list[Inputs]  # positional and keyword arguments of each call, detached
    figures: Mapping[str, float]  # metrics that validation_step logs on these batches


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


def dry_run(
    trainer: L.Trainer,
    pl_module: L.LightningModule,
    copied: WholeCopy,
    use: Callable[[Deployed], None],
    purpose: str,
    name: str | None = None,
    of_training: bool = False,
) -> None:
    """Run ``use`` on one batch before training, so that its errors come early; all processes must call it.

    Works on a copy, with separate loaders, and restores the random number generators, so that training is not affected.
    Does nothing if reading a loader would have side effects, as with an iterable data set.

    Args:
        trainer: the Trainer, in ``on_fit_start``.
        pl_module: the module to be trained.
        copied: the copy of ``pl_module``; if that is sharded, arbitrary weights replace its own.
        use: called in the first process with the part that is deployed.
        purpose: a verb for the error message in the other processes.
        name: name of the submodule to deploy, as in :func:`find_deployed`.
        of_training: whether to take a training batch instead of a validation batch.

    Raises:
        Exception: as :func:`run_in_first_process`.
    """

    def make() -> L.LightningModule | None:
        if not trainer.is_global_zero:
            return None
        is_split = any(value.is_meta or isinstance(value, DTensor) for value in _tensors(pl_module))
        return copied.with_original_shapes() if is_split else copied.make(trainer, pl_module)

    def run(module: L.LightningModule) -> None:
        loader = _first_batches(trainer, of_training)
        if loader is not None:
            datamodule = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
            use(find_deployed(module, loader, name, 1, datamodule))

    run_in_first_process(trainer, make, run, purpose)


def _first_batches(trainer: L.Trainer, of_training: bool) -> Any:
    """Return loaders of the first batches that share no state with the user's; None if that is impossible."""
    loop: Any = trainer.fit_loop if of_training else trainer.fit_loop.epoch_loop.val_loop
    loaders = undistributed(data_source_of(loop).dataloader())
    leaves = tree_leaves(loaders)
    if not all(map(has_plain_order, leaves)):
        return None
    return tree_map_only(DataLoader, first_batch_of, loaders)


def run_folder(trainer: L.Trainer) -> Path:
    """Return the folder for files of the run; all processes must call it, since it is broadcast."""
    log_dir = trainer.log_dir
    return Path(trainer.default_root_dir if log_dir is None else log_dir)


def reasons_left_out(trainer: L.Trainer, deployed: str) -> dict[str, str]:
    """Return why callbacks left layers unchanged, by the layers' names in the deployed module."""
    notes: dict[str, str] = {}
    for callback in callbacks_of(trainer, L.Callback):
        for name, reason in getattr(callback, "left_out", {}).items():
            layer, _, parameter = name.removeprefix(f"{deployed}." if deployed else "").rpartition(".")
            if not parameter.startswith("bias"):  # biases are excluded in every layer
                notes[layer] = str(reason)
        notes.update(getattr(getattr(callback, "result", None), "left_float", None) or {})
    return notes


def gather_to_cpu(value: Any) -> Any:
    """Return a tensor detached, on the CPU and gathered if sharded; other values unchanged."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def require_deployable(pl_module: L.LightningModule, caller: str, name: str | None = None) -> None:
    """Check before training that :func:`find_deployed` can succeed, on behalf of the callback ``caller``.

    Raises:
        TypeError: if there is no ``validation_step``.
        ValueError: if there is no submodule ``name``.
    """
    if type(pl_module).validation_step is L.LightningModule.validation_step:
        raise TypeError(
            f"{caller} needs a validation_step of {type(pl_module).__name__}: it shows what is called, on what, and "
            "how good it is"
        )
    _require_submodule(pl_module, name)


def require_validation(trainer: L.Trainer, caller: str) -> None:
    """Reject, in ``on_fit_start``, a run without validation on behalf of the callback ``caller``, which needs it.

    Raises:
        ValueError: if the run has no validation batches.
    """
    if not trainer.enable_validation:
        raise ValueError(
            f"{caller} measures on validation batches, and this run has none: give fit a validation loader, and leave "
            "limit_val_batches above 0"
        )


def _require_submodule(module: L.LightningModule, name: str | None) -> None:
    if name is not None and name not in {clean_name(known) for known, _ in module.named_modules()}:
        children = ", ".join(child for child, _ in module.named_children())
        raise ValueError(f"{type(module).__name__} has no submodule {name!r}; it has: {children}")


def find_deployed(
    module: L.LightningModule,
    loader: Any,
    name: str | None = None,
    num_batches: int = 1,
    datamodule: L.LightningDataModule | None = None,
) -> Deployed:
    """Run ``validation_step`` on the first batches of ``loader`` to find the module to deploy and its inputs.

    The deployed module is ``module`` itself if the step calls it (``self(x)``), else the called submodule with the most
    parameters.

    Args:
        module: a module without a Trainer, as :class:`WholeCopy` returns it.
        loader: batches as ``validation_step`` takes them; training batches work too.
        name: name of the submodule to deploy, ``""`` for ``module``, to override the rule above.
        num_batches: number of batches whose calls are recorded.
        datamodule: the datamodule whose batch hooks are applied.

    Raises:
        ValueError: if there is no submodule of that name, or the step calls neither ``module`` nor a submodule with
            parameters.
        TypeError: if ``module`` has no ``validation_step``.
    """
    _require_submodule(module, name)
    calls: dict[str, list[Inputs]] = {}
    handles = [
        module.get_submodule(path).register_forward_pre_hook(partial(_record, calls, path), with_kwargs=True)
        for path in (callable_parts(module) if name is None else [name])
    ]
    try:
        figures = evaluate(module, loader, limit_batches=num_batches, datamodule=datamodule)
    finally:
        for handle in handles:
            handle.remove()
    found = outermost(calls, module)
    if found is None:
        raise ValueError(
            f"validation_step of {type(module).__name__} calls {'no module' if name is None else repr(name)}, so what "
            "is to be deployed is not known. Name the submodule that it calls: module='network'"
        )
    return Deployed(found, module.get_submodule(found), calls[found], figures)


def calibration_calls(
    module: L.LightningModule,
    loader: Any,
    num_samples: int,
    name: str | None = None,
    datamodule: L.LightningDataModule | None = None,
) -> Deployed:
    """Find the deployed module, with calls of ``num_samples`` samples in total, or what the loader has.

    Args:
        module: a module without a Trainer, as :class:`WholeCopy` returns it.
        loader: its batches are passed to ``validation_step``, sixteen where it does not tell their size.
        num_samples: of all calls together; the last one stays whole.
        name: name of the submodule, as in :func:`find_deployed`.
        datamodule: the datamodule whose batch hooks are applied.
    """
    size = getattr(loader, "batch_size", None)
    found = find_deployed(module, loader, name, math.ceil(num_samples / size) if size else 16, datamodule)
    taken: list[Inputs] = []
    for call in found.inputs:
        taken.append(call)
        if sum(map(samples_of, taken)) >= num_samples:
            break
    return found._replace(inputs=taken)


def evaluate(
    module: L.LightningModule,
    loader: Any,
    deployed: str = "",
    run: Callable[..., Any] | None = None,
    limit_batches: float = 1.0,
    datamodule: L.LightningDataModule | None = None,
) -> dict[str, float]:
    """Return the metrics that ``validation_step`` logs over ``loader``, on this process and the device of ``module``.

    Args:
        module: a module without a Trainer, as :class:`WholeCopy` returns it.
        loader: one or several loaders.
        deployed: name of the submodule whose ``forward`` is replaced with ``run``.
        run: a callable with the inputs and outputs of that submodule's ``forward``.
        limit_batches: number of batches of each loader, or a share of them.
        datamodule: the datamodule whose batch hooks are applied.

    Raises:
        TypeError: if ``module`` has no ``validation_step``.
    """
    if getattr(module.validation_step, "__func__", None) is L.LightningModule.validation_step:
        raise TypeError(
            f"{type(module).__name__} needs a validation_step: what it logs tells how good a form of the module is"
        )
    device = module.device
    with (
        nullcontext() if run is None else replaced_forward(module.get_submodule(deployed), run),
        _detached_from_trainer(datamodule),
        _silenced_trainer(),
    ):
        trainer = L.Trainer(
            accelerator=device.type,
            devices=1 if device.type == "cpu" else [device.index or 0],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=limit_batches,
            inference_mode=False,  # metrics updated in inference mode could not be reset outside of it
        )
        trainer.validate(module, datamodule=_Loaders(loader, datamodule), verbose=False)
    module.trainer = None
    module.to(device)  # the Trainer moves it to the CPU
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


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


def _record(calls: dict[str, list[Inputs]], name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    kept: Inputs = tree_map_only(torch.Tensor, lambda value: value.detach().clone(), (args, kwargs))
    calls.setdefault(name, []).append(kept)


class _Loaders(L.LightningDataModule):
    """Combine loaders with the batch hooks of the user's datamodule, and with what else a module may read of it."""

    def __init__(self, loader: Any, hooks: L.LightningDataModule | None) -> None:
        super().__init__()
        self.loader, self.hooks = loader, hooks
        if hooks is not None:
            for hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
                setattr(self, hook, getattr(hooks, hook))

    def val_dataloader(self) -> Any:
        return self.loader

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("hooks"), name)


@contextmanager
def _detached_from_trainer(datamodule: L.LightningDataModule | None) -> Iterator[None]:
    """Detach the datamodule from its Trainer while open, since hooks would see ``trainer.training`` and augment."""
    if datamodule is None:
        yield
        return
    kept, datamodule.trainer = datamodule.trainer, None
    try:
        yield
    finally:
        datamodule.trainer = kept


@contextmanager
def _silenced_trainer() -> Iterator[None]:
    """Silence the Trainer's own messages, which are meant for a run of the user's."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


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
