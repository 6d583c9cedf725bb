"""Operations written in C++ and CUDA, built at their first use; without a compiler, formulas in torch replace them.

A folder holds the sources: ``*.cpp`` files register schemas and CPU kernels, ``*.cu`` files CUDA kernels for the same
schemas. They use torch's stable ABI (``torch/csrc/stable/library.h``), with which a file compiles in seconds, except
where it has no way to what they need.
"""

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_accel._private.torch import is_traced
from lightning_accel.ops.native_build import BuildError, cached_library, cpu_target, cuda_target, library_path
from lightning_accel.ops.renames import renamed_arguments


class NativeLibrary:
    """Build the C++ and CUDA kernels in a folder once per machine, cache the library, and load it at first use.

    Libraries are cached in ``~/.cache/lightning_accel`` (or ``LIGHTNING_ACCEL_CACHE``; in the folder for temporary
    files if that is not writable), and built again after a change of the sources, of torch or of the processor type.
    Building needs a C++ compiler, for GPUs also CUDA's. ``LIGHTNING_ACCEL_NATIVE=0`` disables the kernels; with ``=1``
    it is an error if they are not available, instead of a warning and the formula in torch.

    Args:
        name: name of the library, a unique Python identifier; preferably the namespace of its ops.
        folder: folder with the sources.
        timeout: time limit in seconds for a build, and for waiting for the build of another process.

    Raises:
        ValueError: if ``name`` is not an identifier.

    >>> library = NativeLibrary("my_ops", Path("csrc"))
    >>> def add(a, b):
    ...     return torch.ops.my_ops.add(a, b) if library.serves(a.device) else a + b
    """

    @renamed_arguments(time_limit_s="timeout")
    def __init__(self, name: str, folder: Path, timeout: float = 300) -> None:
        if not name.isidentifier():
            raise ValueError(f"name must be a Python identifier, such as 'my_ops'; got {name!r}")
        self.name = name
        self.folder = Path(folder)
        self.timeout = timeout
        self._available: dict[torch.device, bool] = {}
        self._registrations: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._is_loaded = False
        self._is_disabled = False

    def serves(self, device: torch.device) -> bool:
        """Return whether kernels are available for ``device``; the first call of a process builds and loads them.

        Nothing is built while code is traced: kernels are available only if they were loaded before. If kernels cannot
        be built, a warning gives the reason once; there is none if no kernels exist for the type of device, or under
        ``LIGHTNING_ACCEL_NATIVE=0``.

        Raises:
            RuntimeError: if kernels are not available under ``LIGHTNING_ACCEL_NATIVE=1``; or if this process has
                already loaded other sources under this name, or the same namespace under another name.
            ValueError: if ``LIGHTNING_ACCEL_NATIVE`` is neither 0 nor 1.
        """
        if self._is_disabled:
            return False
        served = self._available.get(device)
        if served is None:
            return not torch.compiler.is_compiling() and self._load_once(device)
        return served

    def state(self, device: torch.device) -> str:
        """Return whether kernels for ``device`` are ``built``, ``not built yet``, ``switched off`` or do not exist.

        Unlike :meth:`serves` it builds and loads nothing.

        Raises:
            ValueError: if ``LIGHTNING_ACCEL_NATIVE`` is neither 0 nor 1.
        """
        if self._is_disabled or os.environ.get("LIGHTNING_ACCEL_NATIVE") == "0":
            return "switched off"
        if not self._has_sources(device):
            return "there are none"
        if self._available.get(device) is False:
            return "cannot be built"
        target = cuda_target(device) if device.type == "cuda" else cpu_target()
        return "not built yet" if cached_library(self.name, self.folder, target) is None else "built"

    def _load_once(self, device: torch.device) -> bool:
        with self._lock:
            if device not in self._available:
                self._available[device] = self._has_sources(device) and self._try_to_load(device)
        return self._available[device]

    def _has_sources(self, device: torch.device) -> bool:
        wanted = os.environ.get("LIGHTNING_ACCEL_NATIVE", "")
        if wanted not in ("", "0", "1"):
            raise ValueError(f"LIGHTNING_ACCEL_NATIVE must be 0, 1 or not set; it is {wanted!r}")
        if wanted == "0":
            return False
        return device.type == "cpu" or (device.type == "cuda" and any(self.folder.glob("*.cu")))

    def _try_to_load(self, device: torch.device) -> bool:
        try:
            self._load(cpu_target())  # registers the schemas
            if device.type == "cuda":
                self._load(cuda_target(device))
        except (BuildError, OSError) as error:
            reason = f"{self.name}: no native ops for {device.type}: {error}{_load_error(error)}"
            if os.environ.get("LIGHTNING_ACCEL_NATIVE") == "1":
                raise RuntimeError(
                    f"{reason}. LIGHTNING_ACCEL_NATIVE=1 asks for them; unset it to do without"
                ) from error
            if os.environ.get("LOCAL_RANK", "0") == "0":
                warnings.warn(
                    f"{reason}. Formulas in torch take their place; LIGHTNING_ACCEL_NATIVE=0 silences this",
                    stacklevel=4,
                )
            return False
        return True

    def build_ahead(self) -> None:
        """Build the library for this processor unless it is there, switched off, or cannot be built."""
        device = torch.device("cpu")
        if self.state(device) == "not built yet":
            with suppress(BuildError):  # which the first use tells
                self.build(cpu_target())

    def build(self, target: str) -> Path:
        """Build the library for ``target`` (``AVX512``, ``AVX2``, ``DEFAULT`` or ``sm_90``) unless it is cached.

        Raises:
            BuildError: if it cannot be built.
        """
        pattern = "*.cu" if target.startswith("sm_") else "*.cpp"
        if not any(self.folder.glob(pattern)):
            raise BuildError(f"no {pattern} in {self.folder}")
        if pattern == "*.cu" and torch.version.cuda is None:
            raise BuildError("this torch is built without CUDA")
        return library_path(self.name, self.folder, target, self.timeout)

    def _load(self, target: str) -> None:
        path = self.build(target)
        before = _LOADED.get((self.name, target), path)
        if before != path:  # torch would end the process
            raise RuntimeError(f"{self.name} is loaded already, from other sources ({before}); restart Python")
        for namespace in _namespaces(self.folder):
            owner = _OWNERS.setdefault(namespace, self.name)
            if owner != self.name:
                raise RuntimeError(f"{self.name} registers {namespace}, as {owner} did; restart Python, or rename one")
        torch.ops.load_library(str(path))
        _LOADED[self.name, target] = path
        if self.name not in _REGISTERED:
            for register in self._registrations:
                register()
            _REGISTERED.add(self.name)
        self._is_loaded = True

    def on_load(self, register: Callable[[], None]) -> Callable[[], None]:
        """Decorate a function that is to run once per process after loading, to register fake kernels and gradients."""
        self._registrations.append(register)
        if self._is_loaded:
            register()
        return register

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Make :meth:`serves` return False temporarily, to compare kernels with formulas."""
        before, self._is_disabled = self._is_disabled, True
        try:
            yield
        finally:
            self._is_disabled = before


def _namespaces(folder: Path) -> set[str]:
    """Return the namespaces that the sources define with TORCH_LIBRARY, which only one library may define."""
    texts = [path.read_text(errors="replace") for path in folder.glob("*.cpp")]
    return {name for text in texts for name in re.findall(r"TORCH_LIBRARY\(\s*(\w+)", text)}


def _load_error(error: Exception) -> str:
    """Return the loader's message, and advice to delete the file, if an existing library failed to load."""
    is_there = isinstance(error, OSError) and error.__cause__ is not None
    return f" ({error.__cause__}); delete it to have it built anew" if is_there else ""


