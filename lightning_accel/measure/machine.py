"""Description of the machine that this process runs on: processor, memory, GPUs, limits and software.

On Linux it is read from ``/proc`` and ``/sys``; elsewhere what only Linux tells is unknown (``None``, 0 or empty).
"""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lightning_accel import __version__
from lightning_accel.ops.native import KERNELS

_ROOT = Path("/")
_NO_LIMIT = 2**60  # cgroups v1 writes "no limit" as the largest multiple of a page
# by the flag in /proc/cpuinfo, on x86 and on ARM
INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "VNNI",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "AVX512-BF16",
    "avx512_fp16": "AVX512-FP16",
    "amx_tile": "AMX",
    "amx_int8": "AMX-INT8",
    "amx_bf16": "AMX-BF16",
    "amx_fp16": "AMX-FP16",
    "asimd": "NEON",
    "asimdhp": "NEON-FP16",
    "bf16": "NEON-BF16",
    "i8mm": "I8MM",
    "sve": "SVE",
    "sve2": "SVE2",
}
_PACKAGES = ("lightning", "torchmetrics", "torchao", "triton", "numpy")


@dataclass(frozen=True)
class Gpu:
    """Describe a GPU; ``peers`` are the indices of the GPUs whose memory it reads directly."""

    name: str
    capability: str
    memory_bytes: int
    multiprocessors: int
    peers: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """Describe a machine as one process sees it; see :func:`describe_machine`."""

    cpu: str
    cores: float  # that this process may use at once: the least of its affinity and its cgroup's quota
    logical_cores: int
    physical_cores: int
    instruction_sets: tuple[str, ...]
    cache_bytes: int  # last level of the first core
    memory_bytes: int
    memory_limit_bytes: int | None  # of the cgroup
    shared_memory_bytes: int | None
    open_files: tuple[int, int] | None  # soft and hard limit; -1 is no limit
    gpus: tuple[Gpu, ...]
    blas: str
    threads: int
    interop_threads: int
    compiler: str | None
    kernels: dict[str, str]  # state of this package's own by type of device
    versions: dict[str, str]
    system: str

    @property
    def digest(self) -> str:
        """Return a name of the hardware: equal where measured speeds may be expected to be."""
        known = [self.cpu, self.cores, self.physical_cores, self.instruction_sets]
        known += [[gpu.name, gpu.capability, gpu.memory_bytes] for gpu in self.gpus]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and the digest as values that JSON can hold."""
        return {**asdict(self), "digest": self.digest}


def describe_machine() -> Machine:
    """Describe the machine that this process runs on; it takes less than a second and builds nothing."""
    cpu, logical, physical, flags = _read_processor(_ROOT)
    memory, limit = memory_bytes(_ROOT)
    return Machine(
        cpu=cpu,
        cores=usable_cores(_ROOT),
        logical_cores=logical,
        physical_cores=physical,
        instruction_sets=tuple(dict.fromkeys(name for flag, name in INSTRUCTION_SETS.items() if flag in flags)),
        cache_bytes=last_cache_bytes(_ROOT),
        memory_bytes=memory,
        memory_limit_bytes=limit,
        shared_memory_bytes=_size_of(_ROOT / "dev/shm"),
        open_files=_open_files(),
        gpus=_describe_gpus(),
        blas=_blas(),
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        compiler=_compiler(),
        kernels=_kernels(),
        versions={"python": platform.python_version(), **_installed_versions()},
        system=platform.platform(),
    )


def usable_cores(root: Path = _ROOT) -> float:
    """Return how many cores this process may use at once: the least of its affinity and the quotas of its cgroups.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    for text in _limits(root, "", "cpu.max"):  # version 2: "200000 100000" or "max 100000"
        quota, period = text.split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    quotas = [int(text) for text in _limits(root, "cpu", "cpu.cfs_quota_us")]
    periods = [int(text) for text in _limits(root, "cpu", "cpu.cfs_period_us")]
    return min([cores, *(quota / period for quota, period in zip(quotas, periods, strict=False) if quota > 0)])


