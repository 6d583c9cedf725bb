"""What does an epoch of training an RBM cost, and how good are its features?

python benchmarks/bench_rbm.py [--quick] [--only TEXT] [--device cpu|cuda] [--json FILE]

Persistent contrastive divergence with one Gibbs step and as many chains as rows in a mini-batch, without centering or
momentum, which scikit-learn lacks, in float32: the same work for every subject, on scikit-learn's digits and on random
rows. learnergy has CD-1 only and rbms its own centred gradient, at a cost of a few sums. A step is five products of
2 B V H operations; "matmul limit" is what these alone take, and what is left of it is told of every subject. bf16 is
autocast.

Before the clock starts, every subject has to bring the data's reconstruction error down, and ``train_`` and the Trainer
have to end with the weights of the plain loop with the same draws. Subjects are interleaved in one process, on a CPU
one thread and the process's CPU time; the median round is quoted. Peers that are not installed are skipped, and named.
Epochs under the Trainer are timed from the start of the first to the end of the last; starting it is not.

``features``: logistic regression on the hidden units' means for nudged digits, as in scikit-learn's example
plot_rbm_logistic_classification; accuracy on the 20% held out, of three seeds.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import lightning as L
import numpy as np
import sklearn
import torch
from scipy.ndimage import convolve
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neural_network import BernoulliRBM
from sklearn.preprocessing import minmax_scale
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.data.in_memory import BatchTensorDataset, identity_collate
from lightning_accel.nn import RBM, ContrastiveDivergence

LEARNING_RATE = 0.05
PEERS = "learnergy", "rbms"


class Case(NamedTuple):
    name: str
    num_hidden: int
    batch_size: int
    rows: Tensor  # (N, V)
    per_step: int  # mini-batches for each training_step of the Trainer, where there is train_
    epochs: int  # of a fit of the Trainer
    bf16: bool = False


class Subject(NamedTuple):
    epoch: Callable[[], float | None]  # returns its seconds, if it has taken the time itself
    parameters: Callable[[], tuple[Tensor, Tensor, Tensor]]  # weight (H, V), visible and hidden bias


class Automatic(L.LightningModule):
    """One mini-batch a training_step."""

    def __init__(self, rbm: RBM, num_chains: int) -> None:
        super().__init__()
        self.rbm = rbm
        self.training_by = plain_pcd(num_chains)
        self.seconds = 0.0

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.training_by(self.rbm, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.rbm)

    def on_train_start(self) -> None:
        self.start = clock(self.device)()

    def on_train_end(self) -> None:
        self.seconds = clock(self.device)() - self.start


class Manual(Automatic):
    """Several mini-batches a training_step, by ``train_``."""

    def __init__(self, rbm: RBM, num_chains: int) -> None:
        super().__init__(rbm, num_chains)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.training_by.train_(self.rbm, batch[0], self.training_by.num_chains, self.optimizers())


def plain_pcd(num_chains: int) -> ContrastiveDivergence:
    return ContrastiveDivergence("pcd", steps=1, num_chains=num_chains, centering=0)


def sgd(rbm: RBM) -> torch.optim.SGD:
    return torch.optim.SGD(rbm.parameters(), lr=LEARNING_RATE)


def new_rbm(case: Case) -> RBM:
    torch.manual_seed(0)
    return RBM(case.rows.shape[1], case.num_hidden).to(case.rows.device)


def clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cpu":
        return time.process_time
    torch.cuda.synchronize()
    return time.perf_counter


def of(rbm: RBM) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    return lambda: (rbm.weight.detach(), rbm.visible_bias.detach(), rbm.hidden_bias.detach())


def autocast(case: Case) -> torch.autocast:
    return torch.autocast(case.rows.device.type, torch.bfloat16, enabled=case.bf16)


def bare(case: Case) -> Subject:
    """The loop that one would write by hand, in place; with bf16 copies of the weights for the products."""
    rbm, device = new_rbm(case), case.rows.device
    weight, visible_bias, hidden_bias = of(rbm)()
    num_visible, chains = case.rows.shape[1], case.batch_size
    hidden = torch.bernoulli(torch.full((chains, case.num_hidden), 0.5, device=device))
    noise = [torch.empty(chains, size, device=device) for size in (num_visible, case.num_hidden)]
    narrow: Callable[[Tensor], Tensor] = (lambda x: x.bfloat16()) if case.bf16 else (lambda x: x)

    def epoch() -> None:
        nonlocal hidden
        for data in case.rows.split(case.batch_size):
            rate, w = LEARNING_RATE / len(data), narrow(weight)
            if case.bf16:
                data_mean = (narrow(data) @ w.T).float().add_(hidden_bias).sigmoid_()
                visible = (narrow(hidden) @ w).float().add_(visible_bias).sigmoid_()
            else:
                data_mean = torch.addmm(hidden_bias, data, w.T).sigmoid_()
                visible = torch.addmm(visible_bias, hidden, w).sigmoid_()
            visible = torch.lt(noise[0].uniform_(), visible, out=visible)
            if case.bf16:
                mean = (narrow(visible) @ w.T).float().add_(hidden_bias).sigmoid_()
                weight.add_(narrow(data_mean).T @ narrow(data), alpha=rate)
                weight.add_(narrow(mean).T @ narrow(visible), alpha=-LEARNING_RATE / chains)
            else:
                mean = torch.addmm(hidden_bias, visible, w.T).sigmoid_()
                weight.addmm_(data_mean.T, data, alpha=rate)
                weight.addmm_(mean.T, visible, alpha=-LEARNING_RATE / chains)
            visible_bias.add_(data.mean(dim=0) - visible.mean(dim=0), alpha=LEARNING_RATE)
            hidden_bias.add_(data_mean.mean(dim=0) - mean.mean(dim=0), alpha=LEARNING_RATE)
            hidden = torch.lt(noise[1].uniform_(), mean, out=mean)

    return Subject(epoch, lambda: (weight, visible_bias, hidden_bias))


def one_call_a_step(case: Case) -> Subject:
    rbm, training = new_rbm(case), plain_pcd(case.batch_size)
    optimizer = sgd(rbm)

    def epoch() -> None:
        for rows in case.rows.split(case.batch_size):
            optimizer.zero_grad()
            with autocast(case):
                gap = training(rbm, rows)
            gap.backward()
            optimizer.step()

    return Subject(epoch, of(rbm))


def train_(case: Case) -> Subject:
    rbm, training = new_rbm(case), plain_pcd(case.batch_size)
    optimizer = sgd(rbm)

    def epoch() -> None:
        with autocast(case):
            training.train_(rbm, case.rows, case.batch_size, optimizer)

    return Subject(epoch, of(rbm))


def trainer(case: Case, module_class: type[Automatic], per_step: int, shuffle: bool = True) -> Subject:
    """Milliseconds of an epoch are those of a fit of several, without its start."""
    rbm = new_rbm(case)
    module = module_class(rbm, case.batch_size)
    loader = DataLoader(
        BatchTensorDataset(case.rows.cpu()),
        batch_size=case.batch_size * per_step,
        shuffle=shuffle,
        collate_fn=identity_collate,
    )

    def epoch() -> float:
        runner = L.Trainer(
            accelerator="gpu" if case.rows.is_cuda else "cpu",
            devices=1,
            precision="bf16-mixed" if case.bf16 else "32-true",
            max_epochs=case.epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        runner.fit(module, loader)
        return module.seconds / case.epochs

    return Subject(epoch, of(rbm))


def scikit_learn(case: Case) -> Subject:
    model = BernoulliRBM(
        case.num_hidden, learning_rate=LEARNING_RATE, batch_size=case.batch_size, n_iter=1, random_state=0
    )
    rows = case.rows.numpy()

    def parameters() -> tuple[Tensor, Tensor, Tensor]:
        values = model.components_, model.intercept_visible_, model.intercept_hidden_
        return tuple(torch.from_numpy(np.asarray(value)).float() for value in values)

    return Subject(lambda: model.fit(rows) is None or None, parameters)


def learnergy(case: Case) -> Subject:
    from learnergy.models.bernoulli import RBM as Peer

    torch.manual_seed(0)
    model = Peer(case.rows.shape[1], case.num_hidden, steps=1, learning_rate=LEARNING_RATE)
    dataset = TensorDataset(case.rows, torch.zeros(len(case.rows)))
    logging.disable(logging.WARNING)

    def epoch() -> None:
        model.fit(dataset, batch_size=case.batch_size, epochs=1)

    return Subject(epoch, lambda: (model.W.detach().T, model.a.detach(), model.b.detach()))


def rbms(case: Case) -> Subject:
    """The body of its ``train``, without the files."""
    from rbms.bernoulli_bernoulli.classes import BBRBM
    from rbms.training.pcd import fit_batch_pcd

    start = [x.clone() for x in of(new_rbm(case))()]
    model = BBRBM(weight_matrix=start[0].T.contiguous(), vbias=start[1], hbias=start[2])
    model.init_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, maximize=True)
    chains = model.init_chains(case.batch_size)
    ones = torch.ones(len(case.rows), 1)

    @torch.no_grad()
    def epoch() -> None:
        nonlocal chains
        for _ in range(-(-len(case.rows) // case.batch_size)):
            chosen = torch.randperm(len(case.rows))[: case.batch_size]
            optimizer.zero_grad(set_to_none=False)
            batch = case.rows[chosen], ones[chosen]
            chains, _ = fit_batch_pcd(batch, chains, model, gibbs_steps=1, beta=1.0, centered=True)
            optimizer.step()

    return Subject(epoch, lambda: (model.weight_matrix.T, model.vbias, model.hbias))


def matmul_limit(case: Case, dtype: torch.dtype) -> Subject:
    """The five products of each step, with what they work on in the caches as it falls."""
    size = case.batch_size, case.rows.shape[1], case.num_hidden
    new = lambda *shape: torch.rand(shape, device=case.rows.device).to(dtype)  # noqa: E731
    visible, hidden, weight = new(size[0], size[1]), new(size[0], size[2]), new(size[2], size[1])

    def epoch() -> None:
        for _ in range(-(-len(case.rows) // case.batch_size)):
            for _ in range(2):
                visible @ weight.T
                hidden.T @ visible
            hidden @ weight

    return Subject(epoch, lambda: (weight, visible[0], hidden[0]))


def subjects_of(case: Case) -> dict[str, Subject]:
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    subjects = {"bare loop": bare(case), "ours, one call a step": one_call_a_step(case), "ours, train_": train_(case)}
    if case.per_step == 1:
        subjects["ours, Trainer"] = trainer(case, Automatic, 1)
    else:
        subjects[f"ours, Trainer, train_ of {case.per_step}"] = trainer(case, Manual, case.per_step)
    subjects["matmul limit"] = matmul_limit(case, dtype)
    if case.bf16 or case.rows.is_cuda:
        return subjects
    subjects = {"scikit-learn": scikit_learn(case), **subjects}
    for name, make in (("learnergy", learnergy), ("rbms", rbms)):
        if importlib.util.find_spec(name):
            subjects[name] = make(case)
    return subjects


def check_answers(case: Case) -> None:
    """Every subject learns; on a CPU, ours do all the same, bit for bit where the order of sums is the same."""
    start = reconstruction_error(case.rows, *of(new_rbm(case))())
    for name, subject in subjects_of(case).items():
        if name != "matmul limit":
            subject.epoch()
            error = reconstruction_error(case.rows, *subject.parameters())
            assert error < start, f"{name} ends at {error}, from {start}"
    if case.rows.is_cuda:  # numbers that are drawn for many mini-batches at once differ
        return
    few = case._replace(rows=case.rows[: 4 * case.batch_size + 3], epochs=1)
    loop, at_once = one_call_a_step(few), train_(few)
    module = Manual if case.per_step > 1 else Automatic
    under_trainer = trainer(few, module, case.per_step, shuffle=False)
    for subject in (loop, at_once, under_trainer):
        subject.epoch()
    tolerance = 1e-3 if case.bf16 else 1e-5
    for subject in (at_once, under_trainer):
        torch.testing.assert_close(subject.parameters(), loop.parameters(), rtol=0, atol=tolerance)


def reconstruction_error(rows: Tensor, weight: Tensor, visible_bias: Tensor, hidden_bias: Tensor) -> float:
    rows = rows.to(weight)
    hidden = torch.sigmoid(rows @ weight.T + hidden_bias)
    return float((torch.sigmoid(hidden @ weight + visible_bias) - rows).square().mean())


def measure(case: Case, rounds: int) -> list[dict[str, object]]:
    check_answers(case)
    subjects = subjects_of(case)
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(rounds + 1):
        for name, subject in subjects.items():
            now = clock(case.rows.device)
            start = now()
            own = subject.epoch()
            spent = clock(case.rows.device)() - start if own is None else own
            if turn:  # the first warms up
                seconds[name].append(spent)
    times = {name: statistics.median(values) for name, values in seconds.items()}
    base = "scikit-learn" if "scikit-learn" in times and "digits" in case.name else "bare loop"
    rows = []
    for name, value in times.items():
        rows.append(row(case.name, name, "time of an epoch", value * 1e3, "ms", base, value / times[base]))
        share = times["matmul limit"] / value
        rows.append(row(case.name, name, "share of the matmul limit", share, "1", "matmul limit", share))
    return rows


def nudged_digits() -> list[np.ndarray]:
    """Digits and their shifts by a pixel to four sides; training and test rows, then their classes."""
    digits, classes = load_digits(return_X_y=True)
    moves = np.zeros((4, 3, 3))
    for move, place in zip(moves, ((0, 1), (1, 0), (1, 2), (2, 1)), strict=True):
        move[place] = 1
    pictures = digits.reshape(-1, 8, 8)
    moved = [convolve(pictures, move[None], mode="constant").reshape(len(digits), -1) for move in moves]
    rows = minmax_scale(np.concatenate([digits, *moved])).astype(np.float32)
    return train_test_split(rows, np.tile(classes, 5), test_size=0.2, random_state=0)


def accuracy(features: Callable[[np.ndarray], np.ndarray], data: list[np.ndarray]) -> float:
    train, test, train_classes, test_classes = data
    classifier = LogisticRegression(C=6000, solver="newton-cg", tol=1e-4).fit(features(train), train_classes)
    return float(classifier.score(features(test), test_classes))


def features_of_ours(data: list[np.ndarray], seed: int, epochs: int = 30) -> Callable[[np.ndarray], np.ndarray]:
    """CD-1 without centering, momentum or decay of weights; the learning rate falls from 0.1 to 0 along a line."""
    torch.manual_seed(seed)
    rows, rbm = torch.from_numpy(data[0]), RBM(64, 100)
    rbm.start_at_(rows.mean(dim=0), len(rows))
    training = ContrastiveDivergence("cd", steps=1, centering=0, seed=seed)
    optimizer = torch.optim.SGD(rbm.parameters(), lr=0.1)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - epoch / epochs)
        training.train_(rbm, rows[torch.randperm(len(rows))], 20, optimizer)
    return lambda x: rbm.transform(torch.from_numpy(x)).detach().numpy()


def measure_features() -> list[dict[str, object]]:
    data = nudged_digits()
    found = {
        "pixels": [accuracy(lambda x: x, data)],
        "scikit-learn": [
            accuracy(BernoulliRBM(100, learning_rate=0.06, random_state=seed).fit(data[0]).transform, data)
            for seed in range(3)
        ],
        "ours": [accuracy(features_of_ours(data, seed), data) for seed in range(3)],
    }
    base = statistics.mean(found["scikit-learn"])
    return [
        row("features", name, metric, value, "1", "scikit-learn", value / base)
        for name, values in found.items()
        for metric, value in (("accuracy", statistics.mean(values)), ("lowest accuracy", min(values)))
    ]


def row(
    case: str, subject: str, metric: str, value: float, unit: str, baseline: str, ratio: float
) -> dict[str, object]:
    return {
        "case": case, "subject": subject, "metric": metric, "value": value, "unit": unit, "baseline": baseline,
        "ratio": ratio,
    }  # fmt: skip


def cases(quick: bool, device: torch.device) -> list[Case]:
    digits = torch.from_numpy(load_digits().data / 16).float().to(device)
    sizes = [(256, 100)] if quick else [(64, 10), (64, 100), (256, 10), (256, 100)]
    found = [
        Case(f"digits, H {hidden}, B {batch}", hidden, batch, digits, per_step=180 if batch == 10 else 18, epochs=10)
        for hidden, batch in sizes
    ]
    torch.manual_seed(0)
    large = (torch.rand(2_560 if quick else 10_000, 784) < 0.3).float().to(device)
    name = f"V 784, H 1024, B 256, N {len(large)}"
    found += [Case(name, 1024, 256, large, per_step=1, epochs=2)]
    return [*found, Case(f"{name}, bf16", 1024, 256, large, per_step=1, epochs=2, bf16=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds of fewer cases, and no features")
    parser.add_argument("--only", default="", help="cases whose names hold this text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    versions = {name: importlib.metadata.version(name) for name in PEERS if importlib.util.find_spec(name)}
    threads = f"{device.type}, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, scikit-learn {sklearn.__version__}, {threads}")
    for name in PEERS:
        print(f"{name} {versions[name]}" if name in versions else f"{name} is not installed: skipped")
    print("\n| case | subject | ms / epoch | ratio | share of the matmul limit |\n| --- | --- | ---: | ---: | ---: |")
    rows = []
    for case in [case for case in cases(arguments.quick, device) if arguments.only in case.name]:
        measured = measure(case, rounds=3 if arguments.quick else 7)
        rows += measured
        for timed, share in zip(measured[::2], measured[1::2], strict=True):
            numbers = f"{timed['value']:.2f} | {timed['ratio']:.3f} | {share['value']:.0%}"
            print(f"| {timed['case']} | {timed['subject']} | {numbers} |", flush=True)
    if not arguments.quick and arguments.only in "features":
        print("\n| features | accuracy | the lowest of three seeds |\n| --- | ---: | ---: |", flush=True)
        measured = measure_features()
        rows += measured
        for mean, least in zip(measured[::2], measured[1::2], strict=True):
            print(f"| {mean['subject']} | {mean['value']:.4f} | {least['value']:.4f} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
