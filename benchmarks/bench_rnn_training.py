"""Is training on sequences of unequal lengths faster than a loop that a competent user writes in torch?

python benchmarks/bench_rnn_training.py [--quick] [--cells gru lstm mingru] [--seeds 0 1 ...] [--json FILE]

Classify 3000 sequences of 6 features and log-normal lengths (median 50, sigma 0.9, 10 to 500): one of two motifs comes
first, and a trend rises or falls. One layer of 96, batches of 64, AdamW at 3e-3, gradients clipped at 1, the same order
of epochs in both: ``ours`` is DynamicRNN under the Trainer with LengthBatchSampler, the peer a loop over nn.GRU or
nn.LSTM with the same windows of 50 batches sorted by length, padded, and the last valid step gathered. For minGRU
(2 layers) the peer is the GRU's loop. CPU seconds of training alone, one thread, an epoch of each subject in turn;
an epoch's median and quartiles, and seconds and epochs until the loss on 600 other sequences is below 0.25.
"""

import argparse
import json
import logging
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightning_accel import DynamicRNN, LengthBatchSampler
from lightning_accel.data import length_batch_loader

FEATURES, HIDDEN, BATCH, WINDOW, TARGET = 6, 96, 64, 50, 0.25
Samples = tuple[list[Tensor], Tensor]


