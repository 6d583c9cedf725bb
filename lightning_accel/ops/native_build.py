"""Shared libraries of C++ and CUDA sources, built once for all processes that want them, by torch's own builder."""

import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_LOG = logging.getLogger(__name__)

_CPU_FLAGS = {
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
}
_SOURCES = (".cpp", ".cu", ".h", ".hh", ".hpp", ".hxx", ".cuh", ".inc", ".inl", ".ipp", ".tpp")
# In a process of its own: it can be ended, it tells all that the compiler said, and it is it that a library which does
# not load brings down. What lies in the current folder is none of its modules.
_BUILD = """
import sys
sys.path[:] = [path for path in sys.path if path]
import json
from torch.utils.cpp_extension import load
load(**json.loads(sys.argv[1]))
"""


class BuildError(Exception):
    """A library could not be built; the text is the reason, in a line."""


def cpu_target() -> str:
    """What this processor is compiled for: ``AVX512``, ``AVX2`` or ``DEFAULT``."""
    capability = torch.backends.cpu.get_cpu_capability()
    return next((target for target in ("AVX512", "AVX2") if capability.startswith(target)), "DEFAULT")


def cuda_target(device: torch.device) -> str:
    """What a GPU is compiled for, such as ``sm_90``."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def library_path(name: str, folder: Path, target: str, time_limit_s: float) -> Path:
    """The library of the sources in ``folder``, ``*.cpp`` or for a GPU ``*.cu``; it is built unless a cache has it.

    Processes that ask at the same time wait for the one that builds, and take the reason from it if it fails.

    Args:
        name: of the library, a Python identifier.
        folder: of the sources and their headers, also in folders within it; others are not watched for changes.
        target: ``AVX512``, ``AVX2``, ``DEFAULT``, or ``sm_90`` and its like.
        time_limit_s: for waiting, and again for building, in seconds.

    Raises:
        BuildError: if it is not there and cannot be built.
    """
    if sys.platform == "win32":
        raise BuildError("native ops are built on Linux and macOS")
    file = f"{name}-{target}-{_fingerprint(folder, target)}.so"
    for cache in _caches():
        if (cache / file).exists() and not _distrust(cache / file):
            return cache / file
    asked = time.time()
    cache = _writable_cache()
    library, failure = cache / file, cache / f"{file}.failed"
    with _lock(cache / f"{file}.lock", time_limit_s):
        if library.exists() and not _distrust(library):
            return library
        if failure.exists() and failure.stat().st_mtime >= asked:
            raise BuildError(failure.read_text())
        try:
            _build(name, folder, target, library, time_limit_s)
        except BuildError as error:
            failure.write_text(str(error))
            raise
        failure.unlink(missing_ok=True)
    return library


def _fingerprint(folder: Path, target: str) -> str:
    """Of all that a library depends on but the compiler, which a machine that only runs it need not have."""
    versions = [torch.__version__, platform.machine(), *_flags(target)]
    digest = hashlib.sha256("\n".join(versions).encode())
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
        digest.update(f"\n{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _flags(target: str) -> list[str]:
    return ["-O3", *_CPU_FLAGS.get(target, [])]


def _caches() -> list[Path]:
    """Where libraries are kept: the user's cache, and where that cannot be written, a folder for temporary files."""
    chosen = os.environ.get("LIGHTNING_ACCEL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = os.path.expanduser(chosen or os.path.join(base, "lightning_accel"))
    home = [] if cache.startswith("~") else [Path(cache)]  # of a user whom the system does not know
    try:
        return [*home, _temporary_cache()]
    except FileNotFoundError:  # no folder for temporary files can be written
        return home


def _temporary_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"lightning_accel-{os.getuid()}"


def _distrust(path: Path) -> str:
    """Say why somebody else than this user and root may have written ``path``, a library or a folder of them; or ""."""
    if path.is_symlink() and (reason := _distrust(path.parent)):
        return reason
    path = path.resolve()
    for each in (path, *path.parents[:-1]):
        try:
            status = each.stat()
        except OSError as error:
            return f"{each}: {error.strerror}"
        if status.st_uid not in (0, os.getuid()):
            return f"{each} belongs to the user {status.st_uid}"
        is_others = status.st_mode & stat.S_IWOTH or (
            status.st_mode & stat.S_IWGRP and status.st_gid != status.st_uid  # a group of one's own has one's number
        )
        if is_others and not (status.st_mode & stat.S_ISVTX and each != path):  # sticky, as /tmp: entries are safe
            return f"others can write to {each}"
    return ""


def _writable_cache() -> Path:
    reasons: list[str] = []
    for cache in _caches():
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache):
                reason = _distrust(cache)
        except OSError as error:
            reason = f"{cache}: {error.strerror}"
        if not reason:
            return cache
        if not reasons and os.path.exists(cache):
            _LOG.warning("native ops are not kept in %s: %s", cache, reason)
        reasons.append(reason)
    raise BuildError(f"no folder to build in ({'; '.join(reasons)}); set LIGHTNING_ACCEL_CACHE to one")


