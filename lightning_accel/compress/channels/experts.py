"""Removal of experts from mixtures, by what they add to the outputs on calibration data.

Shapes: E experts, N tokens, S slots, which are pairs of a token and an expert that it is sent to, D width.
"""

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.compress.calibration.change import record_products
from lightning_accel.compress.calibration.products import Matrix
from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.channels.plan import ChannelPlan, make_channel_plan
from lightning_accel.compress.pruning.prunable import is_stacked
from lightning_accel.nn.moe.layer import Experts
from lightning_accel.ops.names import Exclusion, find_excluded

_COUNTS = "num_experts", "num_local_experts", "n_routed_experts"
_CHOSEN = "k", "top_k", "num_experts_per_tok"
_GROUPS, _CHOSEN_GROUPS = ("n_group", "num_group"), ("topk_group",)  # of gates that choose groups of experts first


def score_experts(module: nn.Module, inputs: Sequence[Inputs], exclude: Sequence[Exclusion] = ()) -> dict[str, Tensor]:
    """Measure what each expert adds to the outputs of its mixture, (E,) float64 by name of the experts' module.

    The score of an expert is the mean norm of its output times the weight that the gate gives it, over the tokens that
    it gets, and 0 without a token: the criterion REAP (Lasby et al. 2025, https://arxiv.org/abs/2510.13999). Experts
    whose ``forward`` takes neither the arguments of ours nor tokens (N, D), indices and weights (N, K), as the fused
    experts of transformers, have the number of their tokens for a score.

    Mixtures are those with one matrix for each expert in one parameter, as ours and the fused experts of transformers.

    Args:
        module: any module on one device.
        inputs: positional and keyword arguments of calls.
        exclude: names or patterns of mixtures, or of modules around them, or classes, that are left out.
    """
    excluded = find_excluded(module, exclude)
    owners = {
        name: one
        for name, one in module.named_modules()
        if name not in excluded and any(is_stacked(one, value) for value in one.parameters(recurse=False))
    }
    others: dict[str, Tensor] = {}
    sums, slots = (
        {name: torch.zeros(_count_experts(one), dtype=torch.float64) for name, one in owners.items()} for _ in range(2)
    )

    def add(name: str, experts: nn.Module, args: Any, kwargs: Any) -> None:
        chosen, norms = _norms_of_slots(experts, *inspect.signature(experts.forward).bind(*args, **kwargs).args)
        sums[name].index_add_(0, chosen.cpu(), norms.double().cpu())
        slots[name] += chosen.bincount(minlength=len(slots[name])).cpu()

    def count(matrix: Matrix, x: Tensor) -> None:
        slots[matrix.name][matrix.offset // others[matrix.name].stride(0)] += len(x)

    with ExitStack() as stack:
        for name, one in owners.items():
            if _takes_slots(one):
                handle = one.register_forward_pre_hook(partial(add, name), with_kwargs=True)
                stack.callback(handle.remove)
            else:
                others[name] = next(value for value in one.parameters(recurse=False) if is_stacked(one, value))
        if owners:
            record_products(module, inputs, others, count)
    return {name: slots[name] if name in others else sums[name] / slots[name].clamp(min=1) for name in owners}


def _count_experts(experts: nn.Module) -> int:
    return next(len(value) for value in experts.parameters(recurse=False) if is_stacked(experts, value))


def _takes_slots(experts: nn.Module) -> bool:
    """Return whether the experts are ours, or take tokens, the indices of their experts, and weights."""
    names = [*inspect.signature(experts.forward).parameters]
    return isinstance(experts, Experts) or (len(names) == 3 and "ind" in names[1] and "weight" in names[2])


def _norms_of_slots(experts: nn.Module, tokens: Tensor, *routing: Tensor) -> tuple[Tensor, Tensor]:
    """Return the expert of each slot, (S,) int64, and the norm of its weighted output, (S,).

    Each slot is given to the experts as a token of its own.
    """
    if isinstance(experts, Experts):
        token_of_slot, weight_of_slot, counts = routing
        chosen = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        used = slice(len(chosen))  # behind them are slots without an expert
        own = tokens[token_of_slot[used]]
        return chosen, _norms(experts.forward(own, torch.arange(len(own)).to(chosen), weight_of_slot[used], counts))
    index, weights = routing  # (N, K)
    own = tokens.repeat_interleave(index.shape[1], 0)
    return index.flatten(), _norms(experts.forward(own, index.reshape(-1, 1), weights.reshape(-1, 1)))


def _norms(outputs: Tensor) -> Tensor:
    return torch.linalg.vector_norm(outputs, dim=1, dtype=torch.promote_types(outputs.dtype, torch.float32))


def plan_without_experts(
    module: nn.Module, inputs: Sequence[Inputs], sparsity: float, exclude: Sequence[Exclusion] = ()
) -> tuple[ChannelPlan, dict[str, Tensor]]:
    """Plan to remove the experts that add the least to the outputs, and return the scores, too.

    Rows of the gate, and what else it holds for each expert, go with them, so that tokens go to the best of the experts
    that stay. Each mixture loses the same share, and keeps as many experts as a token is sent to. Where a gate chooses
    among groups of experts first, as that of DeepSeek-V3, each group loses as many.

    Args:
        module: as in :func:`score_experts`, like all that follow but ``sparsity``; it is not changed.
        inputs: calls of the module, by which the experts are scored.
        sparsity: share in (0, 1) of the experts of each mixture, rounded.
        exclude: mixtures that stay.

    Raises:
        ValueError: if there is no mixture, one has no gate that is found, gets no token, makes NaN, or has equal scores
            for all its experts, too few experts would stay, or the share cannot be taken from all groups alike.
    """
    scores = score_experts(module, inputs, exclude)
    if not scores:
        raise ValueError(
            f"{type(module).__name__} has no mixture with the weights of its experts in one parameter; experts that "
            "are modules of their own, and dense layers, stay: take structure='channel' or 'block'"
        )
    gone: dict[tuple[str, int], list[int]] = {}
    attributes: dict[tuple[str, str], int] = {}
    for name, own in scores.items():
        total, count = len(own), round(sparsity * len(own))
        if not own.isfinite().all():
            raise ValueError(f"experts of {name} make NaN or infinity of the calibration data: look for what overflows")
        if len(own.unique()) == 1:
            what = f"the score {float(own[0]):g} for each of them" if own.any() else "no token, or outputs of 0"
            raise ValueError(f"which experts of {name} matter is not known: the calibration data brought {what}")
        around = module.get_submodule(_mixture_of(name)), _require_gate(module, name, total)
        stay, groups, in_groups = (_largest(around, keys) for keys in (_CHOSEN, _GROUPS, _CHOSEN_GROUPS))
        if count % groups:
            raise ValueError(
                f"a share of {sparsity:g} of the {total} experts of {name} is {count}, and its gate chooses among "
                f"{groups} groups, which have to lose as many each: take a share of a multiple of {groups / total:g}"
            )
        left = (total - count) // groups * (in_groups if groups > 1 else 1)
        if left < stay or not count:
            raise ValueError(
                f"a share of {sparsity:g} of the {total} experts of {name} leaves {left}"
                f"{' in the groups of a token' if groups > 1 else ''}; it must be at least one less than all and leave "
                f"{stay}, to which a token is sent"
            )
        lowest = own.view(groups, -1).argsort(dim=1, stable=True)[:, : count // groups]
        first = torch.arange(0, total, total // groups)[:, None]  # of each group
        chosen = (lowest.cpu() + first).flatten().sort().values.tolist()
        gone |= dict.fromkeys(_slices(module, name, total), chosen)
        attributes |= dict.fromkeys(_counters(module, name, total, are_all=not exclude), total - count)
    return make_channel_plan(module, gone, attributes), scores


def _mixture_of(name: str) -> str:
    return name.rpartition(".")[0]


def _largest(modules: Sequence[nn.Module], keys: Sequence[str]) -> int:
    return max(int(getattr(one, key, None) or 1) for one in modules for key in keys)


def _is_gate(name: str, part: nn.Module) -> bool:
    """Return whether a part of a mixture is a gate, or within one."""
    return bool({"gate", "router"} & {*name.split(".")}) or type(part).__name__.endswith(("Gate", "Router"))


def _require_gate(module: nn.Module, name: str, total: int) -> nn.Module:
    for path, part in module.get_submodule(_mixture_of(name)).named_modules():
        if _is_gate(path, part) and any(len(value) == total for value in part.parameters() if value.ndim):
            return part
    raise ValueError(
        f"no gate with a row for each of the {total} experts of {name} is beside them, by the name of 'gate' or "
        "'router', so that what would go with an expert is not known; exclude them"
    )


def _slices(module: nn.Module, name: str, total: int) -> list[tuple[str, int]]:
    """Return the parameters and buffers with one entry for each expert, and the dimension that has them.

    They are those of the experts, of the gate and its parts, and of the module around both, such as a bias of the gate.
    """
    around = _mixture_of(name)
    found = []
    for path, part in module.get_submodule(around).named_modules():
        whole = f"{around}.{path}".strip(".")
        if whole == name or not path or _is_gate(path, part):
            own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            for key, value in own:
                dim = 1 if value.shape[:1] == (1,) and value.ndim > 1 else 0
                if value.ndim and value.shape[dim] == total:
                    found.append((f"{whole}.{key}".strip("."), dim))
    return found


def _counters(module: nn.Module, name: str, total: int, are_all: bool) -> list[tuple[str, str]]:
    """Return the attributes that hold the number of experts, by name of the module; of those around, if all change."""
    around = _mixture_of(name)
    inside = [f"{around}.{path}".strip(".") for path, _ in module.get_submodule(around).named_modules()]
    steps = around.split(".") if around else []
    outside = [".".join(steps[:end]) for end in range(len(steps))] if are_all else []
    found = []
    for path in [*inside, *outside]:
        own = vars(module.get_submodule(path))
        found += [(path, key) for key in _COUNTS if own.get(key) == total]
        if are_all and "config" in own:  # one for all layers
            found += [(path, f"config.{key}") for key in _COUNTS if vars(own["config"]).get(key) == total]
    return found
