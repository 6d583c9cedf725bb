"""What do channels that are removed while a model trains save, and what do they cost in accuracy?

python benchmarks/bench_channels.py [--quick] [--seeds 0 1 2] [--json FILE]

Handwritten digits, 8 by 8. The CNN has channels 64, 128, 256 and a hidden layer of 256, the MLP three hidden layers of
1024. ``Pruning(structure="channel")`` removes a share of the channels of each layer by the middle of the run, which is
as long as the dense one's. Beside it Torch-Pruning, if it is installed: it removes the same share at once, by the
magnitude of a group, from the model that was trained dense, which is then trained for a fifth of the epochs more.
Accuracy is that of the test images, the mean over seeds. Times are medians of calls in float32, eager, without
gradients, on one thread, all subjects in turns; the ratio is the dense model's to theirs. Checked first: the smaller
CNN puts out what the whole one does with the removed channels at zero, and a ResNet-18 at half its channels has 0.487
billion multiplications and 3.06 million parameters, as Torch-Pruning counts them.
"""

import argparse
import copy
import io
import json
import logging
import statistics
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_accel import Classifier, DigitsDataModule
from lightning_accel.callbacks.pruning.callback import Pruning
from lightning_accel.compress import (
    apply_plan_,
    choose_channels,
    find_channel_groups,
    measure_latency,
    score_channels,
)
from lightning_accel.compress.channels.groups import zero_channels_

BATCHES = 1, 256
MODELS: dict[str, dict[str, Any]] = {
    "CNN": {"num_features": 1, "channels": [64, 128, 256], "hidden_dims": [256]},
    "MLP": {"hidden_dims": [1024, 1024, 1024]},
}
SHARES = {"CNN": [0.5, 0.75], "MLP": [0.5, 0.75]}


def fit(module: L.LightningModule, epochs: int, seed: int, callbacks: list[L.Callback]) -> None:
    L.seed_everything(seed, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(module, datamodule=DigitsDataModule(batch_size=64, max_shift=1))


@torch.no_grad()
def accuracy(module: nn.Module) -> float:
    data = DigitsDataModule()
    data.setup()
    images, labels = zip(*[(x, y) for x, y in data.test_dataloader()], strict=True)
    predicted = module.eval()(torch.cat(images)).argmax(1)
    return predicted.eq(torch.cat(labels)).float().mean().item()


def make(name: str, seed: int, steps: int) -> Classifier:
    torch.manual_seed(seed)
    return Falling(**MODELS[name], steps=steps)


class Falling(Classifier):
    """A learning rate that falls to nothing by half a cosine."""

    def __init__(self, steps: int, **options: Any) -> None:
        super().__init__(**options)
        self.steps = steps

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def peer(dense: Classifier, share: float, epochs: int, seed: int) -> Classifier | None:
    """By Torch-Pruning, from a model that was trained; None where it is not installed."""
    try:
        import torch_pruning
    except ImportError:
        return None
    module = copy.deepcopy(dense)
    example = torch.randn(2, 1, 8, 8)
    torch_pruning.pruner.MagnitudePruner(
        module.network.eval(),
        example,
        importance=torch_pruning.importance.GroupMagnitudeImportance(),
        pruning_ratio=share,
        ignored_layers=[module.network[-1]],
    ).step()
    module.steps = 20 * epochs
    module.train()  # left in evaluation mode, batch norms would not learn
    fit(module, epochs, seed, [])
    return module


def check() -> None:
    module = make("CNN", 0, 1).double().eval()
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    groups = find_channel_groups(module, (x,))
    removed = choose_channels(score_channels(module, groups), 0.75)
    small = copy.deepcopy(module)
    apply_plan_(small, groups.plan(small, removed))
    zero_channels_(module, groups, removed)
    torch.testing.assert_close(small(x), module(x), rtol=1e-9, atol=1e-9)


def size_mb(module: nn.Module) -> float:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return len(file.getvalue()) / 2**20


def train(name: str, seeds: list[int], epochs: int) -> dict[str, list[nn.Module]]:
    """Of each subject, a module a seed."""
    steps = epochs * 20
    trained: dict[str, list[nn.Module]] = {}
    for seed in seeds:
        dense = make(name, seed, steps)
        fit(dense, epochs, seed, [])
        trained.setdefault("dense", []).append(dense)
        for share in SHARES[name]:
            module = make(name, seed, steps)
            fit(module, epochs, seed, [Pruning(share, structure="channel", end=0.5)])
            trained.setdefault(f"{share:.0%} removed", []).append(module)
            other = peer(dense, share, max(1, epochs // 5), seed)
            if other is not None:
                trained.setdefault(f"{share:.0%}, Torch-Pruning", []).append(other)
    return trained


def measure(name: str, trained: dict[str, list[nn.Module]], seconds: float) -> list[dict[str, Any]]:
    rows = []

    def add(subject: str, metric: str, value: float, unit: str, ratio: float) -> None:
        rows.append(
            {"case": name, "subject": subject, "metric": metric, "value": value, "unit": unit, "baseline": "dense"}
            | {"ratio": ratio}
        )

    networks = {subject: modules[0].network.eval() for subject, modules in trained.items()}  # type: ignore[union-attr]
    for batch in BATCHES:
        x = torch.randn(batch, 1, 8, 8)
        times = measure_latency({one: partial(net, x) for one, net in networks.items()}, seconds)
        for subject, latency in times.items():
            add(subject, f"batch {batch}", latency.p50_ms, "ms", times["dense"].p50_ms / latency.p50_ms)
    count = {one: sum(value.numel() for value in net.parameters()) for one, net in networks.items()}
    for subject, modules in trained.items():
        figures = [accuracy(module) for module in modules]
        add(subject, "accuracy", statistics.mean(figures), "", statistics.mean(figures))
        add(subject, "parameters", count[subject], "", count["dense"] / count[subject])
        add(subject, "file", size_mb(networks[subject]), "MiB", size_mb(networks["dense"]) / size_mb(networks[subject]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the CNN alone, one seed, few epochs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    check()
    if arguments.quick:
        arguments.seeds, arguments.epochs = arguments.seeds[:1], 8
    rows = []
    for name in ["CNN"] if arguments.quick else MODELS:
        rows += measure(name, train(name, arguments.seeds, arguments.epochs), 0.5 if arguments.quick else 3)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if not any("Torch-Pruning" in row["subject"] for row in rows):
        print("Torch-Pruning is not installed; its rows are left out\n")
    print(f"torch {torch.__version__}, lightning {L.__version__}, CPU, one thread, seeds {arguments.seeds}\n")
    print("| case | subject | " + " | ".join(["accuracy", "parameters", "MiB", "x batch 1", "x batch 256"]) + " |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for case, subject in dict.fromkeys((row["case"], row["subject"]) for row in rows):
        own = {row["metric"]: row for row in rows if (row["case"], row["subject"]) == (case, subject)}
        print(
            f"| {case} | {subject} | {own['accuracy']['value']:.3f} | {own['parameters']['value']:,} | "
            f"{own['file']['value']:.2f} | {own['batch 1']['ratio']:.1f} | {own['batch 256']['ratio']:.1f} |"
        )


if __name__ == "__main__":
    main()
