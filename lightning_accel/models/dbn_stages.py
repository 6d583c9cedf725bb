"""Training stages, layers and data statistics of deep belief networks. Shapes: B samples, V visible units."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise
from operator import index
from typing import Any, Literal, NamedTuple, TypeAlias

import lightning as L
import torch
import torch.distributed as dist
from torch import Generator, Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_accel.nn.boltzmann.contrastive import ContrastiveDivergence, Sampler
from lightning_accel.nn.boltzmann.rbm import RBM, Visible
from lightning_accel.nn.boltzmann.stack import RBMStack
from lightning_accel.ops.bounds import if_set, require_integers

Decay: TypeAlias = Literal["linear", "quadratic", "none"]
Inputs: TypeAlias = Literal["samples", "means"]
_POWERS: dict[Decay, int] = {"none": 0, "linear": 1, "quadratic": 2}  # of the share of a stage that remains
_STATISTICS_BATCH_SIZE = 512  # batch size of the pass over the data


class _Preset(NamedTuple):
    sampler: Sampler
    centering: float
    inputs: Inputs


_PRESETS = {"density": _Preset("pcd", 100, "samples"), "features": _Preset("cd", 0, "means")}


# options of earlier versions, with the values that had no effect
_ADDED = {"inputs", "start_from_below"}  # together
_REMOVED = [("num_temperatures", 10), ("sparsity_target", None), ("sparsity_weight", 0.1)]


@dataclass(frozen=True)
class Stage:
    """Configure how one RBM is trained.

    Args:
        epochs: number of epochs of this stage.
        lr: initial learning rate of the stage.
        lr_decay: ``linear``, to 0 at the end of the stage, without which samples never settle; ``quadratic``, which
            stays near 0 longer, for densities of sharp modes; or ``none``.
        preset: purpose of the RBM, ``density`` or ``features``, which sets ``sampler``, ``centering``,
            ``initial_std`` and ``inputs`` if they are not given: ``pcd``, 100, sqrt(8 / (V + H)) and ``samples``, or
            ``cd``, 0, 0.01 (the initial_std of Gaussian units in any case) and ``means``. Centering makes hidden units
            be 1 half of the time, which hurts features.
        sampler: where Gibbs chains start: at the data (``cd``) or where they ended (``pcd``), see
            :class:`lightning_accel.nn.ContrastiveDivergence`, as for the following options.
        steps: Gibbs steps for each gradient.
        num_chains: number of chains over all processes, independent of the batch size.
        centering: number of samples over which the centers of the units are averaged; 0 for no centering.
        initial_std: standard deviation of the initial weights, see :class:`lightning_accel.RBM`. Small values are
            better for few hidden units.
        inputs: what an RBM above another is trained on: ``samples`` of the hidden units below, drawn anew for each
            batch, of which the theory of deep belief networks holds, or their ``means``, which features are later; by
            default the former for ``density``, the latter for ``features``.
        start_from_below: whether the RBM starts with the transposed weights of the one below, at the likelihood that
            this one has reached, see :meth:`lightning_accel.nn.RBMStack.start_from_below_`. It needs as many hidden
            units as the one below has visible ones.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> Stage(preset="features").start_sampling(seed=0).sampler
        'cd'
    """

    epochs: int = 30
    lr: float = 0.1
    lr_decay: Decay = "linear"
    preset: Literal["density", "features"] = "density"
    sampler: Sampler | None = None
    steps: int = 1
    num_chains: int = 100
    centering: float | None = None
    initial_std: float | None = None
    inputs: Inputs | None = None
    start_from_below: bool = False

    def __post_init__(self) -> None:
        require_schedule(self.epochs, self.lr, self.lr_decay)
        if self.inputs not in (None, "samples", "means"):
            raise ValueError(f"inputs must be 'samples' or 'means'; got {self.inputs!r}")
        if self.preset not in _PRESETS:
            raise ValueError(f"preset must be 'density' or 'features'; got {self.preset!r}")
        self.start_sampling(0)

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> "Stage":
        """Create a stage from the options in a checkpoint, which may hold removed ones at their defaults.

        Checkpoints hold all options; those of versions without ``inputs`` trained on means.
        """
        if "inputs" not in options and options.keys() >= {each.name for each in fields(cls)} - _ADDED:
            options = options | {"inputs": "means"}
        return cls(**{name: value for name, value in options.items() if (name, value) not in _REMOVED})

    def start_sampling(self, seed: int) -> ContrastiveDivergence:
        """Create the sampler in its initial state."""
        preset = _PRESETS[self.preset]
        return ContrastiveDivergence(
            self.sampler or preset.sampler,
            self.steps,
            self.num_chains,
            centering=preset.centering if self.centering is None else self.centering,
            seed=seed,
        )

    @property
    def is_trained_on_samples(self) -> bool:
        return (self.inputs or _PRESETS[self.preset].inputs) == "samples"

    def std_for(self, num_visible: int, num_hidden: int, all_bernoulli: bool) -> float:
        """Return the standard deviation of the initial weights of an RBM."""
        if self.initial_std is not None:
            return self.initial_std
        # twice Glorot's, found best in benchmarks/results
        return (8 / (num_visible + num_hidden)) ** 0.5 if self.preset == "density" and all_bernoulli else 0.01


def require_schedule(epochs: int, lr: float, lr_decay: str) -> None:
    """Raise a ValueError for a number out of range."""
    if index(epochs) < 1 or not lr > 0:
        raise ValueError(f"a stage needs at least 1 epoch and a learning rate above 0; got {epochs=}, {lr=}")
    if lr_decay not in _POWERS:
        raise ValueError(f"lr_decay must be 'linear', 'quadratic' or 'none'; got {lr_decay!r}")


class Span(NamedTuple):
    """Hold the epochs and learning rates of a stage."""

    name: str
    first_epoch: int
    epochs: int
    lr: float
    lr_decay: Decay

    def lr_at(self, epoch: float) -> float:
        """Return the learning rate at ``epoch`` of the run, which may be fractional."""
        share = min(max((epoch - self.first_epoch) / self.epochs, 0), 1)
        return self.lr * (1 - share) ** _POWERS[self.lr_decay]


class Schedule:
    """Place the stages of a run one after another.

    >>> schedule = Schedule([("rbm 1", 3, 0.1, "linear"), ("classifier", 2, 0.5, "none")])
    >>> schedule.num_epochs, schedule.stage_at(2), schedule.stage_at(3), schedule.stage_at(9)
    (5, 0, 1, 1)
    """

    def __init__(self, stages: Sequence[tuple[str, int, float, Decay]]) -> None:
        first, spans = 0, []
        for name, epochs, lr, lr_decay in stages:
            spans.append(Span(name, first, epochs, lr, lr_decay))
            first += epochs
        self.spans = spans
        self.num_epochs = first

    def stage_at(self, epoch: int) -> int:
        return max(number for number, span in enumerate(self.spans) if span.first_epoch <= epoch)


class DataStatistics(NamedTuple):
    """Hold statistics of the training data."""

    mean: Tensor  # (V,) float64
    extremes: Tensor  # (2, V) float64, least and largest values
    num_rows: int
    num_known: int  # samples of known class


def share_of_process(module: L.LightningModule, loader: object) -> tuple[DataLoader[Any], list[int]] | None:
    """Return a loader of this process's share of the data of ``loader``, in order, and the numbers of its items.

    None if it cannot be iterated twice. Its own sampler is respected only if it is a ``SubsetRandomSampler``.
    """
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__len__"):
        return None
    subset = loader.sampler.indices if isinstance(loader.sampler, SubsetRandomSampler) else range(len(loader.dataset))
    numbers = sorted(subset)[module.trainer.global_rank :: module.trainer.world_size]
    share: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=None if loader.batch_sampler is None else _STATISTICS_BATCH_SIZE,  # None: items are whole batches
        sampler=numbers,
        collate_fn=loader.collate_fn,
        generator=Generator(),  # an iterator draws a seed, which must not use the run's random numbers
    )
    return share, numbers


@torch.no_grad()
def data_statistics(
    module: L.LightningModule, rows_of: Callable[[Any], tuple[Tensor, int]], loader: object
) -> DataStatistics | None:
    """Pass once over the data of ``loader``, each process over its share; return None if it cannot be iterated twice.

    Args:
        module: a module in a Trainer.
        rows_of: returns the samples (B, V) of a batch, and how many have a known class; it may reject them with a
            ValueError.
        loader: the training loader, see :func:`share_of_process`.
    """
    if (found := share_of_process(module, loader)) is None:
        return None
    share, numbers = found
    sums, extremes = [], []
    for number, batch in enumerate(share):
        try:
            rows, num_known = rows_of(module.trainer.strategy.batch_to_device(batch))
        except ValueError as error:
            first = numbers[number * (share.batch_size or 1)]
            raise ValueError(f"training data, rows counted from item {first}: {error}") from None
        rows = rows.double()
        counts = [torch.full_like(rows[0], count) for count in (len(rows), num_known)]
        sums.append(torch.stack([*counts, rows.sum(dim=0)]))
        extremes.append(torch.stack([-rows.amin(dim=0), rows.amax(dim=0)]))
    assert sums, "fewer rows than processes"
    total, most = torch.stack(sums).sum(dim=0), torch.stack(extremes).amax(dim=0)
    if module.trainer.world_size > 1:
        dist.all_reduce(total)
        dist.all_reduce(most, dist.ReduceOp.MAX)
    num_rows, num_known = int(total[0, 0]), int(total[1, 0])
    return DataStatistics(total[2] / num_rows, torch.stack([-most[0], most[1]]), num_rows, num_known)


def set_parameter_(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter, sharded over processes or not."""
    value = value.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    with torch.no_grad():
        parameter.copy_(value)


