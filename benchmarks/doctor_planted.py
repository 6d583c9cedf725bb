"""What the doctor says of faults that are planted in a foreign project, and what they really cost.

The truth is the difference of the median epochs with and without a fault, fitted from equal seeds, for each batch. A
round fits without the fault, with it, examines, and fits with and without it again, so that other processes slow both
the estimate and the truth; the spread is that of the ratios of single rounds. Beside the truth is the processor time of
this process, which other processes change less, but in which neither sleeps nor worker processes count, and what that
is by the clock if these stretch it as they do whole steps, with the ratio of the cost to it. Run:
``OMP_NUM_THREADS=1 python benchmarks/doctor_planted.py [FAULT ...]``.
"""

import argparse
import copy
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it runs without an installation

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.foreign.tabular import HousesData, TabularMLP
from lightning_accel import __version__
from lightning_accel.diagnosis import examine, find_slowness
from lightning_accel.measure import Rates, describe_machine, measure_rates

CORES = max(int(describe_machine().cores), 1)
SIZES = {"batch_size": 256, "num_samples": 3000}  # epochs of 9 batches
EPOCHS = 3  # timed, after one that warms up


class Tabular(TabularMLP):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())  # without a schedule, which would need validation


class Reading(Tabular):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss


class Doubled(Tabular):
    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0].double(), batch[1]], batch_idx)


class Branching(Tabular):
    def __init__(self):
        super().__init__()
        self.branch = copy.deepcopy(self.model)

    def forward(self, x):
        self.hidden = self.branch(x)
        return super().forward(x)


class Each(nn.Module):
    def forward(self, logits, y):
        loss = 0.0
        for i in range(len(y)):
            loss = loss + F.cross_entropy(logits[i : i + 1], y[i : i + 1])
        return loss / len(y)


class Looping(Tabular):
    def __init__(self):
        super().__init__()
        self.loss_fn = Each()


class Steps(nn.Module):
    """Twenty pauses without a loop, since a graph that breaks within a loop is not compiled at all."""

    def __init__(self, model, pause):
        super().__init__()
        self.model, self.pause = model, pause

    half = "x = torch.tanh(x); self.pause(); x = x * 1.1; self.pause()\n    " * 5
    exec(f"def forward(self, x):\n    {half}x = self.model(x)\n    {half}return x")


def nothing():
    pass


def compiled(pause):
    module = Tabular()
    module.model = Steps(module.model, pause)
    module.model.compile()
    return module


