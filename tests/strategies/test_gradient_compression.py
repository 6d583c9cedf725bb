import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_accel.strategies import AccelDDPStrategy
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


class Fails(Regression):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise ValueError("this batch is bad")
        return super().training_step(batch, batch_idx)


def check_saved_alone(rank, folder):
    model, keeper = Fails(), OnExceptionCheckpoint(folder, "alone")
    with pytest.raises(ValueError, match="this batch is bad"):
        fit(rank, "accel_ddp", model=model, enable_checkpointing=rank == 0, callbacks=[keeper] if rank == 0 else [])
    if rank == 1:  # has left the fit, and waits for nobody
        return
    saved = torch.load(folder / "alone.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    torch.testing.assert_close(saved["state_dict"], model.state_dict(), rtol=0, atol=0)


def test_a_process_that_fails_saves_without_the_others(tmp_path):
    run_ranks(check_saved_alone, tmp_path)


def test_unknown_compression_is_rejected():
    with pytest.raises(ValueError, match="compression must be none, bf16 or fp16; got 'powersgd'"):
        AccelDDPStrategy(compression="powersgd")
