"""Pruning by masks that keep weights at zero; each process masks its own shards."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_accel.callbacks.pruning.weight_part import (
    WeightPart,
    find_holders,
    local,
    num_processes,
    pack_bits,
    unpack_bits,
)
from lightning_accel.callbacks.trainer_callbacks import averaged_weights
from lightning_accel.compress.pruning.masks import (
    Criterion,
    Scope,
    choose_groups,
    choose_weights,
    counts_of_layers,
    parse_structure,
    score,
)
from lightning_accel.compress.pruning.prunable import find_prunable, is_stacked
from lightning_accel.compress.pruning.selection import Part, choose_lowest
from lightning_accel.ops.names import Exclusion, clean_name, list_some

_MAX_SCORE = 1e38  # its double is still finite
_MIN_COVERAGE = 0.75  # share of the values in matrices; below it, the target would mislead users
_EXPECTED_REASONS = (
    "excluded", "a bias", "a vector", "a number", "an embedding", "a normalisation", "a gate", "frozen",
)  # fmt: skip  # reasons that surprise nobody


class MaskStructure:
    """Set the weights with the lowest scores, single or in N:M groups, to zero until they are regrown."""

    def __init__(
        self, structure: str, criterion: Criterion, scope: Scope, exclude: Sequence[Exclusion], target: float
    ) -> None:
        self.structure = structure
        self.criterion, self.scope, self.exclude, self.target = criterion, scope, exclude, target
        self.pattern = parse_structure(structure)
        self.parts: list[WeightPart] = []
        self.pruned: dict[str, Tensor] = {}  # bool, for the shard on this process
        self.left_out: dict[str, str] = {}
        self.wants_gradients = False  # set before a step after which weights regrow
        self._gradients: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}  # pruned weights, over all processes
        self._loaded: dict[str, Any] | None = None
        self._holders: list[int] | None = None
        self._is_sharded = False
        self._device = torch.device("cpu")

    # ---- setting up

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, str]:
        found, self.left_out = find_prunable(pl_module, self.exclude)
        before = self.pruned
        self.parts = [WeightPart(*one) for one in found]
        self._device = trainer.strategy.root_device
        self._holders = None
        self._find_layout(trainer)
        self._exclude_unsupported()
        if not self.parts:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.left_out.items())
            raise ValueError(f"{type(pl_module).__name__} has no weight to prune: {reasons}")
        self._warn_of_low_coverage(pl_module)
        self._warn_of_few_left()
        self.pruned = {part.name: torch.zeros_like(part.value, dtype=torch.bool) for part in self._local_parts()}
        for name, mask in before.items():
            if name in self.pruned and self.pruned[name].shape == mask.shape:
                self.pruned[name].copy_(mask)
        self._count()
        if self._loaded is not None:
            self._apply_state()
        return dict(self.left_out)

    def _find_layout(self, trainer: L.Trainer) -> None:
        self._is_sharded = any(part.is_sharded for part in self.parts)
        if num_processes(trainer) == 1:
            return
        holders = find_holders(self.parts, self._device)
        anywhere_meta = torch.tensor(int(not all(part.is_held for part in self.parts)), device=self._device)
        dist.all_reduce(anywhere_meta, dist.ReduceOp.MAX)
        if bool(anywhere_meta):
            self._holders = holders
            self._is_sharded = True

    def _exclude_unsupported(self) -> None:
        self._leave_out({part.name: reason for part in self.parts if (reason := self._unsupported_reason(part))})

    def _leave_out(self, reasons: Mapping[str, str]) -> None:
        self.left_out |= reasons
        kept = [number for number, part in enumerate(self.parts) if part.name not in reasons]
        self.parts = [self.parts[number] for number in kept]
        if self._holders is not None:
            self._holders = [self._holders[number] for number in kept]

    def _warn_of_low_coverage(self, pl_module: L.LightningModule) -> None:
        """Warn if the target leaves out many values in matrices without the user's having excluded them."""
        missed = {
            name: parameter.numel()
            for name, parameter in pl_module.named_parameters()
            if not self.left_out.get(clean_name(name), "excluded").startswith(_EXPECTED_REASONS)
        }
        own = sum(part.numel for part in self.parts)
        share = own / (own + sum(missed.values()))
        if share < _MIN_COVERAGE:
            largest = sorted(missed, key=lambda name: -missed[name])[:3]
            described = "; ".join(f"{clean_name(name)}: {self.left_out[clean_name(name)]}" for name in largest)
            rank_zero_warn(
                f"Pruning covers {share:.0%} of the values in the matrices of {type(pl_module).__name__}, so that "
                f"{self.target * share:.0%} of them will be zero, not {self.target:.0%}. Left out are "
                f"{len(missed)} parameters, the largest of them {described}. Name what is to stay dense in exclude"
            )

    def _warn_of_few_left(self) -> None:
        """Warn of layers that keep fewer weights than outputs; N:M keeps N for each output or more."""
        if self.pattern is not None or self.scope == "global":  # which shows as weights are pruned
            return
        shapes = {part.name: part.shape for part in self.parts}
        counts = counts_of_layers(shapes, self.target, self.scope, self._stacked())
        few = []
        for part, gone in zip(self.parts, counts, strict=True):
            num_outputs = part.shape[1 if part.input_dim == 0 else 0]
            if gone and part.numel - gone < num_outputs:
                few.append(f"{part.numel - gone} of {part.numel} weights of {part.name}, for {num_outputs} outputs")
        if few:
            rank_zero_warn(
                f"a sparsity of {self.target:g} leaves {list_some(few)}: outputs without a weight are constant. Lower "
                "sparsity, or name these layers in exclude"
            )

    def _stacked(self) -> list[str]:
        return [part.name for part in self.parts if is_stacked(part.module, part.weight)]

    def _unsupported_reason(self, part: WeightPart) -> str | None:
        if self.pattern is not None:
            length, size = part.shape[part.input_dim], self.pattern[1]
            if length % size:
                return f"has {length} inputs, no multiple of {size}, for {self.structure}"
            if part.is_sharded_along_input:
                return f"its inputs are split over processes, so that groups of {self.structure} would be"
        return None

    def _local_parts(self) -> list[WeightPart]:
        return [part for part in self.parts if part.is_held]

    # ---- choosing

    def prune_to(self, trainer: L.Trainer, pl_module: L.LightningModule, sparsity: float) -> None:
        scores = {part.name: self._to_part(part, self._compute_scores(part)) for part in self.parts}
        if self.pattern is not None:
            share = sparsity / self.target
            dims = {part.name: part.input_dim for part in self.parts}
            chosen = choose_groups(scores, dims, self.pattern, share, self._reduce(), self._device)
        else:
            shapes = {part.name: part.shape for part in self.parts}
            chosen = choose_weights(scores, shapes, sparsity, self.scope, self._reduce(), self._device, self._stacked())
        for part in self._local_parts():
            mask = chosen[part.name]
            assert mask is not None
            self.pruned[part.name] = mask
        self._masks_changed(trainer)
        self._warn_of_empty_layers()

    def _compute_scores(self, part: WeightPart) -> Tensor | None:
        if not part.is_held:
            return None
        scores = score(self.criterion, part.name, part.value)
        # pruned weights sort first, so that masks are nested, whatever the criterion gives for zeros
        kept = self._keep_factor(part).float()
        return (scores.clamp(-_MAX_SCORE, _MAX_SCORE) * kept).add_(kept - 1, alpha=2 * _MAX_SCORE)

    def _keep_factor(self, part: WeightPart) -> Tensor:
        """Return the factor for a weight and its gradient: a float on CPUs, which is ten times as fast as a bool."""
        if part.name not in self._factors:
            kept = ~self.pruned[part.name]
            self._factors[part.name] = kept.to(part.value.dtype) if kept.device.type == "cpu" else kept
        return self._factors[part.name]

    def _to_part(self, part: WeightPart, scores: Tensor | None) -> Part:
        return Part(scores, part.numel, part.to_whole, part.counts)

    def _reduce(self) -> Any:
        return _sum_over_processes if self._is_sharded else None

    def regrow(self, trainer: L.Trainer, fraction: float) -> None:
        """Exchange a ``fraction`` of each layer's weights: drop the weakest, grow those with the largest gradients.

        Regrown weights start at zero. Source: Evci et al. 2020, section 3.
        """
        gradients, self._gradients = self._gradients, {}
        if not self._all_finite(gradients):
            return  # AMP skipped the step
        counts = [self._num_exchanged(part, fraction) for part in self.parts]
        for scores_of in (self._drop_scores, partial(self._growth_scores, gradients)):
            scores = [[self._to_part(part, scores_of(part) if part.is_held else None)] for part in self.parts]
            chosen = choose_lowest(scores, counts, self._reduce(), self._device)
            for part, (mask,) in zip(self.parts, chosen, strict=True):
                if mask is not None:  # dropped weights were not pruned, and grown ones were
                    self.pruned[part.name] = self.pruned[part.name] ^ mask
        self._masks_changed(trainer)

    def _all_finite(self, gradients: dict[str, Tensor]) -> bool:
        finite = all(bool(one.isfinite().all()) for one in gradients.values())
        flags = torch.tensor([float(finite), float(bool(gradients) or not self._local_parts())], device=self._device)
        if self._is_sharded:
            dist.all_reduce(flags, dist.ReduceOp.MIN)
        return bool(flags.min() > 0)

    def _num_exchanged(self, part: WeightPart, fraction: float) -> int:
        pruned = self._counts[part.name]
        return min(round(fraction * (part.numel - pruned)), pruned)

    def _drop_scores(self, part: WeightPart) -> Tensor:
        return part.value.abs().float().masked_fill(self.pruned[part.name], torch.inf)

    def _growth_scores(self, gradients: dict[str, Tensor], part: WeightPart) -> Tensor:
        """Return growth scores; the lowest are regrown first, active weights get infinity."""
        scores = -gradients.get(part.name, torch.zeros_like(part.value, dtype=torch.float32))
        return scores.masked_fill(~self.pruned[part.name], torch.inf)

    def _masks_changed(self, trainer: L.Trainer) -> None:
        if num_processes(trainer) > 1 and not self._is_sharded:
            self._broadcast_masks()
        self._count()
        self.apply(trainer)

    def _broadcast_masks(self) -> None:
        held = self._local_parts()
        packed = torch.cat([pack_bits(self.pruned[part.name]) for part in held]).to(self._device)
        dist.broadcast(packed, src=0)
        start = 0
        for part in held:
            length = -(-part.numel // 8)
            mask = unpack_bits(packed[start : start + length], part.shape)
            self.pruned[part.name] = mask.to(part.value.device)
            start += length

    def _count(self) -> None:
        self._factors = {}
        counted = [part.counts if self._is_sharded else part.is_held for part in self.parts]
        own = [
            int(self.pruned[part.name].sum()) if is_own else 0 for part, is_own in zip(self.parts, counted, strict=True)
        ]
        counts = torch.tensor(own, device=self._device)
        if self._is_sharded:
            dist.all_reduce(counts)
        self._counts = {part.name: count for part, count in zip(self.parts, counts.tolist(), strict=True)}

    def _warn_of_empty_layers(self) -> None:
        empty = [part.name for part in self.parts if self._counts[part.name] == part.numel]
        if empty:
            rank_zero_warn(
                f"no weight of {', '.join(empty)} is left, so that nothing passes it. Take scope='erk' or 'layer', a "
                "lower target, or exclude it"
            )

    # ---- keeping zeros

    def before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        members = {id(one) for group in optimizer.param_groups for one in group["params"]}
        mine = [part for part in self._local_parts() if id(part.weight) in members]
        with torch.no_grad():
            for part in mine:
                gradient = part.gradient()
                if gradient is None:
                    continue
                if self.wants_gradients:
                    self._gradients[part.name] = gradient.detach().abs().float()
                gradient.mul_(self._keep_factor(part))

    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with torch.no_grad():
            for part in self._local_parts():
                part.value.mul_(self._keep_factor(part))

    def apply(self, trainer: L.Trainer) -> None:
        """Set pruned entries of weights, optimizer moments and averaged weights to zero."""
        for one in cast(nn.Module, trainer.strategy.model).modules():
            if isinstance(one, FSDPModule):
                one.reshard()  # else a copy unsharded for an evaluation would be used
        with torch.no_grad():
            for part in self._local_parts():
                mask = self.pruned[part.name]
                part.value.masked_fill_(mask, 0)
                for optimizer in trainer.optimizers:
                    for value in optimizer.state.get(part.weight, {}).values():
                        if isinstance(value, Tensor) and local(value).shape == mask.shape:
                            local(value).masked_fill_(mask, 0)
        self.apply_to_averages(trainer)

    def apply_to_averages(self, trainer: L.Trainer) -> None:
        """Set pruned entries of weights that another callback averages to zero."""
        with torch.no_grad():
            for weights in averaged_weights(trainer):
                for name, mask in self.pruned.items():
                    if name in weights and weights[name].shape == mask.shape:
                        weights[name].masked_fill_(mask.to(weights[name].device), 0)

    # ---- reporting

    def sparsity(self) -> float:
        total = sum(part.numel for part in self.parts)
        return sum(self._counts.values()) / total if total else 0.0

    def report_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "name": part.name,
                "shape": list(part.shape),
                "parameters": part.numel,
                "nonzero": part.numel - self._counts[part.name],
                "sparsity": self._counts[part.name] / part.numel,
                "note": "",
            }
            for part in self.parts
        ]

    def masks(self) -> dict[str, Tensor]:
        """Return the masks of kept weights by name, bool, gathered on the CPU; all processes must call it."""
        return {
            part.name: ~self._gather(
                number, None if not part.is_held else self.pruned[part.name].to(torch.uint8)
            ).bool()
            for number, part in enumerate(self.parts)
        }

    def _gather(self, number: int, value: Tensor | None) -> Tensor:
        holder = None if self._holders is None else self._holders[number]
        return self.parts[number].gather(value, holder, self._device)

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        if not self.parts:
            return self._loaded or {}
        return {
            "structure": self.structure,
            "shapes": {part.name: list(part.shape) for part in self.parts},
            "pruned": {name: pack_bits(~kept) for name, kept in self.masks().items()},
            "gradients": {
                part.name: self._gather(number, self._gradients.get(part.name))
                for number, part in enumerate(self.parts)
                if self._gradients
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state
        if self.parts:
            self._apply_state()

    def _apply_state(self) -> None:
        state, self._loaded = self._loaded, None
        if not state:
            return
        shapes = {part.name: list(part.shape) for part in self.parts}
        if state["shapes"] != shapes or state["structure"] != self.structure:
            raise ValueError(_describe_difference(state, shapes, self.structure))
        for part in self._local_parts():
            whole = unpack_bits(state["pruned"][part.name], part.shape)
            self.pruned[part.name] = part.shard(whole)
        self._gradients = {part.name: part.shard(state["gradients"][part.name]) for part in self._local_parts()
                           if part.name in state["gradients"]}  # fmt: skip
        self._count()


def _describe_difference(state: dict[str, Any], shapes: dict[str, list[int]], structure: str) -> str:
    if state["structure"] != structure:
        return f"the checkpoint was pruned with structure={state['structure']!r}, this run has {structure!r}"
    saved = state["shapes"]
    names: Sequence[str] = [name for name in {**saved, **shapes} if saved.get(name) != shapes.get(name)]
    return (
        f"the checkpoint has masks for other weights than this run prunes: {', '.join(names[:5])}. Give Pruning the "
        "exclude of that run, or load the weights alone"
    )


def _sum_over_processes(value: Tensor) -> Tensor:
    dist.all_reduce(value)
    return value
