"""How much faster does ``tune`` make runs that know nothing of this package?

python benchmarks/tune_foreign.py [--budget 10m] [--only vae unet ...] [--output tuned_foreign]

Each project of benchmarks/foreign is tuned by itself, one after the other, with nothing else running. A row gives the
samples per second of the run as it is and of the proven variant, their ratio with its 95 % interval, what was chosen,
the time that the search took, and the comparison of its losses that passed last. A project for which nothing was found
counts as 1 in the geometric mean. Searches that were interrupted go on; a search that has ended is not repeated.
"""

import argparse
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from lightning_accel import tune
from lightning_accel.callbacks.speedups import machine_name
from lightning_accel.tuning.outcome import Outcome
from lightning_accel.tuning.variant import TrialError

FOLDER = Path(__file__).parent / "foreign"
PROJECTS = sorted(path.stem for path in FOLDER.glob("*.py"))


def ratio_of(outcome: Outcome) -> float:
    return outcome.proof.ratio.value if outcome.is_faster else 1.0


def row(name: str, outcome: Outcome) -> Iterator[str]:
    rate = outcome.steps_per_second * outcome.facts["items_per_step"]
    yield name
    yield f"{rate:.4g}"
    yield f"{rate * ratio_of(outcome):.4g}"
    yield str(outcome.proof.ratio) if outcome.is_faster else "1"
    yield ", ".join(factor.name for factor in outcome.chosen) if outcome.is_faster else "nothing"
    yield f"{outcome.seconds:.0f}"
    yield next((verdict.reason for verdict in reversed(outcome.verdicts) if verdict.passed), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--only", nargs="+", choices=PROJECTS, default=PROJECTS)
    parser.add_argument("--output", type=Path, default=Path("tuned_foreign"))
    args = parser.parse_args()
    sys.path.insert(0, str(FOLDER))
    header = "project", "samples/s", "tuned", "times as fast (95 %)", "by", "search, s", "losses"
    print(f"torch {torch.__version__}, {machine_name()}\n\n| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    ratios = []
    for name in args.only:
        try:
            outcome = tune(importlib.import_module(name).make, args.budget, args.output / name)
        except TrialError as error:
            print(f"| {name} | {error} |", flush=True)
            continue
        ratios.append(ratio_of(outcome))
        print(f"| {' | '.join(row(name, outcome))} |", flush=True)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"\nGeometric mean {mean:.2f}, least {min(ratios):.2f}, of {len(ratios)} projects.")


if __name__ == "__main__":
    main()
