"""The doctor: what a machine is and reaches."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_accel.diagnosis.machine_tables import machine_tables
from lightning_accel.diagnosis.table import print_tables
from lightning_accel.measure import Machine, Rates, describe_machine, measure_rates


@dataclass(frozen=True)
class Diagnosis:
    """Hold what :func:`doctor` found."""

    machine: Machine
    rates: Rates

    def print(self) -> None:
        """Print it as tables, by rich where it is installed."""
        print_tables(machine_tables(self.machine, self.rates))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as values that JSON can hold."""
        return {"machine": self.machine.to_dict(), "rates": self.rates.to_dict()}

    def write_json(self, path: Path | str) -> None:
        """Write it to a JSON file.

        Raises:
            OSError: if the file cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")


def doctor(*, folder: Path | str = ".") -> Diagnosis:
    """Describe this machine and measure its rates, in less than 20 seconds.

    Args:
        folder: a folder on the disk whose speed counts, such as that of runs; a file of 128 MiB is written there for a
            moment.
    """
    return Diagnosis(describe_machine(), measure_rates(folder))
