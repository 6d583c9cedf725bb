"""Tables of a user's run: where its steps spend time and memory, and what slows it."""

from collections.abc import Sequence

from lightning_accel.diagnosis.examination import Examined
from lightning_accel.diagnosis.findings import Finding, hint_of_tune
from lightning_accel.measure import PART_NAMES, part_times
from lightning_accel.measure.table import Table, in_bytes, with_unit

_FEW_STEPS = 10  # of which one that is slow moves the mean


def run_tables(seen: Examined, share: float | None, findings: Sequence[Finding]) -> list[Table]:
    """Return the tables of a run.

    Args:
        seen: what was seen of it.
        share: its operations per second as a share of the measured peak, None if unknown.
        findings: what slows it.
    """
    return [_time(seen), _sizes(seen, share), _findings(findings, hint_of_tune(seen.steps, findings))]


def _time(seen: Examined) -> Table:
    parts = part_times(seen.steps)
    step = sum(parts.values())
    rows = [
        (PART_NAMES.get(part, part), f"{spent:.3g}", f"{spent / step:.1%}")
        for part, spent in parts.items()
        if spent > 0
    ]
    few = ": few, take more seconds" if len(seen.steps) < _FEW_STEPS else ""
    rows.append(("a step", f"{step:.3g}", f"mean of {len(seen.steps)}{few}"))
    return Table("Where the time of a step goes", ("part", "ms", "share"), rows)


def _sizes(seen: Examined, share: float | None) -> Table:
    step = sum(part_times(seen.steps).values())
    rows = [("processes", f"{seen.world_size} on {seen.device.type}, {seen.precision}")]
    if seen.batch_size is not None:
        rate = 1000 * seen.batch_size * seen.world_size / step
        rows.append(("samples", f"{rate:.4g} a second, {seen.batch_size} a batch"))
    if seen.loading_ms is not None:
        waiting = part_times(seen.steps)["data"]
        rows.append(("alone", f"loading {seen.loading_ms:.3g} ms a batch, training {step - waiting:.3g} ms"))
    if seen.flops:
        peak = "" if share is None else f", {share:.1%} of the measured peak"
        rows.append(("operations", f"{with_unit(seen.flops, 'FLOP')} a batch{peak}"))
    if seen.memory is not None:
        rows += [(name.replace("_", " "), in_bytes(size)) for name, size in seen.memory.to_dict().items()]
    return Table("The run", (), rows)


def _findings(findings: Sequence[Finding], hint: str = "") -> Table:
    hints = [hint] if hint else []
    if not findings:
        lines = ["nothing that the doctor knows of slows this run", *hints]
        return Table("Findings: none", (), [(line,) for line in lines])
    rows = [
        (one.name, f"{one.cost_ms:.3g}" if one.cost_ms else "", one.part, f"{one.what}. Mend: {one.mend}")
        for one in findings
    ]
    costly = [one.part for one in findings if one.cost_ms]
    if len(costly) > len(set(costly)) or ("" in costly and len(costly) > 1):
        note = "findings of one part, or without one, may count the same milliseconds: mend one, and measure again"
        hints.insert(0, note)
    rows += [("", "", "", line) for line in hints]
    return Table("Findings", ("what", "ms a step", "part", ""), rows)
