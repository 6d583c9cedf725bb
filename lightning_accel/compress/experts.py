"""Removal of experts from a mixture of experts. Shapes: E experts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accel.compress.batchnorm import run_batch
from lightning_accel.compress.channel_plan import ChannelPlan, apply_plan_, make_channel_plan
from lightning_accel.nn import MixtureOfExperts
from lightning_accel.ops.evaluation import evaluating


def plan_of_experts(mixture: MixtureOfExperts, keep: Sequence[int]) -> ChannelPlan:
    """Make a plan that keeps only the experts ``keep`` of ``mixture``, and lowers the k of its gate if it must.

    Raises:
        ValueError: if ``keep`` is empty, repeats an expert, names one that does not exist, or leaves groups of experts
            of unequal size.
        TypeError: if the parameters of the gate do not have a row for each expert.
    """
    gate: Any = mixture.gate
    number = mixture.num_experts
    kept = sorted(keep)
    if not kept or len(set(kept)) < len(kept) or kept[0] < 0 or kept[-1] >= number:
        raise ValueError(f"keep must name one or more of experts 0 to {number - 1}, each once; got {list(keep)}")
    rows = dict([*gate.named_parameters(recurse=False), *gate.named_buffers(recurse=False)])
    if not {"k", "num_experts"} <= vars(gate).keys() or any(one.shape[:1] != (number,) for one in rows.values()):
        raise TypeError(
            f"experts can be taken from a gate whose parameters and buffers have a row for each of them, and which "
            f"knows num_experts and k, as TopKGate; got {type(gate).__name__}"
        )
    groups = getattr(gate, "num_groups", 1)
    of_group = [sum(one * groups // number == group for one in kept) for group in range(groups)]
    k = min(gate.k, len(kept))
    if len(set(of_group)) > 1 or k > of_group[0] * getattr(gate, "top_groups", 1):
        raise ValueError(
            f"the gate chooses among {groups} groups of experts, which must stay equally large and hold k={k} in "
            f"those that it visits; {of_group} would be left. Keep as many of each"
        )
    gone = set(range(number)) - set(kept)
    experts: Any = mixture.experts
    names = [f"experts.{name}" for name in experts.expert_parameters if getattr(experts, name) is not None]
    names += [f"gate.{name}" for name in rows]
    attributes = {("", "num_experts"): len(kept), ("gate", "num_experts"): len(kept), ("gate", "k"): k}
    return make_channel_plan(mixture, {(name, 0): gone for name in names}, attributes)


def remove_experts_(
    mixture: MixtureOfExperts, keep: Sequence[int], optimizers: Sequence[Optimizer] = ()
) -> ChannelPlan:
    """Remove all experts but ``keep`` from ``mixture``, with their rows of the gate and their optimizer state.

    Returns:
        The plan, which can be applied to another mixture of the same sizes.

    Raises:
        ValueError: as :func:`plan_of_experts`.
        TypeError: as :func:`plan_of_experts`.
    """
    plan = plan_of_experts(mixture, keep)
    apply_plan_(mixture, plan, optimizers)
    return plan


def busiest_experts(load: Tensor, number: int) -> list[int]:
    """Return the sorted indices of the ``number`` experts with the highest ``load``, (E,).

    The load is that of :func:`measure_expert_load`, or of :class:`~lightning_accel.nn.expert_load.LoadStatistics`.

    Raises:
        ValueError: if ``number`` is not in [1, E].

    >>> busiest_experts(torch.tensor([0.1, 0.5, 0.4]), 2)
    [1, 2]
    """
    if not 1 <= number <= len(load):
        raise ValueError(f"number must be in [1, {len(load)}], the experts that there are; got {number}")
    return sorted(load.argsort(descending=True, stable=True)[:number].tolist())


@torch.no_grad()
def measure_expert_load(
    module: nn.Module, batches: Iterable[Any], call: Callable[[nn.Module, Any], object] | None = None
) -> dict[str, Tensor]:
    """Measure the share of assignments of each expert, (E,) float64, by name of the mixture in ``module``.

    Args:
        module: module to run in evaluation mode; its mode is restored.
        batches: batches, each a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        call: function that runs the module on a batch of another type.

    Raises:
        ValueError: if the module has no mixture of experts, or none ran.
    """
    mixtures = {name: part for name, part in module.named_modules() if isinstance(part, MixtureOfExperts)}
    counts: dict[str, Tensor] = {}
    handles = [part.register_forward_hook(_Count(counts, name)) for name, part in mixtures.items()]
    try:
        with evaluating(module):
            for batch in batches:
                run_batch(module, batch) if call is None else call(module, batch)
    finally:
        for handle in handles:
            handle.remove()
    if not counts:
        raise ValueError(
            f"{type(module).__name__} has {len(mixtures)} mixtures of experts, of which none ran on these batches"
        )
    return {name: count / count.sum().clamp(min=1) for name, count in counts.items()}


class _Count:
    def __init__(self, counts: dict[str, Tensor], name: str) -> None:
        self.counts, self.name = counts, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        new = output.report.expert_counts.double().cpu()
        self.counts[self.name] = self.counts.get(self.name, torch.zeros_like(new)) + new
