"""Which tasks does each recurrent cell learn, and how well, through SequenceModel and SequenceDataModule?

python benchmarks/bench_sequence_tasks.py [--quick] [--device cpu|cuda] [--tasks adding digits_rows ...]
    [--subjects gru lstm ...] [--seeds 0 1 2] [--json FILE]

Each subject of RECIPES is trained once with each seed, which is that of the weights, the sequences and their split, and
measured after its last step, on validation sequences, by which recipes were chosen, and on test sequences. The
baseline of a row is the figure of others, none where they have none: Feng et al. 2024, table 1,
https://arxiv.org/abs/2410.01201, for selective copying, there with a context of 4096; else networks of one layer
(minGRU: two) in torch alone, hidden 64 for adding, 128 for digits, trained as long.
"""

import argparse
import json
import logging
import statistics
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import lightning as L
import torch
from sequence_tasks import TASKS, TaskDataModule

from lightning_accel import SequenceDataModule, SequenceModel
from lightning_accel.data import GeneratedSequences
from lightning_accel.data.sequences.batch import IGNORED
from lightning_accel.models import RecurrentLayers


class Recipe(NamedTuple):
    """What all subjects of a task share, and what each has of its own: options of SequenceModel."""

    data: dict[str, Any]
    steps: int
    model: dict[str, Any]
    subjects: dict[str, dict[str, Any]]
    baseline: dict[str, float]
    lr: float = 1e-2
    weight_decay: float = 0.0


CELLS = {"gru": {"cell": "gru"}, "lstm": {"cell": "lstm"}}
ALL_CELLS = {"rnn": {"cell": "rnn"}, **CELLS}
SHARES = {"val_share": 0.02, "test_share": 0.03}
FRESH = 80_000  # sequences: as many as 1200 steps of 64 see
RECIPES = {
    "adding": Recipe(
        {"task": "adding", "generated": GeneratedSequences(length=100, num_sequences=FRESH), **SHARES},
        1200, {"hidden_dim": 64},
        {**CELLS, "mingru, 2 layers": {"cell": "mingru", "num_layers": 2}},
        {"gru": 6.9e-4, "lstm": 0.170, "mingru, 2 layers": 2.1e-4},
    ),
    # 30 epochs of the 1257 digits that are trained on
    "digits_rows": Recipe(
        {"task": "digits_rows", "global_batch_size": 32}, 1200, {"hidden_dim": 128},
        {"gru": {"cell": "gru", "bidirectional": True, "dropout": 0.3}, "lstm": {"cell": "lstm"}},
        {"gru": 0.975, "lstm": 0.964}, lr=5e-3, weight_decay=0.05,
    ),
    "digits_rows, scan cell": Recipe(
        {"task": "digits_rows", "global_batch_size": 64}, 600,
        {"hidden_dim": 128, "bidirectional": True, "residual": True, "pooling": "mean", "dropout": 0.3},
        {"mingru, 2 layers": {"cell": "mingru", "num_layers": 2}}, {"mingru, 2 layers": 0.978}, weight_decay=0.1,
    ),
    "digits_pixels": Recipe(
        {"task": "digits_pixels", "global_batch_size": 32}, 1200, {"hidden_dim": 128}, CELLS,
        {"gru": 0.847, "lstm": 0.844}, weight_decay=0.05,
    ),
    "digits_permuted": Recipe(
        {"task": "digits_permuted", "global_batch_size": 32}, 1200, {"hidden_dim": 128}, {"gru": {"cell": "gru"}},
        {"gru": 0.797}, weight_decay=0.05,
    ),
    # lengths 3 to 40, tested on 40 to 256; without steps, there is one label at the end
    "parity_steps": Recipe({"task": "parity_steps"}, 220, {"hidden_dim": 64}, ALL_CELLS, {}),
    "parity": Recipe({"task": "parity"}, 1500, {"hidden_dim": 64}, ALL_CELLS, {}),
    # n from 1 to 50, tested on each n from 1 to 256
    "counting": Recipe(
        {"task": "counting"}, 550, {"hidden_dim": 64},
        {**CELLS, "mingru, 2 layers": {"cell": "mingru", "num_layers": 2}},
        {"gru": 53, "lstm": 113, "mingru, 2 layers": 40},
    ),
    "selective_copying": Recipe(
        {"task": "selective_copying", "global_batch_size": 32, **SHARES,
         "generated": GeneratedSequences(num_sequences=110_000)},
        3000,
        {"cell": "mingru", "hidden_dim": 128, "residual": True, "conv_kernel": 4, "feed_forward_dim": 256},
        {"mingru": {}, "mingru, 2 layers": {"num_layers": 2}, "mingru, 3 layers": {"num_layers": 3}},
        {"mingru": 0.370, "mingru, 2 layers": 0.968, "mingru, 3 layers": 0.995},
    ),
    "selective_copying, gated by the state": Recipe(
        {"task": "selective_copying", "global_batch_size": 32, **SHARES,
         "generated": GeneratedSequences(num_sequences=2 * FRESH)},
        3000,
        {"cell": "gru", "hidden_dim": 128, "residual": True},
        {"gru, 3 layers": {"num_layers": 3}}, {}, lr=5e-3,
    ),
}  # fmt: skip


