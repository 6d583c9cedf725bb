"""Picture of the forms of a model by quality, time and size."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    from matplotlib.figure import Figure

agg = import_on_use("matplotlib.backends.backend_agg")
figures = import_on_use("matplotlib.figure")

_AREAS = 30.0, 600.0  # of the markers of a form without a file and of the largest file, in square points


class Point(NamedTuple):
    """Hold where a form lies."""

    time: float
    quality: float
    name: str
    file_bytes: int | None = None
    is_refused: bool = False
    colour: str = "tab:blue"


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
    figure = figures.Figure(figsize=(9, 5), layout="constrained")
    agg.FigureCanvasAgg(figure)
    axis = figure.subplots()
    allowed = [point for point in points if not point.is_refused]
    front = pareto_front([(point.time, point.quality) for point in allowed], higher_is_better)
    joined = [allowed[index] for index in front]
    axis.plot([point.time for point in joined], [point.quality for point in joined], color="0.6", zorder=1)
    largest = max((point.file_bytes or 0 for point in points), default=0)
    for number, point in enumerate(sorted(points, key=lambda one: (one.quality, one.time))):
        area = max(_AREAS[0], (point.file_bytes or 0) / max(1, largest) * _AREAS[1])
        face = "none" if point.is_refused else point.colour
        axis.scatter(point.time, point.quality, area, facecolors=face, edgecolors=point.colour, alpha=0.8,
                     marker="o" if point.file_bytes else "X", zorder=2)  # fmt: skip
        size = "" if point.file_bytes is None else f", {point.file_bytes / 1e6:.3g} MB"
        # In a column, in the order of the points, since many forms lie so close that their names would overlap
        axis.annotate(
            f"{point.name}{size}", (point.time, point.quality), xytext=(1.03, (number + 0.5) / len(points)),
            textcoords="axes fraction", fontsize="small", va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "0.8", "linewidth": 0.8, "relpos": (0, 0.5)},
        )  # fmt: skip
    axis.set_xlabel(time)
    axis.set_ylabel(f"{quality} ({'higher' if higher_is_better else 'lower'} is better)")
    axis.margins(0.1)
    axis.spines[["top", "right"]].set_visible(False)
    notes = ["area: file size", "line: no form is better in both"]
    notes += ["hollow: refused"] if any(point.is_refused for point in points) else []
    figure.suptitle(f"{title}\n{'; '.join(notes)}", fontsize="medium")
    return figure
