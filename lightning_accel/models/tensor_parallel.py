"""Weight matrices split over devices, by a plan of ``torch.distributed.tensor.parallel`` that a model declares."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module


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
    group = mesh.get_group()
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if not isinstance(tensor, DTensor) and not tensor.is_meta:
                sent = tensor.detach().to(mesh.device_type)
                dist.broadcast(sent, src=dist.get_global_rank(group, 0), group=group)
                tensor.copy_(sent)