# State of the process, not of one object: a notebook cell may create the same library again.
_REGISTERED: set[str] = set()
_OWNERS: dict[str, str] = {}  # libraries by namespace
_LOADED: dict[tuple[str, str], Path] = {}  # by name and target
_PLAIN = {Tensor, nn.Parameter}
KERNELS = NativeLibrary("lightning_accel_native", Path(__file__).with_name("csrc"))


def check_one_device(**tensors: Tensor | None) -> None:
    """Require that all tensors are on one device.

    Fake kernels call it: torch passes them tensors of mixed devices if one of them is on ``meta``.

    Raises:
        ValueError: if the tensors are on different devices.
    """
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"tensors must be on one device; got {found}. Call .to(device)")


def runs_kernel(*tensors: Tensor) -> bool:
    """Return whether kernels for the CPU serve ``tensors``: plain ones, in a call that nothing traces."""
    is_plain = {*map(type, tensors)} <= _PLAIN and all(one.is_cpu for one in tensors)
    return is_plain and not is_traced() and KERNELS.serves(tensors[0].device)


def missing_kernel() -> str:
    """Return why no kernel can replace torch's on this machine's CPU, "" if one can; the first call builds it."""
    cpu = torch.device("cpu")
    if cpu_target() == "DEFAULT":
        return "the processor has no AVX2"
    if KERNELS.serves(cpu):
        return ""
    if KERNELS.state(cpu) == "switched off":
        return "LIGHTNING_ACCEL_NATIVE=0 switches native kernels off"
    return "it cannot be built, for the reason that a warning has given"


class Replacement:
    """Replace kernels of torch on the CPU, in this process, while anyone wants it.

    Args:
        replace: replaces them, and returns what takes that back; see
            :func:`lightning_accel._private.torch.replace_cpu_kernel`.
    """

    def __init__(self, replace: Callable[[], Callable[[], None]]) -> None:
        self._replace = replace
        self._restorers: list[Callable[[], None]] = []  # one for all users, or none
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._restorers)

    def begin(self) -> None:
        """Replace the kernels until as many calls of :meth:`end` have followed."""
        with self._lock:
            restore = self._restorers[-1] if self._restorers else None
            self._restorers.append(restore or self._replace())

    def end(self) -> None:
        """Take back one call of :meth:`begin`."""
        with self._lock:
            restore = self._restorers.pop()
            if not self._restorers:
                restore()
