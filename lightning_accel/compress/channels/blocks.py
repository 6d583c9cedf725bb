"""Removal of whole blocks, such as layers of a transformer, by how little they change what passes through them."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel._private.torch import tree_leaves, tree_map_only
from lightning_accel.compress.calls import Inputs, first_line
from lightning_accel.compress.channels.plan import ChannelPlan, apply_plan_
from lightning_accel.compress.uncompiled import uncompiled
from lightning_accel.ops.blocks import find_blocks
from lightning_accel.ops.evaluation import evaluating
from lightning_accel.ops.names import Exclusion, clean_name, find_excluded


class Blocks(NamedTuple):
    """Hold the blocks of a module that can be removed.

    Attributes:
        influence: of each that can be removed, by its name.
        left_out: reasons for the others.
    """

    influence: dict[str, float]
    left_out: dict[str, str]


def measure_influence(module: nn.Module, inputs: Sequence[Inputs], exclude: Sequence[Exclusion] = ()) -> Blocks:
    """Measure how much each repeated block of a module changes what passes through it.

    The influence of a block is 1 less the mean cosine similarity of its input and output at a position: 0 for a block
    without effect. Source: Men et al. 2024, ShortGPT, eq. 1, https://arxiv.org/abs/2403.03853. Blocks are those of
    :func:`~lightning_accel.strategies.find_blocks`. One that changes shapes, is called other than once, or has
    parameters that none of its siblings has, cannot be removed.

    Args:
        module: any module; neither it nor a random generator is changed.
        inputs: positional and keyword arguments of calls.
        exclude: names or patterns of blocks, or of modules around them, or classes, that stay.

    Raises:
        ValueError: if a block gives NaN or infinity, or ``exclude`` matches nothing.
    """
    names = {one: clean_name(name) for name, one in module.named_modules()}
    excluded = find_excluded(module, exclude)
    left_out: dict[str, str] = {}
    sums: dict[nn.Module, list[Tensor]] = {}
    blocks = find_blocks(module)
    siblings: dict[str, list[nn.Module]] = {}
    for one in blocks:
        siblings.setdefault(names[one].rpartition(".")[0], []).append(one)
    for own in siblings.values():
        for one in own:
            others = {name for other in own if other is not one for name, _ in other.named_parameters()}
            alone = [name for name, _ in one.named_parameters() if name not in others]
            if len(own) == 1 or alone:
                left_out[names[one]] = f"alone has {alone[0]}" if alone else "the only one of its list"
            elif names[one] in excluded:
                left_out[names[one]] = f"excluded by {excluded[names[one]]!r}"

    def note(one: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, made = _first_tensor((args, kwargs)), _first_tensor(output)
        if given is None or made is None or given.shape != made.shape or given.ndim < 2:
            left_out.setdefault(names[one], "its output has another shape than its input")
        else:
            sums.setdefault(one, []).append(_similarity(given, made))

    handles = [one.register_forward_hook(note, with_kwargs=True) for one in blocks]
    try:
        with torch.random.fork_rng(), evaluating(module), torch.no_grad():
            for args, kwargs in inputs:
                module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    for one in blocks:
        if len(sums.get(one, ())) != len(inputs):
            left_out.setdefault(names[one], "it is not called once in each call of the module")
    found = {names[one]: 1 - float(torch.stack(sums[one]).mean()) for one in blocks if names[one] not in left_out}
    if wrong := [name for name, value in found.items() if not -1 < value < 3]:
        raise ValueError(f"{', '.join(wrong)} gives NaN or infinity on the calibration data; look at its weights")
    return Blocks(found, left_out)


def plan_without_blocks(
    module: nn.Module, inputs: Sequence[Inputs], sparsity: float, exclude: Sequence[Exclusion] = ()
) -> tuple[ChannelPlan, Blocks]:
    """Plan to remove the blocks of the least influence, and return the measured influence, too.

    The plan also sets what modules of transformers know of their place and number: ``layer_idx`` of attention layers,
    ``num_hidden_layers`` and ``layer_types`` of the configuration.

    Args:
        module: as in :func:`measure_influence`, like all that follow but ``sparsity``.
        inputs: calls; those of the smaller module are tried on the first one.
        sparsity: share in (0, 1) of all blocks to remove, rounded; each list of blocks keeps one.
        exclude: blocks that stay.

    Raises:
        ValueError: if nothing or too little can be removed, or the smaller module fails.
    """
    blocks = measure_influence(module, inputs, exclude)
    with uncompiled(module) as plain:
        lists = {clean_name(name): one for name, one in plain.named_modules()}
    total = len(blocks.influence) + len(blocks.left_out)
    count = round(sparsity * total)
    gone: set[str] = set()
    for name in sorted(blocks.influence, key=blocks.influence.__getitem__):
        own = name.rpartition(".")[0]
        left = len(list(lists[own].children())) - sum(one.rpartition(".")[0] == own for one in gone)
        if len(gone) < count and left > 1:
            gone.add(name)
    if len(gone) < count or not count:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in blocks.left_out.items())
        raise ValueError(
            f"a share of {sparsity:g} of the {total} blocks of {type(module).__name__} is {count}, and {len(gone)} can "
            f"be removed, since each list keeps one{f' ({reasons})' if reasons else ''}"
        )
    plan = _make_plan(lists, gone)
    small = copy.deepcopy(module)
    try:
        apply_plan_(small, plan)
        args, kwargs = tree_map_only(Tensor, torch.clone, inputs[0])
        with torch.random.fork_rng(), evaluating(small), torch.no_grad():
            small(*args, **kwargs)
    except Exception as error:
        raise ValueError(
            f"{type(module).__name__} does not run without {', '.join(sorted(gone))}: {first_line(error)}. Exclude "
            "them, or remove channels instead"
        ) from error
    return plan, blocks


def _make_plan(modules: Mapping[str, nn.Module], gone: set[str]) -> ChannelPlan:
    plan = ChannelPlan()
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in sorted(gone)):
        keys = [name for name, _ in modules[owner].named_children()]
        kept = [place for place, key in enumerate(keys) if f"{owner}.{key}".lstrip(".") not in gone]
        plan.blocks[owner], plan.lengths[owner] = kept, len(keys)
        is_renumbered = not isinstance(modules[owner], nn.ModuleDict)
        for new, old in enumerate(kept):
            block, key = modules[f"{owner}.{keys[old]}".lstrip(".")], str(new) if is_renumbered else keys[old]
            for path, part in block.named_modules():
                if vars(part).get("layer_idx") == old:
                    plan.attributes[".".join(filter(None, (owner, key, path)))] = {"layer_idx": new}
        for name, config in _configurations(modules, owner):
            if values := _settings_without(config, kept, len(keys)):
                plan.attributes.setdefault(name, {}).update(values)
    return plan


def _configurations(modules: Mapping[str, nn.Module], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the configurations of the modules around one, but that of an encoder and a decoder together."""
    is_nearest = True
    while name:
        name = name.rpartition(".")[0]
        config = vars(modules[name]).get("config")
        if config is not None and (is_nearest or not getattr(config, "is_encoder_decoder", False)):
            yield name, config
            is_nearest = False


def _settings_without(config: Any, kept: Sequence[int], length: int) -> dict[str, Any]:
    """Return the settings that count the layers of a configuration of transformers, or name them one by one."""
    if getattr(config, "num_hidden_layers", None) != length:
        return {}
    values = {
        f"config.{key}": [value[place] for place in kept]
        for key, value in vars(config).items()
        if "layer" in key and isinstance(value, list) and len(value) == length
    }
    return {"config.num_hidden_layers": len(kept)} | values


def _first_tensor(values: Any) -> Tensor | None:
    return next((one for one in tree_leaves(values) if isinstance(one, Tensor) and one.is_floating_point()), None)


def _similarity(given: Tensor, made: Tensor) -> Tensor:
    """Return the mean cosine similarity of positions, of whole samples where these are pictures, ()."""
    if given.ndim > 3:
        given, made = given.flatten(1), made.flatten(1)
    return F.cosine_similarity(given.float(), made.float(), dim=-1).mean()
