"""Picture of the forms of a model by quality, time and size."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lightning_accel.compress.report.latency import Latency
from lightning_accel.ops.figures import BLUE, new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AREAS = 30.0, 600.0  # of the markers of a form without a file and of the largest file, in square points


class Point(NamedTuple):
    """Hold where a form lies."""

    latency: Latency
    quality: float
    name: str
    file_bytes: int | None = None
    status: str = ""  # that of its row in a report
    colour: str = BLUE


def pareto_front(pairs: Sequence[tuple[float, float]], higher_is_better: bool) -> list[int]:
    """Return which pairs of a time and a quality no other pair beats, from the fastest to the slowest.

    A pair is beaten by one that is no worse in either and better in one; equal pairs do not beat each other.

    >>> pareto_front([(2.0, 0.9), (1.0, 0.8), (3.0, 0.9), (1.0, 0.7)], higher_is_better=True)
    [1, 0]
    """
    losses = [-quality if higher_is_better else quality for _, quality in pairs]
    front: list[int] = []
    for index in sorted(range(len(pairs)), key=lambda one: (pairs[one][0], losses[one])):
        is_equal = bool(front) and pairs[index] == pairs[front[-1]]
        if is_equal or not front or losses[index] < losses[front[-1]]:
            front.append(index)
    return front


def limits(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Return limits of an axis with a margin, a share of the range, but at least a percent of the values."""
    low, high = min(values), max(values)
    width = max(margin * (high - low), 0.01 * max(abs(low), abs(high))) or 1.0
    return low - width, high + width


def draw_frontier(points: Sequence[Point], title: str, time: str, quality: str, higher_is_better: bool) -> "Figure":
    """Draw forms by time and quality, with markers of an area by file size, and join those that no other one beats.

    Refused forms are hollow, and do not count as better than others.

    Args:
        points: forms, with finite values.
        title: title of the figure.
        time: label of the horizontal axis; less is better.
        quality: label of the vertical axis.
        higher_is_better: whether higher values of the quality are better.
    """
    figure, (axis,) = new_axes((9, 5))
    allowed = [point for point in points if point.status != "refused"]
    front = pareto_front([(point.latency.p50_ms, point.quality) for point in allowed], higher_is_better)
    joined = [allowed[index] for index in front]
    axis.plot([point.latency.p50_ms for point in joined], [point.quality for point in joined], color="0.6", zorder=1)
    largest = max((point.file_bytes or 0 for point in points), default=0)
    for number, point in enumerate(sorted(points, key=lambda one: (one.quality, one.latency.p50_ms))):
        place, is_picked = (point.latency.p50_ms, point.quality), point.status == "picked"
        area = max(_AREAS[0], (point.file_bytes or 0) / max(1, largest) * _AREAS[1])
        face = "none" if point.status == "refused" else point.colour
        axis.scatter(*place, area, facecolors=face, edgecolors="black" if is_picked else point.colour, alpha=0.8,
                     linewidths=2 if is_picked else 1, marker="o" if point.file_bytes else "X", zorder=2)  # fmt: skip
        axis.hlines(point.quality, *point.latency.interval_ms, colors="black", linewidth=1.2, zorder=3)
        about = ", ~" if point.latency.is_noisy else ""
        size = "" if point.file_bytes is None else f", {point.file_bytes / 1e6:.3g} MB"
        # In a column, in the order of the points, since many forms lie so close that their names would overlap
        axis.annotate(
            f"{point.name}{size}{about}", place, xytext=(1.03, (number + 0.5) / len(points)),
            textcoords="axes fraction", fontsize="small", va="center", annotation_clip=False, zorder=0,
            fontweight="bold" if is_picked else "normal",
            arrowprops={"arrowstyle": "-", "color": "0.8", "linewidth": 0.8, "relpos": (0, 0.5)},
        )  # fmt: skip
    axis.set_xlabel(time)
    axis.set_ylabel(f"{quality} ({'higher' if higher_is_better else 'lower'} is better)")
    axis.margins(x=0.1)
    axis.set_ylim(limits([point.quality for point in points], 0.1))
    notes = {
        "area: file size": True,
        "line: no form is better in both": True,
        "bar: 98% interval": any(point.latency.rounds_ms for point in points),
        "bold: picked": any(point.status == "picked" for point in points),
        "hollow: refused": len(allowed) < len(points),
        "~: busy machine": any(point.latency.is_noisy for point in points),
    }
    figure.suptitle(f"{title}\n{'; '.join(note for note, is_there in notes.items() if is_there)}", fontsize="medium")
    return figure
