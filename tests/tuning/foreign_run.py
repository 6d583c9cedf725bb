"""Runs that somebody else has written, most of which end badly; imported by the processes of trials."""

import ctypes
import os
import resource
import subprocess
import sys
import time

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, at_step_6=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
        self.at_step_6 = at_step_6

    def training_step(self, batch, batch_idx):
        x, y = batch
        if batch_idx == 6 and self.at_step_6 is not None:
            self.at_step_6()
        time.sleep(0.01)
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def run(at_step_6, trainer_options, num_workers=0):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(60, 5, generator=generator), torch.arange(60) % 2)
    trainer = L.Trainer(**{"max_epochs": 9, "accelerator": "cpu"} | trainer_options)
    loaders = {"batch_size": 3, "num_workers": num_workers, "persistent_workers": num_workers > 0}
    return trainer, Net(at_step_6), DataLoader(data, shuffle=True, **loaders)


class WideNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(300, 300)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def is_wide(**trainer_options):
    """Return a run whose activations are as large as its weights."""
    options = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    loader = DataLoader(TensorDataset(torch.ones(9600, 300)), batch_size=200)
    return L.Trainer(**options | trainer_options), WideNet(), loader


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return run(None, {}, num_workers=1)[2]


def works(**trainer_options):
    return run(None, trainer_options, num_workers=1)


def ends_before_it_begins(**trainer_options):
    os._exit(0)


def works_on_a_gpu(**trainer_options):
    return run(None, {"accelerator": "gpu", "devices": 1} | trainer_options)


def raises(**trainer_options):
    def fail():
        raise RuntimeError("the batch has\nno label")

    return run(fail, trainer_options)


def crashes(**trainer_options):
    return run(lambda: ctypes.string_at(0), trainer_options)


def hangs(**trainer_options):
    return run(lambda: time.sleep(1000), trainer_options)


def takes_all_memory(**trainer_options):
    return run(lambda: torch.empty(2**55, dtype=torch.uint8), trainer_options)


def is_killed(**trainer_options):
    return run(lambda: os.kill(os.getpid(), 9), trainer_options)


def fills_the_disk(**trainer_options):
    def fail():
        raise OSError(28, os.strerror(28))

    return run(fail, trainer_options)


def exits(**trainer_options):
    return run(sys.exit, trainer_options)


def leaves_without_a_word(**trainer_options):
    return run(lambda: os._exit(0), trainer_options)


def is_interrupted(**trainer_options):
    def fail():
        raise KeyboardInterrupt

    return run(fail, trainer_options)


def leaves_a_child(**trainer_options):
    def fail():
        subprocess.Popen(["sleep", "600"])
        for _ in range(20_000):
            print("a line of a trial that prints a lot")
        sys.stdout.flush()
        os._exit(7)

    return run(fail, trainer_options)


def takes_more_than_its_limit(**trainer_options):
    def fail():
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        return [bytearray(2**28) for _ in range(9)]

    return run(fail, trainer_options)


def has_one_step(**trainer_options):
    return run(None, {"max_steps": 1} | trainer_options)


def has_no_batch(**trainer_options):
    return run(None, {"limit_train_batches": 0} | trainer_options)


def returns_nothing(**trainer_options):
    return None


class Deep(Net):
    """Hold 60 activations of 2.4 MB in the forward pass, in 6 blocks of 10."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(200, 200), *[nn.Tanh() for _ in range(9)]) for _ in range(6)]
        self.net = nn.Sequential(nn.Linear(5, 200), *blocks, nn.Linear(200, 2))


def holds_activations(**trainer_options):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(6000, 5, generator=generator), torch.arange(6000) % 2)
    trainer = L.Trainer(**{"max_epochs": 99, "accelerator": "cpu"} | trainer_options)
    return trainer, Deep(), DataLoader(data, batch_size=3000)


def has_a_smaller_batch(**trainer_options):
    trainer, module, _ = run(None, trainer_options)
    return trainer, module, DataLoader(TensorDataset(torch.ones(5, 5), torch.arange(5) % 2), batch_size=3)


def two_ranks(**trainer_options):
    return run(None, {"strategy": "ddp", "devices": 2} | trainer_options)


class Served(Net):
    def predict_step(self, batch, batch_idx):
        time.sleep(0.002)
        return self.net(batch[0])


class Samples(L.LightningDataModule):
    def predict_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.randn(60, 5, generator=generator)), batch_size=8)


def serves(**trainer_options):
    return L.Trainer(**{"accelerator": "cpu"} | trainer_options), Served(), Samples()
