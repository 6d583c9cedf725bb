"""How good is an RBM as a model of data, beside a mixture of Bernoullis and a variational autoencoder?

python benchmarks/bench_belief_density.py [--seeds 0 1 2 3 4] [--parts choice likelihood filling anomalies] [--quick]
    [--json FILE] [--given FILE ...]

``--given`` takes what runs of other parts or seeds have written by ``--json``, and prints tables of all together.

Data: scikit-learn's digits of 8 x 8 pixels, binarised at half of the scale: 1400 samples to train on, 150 to choose
settings, 247 to report, after one permutation. Each model takes the setting of its grid with the best likelihood of the
150 samples (one seed, which is not reported) and keeps it for all questions.

likelihood: negative log-likelihood of the 247 samples in nats. That of the mixture is exact. That of the RBM takes the
mean of annealing upwards and downwards (from the training samples) as log Z; how far the two are apart is told. That of
the autoencoder is an importance-weighted bound with 2,000 draws (Burda, Grosse and Salakhutdinov 2016).

filling: mean squared error of the expected values of 32 hidden pixels, the lower or the right half of the 247 samples,
given the other half. RBM: mean of 20 Gibbs chains over steps 51 to 150. Mixture: exact. Autoencoder: 1,000 importance-
weighted draws around 20 chains of 20 pseudo-Gibbs steps (Rezende, Mohamed and Wierstra 2014, appendix F). Peers that
model no density: k nearest neighbours, and ridge regression, trained on just this half, with settings chosen by the
error on the 150 samples.

anomalies: each digit in turn is left out of training; area under the ROC curve with which the log-likelihood separates
all its samples from those of the 247 of other classes, mean over the ten digits, seeds 0 to 2. The RBM ranks by
its free energy, without log Z. Peers: distance to the nearest training sample, LocalOutlierFactor and IsolationForest.
"""

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.ensemble import IsolationForest
from sklearn.linear_model import Ridge
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsRegressor, LocalOutlierFactor, NearestNeighbors
from torch import Tensor, nn

from lightning_accel.nn import RBM, ContrastiveDivergence


class Digits(NamedTuple):
    training: Tensor
    validation: Tensor
    held_out: Tensor
    classes: tuple[Tensor, Tensor, Tensor]  # of each of the above


def digits() -> Digits:
    data = load_digits()
    order = np.random.RandomState(0).permutation(len(data.data))
    sizes = [1400, 150, 247]
    pixels = torch.tensor(data.data[order] / 16 > 0.5).float()
    return Digits(*pixels.split(sizes), torch.tensor(data.target[order]).split(sizes))


class Density(Protocol):
    def fit(self, rows: Tensor, validation: Tensor) -> None: ...

    def scores(self, rows: Tensor) -> Tensor:
        """Log-likelihoods (B,), up to a constant."""

    def log_z(self, rows: Tensor) -> tuple[float, float]:
        """That constant, and how uncertain it is, given the training rows."""

    def fill(self, rows: Tensor, is_hidden: Tensor) -> Tensor:
        """Expected values (B, V) given the pixels that are not ``is_hidden`` (V,)."""


