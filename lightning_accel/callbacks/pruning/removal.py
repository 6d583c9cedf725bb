"""Removal of channels, blocks or experts at one step, by what calibration data show."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_accel.callbacks.compression_phase import announce_removal
from lightning_accel.callbacks.deployment.copies import WholeCopy, run_in_first_process
from lightning_accel.callbacks.deployment.deployed import Deployed
from lightning_accel.callbacks.pruning.channels import (
    describe_use,
    find_uses,
    own_parameters,
    require_strategy,
    rewrap_ddp,
    warn_of_few_left,
)
from lightning_accel.callbacks.trainer_callbacks import averaged_modules
from lightning_accel.compress.channels.blocks import plan_without_blocks
from lightning_accel.compress.channels.choice import choose_channels, score_channels_on_data
from lightning_accel.compress.channels.experts import plan_without_experts
from lightning_accel.compress.channels.groups import find_channel_groups
from lightning_accel.compress.channels.plan import CHANNEL_PLAN, ChannelPlan, apply_plan_
from lightning_accel.compress.uncompiled import uncompiled
from lightning_accel.ops.names import Exclusion, find_excluded

Rows = list[dict[str, Any]]
Planned = tuple[ChannelPlan, Rows, dict[str, str]]  # the rows are those of report_rows; reasons for what stays, by name
FindCalls = Callable[[L.LightningModule, L.Trainer], Deployed]


class PlannedRemoval:
    """Remove parts of a module once, by a plan that the first process makes with a whole copy.

    Args:
        structure: ``"channel"``, ``"width"``, ``"block"`` or ``"expert"``.
        exclude: names, patterns or classes of what stays.
        target: share of the parts to remove.
        find_calls: finds the deployed part of a copy, with calibration calls of it.
    """

    def __init__(self, structure: str, exclude: Sequence[Exclusion], target: float, find_calls: FindCalls) -> None:
        self.structure, self.exclude, self.target = structure, exclude, target
        self.find_calls = find_calls
        self.plan = ChannelPlan()
        self.left_out: dict[str, str] = {}
        self._rows: Rows = []
        self._excluded: list[str] = []

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, str]:
        require_strategy(trainer, pl_module)
        with uncompiled(pl_module) as plain:
            self._excluded = [*find_excluded(plain, self.exclude)]
        return self.left_out

    def make_plan(self, found: Deployed) -> Planned:
        """Make the plan for a deployed module, with a row of the report for each layer, block or mixture.

        Raises:
            ValueError: if too little can be removed.
        """
        prefix = f"{found.name}." if found.name else ""
        exclude = sorted(one.removeprefix(prefix) for one in self._excluded if one.startswith(prefix))
        plan, rows, left_out = _PLANNERS[self.structure](found, self.target, exclude)
        rows = [row | {"name": prefix + row["name"]} for row in rows]
        return plan.prefixed(found.name), rows, {prefix + name: reason for name, reason in left_out.items()}

    def prune_to(self, trainer: L.Trainer, pl_module: L.LightningModule, sparsity: float) -> None:
        made: list[Planned] = []
        copied = partial(WholeCopy(pl_module).make, trainer, pl_module)

        def run(module: L.LightningModule) -> None:
            made.append(self.make_plan(self.find_calls(module, trainer)))

        run_in_first_process(trainer, copied, run, "prune")
        planned = cast(Planned, trainer.strategy.broadcast(made[0] if made else None))
        self.plan, self._rows, self.left_out = planned
        before = sum(one.numel() for one in pl_module.parameters())
        apply_plan_(pl_module, self.plan, trainer.optimizers)
        for averaged in averaged_modules(trainer):
            apply_plan_(averaged, self.plan)
        rewrap_ddp(trainer, pl_module)
        announce_removal(trainer, pl_module)
        after = sum(one.numel() for one in pl_module.parameters())
        rank_zero_info(f"structure={self.structure!r}, {self.target:g}: {after:,} of {before:,} weights are left")

    def before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Do nothing: what is removed needs no care."""

    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Do nothing: what is removed needs no care."""

    def sparsity(self) -> float:
        return self.target if self.plan else 0.0

    def report_rows(self) -> Rows:
        """Return a row for each layer, list of blocks or mixture, as :meth:`Pruning.report_rows`."""
        return self._rows

    def state_dict(self) -> dict[str, Any]:
        plan = self.plan.state_dict() if self.plan else None
        return {"rows": self._rows, "left_out": self.left_out, CHANNEL_PLAN: plan}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows, self.left_out = state["rows"], state["left_out"]
        if state[CHANNEL_PLAN]:
            self.plan = ChannelPlan.of_state(state[CHANNEL_PLAN])

    def rebuild(self, pl_module: nn.Module, state: dict[str, Any]) -> None:
        """Remove from a module that is whole what the one of the checkpoint lacks."""
        if state[CHANNEL_PLAN]:
            plan = ChannelPlan.of_state(state[CHANNEL_PLAN])
            if not plan.is_applied_to(pl_module):
                apply_plan_(pl_module, plan)


def _plan_channels(found: Deployed, sparsity: float, exclude: Sequence[str], exact: bool = True) -> Planned:
    module, (args, kwargs) = found.module, found.inputs[0]
    groups = find_channel_groups(module, args, kwargs, exclude, exact)
    scores = score_channels_on_data(module, groups, found.inputs)
    multiples = {layer.name: layer.multiple for layer in groups.layers}
    removed = choose_channels(scores, sparsity, round_to=multiples)
    if not any(removed.values()):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in groups.left_out.items())
        raise ValueError(f"{type(module).__name__} has no channels that can be removed: {reasons or 'too few of them'}")
    counts = {layer.name: (len(layer) - len(removed[layer.name]), len(layer)) for layer in groups.layers}
    _warn_of_few_left(found, counts, sparsity, "channels")
    plan = groups.plan(module, {name: gone for name, gone in removed.items() if gone})
    rows, uses = [], find_uses(module, groups)
    sizes = {layer.name: len(layer) for layer in groups.layers}
    for name, own in own_parameters(module, uses).items():
        left = sum(math.prod(plan.shape_after(key)) if key in plan.kept else one.numel() for key, one in own.items())
        share, note = describe_use(uses[name], sizes, removed)
        row = _row(name, sum(one.numel() for one in own.values()), share, f"{note} left")
        shape = list(max(own.values(), key=lambda value: value.ndim).shape)
        rows.append(row | {"shape": shape, "nonzero": left})
    return plan, rows, groups.left_out


def _plan_blocks(found: Deployed, sparsity: float, exclude: Sequence[str]) -> Planned:
    plan, blocks = plan_without_blocks(found.module, found.inputs, sparsity, exclude)
    counts = {name: (len(kept), plan.lengths[name]) for name, kept in plan.blocks.items()}
    _warn_of_few_left(found, counts, sparsity, "blocks")
    rows = []
    for name, influence in blocks.influence.items():
        owner, _, key = name.rpartition(".")
        keys = [own for own, _ in found.module.get_submodule(owner).named_children()]
        gone = keys.index(key) not in plan.blocks.get(owner, range(len(keys)))
        parameters = sum(one.numel() for one in found.module.get_submodule(name).parameters())
        rows.append(_row(name, parameters, float(gone), f"influence {influence:.4f}{', removed' if gone else ''}"))
    return plan, rows, blocks.left_out


def _plan_experts(found: Deployed, sparsity: float, exclude: Sequence[str]) -> Planned:
    plan, load = plan_without_experts(found.module, found.inputs, sparsity, exclude)
    rows, counts = [], {}
    for name, scores in load.items():
        own = dict(found.module.get_submodule(name).named_parameters())
        left = next(len(plan.kept[f"{name}.{key}"][0]) for key in own if f"{name}.{key}" in plan.kept)
        parameters, share = sum(one.numel() for one in own.values()), 1 - left / len(scores)
        rows.append(_row(name, parameters, share, f"{left} of {len(scores)} experts left"))
        counts[name] = left, len(scores)
    _warn_of_few_left(found, counts, sparsity, "experts")
    return plan, rows, {}


def _warn_of_few_left(found: Deployed, counts: dict[str, tuple[int, int]], sparsity: float, what: str) -> None:
    prefix = f"{found.name}." if found.name else ""
    warn_of_few_left({prefix + name: count for name, count in counts.items()}, f"{sparsity:g} leaves", what)


def _row(name: str, parameters: int, sparsity: float, note: str) -> dict[str, Any]:
    left = round(parameters * (1 - sparsity))
    return {"name": name, "parameters": parameters, "nonzero": left, "sparsity": sparsity, "note": note}


_PLANNERS: dict[str, Callable[[Deployed, float, Sequence[str]], Planned]] = {
    "channel": _plan_channels,
    "width": partial(_plan_channels, exact=False),
    "block": _plan_blocks,
    "expert": _plan_experts,
}
REMOVALS = tuple(_PLANNERS)
