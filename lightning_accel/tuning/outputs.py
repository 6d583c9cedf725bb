"""Whether two variants of a model compute the same from the same samples and weights."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_accel.tuning.fork_server import ForkServer
from lightning_accel.tuning.parity import Verdict
from lightning_accel.tuning.project import Changes, Project
from lightning_accel.tuning.serving import NUM_SAMPLES
from lightning_accel.tuning.variant import Variant

MOST_DEVIATION = 0.02  # of the spread over samples
LEAST_EQUAL = 0.99  # of integers
_ROUNDINGS = 10  # as for losses, see parity.py
_EPSILON = 1.2e-7

Outputs = list[list[Tensor]]  # of each sample, each number or tensor in its outputs


def record_outputs(
    project: Project,
    changes: Changes,
    folder: Path,
    deadline: float,
    perturb: bool = False,
    server: ForkServer | None = None,
) -> Outputs:
    """Return the outputs of the samples by which latency is measured.

    Raises:
        TrialError: if the model fails, hangs, or has not ended at ``deadline``.
    """
    variant = Variant(project, changes, folder, server)
    try:
        variant.start((0,), NUM_SAMPLES, perturb)
        variant.wait(deadline)
    finally:
        variant.stop()
    return torch.load(folder / "seed_0" / "outputs.pt")


class OutputComparison:
    """Compare outputs of variants, each of which is recorded once.

    Args:
        record: returns the outputs with changes; with True, those with weights moved by one rounding.
    """

    def __init__(self, record: Callable[[Changes, bool], Outputs]) -> None:
        self._record = record
        self._recorded: dict[str, Outputs] = {}

    def judge(self, changes: Changes, exactly: bool) -> Verdict:
        """Return whether outputs with changes are those of the model as it is, see :func:`outputs_agree`."""
        base, moved, other = (
            self._outputs(each, perturb) for each, perturb in ((Changes(), False), (Changes(), True), (changes, False))
        )
        return outputs_agree(base, moved, other, exactly)

    def _outputs(self, changes: Changes, perturb: bool) -> Outputs:
        key = f"{changes} {perturb}"
        if key not in self._recorded:
            self._recorded[key] = self._record(changes, perturb)
        return self._recorded[key]


def outputs_agree(baseline: Outputs, perturbed: Outputs, variant: Outputs, exactly: bool) -> Verdict:
    """Compare outputs of the same samples with the same weights.

    Each number or tensor of an output is compared by itself. Infinite values and nan have to be in the same places.
    Exact changes may deviate at most ten times as far as the baseline with weights that are moved by one rounding, or
    by ten roundings of the largest value if that is more; of integers, ten times as many may differ.

    Other changes may deviate by a root mean square of 2 % of the standard deviation of the baseline over samples (of
    its size, where samples do not differ); of integers, such as classes, 99 % have to be equal. A baseline that
    deviates by more when its weights are moved by a rounding is random, or has no digits to lose: nothing is shown.

    Args:
        baseline: as the model is.
        perturbed: with weights moved by one rounding.
        variant: with changes.
        exactly: whether the changes are exact.
    """
    if not _shapes(baseline) == _shapes(perturbed) == _shapes(variant):
        return Verdict(False, "outputs have other shapes")
    if len({len(sample) for sample in baseline}) > 1:
        baseline, perturbed, variant = (_merged(each) for each in (baseline, perturbed, variant))
    columns = [zip(*each, strict=True) for each in (baseline, perturbed, variant)]
    leaves = [tuple(map(list, leaf)) for leaf in zip(*columns, strict=True)]
    if not all(_same_where_infinite(a, c) for a, _, c in leaves):
        return Verdict(False, "outputs are nan or infinite in other places")
    if not any(one.isfinite().any() for a, *_ in leaves for one in a):
        return Verdict(False, "all outputs are nan or infinite")
    floats = [leaf for leaf in leaves if leaf[0][0].is_floating_point()]
    integers = [leaf for leaf in leaves if not leaf[0][0].is_floating_point()]
    own = max((_deviation(a, b) for a, b, _ in floats), default=0.0)
    own_equal = min((_share_equal(a, b) for a, b, _ in integers), default=1.0)
    if own > MOST_DEVIATION or own_equal < LEAST_EQUAL:
        return Verdict(
            False,
            f"as the model is, outputs move by {own:.1%} of their spread, and {1 - own_equal:.1%} of integers change, "
            "when weights move by one rounding or from run to run",
        )
    if exactly:
        worst = max([_times_rounding(*leaf) for leaf in floats] + [_times_unequal(*leaf) for leaf in integers])
        reason = f"outputs deviate {worst:.1f} times as far as by one rounding of the weights ({_ROUNDINGS} allowed)"
        return Verdict(worst <= _ROUNDINGS, reason)
    worst = max((_deviation(a, c) for a, _, c in floats), default=0.0)
    equal = min((_share_equal(a, c) for a, _, c in integers), default=1.0)
    reason = f"outputs deviate by {worst:.2%} of their spread over samples ({MOST_DEVIATION:.0%} allowed)"
    if integers:
        reason += f", {equal:.1%} of integers are equal ({LEAST_EQUAL:.0%} needed)"
    return Verdict(worst <= MOST_DEVIATION and equal >= LEAST_EQUAL, reason)


def _merged(outputs: Outputs) -> Outputs:
    """Return one tensor of all values for each sample, where samples have unequal numbers of tensors."""
    return [[torch.cat([torch.zeros(0), *(one.flatten().double() for one in sample)])] for sample in outputs]


def _shapes(outputs: Outputs) -> list[list[tuple[torch.Size, torch.dtype]]]:
    return [[(one.shape, one.dtype) for one in sample] for sample in outputs]


def _same_where_infinite(baseline: Sequence[Tensor], variant: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(a.isfinite(), c.isfinite())
        and torch.equal(a[~a.isfinite()].nan_to_num(0, 1, -1), c[~c.isfinite()].nan_to_num(0, 1, -1))
        for a, c in zip(baseline, variant, strict=True)
    )


def _table(values: Sequence[Tensor]) -> Tensor:
    """Return samples as rows of one table; where they have unequal shapes, their rows, or all values in one column."""
    if len({one.shape for one in values}) == 1:
        return torch.stack([one.flatten() for one in values])
    if len({one.shape[-1:] for one in values}) == 1:
        return torch.cat([one.reshape(-1, one.shape[-1]) for one in values])
    return torch.cat([one.flatten() for one in values])[:, None]


def _deviation(baseline: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the root mean square of the deviation as a share of the baseline's spread, or of its size without one."""
    a, c = _table(baseline), _table(other)
    is_finite = a.isfinite()
    count = is_finite.sum(0).clamp(min=1)
    zeroed = a.where(is_finite, 0.0)
    spread = ((zeroed - zeroed.sum(0) / count) * is_finite).square().sum().item()
    size = zeroed.square().sum().item()
    deviation = (zeroed - c.where(is_finite, 0.0)).square().sum().item()
    scale = spread if spread > 1e-12 * size else size
    return math.sqrt(deviation / scale) if scale else math.inf * deviation if deviation else 0.0


def _times_rounding(baseline: Sequence[Tensor], perturbed: Sequence[Tensor], variant: Sequence[Tensor]) -> float:
    a, b, c = (_table(each).nan_to_num(0, 0, 0) for each in (baseline, perturbed, variant))
    if not a.numel():
        return 0.0
    allowed = max((b - a).abs().max().item(), _EPSILON * a.abs().max().item())
    deviation = (c - a).abs().max().item()
    return deviation / allowed if allowed else math.inf if deviation else 0.0


def _times_unequal(baseline: Sequence[Tensor], perturbed: Sequence[Tensor], variant: Sequence[Tensor]) -> float:
    moved, unequal = (1 - _share_equal(baseline, each) for each in (perturbed, variant))
    return unequal / moved if moved else math.inf if unequal else 0.0


def _share_equal(baseline: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    a, c = _table(baseline), _table(other)
    return (a == c).double().mean().item() if a.numel() else 1.0
