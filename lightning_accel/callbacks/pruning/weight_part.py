"""Access to the shard of a weight on this process, under any strategy, and to the whole weight."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard


class WeightPart:
    """Represent the part of a weight on this process: all of it, a shard, or nothing (in a pipeline).

    Args:
        name: name of the weight.
        weight: the weight as the strategy shards it; on the meta device if another process holds it.
        input_dim: input dimension of the weight.
        module: the module that holds it.

    Raises:
        TypeError: if it is sharded in another way than into blocks along dimensions.
    """

    def __init__(self, name: str, weight: nn.Parameter, input_dim: int, module: nn.Module) -> None:
        self.name = name
        self.weight = weight
        self.input_dim = input_dim
        self.module = module
        self.shape = tuple(weight.shape)
        self.numel = weight.numel()
        self.is_held = not weight.is_meta
        self.counts = self.is_held  # among processes that hold the same values, only one counts them
        self.offsets = [0] * weight.ndim
        self.is_sharded = isinstance(weight, DTensor) and any(isinstance(one, Shard) for one in weight.placements)
        if isinstance(weight, DTensor):
            self._find_place(weight)

    def _find_place(self, weight: DTensor) -> None:
        coordinate = weight.device_mesh.get_coordinate()
        if coordinate is None or any(type(one) not in (Shard, Replicate) for one in weight.placements):
            raise TypeError(
                f"{self.name} is split as {weight.placements}, by FSDP and tensor parallelism at once. Pruning takes "
                "one of them: 'accel_fsdp2', or ModelParallelStrategy(data_parallel_size=1)"
            )
        lengths = list(self.shape)
        for at, size, placement in zip(coordinate, weight.device_mesh.shape, weight.placements, strict=True):
            if isinstance(placement, Shard):
                chunk = -(-lengths[placement.dim] // size)  # as torch.chunk
                begin = min(at * chunk, lengths[placement.dim])
                self.offsets[placement.dim] += begin
                lengths[placement.dim] = min(chunk, lengths[placement.dim] - begin)
            elif at:
                self.counts = False
        assert tuple(lengths) == tuple(weight.to_local().shape), (self.name, lengths, weight.to_local().shape)

    @property
    def is_sharded_along_input(self) -> bool:
        """Return whether the inputs of a unit are sharded over processes."""
        return isinstance(self.weight, DTensor) and any(
            isinstance(one, Shard) and one.dim % len(self.shape) == self.input_dim for one in self.weight.placements
        )

    @property
    def value(self) -> Tensor:
        """Return the local shard, sharing memory with the weight."""
        return local(self.weight.detach())

    def gradient(self) -> Tensor | None:
        """Return the local shard of the gradient, sharing memory with it."""
        gradient: Any = self.weight.grad
        if gradient is None:
            return None
        if isinstance(gradient, DTensor) and isinstance(self.weight, DTensor):
            if gradient.placements != self.weight.placements:  # autograd may choose other ones
                self.weight.grad = gradient = gradient.redistribute(placements=self.weight.placements)
            return gradient.to_local()
        return gradient

    def to_whole(self, positions: Tensor) -> Tensor:
        """Convert flat positions in the local shard to those in the whole weight."""
        shape = self.value.shape
        if tuple(shape) == self.shape:
            return positions
        result = torch.zeros_like(positions)
        stride = 1
        for dim in range(len(shape) - 1, -1, -1):
            result += (positions % shape[dim] + self.offsets[dim]) * stride
            positions = positions // shape[dim]
            stride *= self.shape[dim]
        return result

    def shard(self, whole: Tensor) -> Tensor:
        """Return the local shard of ``whole``."""
        value = self.value
        for dim, (offset, length) in enumerate(zip(self.offsets, value.shape, strict=True)):
            whole = whole.narrow(dim, offset, length)
        return whole.to(value.device).contiguous()

    def gather(self, part: Tensor | None, holder: int | None, device: torch.device) -> Tensor:
        """Gather the whole tensor of which ``part`` is the local shard, on the CPU; all processes must call it.

        ``holder`` is the process to broadcast from if some processes hold nothing.
        """
        if isinstance(self.weight, DTensor) and part is not None:
            layout: dict[str, Any] = {"shape": self.weight.shape, "stride": _strides(self.shape), "run_check": False}
            return DTensor.from_local(
                part.contiguous(), self.weight.device_mesh, self.weight.placements, **layout
            ).full_tensor().cpu()  # fmt: skip
        if holder is None:
            assert part is not None
            return part.cpu()
        kinds = [None if part is None else part.dtype]
        dist.broadcast_object_list(kinds, src=holder)
        sent = torch.empty(self.shape, dtype=kinds[0], device=device) if part is None else part.contiguous().to(device)
        dist.broadcast(sent, src=holder)
        return sent.cpu()


def local(value: Tensor) -> Tensor:
    """Return the local shard of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def find_holders(parts: Sequence[WeightPart], device: torch.device) -> list[int]:
    """Find the first process that holds each of ``parts``, and let only that one count them; all must call it."""
    rank = dist.get_rank()
    firsts = torch.tensor([rank if part.is_held else dist.get_world_size() for part in parts], device=device)
    dist.all_reduce(firsts, dist.ReduceOp.MIN)
    holders: list[int] = firsts.tolist()
    for part, holder in zip(parts, holders, strict=True):
        if not isinstance(part.weight, DTensor):
            part.counts = part.is_held and rank == holder
    return holders


def num_processes(trainer: L.Trainer) -> int:
    return trainer.world_size if dist.is_available() and dist.is_initialized() else 1


def pack_bits(mask: Tensor) -> Tensor:
    """Pack eight elements of a bool tensor into each byte.

    >>> pack_bits(torch.tensor([True, False, True]))
    tensor([5], dtype=torch.uint8)
    """
    flat = mask.flatten().to(torch.uint8)
    flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)]).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=flat.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Restore the bool tensor of ``shape`` that :func:`pack_bits` packed.

    >>> unpack_bits(torch.tensor([5], dtype=torch.uint8), (3,))
    tensor([ True, False,  True])
    """
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten()[: torch.Size(shape).numel()].bool().view(*shape)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
