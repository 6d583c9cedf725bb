"""Memory allocators with which a process can be started in place of the C library's own; read without torch."""

import os
import platform
from ctypes.util import find_library
from pathlib import Path
from typing import Literal, get_args

AllocatorName = Literal["tcmalloc", "jemalloc", "huge_pages"]
ALLOCATORS = get_args(AllocatorName)
LIBRARIES = {"tcmalloc": ("tcmalloc_minimal", "tcmalloc"), "jemalloc": ("jemalloc",)}
# each keeps what is freed, as keep_freed_memory does; jemalloc's are those of torch's performance tuning guide
_SETTINGS = {
    "tcmalloc": {"TCMALLOC_RELEASE_RATE": "0", "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(2**60)},
    "jemalloc": {
        "MALLOC_CONF": "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
        "dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
    },
    "huge_pages": {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=2147483647"
    },
}
_JOINED_BY_COLON = ("LD_PRELOAD", "GLIBC_TUNABLES")
_ROOT = Path("/")


def why_no_allocator(name: AllocatorName) -> str:
    """Return why no process can be started with an allocator on this machine, or nothing."""
    if platform.system() != "Linux":
        return "it needs Linux"
    if name in LIBRARIES:
        return "" if _library(name) else f"the library {name} is not installed"
    if platform.libc_ver()[0] != "glibc" or tuple(map(int, platform.libc_ver()[1].split(".")[:2])) < (2, 35):
        return "it needs the GNU C library (glibc) from version 2.35 on"
    pages = _ROOT / "sys/kernel/mm/transparent_hugepage/enabled"
    if not pages.exists() or "[madvise]" not in pages.read_text():
        return f"{pages} is not madvise: all processes have huge pages, or none can"
    return ""


def variables_for(name: AllocatorName) -> dict[str, str]:
    """Return the environment variables, besides those that are set, with which a process starts with an allocator.

    Raises:
        RuntimeError: if it cannot be had here.
    """
    if reason := why_no_allocator(name):
        raise RuntimeError(f"allocator={name!r}: {reason}")
    variables = dict(_SETTINGS[name])
    if name in LIBRARIES:
        variables["LD_PRELOAD"] = _library(name)
    for variable in _JOINED_BY_COLON:
        if variable in variables and (given := os.environ.get(variable)):
            variables[variable] = f"{variables[variable]}:{given}"
    return variables


def allocator_in_use() -> str:
    """Return the name of the allocator that this process was started with, empty for the C library's own."""
    maps = _ROOT / "proc/self/maps"
    loaded = maps.read_text() if maps.exists() else ""
    if "glibc.malloc.hugetlb=1" in os.environ.get("GLIBC_TUNABLES", ""):
        return "huge_pages"
    return next((name for name in LIBRARIES if f"/lib{name}" in loaded), "")


def _library(name: str) -> str:
    return next((found for one in LIBRARIES[name] if (found := find_library(one))), "")