def make_samples(number: int, seed: int) -> Samples:
    """Sequences (T, 6), and classes."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randn(number, generator=generator) * 0.9 + torch.tensor(50.0).log()).exp().round().clamp(10, 500)
    motifs = torch.tensor([[2.0, -2, 2, -2], [-2.0, -2, 2, 2]])
    sequences, classes = [], torch.randint(4, (number,), generator=generator)
    for length, label in zip(lengths.long().tolist(), classes.tolist(), strict=True):
        x = torch.randn(length, FEATURES, generator=generator) / 2
        first, rises = label // 2, label % 2
        places = torch.randperm(length - 4, generator=generator)[:2].sort().values.tolist()
        for feature, (place, motif) in enumerate(zip(places, (first, 1 - first), strict=True)):
            x[place : place + 4, feature] += motifs[motif]
        x[:, 2] += (0.7 if rises else -0.7) * torch.linspace(-1, 1, length)
        sequences.append(x)
    return sequences, classes


class Network(nn.Module):
    """A recurrent layer and a head on its last valid step, ours or torch's."""

    def __init__(self, cell: str, ours: bool) -> None:
        super().__init__()
        if ours:
            self.rnn: nn.Module = DynamicRNN(FEATURES, HIDDEN, 1 + (cell == "mingru"), cell=cell)  # type: ignore[arg-type]
        else:
            self.rnn = (nn.LSTM if cell == "lstm" else nn.GRU)(FEATURES, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if isinstance(self.rnn, DynamicRNN):
            last = self.rnn(x, lengths).pooled
        else:
            last = self.rnn(x)[0][torch.arange(len(x)), lengths - 1]
        scores: Tensor = self.head(last)
        return scores


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    sequences, classes = zip(*samples, strict=True)
    return pad_sequence(sequences, batch_first=True), torch.tensor([*map(len, sequences)]), torch.stack(classes)


class Module(L.LightningModule):
    def __init__(self, network: Network, epoch_ended: Callable[[], bool]) -> None:
        super().__init__()
        self.network, self.epoch_ended = network, epoch_ended

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        x, lengths, classes = batch
        return F.cross_entropy(self.network(x, lengths), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop |= self.epoch_ended()


def train_ours(network: Network, samples: Samples, seed: int, epoch_ended: Callable[[], bool]) -> None:
    sequences, classes = samples
    lengths = [*map(len, sequences)]
    sampler = LengthBatchSampler(lengths, BATCH, window=WINDOW, seed=seed)
    loader = length_batch_loader([*zip(sequences, classes, strict=True)], sampler, collate_fn=collate)
    trainer = L.Trainer(
        max_epochs=100, gradient_clip_val=1.0, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(network, epoch_ended), loader)


def train_by_hand(network: Network, samples: Samples, seed: int, epoch_ended: Callable[[], bool]) -> None:
    sequences, classes = samples
    lengths = torch.tensor([*map(len, sequences)])
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    for _ in range(100):
        windows = torch.randperm(len(lengths), generator=generator).split(BATCH * WINDOW)
        batches = [rows for window in windows for rows in window[lengths[window].argsort()].split(BATCH)]
        for number in torch.randperm(len(batches), generator=generator).tolist():
            rows = batches[number]
            x = pad_sequence([sequences[row] for row in rows], batch_first=True)
            loss = F.cross_entropy(network(x, lengths[rows]), classes[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        if epoch_ended():
            break


@torch.no_grad()
def loss_of(network: Network, samples: Samples) -> float:
    sequences, classes = samples
    order = sorted(range(len(sequences)), key=lambda row: len(sequences[row]))
    total = 0.0
    for start in range(0, len(order), BATCH):
        x, lengths, labels = collate([(sequences[row], classes[row]) for row in order[start : start + BATCH]])
        total += F.cross_entropy(network(x, lengths), labels, reduction="sum").item()
    return total / len(sequences)


def measure(cell: str, who: str, seed: int, samples: tuple[Samples, Samples], max_epochs: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    network = Network(cell, who == "ours")
    epochs: list[float] = []
    start, loss = 0.0, float("inf")

    def epoch_ended() -> bool:
        nonlocal start, loss
        epochs.append(time.process_time() - start)
        network.eval()
        loss = loss_of(network, samples[1])
        network.train()
        start = time.process_time()
        return loss < TARGET or len(epochs) == max_epochs

    start = time.process_time()
    (train_ours if who == "ours" else train_by_hand)(network, samples[0], seed, epoch_ended)
    return {
        "cell": cell, "who": who, "seed": seed, "epoch": statistics.median(epochs), "epochs": len(epochs),
        "seconds": sum(epochs) if loss < TARGET else None, "loss": loss,
    }  # fmt: skip


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def table(rows: list[dict[str, Any]], cells: list[str]) -> Iterator[str]:
    yield "| cell | who | CPU s an epoch | epochs | CPU s to the loss | loop's epoch by ours | loop's seconds by ours |"
    yield "|---|---|---|---|---|---|---|"
    for cell in cells:
        peer = {row["seed"]: row for row in rows if row["cell"] == cell and row["who"] == "loop"}
        for who in ("ours", "loop"):
            own = [row for row in rows if row["cell"] == cell and row["who"] == who]
            ratios = [quartiles([peer[row["seed"]]["epoch"] / row["epoch"] for row in own])]
            both = [(peer[row["seed"]]["seconds"], row["seconds"]) for row in own]
            reached = [theirs / mine for theirs, mine in both if theirs and mine]
            ratios.append(quartiles(reached) if reached else "-")
            done = [row["seconds"] for row in own if row["seconds"]]
            yield (
                f"| {cell} | {who} | {quartiles([row['epoch'] for row in own])} | "
                f"{quartiles([float(row['epochs']) for row in own])} | {quartiles(done) if done else '-'}, "
                f"{len(done)} of {len(own)} | {' | '.join(ratios if who == 'ours' else ['', ''])} |"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, two epochs at most")
    parser.add_argument("--cells", nargs="+", choices=["gru", "lstm", "mingru"], default=["gru", "lstm", "mingru"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(8)])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    samples = make_samples(3000, 1), make_samples(600, 2)
    rows: list[dict[str, Any]] = []
    for seed in [0] if arguments.quick else arguments.seeds:
        for cell in arguments.cells:
            for who in ("ours", "loop"):
                rows.append(measure(cell, who, seed, samples, 2 if arguments.quick else 40))
                print(rows[-1], flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1))
    print(f"\ntorch {torch.__version__}, {platform.processor() or 'cpu'}, 1 thread\n")
    print("\n".join(table(rows, arguments.cells)))
