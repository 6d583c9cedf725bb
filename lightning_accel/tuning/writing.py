"""What a search leaves behind: an overlay of the config, a report to read, one for programs, and a picture."""

import json
from pathlib import Path
from typing import Any

import yaml

from lightning_accel.callbacks.speedups import machine_name
from lightning_accel.ops.extras import require_module
from lightning_accel.strategies.checkpoints.atomic import write_atomically
from lightning_accel.tuning.search import Measurement, Outcome


def write_outcome(outcome: Outcome, folder: Path, command: str, date: str) -> list[Path]:
    """Write ``tuned.yaml`` if something faster was found, ``report.md``, ``report.json`` and ``report.png``.

    Args:
        outcome: of the search.
        folder: where.
        command: what was tuned, for the reader.
        date: of the search.

    Returns:
        The files, the overlay first if there is one.
    """
    files = {"report.md": _report(outcome, command, date), "report.json": json.dumps(outcome.to_dict(), indent=1)}
    if outcome.is_faster:
        files = {"tuned.yaml": overlay(outcome, command, date)} | files
    else:
        (folder / "tuned.yaml").unlink(missing_ok=True)
    for name, text in files.items():
        with write_atomically(folder / name) as part:
            part.write_text(text)
    paths = [folder / name for name in files]
    if any(one.ratio for one in outcome.alone.values()):
        _draw(outcome, folder / "report.png")
        paths.append(folder / "report.png")
    return paths


def overlay(outcome: Outcome, command: str, date: str) -> str:
    """Return the YAML that a run takes by another ``--config``, with what each line gained alone as its comment."""
    assert outcome.proof is not None
    assert outcome.proof.ratio is not None
    gains = {}
    for factor in outcome.chosen:
        ratio = outcome.alone[factor.name].ratio
        for name in (*factor.changes.trainer, *factor.changes.speedups):
            gains[name] = f"alone {ratio}, {date}"
    changes = outcome.changes
    if changes.speedups:
        changes.speedups["measured_on"] = machine_name()
    lines = [
        f"# {command}",
        f"# {outcome.proof.ratio} times the steps per second, in {outcome.proof.ratio.turns} turns with the run as it",
        f"# was, {date}, {machine_name()}",
    ]
    for line in yaml.safe_dump(changes.config(), sort_keys=False).splitlines():
        gain = gains.get(line.strip().partition(":")[0])
        lines.append(f"{line}  # {gain}" if gain else line)
    return "\n".join(lines) + "\n"


def _report(outcome: Outcome, command: str, date: str) -> str:
    rate, items = outcome.steps_per_second, outcome.facts["items_per_step"]
    lines = [
        f"# {command}",
        "",
        f"{date}, {machine_name()}, {outcome.seconds:.0f} s. As it is, the run takes {rate:.3g} steps"
        f" ({rate * items:.4g} samples) per second.",
        "",
        "## Result",
        "",
    ]
    proof = outcome.proof
    if outcome.is_faster and proof is not None and proof.ratio is not None:
        names = ", ".join(f"`{factor.name}`" for factor in outcome.chosen)
        lines += [
            f"**{proof.ratio} times as fast** (95 % interval, {proof.ratio.turns} turns; {proof.over_run:.2f} over the"
            f" whole run, its start included) by {names}.",
        ]
    else:
        lines += ["Nothing was found that makes the run faster by more than the interval, so that nothing is changed."]
        if proof is not None:
            lines += ["", f"Together, the best changes gave {proof.ratio or proof.reason}."]
    lines += ["", *[f"- {'equal' if v.passed else 'not shown to be equal'}: {v.reason}" for v in outcome.verdicts]]
    lines += ["", "## Each change alone", "", "| change | times as fast (95 %) | over the run | start, s | note |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for name, found in outcome.alone.items():
        lines.append(f"| {name} | {_cells(found)} | {found.reason} |")
    if outcome.without:
        lines += ["", "## Without each change", "", "| without | times as fast as with it (95 %) |", "| --- | --- |"]
        lines += [f"| {name} | {found.ratio or found.reason} |" for name, found in outcome.without.items()]
    if outcome.refused:
        lines += ["", "## Not tried", "", *[f"- {one.name}: {one.reason}" for one in outcome.refused]]
    return "\n".join(lines) + "\n"


def _cells(found: Measurement) -> str:
    if found.ratio is None:
        return "| | "
    return f"{found.ratio} | {found.over_run:.2f} | {found.start_seconds:.0f}"


def _draw(outcome: Outcome, path: Path) -> None:
    figure: Any = require_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    measured = {name: one.ratio for name, one in outcome.alone.items() if one.ratio is not None}
    if outcome.is_faster and outcome.proof is not None and outcome.proof.ratio is not None:
        measured["all that were chosen"] = outcome.proof.ratio
    axes = figure.subplots()
    chosen = {factor.name for factor in outcome.chosen} | {"all that were chosen"}
    for place, (name, ratio) in enumerate(measured.items()):
        color = "tab:blue" if name in chosen and outcome.is_faster else "tab:gray"
        spread = [[ratio.value - ratio.low], [ratio.high - ratio.value]]
        axes.barh(place, ratio.value, xerr=spread, color=color)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(measured)), list(measured))
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as the run as it is (95 % interval)")
    figure.savefig(path, dpi=150)
