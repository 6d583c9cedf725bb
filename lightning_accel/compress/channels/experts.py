"""Removal of experts from mixtures, by how many tokens the gate sends them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_accel.compress.calibration.change import record_products
from lightning_accel.compress.calibration.products import Matrix
from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.channels.plan import ChannelPlan, make_channel_plan
from lightning_accel.compress.pruning.prunable import is_stacked
from lightning_accel.ops.names import Exclusion, find_excluded

_COUNTS = "num_experts", "num_local_experts", "n_routed_experts"
_CHOSEN = "k", "top_k", "num_experts_per_tok"


def measure_expert_load(
    module: nn.Module, inputs: Sequence[Inputs], exclude: Sequence[Exclusion] = ()
) -> dict[str, Tensor]:
    """Count the tokens that each expert of the mixtures in a module gets, (E,) int64 by name of the experts' module.

    Mixtures are those with one matrix for each expert in one parameter, as ours and the fused experts of transformers.

    Args:
        module: any module on one device.
        inputs: positional and keyword arguments of calls.
        exclude: names or patterns of mixtures, or of modules around them, or classes, that are left out.
    """
    excluded = find_excluded(module, exclude)
    owners: dict[str, nn.Parameter] = {}
    for name, one in module.named_modules():
        stacked = [value for value in one.parameters(recurse=False) if is_stacked(one, value)]
        if stacked and name not in excluded:
            owners[name] = stacked[0]
    load = {name: torch.zeros(len(weight), dtype=torch.int64) for name, weight in owners.items()}

    def record(matrix: Matrix, x: Tensor) -> None:
        load[matrix.name][matrix.offset // owners[matrix.name].stride(0)] += len(x)

    if owners:
        record_products(module, inputs, owners, record)
    return load


def plan_without_experts(
    module: nn.Module, inputs: Sequence[Inputs], sparsity: float, exclude: Sequence[Exclusion] = ()
) -> tuple[ChannelPlan, dict[str, Tensor]]:
    """Plan to remove the experts that get the fewest tokens, and return the load, too.

    Rows of the gate, and what else it holds for each expert, go with them, so that tokens go to the best of the experts
    that stay. Each mixture loses the same share, and keeps as many experts as a token is sent to.

    Args:
        module: as in :func:`measure_expert_load`, like all that follow but ``sparsity``; it is not changed.
        inputs: calls.
        sparsity: share in (0, 1) of the experts of each mixture, rounded.
        exclude: mixtures that stay.

    Raises:
        ValueError: if there is no mixture, one has no gate that is found, gets no token, or sends all tokens to all its
            experts, or too few experts would stay.
    """
    load = measure_expert_load(module, inputs, exclude)
    if not load:
        raise ValueError(
            f"{type(module).__name__} has no mixture with the weights of its experts in one parameter; experts that "
            "are modules of their own, and dense layers, stay: take structure='channel' or 'block'"
        )
    gone: dict[tuple[str, int], list[int]] = {}
    attributes: dict[tuple[str, str], int] = {}
    for name, counts in load.items():
        total, count = len(counts), round(sparsity * len(counts))
        if not counts.any() or len(counts.unique()) == 1:
            what = f"{counts[0]} tokens for each expert" if counts.any() else "no token"
            raise ValueError(f"which experts of {name} matter is not known: the calibration data brought {what}")
        gate = _require_gate(module, name, total)
        stay = max((int(getattr(gate, key, 1)) for key in _CHOSEN), default=1)
        if total - count < stay or not count:
            raise ValueError(
                f"a share of {sparsity:g} of the {total} experts of {name} leaves {total - count}; it must be at least "
                f"one less than all and leave {stay}, to which a token is sent"
            )
        chosen = counts.argsort(stable=True)[:count].sort().values.tolist()
        gone |= dict.fromkeys(_slices(module, name, total), chosen)
        attributes |= dict.fromkeys(_counters(module, name, total, are_all=not exclude), total - count)
    return make_channel_plan(module, gone, attributes), load


def _mixture_of(name: str) -> str:
    return name.rpartition(".")[0]


def _is_gate(name: str, part: nn.Module) -> bool:
    return name.rpartition(".")[2] in ("gate", "router") or type(part).__name__.endswith(("Gate", "Router"))


def _require_gate(module: nn.Module, name: str, total: int) -> nn.Module:
    for path, part in module.get_submodule(_mixture_of(name)).named_modules():
        if _is_gate(path, part) and any(len(value) == total for value in part.parameters() if value.ndim):
            return part
    raise ValueError(
        f"no gate with a row for each of the {total} experts of {name} is beside them, by the name of 'gate' or "
        "'router', so that what would go with an expert is not known; exclude them"
    )


def _slices(module: nn.Module, name: str, total: int) -> list[tuple[str, int]]:
    """Return the parameters and buffers with one entry for each expert in dimension 0: of the experts, and the gate."""
    around = _mixture_of(name)
    found = []
    for path, part in module.get_submodule(around).named_modules():
        whole = f"{around}.{path}".strip(".")
        if whole == name or _is_gate(path, part):
            own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            found += [(f"{whole}.{key}", 0) for key, value in own if value.ndim and len(value) == total]
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
