"""Private names of argparse, torchmetrics, PyTorch Geometric and transformers that the package stands on."""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def set_update_count(metric: Any, count: int) -> None:
    """Set how many updates the state of a metric holds, without which ``compute`` warns; it has no public setter."""
    metric._update_count = count
    metric._computed = None  # of the state before


def set_forward_value(metric: Any, value: Any) -> None:
    """Set the value of the last step of a metric, which has no public setter."""
    metric._forward_cache = value


def explained_edges(layer: Any) -> Tensor | None:
    """Return the mask of edges in [0, 1] that an explainer gave a layer, None without; no public name leads to it."""
    mask: Tensor | None = layer._edge_mask if layer.explain else None
    return mask.sigmoid() if mask is not None and layer._apply_sigmoid else mask


def has_message_hooks(layer: Any) -> bool:
    """Return whether hooks see or change the messages of a layer; it registers and removes them, but lists none."""
    return any(
        getattr(layer, f"_{part}_forward_{kind}")
        for part in ("propagate", "message", "aggregate")
        for kind in ("pre_hooks", "hooks")
    )


def has_grouped_experts(model: Any) -> bool:
    """Return whether a model of transformers computes its experts by grouped products; old ones have no getter."""
    found: object = getattr(getattr(model, "config", None), "_experts_implementation", None)
    return found == "grouped_mm"


def set_help(parser: ArgumentParser, dest: str, text: str) -> None:
    """Set the help of an option that another library has added; argparse has no public list of a parser's options."""
    for action in parser._actions:
        if action.dest == dest:
            action.help = text


def arrange_options(parser: ArgumentParser, sections: Mapping[str, Sequence[str]], rest: str) -> None:
    """Replace the groups of a parser's options, which are public only when an option is added.

    Args:
        parser: the parser.
        sections: the names of the options of each section of its help, such as ``trainer.devices``, in order.
        rest: title of a last section, of all other options.
    """
    options = {action.dest.removesuffix(".help"): [] for action in parser._actions}  # type: dict[str, list[Any]]
    for action in parser._actions:
        options[action.dest.removesuffix(".help")].append(action)
    parser._action_groups.clear()
    for title, names in sections.items():
        found = [action for name in names for action in options.pop(name, ())]
        if found:
            parser.add_argument_group(title)._group_actions += found
    parser.add_argument_group(rest)._group_actions += [action for actions in options.values() for action in actions]
