"""Detection of transforms of torch.func."""

import torch


def in_transform() -> bool:
    """Return whether a transform of torch.func, such as ``vmap``, is active; tracing by a compiler does not count.

    torch has only a private function for this, which Function.apply calls too.
    """
    return torch._C._are_functorch_transforms_active()
