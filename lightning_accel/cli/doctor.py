"""Subcommand ``lightning-accel doctor``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def run_doctor(arguments: Sequence[str]) -> int:
    """Measure, print the tables, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-accel doctor",
        description="Describe this machine and measure what it reaches: matrix products in each precision, memory, "
        "copies to GPUs, collectives between processes, the disk. It takes less than 20 seconds.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything to this file, too")
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="measure the disk of this folder; by default the current one"
    )
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    if reason := _reason_against(options):
        print(f"lightning-accel doctor: error: {reason}", file=sys.stderr)
        return 2
    from lightning_accel.diagnosis import doctor

    found = doctor(folder=options.folder)
    found.print()
    if options.json is not None:
        found.write_json(options.json)
    return 0


def _reason_against(options: argparse.Namespace) -> str | None:
    """Return why the options cannot work, which would otherwise be known only after measuring."""
    if not options.folder.is_dir():
        return f"--folder {options.folder} is no folder; name one that exists"
    if options.json is not None and (options.json.is_dir() or not os.access(options.json.absolute().parent, os.W_OK)):
        return f"--json {options.json} cannot be written; name a file in a folder that exists and can be written to"
    return None
