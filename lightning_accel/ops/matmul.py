"""Products of float32 matrices on the CPU by oneDNN in place of MKL, in any module.

On processors other than Intel's, MKL multiplies by AVX2, while oneDNN, which torch has as well, uses the instructions
of AVX-512: twice as many operations a second on AMD's Zen 5. Results differ in the order of sums alone.
"""

from collections.abc import Callable

import torch

from lightning_accel._private.torch import onednn_multiplies_float32
from lightning_accel.ops.native import Replacement, missing_kernel


def why_no_onednn_matmul() -> str:
    """Return why oneDNN cannot multiply float32 matrices in place of MKL here, "" if it can."""
    if not torch.backends.mkl.is_available():
        return "torch multiplies by another library than MKL"
    if not onednn_multiplies_float32():
        return "the processor has no AVX-512"
    if reason := missing_kernel():
        return reason
    is_there = torch.ops.lightning_accel_native.has_onednn_matmul()
    return "" if is_there else "this version of torch has no function for it"


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
    return bool(_REPLACEMENT) or torch.get_float32_matmul_precision() == "medium"


def _replace() -> Callable[[], None]:
    replace = torch.ops.lightning_accel_native.replace_matmul
    replace(True)
    return lambda: replace(False)


_REPLACEMENT = Replacement(_replace)
