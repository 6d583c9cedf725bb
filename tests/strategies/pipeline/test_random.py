"""What a step draws is the same on all stages; what a layer draws is its own."""

import random

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.callbacks import ExactResume
from lightning_accel.strategies import PipelineStrategy
from tests.ranks import run_ranks
from tests.strategies.pipeline.test_strategy import make_trainer

OF_FILE = np.random.default_rng()


class Helper:
    """Holds generators where its class, itself and a dict of lists have them."""

    of_class = random.Random()

    def __init__(self):
        self.rng = np.random.RandomState()
        self.more = {"pair": [torch.Generator(), np.random.default_rng()]}
        self.more["pair"][0].seed()
        self.itself = self

    def draw(self):
        first, second = self.more["pair"]
        return self.of_class.random(), self.rng.rand(), float(torch.rand((), generator=first)), second.random()


class Kept(nn.Dropout):
    """Remembers its mask."""

    def __init__(self, p):
        super().__init__(p)
        self.masks = []

    def forward(self, x):
        mask = super().forward(torch.ones_like(x))
        self.masks.append(mask.detach())
        return x * mask


class Noisy(L.LightningModule):
    """Predicts the noise of inputs that are mixed and masked, and labels of which some are wrong."""

    def __init__(self, dropout=0.0, recompute=False, drawn=None):
        super().__init__()
        middle = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Dropout(dropout))
        self.layers = nn.Sequential(nn.Linear(6, 9), Kept(dropout), middle, Kept(dropout), nn.Linear(9, 6))
        self.recompute = recompute
        self.rng = np.random.default_rng()
        self.order = torch.Generator()
        self.order.seed()
        self.helpers = (Helper(),)
        self.given = list(drawn or [])
        self.drawn, self.losses = [], []

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x

    def draw(self, x):
        return {
            "noise": torch.randn_like(x),
            "share": np.random.beta(1, 1),  # noqa: NPY002  # as mixup draws it
            "wrong": [random.random() < 0.3 for _ in x],
            "order": torch.randperm(len(x), generator=self.order),
            "mask": torch.from_numpy(self.rng.random(x.shape) < 0.3),
            "held": (OF_FILE.random(), *self.helpers[0].draw()),
        }

    def training_step(self, batch, batch_idx):
        x, target = batch
        drawn = self.given.pop(0) if self.given else self.draw(x)
        self.drawn.append(drawn)
        mixed = drawn["share"] * x + (1 - drawn["share"]) * x[drawn["order"]]
        out = self((mixed + drawn["noise"]).masked_fill(drawn["mask"], 0))
        drawn.setdefault("late", (float(torch.rand(())), np.random.rand(), random.random()))  # noqa: NPY002
        self.drawn[-1] = drawn
        target = torch.where(torch.tensor(drawn["wrong"]), (target + 1) % 3, target)
        loss = F.mse_loss(out, drawn["noise"]) + sum(drawn["late"]) * F.cross_entropy(out[:, :3], target)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_start(self):
        self.helpers[0].rng = np.random.RandomState()  # another takes its place

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows():
    draw = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(40, 6, generator=draw), torch.randint(3, (40,), generator=draw))


def fit(folder, strategy, module, batch_size=8, data=None, checkpoint=None, **options):
    trainer = make_trainer(folder, strategy, num_sanity_val_steps=0, **options)
    trainer.fit(module, DataLoader(data or rows(), batch_size), ckpt_path=checkpoint)
    return trainer


def check_draws(rank, folder, seeds, size, dropout):
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(seeds[rank])
    module = Noisy(dropout)
    trainer = fit(folder, PipelineStrategy(4, data_parallel_size=size), module)
    trainer.save_checkpoint(folder / "end.ckpt")
    drawn = list(module.drawn)
    trainer.validate(module, DataLoader(rows(), 20), verbose=False)
    losses = torch.stack(module.losses[: len(drawn)]) if module.losses else None
    return drawn, module.drawn[len(drawn) :], losses


def assert_equal_draws(first, last):
    assert len(first) == len(last) > 0
    for one, other in zip(first, last, strict=True):
        torch.testing.assert_close(one, {name: other[name] for name in one}, rtol=0, atol=0)


