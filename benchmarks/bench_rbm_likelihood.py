"""How likely does a trained RBM make data that it has not seen, and do others do better?

python benchmarks/bench_rbm_likelihood.py [--quick] [--cases "H16 B100" ...] [--subjects ours ...] [--seeds 0 1 ...]
    [--json FILE]

Held-out negative log-likelihood in nats of binarised digits (scikit-learn's, above 0.5; 1400 rows to train on, 150 to
choose the learning rate and 247 to report, after one permutation), after 30 epochs with each learning rate of a grid.
The rate with the best mean over seeds on the 150 rows is quoted. The partition function is exact for 16 hidden units,
else by annealing, with more temperatures until annealing upwards and downwards from the training rows agree within
0.02 nats (infinite is said of models for which they never come within a nat); all subjects' weights are put into one
RBM that computes it. All have the same schedule, a learning rate that falls to 0 linearly, and 1-step gradients. Peers
are set to it between epochs; those that are not installed are skipped.

Bars and stripes: the total log-likelihood, exact, of the 16 pictures of 3 x 3 (at most -41.59) with 4 hidden units
after the last of 50 000 updates with all of them.
"""

import argparse
import importlib.util
import itertools
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.neural_network import BernoulliRBM
from torch import Tensor

from lightning_accel.models import Stage
from lightning_accel.nn import RBM, ContrastiveDivergence


class Case(NamedTuple):
    num_hidden: int
    batch_size: int


CASES = {"H16 B100": Case(16, 100), "H64 B100": Case(64, 100), "H64 B10": Case(64, 10), "H256 B100": Case(256, 100)}
BARS = "bars and stripes"
BEST_TOTAL = -41.59  # 12 pictures of probability 1/16, two of 1/8


class Weights(NamedTuple):
    weight: Tensor  # (H, V)
    visible_bias: Tensor
    hidden_bias: Tensor


class Digits(NamedTuple):
    training: Tensor
    validation: Tensor
    held_out: Tensor


def digits() -> Digits:
    pixels = torch.tensor(load_digits().data / 16 > 0.5).float()
    pixels = pixels[np.random.RandomState(0).permutation(len(pixels))]
    return Digits(*pixels.split([1400, 150, 247]))


def shuffled(data: Tensor, batch_size: int) -> Iterator[Tensor]:
    return (data[rows] for rows in torch.randperm(len(data)).split(batch_size))


def ours(
    data: Tensor,
    case: Case,
    lr: float,
    epochs: int,
    num_chains: int = 100,
    std: float | None = None,
    low: bool = False,
) -> Weights:
    """The preset for densities: the visible bias of the data's mean, centering, chains however large the batch."""
    stage = Stage(preset="density", num_chains=num_chains, initial_std=std)
    sizes = data.shape[1], case.num_hidden
    rbm = RBM(*sizes, initial_std=stage.std_for(*sizes, all_bernoulli=True))
    rbm.start_at_(data.mean(dim=0), len(data))
    training = stage.start_sampling(torch.initial_seed())
    optimizer = torch.optim.SGD(rbm.parameters(), lr)
    num_steps = epochs * math.ceil(len(data) / case.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 1 / num_steps, total_iters=num_steps - 1)
    for _ in range(epochs):
        for rows in shuffled(data, case.batch_size):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                gap = training(rbm, rows)
            gap.backward()
            optimizer.step()
            schedule.step()
    return Weights(rbm.weight.detach(), rbm.visible_bias.detach(), rbm.hidden_bias.detach())


def ours_500_chains(data: Tensor, case: Case, lr: float, epochs: int) -> Weights:
    return ours(data, case, lr, epochs, num_chains=500)


def ours_bf16(data: Tensor, case: Case, lr: float, epochs: int) -> Weights:
    return ours(data, case, lr, epochs, low=True)


def ours_small_weights(data: Tensor, case: Case, lr: float, epochs: int) -> Weights:
    return ours(data, case, lr, epochs, std=0.01)


