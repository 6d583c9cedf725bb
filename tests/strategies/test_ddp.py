import copy
import warnings

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_accel.strategies import AccelDDPStrategy
from tests.ranks import run_ranks
from tests.tolerance import ADAM_EPS, CLOSE

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "use_distributed_sampler": False,
}  # fmt: skip


class Heads(L.LightningModule):
    """A part of a batch is (x, y, the head that it goes to); weight decay would move a head that has zeros."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

    def loss(self, batch):
        return torch.stack([F.mse_loss(self.heads[head](self.trunk(x)), y) for x, y, head in batch]).mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=ADAM_EPS, weight_decay=0.1)


class Stages(Heads):
    """The trunk is frozen at first, then the heads are."""

    def on_train_epoch_start(self):
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        frozen = [self.trunk, self.heads, self.heads[0]][self.current_epoch]
        frozen.requires_grad_(False)


class StagesFrozenAtFirst(Stages):
    """Plain DDP would never synchronise the trunk."""

    def __init__(self):
        super().__init__()
        self.trunk.requires_grad_(False)


class Toggling(Heads):
    """Two optimizers by hand, each with the other's parameters frozen."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=0.01, eps=ADAM_EPS) for part in (self.trunk, self.heads)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class FrozenInTheMiddle(Heads):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.trunk.requires_grad_(False)


def batches():
    generator = torch.Generator().manual_seed(4)
    heads = [(0, 0), (0, 1), (1, 0), (2, 2), (0, 2), (1, 1)]
    return [
        [(torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator), head) for head in pair]
        for pair in heads
    ]


def fit(model, strategy, devices, data, **options):
    trainer = L.Trainer(strategy=strategy, devices=devices, **{**QUIET, "max_epochs": 1, **options})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        trainer.fit(model, DataLoader(data, batch_size=None))
    return model


def check_equals_one_process(rank, module, options):
    expected = fit(module(), "auto", 1, batches(), **options).state_dict()
    actual = fit(module(), "accel_ddp", 2, [[pair[rank]] for pair in batches()], **options)
    torch.testing.assert_close(actual.state_dict(), expected, **CLOSE)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in actual.parameters())


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Heads, {}),
        (Heads, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Heads, {"precision": "64-true"}),
        (Stages, {"max_epochs": 3}),
        (StagesFrozenAtFirst, {"max_epochs": 3}),
        (Stages, {"max_epochs": 3, "accumulate_grad_batches": 3}),
        (Toggling, {}),
    ],
    ids=["heads", "accumulated", "double", "stages", "stages_frozen_at_first", "stages_accumulated", "by_hand"],
)
def test_equals_one_process(module, options):
    run_ranks(check_equals_one_process, module, options)


def check_change_between_micro_batches(rank):
    with pytest.raises(RuntimeError, match=r"changed between the micro-batches.*on_train_epoch_start"):
        fit(FrozenInTheMiddle(), AccelDDPStrategy(), 2, [[pair[rank]] for pair in batches()], accumulate_grad_batches=2)


def test_change_between_micro_batches_is_refused():
    run_ranks(check_change_between_micro_batches)


@pytest.mark.slow
def test_fit_again_and_copies():
    """The hooks of one fit stay neither in the module nor in the strategy."""
    run_ranks(check_fit_again)


def check_fit_again(rank):
    data = [[pair[rank]] for pair in batches()]
    model = fit(Heads(), "accel_ddp", 2, data)
    again = fit(copy.deepcopy(model), "accel_ddp", 2, data)
    expected = fit(fit(Heads(), "auto", 1, batches()), "auto", 1, batches())
    torch.testing.assert_close(again.state_dict(), expected.state_dict(), **CLOSE)
