"""One style for the figures of the package, in colours that colour-blind readers distinguish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

matplotlib = import_on_use("matplotlib")
agg = import_on_use("matplotlib.backends.backend_agg")
figures = import_on_use("matplotlib.figure")

# Okabe and Ito 2008, Color Universal Design, and a grey
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#A0A0A0"
DIVERGING = "RdBu_r"  # neutral in its middle

STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": f"cycler(color={[BLUE, ORANGE, GREEN, RED, GREY]})",
}


def new_axes(size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Make a figure with a grid of axes.

    Args:
        size: width and height in inches.
        rows: number of rows of axes.
        columns: number of axes in a row.
        options: further arguments of ``Figure.subplots``.

    Returns:
        The figure, and its axes row by row.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    with matplotlib.rc_context(STYLE):
        figure = figures.Figure(figsize=size, dpi=150, layout="constrained")
        agg.FigureCanvasAgg(figure)  # has the pixels that loggers take
        return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)
