"""What the runs of test_recovery.py train: large enough that a good part of each step is the writing of its state."""

from functools import partial
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import DeepBeliefNetwork, SequenceModel
from lightning_accel.callbacks import LowRankAdapters
from lightning_accel.data import LengthBatchSampler, length_batch_loader
from lightning_accel.models import FineTuning, RecurrentLayers, Stage

WIDTH = 512


class Job(L.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def loader(self, world_size: int) -> DataLoader:
        rows = torch.randn(7 * 4 * world_size, WIDTH, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_start(self):
        if self.global_rank == 0:
            (self.folder / "started").touch()

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_rank == 0 and self.trainer.global_step:  # the ModelCheckpoint is done with that step
            with open(self.folder / "saved", "a") as file:
                file.write(f" {self.trainer.global_step}")

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean() + 0.1 * torch.rand(())


class ShardedJob(Job):
    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class ExpertJob(Job):
    """With experts, which are used one by one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.experts = Experts()

    def training_step(self, batch, batch_idx):
        (x,) = batch
        expert = (x[:, 0] > 0).long()
        mixed = self.experts(x, expert.argsort(stable=True), torch.ones(len(x)), expert.bincount(minlength=2))
        return self.net(x + mixed).square().mean() + 0.1 * torch.rand(())


class Experts(nn.Module):
    expert_parameters = ("weight",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, tokens, token_of_slot, weight_of_slot, counts):
        rows = tokens[token_of_slot].split(counts.tolist())
        made = torch.cat([part @ matrix for part, matrix in zip(rows, self.weight, strict=True)])
        return torch.zeros_like(tokens).index_add(0, token_of_slot, made * weight_of_slot.unsqueeze(1))


class SequenceJob(SequenceModel):
    """Sequences in chunks, through which states are carried; 7 to 8 steps an epoch."""

    on_train_start = Job.on_train_start
    configure_optimizers = Job.configure_optimizers

    def __init__(self, folder: Path) -> None:
        super().__init__(
            16, 3, target_kind="labelling", layers=RecurrentLayers(hidden_dim=WIDTH // 2, num_layers=2), dropout=0.5
        )
        del self.hparams["folder"]  # a path, which a checkpoint could not be loaded with
        self.folder = folder

    def loader(self, world_size: int) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        lengths = [3, 9, 4, 8, 2, 9, 5, 7, 6, 1, 4, 9]
        data = [(torch.randn(n, 16, generator=generator), torch.arange(n) % 3) for n in lengths]
        return length_batch_loader(data, LengthBatchSampler(lengths, 4, chunk_steps=3))

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        Job.on_train_batch_start(self, batch, batch_idx)


class BeliefJob(DeepBeliefNetwork):
    """Two Boltzmann machines and a classifier, in stages of an epoch each; 7 steps an epoch."""

    def __init__(self, folder: Path) -> None:
        stages = [Stage(epochs=1, num_chains=8), Stage(epochs=1, sampler="pcd", num_chains=4)]
        super().__init__(WIDTH, [8, 6], stages, num_classes=3, fine_tuning=FineTuning("classifier", epochs=2))
        del self.hparams["folder"]  # a path, which a checkpoint could not be loaded with
        self.folder = folder

    def loader(self, world_size: int) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        rows = torch.rand(7 * 4 * world_size, WIDTH, generator=generator)
        return DataLoader(TensorDataset(rows, torch.arange(len(rows)) % 3), batch_size=4, shuffle=True)

    def configure_optimizers(self):
        self.make_optimizer = partial(torch.optim.SGD, lr=1, momentum=0.5)
        return super().configure_optimizers()

    def on_train_start(self):
        super().on_train_start()
        Job.on_train_start(self)

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        Job.on_train_batch_start(self, batch, batch_idx)


class AdaptedJob(Job):
    """Adapters over weights in 4 bits, which every start makes of the same floats."""

    def __init__(self, folder: Path) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            super().__init__(folder)

    def configure_callbacks(self):
        return [LowRankAdapters(4, dropout=0.5, base="nf4")]


def local_state(module: L.LightningModule) -> dict[str, Tensor]:
    """Weights, chains and the optimizer's state, of this rank."""
    # on meta are the layers that a pipeline keeps elsewhere
    state = {name: _local(value) for name, value in module.state_dict().items() if not value.is_meta}
    for index, each in module.optimizers().state_dict()["state"].items():
        state |= {f"{index}.{name}": _local(value) for name, value in each.items() if not value.is_meta}
    for index, sampling in enumerate(getattr(module, "sampling", [])):
        state |= {f"sampling {index}.{name}": value for name, value in sampling.state_dict().items()}
    return state


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
