"""Pruning of a module while it trains."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accel.callbacks.compression_phase import announce_change, defer_best_checkpoints
from lightning_accel.callbacks.early_stopping import warn_of_early_end
from lightning_accel.callbacks.fit_end import failures_as_warnings
from lightning_accel.callbacks.pruning.channels import ChannelStructure
from lightning_accel.callbacks.pruning.masks import MaskStructure
from lightning_accel.callbacks.pruning.removal import REMOVALS, PlannedRemoval
from lightning_accel.callbacks.trainer_callbacks import averaged_modules, callbacks_of
from lightning_accel.compress.pruning.masks import (
    ScheduleName,
    Scope,
    drop_fraction_at,
    parse_structure,
    require_sparsity,
    sparsity_at,
)
from lightning_accel.ops.bounds import if_set, require_at_least, require_integers
from lightning_accel.ops.names import list_of_names, require_one_of
from lightning_accel.ops.renames import renamed_arguments

_DROP_FRACTION = 0.3  # share of the weights that regrowth exchanges at first, as in Evci et al. 2020


class Pruning(L.Callback):
    """Set a growing share of the weights to zero while the module trains, and keep them there.

    The callback holds the masks: parameters keep their names and order, so that optimizers, EMA, SWA, DDP and
    checkpoints see the unchanged module. Gradients are masked before each optimizer step (and before clipping), weights
    after it, and optimizer states and averages of pruned weights are zero too. ``sparsity`` is the final share of zeros
    among all prunable weights, see :func:`~lightning_accel.compress.find_prunable`: those of linear layers,
    convolutions, recurrent layers, attention and experts, including the last layer; embeddings, normalisations, biases
    and gates are left out. Everything left out is listed with its reason in ``left_out`` and in the log. Pruned weights
    stay zero unless ``regrowth`` exchanges them.

    Steps are optimizer steps: accumulated batches count once, and so do batches in which several optimizers step. Under
    DDP all processes use the masks of the first one; under FSDP2 and in a pipeline each has the masks of its shards,
    the same as a single process would have, except for scores so close that the order in which gradients are summed
    decides. A run that is killed and resumed in the same setting ends with equal bits; on another number of processes
    or strategy it continues with its masks. ``ModelCheckpoint`` selects no best model before the target is reached.
    ``pruning/sparsity`` is logged. A table of the layers is printed at the end.

    Zeros alone make neither files smaller nor computation faster; ``structure="channel"`` does both.

    Args:
        sparsity: final share of zeros, of weights or of channels; by default 0.9, or as N:M implies.
        structure: ``"unstructured"``; ``"2:4"`` or another N:M, which keeps N of M neighbours along a layer's input;
            ``"channel"``, which removes whole channels, without any change of what the module computes but that these
            are zero; ``"width"``, which also removes those that are normalized over, such as those of a transformer's
            residual stream: outputs change at the removal, so let the run train on for long.
        criterion: importance of a weight: ``"magnitude"``, or a function of a parameter's name and value (the shard on
            the process) that returns scores of that shape, of which the lowest are pruned.
        scope: prune equal shares of each ``"layer"``; or the lowest scores of all (``"global"``); or larger shares of
            larger layers (``"erk"``). N:M is the same in all layers.
        schedule: ``"cubic"`` (Zhu and Gupta 2017) from 0 at ``begin`` to ``sparsity`` at ``end``; ``"one_shot"``, all
            at ``begin``.
        begin: optimizer step, or share of the run if a float in [0, 1].
        end: optimizer step, or share of the run, after which nothing more is pruned.
        every_n_steps: number of steps between prunings, of which the last is at ``end``; by default a 32nd of the ramp.
        regrowth: ``"rigl"`` (Evci et al. 2020): at each pruning, up to ``end``, replace the weakest weights, at first
            30 % of them and then fewer, with those of the largest gradients. With ``schedule="one_shot"`` the run is
            sparse from ``begin`` on.
        exclude: names or patterns of parameters or submodules (``"head"``, ``"blocks.*.norm"``), or classes by name.
        module: name of the submodule whose channels are removed; by default the one that ``validation_step`` calls.
        round_to: keep a multiple of this number of channels in each layer, such as 8 for GPUs.

    Raises:
        ValueError: if an option is out of range or contradicts another; before training, if nothing can be pruned, the
            target would not be reached, there are several of these callbacks, or the length of the run is needed and
            unknown.
        TypeError: before training, under strategies that flatten parameters (FSDP1, DeepSpeed), and for weights that
            FSDP and tensor parallelism both shard.

    Attributes:
        left_out: why parameters are not pruned, by name.

    Source: ``cubic``: Zhu and Gupta 2017, To Prune, or Not to Prune, https://arxiv.org/abs/1710.01878, eq. 1; ``rigl``
    and ``erk``: Evci et al. 2020, Rigging the Lottery, https://arxiv.org/abs/1911.11134.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import Pruning
        >>> trainer = L.Trainer(max_epochs=20, callbacks=[Pruning(sparsity=0.9, exclude="head")])
    """

    @renamed_arguments(target="sparsity")
    def __init__(
        self,
        sparsity: float | None = None,
        *,
        structure: str = "unstructured",
        criterion: Literal["magnitude"] | Callable[[str, Tensor], Tensor] = "magnitude",
        scope: Scope = "erk",
        schedule: ScheduleName = "cubic",
        begin: int | float = 0.0,
        end: int | float = 0.6,
        every_n_steps: int | None = None,
        regrowth: Literal["rigl"] | None = None,
        exclude: Sequence[str | type[nn.Module]] = (),
        module: str | None = None,
        round_to: int = 1,
    ) -> None:
        super().__init__()
        if not isinstance(structure, str):
            raise TypeError(f"structure must be a text, such as 'unstructured' or 'channel'; got {structure!r}")
        self.removes_parts = structure in REMOVALS
        if structure not in ("channel", "width") and (module is not None or round_to != 1):
            raise ValueError(
                f"module and round_to are about channels that are removed: give structure='channel'; got {structure!r}"
            )
        require_integers(1, round_to=round_to)
        pattern = None if self.removes_parts else parse_structure(structure)
        self.target = require_sparsity(sparsity, pattern)
        require_one_of("scope", scope, get_args(Scope))
        require_one_of("schedule", schedule, get_args(ScheduleName))
        if not callable(criterion):
            require_one_of("criterion", criterion, ["magnitude"])
        _require_step_or_share("begin", begin)
        _require_step_or_share("end", end)
        if type(begin) is type(end) and begin > end and schedule != "one_shot":
            raise ValueError(f"end must come after begin; got begin={begin}, end={end}")
        require_integers(1, **if_set(every_n_steps=every_n_steps))
        if regrowth is not None:
            require_one_of("regrowth", regrowth, ["rigl"])
            if structure != "unstructured":
                raise ValueError(f"regrowth={regrowth!r} needs structure='unstructured'; got {structure!r}")
        self.structure = structure
        self.schedule: ScheduleName = schedule
        self.begin = begin
        self.end = end
        self.every_n_steps = every_n_steps
        self.regrowth = regrowth
        self.criterion = criterion
        self.scope: Scope = scope
        self.exclude = list_of_names(exclude, "exclude")
        self.module = module
        self.round_to = round_to
        self.left_out: dict[str, str] = {}
        self._masks = self._make_structure()
        self._reset()

    def _reset(self) -> None:
        self._step = 0  # optimizer steps that this callback has seen
        self._seen = 0  # trainer.global_step at that time; it counts every optimizer's steps
        self._reached = 0.0
        self._first, self._last, self._every = 0, 0, 1
        self._is_set_up = False
        self._loaded: dict[str, Any] | None = None
        self._module: L.LightningModule | None = None

    # ---- phases

    @property
    def phase(self) -> str:
        if self.is_final_phase:
            return f"at {self.target:g}"
        return "dense" if self._reached == 0 else f"ramp to {self.target:g}"

    @property
    def is_final_phase(self) -> bool:
        """Return whether the target is reached."""
        return self._reached >= self.target

    def sparsity(self) -> float:
        """Return the current share of zeros among all prunable weights."""
        return self._masks.sparsity()

    def report_rows(self) -> list[dict[str, Any]]:
        """Return a row for each module or weight that loses some.

        It holds ``name``, ``shape``, ``parameters``, ``nonzero``, ``sparsity`` and ``note``.
        """
        return self._masks.report_rows()

    def masks(self) -> dict[str, Tensor]:
        """Return the masks of kept weights by name, bool, gathered on the CPU; all processes must call it."""
        return self._masks.masks() if isinstance(self._masks, MaskStructure) else {}

    # ---- setting up

    @property
    def state_key(self) -> str:
        told_apart_by = {"structure": self.structure}
        return f"{type(self).__qualname__}{told_apart_by}"

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Find the state in checkpoints of earlier versions, whose key named ``exclude`` too."""
        states = checkpoint["callbacks"]
        found = [key for key in states if key.startswith(self.state_key[:-1])]
        if self.state_key not in states and len(found) == 1:
            states[self.state_key] = states.pop(found[0])

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.removes_parts:
            # a public method, since there is no hook between reading the checkpoint and loading its weights
            trainer.strategy.load_model_state_dict = partial(self._load_rebuilt, trainer)  # type: ignore[method-assign]
        if stage != "fit":
            return
        _require_strategy(trainer.strategy)
        _require_compatible(callbacks_of(trainer, Pruning))
        if trainer.global_step == 0:
            self._reset()
            self._masks = self._make_structure()
        defer_best_checkpoints(trainer)

    def _make_structure(self) -> MaskStructure | ChannelStructure | PlannedRemoval:
        if self.structure in ("block", "expert"):
            raise ValueError(f"structure={self.structure!r} needs calibration data: take OneShotPruning; got Pruning")
        if self.removes_parts:
            scope: Literal["layer", "global"] = "global" if self.scope == "global" else "layer"
            return ChannelStructure(
                self.criterion,
                scope,
                self.exclude,
                self.target,
                module=self.module,
                round_to=self.round_to,
                exact=self.structure == "channel",
            )
        return MaskStructure(self.structure, self.criterion, self.scope, self.exclude, self.target)

    def _load_rebuilt(self, trainer: L.Trainer, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a checkpoint as the strategy does, after the module has got the shapes of the checkpoint."""
        strategy, states = trainer.strategy, checkpoint.get("callbacks", {})
        for module in (trainer.lightning_module, *averaged_modules(trainer)):  # WeightAveraging loads its average next
            for callback in callbacks_of(trainer, Pruning):
                callback.rebuild(module, states.get(callback.state_key))
        type(strategy).load_model_state_dict(strategy, checkpoint, strict=strict)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._module = pl_module
        self.left_out = self._masks.attach(trainer, pl_module)
        self._set_steps(trainer)
        self._is_set_up = True
        self._require_order(trainer)
        if self._step < self._last:
            warn_of_early_end(trainer, f"Pruning reaches its target, at step {self._last}")
        if not isinstance(self._masks, PlannedRemoval):  # which does not know it yet
            _log_left_out(self.left_out)

    def _require_order(self, trainer: L.Trainer) -> None:
        """Reject a removal before that of a callback that comes earlier: checkpoints are rebuilt in that order."""
        for one in callbacks_of(trainer, Pruning):
            if one is self:
                return
            if one._first > self._first:
                raise ValueError(
                    f"structure={self.structure!r} is removed at step {self._first}, before {one.structure!r} at "
                    f"{one._first}; list the callbacks in the order of their steps"
                )

    def _set_steps(self, trainer: L.Trainer) -> None:
        """Set the steps of the ramp; take those of the checkpoint if its options equal the current ones."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded["ramp"] == self._ramp_options():
            self._first, self._last, self._every = loaded["steps"]
            return
        if self._is_set_up and loaded is None and self._step:  # the same run continues
            return
        total = _num_steps(trainer)
        self._first = _to_step("begin", self.begin, total)
        if self.schedule == "one_shot" and self.regrowth is None:
            self._last = self._first
        else:
            self._last = _to_step("end", self.end, total)
            if self._last == self._first and {type(self.begin), type(self.end)} == {float} and self.begin < self.end:
                self._last += 1  # shares of a very short run, such as a trial
            elif self._last <= self._first:
                raise ValueError(f"end must come after begin; got begin={self.begin}, end={self.end} of {total} steps")
        if total is not None and self._last > total and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            raise ValueError(
                f"pruning would end at step {self._last}, but the run has {total} optimizer steps: the target would "
                "not be reached. Lower end, or train longer"
            )
        self._every = self.every_n_steps or max(1, (self._last - self._first) // 32)

    def _ramp_options(self) -> list[Any]:
        return [self.target, self.schedule, self.begin, self.end, self.every_n_steps]

    # ---- steps

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._step == 0 and self._seen == 0 and trainer.global_step:  # resumed from a run without pruning
            self._step = self._seen = trainer.global_step
        if self._step == 0:
            self._update(trainer, pl_module)
        else:  # the checkpoint may stem from between the optimizer's step and this callback's
            self._masks.after_step(trainer, pl_module)
            self._advance(trainer, pl_module)
        self._request_gradients()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._masks.before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        self._advance(trainer, pl_module)
        if not trainer.barebones:
            pl_module.log("pruning/sparsity", self.sparsity())

    def _advance(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        self._step += 1
        self._masks.after_step(trainer, pl_module)
        self._update(trainer, pl_module)
        self._request_gradients()
        if isinstance(self._masks, MaskStructure):
            self._masks.apply_to_averages(trainer)

    def _updates_at(self, step: int) -> bool:
        on_time = step == self._last or (step - self._first) % self._every == 0
        return self._first <= step <= self._last and on_time

    def _request_gradients(self) -> None:
        if isinstance(self._masks, MaskStructure):
            self._masks.wants_gradients = self.regrowth == "rigl" and self._updates_at(self._step + 1)

    def _update(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        is_late = self._step > self._last and not self.is_final_phase  # resumed from a run without pruning
        if not (self._updates_at(self._step) or is_late):
            return
        sparsity = sparsity_at(self._step, self._first, self._last, self.target, self.schedule)
        if sparsity > self._reached:
            if self._reached == 0:
                announce_change(trainer, pl_module)
            self._reached = sparsity
            self._masks.prune_to(trainer, pl_module, sparsity)
            if self.is_final_phase and isinstance(self._masks, ChannelStructure):
                self._masks.remove_channels(trainer, pl_module)
        if self.regrowth is not None and isinstance(self._masks, MaskStructure) and self._step > self._first:
            fraction = drop_fraction_at(self._step, self._first, self._last, _DROP_FRACTION)
            self._masks.regrow(trainer, fraction)

    # ---- ending

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        vars(trainer.strategy).pop("load_model_state_dict", None)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(self._masks, MaskStructure):
            self._masks.apply_to_averages(trainer)
        if not self.is_final_phase:
            rank_zero_warn(
                f"training ended after {self._step} optimizer steps, at a sparsity of {self.sparsity():.3f}; the "
                f"target of {self.target:g} is reached at step {self._last}"
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with failures_as_warnings("Pruning could not tell what is left of each layer"):
            rank_zero_info(_format_table(self.report_rows()))
        if self.removes_parts and self.is_final_phase:
            rank_zero_info(
                "checkpoints hold the smaller module; outside of this Trainer load them with "
                f"lightning_accel.compress.load_pruned({type(pl_module).__name__}(...), path)"
            )

    # ---- resuming

    # Lightning rejects two callbacks with a state_dict() and the same key, in a message of its own, before setup
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save masks as bits and the progress."""
        if self._module is None:
            return
        checkpoint["callbacks"][self.state_key] = {
            "step": self._step,
            "seen": self._seen,
            "reached": self._reached,
            "ramp": self._ramp_options(),
            "steps": [self._first, self._last, self._every],
            "masks": self._masks.state_dict(),
        }

    def rebuild(self, pl_module: nn.Module, state: dict[str, Any] | None) -> None:
        """Change a new module to the shapes of a checkpoint in which this callback has the given ``state``."""
        if state and isinstance(self._masks, ChannelStructure | PlannedRemoval):
            self._masks.rebuild(pl_module, state["masks"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step, self._seen = state_dict["step"], state_dict["seen"]
        self._reached = state_dict["reached"]
        self._loaded = state_dict
        self._masks.load_state_dict(state_dict["masks"])
        if self._is_set_up and self._module is not None:  # strategies that restore after their setup
            self._set_steps(self._module.trainer)


def _require_compatible(callbacks: Sequence[Pruning]) -> None:
    structures = [one.structure for one in callbacks]
    are_removals = all(isinstance(one._masks, PlannedRemoval) for one in callbacks)
    if len(callbacks) > 1 and not (are_removals and len(set(structures)) == len(structures)):
        raise ValueError(
            f"the Trainer has several Pruning callbacks ({', '.join(structures)}), and takes one, or several "
            "OneShotPruning that each remove something else: leave out with exclude what is to stay dense; remove "
            "channels in one fit, and prune what remains in the next"
        )


def _require_strategy(strategy: Strategy) -> None:
    if isinstance(strategy, FSDPStrategy | DeepSpeedStrategy):
        raise TypeError(
            f"{type(strategy).__name__} flattens parameters, so that weights of a layer cannot be told apart; take the "
            "strategy 'accel_fsdp2'"
        )


def _format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format a table of layers with their remaining weights and, of channels and other parts, how many are left.

    Modules without a matrix, such as norms, have one line.
    """
    vectors = [row for row in rows if len(row.get("shape", ())) == 1]
    if vectors:
        sums = {key: sum(row[key] for row in vectors) for key in ("parameters", "nonzero")}
        others = {"name": f"{len(vectors)} others", "note": "norms, or other modules without a matrix"}
        rows = [*(row for row in rows if row not in vectors), others | sums]
    width = max([len(row["name"]) for row in rows] + [5])
    lines = [f"{'layer':<{width}}  {'weights':>12}  {'not zero':>12}  {'sparsity':>8}"]
    total = {"name": "total", "parameters": 0, "nonzero": 0, "note": ""}
    for row in rows:
        total["parameters"] += row["parameters"]
        total["nonzero"] += row["nonzero"]
    for row in [*rows, total]:
        sparsity = 1 - row["nonzero"] / max(row["parameters"], 1)
        numbers = f"{row['parameters']:>12,}  {row['nonzero']:>12,}  {sparsity:>8.4f}"
        lines.append(f"{row['name']:<{width}}  {numbers}  {row['note']}".rstrip())
    return "\n".join(lines)


def _log_left_out(left_out: dict[str, str]) -> None:
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    described = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    rank_zero_info(f"Pruning leaves out {described}" if described else "Pruning leaves out no parameter")


def _require_step_or_share(name: str, value: int | float) -> None:
    require_at_least(0, **{name: value})
    if isinstance(value, float) and value > 1:
        raise ValueError(f"{name} must be a share of the run in [0, 1], or a step, an int; got {value}")


def _num_steps(trainer: L.Trainer) -> int | None:
    """Return the number of optimizer steps of the run, None if unknown."""
    steps = trainer.estimated_stepping_batches
    if not trainer.lightning_module.automatic_optimization and trainer.max_steps > 0:  # it counts every optimizer's
        steps = min(steps, trainer.max_steps // max(1, len(trainer.optimizers)))
    return None if steps == float("inf") or steps < 0 else int(steps)


def _to_step(name: str, step: int | float, total: int | None) -> int:
    if isinstance(step, int):
        return step
    if step == 0:
        return 0
    if total is None:
        raise ValueError(
            f"{name}={step} is a share of the run, whose length is not known; give a step, an int, or set max_steps"
        )
    return round(step * total)
