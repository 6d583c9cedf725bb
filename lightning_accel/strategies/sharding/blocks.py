"""FSDP2 applied to a module block by block, and its experts distributed over processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric

from lightning_accel._private.torch import NormBase
from lightning_accel.strategies.sharding.expert_parallel import distribute_experts, expert_parameters, find_experts


@dataclass(frozen=True)
class Sharding:
    """Configure how a module is sharded.

    Attributes:
        mesh: mesh of all processes, (processes,), or (replicas, processes that shard one).
        expert_mesh: mesh of all processes, (those with the same experts, those over which experts are distributed), or
            None.
        dtype: dtype in which parameters are gathered; by default their own.
        reduce_dtype: dtype in which gradients are reduced; by default their own.
        cpu_offload: whether parameters, gradients and optimizer states stay on the CPU.
        ignored: parameters that FSDP leaves unchanged.
    """

    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None = None
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    cpu_offload: bool = False
    ignored: set[nn.Parameter] = field(default_factory=set)

    def apply(self, module: nn.Module, dtype: torch.dtype | None = None, **options: object) -> None:
        """Shard the parameters of ``module`` that are not sharded yet."""
        # autocast casts inputs where needed; targets and positions keep their dtypes
        policy = MixedPrecisionPolicy(dtype, self.reduce_dtype, cast_forward_inputs=False)
        fully_shard(
            module,
            **{"mesh": self.mesh, "reshard_after_forward": True, **options},  # type: ignore[call-overload]
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy(pin_memory=self.mesh.device_type != "cpu")
            if self.cpu_offload
            else OffloadPolicy(),
            ignored_params=self.ignored,
        )


class Sharded(nn.Module):
    """Wrap a module, gathering the parameters that its blocks do not hold.

    These stay gathered from the forward to the backward pass, so that any of them may be used anywhere, even without
    calling its layer.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.scalars: list[nn.Parameter] = []  # parameters without a dimension, which FSDP does not support
        self.options: tuple[object, ...] = ()

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)


def shard_module(module: nn.Module, blocks: Sequence[nn.Module], sharding: Sharding) -> Sharded:
    """Shard ``module`` in place, each of ``blocks`` on its own; call the returned wrapper instead of it.

    Submodules with an attribute ``keep_float32 = True``, and batch norms, are gathered in their own dtype. The caller
    has to reduce the gradients of parameters without a dimension, the ``scalars`` of the wrapper. Parameters of
    integers, such as 4-bit weights, stay whole in each process.

    Raises:
        ValueError: if experts cannot be distributed in equal numbers.
    """
    if sharding.expert_mesh is not None:
        for name, experts in find_experts(module).items():
            _shard_experts(name, experts, sharding, sharding.expert_mesh)
    scalars = [parameter for parameter in module.parameters() if parameter.ndim == 0]
    sharding.ignored.update(scalars)
    sharding.ignored.update(one for one in module.parameters() if not one.is_floating_point())
    for submodule in module.modules():
        if _keeps_dtype(submodule) and submodule not in blocks and any(True for _ in submodule.parameters()):
            sharding.apply(submodule)
    for block in blocks:
        sharding.apply(block, None if _keeps_dtype(block) else sharding.dtype)
    root = Sharded(module)
    sharding.apply(root, sharding.dtype, reshard_after_forward=False)
    root.scalars = scalars
    _move_unsharded(module, sharding)
    return root


def _keeps_dtype(module: nn.Module) -> bool:
    """Return whether a module is gathered in its own dtype.

    Batch norms of torch combine inputs of low precision with float32 weights, but not float32 statistics with low ones.
    """
    return getattr(module, "keep_float32", False) or isinstance(module, NormBase)


