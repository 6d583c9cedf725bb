"""How well do recurrent cells predict the next byte of program text, after equal times of training?

python benchmarks/bench_bytes.py [--quick] [--seconds 30] [--seeds 4] [--subjects GRU LSTM ...] [--json FILE]

The text is that of Python's own library: its modules in order of their names, of which each twentieth is held out.
Forecasting by SequenceModel, width 192, batches of 32 pieces of 128 bytes, AdamW, one thread, each subject as many
seconds of CPU time, a learning rate that rises for a tenth of it and falls to zero by a cosine. The rate is the better
of three on half of the held-out text, with a seed that is not reported; figures are of the other half.
"""

import argparse
import json
import math
import statistics
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel import SequenceModel
from lightning_accel.models import RecurrentLayers

WIDTH, BATCH, LENGTH = 192, 32, 128
RATES = (2e-3, 5e-3, 1e-2)
BASELINE = "GRU"
SUBJECTS = {
    BASELINE: RecurrentLayers("gru", WIDTH),
    "LSTM": RecurrentLayers("lstm", WIDTH),
    "minGRU, 2 residual layers": RecurrentLayers("mingru", WIDTH, num_layers=2, residual=True),
    "minGRU, 2 blocks of the paper": RecurrentLayers(
        "mingru", WIDTH, num_layers=2, residual=True, conv_kernel=4, feed_forward_dim=2 * WIDTH
    ),
}


class Text(NamedTuple):
    train: Tensor  # (bytes,) uint8
    val: Tensor
    test: Tensor


class Trained(NamedTuple):
    val: float  # bits a byte
    test: float
    updates: int


def read_text() -> Text:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts: tuple[list[bytes], ...] = ([], [], [])
    for number, path in enumerate(paths):
        parts[{0: 1, 10: 2}.get(number % 20, 0)].append(path.read_bytes())
    return Text(*(torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts))


def train(layers: RecurrentLayers, text: Text, rate: float, seed: int, seconds: float) -> Trained:
    torch.manual_seed(seed)
    model = SequenceModel(vocab_size=256, dim=WIDTH, layers=layers, target_kind="forecasting").train()
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    begin, updates = time.process_time(), 0
    while (share := (time.process_time() - begin) / seconds) < 1:
        factor = share / 0.1 if share < 0.1 else 0.5 + 0.5 * math.cos(math.pi * (share - 0.1) / 0.9)
        optimizer.param_groups[0]["lr"] = rate * max(factor, 1e-2)
        loss = loss_of(model, pieces(text.train, torch.randint(len(text.train) - LENGTH - 1, (BATCH,))))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        updates += 1
    return Trained(*(evaluate(model.eval(), part) for part in (text.val, text.test)), updates)


def pieces(text: Tensor, starts: Tensor) -> Tensor:
    """Return the bytes from each of ``starts`` (B,), and one more to predict: (B, LENGTH + 1) int64."""
    return text[starts[:, None] + torch.arange(LENGTH + 1)].long()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x[:, :-1]).scores.flatten(0, 1), x[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    """Return the mean bits of a byte, in pieces that begin without context."""
    starts = torch.arange(0, min(len(text), 100_000) - LENGTH - 1, LENGTH)
    losses = [float(loss_of(model, pieces(text, some))) * len(some) for some in starts.split(256)]
    return sum(losses) / len(starts) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seconds, two seeds")
    parser.add_argument("--seconds", type=float, default=30, help="CPU time of each training")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--subjects", nargs="+", default=[*SUBJECTS], choices=[*SUBJECTS])
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    seconds, seeds = (2, 2) if arguments.quick else (arguments.seconds, arguments.seeds)
    torch.set_num_threads(1)
    text = read_text()
    print(f"torch {torch.__version__}, cpu, 1 thread; {len(text.train)} bytes to train on, {len(text.test)} to test")
    train(SUBJECTS[BASELINE], text, 1e-3, 0, 1)  # builds kernels
    print("| cell | learning rate | updates | bits a byte | standard error |\n| --- | ---: | ---: | ---: | ---: |")
    rows = []
    for name in arguments.subjects:
        rate = min(RATES, key=lambda one: train(SUBJECTS[name], text, one, 100, seconds).val)
        found = [train(SUBJECTS[name], text, rate, seed, seconds) for seed in range(seeds)]
        bits = [one.test for one in found]
        error = statistics.stdev(bits) / len(bits) ** 0.5
        updates = statistics.mean(one.updates for one in found)
        print(f"| {name} | {rate:g} | {updates:.0f} | {statistics.mean(bits):.3f} | {error:.3f} |", flush=True)
        base = rows[0]["value"] if rows and rows[0]["subject"] == BASELINE else None
        rows.append({
            "case": "bytes", "subject": name, "metric": "bits", "value": statistics.mean(bits), "unit": "bits a byte",
            "baseline": BASELINE, "ratio": statistics.mean(bits) / base if base else None,
        })  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
