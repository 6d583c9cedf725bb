"""Products of float32 matrices on the CPU by oneDNN in place of MKL, in any module.

On processors other than Intel's, MKL multiplies by AVX2, while oneDNN, which torch has as well, uses the instructions
of AVX-512: twice as many operations a second on AMD's Zen 5. Results differ in the order of sums alone.
"""

import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from lightning_accel._private.torch import onednn_multiplies_float32
from lightning_accel.ops.native import Replacement, missing_kernel

_ONEDNN: Any = torch.backends.mkldnn  # whose attributes torch replaces as it is imported, unseen by type checkers
_CPUINFO = Path("/proc/cpuinfo")
# A call of oneDNN takes 10 us longer than one of MKL, which multiplies this often in the time, on each thread
_MIN_TERMS = 1_500_000
_MIN_SIZE = 8  # of each dimension: narrower matrices gain nothing


def why_no_onednn_matmul() -> str:
    """Return why oneDNN cannot multiply float32 matrices in place of MKL here, "" if it can."""
    if not torch.backends.mkl.is_available():
        return "torch multiplies by another library than MKL"
    if not onednn_multiplies_float32():
        return "oneDNN has no AVX-512 here, of the processor or by ONEDNN_MAX_CPU_ISA"
    if reason := missing_kernel():
        return reason
    is_there = torch.ops.lightning_accel_native.has_onednn_matmul()
    return "" if is_there else "this version of torch has no function for it"


def onednn_outruns_mkl() -> bool:
    """Return whether oneDNN multiplies float32 matrices by AVX-512 on this CPU, and MKL, which is Intel's, by AVX2."""
    try:
        cpu = _CPUINFO.read_text()
    except OSError:
        cpu = platform.processor()
    return torch.backends.mkl.is_available() and onednn_multiplies_float32() and "GenuineIntel" not in cpu


def takes_onednn(a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether :func:`replace_matmul` serves the product of matrices, or of batches of them, of these sizes."""
    sizes = a[-2], a[-1], b[-1]
    return min(sizes) >= _MIN_SIZE and math.prod(a) * b[-1] >= _MIN_TERMS * torch.get_num_threads()


def replace_matmul() -> None:
    """Let matrix products in float32 on the CPU be computed by oneDNN in this process, in whatever module.

    It serves ``mm``, ``bmm``, ``addmm`` and ``baddbmm``, and so ``linear``, ``matmul``, ``einsum`` and their gradients,
    from 1.5 million multiplications a thread on, where no matrix has less than 8 rows or columns; torch computes the
    others. It counts: after n calls, torch's kernels are back with the nth call of :func:`restore_matmul`.

    Raises:
        RuntimeError: if oneDNN cannot take the place of MKL here.
    """
    if reason := why_no_onednn_matmul():
        raise RuntimeError(f"oneDNN cannot multiply in place of MKL: {reason}. Leave onednn_matmul off")
    _REPLACEMENT.begin()


def restore_matmul() -> None:
    """Take back one call of :func:`replace_matmul`."""
    _REPLACEMENT.end()


def multiplies_by_onednn() -> bool:
    """Return whether float32 matrix products on the CPU are computed by oneDNN now, or may be, rounded to bfloat16."""
    return bool(_REPLACEMENT) or _ONEDNN.matmul.fp32_precision == "bf16"


@contextmanager
def keep_matmul_precision() -> Iterator[None]:
    """Restore the precision of float32 products on leaving, whichever of torch's settings it was set by.

    :func:`torch.get_float32_matmul_precision` raises where ``torch.backends.*.matmul.fp32_precision`` says otherwise.
    """
    backends = torch.backends.cuda.matmul, _ONEDNN.matmul
    of_backends, of_all = [backend.fp32_precision for backend in backends], "highest"
    with suppress(RuntimeError):
        of_all = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(of_all)
        for backend, precision in zip(backends, of_backends, strict=True):
            backend.fp32_precision = precision


def _replace() -> Callable[[], None]:
    torch.ops.lightning_accel_native.replace_matmul(_MIN_TERMS, _MIN_SIZE)
    return torch.ops.lightning_accel_native.restore_matmul


_REPLACEMENT = Replacement(_replace)
