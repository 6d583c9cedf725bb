"""Measured rates of a machine: matrix products, memory, copies to a GPU, collectives and disk reads.

Each is the best of several repeats of a fixed time, since what disturbs a measurement makes it slower only.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_accel._private.torch import multiply_by_onednn, multiply_int8, onednn_multiplies_float32
from lightning_accel.measure.machine import last_cache_bytes

BY_ONEDNN = "fp32 by oneDNN"  # in place of MKL
_SIZES = (512, 1024, 2048, 4096, 8192)
_MIN_BYTES = 64 * 2**20  # of a buffer that no cache holds, where the cache's size is unknown
_MAX_BYTES = 512 * 2**20
_COPY_BYTES = 64 * 2**20
_REDUCED_BYTES = 16 * 2**20  # about a bucket of DDP's
_DISK_BYTES = 128 * 2**20
_BLOCK_BYTES = 4 * 2**20
_START_S = 60.0  # bounds how long processes may take to start

# Run in processes of their own, which need no more than torch
_COLLECTIVE = """
import sys, time
import torch
import torch.distributed as dist
rank, size, store, backend, seconds, count = sys.argv[1:]
rank, size, seconds, count = int(rank), int(size), float(seconds), int(count)
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
torch.set_num_threads(1)
dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=size)
def best(value):
    def call():
        dist.all_reduce(value)
        if backend == "nccl":
            torch.cuda.synchronize(device)
    call()
    found = float("inf")
    start = time.perf_counter()
    more = torch.ones(1, device=device)
    while more.item():
        for _ in range(4):
            begin = time.perf_counter()
            call()
            found = min(found, time.perf_counter() - begin)
        more = torch.tensor([float(rank == 0 and time.perf_counter() - start < seconds)], device=device)
        dist.all_reduce(more)
    return found