def scikit_learn(data: Tensor, case: Case, lr: float, epochs: int) -> Weights:
    rbm = BernoulliRBM(case.num_hidden, batch_size=case.batch_size, random_state=torch.initial_seed())
    for epoch in range(epochs):
        rbm.learning_rate = lr * (1 - epoch / epochs)
        for rows in shuffled(data, case.batch_size):
            rbm.partial_fit(rows.numpy())
    parts = rbm.components_, rbm.intercept_visible_, rbm.intercept_hidden_
    return Weights(*(torch.tensor(part).float() for part in parts))


def learnergy(data: Tensor, case: Case, lr: float, epochs: int) -> Weights:
    from learnergy.models.bernoulli import RBM as Peer

    rbm = Peer(data.shape[1], case.num_hidden, learning_rate=lr)
    rows = torch.utils.data.TensorDataset(data, torch.zeros(len(data)))
    for epoch in range(epochs):
        rbm.optimizer.param_groups[0]["lr"] = lr * (1 - epoch / epochs)
        rbm.fit(rows, batch_size=case.batch_size, epochs=1)
    return Weights(rbm.W.detach().T.contiguous(), rbm.a.detach(), rbm.b.detach())


def rbms(data: Tensor, case: Case, lr: float, epochs: int) -> Weights:
    """Its gradient and sampler, centred, 100 chains, in the loop of its ``train``, which writes files."""
    from rbms.bernoulli_bernoulli.classes import BBRBM
    from rbms.training.pcd import fit_batch_pcd

    rows_of = SimpleNamespace(data=data)
    rbm = BBRBM.init_parameters(case.num_hidden, rows_of, data.device, data.dtype)
    chains = rbm.init_chains(100)
    optimizer = torch.optim.SGD(rbm.parameters(), lr, maximize=True)
    for parameter in rbm.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        for epoch in range(epochs):
            optimizer.param_groups[0]["lr"] = lr * (1 - epoch / epochs)
            for rows in shuffled(data, case.batch_size):
                optimizer.zero_grad(set_to_none=False)
                chains, _ = fit_batch_pcd((rows, torch.ones(len(rows))), chains, rbm, gibbs_steps=1, beta=1.0)
                optimizer.step()
    return Weights(rbm.weight_matrix.T.contiguous(), rbm.vbias, rbm.hbias)


class Subject(NamedTuple):
    train: Callable[[Tensor, Case, float, int], Weights]
    rates: dict[int, tuple[float, ...]]  # of learning, by batch size
    module: str = "lightning_accel"
    cases: tuple[str, ...] = tuple(CASES)


SUBJECTS = {
    "ours": Subject(ours, {100: (2, 3, 4, 6), 10: (0.3, 0.5, 0.8)}),
    "ours, first weights of 0.01": Subject(ours_small_weights, {100: (2, 3, 4, 6), 10: (0.3, 0.5, 0.8)}),
    "ours, bf16 autocast": Subject(ours_bf16, {100: (2, 3, 4, 6), 10: (0.3, 0.5, 0.8)}),
    "ours, 500 chains": Subject(ours_500_chains, {10: (0.3, 0.5, 0.8)}, cases=("H64 B10",)),
    "scikit-learn": Subject(scikit_learn, {100: (0.4, 0.8, 1.6), 10: (0.1, 0.2, 0.4)}, "sklearn"),
    "learnergy": Subject(learnergy, {100: (0.5, 1, 2), 10: (0.1, 0.2, 0.4)}, "learnergy"),
    "rbms": Subject(rbms, {100: (3.2, 6.4, 12.8), 10: (0.8, 1.6, 3.2)}, "rbms"),
}


@torch.no_grad()
def as_rbm(weights: Weights) -> RBM:
    rbm = RBM(len(weights.visible_bias), len(weights.hidden_bias))
    for name, value in weights._asdict().items():
        getattr(rbm, name).copy_(value)
    return rbm


@torch.no_grad()
def likelihoods(weights: Weights, data: Digits) -> dict[str, float]:
    """Negative log-likelihoods of the rows that choose and of those that are reported, and what is open in log Z."""
    rbm = as_rbm(weights)
    log_z, gap = log_z_of(rbm, data.training)
    found = {"validation NLL": data.validation, "held-out NLL": data.held_out}
    nlls = {
        name: float(rbm.free_energy(rows).double().mean() + log_z) if gap < 1 else math.inf
        for name, rows in found.items()
    }
    return nlls | {"open in log Z": gap}


