"""Hooks of optimizers, which a shortcut past ``optimizer.step`` would skip."""

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether anything runs with each step besides the optimizer's own: hooks of its own, or of all optimizers.

    Private, and in no public form: a registration can be undone by its handle alone.
    """
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    of_all = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    return bool(own or of_all)
