"""What does each precision cost in time and memory, and what does it do to the loss?

python benchmarks/bench_precision.py [--quick] [--device cpu|cuda] [--rounds 3] [--steps 300] [--subjects NAME ...]
    [--json FILE]

A mixture-of-experts language model trains on the same bytes in the same order under each plug-in, from the same
weights; each round has another seed. Subjects are interleaved in one process. Time is the median optimizer step, from
one batch to the next; on a CPU, the process's CPU time on one thread. Memory is what the parameters and the optimizer
hold after the last step. Loss is the mean over the last tenth of the training steps. Medians over the rounds.
"""

import argparse
import json
import logging
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from torch import Tensor

from lightning_accel import AmpPrecision, Bfloat16Precision, MoELanguageModel, TextDataModule
from lightning_accel.models import Experts
from lightning_accel.precision import Float8Precision

BASELINE = "float32"
WARM_UP = 3


def subjects(device: str) -> dict[str, Callable[[], Precision]]:
    """Makers of the plug-ins, by name."""
    named: dict[str, Callable[[], Precision]] = {
        BASELINE: Precision,
        "AmpPrecision bf16": lambda: AmpPrecision("bf16"),
        "Lightning bf16-mixed": lambda: MixedPrecision("bf16-mixed", device),
        "AmpPrecision fp16": lambda: AmpPrecision("fp16"),
        "Lightning 16-mixed": lambda: MixedPrecision("16-mixed", device),
        "Lightning bf16-true": lambda: HalfPrecision("bf16-true"),
        "Bfloat16Precision": Bfloat16Precision,
    }
    if device == "cuda" and find_spec("torchao") and torch.cuda.get_device_capability() >= (8, 9):
        named["Float8Precision"] = Float8Precision
    else:
        print("Float8Precision is left out: it needs torchao and a GPU of compute capability 8.9\n")
    return named


class Recorder(L.Callback):
    """Times of the steps, and their losses."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.clock = time.perf_counter if device == "cuda" else time.process_time
        self.ticks: list[float] = []
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.ticks.append(self.clock())
        self.losses.append(outputs["loss"].detach().float())

    @property
    def step_seconds(self) -> float:
        steps = [after - before for before, after in zip(self.ticks, self.ticks[1:], strict=False)]
        return statistics.median(steps[WARM_UP:])


def train(
    precision: Precision, data: TextDataModule, steps: int, sizes: dict[str, Any], device: str, seed: int
) -> dict[str, Any]:
    L.seed_everything(seed, verbose=False)
    model = MoELanguageModel(**sizes, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    recorder = Recorder(device)
    trainer = L.Trainer(
        accelerator=device,
        devices=1,
        plugins=[precision],
        callbacks=[recorder],
        max_steps=steps,
        limit_val_batches=0.0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    losses = torch.stack(recorder.losses).tolist()
    return {
        "first": losses[0],
        "time": recorder.step_seconds * 1e3,
        "memory": sum(held_bytes(model, trainer.optimizers[0])) / 2**20,
        "loss": statistics.mean(losses[-max(1, steps // 10) :]),
    }


def held_bytes(model: L.LightningModule, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    yield from (parameter.nbytes for parameter in model.parameters())
    for state in optimizer.state.values():
        yield from (value.nbytes for value in state.values() if isinstance(value, Tensor))


def check(figures: dict[str, dict[str, Any]]) -> None:
    """A wrong answer has no speed: before any step, all compute the loss of float32."""
    for name, figure in figures.items():
        error = abs(figure["first"] / figures[BASELINE]["first"] - 1)
        assert error < 0.02, f"{name} starts from a loss that is off by {error:.1%}"


def measure(device: str, rounds: int, steps: int, quick: bool, names: list[str]) -> list[dict[str, object]]:
    sizes: dict[str, Any] = {
        "dim": 128,
        "num_layers": 2,
        "attention": {"num_heads": 4},
        "experts": Experts(hidden_dim=192),
    }
    if device == "cuda":
        sizes = {"dim": 1024, "num_layers": 8, "attention": {"num_heads": 16}, "experts": Experts(hidden_dim=2048)}
    data = TextDataModule(context_length=64 if quick else 128, batch_size=8 if quick else 16)
    makers = {name: make for name, make in subjects(device).items() if name == BASELINE or name in names}
    gathered: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in makers}
    for number in range(rounds):
        figures = {name: train(make(), data, steps, sizes, device, number) for name, make in makers.items()}
        if number == 0:
            check(figures)
        for name, figure in figures.items():
            for metric, value in figure.items():
                gathered[name][metric].append(value)
    medians = {name: {metric: statistics.median(v) for metric, v in of.items()} for name, of in gathered.items()}
    case = f"MoE language model, {steps} steps, {device}"
    return [
        row(case, name, metric, of[metric], unit, of[metric] / medians[BASELINE][metric])
        for metric, unit in (("time", "ms"), ("memory", "MiB"), ("loss", "nats"))
        for name, of in medians.items()
    ]


def row(case: str, subject: str, metric: str, value: float, unit: str, ratio: float) -> dict[str, object]:
    names = "case", "subject", "metric", "value", "unit", "baseline", "ratio"
    return dict(zip(names, (case, subject, metric, value, unit, BASELINE, ratio), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 10 steps on small batches")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--subjects", nargs="+", help="by default all, on a CPU without fp16, which takes 7 times as long"
    )
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    rounds, steps = (1, 10) if arguments.quick else (arguments.rounds, arguments.steps)
    slow = [] if arguments.device == "cuda" or arguments.quick else ["AmpPrecision fp16", "Lightning 16-mixed"]
    names = arguments.subjects or [name for name in subjects(arguments.device) if name not in slow]
    rows = measure(arguments.device, rounds, steps, arguments.quick, names)
    print(f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads\n")
    print("| case | subject | metric | value | ratio |\n| --- | --- | --- | ---: | ---: |")
    for one in rows:
        value = f"{one['value']:.3f} {one['unit']}"
        print(f"| {one['case']} | {one['subject']} | {one['metric']} | {value} | {one['ratio']:.2f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
