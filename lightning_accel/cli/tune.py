"""The subcommand ``lightning-accel tune``, and the fits of a config that it measures."""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_accel.cli.own_options import reject_misspelt
from lightning_accel.tuning.choices import ALLOWABLE, GOALS

if TYPE_CHECKING:  # its help needs no torch
    import lightning as L

    from lightning_accel.planning.simulation import Fit
    from lightning_accel.tuning.project import Changes


def fit_config(
    changes: "Changes",
    callbacks: "Sequence[L.Callback]",
    folder: Path,
    seed: int,
    arguments: Sequence[str],
    serves: bool = False,
    fit: "Fit | None" = None,
) -> None:
    """Fit a config with changes, use its model, or call ``fit``: :class:`lightning_accel.tuning.project.Project`."""
    import yaml

    from lightning_accel.cli.bare_run import BareRun
    from lightning_accel.cli.errors import UsageError, explain, require_config_files
    from lightning_accel.tuning.project import fit_isolated
    from lightning_accel.tuning.serving import serve_isolated

    overlay = folder / "overlay.yaml"
    overlay.write_text(yaml.safe_dump(changes.config()))
    command = ["fit", *arguments, f"--config={overlay}", f"--seed_everything={seed}"]
    run = fit or partial(serve_isolated if serves else fit_isolated, folder=folder)
    require_config_files(arguments)
    try:
        BareRun(command, callbacks, run, loads_weights=serves)
    except argparse.ArgumentError as error:
        raise UsageError(explain(error.message)) from error


def run_tune(arguments: Sequence[str]) -> int:
    """Run ``lightning-accel tune`` with its arguments, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-accel tune",
        description="Find changes that make a run faster on this machine, train in less memory, or take less time for "
        "one sample after training, and prove that it learns or computes the same.",
        epilog="All other arguments are those of fit: --config X.yaml, --trainer.max_epochs 3, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--budget", default="10m", help="time of the search, such as 90s, 10m or 1h (default: 10m)")
    parser.add_argument(
        "--goal",
        choices=GOALS,
        default="speed",
        help="speed: samples per second of training; memory: the smallest peak of what training adds to what its "
        "processes hold when it begins (on CUDA, of what tensors take), at 0.7 times the speed or more; latency: the "
        "time of one sample in predict, or in validate without data for predict, with the weights of --ckpt_path FILE "
        "if it is given (default: speed)",
    )
    parser.add_argument(
        "--allow",
        default="",
        metavar="NAME[,NAME]",
        help="changes of what is learned, or float8, to try as well, if losses after as many samples are equivalent, "
        "or several samples in a row, if a step learns the same: "
        f"{', '.join(ALLOWABLE)} (default: none)",
    )
    parser.add_argument("--output", default="tuned", help="folder of tuned.yaml and report.md (default: tuned)")
    try:
        own, of_fit = parser.parse_known_args(arguments)
        reject_misspelt(parser, own, of_fit)
        if not of_fit:
            parser.error("give the run to tune, as to fit: --config X.yaml")
        if not of_fit[0].startswith("-"):
            parser.error(
                f"unexpected {of_fit[0]!r}; options of fit begin with --, and a budget is one word, such as 5m"
            )
    except SystemExit as stop:
        return int(stop.code or 0)
    received: list[int] = []
    try:
        with _interrupted_once(received):
            return _tune(own, of_fit)
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {own.output}, and the same command goes on from there")
        return 128 + (received or [signal.SIGINT])[0]


@contextmanager
def _interrupted_once(received: list[int]) -> Iterator[None]:
    """Raise KeyboardInterrupt for the first SIGINT or SIGTERM alone, so that another does not end the cleaning up."""

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt

    numbers = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tune(own: argparse.Namespace, of_fit: list[str]) -> int:
    from lightning_accel.cli.errors import UsageError, require_config_files
    from lightning_accel.tuning import TrialError, tune
    from lightning_accel.tuning.variant import UnusableRunError
    from lightning_accel.tuning.writing import claim, why_nothing

    try:
        require_config_files(of_fit)
        outcome = tune(
            of_fit, own.budget, own.output, own.goal, [name.strip() for name in own.allow.split(",") if name.strip()]
        )
    except (ModuleNotFoundError, OSError, TrialError, UsageError, ValueError) as error:
        print(f"lightning-accel tune: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UnusableRunError | UsageError | ValueError) else 1
    report = Path(own.output) / "report.md"
    if not outcome.is_faster:
        print(f"{why_nothing(outcome)}; see {report}")
        return 0
    stage = outcome.facts.get("stage", "fit")
    print(f"{claim(outcome)}; see {report}. {'Train' if stage == 'fit' else 'Use it'} with")
    print(f"  lightning-accel {stage} {' '.join(of_fit)} --config {Path(own.output) / 'tuned.yaml'}")
    return 0
