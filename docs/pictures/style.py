"""Give the pictures of the documentation the style of the package's figures."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from lightning_accel.ops.figures import BLUE, GREEN, GREY, ORANGE, RED, STYLE

__all__ = ["BLUE", "GREEN", "GREY", "ORANGE", "RED", "save"]
FOLDER = Path(__file__).parents[1] / "_static" / "pictures"

plt.rcParams |= STYLE | {
    "font.size": 11,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.hashsalt": "lightning_accel",  # equal pictures are equal files
    "svg.fonttype": "none",
}


def save(figure: Figure, name: str) -> None:
    """Write ``docs/_static/pictures/<name>.svg``."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    print(FOLDER / f"{name}.svg")
