import pytest
import torch
from torch import nn

from lightning_accel.strategies import PipelineStrategy, SyncBatchNormPlugin
from tests.ranks import run_ranks
from tests.strategies.trained import SGD, Plain, Rows, make, trainer


class Normed(Plain):
    """Batch norms on both stages."""

    def __init__(self):
        super().__init__(optimizer=SGD)
        self.blocks = nn.Sequential(
            nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)
        )

    def forward(self, x):
        return self.blocks(x)


def check_pipelines(rank, folder):
    torch.manual_seed(1)
    strategy = PipelineStrategy(1, data_parallel_size=2)
    run = trainer(strategy=strategy, devices=4, plugins=[SyncBatchNormPlugin()])
    run.fit(Normed(), Rows(make("plain")[1], 4))
    run.save_checkpoint(folder / "pipeline.ckpt")
    return [type(layer).__name__ for layer in run.lightning_module.blocks]


@pytest.mark.slow
def test_synchronised_batch_norms_in_pipelines_equal_one_large_batch(tmp_path):
    torch.manual_seed(1)
    one = trainer()
    one.fit(module := Normed(), Rows(make("plain")[1], 8))
    names = run_ranks(check_pipelines, tmp_path, world_size=4)
    assert all(kinds.count("BatchNorm1d") == 2 for kinds in names)  # plain ones again
    saved = torch.load(tmp_path / "pipeline.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(saved, dict(module.state_dict()), rtol=1e-5, atol=1e-5)