UNITS = {"mse": "1", "accuracy": "share", "accepted up to": "n", "seconds of training": "s"}


class Scheduled(SequenceModel):
    """With a learning rate that rises for 30% of the steps, and falls."""

    recipe: Recipe
    steps: int

    def configure_optimizers(self) -> Any:
        lr, weight_decay = self.recipe.lr, self.recipe.weight_decay
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=weight_decay, fused=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_data(task: str, **options: Any) -> SequenceDataModule:
    return TaskDataModule(task, **options) if task in TASKS else SequenceDataModule(task=task, **options)


def train(recipe: Recipe, subject: str, seed: int, steps: int, device: str) -> dict[str, float]:
    L.seed_everything(seed, verbose=False)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = recipe.model | recipe.subjects[subject]
    layers = RecurrentLayers(**{name: options.pop(name) for name in vars(RecurrentLayers()) if name in options})
    model = Scheduled(**options, layers=layers)
    model.recipe, model.steps = recipe, steps
    data = make_data(**recipe.data, seed=seed)
    trainer = L.Trainer(
        accelerator=device, devices=1, max_steps=steps, limit_val_batches=0.0, gradient_clip_val=1.0,
        enable_checkpointing=False, **quiet,
    )  # fmt: skip
    begin = perf_counter()
    trainer.fit(model, data)
    seconds = perf_counter() - begin
    measured = L.Trainer(accelerator=device, devices=1, **quiet)
    figures = {**measured.validate(model, data, verbose=False)[0], **measured.test(model, data, verbose=False)[0]}
    result = {name: value for name, value in figures.items() if not name.endswith("loss")}
    if recipe.data["task"] == "counting":
        result["accepted up to"] = float(accepted_up_to(model, data))
    return result | {"seconds of training": seconds}


@torch.no_grad()
def accepted_up_to(model: SequenceModel, data: SequenceDataModule) -> int:
    """The n up to which every a^n b^n of the test sequences, which hold each n once, is labelled right throughout."""
    model.eval()
    right = {}
    for x, lengths, target, _ in data.test_dataloader():
        wrong = (model(x, lengths).scores.argmax(-1) != target) & (target != IGNORED)
        right |= dict(zip((lengths // 2).tolist(), (~wrong.any(dim=1)).tolist(), strict=True))
    return next((n - 1 for n in sorted(right) if not right[n]), max(right))


def check() -> None:
    """The tasks say what they should, by another way."""
    for task in ("adding", "parity", "parity_steps"):
        data = make_data(task, generated=GeneratedSequences(num_sequences=200), seed=5)
        data.setup()
        for x, lengths, target, _ in data.test_dataloader():
            for row, steps, expected in zip(x, lengths.tolist(), target, strict=True):
                seen = row[:steps]
                if task == "adding":
                    assert torch.isclose((seen[:, 0] * seen[:, 1]).sum(), expected), task
                else:
                    assert int(seen.sum()) % 2 == int(expected if task == "parity" else expected[steps - 1]), task


def as_rows(task: str, seed: int, subject: str, figures: dict[str, float]) -> list[dict[str, object]]:
    rows = []
    for metric, value in figures.items():
        compared = metric == ("accepted up to" if task == "counting" else f"test/{metric[5:]}")
        baseline = RECIPES[task].baseline.get(subject) if compared else None
        rows.append({
            "case": f"{task}, seed {seed}", "subject": subject, "metric": metric, "value": value,
            "unit": UNITS[metric.split("/")[-1]],
            "baseline": baseline, "ratio": None if baseline is None else value / baseline,
        })  # fmt: skip
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print("\n| task | subject | metric | mean | spread | of others | of each seed |")
    print("| --- | --- | --- | ---: | ---: | ---: | --- |")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"].rsplit(",", 1)[0], row["subject"], row["metric"]), []).append(row)
    for (task, subject, metric), group in groups.items():
        values = [row["value"] for row in group]
        spread = f"{statistics.stdev(values):.2g}" if len(values) > 1 else ""
        each = ", ".join(f"{value:.4g}" for value in values)
        baseline = "" if group[0]["baseline"] is None else f"{group[0]['baseline']:.4g}"
        print(f"| {task} | {subject} | {metric} | {statistics.mean(values):.4g} | {spread} | {baseline} | {each} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 steps of each subject of two tasks, one seed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tasks", nargs="+", default=[*RECIPES], choices=[*RECIPES])
    parser.add_argument("--subjects", nargs="+", help="by default all of each task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    seeds, tasks = ([0], ["adding", "digits_rows"]) if arguments.quick else (arguments.seeds, arguments.tasks)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    check()
    rows = []
    for task in tasks:
        recipe = RECIPES[task]
        steps = 20 if arguments.quick else recipe.steps
        for subject in (name for name in recipe.subjects if name in (arguments.subjects or recipe.subjects)):
            for seed in seeds:
                figures = train(recipe, subject, seed, steps, arguments.device)
                rows += as_rows(task, seed, subject, figures)
                print(f"{task}, {subject}, seed {seed}: {figures}", flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1))
    print(f"\ntorch {torch.__version__}, {arguments.device}, 1 thread, seeds {seeds}")
    print_table(rows)


if __name__ == "__main__":
    main()
