"""OneShotPruning that removes channels, blocks and experts: resumed with equal bits, in all processes, taught."""

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_accel.callbacks import (
    Distillation,
    ExactResume,
    ExpertLoadMonitor,
    ExpertLosses,
    OneShotPruning,
    Pruning,
)
from lightning_accel.compress import (
    choose_channels,
    find_channel_groups,
    load_pruned,
    measure_influence,
    score_channels,
    score_channels_on_data,
)
from lightning_accel.nn import MixtureOfExperts
from lightning_accel.strategies import AccelDDPStrategy, FullyShardedStrategy
from tests.callbacks.pruning.test_resume import SaveAt, assert_same, state_of
from tests.ranks import run_ranks


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mixture = MixtureOfExperts(8, 6, 4, 1)

    def forward(self, x):
        return x + self.mixture(self.norm(x)).features


class Tokens(L.LightningModule):
    """Train on sequences of numbers, in layers of experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 11)
        self.losses = []

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


def samples(num_samples=24):
    return torch.randint(11, (num_samples, 6), generator=torch.Generator().manual_seed(1))


def fit(callbacks, max_steps=6, ckpt_path=None, module=None, **options):
    module = Tokens() if module is None else module
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        max_steps=max_steps, accelerator="cpu", callbacks=callbacks, enable_checkpointing=False,
        num_sanity_val_steps=0, limit_val_batches=1, **quiet, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(samples(), 4), DataLoader(samples(), 4), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def remove(*structures, begin=2):
    shares = {"block": 0.25, "expert": 0.5, "width": 0.5, "channel": 0.5}
    return [OneShotPruning(shares[one], structure=one, begin=begin, calibrate=8) for one in structures]


@pytest.mark.slow
def test_resumes_with_equal_bits_and_loads_anywhere(tmp_path):
    def callbacks():
        return [
            *remove("block", "expert", "width"),
            Distillation("dense"),
            ExactResume(),
            EMAWeightAveraging(decay=0.9),
        ]

    whole = fit([*callbacks(), SaveAt(tmp_path, [4])])
    module = whole.lightning_module
    assert len(module.layers) == 3
    assert [len(layer.mixture.experts.up_weight) for layer in module.layers] == [2, 2, 2]
    assert module.embedding.weight.shape == (11, 4)
    rows = [row for callback in whole.callbacks[:3] for row in callback.report_rows()]
    assert sum("removed" in row["note"] for row in rows) == 1
    assert [row["note"] for row in rows if "experts" in row["note"]] == ["2 of 4 experts left"] * 3
    again = fit(callbacks(), ckpt_path=tmp_path / "4.ckpt")
    assert_same([state_of(again)], [state_of(whole)])
    losses = len(again.lightning_module.losses)
    assert again.lightning_module.losses == module.losses[-losses:]
    fit(callbacks()[:-1], max_steps=4).save_checkpoint(tmp_path / "end.ckpt")
    half = fit(callbacks()[:-1], ckpt_path=tmp_path / "end.ckpt", max_steps=4).lightning_module
    alone = load_pruned(Tokens(), tmp_path / "end.ckpt")
    torch.testing.assert_close(alone(samples(3)), half(samples(3)), rtol=0, atol=0)
    with pytest.raises(ValueError, match="is removed at step 1, before 'expert' at 2; list the callbacks in the order"):
        fit([*remove("expert"), *remove("block", begin=1)])


@pytest.mark.parametrize("structure", ["block", "channel"])
def test_what_goes_is_what_the_functions_name(structure):
    module = Tokens()
    before = copy.deepcopy(module).eval()
    callback = OneShotPruning(0.5, structure=structure, exclude=["layers.1"], calibrate=24)
    fit([callback], max_steps=1, module=module)
    calls = [((one[:, :-1],), {}) for one in samples().split(4)]
    if structure == "block":
        influence = measure_influence(before, calls, exclude=["layers.1"]).influence
        gone = sorted(influence, key=influence.get)[:2]
        assert len(module.layers) == 2
        removed = {row["name"] for row in callback.report_rows() if "removed" in row["note"]}
        assert removed == set(gone)
        assert callback.left_out == {"layers.1": "excluded by 'layers.1'"}
    else:
        groups = find_channel_groups(before, calls[0][0], exclude=["layers.1"])
        chosen = choose_channels(score_channels_on_data(before, groups, calls), 0.5)
        names = [layer.name for layer in groups.layers]
        assert names == ["layers.0.mixture.experts", "layers.2.mixture.experts", "layers.3.mixture.experts"]
        for name in names:
            kept = [one for one in range(len(groups[name])) if one not in chosen[name]]
            place = next(place for place in groups[name].slices if place[0].endswith("down_weight"))
            rows = groups[name].slices[place][kept].ravel()
            old, new = before.get_parameter(place[0]), module.get_parameter(place[0])
            assert new.shape[place[1]] == len(rows)
            torch.testing.assert_close(new, old.index_select(place[1], torch.tensor(rows)), atol=0.02, rtol=0)  # a step


def test_channels_are_scored_by_what_they_bring():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Conv1d(4, 2, 1))
    first, second, third = net[0], net[2], net[4]
    calls = [torch.randn(4, 3), torch.randn(4, 3)]
    groups = find_channel_groups(net, [calls[0]])
    scores = score_channels_on_data(net, groups, [((x,), {}) for x in calls])
    hidden = torch.cat([first(x).relu() for x in calls]).double()
    expected = (hidden.square().sum(0) * second.weight.double().square().sum(0)).sqrt()
    torch.testing.assert_close(scores["0"], expected.detach(), rtol=1e-5, atol=0)
    assert not third.weight.grad
    plain = score_channels(net, groups)
    assert scores["0"].argsort().tolist() != plain["0"].argsort().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1], ids=["monitored first", "monitored last"])
def test_the_load_of_what_is_left_is_counted(tmp_path, order):
    monitor, losses = ExpertLoadMonitor(str(tmp_path / "load.png")), ExpertLosses()
    trainer = fit([monitor, losses, *remove("block", "expert")][::order], log_every_n_steps=1)
    names = [name for name, part in trainer.lightning_module.named_modules() if isinstance(part, MixtureOfExperts)]
    assert monitor.names == names
    assert len(names) == 3
    assert monitor.steps[-4:] == [3, 4, 5, 6]
    assert monitor.steps[0] >= 2
    for loads in monitor.loads:
        assert [float(load.sum()) for load in loads] == pytest.approx([1.0] * 3)
        assert {load.shape for load in loads} == {(2,)}
    assert (tmp_path / "load.png").exists()


@pytest.mark.slow
def test_two_processes_remove_the_same():
    run_ranks(check_two_ranks)


def check_two_ranks(rank):
    trainer = fit(remove("block", "expert", "width"), strategy=AccelDDPStrategy(), devices=2)
    module = trainer.lightning_module
    assert len(module.layers) == 3
    for value in module.parameters():
        others = trainer.strategy.all_gather(value.detach())
        assert torch.equal(others[0], others[1])
    with pytest.raises(TypeError, match="channels cannot be removed in training under FullyShardedStrategy"):
        fit(remove("block"), strategy=FullyShardedStrategy(), devices=2)


def test_refusals():
    with pytest.raises(ValueError, match="structure='block' needs calibration data: take OneShotPruning"):
        Pruning(0.5, structure="block")
    with pytest.raises(ValueError, match=r"several Pruning callbacks \(block, unstructured\)"):
        fit([*remove("block"), Pruning(0.5)])
    with pytest.raises(ValueError, match=r"a share of 0.9 of the 4 blocks"):  # before the first step
        fit([OneShotPruning(0.9, structure="block", begin=3)])


def test_lists_that_keep_almost_no_block_are_named_before_training():
    module = Tokens()
    module.layers = nn.ModuleList(Layer() for _ in range(16))
    with pytest.raises(UserWarning, match=r"a sparsity of 0\.9 leaves 2 of 16 blocks of layers, which may be too few"):
        fit([OneShotPruning(0.9, structure="block", begin=3)], module=module)
    assert not module.losses
