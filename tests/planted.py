"""Slowness that is planted in foreign modules and data by sleeps, and how long each sleep really took."""

import time
from collections import Counter
from types import ModuleType

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SLEPT: Counter[str] = Counter()
SLEEPS = {"transfer": 0.012, "forward": 0.03, "backward": 0.02, "optimizer": 0.016, "callbacks": 0.008}


class Clock:
    """Takes the place of the module ``time``: it goes on by what is slept on it, and by 1 µs each time it is read."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.time = time.time

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(1e9 * seconds)

    def perf_counter_ns(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def perf_counter(self) -> float:
        return self.perf_counter_ns() / 1e9

    monotonic = thread_time = perf_counter


def use_clock(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Clock:
    """Let planted sleeps take no time but on a clock of their own, which these modules then read."""
    clock = Clock()
    for name in (__name__, *(module.__name__ for module in modules)):
        monkeypatch.setattr(f"{name}.time", clock)
    return clock


def sleep(part: str, seconds: float) -> None:
    begin = time.perf_counter()
    time.sleep(seconds)
    SLEPT[part] += time.perf_counter() - begin


class SleepingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        sleep("backward", ctx.seconds)
        return gradient, None


class SleepingSGD(torch.optim.SGD):
    seconds = 0.0

    def step(self, closure=None):
        loss = super().step(closure)
        sleep("optimizer", self.seconds)
        return loss


class Sleeping(L.LightningModule):
    """Sleeps in each part for so many seconds; what is not given does not sleep."""

    def __init__(self, manual: bool = False, **seconds: float) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.seconds = Counter(seconds)
        self.automatic_optimization = not manual

    def _sleep(self, part: str) -> None:
        if self.seconds[part]:
            sleep(part, self.seconds[part])

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self._sleep("transfer" if self.trainer.training else "validation")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch, batch_idx):
        self._sleep("forward")
        loss = SleepingBackward.apply(self.net(batch), self.seconds["backward"]).square().mean()
        self.log("loss", loss)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(loss, retain_graph=True)
                optimizer.step()
        return loss

    def on_train_batch_end(self, *_):
        self._sleep("callbacks")

    def validation_step(self, batch, batch_idx):
        self._sleep("validation")

    def configure_optimizers(self):
        optimizers = [SleepingSGD(self.parameters(), lr=0.01) for _ in range(1 if self.automatic_optimization else 2)]
        for optimizer in optimizers:
            optimizer.seconds = self.seconds["optimizer"]
        return optimizers


class SleepingLogger(DummyLogger):
    def log_metrics(self, metrics, step=None):
        sleep("logging", 0.014)


class SleepingCallback(L.Callback):
    def on_after_backward(self, trainer, pl_module):  # nested in the backward pass
        sleep("callbacks", 0.01)


class Rows(Dataset):
    """Rows of three numbers; a batch of them sleeps, too."""

    def __init__(self, batches: int = 4, batch_size: int = 2, seconds: float = 0.0) -> None:
        self.size, self.seconds = batches * batch_size, seconds / batch_size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.seconds:
            sleep("data", self.seconds)
        return torch.full((3,), float(index))


def rows(batches: int = 4, seconds: float = 0.0) -> DataLoader:
    return DataLoader(Rows(batches, 2, seconds), batch_size=2)