def _shard_experts(name: str, experts: nn.Module, sharding: Sharding, mesh: DeviceMesh) -> None:
    copies, parts = mesh.size(0), mesh.size(1)
    for parameter_name, parameter in expert_parameters(experts).items():
        if parameter.shape[0] % parts:
            raise ValueError(
                f"the {parameter.shape[0]} experts of {name} cannot be dealt to {parts} processes in equal numbers; "
                f"choose an expert_parallel_size that divides {parameter.shape[0]}"
            )
        if copies > 1 and (parameter.ndim < 2 or parameter.shape[1] % copies):
            raise ValueError(
                f"{copies} processes hold the same experts of {name} and split them along the second dimension, but "
                f"{parameter_name} has shape {tuple(parameter.shape)}; choose an expert_parallel_size so that "
                "processes / expert_parallel_size divides that dimension"
            )
    distribute_experts(experts, mesh[mesh.mesh_dim_names[1]])  # type: ignore[index]
    if copies > 1:
        options = {"mesh": mesh[mesh.mesh_dim_names[0]], "shard_placement_fn": lambda parameter: Shard(1)}  # type: ignore[index]
        sharding.apply(experts, sharding.dtype, **options)
    else:
        sharding.ignored.update(expert_parameters(experts).values())


def _move_unsharded(module: nn.Module, sharding: Sharding) -> None:
    """Move what FSDP does not: experts without replicas, and buffers and metrics if parameters are kept on the CPU."""
    device_type = sharding.mesh.device_type
    if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        device = torch.device("cpu" if sharding.cpu_offload else device_type)
        with torch.random.fork_rng():
            part = (sharding.mesh.get_coordinate() or [0])[-1]  # replicas of the model must draw the same
            torch.manual_seed(torch.initial_seed() + part)  # otherwise all shards of a weight would be equal
            initialize_meta_weights(module, device)
        broadcast_state(module, torch.device(device_type))  # unsharded tensors must be equal everywhere
    if not sharding.cpu_offload:
        module.to(device_type)
        return
    for submodule in module.modules():
        if isinstance(submodule, Metric):
            submodule.to(device_type)
        for name, buffer in submodule.named_buffers(recurse=False):
            setattr(submodule, name, buffer.to(device_type))


@torch.no_grad()
def initialize_meta_weights(module: nn.Module, device: torch.device) -> None:
    """Allocate the submodules that were created on the meta device, and initialize their weights.

    Raises:
        TypeError: if one of them has no ``reset_parameters()``.
    """
    for name, submodule in module.named_modules():
        own = [*submodule.parameters(recurse=False), *submodule.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        submodule.to_empty(device=device, recurse=False)
        if not callable(reset := getattr(submodule, "reset_parameters", None)):
            raise TypeError(
                f"{name or type(submodule).__name__} was made on the meta device, but has no reset_parameters() that "
                "draws its weights; give it one, or make it on the CPU"
            )
        reset()


def recompute_activations(blocks: Sequence[nn.Module]) -> None:
    """Keep only the input of each block, and recompute the rest in the backward pass.

    Blocks of transformers that get a cache of keys and values, as decoders do by default, get none where gradients are
    computed: a second pass would append to it.
    """
    for block in blocks:
        # not by a wrapper module, which would change the names of parameters
        block.forward = partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _is_cache(value: object) -> bool:
    return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers") for kind in type(value).__mro__)


@torch.no_grad()
def broadcast_state(module: nn.Module, device: torch.device) -> None:
    """Copy the parameters and buffers of the first process to all others, except sharded ones."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta and not isinstance(tensor, DTensor):
            broadcast_(tensor, device)


@torch.no_grad()
def broadcast_(tensor: Tensor, device: torch.device) -> None:
    """Copy ``tensor`` of the first process to all others, by way of ``device``, on which processes communicate."""
    data = tensor.detach().to(device).contiguous()
    dist.broadcast(data, src=0)
    tensor.copy_(data)


def batch_norm_statistics(module: nn.Module) -> list[Tensor]:
    """Return the running statistics that differ between processes unless they are synchronized."""
    return [buffer for one in module.modules() if isinstance(one, NormBase) for buffer in one.buffers(recurse=False)]
