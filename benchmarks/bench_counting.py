"""How exactly do graph networks count small graphs in random ones, on graphs that they have not seen?

python benchmarks/bench_counting.py [--quick] [--cases triangle ...] [--subjects RO3Conv ...] [--seeds 0 1 2]
    [--json FILE]

One count for each graph, 1500 graphs to train on, 1000 to validate and 2500 to test, through the Trainer and the
datamodule as a user would. The same optimizer, schedule, steps, clipping, width and number of layers for all subjects
of a case; the last weights are tested, none are picked. Errors are the mean squared error over the variance, and the
mean absolute error over the standard deviation, of the test graphs' counts.
"""

import argparse
import json
import logging
import statistics
import warnings
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

from lightning_accel import GraphDataModule, RelationalGNN
from lightning_accel.data import GeneratedGraphs, GraphLayout
from lightning_accel.models import ConvolutionLayers, Marking

Options = dict[str, Any]


class Case(NamedTuple):
    target: str
    subjects: dict[str, Options]
    epochs: int
    options: Options
    family: str = "erdos_renyi"
    lr: float = 0.003
    clip: float | None = 0.1


CONVS: dict[str, Options] = {"GINConv": {"conv": "GINConv"}, "RO3Conv": {"conv": "RO3Conv"}}
CASES = {
    "triangle": Case(
        "triangle",
        {"GINConv": {"conv": "GINConv", "num_layers": 2}, "RO3Pooling": {"num_layers": 0, "triple_readout": True}},
        epochs=20,
        options={},
        lr=0.01,
    ),
    "3-star": Case("star_3", CONVS, epochs=40, options={"num_layers": 2}),
    "3-star, regular": Case("star_3", CONVS, epochs=40, options={"num_layers": 2}, family="regular"),
    "chordal 4-cycle, 1 mark": Case(
        "chordal_cycle_4", CONVS, epochs=300, options={"num_layers": 2, "marking": Marking(1, train_samples=None)}
    ),
}
SUBJECTS = ("GINConv", "RO3Conv", "RO3Pooling")


class Counter(RelationalGNN):
    """The model with the optimizer and schedule of its case."""

    def __init__(self, lr: float, **options: Any) -> None:
        names = vars(ConvolutionLayers()).keys() & options.keys()
        layers = ConvolutionLayers(dim=32, norm="none", **{name: options.pop(name) for name in names})
        super().__init__(layers=layers, **options)
        self.lr = lr

    def configure_optimizers(self) -> OptimizerLRScheduler:  # type: ignore[override]
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, weight_decay=0)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(case: Case, options: Options, seed: int, num_graphs: int, epochs: int) -> tuple[Counter, GraphDataModule]:
    L.seed_everything(seed, verbose=False)
    data = GraphDataModule(
        task="substructures",
        layout=GraphLayout(target=[case.target]),
        generated=GeneratedGraphs(case.family, num_graphs),
        global_batch_size=32,
    )
    model = Counter(case.lr, **(case.options | options))
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=epochs, gradient_clip_val=case.clip, limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data)
    return model, data


@torch.no_grad()
def errors(model: Counter, data: GraphDataModule) -> tuple[float, float]:
    """Of the test graphs: squared error over variance, absolute error over standard deviation."""
    data.setup("test")
    model.eval()
    found: list[Tensor] = []
    true: list[Tensor] = []
    for batch in data.test_dataloader():
        found.append(model(batch.x, batch.edge_index, batch=batch.batch, size=batch.num_graphs)[:, 0])
        true.append(batch.y.view(-1))
    y = torch.cat(true).double()
    gap = torch.cat(found).double() - y
    return float(gap.square().mean() / y.var()), float(gap.abs().mean() / y.std())


def row(case: str, subject: str, metric: str, value: float, unit: str) -> dict[str, Any]:
    return {"case": case, "subject": subject, "metric": metric, "value": value, "unit": unit,
            "baseline": None, "ratio": None}  # fmt: skip


def measure(name: str, subject: str, seeds: list[int], num_graphs: int, epochs: int | None) -> list[dict[str, Any]]:
    case = CASES[name]
    rows = []
    for seed in seeds:
        begin = process_time()
        model, data = train(case, case.subjects[subject], seed, num_graphs, epochs or case.epochs)
        seconds = process_time() - begin
        squared, absolute = errors(model, data)
        at = f"{name}, seed {seed}"
        rows.append(row(at, subject, "squared error", squared, "variances"))
        rows.append(row(at, subject, "absolute error", absolute, "standard deviations"))
        rows.append(row(at, subject, "CPU time of training", seconds, "s"))
    return rows


def summarise(name: str, subject: str, rows: list[dict[str, Any]]) -> str:
    def of(metric: str) -> list[float]:
        return [one["value"] for one in rows if one["metric"] == metric]

    squared = ", ".join(f"{value:.1e}" for value in of("squared error"))
    absolute = ", ".join(f"{value:.4f}" for value in of("absolute error"))
    return f"| {name} | {subject} | {squared} | {absolute} | {statistics.median(of('CPU time of training')):.0f} |"


def compare(rows: list[dict[str, Any]]) -> None:
    """To GINConv with the same case and seed."""
    gin = {(one["case"], one["metric"]): one["value"] for one in rows if one["subject"] == "GINConv"}
    for one in rows:
        if baseline := gin.get((one["case"], one["metric"])):
            one |= {"baseline": baseline, "ratio": one["value"] / baseline}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 graphs, two epochs, one seed")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--subjects", nargs="+", default=[*SUBJECTS], choices=[*SUBJECTS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seeds, num_graphs, epochs = (arguments.seeds[:1], 200, 2) if arguments.quick else (arguments.seeds, 5000, None)
    print(f"torch {torch.__version__}, one CPU thread\n")
    print("| case | subject | squared error / variance | absolute error / standard deviation | CPU s |")
    print("| --- | --- | --- | --- | ---: |", flush=True)
    rows: list[dict[str, Any]] = []
    for name in arguments.cases:
        for subject in (one for one in CASES[name].subjects if one in arguments.subjects):
            measured = measure(name, subject, seeds, num_graphs, epochs)
            rows += measured
            print(summarise(name, subject, measured), flush=True)
            compare(rows)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
