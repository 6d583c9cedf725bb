"""Tensor parallelism by plans of ``torch.distributed.tensor.parallel`` that models declare."""

import lightning as L
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_accel.strategies.sharding.blocks import broadcast_state


def tensor_parallel_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the dimension ``tensor_parallel`` of the mesh that Lightning's ``ModelParallelStrategy`` sets.

    Raises:
        ValueError: if there is data parallelism, too: gradients would not be averaged over it.
    """
    if mesh is None or mesh.size() == 1:
        return None
    if mesh.size() > mesh["tensor_parallel"].size():
        raise ValueError(
            f"under ModelParallelStrategy with data_parallel_size={mesh['data_parallel'].size()} nothing would average "
            "the gradients of this model. Set data_parallel_size=1, or take the strategy 'accel_fsdp2'"
        )
    return mesh["tensor_parallel"]


def reject_tensor_parallelism(module: L.LightningModule, alternative: str = "") -> None:
    """Reject tensor parallelism in ``configure_model`` of a model without a plan; suggest ``alternative``, if given.

    Raises:
        ValueError: if Lightning's ``ModelParallelStrategy``, the only one that sets a mesh, has several devices.
    """
    if module.device_mesh is not None and module.device_mesh.size() > 1:
        raise ValueError(
            f"{type(module).__name__} has no plan for tensor parallelism; take the strategy 'accel_fsdp2', which "
            f"splits its weights over processes{alternative and f', or {alternative}'}"
        )


def shard_weights_(module: nn.Module, plan: dict[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Shard the weights in ``plan``; copy the others from the first process, where they stay plain tensors."""
    parallelize_module(module, mesh, plan)
    broadcast_state(module, torch.device(mesh.device_type))