large, small = best(torch.zeros(count // 4, device=device)), best(torch.zeros(1, device=device))
if rank == 0:
    print(large, small)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Collective:
    """Hold what an all-reduce between processes takes: bytes of the tensor a second, and the shortest time in s."""

    backend: str
    processes: int
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Rates:
    """Hold the measured rates of a machine; what was not measured is None, and ``failed`` says why.

    Attributes:
        device: the device of the matrix products.
        threads: threads that the products on a CPU used.
        matmul: floating-point (or integer) operations per second by precision: fp64, fp32, tf32, bf16, fp16, int8; on
            a CPU where torch calls MKL, fp32 by oneDNN, too.
        memory_bytes_per_s: bytes read and written by a copy larger than the last cache.
        pinned_bytes_per_s: host to device, from pinned memory.
        pageable_bytes_per_s: host to device, from pageable memory.
        collective: of as many processes as there are GPUs, or of two on CPUs.
        disk_bytes_per_s: of a file that the page cache does not hold.
        failed: reasons by what could not be measured.
    """

    device: str
    threads: int
    matmul: dict[str, float]
    memory_bytes_per_s: float
    pinned_bytes_per_s: float | None
    pageable_bytes_per_s: float | None
    collective: Collective | None
    disk_bytes_per_s: float | None
    failed: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return all rates as values that JSON can hold."""
        return asdict(self)


def measure_rates(
    folder: Path | str = ".", *, seconds: float = 0.1, repeats: int = 3, device: torch.device | None = None
) -> Rates:
    """Measure what the machine can do, on all threads of this process.

    Args:
        folder: folder on the disk to measure; a file of 128 MiB is written there for a moment.
        seconds: measurement time of each repeat.
        repeats: how often each rate is measured; the best counts.
        device: device of the matrix products and of memory; by default the first GPU, or the CPU without one.

    Raises:
        ValueError: if ``seconds`` or ``repeats`` is not positive.
    """
    if seconds <= 0 or repeats < 1:
        raise ValueError(f"seconds must be positive and repeats at least 1; got {seconds} and {repeats}")
    if device is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    failed: dict[str, str] = {}

    def tried(name: str, measure: Callable[[], Any]) -> Any:
        try:
            return measure()
        except (RuntimeError, OSError, NotImplementedError, subprocess.SubprocessError) as error:
            failed[name] = (str(error) or type(error).__name__).splitlines()[0]
            return None

    timing = (seconds, repeats)
    names = ["fp64", "fp32", "bf16", "fp16", "int8"]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        names.insert(2, "tf32")
    if device.type == "cpu" and torch.backends.mkl.is_available() and onednn_multiplies_float32():
        names.insert(2, BY_ONEDNN)
    products = {name: tried(name, partial(matmul_rate, name, device, *timing)) for name in names}
    on_gpu = device.type == "cuda"
    return Rates(
        device=str(device),
        threads=torch.get_num_threads(),
        matmul={name: rate for name, rate in products.items() if rate is not None},
        memory_bytes_per_s=_memory_rate(device, *timing),
        pinned_bytes_per_s=tried("pinned", partial(_host_rate, True, device, *timing)) if on_gpu else None,
        pageable_bytes_per_s=tried("pageable", partial(_host_rate, False, device, *timing)) if on_gpu else None,
        collective=tried("collective", partial(measure_collective, *timing)),
        disk_bytes_per_s=tried("disk", partial(disk_rate, Path(folder), *timing)),
        failed=failed,
    )


def matmul_rate(precision: str, device: torch.device, seconds: float, repeats: int) -> float:
    """Return the operations per second (2 n³ for each product of n x n matrices) that a precision reaches.

    The matrices are the largest of which a product takes no more than a quarter of ``seconds``.

    Args:
        precision: fp64, fp32, fp32 by oneDNN, tf32, bf16, fp16 or int8.
        device: where to multiply.
        seconds: measurement time of each repeat.
        repeats: how often to measure; the best counts.

    Raises:
        RuntimeError: if the device cannot multiply in this precision.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        for larger in (*_SIZES[1:], 0):
            size = larger // 2 or _SIZES[-1]
            call = _product(precision, size, device)
            call()
            _synchronize(device)
            once = _best_time(call, 0.0, 2, device)
            if 8 * once > seconds / 4:
                break
        return 2 * size**3 / _best_time(call, seconds, repeats, device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _product(precision: str, size: int, device: torch.device) -> Callable[[], object]:
    if precision == "int8":
        a = torch.ones(size, size, dtype=torch.int8, device=device)
        return lambda: multiply_int8(a, a)
    dtypes = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
    a = torch.rand(size, size, device=device).to(dtypes.get(precision, torch.float32))
    if precision == BY_ONEDNN:
        return lambda: multiply_by_onednn(a, a)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def _memory_rate(device: torch.device, seconds: float, repeats: int) -> float:
    size = _MAX_BYTES if device.type == "cuda" else min(max(_MIN_BYTES, 4 * last_cache_bytes()), _MAX_BYTES)
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)  # zeros, whose pages are there
    return 2 * size / _best_time(lambda: target.copy_(source), seconds, repeats, device)


def _host_rate(pinned: bool, device: torch.device, seconds: float, repeats: int) -> float:
    source = torch.ones(_COPY_BYTES // 4, pin_memory=pinned)
    target = torch.empty_like(source, device=device)
    return _COPY_BYTES / _best_time(lambda: target.copy_(source, non_blocking=pinned), seconds, repeats, device)


def _best_time(call: Callable[[], object], seconds: float, repeats: int, device: torch.device) -> float:
    """Return the least time of a call in seconds, within ``repeats`` runs of ``seconds``, of one call at least."""
    best = float("inf")
    for _ in range(repeats):
        end = start = time.perf_counter()
        while end == start or end - start < seconds:
            begin = time.perf_counter()
            call()
            _synchronize(device)
            end = time.perf_counter()
            best = min(best, end - begin)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_collective(seconds: float, repeats: int) -> Collective:
    """Measure all-reduces of 16 MiB and of one number between new processes: one for each GPU, or two on CPUs.

    Raises:
        RuntimeError: if a process fails, with the last line that it wrote.
        subprocess.TimeoutExpired: if they do not end in time.
    """
    gpus = torch.cuda.device_count()
    backend, count = ("nccl", gpus) if gpus > 1 else ("gloo", 2)
    with tempfile.TemporaryDirectory() as folder:
        rest = [str(count), f"{folder}/store", backend, str(seconds * repeats), str(_REDUCED_BYTES)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _COLLECTIVE, str(rank), *rest],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        try:
            deadline = time.monotonic() + _START_S + 2 * seconds * repeats
            said = [process.communicate(timeout=max(0.1, deadline - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError(next(iter(errors.strip().splitlines()[-1:]), f"ended with {process.returncode}"))
    large, small = map(float, said[0][0].split())
    return Collective(backend, count, _REDUCED_BYTES / large, small)


def disk_rate(folder: Path, seconds: float, repeats: int) -> float:
    """Return the bytes per second that reading a file in ``folder`` from its disk reaches, past the page cache.

    The cache of a virtual machine's host, or of a drive, may still hold it.

    Raises:
        OSError: if the file cannot be written there, or the system cannot empty its page cache.
    """
    if not hasattr(os, "posix_fadvise"):
        raise OSError("this system has no posix_fadvise to drop a file from its page cache")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".rate-") as file:
        block = os.urandom(_BLOCK_BYTES)  # which a file system that compresses cannot
        for _ in range(_DISK_BYTES // _BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return max(_read_rate(file.fileno(), seconds) for _ in range(repeats))


def _read_rate(descriptor: int, seconds: float) -> float:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    buffer = bytearray(_BLOCK_BYTES)
    count = 0
    begin = time.perf_counter()
    while (read := os.readv(descriptor, [buffer])) and time.perf_counter() - begin < seconds:
        count += read
    return (count + read) / (time.perf_counter() - begin)