def log_z_of(rbm: RBM, training: Tensor) -> tuple[float, float]:
    """Log Z and the difference of annealing upwards and downwards, whose mean it is."""
    if rbm.num_hidden <= 16:
        return float(rbm.log_z("exact").estimate), 0.0
    generator = torch.Generator().manual_seed(0)
    for num_temperatures in (1000, 2000, 4000, 8000):
        options = {
            "num_chains": 500,
            "num_temperatures": num_temperatures,
            "base_mean": training.mean(dim=0),
            "generator": generator,
        }
        forward = rbm.log_z("ais", **options)
        reverse = rbm.log_z("reverse_ais", **options, reverse_from=training)
        estimates = float(forward.estimate), float(reverse.estimate)
        gap = abs(estimates[1] - estimates[0])
        if gap < 0.02 or gap > 3:  # diverged: its log Z is far above what annealing upwards finds
            break
    return statistics.mean(estimates), gap


def check() -> None:
    """Peers' free energies are those of the RBM that judges them, and both ways to its partition function agree."""
    data, _, held_out = digits()
    torch.manual_seed(0)
    weights = ours(data, CASES["H16 B100"], 2.0, epochs=5)
    rbm = as_rbm(weights)
    exact = rbm.log_z("exact").estimate
    for method in ("ais", "reverse_ais"):
        found = rbm.log_z(method, num_chains=100, num_temperatures=300, base_mean=data.mean(dim=0))
        assert found.lower <= exact <= found.upper, f"{method}: {found} for {exact}"
    peer = BernoulliRBM(16, n_iter=1, random_state=0).fit(data.numpy())
    parts = peer.components_, peer.intercept_visible_, peer.intercept_hidden_
    same = as_rbm(Weights(*(torch.tensor(part) for part in parts))).free_energy(held_out).detach()
    assert np.allclose(same, peer._free_energy(held_out.numpy()), atol=1e-3), "another free energy than scikit-learn's"


def bars_and_stripes() -> Tensor:
    lines = torch.tensor(list(itertools.product([0.0, 1.0], repeat=3)))
    return torch.cat([lines[:, :, None].expand(-1, 3, 3), lines[:, None].expand(-1, 3, 3)]).flatten(1)


def total_log_likelihood(sampler: str, seed: int, num_updates: int, lr: float = 0.1) -> tuple[float, float]:
    """After the last update, and the best of every 500th."""
    torch.manual_seed(seed)
    data = bars_and_stripes()
    rbm = RBM(9, 4)
    rbm.start_at_(data.mean(dim=0), len(data))
    training = ContrastiveDivergence(sampler, seed=seed)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(rbm.parameters(), lr)
    best = -math.inf
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = lr * (1 - update / num_updates)
        optimizer.zero_grad()
        training(rbm, data).backward()
        optimizer.step()
        if update % 500 == 499 or update + 1 == num_updates:
            last = float(rbm.log_prob(data).sum())
            best = max(best, last)
    return last, best


def row(case: str, subject: str, metric: str, value: float, unit: str) -> dict[str, Any]:
    return {"case": case, "subject": subject, "metric": metric, "value": value, "unit": unit,
            "baseline": None, "ratio": None}  # fmt: skip


def measure(name: str, case: str, seeds: Iterable[int], rates: Iterable[float], epochs: int) -> list[dict[str, Any]]:
    data = digits()
    rows = []
    for lr, seed in itertools.product(rates, seeds):
        torch.manual_seed(seed)
        begin = process_time()
        weights = SUBJECTS[name].train(data.training, CASES[case], lr, epochs)
        milliseconds = (process_time() - begin) / epochs * 1e3
        at = f"{case}, lr {lr:g}, seed {seed}"
        rows += [row(at, name, metric, value, "nats") for metric, value in likelihoods(weights, data).items()]
        rows.append(row(at, name, "CPU time of an epoch", milliseconds, "ms"))
    return rows


