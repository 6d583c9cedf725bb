"""Give the pictures of the documentation one look, in colours that the colour-blind tell apart."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[1] / "_static" / "pictures"
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8C8C8C"  # of Okabe and Ito 2008

plt.rcParams |= {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
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
