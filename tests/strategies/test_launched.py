import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelDDPStrategy, FullyShardedStrategy, PipelineStrategy
from tests.ranks import run_ranks

STRATEGIES = AccelDDPStrategy, FullyShardedStrategy, PipelineStrategy


class Dealt(LightningEnvironment):
    """A launcher that says which process this is, whatever the Trainer's devices are; Ray's does."""

    creates_processes_externally = True

    def __init__(self, rank=None, size=2):
        super().__init__()
        self.rank, self.size = dist.get_rank() if rank is None else rank, size

    def world_size(self):
        return self.size

    def global_rank(self):
        return self.rank

    def local_rank(self):
        return self.rank

    def set_world_size(self, size):
        pass

    def set_global_rank(self, rank):
        pass

    def teardown(self):
        pass


class Rows(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        self.seen = set()

    def training_step(self, batch, batch_idx):
        self.seen |= set(batch[0].flatten().tolist())
        return self.layers(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(12.0).unsqueeze(1)), batch_size=2, shuffle=True)


def check_rows(rank):
    seen = []
    for strategy in STRATEGIES:
        module = Rows()
        trainer = L.Trainer(
            accelerator="cpu", devices="auto", strategy=strategy(), plugins=[Dealt()], max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        assert trainer.num_devices == 1
        trainer.fit(module)
        seen.append(module.seen)
    return seen


@pytest.mark.slow
def test_processes_are_counted_by_the_launcher_and_not_by_devices():
    *replicas, (first, second) = zip(*run_ranks(check_rows, timeout_s=60), strict=True)
    for one, other in replicas:
        assert len(one) == len(other) == 6
        assert one | other == set(range(12))
    assert first == second == set(range(12))  # stages of one pipeline


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_process_gets_a_device_of_its_own(strategy, monkeypatch):
    def device(rank, names):
        made = strategy()
        made.parallel_devices, made.cluster_environment = [torch.device(name) for name in names], Dealt(rank, 4)
        return str(made.root_device)

    assert device(1, ["cuda:0", "cuda:1"]) == "cuda:1"
    assert device(3, ["cpu"]) == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # this process sees its own alone
    assert device(3, ["cuda:0"]) == "cuda:0"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"process 3 of this .* \['cuda:0', 'cuda:1'\]\. Give it devices='auto'"):
        device(3, ["cuda:0", "cuda:1"])