def best_rate(rows: list[dict[str, Any]]) -> tuple[str, dict[str, float]]:
    """The learning rate with the lowest mean on the validation rows, and that mean of each."""
    means = {rate: statistics.mean(values) for rate, values in by_rate(rows, "validation NLL").items()}
    return min(means, key=lambda rate: means[rate]), means


def by_rate(rows: list[dict[str, Any]], metric: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in rows:
        if one["metric"] == metric:
            found.setdefault(one["case"].split(", ")[1], []).append(one["value"])
    return found


def summarise(case: str, name: str, rows: list[dict[str, Any]]) -> str:
    rate, means = best_rate(rows)
    values, gaps = by_rate(rows, "held-out NLL")[rate], by_rate(rows, "open in log Z")[rate]
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 and math.isfinite(sum(values)) else 0.0
    milliseconds = statistics.median(one["value"] for one in rows if one["unit"] == "ms")
    others = ", ".join(f"{each[3:]}: {mean:.2f}" for each, mean in means.items())
    numbers = f"{statistics.mean(values):.3f} | {error:.3f} | {min(values):.2f} to {max(values):.2f} | {max(gaps):.3f}"
    return f"| {case} | {name} | {rate[3:]} | {numbers} | {others} | {milliseconds:.1f} |"


def compare(rows: list[dict[str, Any]]) -> None:
    """To scikit-learn with the same case."""
    for case in CASES:
        of_case = [one for one in rows if one["case"].startswith(f"{case}, ")]
        base = [one for one in of_case if one["subject"] == "scikit-learn"]
        if not base:
            continue
        value = statistics.mean(by_rate(base, "held-out NLL")[best_rate(base)[0]])
        for one in of_case:
            if one["metric"] == "held-out NLL":
                one |= {"baseline": value, "ratio": one["value"] / value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two epochs, one seed and rate, of two cases")
    parser.add_argument("--cases", nargs="+", default=[*CASES, BARS], choices=[*CASES, BARS])
    parser.add_argument("--subjects", nargs="+", default=[*SUBJECTS], choices=[*SUBJECTS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(10)])
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    cases, seeds, epochs = arguments.cases, arguments.seeds, 30
    if arguments.quick:
        cases, seeds, epochs = ["H16 B100", BARS], [0], 2
    check()
    print(f"torch {torch.__version__}, one CPU thread\n")
    print("| case | subject | lr | NLL | standard error | seeds | most open | validation, each lr | ms per epoch |")
    print("| --- | --- | ---: | ---: | ---: | --- | ---: | --- | ---: |", flush=True)
    rows: list[dict[str, Any]] = []
    for case, name in itertools.product((case for case in cases if case != BARS), arguments.subjects):
        subject = SUBJECTS[name]
        if case not in subject.cases:
            continue
        if importlib.util.find_spec(subject.module) is None:
            print(f"| {case} | {name} | not installed: skipped | | | | | | |")
            continue
        rates = subject.rates[CASES[case].batch_size]
        measured = measure(name, case, seeds, rates[:1] if arguments.quick else rates, epochs)
        rows += measured
        print(summarise(case, name, measured), flush=True)
    compare(rows)
    if BARS in cases:
        print("\n| bars and stripes | last log-likelihood of each seed | best |\n| --- | --- | --- |", flush=True)
        for sampler in ("cd", "pcd"):
            figures = [total_log_likelihood(sampler, seed, 500 if arguments.quick else 50_000) for seed in seeds]
            for seed, (last, best) in zip(seeds, figures, strict=True):
                for metric, value in (("last log-likelihood", last), ("best log-likelihood", best)):
                    one = row(f"{BARS}, seed {seed}", sampler, metric, value, "nats")
                    rows.append(one | {"baseline": BEST_TOTAL, "ratio": value / BEST_TOTAL})
            last_of_each, best_of_each = (
                ", ".join(f"{value:.1f}" for value in each) for each in zip(*figures, strict=True)
            )
            print(f"| {sampler} | {last_of_each} | {best_of_each} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