@contextmanager
def _lock(path: Path, time_limit_s: float) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends."""
    import fcntl  # Windows has none

    deadline = time.monotonic() + time_limit_s
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(f"another process builds it for more than {time_limit_s:g} s ({path})") from None
                time.sleep(0.1)
            except OSError:  # a file system without locks: all build, each for itself, and the last one's stays
                break
        yield


def _build(name: str, folder: Path, target: str, library: Path, time_limit_s: float) -> None:
    compiler = _compiler()
    # programs that have not set up logging show warnings alone, and wait here
    _LOG.warning("%s is built for %s, once; %s", name, target, "some minutes" if _is_cuda(target) else "some seconds")
    _remove_leftovers(library.parent)
    # a folder of its own: torch's lock in it would otherwise outlive a process that is killed
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as made:
        settings = {
            "name": name,
            "sources": [str(path) for path in sorted(folder.glob("*.cu" if _is_cuda(target) else "*.cpp"))],
            "build_directory": made,
            "extra_cflags": _flags(target),
            "extra_cuda_cflags": ["-O3", "-DUSE_CUDA"],  # with which the stable headers give the current stream
            "extra_include_paths": [str(folder)],
            "is_python_module": False,
        }
        command = [sys.executable, "-c", _BUILD, json.dumps(settings)]
        _run(command, _environment(target, compiler, Path(made)), time_limit_s)
        (Path(made) / f"{name}.so").chmod(0o755)  # whatever the umask, others must not be able to change it
        os.replace(Path(made) / f"{name}.so", library)  # at once, so that nobody loads half a file


def _compiler() -> list[str]:
    """The C++ compiler and its own arguments."""
    said = os.environ.get("CXX", "")
    try:
        compiler = shlex.split(said) or ["c++"]
    except ValueError as error:
        raise BuildError(f"CXX={said} is no command: {error}") from error
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"no C++ compiler: {compiler[0]} is not on the PATH. Install one (g++), or name it in CXX")
    return compiler


def _remove_leftovers(cache: Path) -> None:
    """Of builds that were killed, a day ago or longer."""
    for folder in cache.glob("build-*"):
        with suppress(OSError):
            if folder.stat().st_mtime < time.time() - 86_400:
                shutil.rmtree(folder)


def _is_cuda(target: str) -> bool:
    return target.startswith("sm_")


def _environment(target: str, compiler: list[str], made: Path) -> dict[str, str]:
    """With ninja on the PATH where it is installed beside a Python that is run without its environment activated."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    if len(compiler) > 1:  # torch takes CXX for one word
        wrapper = made / "c++"
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@"\n')
        wrapper.chmod(0o700)
        compiler = [str(wrapper)]
    architecture = {"TORCH_CUDA_ARCH_LIST": f"{target[3:-1]}.{target[-1]}"} if _is_cuda(target) else {}
    return {**os.environ, "PATH": path, "CXX": compiler[0], **architecture}


def _run(command: list[str], environment: dict[str, str], time_limit_s: float) -> None:
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            raise BuildError(f"the compiler took more than {time_limit_s:g} s") from None
        finally:  # after Ctrl-C, too, no compiler is left behind
            if process.poll() is None:
                _end(process)
    if process.returncode:
        raise BuildError(_reason(output, process.returncode))


def _end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGTERM)  # which ninja hands on to its compilers; they are in groups of their own
    time.sleep(0.5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(output: str, status: int) -> str:
    """The first line that tells of an error, of the compiler's or linker's; or the last line there is."""
    lines = [
        line.strip() for line in output.splitlines() if line.strip() and not line.startswith("ninja: build stopped")
    ]
    telling = r"(?<![A-Za-z])error ?:|undefined reference|cannot find -l|No space left|: not found$"
    errors = [line for line in lines if re.search(telling, line)]
    return (errors or lines[-1:] or [f"the builder ended with status {status}"])[0]
