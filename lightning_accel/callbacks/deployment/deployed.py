"""Search, calls and evaluation of the part of a LightningModule that is deployed."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import nn

from lightning_accel._private.lightning import data_source_of
from lightning_accel._private.torch import tree_leaves, tree_map_only
from lightning_accel.callbacks.deployment.copies import WholeCopy, run_in_first_process
from lightning_accel.callbacks.deployment.loaders import first_batches_of, has_plain_order, undistributed
from lightning_accel.callbacks.recorded_calls import callable_parts, outermost
from lightning_accel.callbacks.trainer_callbacks import callbacks_of
from lightning_accel.compress.calls import Inputs, first_samples, replaced_forward
from lightning_accel.compress.calls import num_samples as samples_of
from lightning_accel.ops.names import clean_name


class Deployed(NamedTuple):
    """Hold the module to deploy and the inputs that validation batches call it with."""

    name: str  # "" for the LightningModule itself
    module: nn.Module
    inputs: list[Inputs]  # positional and keyword arguments of each call, detached
    figures: Mapping[str, float]  # metrics that validation_step logs on these batches


def part_to_name(deployed: Deployed, callback: str) -> str:
    """Return an end of a message that names the child with most parameters as the part to deploy; empty without one."""
    own = sum(one.numel() for one in deployed.module.parameters())
    parts = [
        name
        for name, one in deployed.module.named_children()
        if type(one).forward is not nn.Module.forward  # as that of a ModuleList, which is not called itself
        and 2 * sum(value.numel() for value in one.parameters()) > own
    ]
    name = f"{deployed.name}.{parts[0]}" if parts and deployed.name else "".join(parts[:1])
    return f". {callback}(module={name!r}) would take the part with most parameters" if parts else ""


def dry_run(
    trainer: L.Trainer,
    pl_module: L.LightningModule,
    copied: WholeCopy,
    use: Callable[[Deployed], None],
    purpose: str,
    name: str | None = None,
    of_training: bool = False,
) -> None:
    """Run ``use`` on two batches, of unequal sizes if there may be any, before training, so that errors come early.

    All processes must call it. It works on a copy, with separate loaders, and restores the random number generators,
    so that training is not affected. It does nothing if reading a loader would have side effects, as with an iterable
    data set.

    Args:
        trainer: the Trainer, in ``on_fit_start``.
        pl_module: the module to be trained.
        copied: the copy of ``pl_module``; if that is sharded, arbitrary weights replace its own.
        use: called in the first process with the part that is deployed.
        purpose: a verb for the error message in the other processes.
        name: name of the submodule to deploy, as in :func:`find_deployed`.
        of_training: whether to take training batches instead of validation batches.

    Raises:
        ValueError: if the loader has no batch.
        Exception: as :func:`run_in_first_process`.
    """

    def run(module: L.LightningModule) -> None:
        loader = _first_batches(trainer, of_training)
        if loader is not None:
            datamodule = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
            with _explained_doubles(trainer, purpose):
                found = find_deployed(module, loader, name, 2, datamodule)
            use(found)

    make = partial(copied.for_dry_run, trainer, pl_module)
    run_in_first_process(trainer, make, run, purpose)


@contextmanager
def _explained_doubles(trainer: L.Trainer, purpose: str) -> Iterator[None]:
    """Say why float64 batches of a run in float64 do not fit the module, which is deployed in float32."""
    try:
        yield
    except RuntimeError as error:
        if trainer.precision != "64-true" or "dtype" not in str(error):
            raise
        raise TypeError(
            f"cannot {purpose}: files and quantized forms are of float32, and the loaders yield float64 ({error}). Let "
            "them yield float32: precision='64-true' converts what trains"
        ) from error


def _first_batches(trainer: L.Trainer, of_training: bool) -> Any:
    """Return loaders of the first batches that share no state with the user's; None if that is impossible."""
    loop: Any = trainer.fit_loop if of_training else trainer.fit_loop.epoch_loop.val_loop
    loaders = undistributed(data_source_of(loop).dataloader())
    leaves = tree_leaves(loaders)
    if not all(map(has_plain_order, leaves)):
        return None
    if leaves and not any(map(len, leaves)):
        sizes = f"{len(leaves[0].dataset)} samples in batches of {leaves[0].batch_size}"
        raise ValueError(
            f"the loader of {'training' if of_training else 'validation'} gives no batch: it has {sizes}"
            f"{' and drop_last=True' if leaves[0].drop_last else ''}. Lower its batch_size, or give it more samples"
        )
    return first_batches_of(loaders)


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
    if not isinstance(name, str | None):
        raise TypeError(f"module must be the name of a submodule; got {name!r}")
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
        step = f"validation_step of {type(module).__name__}"
        if name is None:
            raise ValueError(
                f"{step} calls no module, so what is to be deployed is not known. Name the submodule that it calls: "
                "module='network'"
            )
        raise ValueError(
            f"{step} does not call {name!r}, a {type(module.get_submodule(name)).__name__}, so that it has no inputs. "
            "Name a submodule that is called itself"
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
        num_samples: of all calls together; the last one stays whole. Where samples cannot be separated, as the nodes of
            graphs, there are two calls at least, which show in which other sizes calls differ.
        name: name of the submodule, as in :func:`find_deployed`.
        datamodule: the datamodule whose batch hooks are applied.
    """
    size = getattr(loader, "batch_size", None)
    most = max(2, math.ceil(num_samples / size)) if size else 16
    found = find_deployed(module, loader, name, most, datamodule)
    taken: list[Inputs] = []
    for call in found.inputs:
        taken.append(call)
        are_separate = samples_of(first_samples(call, 1)) == 1
        if sum(map(samples_of, taken)) >= num_samples and (are_separate or len(taken) > 1):
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
