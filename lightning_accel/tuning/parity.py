"""Whether two variants of a run learn the same: losses equal up to rounding, or equivalent over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from lightning_accel.ops.extras import import_on_use
from lightning_accel.tuning.fork_server import ForkServer
from lightning_accel.tuning.project import Changes, Project
from lightning_accel.tuning.variant import Step, TrialError, Variant

stats = import_on_use("scipy.stats")

Losses = list[list[float]]  # of each seed, of each step
# How many seeds are compared before it is decided whether to go on, and the level of the tests there: 5 % in all
LOOKS = {5: 0.005, 10: 0.01, 20: 0.015, 40: 0.02}


@dataclass(frozen=True)
class Verdict:
    """Hold whether losses agree, by what test, in a sentence, and whether more seeds may still show that they do."""

    passed: bool
    reason: str
    is_open: bool = False


def record_losses(
    project: Project,
    changes: Changes,
    folder: Path,
    seeds: Sequence[int],
    num_steps: int,
    deadline: float,
    perturb: bool = False,
    server: ForkServer | None = None,
) -> Losses:
    """Return the losses of the first steps of fits with each seed.

    Raises:
        TrialError: if a fit fails, hangs, is too short, or has not ended at ``deadline``.
    """
    variant = Variant(project, changes, folder, server)
    try:
        variant.start(seeds, num_steps, perturb)
        variant.wait(deadline)
    finally:
        variant.stop()
    losses = []
    for seed in seeds:
        path = folder / f"seed_{seed}" / "steps.csv"
        lines = path.read_text().splitlines() if path.exists() else []  # a run may end the process by itself
        losses.append([Step.read(line).loss for line in lines])
        if len(losses[-1]) < num_steps:
            raise TrialError(f"the run has {len(losses[-1])} steps, fewer than the {num_steps} that are compared")
    return losses


def are_equal(baseline: Losses, perturbed: Losses, variant: Losses) -> Verdict:
    """Compare losses step by step with what one rounding of each weight at the beginning does to them.

    Until each step, the deviation from the baseline may be ten times the largest that the perturbed baseline has had
    until then, or ten roundings of the loss if that is more: other orders of summation round more than once.
    """
    worst = 0.0
    for base, moved, other in zip(baseline, perturbed, variant, strict=True):
        allowed = 0.0
        for a, b, c in zip(base, moved, other, strict=True):
            allowed = max(allowed, abs(b - a), 1.2e-7 * abs(a))
            worst = max(worst, abs(c - a) / allowed if allowed else math.inf * abs(c - a)) if c == c else math.inf
    passed = worst <= 10
    seeds = "" if passed else "; whether they are equivalent over seeds decides"
    return Verdict(
        passed, f"losses deviate {worst:.1f} times as far as by one rounding of the weights (10 allowed){seeds}"
    )


def are_equivalent(baseline: Losses, variant: Losses) -> Verdict:
    """Test whether mean losses of the last third of the steps are equivalent: two one-sided tests of paired seeds.

    The margin is the standard deviation of the baseline over its seeds. The level is that of :data:`LOOKS` for this
    number of seeds; as these add up to 5 %, so does the chance that any of the looks passes what is not equivalent.

    Source: Schuirmann 1987, A comparison of the two one-sided tests procedure and the power approach.
    """
    base, other = ([fmean(run[-max(1, len(run) // 3) :]) for run in losses] for losses in (baseline, variant))
    if not all(math.isfinite(value) for value in base + other):
        return Verdict(False, "losses are nan or infinite")
    margin, level = stdev(base), LOOKS[len(base)]
    differences = [b - a for a, b in zip(base, other, strict=True)]
    mean, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    reach = float(stats.t.ppf(1 - level, len(differences) - 1)) * error
    return Verdict(
        abs(mean) + reach < margin,
        f"losses after {len(baseline[0])} steps differ by {mean:+.2g}, at most {abs(mean) + reach:.2g} "
        f"({1 - 2 * level:.0%} interval over {len(base)} seeds); seeds themselves spread by {margin:.2g}",
        is_open=abs(mean) - reach < margin <= abs(mean) + reach,
    )
