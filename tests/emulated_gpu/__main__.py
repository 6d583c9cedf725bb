"""Run Python on emulated GPUs: ``python tests/emulated_gpu [--gpus N] -m pytest -m gpu``.

Needs a CUDA build of torch, a C++ compiler and CUDA's headers (``pip install "cuda-toolkit[nvcc,cccl]"``), but no GPU:
memory and streams are the host's (``runtime.c``), and operators of CUDA tensors are computed by the CPU
(``kernels.cpp``), with the devices, the states of random numbers and the waits of CUDA. Triton's interpreter runs its
kernels; with ``TRITON_INTERPRET=0`` they are compiled and launched but compute nothing. Kernels of ``*.cu`` files are
not built.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

FOLDER = Path(__file__).parent.resolve()


def build(to: Path) -> None:
    """Compile the two libraries into a folder, where these versions of them are not there yet."""
    sources = [FOLDER / "runtime.c", FOLDER / "kernels.cpp"]
    stamp = hashlib.sha256(b"".join(map(Path.read_bytes, sources)) + torch.__version__.encode()).hexdigest()
    if (to / "stamp").exists() and (to / "stamp").read_text() == stamp:
        return
    to.mkdir(exist_ok=True)
    packages = Path(torch.__file__).parents[1]
    cuda = next(packages.glob("nvidia/cu*/include/cuda_runtime_api.h")).parent
    root = packages / "torch"
    includes = [cuda, root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    shared = [
        *shlex.split(os.environ.get("CXX", "c++")),
        "-shared",
        "-fPIC",
        "-O1",
        *(f"-I{path}" for path in includes),
    ]
    runtime = [*shared, "-x", "c", sources[0], "-Wl,-soname,libcuda.so.1", "-o", to / "libcuda.so.1"]
    libraries = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda", "-ltorch_python"]
    kernels = [*shared, "-std=c++20", "-w", sources[1], *libraries, "-o", to / "emulated_gpu_kernels.so"]
    for command in (runtime, kernels):
        subprocess.run(list(map(str, command)), check=True)
    (to / "stamp").write_text(stamp)


def main(arguments: list[str]) -> None:
    """Replace this process by Python on emulated GPUs.

    Raises:
        SystemExit: torch is not a CUDA build.
    """
    if torch.version.cuda is None:
        sys.exit(f"emulated GPUs need a CUDA build of torch, and torch {torch.__version__} is none: install one")
    gpus = "1"
    if arguments[:1] == ["--gpus"]:
        gpus, arguments = arguments[1], arguments[2:]
    built = Path(sys.prefix, "emulated_gpu")
    build(built)
    paths = [str(FOLDER / "startup"), str(built), *filter(None, [os.environ.get("PYTHONPATH")])]
    if os.environ.setdefault("TRITON_INTERPRET", "1") == "0":
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor is fresh, so that it is zero
    os.environ |= {
        "CUDA_HOME": str(built),  # without nvcc, so that formulas take the places of native kernels
        "EMULATED_GPUS": gpus,
        "LIGHTNING_ACCEL_CACHE": str(built / "cache"),  # one that has kernels for no GPU
        "LD_PRELOAD": str(built / "libcuda.so.1"),
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_LIBCUDA_PATH": str(built),
    }
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
