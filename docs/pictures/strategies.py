"""Draw memory and time of a step for each strategy, from benchmarks/results/2026-11-21_strategies_cpu.md."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
from style import BLUE, GREEN, GREY, ORANGE, RED, save

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-21_strategies_cpu.md"
COLOURS = {
    "ddp, Lightning's": GREY,
    "accel_ddp": BLUE,
    "accel_fsdp2": ORANGE,
    "accel_pipeline": GREEN,
    "accel_expert_parallel": RED,
}
CASES = {"perceptrons, 50M, 2 processes": "perceptrons", "mixtures, 46M, 2 processes": "mixtures"}

found = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([\d.]+) (?:ms|MiB) \|", RESULTS.read_text(), re.MULTILINE)
values = {tuple(map(str.strip, key)): float(value) for *key, value in found}

figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
labels, colours, memory, times = [], [], [], []
for case, title in CASES.items():
    for strategy, colour in COLOURS.items():
        if (case, strategy, "step") in values:
            labels.append(f"{strategy.split(',')[0]}, {title}")
            colours.append(colour)
            memory.append(values[case, strategy, "memory at most"])
            times.append(values[case, strategy, "step"])
names = "parameters and optimizer states (MiB)", "time of a step (ms)"
for panel, numbers, name in zip(panels, (memory, times), names, strict=True):
    bars = panel.barh(range(len(labels)), numbers, color=colours)
    panel.bar_label(bars, fmt="%.0f", padding=3)
    panel.set_xlabel(name)
    panel.set_xlim(0, 1.15 * max(numbers))
    panel.grid(axis="y", visible=False)
panels[0].set_yticks(range(len(labels)), labels)
panels[0].invert_yaxis()
save(figure, "strategies")
