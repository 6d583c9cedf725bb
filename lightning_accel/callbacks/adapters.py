"""Training of low-rank adapters in place of a module's weights."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_accel._private.lightning import averaged_model
from lightning_accel.callbacks.deployment.copies import WholeCopy, raise_in_all_processes
from lightning_accel.callbacks.deployment.quantization import Quantization
from lightning_accel.callbacks.pruning.callback import Pruning
from lightning_accel.callbacks.pruning.semi_structured import SemiStructuredSparsity
from lightning_accel.callbacks.trainer_callbacks import callbacks_of
from lightning_accel.compress.adapters import (
    ADAPTERS,
    BaseForm,
    adapter_parameters,
    adapts_stacked_weights,
    add_adapters_,
    digest_of_base,
    frozen_names,
    is_packed,
    require_rank,
    require_same_base,
)
from lightning_accel.compress.channels.plan import load_pruned
from lightning_accel.ops.bounds import local_path
from lightning_accel.ops.extras import require_module
from lightning_accel.ops.names import Exclusion, list_of_names
from lightning_accel.strategies import DataParallelStrategy, FullyShardedStrategy, PipelineStrategy
from lightning_accel.strategies.sharding.blocks import broadcast_state

_STATES = "state_dict", "current_model_state"  # of a checkpoint; the latter is written by WeightAveraging


class LowRankAdapters(L.Callback):
    """Freeze the weights of any LightningModule and train low-rank adapters in its linear layers, by peft.

    With LoRA (Hu et al. 2021) each adapted layer gets a trainable product of rank ``rank`` beside its weight, zero at
    first; with ``base="nf4"`` (QLoRA, Dettmers et al. 2023) the frozen weights of these layers take 4 bits. ``forward``
    and the steps of the module stay as they are: adapters are injected in ``setup``, before optimizers and strategies
    see the parameters. Optimizers may be given all of ``self.parameters()``. Buffers, as of batch norms, do not freeze.

    What other callbacks get at the end of the fit, ``Export``, ``Quantization`` and ``CompressionReport``, is a copy
    with plain layers, into whose weights the adapters are merged, in floats. The module itself keeps its adapters.
    :func:`lightning_accel.compress.merge_adapters_` merges them in place, and
    :func:`lightning_accel.compress.load_adapted` those of a checkpoint.

    Checkpoints hold what trains, and a digest of the frozen weights: a run that is resumed, validated or tested from
    one has to begin with the same frozen weights, and others are rejected. Modules that draw random weights need
    ``checkpoint``. (``WeightAveraging``, ``RestoringEarlyStopping`` and ``Distillation`` add a module of their own;
    with ``accel_fsdp2`` and ``checkpoints="sharded"``, and with ``save_weights_only``, frozen weights are in, too.)

    On weights that were pruned in an earlier fit, adapters leave the zeros zero, in training and when they are merged
    (see :func:`lightning_accel.compress.add_adapters_`). Channels and widths that were removed stay removed;
    after a removal of width, which is not exact, norms should train, too (``train=["*norm*"]``).
    ``Distillation(teacher="initial")`` teaches with the weights as they are before the adapters.

    Under ``accel_fsdp2`` float weights are sharded; 4-bit ones are kept whole by each process.

    Args:
        rank: rank of each product.
        alpha: numerator of its scale, ``alpha / rank``; by default twice the rank.
        dropout: of the inputs of adapters, in training.
        include: names or patterns of submodules (``"*.q_proj"``), or classes by name, whose linear layers and
            convolutions get adapters, or names of stacked weights of experts (``"*.experts.*"``). By default all linear
            layers but heads and gates, and those whose weights are shared, as with tied embeddings.
        exclude: names, patterns or classes of what gets none.
        train: names, patterns or classes of what trains in full, such as norms or a new head.
        base: ``"nf4"`` stores the frozen weights of ``nn.Linear`` layers with adapters in 4 bits, by bitsandbytes.
        checkpoint: file with the weights to adapt, of a Trainer, or with ``state_dict``; channels that the run removed
            are removed from the module, too.
        options: further fields of ``peft.LoraConfig``, such as ``{"use_rslora": true}``.

    Raises:
        ValueError: if an option is out of range; before training, if a name matches nothing, there is no layer to adapt
            or quantize, a callback before this one has copied the module, the optimizers leave out what trains, or
            the resumed checkpoint has other options or frozen weights; in the first step, if no adapter gets a
            gradient.
        TypeError: before training, beside ``Pruning``, ``SemiStructuredSparsity`` or ``Quantization(mode="qat")``,
            which change the frozen weights, under FSDP1, DeepSpeed and ModelParallelStrategy, and for experts under
            ``accel_expert_parallel``.
        ModuleNotFoundError: before training, if peft or bitsandbytes is missing.

    Source: Hu et al. 2021, LoRA, https://arxiv.org/abs/2106.09685; ``nf4``: Dettmers et al. 2023, QLoRA,
    https://arxiv.org/abs/2305.14314.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import LowRankAdapters
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[LowRankAdapters(rank=16, include="*.q_proj", train="head")])
    """

    def __init__(
        self,
        rank: int = 8,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
        include: Sequence[str | type[nn.Module]] | None = None,
        exclude: Sequence[str | type[nn.Module]] = (),
        train: Sequence[str | type[nn.Module]] = (),
        base: BaseForm = "float",
        checkpoint: str | PathLike[str] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        require_rank(rank, alpha, dropout, base)
        self.checkpoint = None if checkpoint is None else local_path(checkpoint, "checkpoint")
        self.options: dict[str, Any] = {
            "rank": rank,
            "alpha": alpha,
            "dropout": dropout,
            "include": None if include is None else _plain_names(include),
            "exclude": _plain_names(exclude),
            "train": _plain_names(train),
            "base": base,
            "options": dict(options or {}),
        }
        self._digest: str | None = None
        self._is_checked = False

    # ---- before training

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        require_module("peft")
        if self.options["base"] == "nf4":
            require_module("bitsandbytes")
        _require_callbacks(trainer)
        self._require_strategy(trainer.strategy)
        pl_module.configure_model()  # it may build submodules, and does so only once
        known: dict[str, Any] | None = vars(pl_module).get("_adapted")
        if known is None:
            self._adapt(trainer, pl_module)
        elif known[ADAPTERS] != self.options:
            raise ValueError(
                f"{type(pl_module).__name__} has adapters of another LowRankAdapters, {known[ADAPTERS]}, and this one "
                f"has {self.options}; make the module anew, or merge them by lightning_accel.compress.merge_adapters_"
            )
        self._digest = vars(pl_module)["_adapted"]["base"]
        self._is_checked = False
        _set_compute_dtype(pl_module, trainer.precision)
        # a public method, since no hook of callbacks comes between a file and its weights
        trainer.strategy.load_checkpoint = partial(self._load_checkpoint, trainer)  # type: ignore[method-assign]

    def _adapt(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        name = type(pl_module).__name__
        if any(value.is_meta or isinstance(value, DTensor) for value in pl_module.parameters()):
            raise TypeError(
                f"LowRankAdapters needs whole weights to freeze, and {name} has parameters that are split or on the "
                "meta device: make the module with its weights, on the CPU, and train with 'accel_fsdp2', which splits "
                "it afterwards"
            )
        _require_first(trainer, self)
        if self.checkpoint is not None:
            load_pruned(pl_module, str(self.checkpoint))
        if dist.is_initialized() and dist.get_world_size() > 1:  # digests, masks and 4 bits must be of equal weights
            broadcast_state(pl_module, trainer.strategy.root_device)
        add_adapters_(pl_module, **self.options)
        _require_whole_experts(pl_module, trainer.strategy)
        vars(pl_module)["_adapted"] = {ADAPTERS: self.options, "base": digest_of_base(pl_module)}
        trained = sum(value.numel() for value in pl_module.parameters() if value.requires_grad)
        adapted = sum(name.endswith(".lora_A.default.weight") for name in adapter_parameters(pl_module))
        rank_zero_info(f"{adapted} layers of {name} have adapters; {trained:,} parameters train")

    def _require_strategy(self, strategy: Strategy) -> None:
        if isinstance(strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy):
            raise TypeError(
                f"LowRankAdapters does not work under {type(strategy).__name__}, which reads, writes or splits weights "
                "by itself; take the strategy 'accel_fsdp2', which shards frozen weights and adapters"
            )
        if self.options["base"] == "nf4" and isinstance(strategy, PipelineStrategy | DataParallelStrategy):
            raise TypeError(
                f"base='nf4' does not work under {type(strategy).__name__}, which moves or copies weights without "
                "their scales; take base='float', or the strategy 'accel_ddp' or 'accel_fsdp2'"
            )

    # ---- checkpoints

    @property
    def state_key(self) -> str:
        return "LowRankAdapters"

    def state_dict(self) -> dict[str, Any]:
        return {} if self._digest is None else {ADAPTERS: self.options, "base": self._digest}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Leave frozen parameters out."""
        frozen = frozen_names(pl_module)
        checkpoint["state_dict"] = {key: one for key, one in checkpoint["state_dict"].items() if key not in frozen}

    def _load_checkpoint(self, trainer: L.Trainer, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint as the strategy does, and add the frozen parameters of the module."""
        strategy, module = trainer.strategy, trainer.lightning_module
        checkpoint = type(strategy).load_checkpoint(strategy, path, *args, **kwargs)
        raise_in_all_processes(trainer, partial(self._require_same, path, checkpoint), "load the checkpoint")
        frozen = frozen_names(module)
        kept = {name: value for name, value in module.state_dict().items() if name in frozen}
        for key in _STATES:
            if checkpoint.get(key):
                checkpoint[key] = {**kept, **checkpoint[key]}
        return checkpoint

    def _require_same(self, path: Any, checkpoint: Mapping[str, Any]) -> None:
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state:
            if state[ADAPTERS] != self.options:
                raise ValueError(
                    f"{path} was written by LowRankAdapters with {state[ADAPTERS]}, and this one has {self.options}; "
                    "give it the options of the run that is resumed"
                )
            assert self._digest is not None
            require_same_base(state["base"], self._digest)
        elif checkpoint.get("state_dict") and not any(".lora_" in name for name in checkpoint["state_dict"]):
            raise ValueError(
                f"{path} was written by a run without adapters. To adapt its weights begin a new run, with "
                f"LowRankAdapters(checkpoint={str(path)!r}) and no ckpt_path"
            )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        vars(trainer.strategy).pop("load_checkpoint", None)

    # ---- training

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        held = {id(value) for one in trainer.optimizers for group in one.param_groups for value in group["params"]}
        missing = [
            name for name, value in pl_module.named_parameters() if value.requires_grad and id(value) not in held
        ]
        if missing:
            raise ValueError(
                f"the optimizers of {type(pl_module).__name__} leave out {', '.join(missing[:3])}, so that "
                f"{len(missing)} parameters would not train; give them self.parameters() in configure_optimizers, "
                "since adapters are made after __init__"
            )
        for callback in callbacks_of(trainer, WeightAveraging):
            _average_exactly(averaged_model(callback))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Check, in the first step, that gradients reach the adapters."""
        if self._is_checked:
            return
        self._is_checked = True
        if all(value.grad is None for value in adapter_parameters(pl_module).values() if not value.is_meta):
            raise ValueError(
                f"no adapter of {type(pl_module).__name__} got a gradient: the step does not call the layers that have "
                "them, or recomputes activations by reentrant checkpoints, which need inputs with gradients; name "
                "layers that are called in include, or take use_reentrant=False"
            )


def _plain_names(entries: Sequence[Exclusion]) -> list[str]:
    """Return names in place of classes, as a checkpoint can hold them."""
    return [one if isinstance(one, str) else one.__name__ for one in list_of_names(entries)]


def _require_callbacks(trainer: L.Trainer) -> None:
    for callback in callbacks_of(trainer, L.Callback):
        trains_int8 = isinstance(callback, Quantization) and callback.mode == "qat"
        if isinstance(callback, Pruning | SemiStructuredSparsity) or trains_int8:
            raise TypeError(
                f"{type(callback).__name__} changes weights that LowRankAdapters freezes: prune in an earlier fit and "
                "adapt what it leaves, whose zeros and shapes stay, and quantize after the fit, with another mode"
            )


def _require_first(trainer: L.Trainer, adapters: L.Callback) -> None:
    """Reject callbacks that have copied the module without its adapters."""
    callbacks = callbacks_of(trainer, L.Callback)
    for place, callback in enumerate(callbacks):
        copies = [one for one in vars(callback).values() if isinstance(one, WholeCopy) and not one.has_adapters()]
        averages = isinstance(callback, WeightAveraging | StochasticWeightAveraging)
        is_earlier = place < callbacks.index(adapters)
        if copies or (is_earlier and averages and averaged_model(callback) is not None):
            raise ValueError(
                f"{type(callback).__name__} stands before LowRankAdapters and has copied the module as it was without "
                "adapters; put LowRankAdapters first in callbacks"
            )


def _require_whole_experts(module: nn.Module, strategy: Strategy) -> None:
    is_split = isinstance(strategy, FullyShardedStrategy) and strategy.expert_parallel_size != 1
    if is_split and adapts_stacked_weights(module):
        raise TypeError(
            "adapters of experts need the stacked weights of all of them, which expert parallelism distributes; take "
            "the strategy 'accel_fsdp2', or leave experts out of include"
        )


def _set_compute_dtype(module: nn.Module, precision: Any) -> None:
    for layer in module.modules():
        if is_packed(getattr(layer, "weight", None)):  # no kernel is for float64
            layer.compute_dtype = torch.float32 if precision == "64-true" else None  # type: ignore[assignment]


def _average_exactly(average: Any) -> None:
    """Average equal values to the same value, so that frozen weights and 4-bit codes stay as they are."""
    if average is None or average.avg_fn is None:
        return
    inner: Callable[..., Tensor] = average.avg_fn

    def avg_fn(averaged: Tensor, value: Tensor, number: Any) -> Tensor:
        return torch.where(averaged == value, averaged, inner(averaged, value, number).to(averaged.dtype))

    average.avg_fn = avg_fn
