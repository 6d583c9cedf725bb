"""Subcommand ``lightning-accel doctor``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_accel.cli.own_options import reject_misspelt

if TYPE_CHECKING:
    from lightning import Callback, LightningDataModule, LightningModule, Trainer

    from lightning_accel.diagnosis import Diagnosis


def run_doctor(arguments: Sequence[str]) -> int:
    """Measure, print the tables, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-accel doctor",
        usage="lightning-accel doctor [--json FILE] [--folder FOLDER] [--config X [--seconds S] [options of fit]]",
        description="Describe this machine and measure what it reaches: matrix products in each precision, memory, "
        "copies to GPUs, collectives between processes, the disk; this takes less than 20 seconds. With --config (or "
        "other options of fit) train that run for some seconds first, in a temporary folder, and tell where the time "
        "of a step goes and what slows it; a timeline of a step is drawn to figures/doctor_step.png.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything to this file, too")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        help="measure the disk of this folder, and draw in its figures/; by default the current one",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to train; by default 10")
    try:
        options, rest = parser.parse_known_args(arguments)
        reject_misspelt(parser, options, rest)
    except SystemExit as stop:
        return int(stop.code or 0)
    if reason := _reason_against(options):
        print(f"lightning-accel doctor: error: {reason}", file=sys.stderr)
        return 2
    try:
        return _examine(rest, options) if rest else _describe(options)
    except OSError as error:  # such as that of a full disk; the tables are printed first
        print(f"lightning-accel doctor: error: {error}", file=sys.stderr)
        return 1


def _describe(options: argparse.Namespace) -> int:
    from lightning_accel.diagnosis import doctor

    found = doctor(folder=options.folder)
    assert found is not None  # as without a run
    _report(found, options)
    return 0


def _examine(arguments: list[str], options: argparse.Namespace) -> int:
    from lightning_accel.cli.bare_run import BareRun
    from lightning_accel.cli.command import run
    from lightning_accel.cli.errors import UsageError
    from lightning_accel.diagnosis import Examined, TooShortError, diagnose, examine

    seen: list[Examined | None] = []

    def fit(trainer: "Trainer", module: "LightningModule", data: "LightningDataModule | None") -> None:
        try:
            seen.append(examine(trainer, module, data, seconds=options.seconds))
        except TooShortError as error:
            raise UsageError(str(error)) from error

    def examined_run(command: list[str], callbacks: list["Callback"]) -> None:
        BareRun(command, callbacks, fit)

    status = run(["fit", *arguments], examined_run)
    if status or not seen or seen[0] is None:  # an error, --print_config, or a process beside the first
        return status
    found = diagnose(seen[0], options.folder)
    _report(found, options)
    try:
        print(f"timeline of a step: {found.draw(options.folder)}")
    except ModuleNotFoundError as error:
        print(f"no timeline of a step: {error}")
    return 0


def _report(found: "Diagnosis", options: argparse.Namespace) -> None:
    found.print()
    if options.json is not None:
        found.write_json(options.json)


def _reason_against(options: argparse.Namespace) -> str | None:
    """Return why the options cannot work, which would otherwise be known only after measuring."""
    if not options.folder.is_dir():
        return f"--folder {options.folder} is no folder; name one that exists"
    if options.seconds <= 0:
        return f"--seconds must be positive; it is {options.seconds:g}"
    if options.json is not None and (options.json.is_dir() or not os.access(options.json.absolute().parent, os.W_OK)):
        return f"--json {options.json} cannot be written; name a file in a folder that exists and can be written to"
    return None