def memory_bytes(root: Path = _ROOT) -> tuple[int, int | None]:
    """Return the machine's memory in bytes, and the least limit of this process's cgroups, None if there is none.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
    """
    found = re.search(r"MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"))
    if found:
        total = int(found[1]) * 1024
    else:
        known = hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else 0
    texts = [*_limits(root, "", "memory.max"), *_limits(root, "memory", "memory.limit_in_bytes")]
    limits = [int(text) for text in texts if text != "max" and int(text) < _NO_LIMIT]
    return total, min(limits, default=None)


def free_memory_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes of memory that processes like this one can still take, None where the system does not tell.

    Caches of files that the system gives up when memory runs out count as free, also within limits of cgroups.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
    """
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"))
    if not found:
        return None
    free = int(found[1]) * 1024
    second = ("", "memory.max", "memory.current", "")
    first = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    for controller, limit, usage, prefix in (second, first):
        texts = zip(*(_limits(root, controller, file) for file in (limit, usage, "memory.stat")), strict=False)
        for most, used, parts in texts:
            if most != "max" and int(most) < _NO_LIMIT:
                cached = re.search(rf"^{prefix}inactive_file (\d+)$", parts, re.MULTILINE)
                free = min(free, int(most) - int(used) + (int(cached[1]) if cached else 0))
    return max(0, free)


def last_cache_bytes(root: Path = _ROOT) -> int:
    """Return the size of the largest cache of the first core in bytes, 0 if unknown."""
    sizes = [_read(path) for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    factors = {"K": 2**10, "M": 2**20}
    return max((int(size[:-1]) * factors[size[-1]] for size in sizes if size and size[-1] in factors), default=0)


def _limits(root: Path, controller: str, file: str) -> Iterator[str]:
    """Yield what ``file`` says for the process's cgroup and each above; within a container only the top is seen."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        for top in [f"sys/fs/cgroup/{controller}", f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/unified"]:
            folder = Path(path)
            texts = [_read(root / top / str(each).lstrip("/") / file) for each in (folder, *folder.parents)]
            if any(texts):
                yield from filter(None, texts)
                break


def _read_processor(root: Path) -> tuple[str, int, int, set[str]]:
    """Return the model, the logical and the physical cores, and the flags of the processor."""
    text = _read(root / "proc/cpuinfo")
    logical = os.cpu_count() or 1
    values: dict[str, list[str]] = {}
    for key, value in re.findall(r"^([^:\n]+?)\s*:[ \t]*(.*)$", text, re.MULTILINE):
        values.setdefault(key, []).append(value)
    pairs = set(zip(values.get("physical id", []), values.get("core id", []), strict=False))
    model = values.get("model name", [platform.processor() or platform.machine()])[0]
    flags = values.get("flags", values.get("Features", [""]))[0]
    return model, logical, len(pairs) or logical, set(flags.split())


def _size_of(folder: Path) -> int | None:
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def _open_files() -> tuple[int, int] | None:
    try:
        import resource  # Windows has none
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft, hard


def _describe_gpus() -> tuple[Gpu, ...]:
    count = torch.cuda.device_count()
    gpus = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        others = (other for other in range(count) if other != index)
        peers = tuple(other for other in others if torch.cuda.can_device_access_peer(index, other))
        capability = f"{properties.major}.{properties.minor}"
        memory, processors = properties.total_memory, properties.multi_processor_count
        gpus.append(Gpu(properties.name, capability, memory, processors, peers))
    return tuple(gpus)


def _blas() -> str:
    found = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    onednn = ", oneDNN" if torch.backends.mkldnn.is_available() else ""
    backend = re.search(r"ATen parallel backend: (.+)", torch.__config__.parallel_info())
    threading = f", {backend[1]}" if backend else ""
    return (found[1] if found else "unknown") + onednn + threading


def _compiler() -> str | None:
    """Return the first line that the C++ compiler says of itself, None if there is none."""
    try:
        command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return next(iter(said.splitlines()), None)


def _kernels() -> dict[str, str]:
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    return {str(device): KERNELS.state(device) for device in devices}


def _installed_versions() -> dict[str, str]:
    versions = {"lightning_accel": __version__, "torch": torch.__version__}  # which names its build: 2.13.0+cpu
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
