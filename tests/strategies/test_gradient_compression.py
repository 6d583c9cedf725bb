import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_accel.strategies import AccelDDPStrategy
from lightning_accel.strategies.ddp import PowerSGD
from tests.ranks import run_ranks

QUIET = {
    "accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "use_distributed_sampler": False,
}  # fmt: skip


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.network = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 36), nn.Tanh(), nn.Linear(36, 2))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def rows(rank, size):
    generator = torch.Generator().manual_seed(4 + rank)
    return [(torch.randn(size, 40, generator=generator), torch.randn(size, 2, generator=generator)) for _ in range(5)]


def fit(rank, strategy, size=8, model=None, max_epochs=1, ckpt_path=None, **options):
    trainer = L.Trainer(strategy=strategy, max_epochs=max_epochs, **{**QUIET, **options})
    model = Regression() if model is None else model
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        trainer.fit(model, DataLoader(rows(rank, size), batch_size=None), ckpt_path=ckpt_path)
    return model


def largest_difference(a, b):
    return max(
        float((x - y).abs().max()) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def assert_ranks_agree(model):
    for parameter in model.parameters():
        gathered = [torch.empty_like(parameter) for _ in range(2)]
        torch.distributed.all_gather(gathered, parameter.detach())
        assert torch.equal(*gathered)


def check_halving(rank):
    plain = fit(rank, "ddp")
    for compression in ("bf16", "fp16"):
        model = fit(rank, AccelDDPStrategy(compression=compression))
        assert_ranks_agree(model)
        assert 0 < largest_difference(model, plain) < (2e-3 if compression == "bf16" else 3e-4)


def test_half_precision_rounds_gradients_and_no_more():
    run_ranks(check_halving)


def check_exact_powersgd(rank):
    """In float64, for columns that are nearly dependent make roundings large."""

    def train(strategy):
        return fit(rank, strategy, size=2, precision="64-true")

    plain = train("ddp")
    # of 2 rows on each of 2 processes, gradients have rank 4
    model = train(AccelDDPStrategy(compression="powersgd", powersgd_rank=4, powersgd_start_step=1))
    assert largest_difference(model, plain) < 1e-9
    assert_ranks_agree(model)
    powersgd = model.trainer.strategy._powersgd
    assert sorted(powersgd.errors) == ["network.0.weight", "network.2.weight"]
    assert powersgd.step == 5
    lossy = train(AccelDDPStrategy(compression="powersgd", powersgd_rank=1, powersgd_start_step=0))
    assert_ranks_agree(lossy)
    assert largest_difference(lossy, plain) > 1e-3
    late = train(AccelDDPStrategy(compression="powersgd", powersgd_rank=1, powersgd_start_step=5))
    assert largest_difference(late, plain) < 1e-9


def test_powersgd_is_exact_for_gradients_of_its_rank():
    run_ranks(check_exact_powersgd)


def check_nothing_is_lost(rank, dtype):
    network, whole = Regression().network.to(dtype), Regression().network.to(dtype)
    hook = PowerSGD(network, rank=2, start_step=0)
    parallel = DistributedDataParallel(network, bucket_cap_mb=0.005)  # several buckets
    parallel.register_comm_hook(None, hook.average)
    sent = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    true = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    for i in range(5):
        network.zero_grad()
        whole.zero_grad()
        F.mse_loss(parallel(rows(rank, 8)[i][0].to(dtype)), rows(rank, 8)[i][1].to(dtype)).backward()
        sum(F.mse_loss(whole(rows(r, 8)[i][0].to(dtype)), rows(r, 8)[i][1].to(dtype)) / 2 for r in (0, 1)).backward()
        for name in sent:
            sent[name] += network.get_parameter(name).grad
            true[name] += whole.get_parameter(name).grad
    state = hook.state_dict()
    assert state["step"] == 5
    assert set(state["errors"]) == {"0.weight", "2.weight"}
    for name, error in state["errors"].items():
        assert error.abs().max() > 1e-3
        sent[name] += error
    torch.testing.assert_close(sent, true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_powersgd_leaves_out_comes_later(dtype):
    run_ranks(check_nothing_is_lost, dtype)


def check_resume(rank, folder):
    def strategy():
        return AccelDDPStrategy(compression="powersgd", powersgd_rank=1, powersgd_start_step=2)

    whole = fit(rank, strategy(), max_epochs=2)
    half = fit(rank, strategy(), max_epochs=1)
    half.trainer.save_checkpoint(folder / "half.ckpt")
    half.trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    assert "accel_ddp_powersgd" not in torch.load(folder / "weights.ckpt", weights_only=True)
    resumed = fit(rank, strategy(), max_epochs=2, ckpt_path=folder / "half.ckpt")
    assert largest_difference(resumed, whole) < 1e-5
    assert resumed.trainer.strategy._powersgd.step == 10
    checkpoint = torch.load(folder / "half.ckpt", weights_only=True)
    if rank == 0:
        del checkpoint["accel_ddp_powersgd"]["errors"]["network.0.weight"]
        torch.save(checkpoint, folder / "without.ckpt")
    torch.distributed.barrier()
    without = fit(rank, strategy(), max_epochs=2, ckpt_path=folder / "without.ckpt")
    assert largest_difference(without, whole) > 1e-4  # the test could tell


def test_powersgd_resumes(tmp_path):
    run_ranks(check_resume, tmp_path)


class Fails(Regression):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise ValueError("this batch is bad")
        return super().training_step(batch, batch_idx)


def check_saved_alone(rank, folder):
    strategy = AccelDDPStrategy(compression="powersgd", powersgd_rank=1, powersgd_start_step=1)
    model, keeper = Fails(), OnExceptionCheckpoint(folder, "alone")
    with pytest.raises(ValueError, match="this batch is bad"):
        fit(rank, strategy, model=model, enable_checkpointing=rank == 0, callbacks=[keeper] if rank == 0 else [])
    if rank == 1:  # has left the fit, and waits for nobody
        return
    saved = torch.load(folder / "alone.ckpt", weights_only=True)
    torch.testing.assert_close(saved["accel_ddp_powersgd"]["errors"], strategy._powersgd.errors, rtol=0, atol=0)
    assert saved["accel_ddp_powersgd"]["step"] == saved["global_step"] == 3
    torch.testing.assert_close(saved["state_dict"], model.state_dict(), rtol=0, atol=0)


def test_a_process_that_fails_saves_without_the_others(tmp_path):
    run_ranks(check_saved_alone, tmp_path, timeout_s=30)


def check_scaler_is_refused(rank):
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"compression=powersgd.*gradient scaler.*precision=bf16-mixed"):
        fit(rank, AccelDDPStrategy(compression="powersgd"), plugins=[precision])


def test_errors():
    with pytest.raises(ValueError, match="compression must be none, bf16, fp16 or powersgd; got 'int8'"):
        AccelDDPStrategy(compression="int8")
    with pytest.raises(
        ValueError, match=r"powersgd_rank must be at least 1.*powersgd_rank=0, powersgd_start_step=1000"
    ):
        AccelDDPStrategy(compression="powersgd", powersgd_rank=0)
    run_ranks(check_scaler_is_refused)
