"""Builds of C++ and CUDA sources into shared libraries, once for all processes, by torch's own builder."""

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
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

_LOG = logging.getLogger(__name__)

_CPU_FLAGS = {
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
}
_SOURCES = (".cpp", ".cu", ".h", ".hh", ".hpp", ".hxx", ".cuh", ".inc", ".inl", ".ipp", ".tpp")
# Run in a separate process, which can be killed, whose output has all messages of the compiler, and which alone
# crashes if the library does not load. The current folder is removed from the module path. If the process that waits
# for it is killed, it ends itself: compilers that go on in the background slow every later try.
_BUILD = """
import sys
sys.path[:] = [path for path in sys.path if path]
import json, os, signal, threading, time
def end_with(parent):
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGTERM)
threading.Thread(target=end_with, args=(int(sys.argv[2]),), daemon=True).start()
from torch.utils.cpp_extension import load
load(**json.loads(sys.argv[1]))
"""


class BuildError(Exception):
    """Signal that a library could not be built; the text is the reason, in one line."""


class _StoppedError(BuildError):
    """Signal that a build ended because the process is to end, which says nothing of the sources."""


def cpu_target() -> str:
    """Return the instruction set to compile for on this processor: ``AVX512``, ``AVX2`` or ``DEFAULT``."""
    capability = torch.backends.cpu.get_cpu_capability()
    return next((target for target in ("AVX512", "AVX2") if capability.startswith(target)), "DEFAULT")


def cuda_target(device: torch.device) -> str:
    """Return the architecture to compile for on a GPU, such as ``sm_90``."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def library_path(name: str, folder: Path, target: str, timeout: float) -> Path:
    """Return the path of the library for the sources in ``folder``, building it unless it is cached.

    The sources are ``*.cpp``, or ``*.cu`` for a GPU. Concurrent processes wait for the one that builds; if it fails,
    they raise the same error.

    Args:
        name: name of the library, a Python identifier.
        folder: folder with sources and headers, searched recursively; changes of files elsewhere are not noticed.
        target: ``AVX512``, ``AVX2``, ``DEFAULT``, or an architecture such as ``sm_90``.
        timeout: time limit in seconds for waiting, and again for building.

    Raises:
        BuildError: if the library is not cached and cannot be built.
    """
    if sys.platform == "win32":
        raise BuildError("native ops are built on Linux and macOS")
    if found := cached_library(name, folder, target):
        return found
    file = _file_name(name, folder, target)
    asked = time.time()
    cache = _writable_cache()
    library, failure = cache / file, cache / f"{file}.failed"
    with _ending_on_sigterm(), _lock(cache / f"{file}.lock", timeout):
        if library.exists() and not _untrusted_reason(library):
            return library
        if failure.exists() and failure.stat().st_mtime >= asked:
            raise BuildError(failure.read_text())
        try:
            _build(name, folder, target, library, timeout)
        except _StoppedError:  # others try on
            raise
        except BuildError as error:
            failure.write_text(str(error))
            raise
        failure.unlink(missing_ok=True)
    return library


def cached_library(name: str, folder: Path, target: str) -> Path | None:
    """Return the path that :func:`library_path` returns if the library is built already, otherwise None."""
    file = _file_name(name, folder, target)
    paths = (cache / file for cache in _cache_folders())
    return next((path for path in paths if path.exists() and not _untrusted_reason(path)), None)


def _file_name(name: str, folder: Path, target: str) -> str:
    return f"{name}-{target}-{_source_digest(folder, target)}.so"


def _source_digest(folder: Path, target: str) -> str:
    """Compute a digest of everything a library depends on, except the compiler, which may be missing at run time."""
    versions = [torch.__version__, platform.machine(), *_flags(target)]
    digest = hashlib.sha256("\n".join(versions).encode())
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
        digest.update(f"\n{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _flags(target: str) -> list[str]:
    return ["-O3", *_CPU_FLAGS.get(target, [])]


def _cache_folders() -> list[Path]:
    """List the folders that may hold libraries: the user's cache, then a folder for temporary files."""
    chosen = os.environ.get("LIGHTNING_ACCEL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = os.path.expanduser(chosen or os.path.join(base, "lightning_accel"))
    # compilers run in another folder; "~" stays for a user that the system does not know
    home = [] if cache.startswith("~") else [Path(cache).absolute()]
    try:
        return [*home, _temporary_cache()]
    except FileNotFoundError:  # there is no writable folder for temporary files
        return home


def _temporary_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"lightning_accel-{os.getuid()}"


def _untrusted_reason(path: Path) -> str:
    """Return why users other than this one and root could have written ``path`` (a library or folder), or ""."""
    path = path.absolute()
    for link in (each for each in (path, *path.parents) if each.is_symlink()):  # it and its target must be trusted
        if reason := _untrusted_reason(link.parent) or _untrusted_reason(link.parent / os.readlink(link)):
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
            status.st_mode & stat.S_IWGRP and status.st_gid != status.st_uid  # private groups have their user's number
        )
        if is_others and not (status.st_mode & stat.S_ISVTX and each != path):  # sticky, as /tmp: entries are safe
            return f"others can write to {each}"
    return ""