def redistribute_states(states: Sequence[dict[str, Any]], world_size: int, rank: int) -> dict[str, Any]:
    """Return the state for process ``rank`` of ``world_size``, from states that another number of processes saved.

    Chains are redistributed; generators of additional processes start anew.
    """
    mine = dict(states[min(rank, len(states) - 1)])
    if len(states) == world_size or "chains" not in mine:
        return mine
    if rank >= len(states):
        mine.pop("generator", None)
    chains = torch.cat([state["chains"] for state in states], dim=-2)
    mine["chains"] = chains[..., rank % chains.shape[-2] :: world_size, :].clone()  # at least one
    return mine


def make_stack(
    num_visible: int, layers: Sequence[int], num_labels: int, stages: Sequence[Stage], visible: Visible, untied: bool
) -> RBMStack:
    """Create RBMs initialized as ``stages`` say, the lowest with ``visible`` units and the top with ``num_labels``."""
    rbms = []
    for number, (below, size) in enumerate(pairwise([num_visible, *layers])):
        labels = num_labels if number == len(layers) - 1 else 0
        kind: Visible = "bernoulli" if number else visible
        std = stages[number].std_for(below + labels, size, kind == "bernoulli")
        rbms.append(RBM(below, size, num_labels=labels, initial_std=std, visible=kind))
    return RBMStack(rbms, untied=untied)


