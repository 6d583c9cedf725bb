"""Memory for the variants of a run: which of them fit into it, alone and beside each other."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_accel.measure.table import in_bytes
from lightning_accel.planning.program import CONTEXT, RESERVED
from lightning_accel.tuning.project import Changes


class Room:
    """Tell which variants fit into the memory of a machine, or of its GPUs.

    A variant needs what the run as it is has needed, and what larger batches, or whole parameters in place of shards,
    take beyond that by plans of a step with and without them.

    Args:
        free: bytes for all processes of all variants.
        held: bytes that the run as it is needs in all its processes.
        world_size: number of these.
        plan: returns the bytes that a step needs with changes, in all processes; None if that is not known.
    """

    def __init__(self, free: int, held: int, world_size: int, plan: Callable[[Changes], int | None]) -> None:
        self.free = free
        self.held = held
        self._world_size = world_size
        self._plan = plan

    def needed(self, changes: Changes) -> int:
        """Return the bytes that a variant needs."""
        growing = _growing(changes)
        if growing == Changes():
            return self.held
        before, after = self._plan(Changes()), self._plan(growing)
        return self.held if before is None or after is None else self.held + after - before

    def why_not(self, changes: Changes) -> str:
        """Return why a variant does not fit, or nothing if it does, or is no larger than the run as it is."""
        if self._most(changes) <= self.free or (needed := self.needed(changes)) <= max(self.free, self.held):
            return ""
        return f"by the plan of its step it needs {in_bytes(needed)} of memory, and {in_bytes(self.free)} are free"

    def is_enough_for(self, variants: Iterable[Changes]) -> bool:
        """Return whether variants fit beside each other."""
        together = list(variants)
        return sum(map(self._most, together)) <= self.free or sum(map(self.needed, together)) <= self.free

    def _most(self, changes: Changes) -> int:
        """Return the bytes that a variant can need at most: those of so many batches, or of so many shards."""
        growing = _growing(changes)
        times = int(growing.batching.get("batch_size_factor", 1)) * (self._world_size if growing.trainer else 1)
        return self.held * times


def room_of(facts: Mapping[str, Any], peak: int, free: int | None) -> dict[str, int] | None:
    """Return the bytes that were free before the run as it is began, and what it has needed; None if unknown.

    Args:
        facts: see :func:`lightning_accel.tuning.recorder.facts_of`.
        peak: the memory that training has needed in all processes, see :class:`lightning_accel.measure.PeakMemory`.
        free: bytes of the host's memory that were free.
    """
    world_size = facts["world_size"]
    if facts["device"] == "cuda":
        per_device = facts.get("free_device_bytes")
        free = None if per_device is None else per_device * world_size
        held = round(peak * RESERVED) + CONTEXT * world_size
    else:
        held = peak + facts.get("resident_bytes", 0) * world_size
    return None if free is None else {"free": free, "held": held}


def _growing(changes: Changes) -> Changes:
    """Return those of the changes with which a step may need much more memory."""
    batching = {name: value for name, value in changes.batching.items() if name == "batch_size_factor"}
    trainer = {name: value for name, value in changes.trainer.items() if (name, value) == ("strategy", "ddp")}
    return Changes(trainer=trainer, batching=batching)
