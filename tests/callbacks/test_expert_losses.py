"""Losses of gates in the training of modules that know nothing of them."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.callbacks import ExpertLoadMonitor, ExpertLosses, MemorySavings
from lightning_accel.models import MoEClassifier
from lightning_accel.nn import ExpertLoad, MixtureOfExperts, replace_mlps_
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(returned .None.|sync_dist|does not have many workers|number of training batches|treespec)"
)
QUIET = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}


class Foreign(L.LightningModule):
    def __init__(self, returns=lambda loss: loss, by_hand=False, checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(2)])
        self.head = nn.Linear(6, 3)
        self.returns, self.automatic_optimization, self.losses, self.logged = returns, not by_hand, [], []

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.returns(F.cross_entropy(self(x), y))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.logged.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


class ByHand(Foreign):
    """Add the losses as the callback does, with the load of the step before, equal at first."""

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "load"):
            self.reports = []
            mixtures = [one for one in self.modules() if isinstance(one, MixtureOfExperts)]
            self.load = ExpertLoad([one.gate for one in mixtures])
            self.load.start()
            for mixture in mixtures:
                mixture.register_forward_hook(lambda _, __, output: self.reports.append(output.report))
        self.reports.clear()
        loss = super().training_step(batch, batch_idx)
        self.load.add(self.reports)
        first, second = self.reports
        balance, z = (first.balance_loss + second.balance_loss) / 2, (first.z_loss + second.z_loss) / 2
        return loss + 0.3 * balance + 0.2 * z

    def on_before_optimizer_step(self, optimizer):
        self.load.step()


def fit(callbacks, kind=Foreign, upcycled=True, samples=24, **options):
    L.seed_everything(0, verbose=False)
    module = kind(**options)
    if upcycled:
        replace_mlps_(module, 4)
        for one in module.modules():
            if isinstance(one, MixtureOfExperts):
                one.experts.reset_parameters()  # otherwise gates get no gradient from the task
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(samples, 6, generator=generator), torch.arange(samples) % 3)
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, log_every_n_steps=1, **QUIET)
    trainer.fit(module, DataLoader(data, 6))
    return module


def gates(module):
    return torch.cat(
        [one.gate.weight.detach().flatten() for one in module.modules() if isinstance(one, MixtureOfExperts)]
    )


def test_losses_are_those_of_a_step_that_adds_them():
    by_hand, module = fit([], ByHand), fit([ExpertLosses(balance_weight=0.3, z_weight=0.2)])
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(by_hand.losses))
    torch.testing.assert_close(gates(module), gates(by_hand))
    assert module.losses[0] > fit([]).losses[0] + 0.3
    for one in module.modules():
        if isinstance(one, MixtureOfExperts):
            assert one.gate.expert_slots.sum() == 12  # of the last step, two for each sample
    assert {"train/balance_loss", "train/load_entropy", "train/max_violation"} <= set(module.logged[-1])
    assert not {"training_step", "expert_load"} & set(vars(module))
    assert not any(one._forward_hooks for one in module.modules())


def test_losses_in_mappings_are_added_to_too():
    plain = fit([ExpertLosses()])
    module = fit([ExpertLosses()], returns=lambda loss: {"loss": loss, "other": 1})
    assert module.losses == plain.losses


def test_micro_batches_are_one_step_to_gates():
    """Each has the same loss, of the load of the step before, so their mean is that of the whole batch."""
    whole, split = fit([ExpertLosses()]), fit([ExpertLosses(), MemorySavings(micro_batches=2)])
    torch.testing.assert_close(torch.tensor(split.losses), torch.tensor(whole.losses), rtol=1e-4, atol=1e-5)


def test_recomputed_layers_count_once():
    plain = fit([ExpertLosses(balance_weight=0.3)])
    module = fit([ExpertLosses(balance_weight=0.3), MemorySavings(activation_checkpointing=True)])
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(plain.losses))
    torch.testing.assert_close(gates(module), gates(plain))


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_the_monitor_leaves_gates_to_it(tmp_path, first):
    """In either order, gates are updated once a step."""
    monitor = ExpertLoadMonitor(str(tmp_path / "load.png"))
    callbacks = [ExpertLosses(), monitor]
    module = fit(callbacks if first else callbacks[::-1])
    assert module.losses == fit([ExpertLosses()]).losses
    assert len(monitor.names) == 2
    assert len(monitor._theirs.gates) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"upcycled": False}, "ExpertLosses found no MixtureOfExperts in Foreign.*replace_mlps_"),
        ({"by_hand": True}, "ExpertLosses needs automatic optimization.*add the losses of the gates to yours"),
        ({"returns": lambda loss: {"output": loss}}, "training_step of Foreign returns no loss"),
    ],
)
def test_rejects(options, message):
    with pytest.raises(TypeError, match=message):
        fit([ExpertLosses()], **options)


def test_rejects_modules_that_add_them_themselves_and_negative_weights():
    with pytest.raises(TypeError, match="MoEClassifier adds the losses of its gates itself; take ExpertLosses out"):
        fit([ExpertLosses()], MoEClassifier, upcycled=False, num_features=6, num_classes=3)
    with pytest.raises(ValueError, match="balance_weight must be at least 0; got -1"):
        ExpertLosses(balance_weight=-1)
    with pytest.raises(ValueError, match=r"z_weight must be at least 0; got nan"):
        ExpertLosses(z_weight=float("nan"))
    with pytest.raises(TypeError, match="several ExpertLosses, and takes one"):
        fit([ExpertLosses(), ExpertLosses()])


def train(part=slice(None), batch_size=6, **options):
    L.seed_everything(0, verbose=False)
    module = Foreign()
    replace_mlps_(module, 4)
    x, y = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[ExpertLosses(balance_weight=0.3)], use_distributed_sampler=False,
        **QUIET, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x[part], y[part]), batch_size))
    return torch.tensor(module.losses)


def train_on_rank(rank, strategy):
    return train(slice(rank, None, 2), 3, devices=2, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "accel_fsdp2"])
def test_processes_balance_as_one(strategy):
    """The mean of the losses of halves of a batch is that of the batch, as loads are those of whole steps."""
    first, second = run_ranks(train_on_rank, strategy)
    torch.testing.assert_close((first + second) / 2, train(), rtol=1e-4, atol=1e-5)
