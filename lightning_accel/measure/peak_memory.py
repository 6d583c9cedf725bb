"""Memory that a process has needed at most since some moment."""

import ctypes
import gc
import os
import platform
import resource
import sys
from pathlib import Path

import torch


class PeakMemory:
    """Measure the most memory that this process needs from now on, above what it holds now.

    Without a GPU that is the rise of the peak of resident memory, to which the memory is added that its children, such
    as loaders' workers, hold alone when it is read. What is there already, such as imported libraries, the weights,
    data in memory and other children, is left out. On CUDA it is the peak of what tensors take, weights included.

    Args:
        device: where the run computes.

    Attributes:
        begin: resident bytes now; 0 on CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        self._others = set(_children())
        gc.collect()
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)  # freed memory that is used again would hide what the run needs
        if sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        self.begin = _resident_peak()

    def read(self) -> int:
        """Return that memory in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        children = sum(_private_bytes(child) for child in _children() if child not in self._others)
        return _resident_peak() - self.begin + children


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that this process has had so far: of tensors on a GPU, or of all its memory without one."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident_peak()


def resident_bytes(device: torch.device) -> int:
    """Return the bytes that this process holds now: of tensors on a GPU, or of all its memory without one.

    Where a system does not tell the latter, it is the most so far.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _kilobytes(Path("/proc/self/status"), "VmRSS:") * 1024 if sys.platform == "linux" else _resident_peak()


def _resident_peak() -> int:
    if sys.platform == "linux":  # ru_maxrss does not see that it was reset
        return _kilobytes(Path("/proc/self/status"), "VmHWM:") * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _children() -> list[int]:
    if sys.platform != "linux":
        return []
    found = [path.read_text().split() for path in Path(f"/proc/{os.getpid()}/task").glob("*/children")]
    return [int(child) for children in found for child in children]


def _private_bytes(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    try:
        return 1024 * (_kilobytes(rollup, "Private_Dirty:") + _kilobytes(rollup, "Private_Clean:"))
    except OSError:  # it has ended
        return 0


def _kilobytes(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name)), 0)
