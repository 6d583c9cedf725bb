"""Pruning at one step, by what the weights are multiplied with."""

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accel._private.lightning import data_source_of
from lightning_accel._private.torch import tree_map_only
from lightning_accel.callbacks.deployment.copies import WholeCopy, run_in_first_process
from lightning_accel.callbacks.deployment.deployed import Deployed, calibration_calls, dry_run, require_deployable
from lightning_accel.callbacks.deployment.loaders import in_random_order, independent, undistributed
from lightning_accel.callbacks.pruning.callback import Pruning
from lightning_accel.callbacks.pruning.channels import ChannelStructure
from lightning_accel.callbacks.pruning.masks import MaskStructure
from lightning_accel.callbacks.pruning.removal import REMOVALS, FindCalls, PlannedRemoval
from lightning_accel.callbacks.trainer_callbacks import averaged_weights
from lightning_accel.compress.calls import first_line
from lightning_accel.compress.pruning.one_shot import Method, calibrate_and_prune_
from lightning_accel.compress.pruning.prunable import find_prunable
from lightning_accel.ops.bounds import require_integers
from lightning_accel.ops.names import Exclusion, require_one_of


class OneShotPruning(Pruning):
    """Prune a trained network in one step, by calibration data, and keep it so while it trains on.

    Weights are chosen by Wanda or SparseGPT (see :func:`~lightning_accel.compress.prune_on_data_`), which need no
    gradients, and set to zero. All layers get the same sparsity. By default it happens before the first step, for a
    network that comes trained; with ``begin=1.0`` it happens after the last one. Averages of pruned weights, as of EMA,
    start anew there.

    Channels, blocks and experts are removed, which makes files smaller and steps faster without special kernels, but
    changes what the network computes, so let it train on, best beside
    :class:`~lightning_accel.Distillation` with ``teacher="dense"``. Several of these callbacks with different
    such structures remove them in turn, each from what the one before has left: the recipe of Minitron (Muralidharan et
    al. 2024, https://arxiv.org/abs/2407.14679).

    The first process prunes a whole copy of the module in its CPU's memory while the others wait; under any strategy
    that has whole copies all get the same weights. To see what it calls, ``validation_step`` of the copy gets training
    batches, read in that process; a stream is read once more. Masks are then kept, and resumed, as by
    :class:`~lightning_accel.Pruning`, whose methods and log this callback has. What ``validation_step`` does
    not call is in ``left_out``.

    Args:
        sparsity: share of zeros in each layer, or of what is removed; by default 0.5.
        structure: ``"unstructured"``, or N:M such as ``"2:4"``, which keeps N of M neighbours along a layer's input;
            ``"channel"`` and ``"width"``, which remove channels as :class:`~lightning_accel.Pruning` does,
            scored by :func:`~lightning_accel.compress.score_channels_on_data`; ``"block"``, which removes the repeated
            blocks, such as layers of a transformer, that change the least of what passes through them (see
            :func:`~lightning_accel.compress.measure_influence`); ``"expert"``, which removes the experts of mixtures
            that add the least to the outputs (see :func:`~lightning_accel.compress.score_experts`).
        method: ``"sparsegpt"``, which also changes the weights that it keeps, or ``"wanda"``, which is faster; where
            nothing is removed.
        begin: optimizer step of the pruning, or share of the run if a float in [0, 1].
        calibrate: number of training samples that are looked at.
        exclude: names or patterns of parameters or submodules (``"head"``, ``"blocks.*.norm"``), or classes by name.
        module: name of the pruned submodule; by default the one that ``validation_step`` calls.

    Raises:
        ValueError: if an option is out of range; before training, if nothing can be pruned, ``module`` names nothing,
            or ``validation_step`` fails on training batches.
        TypeError: before training, if the module has no ``validation_step``, and under strategies that flatten
            parameters (FSDP1, DeepSpeed), or where ``configure_model`` splits them (ModelParallelStrategy); where
            something is removed, under those that keep parameters in pieces.

    Source: ``wanda``: Sun et al. 2023, https://arxiv.org/abs/2306.11695; ``sparsegpt``: Frantar and Alistarh 2023,
    https://arxiv.org/abs/2301.00774.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import OneShotPruning
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[OneShotPruning(0.5, method="wanda", calibrate=64)])
    """

    def __init__(
        self,
        sparsity: float | None = None,
        *,
        structure: str = "unstructured",
        method: Method = "sparsegpt",
        begin: int | float = 0.0,
        calibrate: int = 128,
        exclude: Sequence[str | type[nn.Module]] = (),
        module: str | None = None,
    ) -> None:
        require_one_of("method", method, get_args(Method))
        require_integers(1, calibrate=calibrate)
        self.method: Method = method
        self.calibrate = calibrate
        self.deployed = module
        if sparsity is None and (structure == "unstructured" or structure in REMOVALS):
            sparsity = 0.5
        super().__init__(sparsity, structure=structure, schedule="one_shot", begin=begin, exclude=exclude)

    def _make_structure(self) -> MaskStructure | PlannedRemoval:
        if self.removes_parts:
            return PlannedRemoval(self.structure, self.exclude, self.target, self._find_calls)
        return _CalibratedMasks(self.structure, self.exclude, self.target, self.method, self._find_calls)

    def _find_calls(self, copied: L.LightningModule, trainer: L.Trainer) -> Deployed:
        """Find what ``validation_step`` of a whole copy calls, on training batches read in this process."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
        loaders = in_random_order(undistributed(data_source_of(trainer.fit_loop).dataloader()))
        loaders = tree_map_only(DataLoader, partial(independent, self.calibrate), loaders)
        try:
            return calibration_calls(copied, loaders, self.calibrate, self.deployed, datamodule)
        except Exception as error:
            raise ValueError(
                f"OneShotPruning calls validation_step of {type(copied).__name__} with training batches, and that "
                f"fails with {first_line(error)}"
            ) from error

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            require_deployable(pl_module, "OneShotPruning", self.deployed)
            self._copy = WholeCopy(pl_module)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if isinstance(self._masks, _CalibratedMasks):
            self._masks.copied = self._copy
        if self._first > 0 and not self.is_final_phase:
            dry_run(trainer, pl_module, self._copy, self._try, "prune", self.deployed, of_training=True)

    def _update(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super()._update(trainer, pl_module)
        assert not isinstance(self._masks, ChannelStructure)
        if self.is_final_phase:
            self.left_out = dict(self._masks.left_out)

    def _try(self, found: Deployed) -> None:
        if isinstance(self._masks, PlannedRemoval):
            self._masks.make_plan(found)
        elif isinstance(self._masks, _CalibratedMasks):
            self._masks.prune(found, self.target)


class _CalibratedMasks(MaskStructure):
    """Set weights to zero once, as a pruned copy of the whole module in the first process has them."""

    copied: WholeCopy

    def __init__(
        self,
        structure: str,
        exclude: Sequence[Exclusion],
        target: float,
        method: Method,
        find_calls: FindCalls,
    ) -> None:
        super().__init__(structure, "magnitude", "layer", exclude, target)
        self.method: Method = method
        self.find_calls = find_calls

    def prune(self, found: Deployed, sparsity: float) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, str]]:
        """Prune a deployed module in place.

        Returns:
            Masks of kept weights with the weights, and reasons for those that are not pruned, by their whole names.
        """
        prefix = f"{found.name}." if found.name else ""
        mine = {part.name for part in self.parts}
        weights = {one.name: one for one in find_prunable(found.module)[0] if prefix + one.name in mine}
        kept, missed = calibrate_and_prune_(
            found.module, found.inputs, [*weights.values()], sparsity, self.method, self.pattern
        )
        if not kept:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in missed.items())
            raise ValueError(
                f"validation_step calls {found.name or 'the module'}, in which no weight can be pruned ({reasons}). "
                "Name another submodule by module"
            )
        pruned = {prefix + name: (mask, weights[name].weight.detach()) for name, mask in kept.items()}
        return pruned, {prefix + name: reason for name, reason in missed.items()}

    def prune_to(self, trainer: L.Trainer, pl_module: L.LightningModule, sparsity: float) -> None:
        pruned: dict[str, tuple[Tensor, Tensor]] = {}
        missed: dict[str, str] = {}

        def prune_copy(copied: L.LightningModule) -> None:
            own, left = self.prune(self.find_calls(copied, trainer), sparsity)
            pruned.update(own)
            missed.update(left)

        make = partial(self.copied.make, trainer, pl_module)
        run_in_first_process(trainer, make, prune_copy, "prune")
        missed = trainer.strategy.broadcast(missed)
        names = trainer.strategy.broadcast([*pruned])
        unused = [part.name for part in self.parts if part.name not in names]
        self._leave_out({name: missed.get(name, "outside of what validation_step calls") for name in unused})
        with torch.no_grad():
            for part in self.parts:
                sent: Any = trainer.strategy.broadcast(pruned.pop(part.name, None))
                kept, weight = sent
                if part.is_held:
                    part.value.copy_(part.shard(weight))
                    self.pruned[part.name] = part.shard(~kept)
                    for average in averaged_weights(trainer):
                        if part.name in average and average[part.name].shape == part.value.shape:
                            average[part.name].copy_(part.value)
        self._masks_changed(trainer)
        rank_zero_info(f"{self.method} has pruned {len(names)} weights to a sparsity of {self.sparsity():.3f}")

    def _apply_state(self) -> None:
        if self._loaded:
            unused = [part.name for part in self.parts if part.name not in self._loaded["shapes"]]
            self._leave_out(dict.fromkeys(unused, "not pruned in the run that is resumed"))
        super()._apply_state()