class Sleeping(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index % 16 == 0:
            time.sleep(1e-3)
        return self.samples[index]


class Synchronous(CSVLogger):
    """Waits for each write, as loggers do that write to a server or a slow disk."""

    def log_metrics(self, metrics, step=None):
        time.sleep(3e-3)
        super().log_metrics(metrics, step)


class Data(HousesData):
    def __init__(self, wrap=lambda samples: samples, **options):
        super().__init__(**SIZES)
        self.wrap, self.options = wrap, options

    def train_dataloader(self):
        return DataLoader(self.wrap(self.train_set), SIZES["batch_size"], shuffle=True, **self.options)


def fit(module=Tabular, data=Data, threads=1, **options):
    """Return what fits a new run in a folder, with further callbacks."""

    def make(folder, epochs, callbacks=()):
        torch.set_num_threads(threads)
        L.seed_everything(0)
        settings = {"log_every_n_steps": 50, "max_epochs": epochs, "limit_val_batches": 0, "accelerator": "cpu"}
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        logger = Synchronous(folder, flush_logs_every_n_steps=1)
        return L.Trainer(**settings | quiet | options, logger=logger, callbacks=list(callbacks)), module(), data()

    return make


SOUND = fit()
# the finding's name, the run with the fault, that without
FAULTS: dict[str, tuple[str, Callable, Callable]] = {
    "item": ("host sync", fit(Reading), SOUND),
    "sleeping dataset": ("slow loader", fit(data=lambda: Data(Sleeping)), SOUND),
    "workers": ("too many workers", fit(data=lambda: Data(num_workers=16)), fit(data=lambda: Data(num_workers=CORES))),
    "threads": ("too many threads", fit(threads=8 * CORES), fit(threads=CORES)),
    "float64": ("float64", fit(lambda: Doubled().double()), SOUND),
    "logging": ("frequent logging", fit(log_every_n_steps=1), SOUND),
    "unused branch": ("unused parameters", fit(Branching), SOUND),
    "graph breaks": (
        "graph breaks",
        fit(lambda: compiled(torch._dynamo.graph_break)),
        fit(lambda: compiled(nothing)),
    ),
    "Python loop": ("small operations", fit(Looping), SOUND),
    "not pinned": (
        "no pinned memory",
        fit(data=lambda: Data(pin_memory=False)),
        fit(data=lambda: Data(pin_memory=True)),
    ),
}


class Epochs(L.Callback):
    """Time epochs with what lies between them, for each batch."""

    def __init__(self):
        self.begins = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.begins.append((time.perf_counter(), time.process_time()))
        self.batches = trainer.num_training_batches

    def times_ms(self):
        pairs = zip(self.begins[1:], self.begins[2:], strict=False)
        return [[1000 * (later - sooner) / self.batches for sooner, later in zip(*pair, strict=True)] for pair in pairs]


def epochs_ms(make):
    """Return the times of a step in the epochs of a new fit, each by the clock and of the processor."""
    with tempfile.TemporaryDirectory() as folder:
        epochs = Epochs()
        trainer, module, data = make(folder, EPOCHS + 2, [epochs])
        trainer.fit(module, data)
        return epochs.times_ms()


def cost_ms(name, faulty, rates, seconds):
    """Return the cost of the findings with this name, None if there are none."""
    with tempfile.TemporaryDirectory() as folder:
        seen = examine(*faulty(folder, 1000), seconds=seconds)
    costs = [one.cost_ms for one in find_slowness(seen, describe_machine(), rates) if one.name == name]
    return sum(costs) if costs else None


def median_ms(epochs):
    """Return the median time of a step by the clock, and that of the processor."""
    return [statistics.median(kind) for kind in zip(*epochs, strict=True)]


def measure(name, faulty, sound, rates, args):
    """Return a cost for each round, and the times of steps with the fault and without in each."""
    costs, slow, plain = [], [], []
    for _ in range(args.rounds):
        without, having = epochs_ms(sound), epochs_ms(faulty)
        costs.append(cost_ms(name, faulty, rates, args.seconds))
        slow.append(having + epochs_ms(faulty))
        plain.append(without + epochs_ms(sound))
    return costs, slow, plain


def row(fault, name, costs, slow, plain):
    """Return a line of the table: medians of all rounds, and the least and largest ratio of a single one."""
    (with_it, of_processor), (step, of_sound) = (median_ms(chain.from_iterable(times)) for times in (slow, plain))
    truth, found = with_it - step, [cost for cost in costs if cost is not None]
    worked = of_processor - of_sound
    stretched = worked * (with_it + step) / (of_processor + of_sound)
    head = f"{fault:18}{name:20}{f'{len(found)}/{len(costs)}':>6}"
    rest = f"{worked:11.3f}{stretched:11.3f}"
    if not found:
        return f"{head}{'':9}{truth:9.3f}{'':21}{rest}{'':7}{step:9.3f}{os.getloadavg()[0]:6.1f}"
    rounds = [
        cost / (median_ms(having)[0] - median_ms(without)[0])
        for cost, having, without in zip(costs, slow, plain, strict=True)
        if cost is not None
    ]
    spread = f"{min(rounds):.2f} to {max(rounds):.2f}"
    cost = statistics.median(found)
    head += f"{cost:9.3f}{truth:9.3f}{cost / truth - 1:7.0%}{spread:>14}"
    return f"{head}{rest}{cost / stretched - 1:7.0%}{step:9.3f}{os.getloadavg()[0]:6.1f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", default=[], help="those to plant, all by default")
    parser.add_argument("--rounds", type=int, default=5, help="examinations, each between fits")
    parser.add_argument("--seconds", type=float, default=4.0, help="of an examination")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    rates: Rates = measure_rates(tempfile.gettempdir())
    print(f"lightning_accel {__version__}, torch {torch.__version__}, {CORES} cores, load {os.getloadavg()[0]:.1f}")
    head = f"{'fault':18}{'finding':20}{'found':>6}{'cost':>9}{'truth':>9}{'off':>7}{'of rounds':>14}"
    print(f"{head}{'processor':>11}{'stretched':>11}{'off':>7}{'step':>9}{'load':>6}", flush=True)
    for fault, (name, faulty, sound) in FAULTS.items():
        if args.faults and fault not in args.faults:
            continue
        if fault == "not pinned" and not torch.cuda.is_available():
            print(f"{fault:18}{name:20}  needs a GPU: not measured here")
            continue
        print(row(fault, name, *measure(name, faulty, sound, rates, args)), flush=True)


if __name__ == "__main__":
    main()
