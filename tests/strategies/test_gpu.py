"""What only a GPU shows. One is enough: strategies over several processes run with one."""

import warnings
from functools import partial
from itertools import product

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_accel.strategies import FullyShardedStrategy
from tests.strategies.trained import SGD, fit, whole_weights

pytestmark = pytest.mark.gpu

on_gpu = partial(fit, accelerator="gpu", devices=1, optimizer=SGD)


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        *product(["accel_fsdp2", "ddp", "accel_ddp"], ["plain", "classifier", "language_model"]),
        ("accel_expert_parallel", "language_model"),
    ],
)
def test_one_process_trains_as_without_a_strategy(name, strategy, precision):
    expected = whole_weights(on_gpu(name, precision=precision))
    actual = whole_weights(on_gpu(name, strategy=strategy, precision=precision))
    tolerance = 1e-5 if precision == "32-true" else 0.02
    for key in expected:
        if expected[key].is_floating_point():
            torch.testing.assert_close(actual[key], expected[key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{"activation_checkpointing": True}, {"cpu_offload": True}], ids=str)
def test_options_change_no_result(options):
    expected = whole_weights(on_gpu("language_model", gradient_clip_val=0.3))
    actual = whole_weights(on_gpu("language_model", gradient_clip_val=0.3, strategy=FullyShardedStrategy(**options)))
    for key, value in expected.items():
        torch.testing.assert_close(actual[key].to(value.device), value, rtol=1e-5, atol=1e-5)


def test_sharded_checkpoints_resume(tmp_path):
    expected = whole_weights(on_gpu("language_model", num_rows=8))
    strategy = FullyShardedStrategy(checkpoints="sharded")
    on_gpu("language_model", num_rows=8, max_steps=1, strategy=strategy).save_checkpoint(tmp_path / "parts.ckpt")
    dist.destroy_process_group()
    resumed = on_gpu("language_model", num_rows=8, strategy=FullyShardedStrategy(), ckpt_path=tmp_path / "parts.ckpt")
    for key, value in expected.items():
        torch.testing.assert_close(whole_weights(resumed)[key].to(value.device), value, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_fsdp1_of_lightning_trains_our_models():
    expected = whole_weights(on_gpu("classifier", num_rows=8))
    run = on_gpu("classifier", num_rows=8, strategy="fsdp")
    with FullyShardedDataParallel.summon_full_params(run.strategy.model):
        for name, actual in run.lightning_module.named_parameters():
            torch.testing.assert_close(actual.detach().to(expected[name].device), expected[name], rtol=1e-5, atol=1e-5)


class Waits(L.Callback):
    """How often the host waits for the device in the third step."""

    number = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            torch.cuda.synchronize()
            self.caught = warnings.catch_warnings(record=True)
            self.seen = self.caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            torch.cuda.set_sync_debug_mode("default")
            self.caught.__exit__(None, None, None)
            self.number = sum("synchroniz" in str(one.message) for one in self.seen)


@pytest.mark.parametrize("strategy", ["accel_fsdp2", "ddp", "accel_ddp"])
def test_the_host_waits_no_more_often(strategy):
    alone, split = Waits(), Waits()
    on_gpu("language_model", callbacks=[alone])
    on_gpu("language_model", callbacks=[split], strategy=strategy)
    assert split.number <= alone.number
