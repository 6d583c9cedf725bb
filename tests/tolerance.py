"""How far two results may lie apart that differ by nothing but rounding."""

import torch


def rounding(dtype: torch.dtype, operations: int) -> float:
    """Bound the difference of two results of ``operations`` roundings each, one upon the other.

    It is relative to the largest sum of magnitudes on the way: each of the two is off by half an epsilon a rounding
    (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 3.1). Kernels add in an order of their own,
    which depends on the processor and on shapes: a row in a batch may go through another one than the row alone.
    """
    return operations * torch.finfo(dtype).eps
