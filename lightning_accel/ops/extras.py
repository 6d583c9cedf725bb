"""Packages that only some features need, imported on first use."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

EXTRA_OF = {
    "bitsandbytes": "adapters",
    "matplotlib": "plots",
    "onnx": "compress",
    "onnxruntime": "compress",
    "onnxscript": "compress",
    "pandas": "data",
    "peft": "adapters",
    "pyarrow": "data",
    "rich": "plots",
    "scipy": "tune",
    "sklearn": "data",
    "torchao": "compress",
}


HAS_TRITON = find_spec("triton") is not None  # a constant, which torch.compile reads without a warning
_planned_capability: int | None = None  # of the GPU for which operations are planned, that do not compute


def runs_triton(tensor: Any) -> bool:
    """Return whether operations on a tensor take kernels of Triton, or are planned for a GPU on which they would."""
    return (tensor.is_cuda and HAS_TRITON) or _planned_capability is not None


def planned_capability() -> int | None:
    """Return the major number of the compute capability of the GPU that is planned for, None if none is."""
    return _planned_capability


@contextmanager
def planned_for(capability: int) -> Iterator[None]:
    """Let operations on tensors of the CPU take their ways on a GPU, where nothing computes.

    Args:
        capability: major number of its compute capability, 0 of GPUs that are not NVIDIA's.
    """
    global _planned_capability
    before, _planned_capability = _planned_capability, capability
    try:
        yield
    finally:
        _planned_capability = before


class _OnFirstUse(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by whoever walks through sys.modules
            raise AttributeError(name)
        return getattr(require_module(self.__name__), name)


def import_on_use(module: str) -> Any:
    """Return a stand-in for a module that imports it when one of its attributes is first read.

    Raises:
        ModuleNotFoundError: then, if the package is not installed, see :func:`require_module`.
    """
    return _OnFirstUse(module)


def require_module(module: str) -> ModuleType:
    """Import a module.

    Raises:
        ModuleNotFoundError: if its package is not installed. The message names the extra that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        extra = EXTRA_OF[package]
        raise ModuleNotFoundError(
            f"{package} is needed here and is not installed: "
            f'pip install "lightning_accel[{extra}]", or ".[{extra}]" in a copy of the repository',
            name=package,
        ) from error
