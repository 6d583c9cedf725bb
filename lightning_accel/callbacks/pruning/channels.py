"""Pruning of whole channels: held at zero while the sparsity grows, then removed from the module in training."""

import gc
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_accel._private.lightning import data_source_of, starts_scripts
from lightning_accel.callbacks.deployment.copies import WholeCopy, run_in_first_process
from lightning_accel.callbacks.deployment.deployed import find_deployed
from lightning_accel.callbacks.trainer_callbacks import averaged_modules
from lightning_accel.compress.channels.choice import choose_channels, score_channels
from lightning_accel.compress.channels.groups import ChannelGroups, find_channel_groups
from lightning_accel.compress.channels.plan import CHANNEL_PLAN, ChannelPlan, apply_plan_
from lightning_accel.compress.pruning.masks import Criterion
from lightning_accel.compress.uncompiled import uncompiled
from lightning_accel.ops.names import Exclusion, find_excluded, list_some
from lightning_accel.strategies.data_parallel import DataParallelStrategy

Uses = dict[str, tuple[bool, list[str]]]  # by module: whether it outputs channels, or only takes them; of which layers


class ChannelStructure:
    """Set the weights of whole channels to zero and finally remove them, shrinking the module and its optimizers.

    Once the target sparsity is reached, parameters of the live module are replaced by smaller ones of the same
    names and order; optimizers keep the moments of the remaining entries, and a strategy that wraps the module
    wraps it again. This does not change what the module computes, unless the channels are normalized over. Every
    layer loses the same share of its channels, even with ``scope="erk"``, which is a rule for single weights.

    Args:
        criterion: as that of :class:`~lightning_accel.Pruning`, like all that follow.
        scope: ``"layer"`` or ``"global"``.
        exclude: names, patterns or classes.
        target: final share of the channels to remove.
        module: name of the submodule whose channels are removed; by default the one that ``validation_step`` calls.
        round_to: round the number of channels that each layer keeps up to a multiple of this.
        exact: whether channels that are normalized over stay.
    """

    def __init__(
        self,
        criterion: Criterion,
        scope: Literal["layer", "global"],
        exclude: Sequence[Exclusion],
        target: float,
        *,
        module: str | None = None,
        round_to: int = 1,
        exact: bool = True,
    ) -> None:
        self.criterion, self.scope, self.exclude, self.target = criterion, scope, exclude, target
        self.module = module
        self.round_to = round_to
        self.exact = exact
        self.groups: ChannelGroups | None = None  # None once the channels are removed
        self.removed: dict[str, list[int]] = {}  # channels held at zero, or removed, by layer name
        self.plan = ChannelPlan()
        self._sizes: dict[str, int] = {}  # original number of channels of each layer
        self._uses: Uses = {}
        self._weights: dict[str, int] = {}  # original number of parameters of each module in _uses
        self._left_out: dict[str, str] = {}
        self._loaded: dict[str, Any] | None = None
        self._indices: list[tuple[nn.Parameter, int, Tensor]] = []  # entries held at zero
        self._pl_module: L.LightningModule | None = None

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, str]:
        self._pl_module = pl_module
        require_strategy(trainer, pl_module)
        if self._loaded is not None:
            self._restore(self._loaded)
            self._loaded = None
        if self.plan and self.plan.is_applied_to(pl_module):
            return self._left_out
        if self.plan:
            raise ValueError(
                f"this callback has removed channels of another {type(pl_module).__name__}; give this one a Pruning "
                "of its own, in a new Trainer"
            )
        self.groups = self._find(trainer, pl_module)
        self._left_out = self.groups.left_out
        self._sizes = {layer.name: len(layer) for layer in self.groups.layers}
        self._multiples = {layer.name: math.lcm(self.round_to, layer.multiple) for layer in self.groups.layers}
        self._uses = find_uses(pl_module, self.groups)
        own = own_parameters(pl_module, self._uses)
        self._weights = {name: sum(one.numel() for one in values.values()) for name, values in own.items()}
        if not self.groups.layers:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._left_out.items())
            raise ValueError(f"{type(pl_module).__name__} has no channels that can be removed: {reasons}")
        if unknown := [name for name in self.removed if name not in self._sizes]:
            raise ValueError(
                f"the checkpoint has removed channels of {', '.join(unknown)}, which this module does not have; resume "
                "with the module and the exclusions of the run that wrote it"
            )
        self._require_effect()
        self._update_indices(pl_module)
        return self._left_out

    def _require_effect(self) -> None:
        any_scores = {name: torch.arange(size, dtype=torch.float64) for name, size in self._sizes.items()}
        gone = choose_channels(any_scores, self.target, "layer", self._multiples)
        if self.target and not any(gone.values()):
            raise ValueError(
                f"round_to={self.round_to} lets no channel go at a target of {self.target}; the layers have "
                f"{', '.join(map(str, self._sizes.values()))}, and keep multiples of "
                f"{', '.join(map(str, self._multiples.values()))}. Lower round_to, or raise the target; where it "
                "is 1, fused experts need the multiples"
            )
        self._warn_of_few_left(gone, " on average" if self.scope == "global" else "")

    def _warn_of_few_left(self, gone: Mapping[str, Sequence[int]], how: str = "") -> None:
        counts = {name: (size - len(gone[name]), size) for name, size in self._sizes.items()}
        warn_of_few_left(counts, f"{self.target:g} leaves{how}")

    def prune_to(self, trainer: L.Trainer, pl_module: L.LightningModule, sparsity: float) -> None:
        if self.groups is None:
            return
        scores = score_channels(pl_module, self.groups, self.criterion)
        chosen = choose_channels(scores, sparsity, self.scope, self._multiples)
        self.removed = trainer.strategy.broadcast(chosen)  # processes may round sums differently
        self._update_indices(pl_module)
        self._zero(trainer, with_moments=True)

    def before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        with torch.no_grad():
            for parameter, dim, index in self._indices:
                if parameter.grad is not None:
                    parameter.grad.index_fill_(dim, index, 0)

    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.groups is not None:
            self._zero(trainer, with_moments=False)  # moments stay zero, since these entries get no gradient

    def remove_channels(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.groups is None:
            return
        if self.scope == "global":
            self._warn_of_few_left(self.removed)
        plan = self.groups.plan(pl_module, {name: gone for name, gone in self.removed.items() if gone})
        apply_plan_(pl_module, plan, trainer.optimizers)
        for averaged in averaged_modules(trainer):
            apply_plan_(averaged, plan)
        self.plan = plan
        self.groups, self._indices = None, []
        rewrap_ddp(trainer, pl_module)

    def sparsity(self) -> float:
        return sum(map(len, self.removed.values())) / max(1, sum(self._sizes.values()))

    def report_rows(self) -> list[dict[str, Any]]:
        """Return a row per module that loses weights; ``parameters`` is the original size, ``note`` what remains."""
        rows = []
        own = {} if self._pl_module is None else own_parameters(self._pl_module, self._uses)
        for name, parameters in self._weights.items():
            values = own.get(name, {}).values()
            share, note = describe_use(self._uses[name], self._sizes, self.removed)
            rows.append(
                {
                    "name": name,
                    "shape": list(max(values, key=lambda value: value.ndim).shape) if values else [],
                    "parameters": parameters,
                    "nonzero": sum(int(value.count_nonzero()) for value in values),
                    "sparsity": share,
                    "note": note + (" left" if self.plan else " not zero"),
                }
            )
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {
            "removed": self.removed,
            "sizes": self._sizes,
            "weights": self._weights,
            "uses": self._uses,
            "left_out": self._left_out,
            CHANNEL_PLAN: self.plan.state_dict() if self.plan else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def rebuild(self, pl_module: nn.Module, state: dict[str, Any]) -> None:
        """Remove the channels that the checkpoint lacks from a full-size module; leave one already small unchanged."""
        if state[CHANNEL_PLAN]:
            plan = ChannelPlan.of_state(state[CHANNEL_PLAN])
            if not plan.is_applied_to(pl_module):
                apply_plan_(pl_module, plan)

    def _restore(self, state: dict[str, Any]) -> None:
        self.removed = {name: list(gone) for name, gone in state["removed"].items()}
        self._sizes = dict(state["sizes"])
        self._weights = dict(state["weights"])
        self._uses = dict(state.get("uses", {name: (True, [name]) for name in self._weights}))  # of earlier versions
        self._left_out = dict(state["left_out"])
        if state[CHANNEL_PLAN]:
            self.plan = ChannelPlan.of_state(state[CHANNEL_PLAN])

    def _find(self, trainer: L.Trainer, pl_module: L.LightningModule) -> ChannelGroups:
        """Find the channel groups in the first process and broadcast them; raise a failure in every process."""
        found: list[ChannelGroups] = []
        make = partial(WholeCopy(pl_module).make, trainer, pl_module)
        run_in_first_process(trainer, make, lambda made: found.append(self._find_in(made, trainer)), "find channels")
        return cast(ChannelGroups, trainer.strategy.broadcast(found[0] if found else None))

    def _find_in(self, made: L.LightningModule, trainer: L.Trainer) -> ChannelGroups:
        datamodule: Any = getattr(trainer, "datamodule", None)
        found = find_deployed(made, _loader(trainer), self.module, datamodule=datamodule)
        try:
            exclude = _excluded_within(made, self.exclude, found.name)
            groups = find_channel_groups(found.module, *found.inputs[0], exclude=exclude, exact=self.exact)
        except TypeError as error:
            raise TypeError(f"{error}. Pruning(module=...) names another") from error
        return groups.prefixed(found.name)

    def _update_indices(self, pl_module: L.LightningModule) -> None:
        assert self.groups is not None
        with uncompiled(pl_module):
            parameters = dict(pl_module.named_parameters(remove_duplicate=False))
        indices: dict[tuple[str, int], list[int]] = {}
        for layer, numbers in self.removed.items():
            for place, rows in self.groups[layer].slices.items():
                if place[0] in parameters and numbers:
                    indices.setdefault(place, []).extend(rows[numbers].ravel().tolist())
        self._indices = [
            (parameters[name], dim, torch.tensor(index, device=parameters[name].device))
            for (name, dim), index in indices.items()
        ]

    @torch.no_grad()
    def _zero(self, trainer: L.Trainer, with_moments: bool) -> None:
        for parameter, dim, index in self._indices:
            parameter.index_fill_(dim, index, 0)
            if with_moments:
                for optimizer in trainer.optimizers:
                    for value in optimizer.state.get(parameter, {}).values():
                        if isinstance(value, Tensor) and value.shape == parameter.shape:
                            value.index_fill_(dim, index, 0)


def find_uses(module: nn.Module, groups: ChannelGroups) -> Uses:
    """Return the modules that hold weights of channels, in their order."""
    makes: dict[str, dict[str, None]] = {}
    takes: dict[str, dict[str, None]] = {}
    with uncompiled(module) as plain:
        parameters = dict(plain.named_parameters(remove_duplicate=False))
        names = [name for name, _ in plain.named_modules(remove_duplicate=False)]
    for layer in groups.layers:
        for parameter in (name for name, _ in layer.slices if name in parameters):
            found = makes if parameter in layer.made_by else takes
            found.setdefault(parameter.rpartition(".")[0], {})[layer.name] = None
    layers = takes | makes
    return {name: (name in makes, list(layers[name])) for name in names if name in layers}


def own_parameters(module: nn.Module, names: Iterable[str]) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters of modules by their names, a parameter of several with the first one only."""
    own: dict[str, dict[str, nn.Parameter]] = {}
    seen: set[int] = set()
    with uncompiled(module) as plain:
        for name in names:
            values = plain.get_submodule(name.partition("#")[0]).named_parameters(name, recurse=False)
            new = {key: value for key, value in values if id(value) not in seen}
            seen.update(map(id, new.values()))
            own |= {name: new} if new else {}
    return own


def describe_use(
    use: tuple[bool, list[str]], sizes: Mapping[str, int], removed: Mapping[str, Sequence[int]]
) -> tuple[float, str]:
    """Return the share of a module's channels that is removed, and how many remain."""
    outputs, layers = use
    size = sum(sizes[one] for one in layers)
    gone = sum(len(removed.get(one, ())) for one in layers)
    return gone / size, f"{size - gone} of {size} {'channels' if outputs else 'input channels'}"


def require_strategy(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Reject strategies under which the shapes of parameters cannot change.

    Raises:
        TypeError: saying which do.
    """
    strategy = trainer.strategy
    in_pieces = any(one.is_meta or isinstance(one, DTensor) for one in pl_module.parameters())
    if in_pieces or not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, DataParallelStrategy)):
        raise TypeError(
            f"channels cannot be removed in training under {type(strategy).__name__}, which keeps parameters in pieces "
            "whose sizes it does not change. Use strategy='ddp' or 'accel_ddp', or remove them after training from a "
            "whole copy: compress.find_channel_groups, compress.apply_plan_"
        )
    if not starts_scripts(strategy):
        raise TypeError(
            "channels cannot be removed in processes that are spawned or forked: the module of this one would not "
            "fit their weights in the end. Use strategy='ddp' or 'accel_ddp', started as a script"
        )


def warn_of_few_left(counts: Mapping[str, tuple[int, int]], leaves: str, what: str = "channels") -> None:
    """Warn of layers that keep one or two, or less than 5 %, of at least eight times as many.

    Args:
        counts: how many each layer keeps, and how many it has, by name.
        leaves: the share to remove and a verb, such as "0.9 leaves".
        what: is removed.
    """
    few = [
        f"{left} of {size} {what} of {name}"
        for name, (left, size) in counts.items()
        if left <= max(2, size // 20) and 8 * left <= size
    ]
    if few:
        hint = " (half of the channels of all layers are three quarters of the weights)" * (what == "channels")
        rank_zero_warn(
            f"a sparsity of {leaves} {list_some(few)}, which may be too few to learn anything: lower "
            f"sparsity{hint}, or name in exclude what is to stay whole"
        )


def rewrap_ddp(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Wrap the module in DDP again, since its buckets and hooks refer to the old parameters."""
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and strategy.model is not pl_module:
        strategy.model = pl_module
        gc.collect()  # removes the old wrapper's hooks on parameters that stay
        strategy.configure_ddp()


def _loader(trainer: L.Trainer) -> Any:
    """Return a new validation loader, or else training loader, since none is set up yet."""
    loop = trainer.fit_loop
    sources = data_source_of(loop.epoch_loop.val_loop), data_source_of(loop)
    return next(source.dataloader() for source in sources if source.is_defined())


def _excluded_within(module: L.LightningModule, exclude: Sequence[str | type[nn.Module]], name: str) -> list[str]:
    """Return the names, within the submodule ``name``, of what ``exclude`` matches."""
    prefix = f"{name}." if name else ""
    found = find_excluded(module, exclude)
    return sorted(one.removeprefix(prefix) for one in found if one.startswith(prefix))
