"""Detection of optimizer hooks, which an update without ``optimizer.step`` would skip."""

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run at each step: of this optimizer, or registered for all optimizers.

    torch has only private attributes for this.
    """
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    of_all = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    return bool(own or of_all)
