"""How far apart two results may lie that differ by nothing but rounding.

Kernels add in an order of their own, which depends on the processor, on the number of threads and on shapes: a row in a
batch may go through another one than the row alone, and a shard than the whole. Equality to the bit is for results of
the same calls on the same shapes. float64 on both sides needs no more than torch's own tolerances.
"""

import torch

ADAM_EPS = 0.01
"""The eps of Adam in runs that are compared, of learning rates up to 0.02.

A step is lr * m / (sqrt(v) + eps). With Adam's own 1e-8, a gradient that is 0 but for rounding makes a step of lr, in
the direction that a kernel happens to round: weights were seen 6e-5 apart after two steps. With this eps, a step
multiplies what gradients round by lr / eps, 2 at most. Gradients of order 1 are off by about one epsilon of float32, so
that weights of two runs are at most 2 * 2 * 20 * 1.2e-7 = 1e-5 apart after twenty steps. Besides, gradients of a wrong
scale show, which Adam's own eps divides out.
"""

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""The tolerance for float32 weights of two such runs, and for results of some 80 roundings of numbers of order 1."""


def rounding(dtype: torch.dtype, operations: int) -> float:
    """Bound the difference of two results of ``operations`` roundings each, one upon the other.

    It is relative to the largest sum of magnitudes on the way: each of the two is off by half an epsilon a rounding
    (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 3.1).
    """
    return operations * torch.finfo(dtype).eps
