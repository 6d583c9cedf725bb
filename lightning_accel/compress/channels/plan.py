"""Plans of what to remove, as plain numbers, and their application to modules, optimizers and checkpoints."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_accel._private.torch import ConvBase, ConvTransposeBase, NormBase
from lightning_accel.compress.uncompiled import uncompiled
from lightning_accel.nn import RBM, DynamicRNN, MixtureOfExperts
from lightning_accel.nn.recurrent.layer import RecurrentLayer
from lightning_accel.ops.names import clean_name
from lightning_accel.strategies.checkpoints.reading import read_checkpoint

CHANNEL_PLAN = "channel_plan"  # key of a plan in a checkpoint, at any depth
Module = TypeVar("Module", bound=nn.Module)
Kept = dict[int, list[int]]  # indices that are kept, in order, by dimension


@dataclass(frozen=True)
class ChannelPlan:
    """Hold the indices to keep in each dimension of each pruned parameter or buffer, or of each pruned list of blocks.

    ``state_dict`` and :meth:`of_state` convert it to JSON or a checkpoint, and back.

    Attributes:
        kept: by name of the parameter or buffer.
        shapes: of each in ``kept``, before the removal.
        attributes: values after the removal, by name of the module, then of its attribute, such as ``out_features`` or
            ``config.num_hidden_layers``.
        blocks: by name of the list of submodules, the places of those that stay.
        lengths: of each in ``blocks``, before the removal.
    """

    kept: dict[str, Kept] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.kept or self.blocks)

    def shape_after(self, name: str) -> list[int]:
        return [len(self.kept[name].get(dim, range(size))) for dim, size in enumerate(self.shapes[name])]

    def state_dict(self) -> dict[str, Any]:
        kept = {name: {str(dim): list(indices) for dim, indices in dims.items()} for name, dims in self.kept.items()}
        blocks = {"blocks": self.blocks, "lengths": self.lengths} if self.blocks else {}
        return {"kept": kept, "shapes": self.shapes, "attributes": self.attributes} | blocks

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "ChannelPlan":
        kept = {name: {int(dim): list(one) for dim, one in dims.items()} for name, dims in state["kept"].items()}
        attributes = {name: dict(values) for name, values in state["attributes"].items()}
        blocks, lengths = dict(state.get("blocks", {})), dict(state.get("lengths", {}))
        return cls(kept, dict(state["shapes"]), attributes, blocks, lengths)

    def prefixed(self, prefix: str) -> "ChannelPlan":
        """Return the plan for a parent module, in which this module is the submodule ``prefix``."""

        def rename(values: Mapping[str, Any]) -> dict[str, Any]:
            return {f"{prefix}.{name}".rstrip("."): value for name, value in values.items()}

        if not prefix:
            return self
        kept, shapes, attributes = rename(self.kept), rename(self.shapes), rename(self.attributes)
        return ChannelPlan(kept, shapes, attributes, rename(self.blocks), rename(self.lengths))

    def is_applied_to(self, module: nn.Module) -> bool:
        """Return whether a module has the shapes, and the numbers of blocks, after the removal."""
        with uncompiled(module) as plain:
            tensors = plain.state_dict()
            parts = dict(plain.named_modules(remove_duplicate=False))
        lengths = all(len(list(parts[name].children())) == len(kept) for name, kept in self.blocks.items())
        return lengths and all(
            list(tensors[name].shape) == self.shape_after(name) for name in self.kept if name in tensors
        )


def make_channel_plan(
    module: nn.Module,
    gone: Mapping[tuple[str, int], Iterable[int]],
    attributes: Mapping[tuple[str, str], int] | None = None,
) -> ChannelPlan:
    """Make a plan that removes the indices ``gone``, and updates size attributes such as ``out_features``.

    Args:
        module: module, which is not changed.
        gone: indices by name of a parameter or buffer, and dimension.
        attributes: values of further attributes, by name of a module and of its attribute.
    """
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    kept: dict[str, Kept] = {}
    for (name, dim), indices in gone.items():
        left_out = set(indices)
        kept.setdefault(name, {})[dim] = [one for one in range(tensors[name].shape[dim]) if one not in left_out]
    plan = ChannelPlan(kept, {name: list(tensors[name].shape) for name in kept})
    for (owner, attribute), value in (attributes or {}).items():
        plan.attributes.setdefault(owner, {})[attribute] = value
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in kept):
        shapes = {
            name: plan.shape_after(f"{owner}.{name}" if owner else name)
            for name in ("weight", "running_mean", "weight_ih", "weight_ih_l0", "weight_hh_l0")
            if (f"{owner}.{name}" if owner else name) in kept
        }
        values = _size_attributes(module.get_submodule(owner), shapes, plan.attributes.get(owner, {}))
        if values:
            plan.attributes.setdefault(owner, {}).update(values)
    for name, part in module.named_modules():
        if isinstance(part, DynamicRNN):  # has attributes with the sizes of its layers
            of_layer = plan.attributes.get(f"{name}.layers.0" if name else "layers.0", {})
            if "hidden_size" in of_layer:
                plan.attributes.setdefault(name, {})["hidden_size"] = of_layer["hidden_size"]
            first = f"{name}.layers.0.weight_ih" if name else "layers.0.weight_ih"
            if 1 in kept.get(first, {}):
                plan.attributes.setdefault(name, {})["input_size"] = len(kept[first][1])
        elif isinstance(part, MixtureOfExperts):
            first = f"{name}.experts.up_weight".lstrip(".")
            if 2 in kept.get(first, {}):
                plan.attributes.setdefault(name, {})["dim"] = len(kept[first][2])
    return plan


def _size_attributes(
    owner: nn.Module, shapes: dict[str, list[int]], known: Mapping[str, Any]
) -> dict[str, int | tuple[int, ...]]:
    """Return the size attributes of a module of torch, or of this library, for the given shapes of its parameters."""
    weight = shapes.get("weight", [])
    if isinstance(owner, RBM) and weight:
        return {"num_hidden": weight[0]}
    if isinstance(owner, nn.Linear) and weight:
        return {"out_features": weight[0], "in_features": weight[1]}
    if type(owner).__name__ == "Conv1D" and "nf" in vars(owner) and weight:  # a linear layer of transformers
        return {"nx": weight[0], "nf": weight[1]} if "nx" in vars(owner) else {"nf": weight[1]}
    if isinstance(owner, ConvBase) and weight:
        groups = known.get("groups", owner.groups)
        names = ("out_channels", "in_channels")
        first, second = reversed(names) if isinstance(owner, ConvTransposeBase) else names
        return {first: weight[0], second: weight[1] * groups}
    if isinstance(owner, NormBase) and (size := weight or shapes.get("running_mean")):
        return {"num_features": size[0]}
    if isinstance(owner, nn.LayerNorm | nn.RMSNorm) and weight:
        return {"normalized_shape": tuple(weight)}
    if isinstance(owner, nn.GroupNorm) and weight:
        return {"num_channels": weight[0]}
    if isinstance(owner, nn.Embedding) and weight:
        return {"embedding_dim": weight[1]}
    if isinstance(owner, nn.PReLU) and weight:
        return {"num_parameters": weight[0]}
    if isinstance(owner, nn.RNNBase):
        sizes: dict[str, int | tuple[int, ...]] = (
            {"input_size": shapes["weight_ih_l0"][1]} if "weight_ih_l0" in shapes else {}
        )
        return sizes | ({"hidden_size": shapes["weight_hh_l0"][1]} if "weight_hh_l0" in shapes else {})
    if isinstance(owner, nn.RNNCellBase) and "weight_ih" in shapes:
        gates = owner.weight_ih.shape[0] // owner.hidden_size
        return {"input_size": shapes["weight_ih"][1], "hidden_size": shapes["weight_ih"][0] // gates}
    if isinstance(owner, RecurrentLayer) and "weight_ih" in shapes:
        return {"hidden_size": shapes["weight_ih"][0] * owner.hidden_size // owner.weight_ih.shape[0]}
    whole = getattr(owner, "weight", None)
    if weight and isinstance(whole, Tensor) and vars(owner).get("hidden_dim") == whole.shape[-1]:
        return {"hidden_dim": weight[-1]}  # of a router of transformers
    return {}


@torch.no_grad()
def apply_plan_(module: nn.Module, plan: ChannelPlan, optimizers: Sequence[Optimizer] = ()) -> None:
    """Remove all that ``plan`` does not keep from ``module``, and from the state of ``optimizers``.

    Parameters whose shape changes become new objects under the old names, in the old order, and replace the old ones in
    param groups; gradients and optimizer moments are sliced alike. Blocks after one that goes move up, so that the
    names of their parameters change. If any part cannot be changed, nothing is. In the end the method
    ``after_removal()`` of each submodule that has one is called.

    Args:
        module: the module that the plan was made for, or another of the same shapes.
        plan: the indices to keep.
        optimizers: optimizers of the module's parameters.

    Raises:
        KeyError: if the module lacks a parameter or buffer of the plan.
        ValueError: if a shape differs, or the state of an optimizer cannot be sliced, such as that of LBFGS.
    """
    with uncompiled(module) as plain:
        _apply_plan(plain, plan, optimizers)


def _apply_plan(module: nn.Module, plan: ChannelPlan, optimizers: Sequence[Optimizer]) -> None:
    _remove_blocks(module, plan, [getattr(one, "optimizer", one) for one in optimizers])
    old = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    for name in plan.kept:
        if name not in old:
            raise KeyError(f"{type(module).__name__} has no {name!r}, of which channels are to be removed")
        _require_shape(name, list(old[name].shape), plan.shapes[name])
    kept = {id(old[name]): dims for name, dims in plan.kept.items()}
    new = {id(old[name]): _slice_parameter(old[name], dims) for name, dims in plan.kept.items()}
    states = [_slice_states(getattr(one, "optimizer", one), new, kept) for one in optimizers]
    for part in list(module.modules()):
        own = part.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in [*own, *part.named_buffers(recurse=False, remove_duplicate=False)]:
            if id(tensor) in new:
                setattr(part, name, new[id(tensor)])  # recurrent layers update a list of weights in it
    for name, values in plan.attributes.items():
        for attribute, value in values.items():
            *path, last = attribute.split(".")
            setattr(reduce(getattr, path, module.get_submodule(name)), last, value)
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()
        if callable(hook := getattr(part, "after_removal", None)):
            hook()
    for one, state in zip(optimizers, states, strict=True):
        optimizer = getattr(one, "optimizer", one)  # Lightning wraps them
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]
        optimizer.state.clear()
        optimizer.state.update(state)


def _remove_blocks(module: nn.Module, plan: ChannelPlan, optimizers: Sequence[Optimizer]) -> None:
    parts = dict(module.named_modules(remove_duplicate=False))
    for name, length in plan.lengths.items():
        found = len(list(parts[name].children())) if name in parts else 0
        if found != length:
            raise ValueError(
                f"the plan is for {length} blocks in {name}; got {found}. Apply plans in the order in which they were "
                "made, each once, to a module made with the same sizes"
            )
    before = {id(one) for one in module.parameters()}
    for name, kept in plan.blocks.items():
        blocks: Any = parts[name]
        keys = list(blocks.keys()) if isinstance(blocks, nn.ModuleDict) else range(len(blocks))
        for place in reversed(range(len(keys))):
            if place not in kept:
                del blocks[keys[place]]
    gone = before - {id(one) for one in module.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in gone:
                    optimizer.state.pop(parameter, None)
            group["params"] = [one for one in group["params"] if id(one) not in gone]


def _require_shape(name: str, found: Sequence[int], needed: Sequence[int]) -> None:
    if list(found) != list(needed):
        raise ValueError(
            f"the plan is for {name} of shape {list(needed)}; got {list(found)}. Apply plans in the order in which "
            "they were made, each once, to a module made with the same sizes"
        )


def _slice_parameter(tensor: Tensor, dims: Kept) -> Tensor:
    made = take(tensor.detach(), dims)
    if not isinstance(tensor, nn.Parameter):
        return made
    parameter = nn.Parameter(made, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    if tensor.grad is not None:
        parameter.grad = take(tensor.grad, dims)
    return parameter


def take(tensor: Tensor, dims: Kept) -> Tensor:
    """Return a copy with only the indices ``dims``."""
    for dim, indices in dims.items():
        tensor = tensor.index_select(dim, torch.tensor(indices, device=tensor.device))
    return tensor


def _slice_states(
    optimizer: Optimizer, new: Mapping[int, Tensor], kept: Mapping[int, Kept]
) -> dict[Any, dict[str, Any]]:
    states = {}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if isinstance(optimizer, torch.optim.LBFGS) and held & new.keys():
        raise ValueError(
            "LBFGS keeps the history of all parameters as one vector, from which channels cannot be removed; take "
            "another optimizer, or remove channels before or after training"
        )
    for parameter, state in optimizer.state.items():
        if id(parameter) not in new:
            states[parameter] = state
            continue
        states[new[id(parameter)]] = {
            name: _slice_state(f"{type(optimizer).__name__} {name}", value, parameter, kept[id(parameter)])
            for name, value in state.items()
        }
    return states


def _slice_state(name: str, value: Any, parameter: Tensor, dims: Kept) -> Any:
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value
    fits = value.ndim == parameter.ndim and all(
        size in (1, whole) for size, whole in zip(value.shape, parameter.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {list(value.shape)}, that of its parameter is {list(parameter.shape)}; which of it "
            "belongs to the channels to be removed is not known. Take another optimizer, or remove channels before or "
            "after training"
        )
    return take(value, {dim: indices for dim, indices in dims.items() if value.shape[dim] > 1})


def load_pruned(module: Module, checkpoint: str | Path | Mapping[str, Any]) -> Module:
    """Load a checkpoint of a channel-pruned model into ``module``, which is not pruned yet, in place.

    Args:
        module: module of the same sizes as before training.
        checkpoint: a file or its content, of a Trainer with :class:`~lightning_accel.Pruning` or several, or
            ``{"channel_plan": plan.state_dict(), "state_dict": module.state_dict()}``. Without a plan, only the weights
            are loaded.

    Returns:
        ``module``.

    Raises:
        ValueError: if the checkpoint has no weights, or the module has not the shapes from before the pruning.
        TypeError: if ``module`` is no module, or ``checkpoint`` neither a path nor a mapping.
    """
    if not (isinstance(module, nn.Module) and isinstance(checkpoint, str | os.PathLike | Mapping)):
        raise TypeError(
            "load_pruned(module, checkpoint) takes a module of the sizes from before the pruning, then the path or the "
            f"content of a checkpoint; got {type(module).__name__}, then {type(checkpoint).__name__}"
        )
    found = checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint)
    if "state_dict" not in found:
        raise ValueError(f"the checkpoint holds {', '.join(map(str, found))}; its weights must be in 'state_dict'")
    weights = {clean_name(name): value for name, value in found["state_dict"].items()}
    for plan in find_plans(found):
        apply_plan_(module, plan)
    with uncompiled(module) as plain:  # the run may have been compiled or not
        tensors = {name: value for name, value in plain.state_dict().items() if isinstance(value, Tensor)}
        shapes = {name: value.shape for name, value in tensors.items() if not is_lazy(value)}
        there = {name: list(weights[name].shape) if name in weights else "missing" for name in shapes}
        if other := [name for name, shape in shapes.items() if there[name] != list(shape)]:
            raise ValueError(
                f"{type(module).__name__} has other weights than the checkpoint: {other[0]} is "
                f"{list(shapes[other[0]])}, and {there[other[0]]} there; {len(other)} differ. Give a module of the "
                "sizes from before that fit. If an earlier fit had pruned it, load both in turn: "
                "load_pruned(load_pruned(module, first_checkpoint), this_checkpoint)"
            )
        plain.load_state_dict(weights)
    return module


def find_plans(state: Any) -> list[ChannelPlan]:
    """Return the plans in ``state``, at any depth of mappings and lists, in their order."""
    if isinstance(state, Mapping):
        if state.get(CHANNEL_PLAN):
            return [ChannelPlan.of_state(state[CHANNEL_PLAN])]
        state = [value for key, value in state.items() if key not in ("state_dict", "optimizer_states")]
    if isinstance(state, (list, tuple)):
        return [plan for value in state for plan in find_plans(value)]
    return []