class Machine:
    def __init__(self, num_hidden: int, lr: float, weight_decay: float, epochs: int = 60) -> None:
        self.num_hidden, self.lr, self.weight_decay, self.epochs = num_hidden, lr, weight_decay, epochs

    def fit(self, rows: Tensor, validation: Tensor) -> None:
        num_visible = rows.shape[1]
        self.rbm = RBM(num_visible, self.num_hidden, initial_std=math.sqrt(8 / (num_visible + self.num_hidden)))
        self.rbm.start_at_(rows.mean(dim=0), len(rows))
        self.mean = rows.mean(dim=0)
        sampling = ContrastiveDivergence("pcd", num_chains=100, seed=torch.initial_seed())
        decayed = {"params": [self.rbm.weight], "weight_decay": self.weight_decay}
        biases = {"params": [self.rbm.visible_bias, self.rbm.hidden_bias]}
        optimizer = torch.optim.SGD([decayed, biases], self.lr)
        for epoch in range(self.epochs):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * (1 - epoch / self.epochs)
            sampling.train_(self.rbm, rows[torch.randperm(len(rows))], 10, optimizer)

    def scores(self, rows: Tensor) -> Tensor:
        return -self.rbm.free_energy(rows).double().detach()

    def log_z(self, rows: Tensor) -> tuple[float, float]:
        options: dict[str, Any] = {"num_chains": 200, "num_temperatures": 2000, "base_mean": self.mean}
        up = self.rbm.log_z("ais", generator=torch.Generator().manual_seed(0), **options)
        options["reverse_from"] = rows
        down = self.rbm.log_z("reverse_ais", generator=torch.Generator().manual_seed(1), **options)
        return float(up.estimate + down.estimate) / 2, float(abs(up.estimate - down.estimate))

    @torch.no_grad()
    def fill(self, rows: Tensor, is_hidden: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        states = torch.where(is_hidden, self.mean, rows).repeat(20, 1)
        total = torch.zeros_like(rows)
        for step in range(150):
            means = self.rbm.visible_units.mean(self.rbm.visible_activation(self.rbm.sample_hidden(states, generator)))
            states = torch.where(is_hidden, torch.bernoulli(means, generator=generator), states)
            if step >= 50:
                total += means.view(20, *rows.shape).mean(dim=0)
        return total / 100


class Mixture:
    """A mixture of products of Bernoullis, by 100 iterations of EM with a pseudo-count for 0 and for 1."""

    def __init__(self, num_components: int, pseudo_count: float) -> None:
        self.num_components, self.pseudo_count = num_components, pseudo_count

    def fit(self, rows: Tensor, validation: Tensor) -> None:
        rows = rows.double()
        share = 0.5 * rows[torch.randperm(len(rows))[: self.num_components]] + 0.25
        self.set(torch.full((len(share),), 1 / len(share), dtype=torch.float64), share)
        for _ in range(100):
            belongs = self.joint(rows).softmax(dim=1)  # (B, K)
            count = belongs.sum(dim=0)
            ones = belongs.T @ rows + self.pseudo_count
            self.set((count + 1e-3) / (count + 1e-3).sum(), ones / (count[:, None] + 2 * self.pseudo_count))

    def set(self, weight: Tensor, share: Tensor) -> None:
        self.weight, self.share = weight, share.clamp(1e-6, 1 - 1e-6)

    def joint(self, rows: Tensor, known: Tensor | None = None) -> Tensor:
        """Log-probabilities (B, K) of rows, in their ``known`` (V,) pixels, and components."""
        known = torch.ones(rows.shape[1], dtype=torch.float64) if known is None else known.double()
        rows = rows.double()
        ones = (rows * known) @ self.share.log().T
        return ones + ((1 - rows) * known) @ (1 - self.share).log().T + self.weight.log()

    def scores(self, rows: Tensor) -> Tensor:
        return self.joint(rows).logsumexp(dim=1)

    def log_z(self, rows: Tensor) -> tuple[float, float]:
        return 0.0, 0.0

    def fill(self, rows: Tensor, is_hidden: Tensor) -> Tensor:
        return (self.joint(rows, ~is_hidden).softmax(dim=1) @ self.share).float()


class Autoencoder:
    """A VAE of perceptrons, by Adam; it keeps the weights with the highest bound of the validation samples."""

    def __init__(self, num_latent: int, lr: float, width: int = 200, epochs: int = 200) -> None:
        self.num_latent, self.lr, self.width, self.epochs = num_latent, lr, width, epochs

    def fit(self, rows: Tensor, validation: Tensor) -> None:
        width, latent, visible = self.width, self.num_latent, rows.shape[1]
        self.encoder = nn.Sequential(nn.Linear(visible, width), nn.ReLU(), nn.Linear(width, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, visible))
        nn.init.zeros_(self.decoder[2].weight)
        self.decoder[2].bias.data = ((rows.sum(dim=0) + 0.5) / (len(rows) + 1)).logit()
        parameters = [*self.encoder.parameters(), *self.decoder.parameters()]
        optimizer = torch.optim.Adam(parameters, self.lr, fused=True)
        best, kept = -math.inf, [parameter.detach().clone() for parameter in parameters]
        for epoch in range(self.epochs):
            warm_up = min(1.0, (epoch + 1) / 30)
            optimizer.param_groups[0]["lr"] = self.lr * (1 - epoch / self.epochs)
            for batch in rows[torch.randperm(len(rows))].split(100):
                mean, log_std = self.encoder(batch).chunk(2, dim=1)
                z = mean + log_std.exp() * torch.randn_like(mean)
                fit = F.binary_cross_entropy_with_logits(self.decoder(z), batch, reduction="sum")
                divergence = 0.5 * (mean.square() + (2 * log_std).exp() - 2 * log_std - 1).sum()
                optimizer.zero_grad()
                ((fit + warm_up * divergence) / len(batch)).backward()
                optimizer.step()
            if epoch >= 30 and epoch % 5 == 4 and (bound := float(self.bounds(validation, 20).mean())) > best:
                best, kept = bound, [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)

    @torch.no_grad()
    def draw(self, rows: Tensor, num_draws: int) -> tuple[Tensor, Tensor]:
        """Logits (B, D, V) of pixels at drawn latents, and log p(z) - log q(z | row) (B, D)."""
        mean, log_std = (part[:, None] for part in self.encoder(rows).chunk(2, dim=1))
        noise = torch.randn(len(rows), num_draws, self.num_latent)
        z = mean + log_std.exp() * noise
        return self.decoder(z), (0.5 * (noise.square() - z.square()) + log_std).sum(dim=2)

    def log_weights(self, rows: Tensor, num_draws: int) -> Tensor:
        logits, ratio = self.draw(rows, num_draws)
        return ratio - (F.softplus(logits) - logits * rows[:, None]).sum(dim=2)

    def bounds(self, rows: Tensor, num_draws: int) -> Tensor:
        return self.log_weights(rows, num_draws).mean(dim=1)

    def scores(self, rows: Tensor) -> Tensor:
        total = torch.stack([self.log_weights(rows, 100).double().logsumexp(dim=1) for _ in range(20)])
        return total.logsumexp(dim=0) - math.log(2000)

    def log_z(self, rows: Tensor) -> tuple[float, float]:
        return 0.0, 0.0

    def fill(self, rows: Tensor, is_hidden: Tensor) -> Tensor:
        states = torch.where(is_hidden, torch.full_like(rows, 0.5), rows).repeat(20, 1)
        for _ in range(20):
            means = self.draw(states, 1)[0][:, 0].sigmoid()
            states = torch.where(is_hidden, torch.bernoulli(means), states)
        logits, ratio = self.draw(states, 50)  # the log-weights count observed pixels alone
        fit = (F.softplus(logits) - logits * states[:, None])[..., ~is_hidden].sum(dim=2)
        chains = 20, len(rows), 50
        weight = (ratio - fit).view(chains).permute(1, 0, 2).flatten(1).softmax(dim=1)  # (B, 20 * 50)
        means = logits.sigmoid().view(*chains, -1).permute(1, 0, 2, 3).flatten(1, 2)
        return (weight[..., None] * means).sum(dim=1)


Settings = tuple[float, ...]
Models = dict[str, dict[int, Density]]  # by name and seed
GRIDS: dict[str, tuple[Callable[..., Density], list[Settings]]] = {
    "independent pixels": (Mixture, [(1, 0.5)]),
    "mixture of Bernoullis": (
        Mixture,
        [(components, count) for components in (40, 80, 120, 200) for count in (0.1, 0.3)],
    ),
    "variational autoencoder": (
        Autoencoder,
        [(latent, lr) for latent in (8, 16, 32) for lr in (5e-3, 1e-2)],
    ),
    "RBM": (Machine, [(hidden, lr, decay) for hidden in (64, 128) for lr in (0.4, 0.8) for decay in (0.0, 1e-3)]),
}


def train(name: str, setting: Settings, rows: Tensor, validation: Tensor, seed: int) -> tuple[Density, float]:
    """A model, and the seconds of CPU time that it took."""
    torch.manual_seed(seed)
    model = GRIDS[name][0](*(int(one) if one == int(one) and one >= 1 else one for one in setting))
    began = process_time()
    model.fit(rows, validation)
    return model, process_time() - began


def seeds_of(name: str, seeds: list[int]) -> list[int]:
    return [0] if name == "independent pixels" else seeds


def choose(data: Digits, quick: bool) -> dict[str, Settings]:
    found = {}
    for name, (_, grid) in GRIDS.items():
        nats = {}
        for setting in grid[-1:] if quick else grid:
            model, _ = train(name, setting, data.training, data.validation, seed=100)
            log_z, is_open = model.log_z(data.training)
            nll = log_z - float(model.scores(data.validation).mean())
            nats[setting] = nll if is_open < 1 else math.inf
        found[name] = min(nats, key=lambda setting: nats[setting])
        print(f"{name}: {found[name]} of", {key: round(value, 2) for key, value in nats.items()}, flush=True)
    return found


def likelihood(data: Digits, models: Models) -> list[dict[str, Any]]:
    rows = []
    for name, trained in models.items():
        for seed, model in trained.items():
            log_z, is_open = model.log_z(data.training)
            nll = log_z - float(model.scores(data.held_out).mean())
            training = log_z - float(model.scores(data.training[:247]).mean())
            rows.append({"subject": name, "seed": seed, "nll": nll, "training": training, "open": is_open})
    return rows


def half(name: str) -> Tensor:
    numbers = torch.arange(64)
    return numbers >= 32 if name == "lower" else numbers % 8 >= 4


def filling(data: Digits, models: Models) -> list[dict[str, Any]]:
    rows = []
    for side in ("lower", "right"):
        is_hidden = half(side)

        def error(filled: Tensor, actual: Tensor, is_hidden: Tensor = is_hidden) -> float:
            return float((filled - actual)[:, is_hidden].square().mean())

        for name, trained in models.items():
            for seed, model in trained.items():
                torch.manual_seed(seed)
                found = error(model.fill(data.held_out, is_hidden), data.held_out)
                rows.append({"subject": name, "seed": seed, "half": side, "error": found})
        peers: dict[str, list[Any]] = {
            "nearest neighbours": [
                KNeighborsRegressor(k, weights=weights) for k in (3, 5, 10, 20) for weights in ("uniform", "distance")
            ],
            "ridge regression": [Ridge(alpha) for alpha in (1, 10, 100)],
        }
        for name, candidates in peers.items():
            errors = []
            for peer in candidates:
                peer.fit(data.training[:, ~is_hidden].numpy(), data.training[:, is_hidden].numpy())
                parts = []
                for wanted in (data.validation, data.held_out):
                    filled = wanted.clone()
                    filled[:, is_hidden] = torch.tensor(peer.predict(wanted[:, ~is_hidden].numpy())).float()
                    parts.append(error(filled, wanted))
                errors.append(tuple(parts))
            rows.append({"subject": name, "seed": 0, "half": side, "error": min(errors)[1]})
    return rows


def anomalies(data: Digits, settings: dict[str, Settings], seeds: list[int]) -> list[dict[str, Any]]:
    rows = []
    classes = torch.cat(data.classes)
    pixels = torch.cat([data.training, data.validation, data.held_out])
    for digit in range(10):
        training, validation, usual = (part[own != digit] for part, own in zip(data[:3], data.classes, strict=True))
        judged = torch.cat([usual, pixels[classes == digit]])
        is_usual = np.arange(len(judged)) < len(usual)

        def add(name: str, seed: int, scores: Any, is_usual: Any = is_usual, digit: int = digit) -> None:
            auc = float(roc_auc_score(is_usual, np.asarray(scores)))
            rows.append({"subject": name, "seed": seed, "digit": digit, "auc": auc})

        for name, setting in settings.items():
            for seed in seeds_of(name, seeds):
                add(name, seed, train(name, setting, training, validation, seed)[0].scores(judged))
        known, seen = training.numpy(), judged.numpy()
        add("nearest neighbour", 0, -NearestNeighbors(n_neighbors=1).fit(known).kneighbors(seen)[0][:, 0])
        add("LocalOutlierFactor", 0, LocalOutlierFactor(novelty=True).fit(known).score_samples(seen))
        for seed in seeds:
            add("IsolationForest", seed, IsolationForest(random_state=seed).fit(known).score_samples(seen))
    return rows


def spread(values: Iterable[float], places: int) -> str:
    values = list(values)
    mean = f"{statistics.mean(values):.{places}f}"
    return mean + (f" +- {statistics.stdev(values) / len(values) ** 0.5:.{places}f}" if len(values) > 1 else "")


def by_subject(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["subject"], []).append(row)
    return found


def joined(rows: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of both, each subject, seed, half and digit once: peers without a seed are in all runs."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("subject", "seed", "half", "digit"))

    return list({key(row): row for row in rows + more}.values())


def print_tables(found: dict[str, Any]) -> None:
    if rows := found.get("likelihood"):
        print("\n| model | NLL, nats | of 247 training samples | log Z open by | CPU s a fit |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for name, mine in by_subject(rows).items():
            cells = [spread((row[key] for row in mine), 2) for key in ("nll", "training")]
            is_open = max(row["open"] for row in mine)
            seconds = statistics.median(row["seconds"] for row in mine)
            print(f"| {name} | {' | '.join(cells)} | {is_open:.2f} | {seconds:.1f} |")
    if rows := found.get("filling"):
        print("\n| model | lower half, MSE | right half, MSE |\n| --- | ---: | ---: |")
        for name, mine in by_subject(rows).items():
            cells = [spread((row["error"] for row in mine if row["half"] == side), 4) for side in ("lower", "right")]
            print(f"| {name} | {' | '.join(cells)} |")
    if rows := found.get("anomalies"):
        print("\n| model | AUC, mean of ten digits | worst digit | best digit |\n| --- | ---: | ---: | ---: |")
        for name, mine in by_subject(rows).items():
            seeds = {row["seed"] for row in mine}
            means = [statistics.mean(row["auc"] for row in mine if row["seed"] == seed) for seed in seeds]
            each = sorted((statistics.mean(row["auc"] for row in mine if row["digit"] == d), d) for d in range(10))
            ends = [f"{auc:.3f} ({digit})" for auc, digit in (each[0], each[-1])]
            print(f"| {name} | {spread(means, 3)} | {' | '.join(ends)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parts = ["likelihood", "filling", "anomalies"]
    parser.add_argument("--parts", nargs="*", default=parts, choices=["choice", *parts])
    parser.add_argument("--quick", action="store_true", help="one seed, and the last setting of each grid")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--given", type=Path, nargs="+", default=[])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seeds = options.seeds[:1] if options.quick else options.seeds
    data = digits()
    found: dict[str, Any] = {}
    for path in options.given:
        for key, value in json.loads(path.read_text()).items():
            found[key] = value if key == "settings" else joined(found.get(key, []), value)
    print(f"torch {torch.__version__}\n")
    if "settings" not in found:
        found["settings"] = choose(data, options.quick)
    settings = {name: tuple(setting) for name, setting in found["settings"].items()}
    if {"likelihood", "filling"} & set(options.parts):
        models: Models = {}
        seconds = {}
        for name, setting in settings.items():
            for seed in seeds_of(name, seeds):
                model, seconds[name, seed] = train(name, setting, data.training, data.validation, seed)
                models.setdefault(name, {})[seed] = model
        for part, measure in {"likelihood": likelihood, "filling": filling}.items():
            if part in options.parts:
                rows = measure(data, models)
                for row in rows:
                    row["seconds"] = seconds.get((row["subject"], row["seed"]))
                found[part] = joined(found.get(part, []), rows)
    if "anomalies" in options.parts:
        few = [seed for seed in seeds if seed < 3]
        found["anomalies"] = joined(found.get("anomalies", []), anomalies(data, settings, few))
    print_tables(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
