"""Random 0s and 1s of any module's dropout on the CPU, by a kernel in place of torch's.

All dropouts of torch draw their masks with ``bernoulli_``, which draws one number after another on processors other
than Intel's: most of the time of a dropout. The kernel computes the random numbers of many elements at once, on all
threads.

They are Philox4x32-10's (Salmon, Moraes, Dror and Shaw 2011, Parallel Random Numbers: As Easy as 1, 2, 3,
https://doi.org/10.1145/2063384.2063405): element i in the order of the memory uses word i % 4 of counter i // 4, with a
key that is drawn from the generator for each call. Equal seeds give equal masks on any number of threads, and a
restored state of the generator repeats them. A word has 32 bits: probabilities are rounded to multiples of 2^-32.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lightning_accel._private.torch import replace_cpu_kernel
from lightning_accel.ops.native import KERNELS, Replacement, check_one_device, missing_kernel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool)
_MIN_SIZE = 1024  # below it torch's kernel is faster than a call of Python


def replace_bernoulli() -> None:
    """Let ``bernoulli_`` with one probability draw by the kernel in this process, in whatever module.

    It counts: after n calls, torch's kernel is back with the nth call of :func:`restore_bernoulli`.

    Raises:
        RuntimeError: if there is no kernel.
    """
    if reason := missing_kernel():
        raise RuntimeError(f"dropout has no native kernel: {reason}. Mend that, or leave native_dropout off")
    _REPLACEMENT.begin()


def restore_bernoulli() -> None:
    """Take back one call of :func:`replace_bernoulli`."""
    _REPLACEMENT.end()


def _bernoulli_(original: Any, keys: Any, x: Tensor, p: float = 0.5, *, generator: Generator | None = None) -> Tensor:
    if x.numel() < _MIN_SIZE or x.dtype not in _DTYPES or not 0 <= p <= 1:
        return original.call_boxed(keys, x, p, generator=generator)
    seed = torch.empty(1, dtype=torch.int64, device="cpu").random_(generator=generator)
    torch.ops.lightning_accel_native.bernoulli_.default(x, p, seed)
    return x


def _replace() -> Callable[[], None]:
    original = torch.library.get_kernel("aten::bernoulli_.float", "CPU")
    return replace_cpu_kernel("bernoulli_.float", functools.partial(_bernoulli_, original), "CPU")


_REPLACEMENT = Replacement(_replace)


def _fake(x: Tensor, p: float, seed: Tensor) -> None:
    check_one_device(x=x, seed=seed)


@KERNELS.on_load
def _register() -> None:
    torch.library.register_fake("lightning_accel_native::bernoulli_", _fake)
