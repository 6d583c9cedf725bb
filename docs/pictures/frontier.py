"""Draw accuracy against speed of networks from which channels were removed, from the file of results."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
from style import BLUE, ORANGE, save

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-22_compress_cpu.md"
ROW = re.compile(r"^\| (CNN|MLP) \| (.+?) \| ([\d.]+) \| [\d,]+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|$", re.MULTILINE)
TITLES = {"CNN": "convolutional network", "MLP": "perceptron"}


def main() -> None:
    section = RESULTS.read_text().partition("## Channels")[2].partition("\n## ")[0]
    rows = ROW.findall(section)
    assert len(rows) == 10
    figure, both = plt.subplots(1, 2, figsize=(8.6, 3.9), layout="constrained", sharey=True)
    for axes, (case, title) in zip(both, TITLES.items(), strict=True):
        dense, *others = [row[1:] for row in rows if row[0] == case]
        theirs = [row for row in others if "Torch-Pruning" in row[0]]
        ours = [row for row in others if row not in theirs]
        for points, color, marker, name in (
            (theirs, ORANGE, "s", "Torch-Pruning"),
            (ours, BLUE, "o", "Pruning(structure='channel')"),
        ):
            points = [dense, *points]
            x, y = [float(row[3]) for row in points], [float(row[1]) for row in points]
            axes.plot(x, y, color=color, marker=marker, markersize=8, linewidth=1.8, label=name)
        for (_, accuracy, size, speed), what in zip(
            (dense, *ours), ("dense", "50 % removed", "75 % removed"), strict=True
        ):
            place = float(speed), float(accuracy)
            axes.annotate(f"{what}\n{size} MiB", place, (5, 6), textcoords="offset points", fontsize=9.5)
        axes.set_xscale("log")
        axes.set_xlim(0.8, 40)
        axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        axes.minorticks_off()
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("times as fast as dense, batch 256")
    both[0].set_ylim(0.954, 1.008)
    both[0].set_ylabel("test accuracy, digits")
    both[0].legend(loc="lower left", fontsize=9.5, frameon=False)
    figure.suptitle("Channels removed: accuracy against speed", fontweight="bold", fontsize=13)
    save(figure, "frontier")


if __name__ == "__main__":
    main()