@contextmanager
def unsharded(root: object) -> Iterator[None]:
    """Temporarily gather parameters that FSDP2 has sharded."""
    if not isinstance(root, FSDPModule):
        yield
        return
    root.unshard()
    try:
        yield
    finally:
        root.reshard()


def require_options(
    hidden_dims: Sequence[int],
    stages: Sequence[Stage],
    finetune: str,
    likelihood: str,
    minibatch_size: int | None,
) -> None:
    """Raise a ValueError for options of a deep belief network that are out of range or contradict each other."""
    if not hidden_dims or len(stages) not in (1, len(hidden_dims)):
        raise ValueError(
            "hidden_dims must name the hidden units of at least one RBM, and stages one for each or one for all; "
            f"got {len(hidden_dims)} hidden_dims and {len(stages)} stages"
        )
    if finetune not in ("none", "classifier", "updown"):
        raise ValueError(f"the method of fine_tuning must be 'none', 'classifier' or 'updown'; got {finetune!r}")
    if likelihood not in ("none", "exact", "ais"):
        raise ValueError(f"likelihood must be 'none', 'exact' or 'ais'; got {likelihood!r}")
    require_integers(1, **if_set(minibatch_size=minibatch_size))


def require_sizes_from_below(sizes: Sequence[int], stages: Sequence[Stage], visible: Visible) -> None:
    """Raise a ValueError unless each RBM that starts from the one below has its units, swapped.

    Args:
        sizes: visible units and the hidden units of each RBM.
        stages: how each RBM is trained.
        visible: kind of the lowest units.
    """
    for number, stage in enumerate(stages):
        if not stage.start_from_below:
            continue
        if number == 0:
            raise ValueError(
                "start_from_below is for an RBM above another, and the first stage has it; give stages one for each RBM"
            )
        if visible != "bernoulli" and number == 1:
            raise ValueError(f"start_from_below needs 'bernoulli' units on both sides below; got {visible=}")
        if sizes[number + 1] != sizes[number - 1]:
            raise ValueError(
                f"RBM {number + 1} starts from the one below, so it needs as many hidden units as that one has visible "
                f"ones, {sizes[number - 1]}; got {sizes[number + 1]} in hidden_dims"
            )