@pytest.mark.slow
def test_training_equals_one_process_with_the_same_draws(tmp_path):
    (first, first_validated, _), (last, last_validated, losses) = run_ranks(check_draws, tmp_path, (0, 1), 1, 0.0)
    assert_equal_draws(first, last)
    assert_equal_draws(first_validated, last_validated)
    assert (len(last), len(last_validated)) == (5 * 4, 2)
    assert len({one["share"] for one in last}) == len({one["late"] for one in last}) == 20
    assert [len(set(values)) for values in zip(*(one["held"] for one in last), strict=True)] == [20] * 5
    torch.manual_seed(0)
    one = Noisy(drawn=last)
    trainer = fit(tmp_path, "auto", one, batch_size=2, accumulate_grad_batches=4)
    torch.testing.assert_close(torch.stack(one.losses), losses, rtol=1e-5, atol=1e-6)
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(saved, trainer.lightning_module.state_dict(), rtol=1e-5, atol=1e-6)


def check_hooks(rank, folder):
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank)
    drawn = []
    draws = (lambda: float(torch.rand(()))), np.random.rand, random.random
    keep = LambdaCallback(on_train_start=lambda *_: drawn.extend(draw() for draw in draws))
    fit(folder, PipelineStrategy(), Noisy(), callbacks=[keep], max_steps=1)
    return drawn


def test_hooks_draw_alike_on_all_stages(tmp_path):
    first, last = run_ranks(check_hooks, tmp_path)
    assert first == last
    assert len(first) == 3


def check_dropout(rank, folder):
    """Draws of layers: equal for any split, and when they are computed again; unequal for each layer."""
    ends, masks = [], {}
    for strategy, recompute in (
        (PipelineStrategy(4, split=(2, 3)), False),
        (PipelineStrategy(4, split=(4, 1)), False),
        (PipelineStrategy(4, split=(2, 3)), True),
    ):
        torch.manual_seed(0)
        module = Noisy(0.3, recompute)
        fit(folder, strategy, module, batch_size=20).save_checkpoint(folder / "end.ckpt")
        ends.append(torch.load(folder / "end.ckpt", weights_only=True)["state_dict"])
        if not recompute:
            masks |= {number: module.layers[number].masks for number in (1, 3) if module.layers[number].masks}
    return module.drawn, ends, masks


@pytest.mark.slow
def test_layers_draw_on_their_own(tmp_path):
    (first, ends, masks), (last, *_) = run_ranks(check_dropout, tmp_path)
    assert_equal_draws(first, last)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ends[2], ends[0], rtol=1e-5, atol=1e-6)
    together = torch.stack([*masks[1], *masks[3]])  # (2 layers * 8 micro-batches, 5, 9)
    assert len({tuple(mask.flatten().tolist()) for mask in together}) == 16
    assert (together == 0).float().mean() == pytest.approx(0.3, abs=0.08)  # five standard deviations of 720 draws


def check_resumed(rank, folder):
    for number, (epochs, path) in enumerate([(2, None), (1, None), (2, folder / "1.ckpt")]):
        torch.manual_seed(0)
        random.seed(rank + 10 * number)
        np.random.seed(rank + 10 * number)  # noqa: NPY002
        trainer = fit(
            folder, PipelineStrategy(4), Noisy(0.3), checkpoint=path, max_epochs=epochs, callbacks=[ExactResume()]
        )
        trainer.save_checkpoint(folder / f"{number}.ckpt")
    return [torch.load(folder / f"{number}.ckpt", weights_only=True)["state_dict"] for number in (0, 1, 2)]


@pytest.mark.slow
def test_a_resumed_run_draws_what_one_would_that_was_not_stopped(tmp_path):
    for whole, half, resumed in run_ranks(check_resumed, tmp_path):
        assert not half["layers.0.weight"].equal(whole["layers.0.weight"])
        torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
        break


@pytest.mark.slow
def test_pipelines_side_by_side_draw_unlike_numbers(tmp_path):
    ranks = run_ranks(check_draws, tmp_path, (0, 0, 0, 0), 2, 0.1, world_size=4)
    for first, last in (ranks[:2], ranks[2:]):
        assert_equal_draws(first[0], last[0])
    one, other = ranks[1][0], ranks[3][0]
    assert not {each["share"] for each in one} & {each["share"] for each in other}
    assert not {tuple(each["late"]) for each in one} & {tuple(each["late"]) for each in other}
