"""What models share: sizes from datamodules, hyperparameters, checkpoints, logging. Shapes: L mixtures, E experts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_accel._private.lightning import has_trainer
from lightning_accel.data.sequences.batch import IGNORED
from lightning_accel.nn import GateReport
from lightning_accel.ops.names import list_of_names
from lightning_accel.ops.options import options_of

_HINT = (
    "weights in the checkpoint are smaller than those of the model. Where channels of its run were removed "
    "(Pruning(structure='channel')), load it with lightning_accel.compress.load_pruned(model, path), the model made "
    "as before training"
)


class SizedModel(L.LightningModule):
    """Build the layers once their sizes are known: from the constructor, or from the datamodule.

    A subclass names the attributes to read from the datamodule, with functions that convert them to plain values, in
    ``from_datamodule``, and implements ``_is_built``, ``_require_sizes`` and ``_build``.
    """

    from_datamodule: ClassVar[Mapping[str, Callable[[Any], object]]] = {}
    unlike_tensor_parallelism: ClassVar[str] = ""  # a strategy to suggest in its place
    make_optimizer: OptimizerCallable

    def __init__(self) -> None:
        super().__init__()
        hint_at_removed_channels(self)

    def setup(self, stage: str) -> None:
        self._read_datamodule()

    def _read_datamodule(self) -> None:
        take_from_datamodule(self, **self.from_datamodule)

    def configure_model(self) -> None:
        """Build the layers whose sizes may come from the datamodule, once they are known; reject tensor parallelism.

        Raises:
            ValueError: under Lightning's ``ModelParallelStrategy``, the only one that sets a mesh, on several devices.
        """
        if self.device_mesh is not None and self.device_mesh.size() > 1:
            alternative = self.unlike_tensor_parallelism and f", or {self.unlike_tensor_parallelism}"
            raise ValueError(
                f"{type(self).__name__} has no plan for tensor parallelism; take the strategy 'accel_fsdp2', which "
                f"splits its weights over processes{alternative}"
            )
        self._build_once()

    def _build_once(self) -> None:
        if self._is_built():
            return
        if has_trainer(self):  # callbacks that copy the model call this before setup
            self._read_datamodule()
        self._require_sizes()
        self._build()

    def _is_built(self) -> bool:
        raise NotImplementedError

    def _require_sizes(self) -> None:
        """Raise a ValueError if a size is neither given nor provided by the datamodule."""
        raise NotImplementedError

    def _build(self) -> None:
        raise NotImplementedError

    def on_fit_start(self) -> None:
        self._sum_in_float32()

    def on_test_epoch_start(self) -> None:
        self._sum_in_float32()

    def _sum_in_float32(self) -> None:
        """Undo what a precision of bf16 weights does to metrics, whose sums would stop to grow."""
        for metric in self.children():
            if isinstance(metric, Metric) and any(map(_is_narrow, metric.metric_state.values())):
                metric.set_dtype(torch.float32)

    def on_validation_epoch_start(self) -> None:
        self._sum_in_float32()
        # Trainer.validate leaves metrics with tensors created in inference mode; the validation in fit, which runs
        # outside it, could not update them
        for name, metric in self.named_children():
            if name.startswith("val_") and isinstance(metric, Metric):
                metric.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


def _is_narrow(state: Any) -> bool:
    return isinstance(state, Tensor) and state.dtype in (torch.bfloat16, torch.float16)


def require_class_names(names: Sequence[str] | None, num_classes: int | None) -> None:
    """Raise a ValueError if there are names, but not one for each class."""
    if names is not None and len(names) != num_classes:
        raise ValueError(f"num_classes is {num_classes}, but there are {len(names)} class_names")


def require_classes(classes: Tensor, shape: Sequence[int], num_classes: int, name: str = "classes") -> None:
    """Raise a ValueError unless ``classes`` are integers of this shape, each a class or -100 where it is unknown."""
    is_of_shape = not classes.is_floating_point() and classes.shape == torch.Size(shape)
    known = classes.where(classes != IGNORED, 0)
    if not is_of_shape or (known.numel() and not 0 <= int(known.min()) <= int(known.max()) < num_classes):
        extent = f", {classes.min().item()} to {classes.max().item()}" if classes.numel() else ""
        raise ValueError(
            f"{name} must be {tuple(shape)} integers in [0, {num_classes}), one for each row, or -100 where it is "
            f"unknown; got {tuple(classes.shape)} {classes.dtype}{extent}{_hint_at_classes(classes, shape)}"
        )


def _hint_at_classes(classes: Tensor, shape: Sequence[int]) -> str:
    if classes.shape == (*shape, 1):
        return ". Pass a column of them, target[..., 0]"
    if classes.shape[:-1] == torch.Size(shape):
        return ". If each row has a number for each class, pass target.argmax(dim=-1)"
    return ". If they are whole numbers, convert them with .long()" if classes.is_floating_point() else ""


def as_classes(target: Tensor, shape: Sequence[int], num_classes: int, stage: str, *, look: bool = False) -> Tensor:
    """Convert the classes of a batch of ``stage`` to int64.

    Args:
        target: integers; -100 where the class is unknown.
        shape: that the scores need.
        num_classes: which they must be below.
        stage: for the message.
        look: look at the values on a GPU too, which waits for it: for the first batch.

    Raises:
        ValueError: if they are floating, of another shape, or out of range.
    """
    is_seen = (look or target.is_cpu) and not torch.compiler.is_compiling()
    if target.is_floating_point() or target.shape != torch.Size(shape) or is_seen:
        require_classes(target, shape, num_classes, f"classes of a batch of {stage}")
    return target.long()


def targets_of_scores(target: Tensor, scores: Tensor, batch_idx: int, stage: str) -> Tensor:
    """Return what ``F.cross_entropy`` takes for ``scores`` (B, C): classes, or probabilities (B, C) as they are."""
    if target.is_floating_point() and target.shape == scores.shape:
        return target
    return as_classes(target, scores.shape[:1], scores.shape[1], stage, look=batch_idx == 0)


def is_logging_step(module: L.LightningModule) -> bool:
    """Return whether metrics of this training step are logged.

    ``self.log`` takes a few hundred microseconds, so it is called only at the steps that the loggers record, at the end
    of the epoch, and at every step if a callback or scheduler monitors a training metric.
    """
    if not has_trainer(module):
        return False
    trainer: Any = module.trainer  # connectors set the attributes read here
    every = trainer.log_every_n_steps
    if every == 0 or (module.global_step + 1) % every == 0 or trainer.is_last_batch:
        return every > 0
    watchers = [*trainer.callbacks, *trainer.lr_scheduler_configs]
    return any(str(getattr(watcher, "monitor", None)).startswith("train/") for watcher in watchers)


def num_replicas(module: L.LightningModule) -> int:
    """Count the processes that train on different batches; the stages of a pipeline, which share them, count once."""
    if not has_trainer(module):
        return 1
    trainer: Any = module.trainer
    return int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))


def take_from_datamodule(module: L.LightningModule, **plain: Callable[[Any], object]) -> None:
    """Set attributes of ``module`` that were not given from the datamodule; reject values that contradict it.

    Args:
        module: a module in a Trainer.
        plain: by attribute, a function that converts the datamodule's value to a plain one: NumPy types would make the
            checkpoint unsafe to load.

    Raises:
        ValueError: if both have a value, and they differ.
    """
    datamodule = module.trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    for name, make_plain in plain.items():
        offered, given = getattr(datamodule, name, None), getattr(module, name)
        offered = None if offered is None else make_plain(offered)
        if given is None:
            setattr(module, name, offered)
            module.hparams[name] = offered
        elif offered is not None and offered != given:
            raise ValueError(
                f"{type(module).__name__} has {name}={given}, but {type(datamodule).__name__} has {name}={offered}. "
                f"Leave {name} out to take the datamodule's"
            )


def take_unit(module: L.LightningModule, mean: Tensor, std: Tensor, of: str = "target") -> None:
    """Copy the datamodule's ``target_mean`` and ``target_std``, or those ``of`` something else, if it has both."""
    datamodule = module.trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    given = [getattr(datamodule, f"{of}_{name}", None) for name in ("mean", "std")]
    if not any(value is None for value in given):
        for buffer, value in zip((mean, std), given, strict=True):
            buffer.copy_(torch.as_tensor(value))


