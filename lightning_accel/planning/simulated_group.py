"""A process group of one process that stands for many, whose collectives are recorded."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_accel._private.torch import finished_work, name_of_group
from lightning_accel.planning.simulated_peers import Peers

_BACKEND = "simulated"


# What the innermost world records with, and its other processes, are the last. Groups do not hold them: torch keeps
# meshes, and so their groups, in caches that outlive the world, and with them would keep the run.
_Record = Callable[[str, int, tuple[int, ...], list[Tensor]], None]
_worlds: list[tuple[_Record, Peers]] = []

_Group: Any = dist.ProcessGroup  # whose stubs overload each method


class SimulatedGroup(_Group):  # type: ignore[misc]
    """Answer collectives as if all other processes held what this one holds, and touch no float.

    Args:
        rank: of this process in the group.
        size: number of processes.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, ""
        self._ranks: tuple[int, ...] = ()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return _BACKEND

    @property
    def group_name(self) -> str:
        self._name = name_of_group(self) or self._name  # it has none while it is made, and no longer when it ends
        return self._name

    pg_name = group_name

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the processes of the group by their ranks among all."""
        self._ranks = self._ranks or tuple(dist.get_process_group_ranks(self))
        return self._ranks

    def _done(self, name: str, whole: list[Tensor], result: Any, part: list[Tensor] | None = None) -> Any:
        record, _ = _worlds[-1]
        record(name, sum(one.numel() * one.element_size() for one in whole), self.ranks, [*whole, *(part or [])])
        return _finished(result)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        return self._pass_on("send", tensors, to)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        return self._pass_on("receive", tensors, source)

    def _pass_on(self, name: str, tensors: list[Tensor], other: int) -> Any:
        record, peers = _worlds[-1]
        me, peer = self.ranks[self._rank], self.ranks[other]
        for tensor in tensors:
            (peers.send if name == "send" else peers.receive)(tensor, peer)
            ranks = (me, peer) if name == "send" else (peer, me)
            record(name, tensor.numel() * tensor.element_size(), ranks, [tensor])
        return _finished(tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            if not tensor.is_floating_point() and opts is not None:
                self._reduce_integers(tensor, opts.reduceOp)
        return self._done("all_reduce", tensors, tensors)

    allreduce_coalesced = allreduce

    def _reduce_integers(self, tensor: Tensor, operation: Any) -> None:
        _, peers = _worlds[-1]
        number = peers.say("reduce", self.ranks, tensor.clone())
        known = [rank for rank in self.ranks[: peers.count] if rank < peers.count and rank != peers.rank]
        others = [peers.said_by(rank, "reduce", self.ranks, number, tensor) for rank in known]
        if operation == dist.ReduceOp.SUM:
            tensor.copy_(sum(others, tensor * (self._size - len(others))))
        elif operation == dist.ReduceOp.MAX:
            for one in others:
                tensor.copy_(torch.maximum(tensor, one))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._done("broadcast", tensors, tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self._done("barrier", [], [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier()

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._done("reduce", tensors, tensors)

    def all_gather_single(self, output: Tensor, part: Tensor, opts: Any = None) -> Any:
        with torch.no_grad():
            output.detach().view(self._size, -1).copy_(part.detach().reshape(1, -1))
        return self._done("all_gather", [output], output, [part])

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[list[Tensor]], parts: list[Tensor], opts: Any = None) -> Any:
        with torch.no_grad():
            for gathered, part in zip(outputs, parts, strict=True):
                for one in gathered:
                    if one.shape == part.shape:
                        one.detach().copy_(part.detach())
        return self._done("all_gather", [one for gathered in outputs for one in gathered], outputs, parts)

    def gather(self, outputs: list[list[Tensor]], parts: list[Tensor], opts: Any = None) -> Any:
        return self.allgather(outputs, parts) if outputs else self._done("all_gather", parts, outputs)

    def scatter(self, outputs: list[Tensor], wholes: list[list[Tensor]], opts: Any = None) -> Any:
        for output, whole in zip(outputs, wholes, strict=False):  # none where another process has it
            with torch.no_grad():
                output.detach().copy_(whole[self._rank])
        return self._done("scatter", [one for whole in wholes for one in whole] or outputs, outputs)

    def all_gather_single_coalesced(self, outputs: list[Tensor], parts: list[Tensor], opts: Any = None) -> Any:
        for output, part in zip(outputs, parts, strict=True):
            work = self.all_gather_single(output, part)
        return work

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        return self._done("reduce_scatter", [whole], output, [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: list[Tensor], wholes: list[list[Tensor]], opts: Any = None) -> Any:
        return self._done("reduce_scatter", [one for whole in wholes for one in whole], outputs, outputs)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], wholes: list[Tensor], opts: Any = None) -> Any:
        for output, whole in zip(outputs, wholes, strict=True):
            work = self.reduce_scatter_single(output, whole)
        return work

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall_base(self, output: Tensor, sent: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None) -> Any:
        parts = sent.detach().split(in_sizes) if in_sizes else sent.detach().chunk(self._size)
        mine = parts[self._rank]
        with torch.no_grad():
            if len(mine) * self._size == len(output):
                output.detach().view(self._size, *mine.shape).copy_(mine)
        return self._done("all_to_all", [sent], output, [output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[Tensor], sent: list[Tensor], opts: Any = None) -> Any:
        with torch.no_grad():
            for one in outputs:
                if one.shape == sent[self._rank].shape:
                    one.detach().copy_(sent[self._rank].detach())
        return self._done("all_to_all", sent, outputs, outputs)


def _finished(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return finished_work(future)


def _create(store: Any, rank: int, size: int, timeout: Any) -> SimulatedGroup:
    return SimulatedGroup(rank, size)


@contextmanager
def simulated_world(size: int, record: _Record, peers: Peers | None = None) -> Iterator[None]:
    """Make this process one of ``size`` processes, of which the others do not exist.

    Args:
        size: number of processes.
        record: called with the name of each collective, the bytes of its whole tensor, the ranks of its group (of the
            sender and the receiver for messages) and its tensors.
        peers: which of them it is, and what others have said; by default the first.

    Raises:
        RuntimeError: if this process is in a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already; plan in a process of its own")

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **{**kwargs, "backend": _BACKEND})  # one of gloo would wait for the others

    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _create, devices=["cpu"])
    make_group, excepthook = dist.new_group, sys.excepthook
    peers = peers or Peers()
    _worlds.append((record, peers))
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(_BACKEND, store=store, rank=peers.rank, world_size=size)
    dist.new_group = new_group
    try:
        with _objects_of(peers):
            yield
    finally:
        dist.new_group, sys.excepthook = make_group, excepthook  # torch's own names a rank in each line
        dist.destroy_process_group()
        _worlds.pop()


@contextmanager
def _objects_of(peers: Peers) -> Iterator[None]:
    """Answer gathers and broadcasts of objects with those of the processes that are simulated, too."""
    gather, broadcast = dist.all_gather_object, dist.broadcast_object_list

    def all_gather_object(objects: list[Any], value: Any, group: Any = None) -> None:
        if peers.count == 1:
            gather(objects, value, group)
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        number = peers.say("gather", ranks, value)
        objects[:] = [peers.said_by(rank, "gather", ranks, number, value) for rank in ranks]

    def broadcast_object_list(objects: list[Any], src: int | None = None, group: Any = None, **kwargs: Any) -> None:
        if peers.count == 1:
            broadcast(objects, src, group, **kwargs)
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        number = peers.say("broadcast", ranks, list(objects))
        source = src if src is not None else ranks[kwargs.get("group_src") or 0]
        if source < peers.count:
            objects[:] = peers.said_by(source, "broadcast", ranks, number)

    with (
        patch.object(dist, "all_gather_object", all_gather_object),
        patch.object(dist, "broadcast_object_list", broadcast_object_list),
    ):
        yield
