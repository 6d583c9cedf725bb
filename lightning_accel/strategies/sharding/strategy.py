"""FSDP2 for any LightningModule: parameters, gradients and optimizer states sharded over processes, block by block."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_accel._private.lightning import layer_sync_of, starts_scripts
from lightning_accel.ops.blocks import find_blocks
from lightning_accel.ops.bounds import if_set, require_flags, require_integers
from lightning_accel.ops.names import list_of_names, require_one_of
from lightning_accel.strategies.batch_samplers import require_distributable_batches
from lightning_accel.strategies.checkpoints.io import (
    agreed_path,
    checkpoint_folders,
    checkpoint_io_of,
    reject_storage_options,
    require_local_folder,
)
from lightning_accel.strategies.checkpoints.reading import read_checkpoint, require_loadable
from lightning_accel.strategies.checkpoints.stores import is_remote
from lightning_accel.strategies.gradients import clip_grad_norm_
from lightning_accel.strategies.launched import LaunchedStrategy
from lightning_accel.strategies.sharding.blocks import (
    Sharded,
    Sharding,
    batch_norm_statistics,
    broadcast_,
    broadcast_state,
    recompute_activations,
    shard_module,
)
from lightning_accel.strategies.sharding.expert_parallel import find_experts
from lightning_accel.strategies.sharding.metadata import REST
from lightning_accel.strategies.sharding.state import (
    gather_full_state,
    is_sharded_checkpoint,
    load_full_model,
    load_full_optimizer,
    load_model_shards,
    load_optimizer_shards,
    local_state,
)

_LOW_PRECISION = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class FullyShardedStrategy(LaunchedStrategy):
    """Train a module that is written for one device with FSDP2, on CPUs and GPUs.

    The repeated blocks of the module (see :func:`lightning_accel.strategies.find_blocks`) are gathered, used and freed
    one by one, the rest of it once a step. Training equals that of one process with the batches of all of them. Initial
    weights are those of the first process, as with DistributedDataParallel.

    Create a module too large for the memory of a process on the meta device, ``with torch.device("meta")``. Its layers
    then initialize their shards in place by their ``reset_parameters()``, or load those of a checkpoint.

    Under ``bf16-mixed`` and ``16-mixed`` parameters are gathered in that dtype and gradients reduced in float32;
    submodules with an attribute ``keep_float32 = True`` are gathered in float32. Running statistics of batch norms are
    those of the first process wherever they are used or saved. After a run the module stays sharded, for further runs
    with the same options; to use it on one device, load a checkpoint into a new module. A checkpoint folder is
    converted to a file by ``python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER``.

    Optimizers with ``fused=True`` (or ``foreach=True``) avoid the overhead of DTensors, about 0.1 ms per operation and
    parameter; give experts that are distributed a parameter group of their own then.

    Args:
        blocks: class names of the blocks; by default ``repeated_blocks()`` of the module, or blocks found by structure.
        shard_size: number of processes that shard one replica of the model; by default all. With fewer (HSDP), there
            are several replicas, and only gradients are exchanged between them.
        expert_parallel_size: number of processes over which the experts of each layer are distributed, to which tokens
            are then sent; for layers as :func:`lightning_accel.strategies.find_experts` describes. 1 shards experts
            like the rest; ``"all"`` uses all processes.
        activation_checkpointing: keep only the input of each block, and recompute the rest in the backward pass.
        cpu_offload: keep parameters, gradients and optimizer states in the memory of the host.
        checkpoints: ``whole``: one file, which loads on one device, and resumes on any number of processes;
            ``sharded``: a folder to which each process writes its shard, which also resumes on any number.
        timeout: time limit of each collective, a ``datetime.timedelta``.
        start_method: how Lightning starts processes: ``popen``, or ``spawn`` and ``fork`` (notebooks).

    Raises:
        ValueError: if the options contradict each other; before training, if sizes do not divide the number of
            processes or experts, or a class name matches no submodule.
        TypeError: before training, if the module has sharded its parameters itself.

    Source: Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054, stage 3; Zhao et al. 2023, PyTorch FSDP,
    https://arxiv.org/abs/2304.11277.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import FullyShardedStrategy
        >>> trainer = L.Trainer(accelerator="cpu", devices=2, strategy=FullyShardedStrategy(checkpoints="sharded"))
    """

    def __init__(
        self,
        *,
        blocks: Sequence[str] | None = None,
        shard_size: int | None = None,
        expert_parallel_size: int | Literal["all"] = 1,
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
        checkpoints: Literal["whole", "sharded"] = "whole",
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(timeout=timeout, start_method=start_method)
        if checkpoints not in ("whole", "sharded"):
            raise ValueError(f"checkpoints must be 'whole' or 'sharded'; got {checkpoints!r}")
        if expert_parallel_size != 1 and (shard_size is not None or cpu_offload):
            raise ValueError("expert_parallel_size does not go with shard_size or cpu_offload; leave those out")
        require_integers(1, **if_set(shard_size=shard_size))
        require_flags(activation_checkpointing=activation_checkpointing, cpu_offload=cpu_offload)
        if isinstance(expert_parallel_size, str):
            require_one_of("expert_parallel_size", expert_parallel_size, ["all"])
        else:
            require_integers(1, expert_parallel_size=expert_parallel_size)
        self.blocks = None if blocks is None else list_of_names(blocks, "blocks")
        self.shard_size = shard_size
        self.expert_parallel_size = expert_parallel_size
        self.activation_checkpointing = activation_checkpointing
        self.cpu_offload = cpu_offload
        self.checkpoints = checkpoints
        self._sharded: Sharded | None = None
        self._folder_to_load: Path | None = None
        self._state_to_load: Mapping[str, Any] | None = None
        self._has_failed = False
        self._accumulating = False

    def setup_environment(self) -> None:
        super().setup_environment()
        for name, size in (("shard_size", self.shard_size), ("expert_parallel_size", self.expert_parallel_size)):
            if isinstance(size, int) and (size < 1 or self.world_size % size):
                raise ValueError(f"{name} must divide the number of processes, {self.world_size}; got {size}")

    def _get_process_group_backend(self) -> str:
        backend: str = super()._get_process_group_backend()
        return "cpu:gloo,cuda:nccl" if backend == "nccl" and self.cpu_offload else backend

    def setup(self, trainer: L.Trainer) -> None:
        """Shard the module, then create its optimizers."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        require_distributable_batches(trainer)
        if fitting and self.checkpoints == "sharded":
            require_local_folder(checkpoint_io_of(self), checkpoint_folders(trainer))
        _reject_weight_averaging(trainer)
        self._has_failed = False
        if sync := layer_sync_of(self):  # in evaluation too, where it changes nothing: it must precede the sharding
            module = sync.apply(module)  # type: ignore[assignment]
        self.precision_plugin.convert_module(module)
        self._sharded = vars(module).get("_sharded")
        if self._sharded is None:
            self._sharded = vars(module)["_sharded"] = self._shard(module)
            self._sharded.options = self._options()
        elif self._sharded.options != self._options():
            raise ValueError(
                f"{type(module).__name__} was split by an earlier run, with other options of FullyShardedStrategy or "
                "another precision; make it anew, and load a checkpoint"
            )
        else:
            self._sharded.reshard()  # an evaluation leaves parameters gathered
        if self._folder_to_load is not None:
            load_model_shards(self._folder_to_load, module, module.strict_loading)
        elif self._state_to_load is not None:
            load_full_model(module, self._state_to_load, module.strict_loading)
            self._state_to_load = None
        self.model = self._sharded
        if fitting:
            self.optimizers, self.lr_scheduler_configs = [], []  # optimizers of an earlier fit hold other parameters
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]

    def _shard(self, module: L.LightningModule) -> Sharded:
        name = type(module).__name__
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise TypeError(
                f"{name} has parameters that are split already, by itself or by another strategy. For modules that "
                "split themselves in configure_model() take Lightning's ModelParallelStrategy; else make them anew"
            )
        if self.expert_parallel_size != 1 and not find_experts(module):
            raise ValueError(
                f"{name} has no layer that holds experts, so there is nothing to deal to processes. Give that layer "
                "an attribute expert_parameters, as lightning_accel.strategies.find_experts describes, or take the "
                "strategy 'accel_fsdp2'"
            )
        blocks = find_blocks(module, self.blocks)
        if not blocks:
            rank_zero_info(f"{name} has no repeated blocks: the whole of it is gathered in each step")
        broadcast_state(module, self.root_device)
        if self.activation_checkpointing:
            recompute_activations(blocks)
        return shard_module(module, blocks, self._sharding())

    def _options(self) -> tuple[object, ...]:
        precision = getattr(self.precision_plugin, "precision", "32-true")
        mesh = self.world_size, self.shard_size, self.expert_parallel_size
        memory = self.activation_checkpointing, self.cpu_offload
        return *mesh, self.blocks, *memory, precision

    def _sharding(self) -> Sharding:
        device_type, world_size = self.root_device.type, self.world_size
        shard_size = self.shard_size or world_size
        mesh = init_device_mesh(
            device_type, (world_size // shard_size, shard_size), mesh_dim_names=("replicate", "shard")
        )
        expert_mesh = None
        if self.expert_parallel_size != 1:
            size = world_size if self.expert_parallel_size == "all" else self.expert_parallel_size
            shape = (world_size // size, size)
            expert_mesh = init_device_mesh(device_type, shape, mesh_dim_names=("same_experts", "experts"))
        precision = getattr(self.precision_plugin, "precision", "32-true")
        return Sharding(
            mesh if shard_size < world_size else mesh["shard"],
            expert_mesh,
            dtype=_LOW_PRECISION.get(precision),
            reduce_dtype=torch.float32 if "16" in precision else None,
            cpu_offload=self.cpu_offload,
        )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip the reduction of gradients, for all but the last of the accumulated batches."""
        if self._sharded is None:
            yield
            return
        self._accumulating = True
        self._sharded.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)  # type: ignore[operator]
            self._accumulating = False

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average the gradients of parameters without a dimension, which FSDP does not support."""
        super().post_backward(closure_loss)
        for scalar in self._sharded.scalars if self._sharded is not None and not self._accumulating else []:
            if scalar.requires_grad:
                if scalar.grad is None:
                    scalar.grad = torch.zeros_like(scalar)
                dist.all_reduce(scalar.grad)
                scalar.grad /= self.world_size

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        # torch's own rejects gradients of several meshes, which experts have
        clip_grad_norm_(self.precision_plugin.main_params(optimizer), clip_val)

    def _broadcast_batch_norm_statistics(self) -> None:
        for buffer in batch_norm_statistics(self._sharded or nn.Module()):
            broadcast_(buffer, self.root_device)

    on_validation_start = on_test_start = on_predict_start = _broadcast_batch_norm_statistics

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state dict on the first process; with sharded checkpoints, save_checkpoint adds it."""
        assert self.lightning_module is not None
        self._broadcast_batch_norm_statistics()
        if self.checkpoints == "sharded":
            return {}  # save_checkpoint adds it
        return gather_full_state(self.lightning_module.state_dict(), keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full optimizer state on the first process, as one device would return it."""
        if self.checkpoints == "sharded":
            return {}  # save_checkpoint adds it
        return gather_full_state(getattr(optimizer, "optimizer", optimizer).state_dict(), keep=self.is_global_zero)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write one file, or a folder with a shard from each process, atomically."""
        if self.checkpoints == "whole":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        reject_storage_options(storage_options)
        assert self.lightning_module is not None
        path = agreed_path(filepath)
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        state = local_state(self.lightning_module, optimizers)
        rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        checkpoint_io_of(self).save_sharded(state, rest, path, self)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.checkpoints == "whole":
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            checkpoint_io_of(self).remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file or a folder; weights and optimizer states of a folder are loaded after the model is sharded."""
        self._folder_to_load = None
        writer = checkpoint_io_of(self)
        if is_remote(checkpoint_path) and writer.copies is None:  # a whole one, which Lightning reads
            return super().load_checkpoint(checkpoint_path, weights_only)
        found = writer.local_path(checkpoint_path)
        if not is_sharded_checkpoint(found):
            return super().load_checkpoint(checkpoint_path, weights_only)
        require_loadable(found, weights_only)
        self._folder_to_load = found
        return read_checkpoint(self._folder_to_load / REST, weights_only) | {"state_dict": {}, "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self._folder_to_load is not None:
            return
        if any(parameter.is_meta for parameter in self.lightning_module.parameters()):
            self._state_to_load = checkpoint["state_dict"]  # meta parameters have no memory yet
        else:
            load_full_model(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        if self._folder_to_load is not None:
            load_optimizer_shards(self._folder_to_load, self.lightning_module, self.optimizers)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_full_optimizer(optimizer, state)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._has_failed = True  # others may have ended or wait elsewhere, so do not wait for any of them

    def teardown(self) -> None:
        if not self._has_failed and not starts_scripts(self) and self.lightning_module is not None:
            _return_full_weights(self.lightning_module, keep=self.is_global_zero)
        self._folder_to_load = None
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        if (sync := layer_sync_of(self)) and self.lightning_module is not None:
            sync.revert(self.lightning_module)
        super().teardown()
        self.model = self.lightning_module


def _reject_weight_averaging(trainer: L.Trainer) -> None:
    copying = [one for one in trainer.callbacks if isinstance(one, WeightAveraging | StochasticWeightAveraging)]  # type: ignore[attr-defined]
    if copying:
        raise ValueError(
            f"{type(copying[0]).__name__} keeps a whole copy of the weights, which cannot follow weights that are "
            "split; leave it out, or train with the strategy 'ddp'"
        )


def _return_full_weights(module: L.LightningModule, keep: bool) -> None:
    """Return full weights from ``module.state_dict``, for the parent process that started this one."""
    whole = gather_full_state(module.state_dict(), keep)
    module.state_dict = lambda *_, **__: whole  # type: ignore[method-assign]