def list_of_str(names: Sequence[object]) -> list[str]:
    """Convert names, such as NumPy's, to a list of plain strings; a single string is one name."""
    return [str(name) for name in list_of_names(names)]


def name_classes(scores: Tensor, names: Sequence[str] | None) -> dict[str, Any]:
    """Return the most probable class of ``scores`` (B, C), by name if there are ``names``, and the probabilities."""
    probabilities = scores.softmax(dim=-1)
    probability, label = probabilities.max(dim=-1)
    return {
        "class": label if names is None else [names[i] for i in label.tolist()],
        "probability": probability,
        "probabilities": probabilities,
    }


def keep_plain_hyperparameters(module: L.LightningModule) -> None:
    """Keep only hyperparameters that are safe to load: NumPy values become Python's, gates stay if a config named them.

    Dataclasses become dictionaries. This includes the hyperparameters of a subclass's constructor.
    """
    for name, value in module.hparams.items():
        if is_dataclass(value):
            module.hparams[name] = {option: _plain(part) for option, part in options_of(value).items()}
        else:
            module.hparams[name] = _plain(value)
    if not isinstance(module.hparams.get("gate", {}), dict):
        del module.hparams["gate"]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


class EpochLoad(Metric):
    """Compute the share of the slots requested of each expert, (L, E), over all batches and processes of an epoch."""

    counts: Tensor

    def __init__(self, num_mixtures: int, num_experts: int) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(num_mixtures, num_experts, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, reports: Sequence[GateReport]) -> None:
        self.counts += torch.stack([report.expert_counts for report in reports])

    def compute(self) -> Tensor:
        return self.counts / self.counts.sum(dim=1, keepdim=True).clamp(min=1)


def hint_at_removed_channels(module: nn.Module) -> None:
    """Make errors of ``module.load_state_dict`` explain how to load a checkpoint with removed channels."""
    module.register_load_state_dict_pre_hook(_hint)


def _hint(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    pairs = [
        (state_dict[prefix + name], own)
        for name, own in module.named_parameters(remove_duplicate=False)
        if isinstance(state_dict.get(prefix + name), Tensor)
    ]
    others = [(saved.shape, own.shape) for saved, own in pairs if saved.shape != own.shape]
    if others and all(
        len(saved) == len(own) and all(size <= whole for size, whole in zip(saved, own, strict=True))
        for saved, own in others
    ):
        error_msgs.append(_HINT)
