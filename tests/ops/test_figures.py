"""Figures have one style, which colour-blind readers can read."""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import to_rgb

import lightning_accel
from lightning_accel.ops import figures

# Vienot, Brettel and Mollon 1999, of linear red, green and blue, for protanopia and deuteranopia
SEEN = {
    "protanopia": [[0.1124, 0.8876, 0], [0.1124, 0.8876, 0], [0.0040, -0.0040, 1]],
    "deuteranopia": [[0.2928, 0.7072, 0], [0.2928, 0.7072, 0], [-0.0223, 0.0223, 1]],
}


def seen(color, matrix):
    linear = np.asarray(to_rgb(color)) ** 2.2
    return (np.asarray(matrix) @ linear).clip(0, 1) ** (1 / 2.2)


def test_figures_are_drawn_by_agg_in_the_style_and_leave_that_of_others():
    figure, axes = figures.new_axes((4, 3), 1, 2, sharey=True)
    assert not any(axis.spines[side].get_visible() for axis in axes for side in ("top", "right"))
    (line,) = axes[0].plot([0, 1])
    assert line.get_color() == figures.BLUE
    figure.canvas.draw()
    assert np.asarray(figure.canvas.buffer_rgba()).shape == (450, 600, 4)
    assert np.allclose(figure.get_size_inches(), (4, 3))


@pytest.mark.parametrize("matrix", SEEN.values(), ids=SEEN)
def test_colours_differ_for_colour_blind_readers(matrix):
    palette = [figures.BLUE, figures.ORANGE, figures.GREEN, figures.RED, figures.GREY]
    for one, other in combinations(palette, 2):
        assert np.linalg.norm(seen(one, matrix) - seen(other, matrix)) > 0.1, (one, other)
    low, middle, high = (seen(colormaps[figures.DIVERGING](place)[:3], matrix) for place in (0.1, 0.5, 0.9))
    assert min(np.linalg.norm(low - high), np.linalg.norm(low - middle), np.linalg.norm(high - middle)) > 0.4
    assert np.ptp(colormaps[figures.DIVERGING](0.5)[:3]) < 0.02  # neutral


def test_all_figures_of_the_package_are_made_here():
    package = Path(lightning_accel.__file__).parent
    found = [
        f"{path.relative_to(package)}: {match}"
        for path in package.rglob("*.py")
        for match in re.findall(r"\bFigure\(|tab:\w+|matplotlib\.pyplot", path.read_text())
        if path.name != "figures.py"
    ]
    assert not found
