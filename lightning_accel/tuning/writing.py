"""What a search leaves behind: an overlay of the config, a report to read, one for programs, and a picture."""

import json
from pathlib import Path

import yaml

from lightning_accel.callbacks.speedups import machine_name
from lightning_accel.measure.allocators import variables_for
from lightning_accel.ops.extras import require_module
from lightning_accel.ops.figures import BLUE, GREY, new_axes
from lightning_accel.strategies.checkpoints.atomic import write_atomically
from lightning_accel.tuning.outcome import LEAST_SPEED, Measurement, Outcome
from lightning_accel.tuning.outputs import LEAST_EQUAL, MOST_DEVIATION

AIMS = {
    "speed": "makes this run faster",
    "memory": "lets this run train in less memory",
    "latency": "lowers the latency of this model",
}


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
    gains = {}
    for factor in outcome.chosen:
        added = outcome.added.get(factor.name)
        gain = f"alone {_gain(outcome.alone[factor.name])}" if added is None else f"beside the others {_gain(added)}"
        for name in (name for part in vars(factor.changes).values() for name in part):
            gains[name] = f"{gain}, {date}"
    changes = outcome.changes
    changes.speedups["measured_on"] = machine_name()  # also where nothing else is a speedup
    lines = [
        f"# {command}",
        f"# {claim(outcome)}, against the run as it was,",
        f"# {date}, {machine_name()}",
    ]
    for line in yaml.safe_dump(changes.config(), sort_keys=False).splitlines():
        comment = gains.get(line.strip().partition(":")[0]) or gains.get(line.rpartition(".")[2])
        lines.append(f"{line}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n"


def _report(outcome: Outcome, command: str, date: str) -> str:
    lines = [
        f"# {command}",
        "",
        f"{date}, {machine_name()}, {outcome.seconds:.0f} s. As it is, {_as_it_is(outcome)}.",
        "",
        "## Result",
        "",
    ]
    proof = outcome.proof
    if outcome.is_faster and proof is not None and proof.ratio is not None:
        names = ", ".join(f"`{factor.name}`" for factor in outcome.chosen)
        turns = f"{proof.ratio.turns} turns" if proof.memory is None else f"{proof.memory.turns} processes of each"
        whole = f"{proof.over_run:.2f} times as fast over the whole run, its start included"
        if outcome.latency is not None:
            whole = f"it starts in {proof.start_seconds:.0f} s, as measured"
        lines += [f"**{claim(outcome)}** (95 % interval, {turns}; {whole}) by {names}."]
    else:
        reason = why_nothing(outcome)
        lines += [f"{reason[0].upper()}{reason[1:]}. Nothing is changed."]
        if proof is not None:
            measured = proof.memory or proof.ratio
            told = f"measured as {measured} times" if measured else f"not measured: {proof.reason}"
            names = " and ".join(f"`{factor.name}`" for factor in outcome.chosen)
            lines += ["", f"At the end, {names} {'was' if len(outcome.chosen) == 1 else 'together were'} {told}."]
    if allocator := outcome.changes.speedups.get("allocator"):
        variables = " ".join(f"{name}={value}" for name, value in variables_for(allocator).items())
        lines += [
            "",
            f"The allocator {allocator} is in a process from its start. `lightning-accel` starts itself again with it; "
            f"start a program of your own with these variables: `{variables}`.",
        ]
    lines += _notes(outcome)
    lines += ["", *[f"- {'equal' if v.passed else 'not shown to be equal'}: {v.reason}" for v in outcome.verdicts]]
    lines += [
        "",
        "## Each change alone",
        "",
        _HEADS[outcome.goal],
        "| --- " * (_HEADS[outcome.goal].count("|") - 1) + "|",
    ]
    for name, found in outcome.alone.items():
        lines.append(f"| {name} | {_cells(outcome, found)} | {found.reason} |")
    if outcome.without:
        what = "times less memory than with it" if outcome.goal == "memory" else "times as fast as with it (95 %)"
        lines += ["", "## Without each change", "", f"| without | {what} |", "| --- | --- |"]
        lines += [f"| {name} | {_gain(found)} |" for name, found in outcome.without.items()]
    if outcome.added:
        lines += [
            "",
            "## With each further change",
            "",
            "| with | times as fast as without it (95 %) |",
            "| --- | --- |",
        ]
        lines += [f"| {name} | {_gain(found)} |" for name, found in outcome.added.items()]
    if outcome.refused:
        lines += ["", "## Not tried", "", *[f"- {one.name}: {one.reason}" for one in outcome.refused]]
    return "\n".join(lines) + "\n"


def _cells(outcome: Outcome, found: Measurement) -> str:
    if outcome.goal == "latency":
        return f"{found.ratio} | {found.after} | {found.start_seconds:.0f}" if found.ratio else "| | "
    saved = "" if outcome.goal == "speed" else f"{found.saving:.2f} | " if found.saving else " | "
    if found.ratio is None:
        return f"{saved}| | "
    return f"{saved}{found.ratio} | {found.over_run:.2f} | {found.start_seconds:.0f}"


def claim(outcome: Outcome) -> str:
    """Return what the chosen changes achieve, for a reader."""
    assert outcome.proof is not None
    return _gain_of(outcome, outcome.proof) + ("" if outcome.is_compared else ", NOT YET COMPARED in what it computes")


def _gain_of(outcome: Outcome, proof: Measurement) -> str:
    if outcome.goal == "latency":
        return f"{proof.ratio} times as fast: one sample takes {proof.after} instead of {proof.before}"
    if outcome.goal == "speed":
        return f"{proof.ratio} times as fast"
    if proof.memory is None:
        return _gain(proof)
    return f"{proof.memory} times less memory, {proof.ratio} times as fast"


def why_nothing(outcome: Outcome) -> str:
    """Return that nothing better was found, and whether for want of time, for a reader."""
    aim = AIMS[outcome.goal]
    if not outcome.num_cut:
        return f"nothing was found that {aim} by more than the interval"
    promising = max((one for one in outcome.alone.items() if one[1].wins), key=lambda one: one[1].gain, default=None)
    is_measured = outcome.proof is not None and outcome.proof.ratio is not None
    end = "alone, and not shown to be at the end" if is_measured else "without a proof"
    promise = f"{promising[0]} was {_gain_of(outcome, promising[1])}, {end}; " if promising else ""
    return (
        f"nothing was shown within the budget that {aim}: {promise}of the measurements, {outcome.num_cut} were left "
        "out or cut short; the same command with a longer budget (10m suffices for most runs) goes on from there"
    )


def _gain(found: Measurement) -> str:
    if found.ratio is None:
        return found.reason
    speed = str(found.ratio)
    return speed if found.saving is None else f"{found.saving:.2f} times less memory, {speed} times as fast"


_HEADS = {
    "speed": "| change | times as fast (95 %) | over the run | start, s | note |",
    "memory": "| change | times less memory | times as fast (95 %) | over the run | start, s | note |",
    "latency": "| change | times as fast (95 %) | one sample | start, s | note |",
}


def _notes(outcome: Outcome) -> list[str]:
    """Return what a reader has to know of how memory or latency are measured."""
    if outcome.goal == "memory":
        return [
            "",
            f"As it is, training needs {outcome.peak_bytes / 2**20:.0f} MiB: on the CPU, what it adds to what its"
            " processes hold when it begins (gradients, states of optimizers, activations, batches, what workers hold"
            " alone; not weights and libraries), on CUDA the peak of what tensors take. Changes may make it slower,"
            f" down to {LEAST_SPEED} times the speed, for to recompute all activations takes a quarter of a step's time"
            " or more.",
        ]
    if outcome.goal == "latency":
        return [
            "",
            "Times are medians of single samples, with the middle half in brackets: from the batch of one sample on"
            " the device to the end of its step. A start is that of a process, with data, compilation and the first"
            " samples; it is not charged against the gain. Outputs of the same samples with the same weights are"
            " compared: exact changes may move them ten times as far as one rounding of the weights does, fewer digits"
            f" by a root mean square of {MOST_DEVIATION:.0%} of their standard deviation over samples (of integers,"
            f" {LEAST_EQUAL:.0%} are equal).",
        ]
    return []


def _as_it_is(outcome: Outcome) -> str:
    if outcome.latency is not None:
        return f"one sample takes {outcome.latency} in `{outcome.facts['stage']}`"
    rate, items = outcome.steps_per_second, outcome.facts["items_per_step"]
    return f"the run takes {rate:#.3g} steps ({rate * items:#.4g} samples) per second"


def _draw(outcome: Outcome, path: Path) -> None:
    patches = require_module("matplotlib.patches")
    measured = {name: _bar(one) for name, one in outcome.alone.items() if one.ratio is not None}
    if outcome.is_faster and outcome.proof is not None and outcome.proof.ratio is not None:
        measured["all that were chosen"] = _bar(outcome.proof)
    figure, (axes,) = new_axes((7, 1.3 + 0.3 * max(len(measured), 4)))
    chosen = {factor.name for factor in outcome.chosen} | {"all that were chosen"}
    for place, (name, ratio) in enumerate(measured.items()):
        color = BLUE if name in chosen and outcome.is_faster else GREY
        value, low, high = ratio
        axes.barh(place, value, xerr=[[value - low], [high - value]], color=color)
    if outcome.is_faster:
        kinds = {"chosen, if need be beside others": BLUE, "not chosen": GREY}
        handles = [patches.Patch(color=color, label=kind) for kind, color in kinds.items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)  # covers no bar
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(measured)), list(measured))
    axes.invert_yaxis()
    what = {"speed": "times as fast as the run as it is", "memory": "times less memory than the run as it is"}.get(
        outcome.goal, "times as fast for one sample as the model as it is"
    )
    axes.set_xlabel(f"{what} (95 % interval)")
    with write_atomically(path) as part:
        figure.savefig(part, format="png")


def _bar(found: Measurement) -> tuple[float, float, float]:
    """Return the value that the goal compares, and the ends of its interval, which one process has none of."""
    assert found.ratio is not None
    ratio = found.ratio if found.saving is None else found.memory
    return (ratio.value, ratio.low, ratio.high) if ratio else (found.gain,) * 3
