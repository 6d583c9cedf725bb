"""Draw the batches of sequences of unequal lengths, in random order and by LengthBatchSampler."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from style import BLUE, save

from lightning_accel.data import LengthBatchSampler

NUMBER, BATCH = 320, 16
PADDING = "#D9D9D9"


def draw(axes: Axes, lengths: np.ndarray, batches: list[list[int]], title: str) -> None:
    """Draw each sequence as a bar of its valid steps, over the rectangle of its batch."""
    x = 0
    for rows in batches:
        longest = lengths[rows].max()
        axes.add_patch(Rectangle((x, 0), longest, len(rows), facecolor=PADDING))
        edges = range(len(rows) + 1)
        axes.stairs(x + lengths[rows], edges, baseline=x, orientation="horizontal", fill=True, color=BLUE, linewidth=0)
        x += longest + 12
    steps = sum(int(lengths[rows].max()) for rows in batches)
    padding = 1 - lengths.sum() / sum(int(lengths[rows].max()) * len(rows) for rows in batches)
    axes.set_title(f"{title}: {steps:,} sequential steps, {100 * padding:.0f} % padding", loc="left", fontsize=11)
    for y in range(BATCH + 1):
        axes.axhline(y, color="white", linewidth=0.8)
    axes.set_ylim(0, BATCH)
    axes.set_ylabel("sequence in batch")
    axes.set_yticks([0, BATCH])
    axes.grid(visible=False)
    print(title, steps, padding)


def main() -> plt.Figure:
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(43), 0.8, NUMBER)).round().astype(int).clip(1, 500)
    order = random.permutation(NUMBER)
    sampler = LengthBatchSampler(lengths, batch_size=BATCH)
    figure, panels = plt.subplots(2, 1, figsize=(8, 4), sharex=True, layout="constrained")
    draw(panels[0], lengths, [*order.reshape(-1, BATCH)], "Random order")
    draw(panels[1], lengths, [*map(np.array, sampler)], "LengthBatchSampler")
    panels[1].set_xlabel("time steps that the network runs, one batch after the other")
    panels[1].set_xlim(0, panels[0].dataLim.x1)
    return figure


if __name__ == "__main__":
    save(main(), "length_batches")
