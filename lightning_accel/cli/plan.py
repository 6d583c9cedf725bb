"""Subcommand ``lightning-accel plan``."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_accel.cli.own_options import reject_misspelt

if TYPE_CHECKING:
    from lightning_accel.planning.simulation import Fit, Run


def run_plan(arguments: Sequence[str]) -> int:
    """Run ``lightning-accel plan`` with its arguments, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-accel plan",
        usage="lightning-accel plan --config X (--gpus 8xH100-80GB | --processes N) [--machines M] [options of fit]",
        description="Predict memory, communication and time of a training step on machines that are not there, for "
        "each strategy, from the run's own code, in seconds and without a GPU. Nothing is trained, and nothing written "
        "but what --output and --json name.",
        epilog="All other arguments are those of fit: --config X.yaml, --model.dim 4096, --trainer.precision bf16-true",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", help="GPUs of each machine: number and kind, such as 8xH100-80GB, or 4xA100-40GB")
    parser.add_argument("--machines", type=int, default=1, help="number of such machines; by default 1")
    parser.add_argument("--processes", type=int, help="without GPUs: processes of each machine, which is one like this")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the overlay of the fastest that fits")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file, too")
    try:
        own, of_fit = parser.parse_known_args(arguments)
        reject_misspelt(parser, own, of_fit)
        if not of_fit:
            parser.error("give the run to plan, as to fit: --config X.yaml")
        if (own.gpus is None) == (own.processes is None):
            parser.error("give --gpus, such as 8xH100-80GB, or --processes")
        for file in (own.output, own.json):
            if file is not None and not file.parent.is_dir():
                parser.error(f"there is no folder {file.parent} for {file}; make it first")
    except SystemExit as stop:
        return int(stop.code or 0)
    from lightning_accel.cli.errors import UsageError, require_config_files
    from lightning_accel.planning import SimulationError, plan

    try:
        require_config_files(of_fit)
        found = plan(of_fit, own.gpus, own.machines, own.processes)
        found.print()
        if own.json is not None:
            own.json.write_text(json.dumps(found.to_dict(), indent=1) + "\n")
        if found.best is not None:
            _write_overlay(found.overlay(), own.output, of_fit)
    except (ModuleNotFoundError, OSError, SimulationError, UsageError, ValueError) as error:
        print(f"lightning-accel plan: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError | ValueError) else 1
    return 0


def _write_overlay(overlay: dict[str, Any], file: Path | None, of_fit: list[str]) -> None:
    import yaml

    text = yaml.safe_dump(overlay, sort_keys=False)
    if file is None:
        print(f"the fastest that fits, as a config:\n\n{text}")
        return
    file.write_text(text)
    print(f"train with\n  lightning-accel fit {' '.join(of_fit)} --config {file}")


def run_of(arguments: Sequence[str]) -> "Run":
    """Return a function that makes the Trainer, module and data of a command line, with other arguments of a Trainer.

    It raises UsageError if the command line does not fit.
    """
    import yaml

    from lightning_accel.cli.bare_run import BareRun
    from lightning_accel.cli.errors import UsageError, explain

    def run(options: dict[str, Any], fit: "Fit") -> None:
        with tempfile.TemporaryDirectory(prefix="plan-") as folder:
            overlay = Path(folder) / "overlay.yaml"
            overlay.write_text(yaml.safe_dump({"trainer": options}))
            try:
                BareRun(["fit", *arguments, f"--config={overlay}"], [], fit)
            except argparse.ArgumentError as error:
                raise UsageError(explain(error.message)) from error

    return run
