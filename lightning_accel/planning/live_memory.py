"""Bytes of the storages that are alive, by what they are for, and the most that there were at once."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_accel._private.torch import storage_id

HOST = "host"  # kind of what is not in the memory of the device


@dataclass
class _Block:
    reference: Any
    size: int
    kind: str
    simulated: bool
    born: int


class LiveMemory:
    """Count the bytes of storages by kind, and remember the moment when there were most.

    Args:
        counts_host: whether those of kind ``HOST`` count for the peak, as they do where the device is the CPU.

    Attributes:
        kind: kind of storages that are added from now on.
        bytes: bytes that are alive, by kind.
        peak: the most bytes that were alive at once since the last :meth:`reset_peak`.
        at_peak: these bytes, by kind.
        phase: name of what the run does now, set by whoever runs it.
        phase_of_peak: what ``phase`` was at the peak.
    """

    def __init__(self, counts_host: bool = True) -> None:
        self._counts_host = counts_host
        self.kind = "other"
        self.phase = ""
        self.bytes: Counter[str] = Counter()
        self._blocks: dict[int, _Block] = {}
        self._clock = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        self._total = self.peak = sum(size for kind, size in self.bytes.items() if self._counts(kind))
        self._remember_peak()

    def _counts(self, kind: str) -> bool:
        return self._counts_host or kind != HOST

    def _remember_peak(self) -> None:
        self.at_peak = Counter({kind: size for kind, size in self.bytes.items() if self._counts(kind)})
        self.phase_of_peak, self._peak_clock = self.phase, self._clock

    def kind_of(self, storage: torch.UntypedStorage) -> str | None:
        """Return what a storage is counted as, None if it is unknown."""
        block = self._blocks.get(storage_id(storage))
        return None if block is None else block.kind

    def is_simulated(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the values in a storage mean nothing."""
        block = self._blocks.get(storage_id(storage))
        return block is not None and block.simulated

    def add(self, storage: torch.UntypedStorage, simulated: bool = False, kind: str | None = None) -> None:
        """Count a storage that is new, or whose size has changed.

        Args:
            storage: any; while it lives it is counted once.
            simulated: whether its values mean nothing from now on.
            kind: what it is counted as, also if it was something else before; by default, if it is new,
                :attr:`kind`.
        """
        key, size = storage_id(storage), storage.nbytes()
        block = self._blocks.get(key)
        if block is None:
            reference = weakref.ref(storage, lambda _, key=key: self._remove(key))  # type: ignore[misc]
            self._blocks[key] = block = _Block(reference, 0, kind or self.kind, simulated, self._clock)
        block.simulated |= simulated
        if kind is not None and kind != block.kind and self._counts(kind) != self._counts(block.kind):
            self._change(block.kind, -block.size)
            self._change(kind, block.size)
            block.kind = kind
        elif kind is not None and kind != block.kind:
            self.bytes[block.kind] -= block.size
            self.bytes[kind] += block.size
            if block.born < self._peak_clock:
                self.at_peak[block.kind] -= block.size
                self.at_peak[kind] += block.size
            block.kind = kind
        if size != block.size:
            self._change(block.kind, size - block.size)
            block.size = size

    def _remove(self, key: int) -> None:
        block = self._blocks.pop(key)
        self._change(block.kind, -block.size)

    def _change(self, kind: str, size: int) -> None:
        self._clock += 1
        self.bytes[kind] += size
        if self._counts(kind):
            self._total += size
        if self._total > self.peak:
            self.peak = self._total
            self._remember_peak()

    @contextmanager
    def seeing_resizes(self) -> Iterator[None]:
        """Count what storages gain and lose by ``resize_``, by which FSDP frees weights."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage_id(storage) in self._blocks:
                self.add(storage)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
