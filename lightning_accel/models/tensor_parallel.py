"""Weight matrices split over devices, by a plan of ``torch.distributed.tensor.parallel`` that a model declares."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module


def tensor_parallel_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The dimension ``tensor_parallel`` of what ``ModelParallelStrategy`` gives a module, if it has several devices.

    Raises:
        ValueError: if there is data parallelism, too: gradients would not be averaged over it.
    """
    if mesh is None or "tensor_parallel" not in (mesh.mesh_dim_names or ()) or mesh["tensor_parallel"].size() == 1:
        return None
    if mesh.size() > mesh["tensor_parallel"].size():
        raise ValueError(
            "this model splits its weights over tensor_parallel_size devices, but does not average gradients over "
            f"data_parallel_size={mesh.size() // mesh['tensor_parallel'].size()}. Set data_parallel_size=1 in "
            "ModelParallelStrategy"
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


def clip_by_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, which refuses split and plain tensors together; the norm that was, ()."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    kinds = [[one for one in grads if isinstance(one, DTensor) is split] for split in (True, False)]
    norms = [torch.nn.utils.get_total_norm(kind) for kind in kinds if kind]
    total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(scale.to(grad.dtype))
    return total
