"""Draw the steps that each execution of DynamicRNN computes for one batch of five sequences."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from style import BLUE, GREEN, ORANGE, RED, save

LENGTHS = (3, 8, 2, 5, 1)
COLOURS = (BLUE, ORANGE, GREEN, RED, "#CC79A7")
EMPTY = "#E4E4E4"


def cell(axes: Axes, x: float, y: float, colour: str) -> None:
    axes.add_patch(Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, facecolor=colour))


def finish(axes: Axes, title: str, width: float, height: float, label: str) -> None:
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal", title=title, xlabel=label)
    axes.axis("on")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def main() -> plt.Figure:
    by_length = sorted(range(len(LENGTHS)), key=lambda row: -LENGTHS[row])
    figure, grid = plt.subplots(2, 2, figsize=(8, 4.2), height_ratios=(5, 2.4), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12)
    padded, staircase, packed, lanes = grid.flat
    for y, (length, colour) in enumerate(zip(LENGTHS, COLOURS, strict=True)):
        for step in range(max(LENGTHS)):
            cell(padded, step, y, colour if step < length else EMPTY)
    for y, row in enumerate(by_length):
        for step in range(LENGTHS[row]):
            cell(staircase, step, y, COLOURS[row])
    x = 0.0
    for step in range(max(LENGTHS)):
        for row in by_length:
            if step < LENGTHS[row]:
                cell(packed, x % 10, x // 10, COLOURS[row])
                x += 1
    x = 0.0
    for length, colour in zip(LENGTHS, COLOURS, strict=True):
        for _ in range(length):
            cell(lanes, x % 10, x // 10, colour)
            x += 1
    finish(padded, "padded", 10, 5, "every sequence runs to the longest length")
    finish(staircase, "staircase", 10, 5, "sorted; each step only for those that go on")
    finish(packed, "packed", 10, 2, "step by step in one array, as PackedSequence")
    finish(lanes, "lanes (minGRU, minLSTM)", 10, 2, "end to end; the state restarts at each start")
    return figure


if __name__ == "__main__":
    save(main(), "executions")
