"""Weight matrices split over devices, by a plan of ``torch.distributed.tensor.parallel`` that a model declares."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_accel.strategies.sharding import broadcast_state


def tensor_parallel_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The dimension ``tensor_parallel`` of what Lightning's ``ModelParallelStrategy`` gives a module.

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


def split_(module: nn.Module, plan: dict[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Split the weights in ``plan``; the others become those of the first process on all, and stay plain tensors."""
    parallelize_module(module, mesh, plan)
    broadcast_state(module, torch.device(mesh.device_type))
