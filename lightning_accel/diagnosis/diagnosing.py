"""The doctor: what a machine is and reaches, where a run's time goes, and what slows it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_accel.diagnosis.machine_tables import machine_tables
from lightning_accel.measure import Machine, Rates, describe_machine, measure_rates
from lightning_accel.measure.table import Table, as_texts, print_tables

if TYPE_CHECKING:  # a machine alone is measured without Lightning
    from lightning_accel.diagnosis.examination import Examined
    from lightning_accel.diagnosis.findings import Finding


@dataclass(frozen=True)
class Diagnosis:
    """Hold what :func:`doctor` found.

    Attributes:
        machine: the machine.
        rates: its measured rates.
        run: what was seen of the run, None without one.
        share_of_peak: operations per second of the run, as a share of the measured peak of its precision.
        findings: what slows the run, the most expensive first.
    """

    machine: Machine = field(repr=False)
    rates: Rates = field(repr=False)
    run: "Examined | None" = field(default=None, repr=False)
    share_of_peak: float | None = None
    findings: "list[Finding]" = field(default_factory=list)

    def print(self) -> None:
        """Print it as tables, by rich where it is installed."""
        print_tables(self._tables())

    def __str__(self) -> str:
        return as_texts(self._tables())

    def _tables(self) -> list[Table]:
        tables = machine_tables(self.machine, self.rates)
        if self.run is not None:
            from lightning_accel.diagnosis.run_tables import run_tables

            tables += run_tables(self.run, self.share_of_peak, self.findings)
        return tables

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as values that JSON can hold; times are in ms, means of the steps."""
        told: dict[str, Any] = {"machine": self.machine.to_dict(), "rates": self.rates.to_dict()}
        if self.run is not None:
            findings = [finding.to_dict() for finding in self.findings]
            told["run"] = self.run.to_dict() | {"share_of_peak": self.share_of_peak}
            told["findings"] = findings
        return told

    def write_json(self, path: Path | str) -> None:
        """Write it to a JSON file.

        Raises:
            NotWrittenError: if the disk is full, or may not be written.
        """
        from lightning_accel.strategies.checkpoints.atomic import write_atomically

        with write_atomically(path) as part:
            part.write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def draw(self, folder: Path | str = ".") -> Path:
        """Draw the timeline of a step to ``figures/doctor_step.png`` in a folder, and return its path.

        Raises:
            ValueError: if there was no run.
            ModuleNotFoundError: if matplotlib is not installed.
        """
        if self.run is None:
            raise ValueError("a timeline is that of a run; give doctor() a function that makes one")
        from lightning_accel.diagnosis.picture import draw_step

        path = Path(folder) / "figures" / "doctor_step.png"
        draw_step(self.run.steps, path)
        return path


def doctor(
    make: Callable[[], tuple[Any, Any, Any]] | None = None, *, folder: Path | str = ".", seconds: float = 10.0
) -> Diagnosis | None:
    """Describe this machine and measure its rates, in less than 20 seconds; before that, examine a run.

    Args:
        make: a function that returns a new (trainer, module, data), the data a datamodule, a DataLoader or None. It is
            fitted for some seconds and then of no further use; its run folder stays untouched.
        folder: a folder on the disk whose speed counts, such as that of runs; a file of 128 MiB is written there for a
            moment.
        seconds: how long to train, after the first batches.

    Returns:
        What was found; None in processes of the run other than the first.

    Raises:
        TooShortError: if the run ends before its steps were timed.
        TypeError: if ``make`` is no function, or returns something else.
        ValueError: if ``seconds`` is not positive.
    """
    if seconds <= 0:
        raise ValueError(f"seconds must be positive; got {seconds}")
    if make is None:
        return Diagnosis(describe_machine(), measure_rates(folder))
    if not callable(make):
        raise TypeError(
            f"doctor takes a function that makes (trainer, module, data); got {type(make).__name__}. Pass the function "
            "itself, doctor(make), not what it returns"
        )
    from lightning_accel.diagnosis.examination import examine
    from lightning_accel.measure import make_run

    trainer, module, data = make_run(make, {})
    seen = examine(trainer, module, data, seconds=seconds)
    return None if seen is None else diagnose(seen, folder)


def diagnose(seen: "Examined", folder: Path | str = ".") -> Diagnosis:
    """Measure the machine, and find what slows a run that has been examined on it.

    Args:
        seen: what was seen of the run.
        folder: a folder on the disk whose speed counts.
    """
    from lightning.pytorch.utilities import rank_zero_info

    from lightning_accel.diagnosis.findings import find_slowness
    from lightning_accel.measure import part_times, share_of_peak

    rank_zero_info("doctor: measure this machine, in less than 20 s")
    machine, rates = describe_machine(), measure_rates(folder, device=seen.device)
    step_s = sum(part_times(seen.steps).values()) / 1000
    share = None if not seen.flops else share_of_peak(seen.flops, step_s, rates, seen.multiplies_in)
    return Diagnosis(machine, rates, seen, share, find_slowness(seen, machine, rates))
