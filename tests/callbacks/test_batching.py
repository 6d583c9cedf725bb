"""Larger batches with their learning rates, on modules and loaders that know nothing of them."""

import math

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from lightning_accel.callbacks import Batching, ExactResume, Speedups
from lightning_accel.data.samplers import ResumableLoader, ResumableSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not have many workers|number of training batches|treespec)")

KINDS = {
    "sgd": lambda each, lr=0.1: torch.optim.SGD(each, lr=lr, momentum=0.9),
    "adam": lambda each, lr=0.01, betas=(0.9, 0.99), eps=1e-3: torch.optim.Adam(each, lr, betas, eps),
    "adamw": lambda each, lr=0.01, betas=(0.8, 0.0), eps=1e-3: torch.optim.AdamW(each, lr, betas, eps),
    "rmsprop": lambda each, lr=0.01, alpha=0.9, eps=1e-3: torch.optim.RMSprop(each, lr, alpha, eps),
}
ROOT = math.sqrt(4)
SCALED = {  # by hand, for four times the batch
    "sgd": {"lr": 0.4},
    "adam": {"lr": 0.01 * ROOT, "betas": (0.6, 0.96), "eps": 1e-3 / ROOT},
    "adamw": {"lr": 0.01 * ROOT, "betas": (0.2, 0.0), "eps": 1e-3 / ROOT},
    "rmsprop": {"lr": 0.01 * ROOT, "alpha": 0.6, "eps": 1e-3 / ROOT},
}
X = torch.randn(26, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def loss_of(net, x):
    return (net(x).squeeze(-1) - x.sum(1)).square().mean()


class Net(L.LightningModule):
    def __init__(self, kind="sgd"):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1, dtype=torch.float64)
        self.kind, self.sizes, self.rates, self.validated, self.planned = kind, [], [], [], None

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch[0]))
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return loss_of(self.net, batch[0])

    def validation_step(self, batch, batch_idx):
        self.validated.append(len(batch[0]))

    def configure_optimizers(self):
        self.planned = self.trainer.estimated_stepping_batches
        optimizer = KINDS[self.kind](self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(module, data, *callbacks, **options):
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **{"max_epochs": 2} | options,
    )  # fmt: skip
    validation = {"val_dataloaders": DataLoader(TensorDataset(X), 3)} if isinstance(module, Net) else {}
    trainer.fit(module, data, **validation)
    return trainer


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_a_loop_with_larger_batches_and_the_options_of_the_rule(kind):
    module, loader = Net(kind), DataLoader(TensorDataset(X), 3)
    fit(module, loader, Batching(4))
    net = nn.Linear(3, 1, dtype=torch.float64)
    torch.manual_seed(0)
    net.reset_parameters()
    optimizer = KINDS[kind](net.parameters(), **SCALED[kind])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for batch in [*X.split(12), *X.split(12)]:
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(module.net.state_dict(), net.state_dict(), rtol=1e-12, atol=0)
    assert module.sizes == [12, 12, 2] * 2
    assert set(module.validated) == {3, 2}
    assert module.planned == 6
    given = KINDS[kind](net.parameters()).defaults["lr"]
    assert module.rates == [given, given, given / 2, given / 2, given / 4, given / 4]


def test_the_loader_and_the_optimizer_are_restored():
    loader, callback = DataLoader(TensorDataset(X), 3), Batching(2)
    for _ in range(2):
        module = Net()
        trainer = fit(module, loader, callback)
        assert module.sizes == [6, 6, 6, 6, 2] * 2
        assert loader.batch_sampler.batch_size == 3
    optimizer = trainer.optimizers[0]
    optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks
    assert "process_dataloader" not in vars(trainer.strategy)


def test_a_run_that_fails_restores_them_too():
    module, loader = Net(), DataLoader(TensorDataset(X), 3)
    module.on_train_batch_end = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(module, loader, Batching(2))
    assert loader.batch_sampler.batch_size == 3


def test_it_works_beside_callbacks_that_change_loaders():
    module = Net()
    fit(module, DataLoader(TensorDataset(X), 3), ExactResume(), Batching(2), Speedups(batched_fetch=True))
    assert module.sizes == [6, 6, 6, 6, 2] * 2
    with pytest.raises(TypeError, match="put this callback behind all others"):
        fit(Net(), DataLoader(TensorDataset(X), 3), Batching(2), ExactResume())


def test_samplers_that_drop_incomplete_batches_learn_their_size():
    """As 24 of 26 fill batches of 3, and 18 of them batches of 9."""
    rows = TensorDataset(X)
    module, sampler = Net(), ResumableSampler(rows, 3, num_replicas=1, rank=0, seed=0)
    fit(module, ResumableLoader(rows, 3, sampler=sampler), Batching(3))
    assert module.sizes == [9] * 4
    assert sampler.batch_size == 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(12, 1, 3))


def test_what_cannot_be_changed_ends_the_run_before_it_trains():
    with pytest.raises(ValueError, match="at least 1; got 0"):
        Batching(0)
    module = Net()
    with pytest.raises(TypeError, match=r"Batching\(batch_size_factor=2\): the loader has an IterableDataset"):
        fit(module, DataLoader(Stream(), 2), Batching(2), max_steps=3)
    with pytest.raises(TypeError, match="found no DataLoader"):
        fit(module, [[X]], Batching(2))
    KINDS["lbfgs"] = torch.optim.LBFGS
    module.kind = "lbfgs"
    with pytest.raises(TypeError, match="LBFGS has no scaling rule"):
        fit(module, DataLoader(TensorDataset(X), 3), Batching(2))
    assert not module.sizes


def test_one_batch_sampler_in_new_loaders_is_changed_once():
    sampler = BatchSampler(RandomSampler(X), 3, drop_last=False)

    class Reloads(Net):
        def train_dataloader(self):
            return DataLoader(TensorDataset(X), batch_sampler=sampler)

    module = Reloads()
    fit(module, None, Batching(2), reload_dataloaders_every_n_epochs=1)
    assert module.sizes == [6, 6, 6, 6, 2] * 2
    assert sampler.batch_size == 3
