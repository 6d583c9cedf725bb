"""A hint in the error message if weights do not fit because channels were removed in training."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_HINT = (
    "weights in the checkpoint are smaller than those of the model. Where channels of its run were removed "
    "(Pruning(structure='channel')), load it with lightning_accel.compress.load_pruned(model, path), the model made "
    "as before training"
)


def hint_at_removed_channels(module: nn.Module) -> None:
    """Make errors of ``module.load_state_dict`` explain how to load a checkpoint with removed channels."""
    module.register_load_state_dict_pre_hook(_hint)


def _hint(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    pairs = [
        (state_dict[prefix + name], own)
        for name, own in module.named_parameters(remove_duplicate=False)
        if isinstance(state_dict.get(prefix + name), Tensor)
    ]
    others = [(saved.shape, own.shape) for saved, own in pairs if saved.shape != own.shape]
    if others and all(
        len(saved) == len(own) and all(size <= whole for size, whole in zip(saved, own, strict=True))
        for saved, own in others
    ):
        error_msgs.append(_HINT)
