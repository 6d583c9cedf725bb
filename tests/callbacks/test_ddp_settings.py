"""Settings of DDP in runs that name their strategy in any form."""

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_accel._private.lightning import ddp_options
from lightning_accel.callbacks import DDPSettings
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not have many workers|number of training batches|treespec)")
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 2,
}  # fmt: skip


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.met = {}

    def training_step(self, batch, batch_idx):
        ddp = self.trainer.strategy.model
        self.met = {
            "bucket_cap_mb": round(ddp.bucket_bytes_cap / 2**20),
            "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
            "static_graph": ddp.static_graph,
            "find_unused_parameters": ddp.find_unused_parameters,
        }
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy, devices=2, **settings):
    net = Net()
    callbacks = [DDPSettings(**settings)] if settings else []
    trainer = L.Trainer(strategy=strategy, devices=devices, callbacks=callbacks, **QUIET)
    trainer.fit(net, DataLoader(torch.linspace(-1, 1, 24).view(8, 3), batch_size=2))
    return net


def check_settings(rank):
    plain = fit("ddp")
    settings = {"bucket_cap_mb": 7, "gradient_as_bucket_view": True, "static_graph": True}
    for strategy in ("ddp", DDPStrategy(bucket_cap_mb=3), "ddp_find_unused_parameters_true"):
        net = fit(strategy, **settings, find_unused_parameters=False)
        assert net.met == settings | {"find_unused_parameters": False}
        torch.testing.assert_close(net.state_dict(), plain.state_dict())
        options = ddp_options(net.trainer.strategy)
        assert options == ({"bucket_cap_mb": 3} if isinstance(strategy, DDPStrategy) else options)
        assert "static_graph" not in options
    assert fit("accel_ddp", bucket_cap_mb=7).met["bucket_cap_mb"] == 7
    rounded = fit("ddp", compression="bf16")
    torch.testing.assert_close(rounded.state_dict(), plain.state_dict(), rtol=1e-2, atol=1e-2)
    assert any(not torch.equal(a, b) for a, b in zip(rounded.parameters(), plain.parameters(), strict=True))
    with pytest.raises(TypeError, match="accel_ddp looks for unused parameters"):
        fit("accel_ddp", static_graph=True)


@pytest.mark.slow
def test_settings_reach_ddp_and_leave_the_strategy_as_it_was():
    run_ranks(check_settings)


def test_rejects_other_strategies():
    with pytest.raises(TypeError, match="needs DDP; got SingleDeviceStrategy"):
        fit("auto", 1, static_graph=True)
    with pytest.raises(ValueError, match="compression must be one of bf16; got 'fp16'"):
        DDPSettings(compression="fp16")


def test_a_run_that_fails_leaves_the_strategy_as_it_was():
    strategy = DDPStrategy(bucket_cap_mb=3)
    trainer = L.Trainer(strategy=strategy, devices=1, **QUIET)
    settings = DDPSettings(static_graph=True)
    settings.setup(trainer, Net(), "fit")
    assert ddp_options(strategy) == {"bucket_cap_mb": 3, "static_graph": True}
    settings.on_exception(trainer, Net(), ValueError())
    assert ddp_options(strategy) == {"bucket_cap_mb": 3}
