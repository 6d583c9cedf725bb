"""Picture of a step: a timeline of its parts."""

from collections.abc import Sequence
from pathlib import Path

from lightning_accel.measure import PART_NAMES, PARTS, Step
from lightning_accel.ops.figures import BLUE, new_axes
from lightning_accel.strategies.checkpoints.atomic import write_atomically


def draw_step(steps: Sequence[Step], path: Path) -> None:
    """Draw the timeline of the step whose time is the median, a row for each part.

    Args:
        steps: at least one step.
        path: the PNG file; its folder is created.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        NotWrittenError: if the disk is full, or may not be written.
    """
    step = sorted(steps, key=lambda each: each.wall_ns)[len(steps) // 2]
    begin = step.segments[0].begin
    parts = [part for part in PARTS if step.parts_ns()[part]]
    figure, (axes,) = new_axes((9, 0.6 + 0.35 * len(parts)))
    for index, part in enumerate(parts):
        bars = [
            ((segment.begin - begin) / 1e6, (segment.end - segment.begin) / 1e6)
            for segment in step.segments
            if segment.part == part
        ]
        axes.broken_barh(bars, (index - 0.4, 0.8), facecolors=BLUE)
    axes.set_yticks(range(len(parts)), [PART_NAMES.get(part, part) for part in parts])
    axes.invert_yaxis()
    axes.set_xlim(0, step.wall_ns / 1e6)
    axes.set_xlabel(f"time, ms (step of median time, of {len(steps)})")
    with write_atomically(path) as partial:
        figure.savefig(partial, format="png")
