"""Transforms of torch.func."""

import torch


def in_transform() -> bool:
    """Whether a transform of torch.func, such as ``vmap``, calls; a compiler's tracing aside.

    Private, and in no public form: Function.apply asks the same question, to choose its way.
    """
    return torch._C._are_functorch_transforms_active()
