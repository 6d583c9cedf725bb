"""What is reported of a fit, as a table, a picture and JSON."""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_accel.callbacks.watchdog.callback import Finding
from lightning_accel.measure.step_parts import PART_NAMES
from lightning_accel.measure.table import Table, in_bytes
from lightning_accel.ops.figures import BLUE, ORANGE, new_axes
from lightning_accel.strategies.checkpoints.atomic import write_atomically

_MOST_CURVES = 3  # in the picture
_LEAST_SHARE = 0.005  # of the time, for a row of the table
_OVERFITTING = "overfitting"
_LEAST_RISE = 0.1  # of the least loss, to its last value
_LEAST_LATER = 2  # validations after the least loss
_NAMES = PART_NAMES | {"callbacks": "callbacks and logging", "rest": "the Trainer's loop and start"}


class BestCheckpoint(NamedTuple):
    """Hold the metric by which a ModelCheckpoint chooses, its best value and the file that holds those weights.

    Without a metric, the file is the last one.
    """

    monitor: str | None
    value: float | None
    path: str


@dataclass(frozen=True)
class RunSummary:
    """Hold what is reported of a fit.

    Attributes:
        status: ``finished``, ``interrupted`` or ``failed``.
        error: of a run that failed.
        seconds: from the begin of the fit to its end.
        parts: seconds of each part of :data:`lightning_accel.measure.RUN_PARTS`; their sum is ``seconds``.
        epochs: completed in this fit; one that resumes a run counts from there.
        batches: training batches of this process.
        steps: updates of all optimizers.
        samples_per_s: of all processes, over the time without validation and checkpoints; None if a batch does not
            tell its samples.
        processes: number of processes.
        device: of the first process.
        precision: the Trainer's.
        share_of_peak: operations per second as a share of the measured rate of matrix products; None if not measured.
        no_share_because: why not.
        memory: bytes of parameters, gradients, optimizer states, and the peak of the process or its GPU.
        best: of each ModelCheckpoint that has written one.
        metrics: the last values of logged metrics.
        curves: of each metric of validation that loggers got, the step and the value at each validation.
        health: what a :class:`~lightning_accel.callbacks.Watchdog` has found, and losses of validation that rose to the
            end, if no callback keeps the best weights: kind, training batch (the optimizer step of the least loss) and
            text of each; None without a Watchdog or such a loss.
        commands: what to do next, to type.
    """

    status: str
    error: str | None
    seconds: float
    parts: dict[str, float]
    epochs: int
    batches: int
    steps: int
    samples_per_s: float | None
    processes: int
    device: str
    precision: str
    share_of_peak: float | None = None
    no_share_because: str | None = None
    memory: dict[str, int] = field(default_factory=dict)
    best: list[BestCheckpoint] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    health: list[Finding] | None = None
    commands: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values that JSON can hold; numbers that are not finite are None."""
        told = asdict(self) | {"best": [each._asdict() for each in self.best]}
        if self.health is not None:
            told["health"] = [each._asdict() for each in self.health]
        return _finite(told)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def shown_parts(self) -> dict[str, float]:
        """Return the seconds of parts that are more than half a percent, by what they are called in a report."""
        parts = dict(self.parts)
        parts["callbacks"] += parts.pop("logging")
        least = _LEAST_SHARE * self.seconds
        return {_NAMES.get(part, part): spent for part, spent in parts.items() if spent > least}

    def _shown_curves(self) -> list[str]:
        """Return the names of up to three metrics of validation, monitored ones and losses first."""
        monitored = {each.monitor for each in self.best}
        return sorted(self.curves, key=lambda name: (name not in monitored, "loss" not in name))[:_MOST_CURVES]

    def table(self) -> Table:
        """Return the table for a terminal."""
        rows = [(name, f"{spent:.3g} s, {spent / self.seconds:.0%}") for name, spent in self.shown_parts().items()]
        if self.samples_per_s is not None:
            rows.append(("samples", f"{_rate(self.samples_per_s)} a second"))
        share = f"{self.share_of_peak:.1%}" if self.share_of_peak is not None else self.no_share_because or "not known"
        rows.append(("share of peak", share))
        rows.append(("memory", ", ".join(f"{name} {in_bytes(size)}" for name, size in self.memory.items() if size)))
        rows += [(name, _told_curve(name, self.curves[name])) for name in self._shown_curves()]
        for each in self.best:
            value = "" if each.value is None else f" {each.value:.4g}"
            name = "last checkpoint" if each.monitor is None else f"best {each.monitor}{value}"
            rows.append((name, Path(each.path).name))
        if not self.best:
            rows.append(("checkpoint", "none was written"))
        if self.health is not None:
            found = Counter(each.kind for each in self.health)
            kinds = [kind if count == 1 else f"{count} times {kind}" for kind, count in found.items()]
            first = f", first at batch {min(each.step for each in self.health)}" if self.health else ""
            rows.append(("health", f"{', '.join(kinds) or 'nothing found'}{first}"))
            rows += [(each.kind, each.text) for each in self.health if each.kind == _OVERFITTING]
        counted = f"epochs {self.epochs}, batches {self.batches}, {self.seconds:.3g} s"
        ending = "" if self.status == "finished" else f", {self.status}"
        return Table(f"The fit: {counted}{ending}", (), rows)

    def draw(self, path: Path) -> None:
        """Draw the time of each part as bars.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
            NotWrittenError: if the disk is full, or may not be written.
        """
        parts = self.shown_parts()
        figure, (axes,) = new_axes((8, 0.9 + 0.3 * len(parts)))
        bars = axes.barh(range(len(parts)), list(parts.values()), color=BLUE)
        axes.bar_label(bars, [f"{spent / self.seconds:.0%}" for spent in parts.values()], padding=3)
        axes.set_yticks(range(len(parts)), list(parts))
        axes.invert_yaxis()
        axes.margins(x=0.1)
        rate = "" if self.samples_per_s is None else f", {_rate(self.samples_per_s)} samples/s"
        axes.set_xlabel(f"time, s ({self.seconds:.3g} s in all{rate})")
        with write_atomically(path) as part:
            figure.savefig(part, format="png")

    def draw_curves(self, path: Path) -> None:
        """Draw the metrics of validation over the steps, with the best checkpoint; nothing if it ran less than twice.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
            NotWrittenError: if the disk is full, or may not be written.
        """
        monitored = {each.monitor: each.value for each in self.best}
        names = [name for name in self._shown_curves() if len(self.curves[name]) > 1]
        if not names:
            return
        figure, panels = new_axes((0.5 + 3.5 * len(names), 3), columns=len(names), sharex=True)
        for axis, name in zip(panels, names, strict=True):
            axis.plot(*zip(*self.curves[name], strict=True), color=BLUE)
            axis.set(xlabel="optimizer step", ylabel=name)
            best = monitored.get(name)
            if best is not None and math.isfinite(best):
                place = min(self.curves[name], key=lambda point: abs(point[1] - best))  # has been rounded elsewhere
                axis.plot(*place, "o", color=ORANGE)
                axis.set_title(f"best checkpoint: {best:.4g}", fontsize="medium")
        with write_atomically(path) as part:
            figure.savefig(part, format="png")


def _told_curve(name: str, curve: list[tuple[int, float]]) -> str:
    """Return the first and the last value, and where a loss was least."""
    (_, first), (_, last) = curve[0], curve[-1]
    told = f"{last:.4g}" if len(curve) == 1 else f"{first:.4g} at first, {last:.4g} at the end"
    step, least = min(curve, key=lambda point: point[1])
    return f"{told}, least {least:.4g} at step {step}" if "loss" in name and least < min(first, last) else told


def overfitted(curves: dict[str, list[tuple[int, float]]]) -> list[Finding]:
    """Return a finding for each loss of validation that ends clearly above its least value, some validations later."""
    found = []
    for name, curve in curves.items():
        if "loss" not in name:  # of others, higher may be better
            continue
        at = min(range(len(curve)), key=lambda i: curve[i][1])
        (step, least), (_, last) = curve[at], curve[-1]
        if len(curve) - 1 - at >= _LEAST_LATER and last - least > _LEAST_RISE * abs(least):
            text = (
                f"{name} was least at step {step}, {least:.4g}, and is {last:.4g} at the end; keep the best by "
                f"ModelCheckpoint(monitor={name!r}), and go on with --ckpt_path best"
            )
            found.append(Finding(_OVERFITTING, step, text))
    return found


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 1000 else f"{per_s:.4g}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