def _writable_cache() -> Path:
    reasons: list[str] = []
    for cache in _cache_folders():
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache):
                reason = _untrusted_reason(cache)
        except OSError as error:
            reason = f"{cache}: {error.strerror}"
        if not reason:
            return cache
        if not reasons and os.path.exists(cache):
            _LOG.warning("native ops are not kept in %s: %s", cache, reason)
        reasons.append(reason)
    raise BuildError(f"no folder to build in ({'; '.join(reasons)}); set LIGHTNING_ACCEL_CACHE to one")


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the build after its handler, such as Lightning's, which takes note of it until the next step."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):  # which ends the process
        yield
        return

    def handle_and_stop(number: int, frame: FrameType | None) -> None:
        handler(number, frame)
        raise _StoppedError("SIGTERM arrived during the build")

    signal.signal(signal.SIGTERM, handle_and_stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _lock(path: Path, timeout: float) -> Iterator[None]:
    """Hold a file lock, which the system releases however the process ends."""
    import fcntl  # Windows has none

    deadline = time.monotonic() + timeout
    is_told = False
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(f"another process builds it for more than {timeout:g} s ({path})") from None
                if not is_told:
                    _LOG.warning("waiting for another process, which builds %s", path.with_suffix("").name)
                    is_told = True
                time.sleep(0.1)
            except OSError:  # a file system without locks: each process builds, and the last library is kept
                break
        yield


def _build(name: str, folder: Path, target: str, library: Path, timeout: float) -> None:
    compiler = _compiler()
    # a warning, since programs without a logging setup show only warnings, and this may take minutes
    _LOG.warning(
        "%s is built for %s, once; %s on a quiet machine. LIGHTNING_ACCEL_NATIVE=0 goes without it, and "
        "lightning-accel build-ops builds ahead",
        name, target, "some minutes" if _is_cuda(target) else "half a minute",
    )  # fmt: skip
    _delete_stale_builds(library.parent)
    # a temporary folder, since torch's lock file in it would outlive a killed process
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as made:
        settings = {
            "name": name,
            "sources": [str(path) for path in sorted(folder.glob("*.cu" if _is_cuda(target) else "*.cpp"))],
            "build_directory": made,
            "extra_cflags": _flags(target),
            "extra_cuda_cflags": ["-O3", "-DUSE_CUDA"],  # USE_CUDA makes the stable headers declare the current stream
            "extra_ldflags": _runtime_flags(Path(made)) if _is_cuda(target) else [],
            "extra_include_paths": [str(folder)],
            "is_python_module": False,
        }
        command = [sys.executable, "-c", _BUILD, json.dumps(settings), str(os.getpid())]
        _run(command, _build_environment(target, compiler, Path(made)), timeout)
        (Path(made) / f"{name}.so").chmod(0o755)  # whatever the umask, other users must not be able to change it
        os.replace(Path(made) / f"{name}.so", library)  # atomic, so that no process loads half a file


def _compiler() -> list[str]:
    """Return the command of the C++ compiler: CXX split into words, or ``c++``."""
    said = os.environ.get("CXX", "")
    try:
        compiler = shlex.split(said) or ["c++"]
    except ValueError as error:
        raise BuildError(f"CXX={said} is no command: {error}") from error
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"no C++ compiler: {compiler[0]} is not on the PATH. Install one (g++), or name it in CXX")
    return compiler


def _delete_stale_builds(cache: Path) -> None:
    """Delete temporary folders of killed builds that are older than a day."""
    for folder in cache.glob("build-*"):
        with suppress(OSError):
            if folder.stat().st_mtime < time.time() - 86_400:
                shutil.rmtree(folder)


def _is_cuda(target: str) -> bool:
    return target.startswith("sm_")


def _runtime_flags(made: Path) -> list[str]:
    """Return flags for ``-lcudart`` to find the runtime of torch's wheels, whose file lacks the name for linkers."""
    packages = Path(torch.__file__).parents[1]
    runtime = next(packages.glob("nvidia/*/lib/libcudart.so.*"), None)
    if runtime is None:  # torch uses the runtime of an installed toolkit, which has that name
        return []
    (made / "libcudart.so").symlink_to(runtime)
    return [f"-L{made}"]


def _build_environment(target: str, compiler: list[str], made: Path) -> dict[str, str]:
    """Return the environment of the build, with ninja on the PATH even if Python's environment is not activated."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    if shutil.which("ninja", path=path) is None:
        raise BuildError('ninja is not installed: pip install "lightning_accel[native]"')
    if len(compiler) > 1:  # torch treats CXX as one word
        wrapper = made / "c++"
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@"\n')
        wrapper.chmod(0o700)
        compiler = [str(wrapper)]
    architecture = {"TORCH_CUDA_ARCH_LIST": f"{target[3:-1]}.{target[-1]}"} if _is_cuda(target) else {}
    return {**os.environ, "PATH": path, "CXX": compiler[0], **architecture}


def _run(command: list[str], environment: dict[str, str], timeout: float) -> None:
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
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise BuildError(f"the compiler took more than {timeout:g} s") from None
        finally:  # no compiler keeps running, also after Ctrl-C
            if process.poll() is None:
                _terminate(process)
    if process.returncode:
        raise BuildError(_first_error(output, process.returncode))


def _terminate(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGTERM)  # ninja passes it on to its compilers, which are in other groups
    time.sleep(0.5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _first_error(output: str, status: int) -> str:
    """Return the first line of ``output`` with an error of the compiler or linker, or else the last line."""
    lines = [
        line.strip() for line in output.splitlines() if line.strip() and not line.startswith("ninja: build stopped")
    ]
    telling = r"(?<![A-Za-z])error ?:|undefined reference|cannot find -l|No space left|: not found$"
    errors = [line for line in lines if re.search(telling, line)]
    return (errors or lines[-1:] or [f"the builder ended with status {status}"])[0]
