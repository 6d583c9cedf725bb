"""Draw how many times as fast ``lightning-accel tune`` makes each of fourteen projects, from the file of results."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
from style import BLUE, GREY, save

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-25_tune_foreign_zen5_cpu.md"
TIMES = "\N{MULTIPLICATION SIGN}"
NAMES = {
    "augmented_digits": "CNN, augmented images",
    "bert": "BERT, fine-tuning",
    "diffusion": "diffusion model",
    "forecast": "transformer, forecasts",
    "gan": "GAN",
    "gnn": "GIN (PyTorch Geometric)",
    "gpt": "GPT-2",
    "lstm_tagger": "LSTM tagger",
    "recommender": "recommender",
    "resnet": "ResNet-18",
    "tabular": "MLP on a table",
    "unet": "U-Net",
    "vae": "VAE",
    "vit": "vision transformer",
}
ROW = re.compile(r"^\| (\w+) \| \S+ \| \S+ \| ([\d.]+) \(([\d.]+) to ([\d.]+)\)", re.MULTILINE)


def main() -> None:
    text = RESULTS.read_text()
    rows = sorted((*map(float, found[1:]), NAMES[found[0]]) for found in ROW.findall(text))
    assert len(rows) == len(NAMES)
    mean = re.search(r"geometric mean of the fourteen is ([\d.]+)", text)[1]

    figure, axes = plt.subplots(figsize=(8, 5.2), layout="constrained")
    axes.set_axisbelow(True)
    axes.axvline(float(mean), color=GREY, linewidth=1.2, linestyle="--", zorder=0.5)
    axes.text(float(mean) + 0.04, -0.95, f"geometric mean {mean}{TIMES}", color="#555555", va="center")
    axes.barh(range(len(rows)), [row[0] for row in rows], color=BLUE, height=0.72)
    for place, (value, low, high, _) in enumerate(rows):
        axes.errorbar(value, place, xerr=[[value - low], [high - value]], color="black", capsize=2.5, linewidth=1.2)
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.text(high + 0.06, place, f"{value:.2f}{TIMES}", va="center", fontweight="bold", bbox=ground)
    axes.axvline(1, color="black", linewidth=1.2)
    axes.text(0.96, -0.95, "as it was", ha="right", va="center")
    axes.set_yticks(range(len(rows)), [row[3] for row in rows])
    axes.set_ylim(-1.4, len(rows) - 0.4)
    axes.set_xlim(0, 4)
    axes.set_xticks(range(5))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("training samples per second, relative to the run as it was (95 % interval)")
    figure.suptitle("Projects like yours, times as fast after `lightning-accel tune`", fontweight="bold", fontsize=13.5)
    subtitle = "14 PyTorch Lightning projects that do not import lightning_accel; measured on 2 CPU cores"
    axes.set_title(subtitle, fontsize=10.5, loc="right")
    save(figure, "tune")


if __name__ == "__main__":
    main()
