"""Every callback in runs that begin or end in other ways than a fresh fit of some epochs."""

import warnings

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import callbacks
from lightning_accel.nn import RBM, ContrastiveDivergence, MixtureOfExperts
from tests.callbacks.pruning.test_semi_structured import use_no_kernel

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(directory .* not empty|does not have many workers|number of training batches|treespec)",
    "ignore:training ended after 1 optimizer",
    "ignore:You are overfitting",
    "ignore:.*`shuffle=True`.*in `overfit_batches`",
)


class Tiny(L.LightningModule):
    def __init__(self, net, chains=False):
        super().__init__()
        self.net = net
        self.sampling = [ContrastiveDivergence(num_chains=2)] if chains else []

    def forward(self, x):
        output = self.net(x)
        return output if isinstance(output, torch.Tensor) else output[0]

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.sampling:
            return self.sampling[0](self.net, x)
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss, on_epoch=True)
        return {"loss": loss, "weight": len(x)}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = self.net.free_energy(x).mean() if self.sampling else F.cross_entropy(self(x), y)
        self.log("val/loss", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def dense():
    return Tiny(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))


MODULES = {
    "SemiStructuredSparsity": lambda: Tiny(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))),
    "ExpertLoadMonitor": lambda: Tiny(MixtureOfExperts(6, 4, 3)),
    "ExpertLosses": lambda: Tiny(MixtureOfExperts(6, 4, 3)),
    "RBMMonitor": lambda: Tiny(RBM(6, 4), chains=True),
}
ARGUMENTS = {
    "CompressionReport": {"compiled": False, "seconds": 0.01},
    "Distillation": {"teacher": "initial"},
    "RestoringEarlyStopping": {"monitor": "val/loss", "patience": 9},
    "Export": {"compare": False},
    "MemorySavings": {"micro_batches": 2},
    "Pruning": {"sparsity": 0.5, "end": 3},
    "Quantization": {"mode": "dynamic", "backend": "torchao", "seconds": 0.01},
}
OPTIONS = {"SemiStructuredSparsity": {"precision": "bf16-mixed"}}
NAMES = [name for name in callbacks.__all__ if name not in ("PredictionWriter", "DDPSettings")]  # for predict, or ranks
SLOW = {
    "CompressionReport",
    "Export",
    "Quantization",
    "RBMMonitor",
    "ExpertLoadMonitor",
}  # they measure, compile what was trained, or draw


def made(name, **options):
    torch.manual_seed(0)
    trainer = L.Trainer(
        **{"max_epochs": 2, "logger": False, "enable_checkpointing": False} | options,
        **OPTIONS.get(name, {}), accelerator="cpu", devices=1,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        callbacks=[getattr(callbacks, name)(**ARGUMENTS.get(name, {}))],
    )  # fmt: skip
    return trainer, MODULES.get(name, dense)()


def loaders():
    x = torch.rand(12, 6, generator=torch.Generator().manual_seed(1)).round()
    rows = TensorDataset(x, x.sum(1).long() % 3)
    return DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=6)


def restart_when_finished(name):
    for epochs, resume in ((2, None), (2, "end.ckpt"), (3, "end.ckpt")):
        trainer, module = made(name, max_epochs=epochs)
        trainer.fit(module, *loaders(), ckpt_path=resume)
        assert trainer.current_epoch == epochs
        trainer.save_checkpoint("end.ckpt")


def fit_twice_with_the_same_objects(name):
    trainer, module = made(name)
    trainer.fit(module, *loaders())
    again = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **OPTIONS.get(name, {}),
        callbacks=[one for one in trainer.callbacks if type(one).__name__ == name],
    )  # fmt: skip
    again.fit(module, *loaders())
    assert again.global_step == 6


def validate_before_fit(name):
    trainer, module = made(name)
    trainer.validate(module, loaders()[1], verbose=False)
    trainer.fit(module, *loaders())
    assert trainer.global_step == 6


def fast_dev_run(name):
    trainer, module = made(name, fast_dev_run=True)
    trainer.fit(module, *loaders())
    assert trainer.global_step == 1


def overfit_batches(name):
    trainer, module = made(name, overfit_batches=2)
    trainer.fit(module, *loaders())
    assert trainer.global_step == 4


def no_batches(name):
    trainer, module = made(name, limit_train_batches=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Quantization failed")  # nothing to measure it on
        trainer.fit(module, *loaders())
    assert trainer.global_step == 0


STARTS = [restart_when_finished, fit_twice_with_the_same_objects, validate_before_fit, fast_dev_run, overfit_batches,
          no_batches]  # fmt: skip


QUICK = [(name, start) for start in STARTS for name in NAMES if name not in SLOW]


def marks(name, start):
    if (name, start) in QUICK:
        return []
    return [pytest.mark.slow, pytest.mark.weekly] if name == "Quantization" else [pytest.mark.slow]


@pytest.mark.sampled(default=22, slow=13)
@pytest.mark.parametrize(
    ("name", "start"),
    [
        pytest.param(name, start, id=f"{name}-{start.__name__}", marks=marks(name, start))
        for name in NAMES
        for start in STARTS
    ],
)
@pytest.mark.usefixtures("run_folder")
def test_a_callback_serves(name, start, monkeypatch):
    if name == "SemiStructuredSparsity":
        use_no_kernel(monkeypatch, multiple=2)
    start(name)
