import copy
from functools import partial

import lightning as L
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.figure import Figure
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_accel import MixtureOfExperts, MoEClassifier, TopKGate
from lightning_accel.callbacks import ExpertLoadMonitor
from lightning_accel.callbacks.monitors.expert_load import draw_load
from lightning_accel.models import Experts

SHAPE = 6, 5  # features, experts


class Foreign(L.LightningModule):
    """A module that knows nothing of the callback, with two mixtures, one of them recomputed in the backward pass."""

    def __init__(self, update_rate=0.01):
        super().__init__()
        gate = partial(TopKGate, bias_update_rate=update_rate)
        self.first = MixtureOfExperts(SHAPE[0], 4, SHAPE[1], gate=gate)
        self.second = nn.ModuleDict({"inner": MixtureOfExperts(SHAPE[0], 4, 3)})

    def training_step(self, batch, batch_idx):
        features, report = checkpoint(self._first, batch, use_reentrant=False)
        features, other = self.second["inner"](batch + features)
        return F.mse_loss(features, batch) + 0.1 * (report.balance_loss + other.balance_loss)

    def _first(self, batch):
        features, report = self.first(batch)
        return features.sin(), report  # keeps its input, so all of this is run again

    def validation_step(self, batch, batch_idx):
        self.first(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows():
    return torch.randn(24, SHAPE[0], generator=torch.Generator().manual_seed(1))


def fit(module, callback, batch_size=4, micro_batches=1, **kwargs):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {**dict.fromkeys(off, False), "max_epochs": 2, "log_every_n_steps": 1, **kwargs}
    trainer = L.Trainer(
        accelerator="cpu", devices=1, callbacks=callback, accumulate_grad_batches=micro_batches, **options
    )
    trainer.fit(module, DataLoader(rows(), batch_size), DataLoader(rows(), 8))
    return trainer


@pytest.fixture
def empty_pictures(monkeypatch):
    """Nothing is in the pictures, which take most of a run's time."""
    monkeypatch.setattr("lightning_accel.callbacks.monitors.expert_load.draw_load", lambda *_: Figure())


@pytest.mark.slow
@pytest.mark.usefixtures("empty_pictures")
def test_counts_are_those_of_training_once(tmp_path):
    module, callback = Foreign(), ExpertLoadMonitor()
    trainer = fit(module, callback, default_root_dir=tmp_path)
    assert callback.steps == list(range(1, 13))
    assert all(float(load.sum()) == pytest.approx(1) for loads in callback.loads for load in loads)
    assert module.first.gate.expert_slots.sum() == 4 * 2  # of the last step: its rows, twice, and neither validation's
    assert set(trainer.logged_metrics) == {
        "train/load_entropy", "train/max_violation", "train/dropped_fraction", "train/gate_confidence",
    }  # fmt: skip
    assert not module.first._forward_hooks


@pytest.mark.slow
@pytest.mark.usefixtures("empty_pictures")
def test_micro_batches_move_the_gates_as_one_batch_does(tmp_path):
    results = []
    for batch_size, micro_batches in ((8, 1), (2, 4)):
        torch.manual_seed(0)
        module = Foreign()
        fit(module, ExpertLoadMonitor(), batch_size, micro_batches, default_root_dir=tmp_path)
        results.append(module.state_dict())
    torch.testing.assert_close(*results)
    assert results[0]["first.gate.bias_steps"].any()


@pytest.mark.slow
def test_picture_lies_in_the_run_folder_and_in_tensorboard(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    drawn = []
    logger.experiment.add_figure = lambda tag, figure, step: drawn.append((tag, step))
    fit(Foreign(), ExpertLoadMonitor(), logger=logger)
    assert (tmp_path / "lightning_logs" / "version_0" / "figures" / "expert_load.png").stat().st_size > 1000
    assert drawn[-1] == ("expert_load", 12)


@pytest.mark.usefixtures("empty_pictures")
def test_own_modules_are_watched_too(tmp_path):
    model, callback = (
        MoEClassifier(6, 3, dim=8, experts=Experts(4, hidden_dim=8)),
        ExpertLoadMonitor("load.png"),
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=1, callbacks=callback, max_epochs=2, logger=CSVLogger(tmp_path), log_every_n_steps=3,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    batches = [(rows()[i : i + 4], torch.tensor([0, 1, 2, 0])) for i in range(0, 24, 4)]
    trainer.fit(model, DataLoader(batches, batch_size=None), DataLoader(batches, batch_size=None))
    assert callback.steps == [3, 6, 9, 12]
    torch.testing.assert_close(callback.loads[-1][0].double(), model.expert_load.last_step[0].load)
    assert (tmp_path / "lightning_logs" / "version_0" / "load.png").exists()


@pytest.mark.usefixtures("empty_pictures")
def test_history_survives_a_checkpoint(tmp_path):
    callback = ExpertLoadMonitor()
    trainer = fit(Foreign(), callback, default_root_dir=tmp_path)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    again = ExpertLoadMonitor()
    again.load_state_dict(content["callbacks"]["ExpertLoadMonitor"])
    assert again.steps == callback.steps
    torch.testing.assert_close(again.loads, callback.loads)


def test_a_long_history_is_thinned_to_means():
    callback = ExpertLoadMonitor()
    for step in range(1, 402):
        load = torch.tensor([step / 1000, 0.0, 1 - step / 1000])
        callback._append(step, [load])
    assert len(callback.steps) == 200
    assert callback.steps[:2] == [2, 4]
    assert float(callback.loads[0][0][0]) == pytest.approx(0.0015)


def test_colours_are_equal_shares():
    figure = draw_load([1, 2], [[torch.tensor([0.5, 0.5])], [torch.tensor([0.75, 0.25])]], ["mixture"])
    (image,) = figure.axes[0].images
    assert image.get_array().tolist() == [[1.0, 1.5], [1.0, 0.5]]
    assert image.get_clim() == (0, 2)
    assert image.norm(1.0) == 0.5  # neutral


def test_no_load_is_beyond_the_colours_and_starving_experts_stand_out():
    loads = [[torch.tensor([0.0, 0.02, 0.08, 0.9]), torch.full((20,), 0.05)], [torch.full((4,), 0.25)] * 2]
    loads[1][1] = torch.full((20,), 0.05)
    figure = draw_load([10, 20], loads, ["first", "second"])
    first, second, bar = figure.axes
    (image,) = first.images
    places = image.norm(torch.tensor([0.0, 0.2, 0.5, 1.0, 2.0, 3.6]).numpy())
    assert (places[0], places[3], places[5]) == (0, 0.5, pytest.approx(1))
    assert (places[1:] - places[:-1] > 0.09).all()
    assert image.get_clim() == second.images[0].get_clim() == (0, pytest.approx(3.6))
    assert bar.get_ylim() == (0, pytest.approx(3.6))
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0", "0.5", "1", "2"]
    assert first.get_yticks().tolist() == [0, 1, 2, 3]  # each expert has its number, if there is room
    assert second.get_yticks().tolist() == list(range(0, 20, 2))
    assert first.get_title() == "first, loads at step 20: 1.00 to 1.00"
    assert (first.get_ylabel(), second.get_xlabel()) == ("expert", "optimizer step")
    assert bar.get_ylabel() == "load, in equal shares"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Lightning's own, which pytest.warns raises anew
@pytest.mark.usefixtures("empty_pictures")
def test_collapse_is_told(tmp_path):
    module = Foreign(update_rate=0.0)
    module.first.gate.weight.data = torch.tensor([[9.0], [8.0], [-1.0], [-2.0], [-3.0]]) * torch.ones(1, 6)
    module.training_step = lambda batch, batch_idx: sum(
        layer(batch.abs().repeat(30, 1)).features.mean() for layer in (module.first, module.second["inner"])
    )
    with pytest.warns(UserWarning, match="gate 0 has collapsed: 3 of its 5 experts"):
        fit(module, ExpertLoadMonitor(), batch_size=24, max_epochs=1, default_root_dir=tmp_path)


@pytest.mark.usefixtures("empty_pictures")
def test_a_run_that_fails_leaves_no_hook(tmp_path):
    module = Foreign()
    module.validation_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(module, ExpertLoadMonitor(), default_root_dir=tmp_path)
    assert not module.first._forward_hooks


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.usefixtures("empty_pictures")
def test_a_step_is_remembered_once_and_logged_where_the_loggers_record(tmp_path, micro_batches):
    callback, logger = ExpertLoadMonitor(), CSVLogger(tmp_path)
    fit(Foreign(), callback, 24 // 6, micro_batches, logger=logger, log_every_n_steps=3, max_epochs=2 * micro_batches)
    assert callback.steps == [3, 6, 9, 12]
    logged = pd.read_csv(f"{logger.log_dir}/metrics.csv")
    assert logged.dropna(subset="train/max_violation")["step"].tolist() == [2, 5, 8, 11]


@pytest.mark.usefixtures("empty_pictures")
def test_a_frozen_mixture_does_not_stop_the_others(tmp_path):
    class WithTeacher(Foreign):
        def __init__(self):
            super().__init__()
            self.teacher = copy.deepcopy(self.first).requires_grad_(False)

        def on_train_batch_start(self, *_):
            self.teacher.eval()

        def training_step(self, batch, batch_idx):
            self.teacher(batch)
            return super().training_step(batch, batch_idx)

    module, callback = WithTeacher(), ExpertLoadMonitor()
    fit(module, callback, default_root_dir=tmp_path)
    assert module.first.gate.expert_slots.sum() == 8
    assert module.teacher.gate.expert_slots.tolist() == [1] * 5
    assert len(callback.loads[-1]) == len(callback.names) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("empty_pictures")
def test_mixtures_that_the_module_does_not_watch_are_watched(tmp_path):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixture = MixtureOfExperts(6, 4, 3, gate=partial(TopKGate, bias_update_rate=0.1))

        def forward(self, x):
            return self.mixture(x).features

    model, callback = (
        MoEClassifier(num_classes=3, dim=6, experts=Experts(4, hidden_dim=8), encoder=Encoder()),
        ExpertLoadMonitor(),
    )
    batches = [(rows()[i : i + 4], torch.tensor([0, 1, 2, 0])) for i in range(0, 24, 4)]
    trainer = L.Trainer(
        accelerator="cpu", devices=1, callbacks=callback, max_epochs=1, log_every_n_steps=2, default_root_dir=tmp_path,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(batches, batch_size=None), DataLoader(batches, batch_size=None))
    assert callback.names == ["mixture", "encoder.mixture"]
    assert [len(load) for load in callback.loads[-1]] == [4, 3]
    assert model.encoder.mixture.gate.expert_slots.sum() == 8
    assert model.mixture.gate.expert_slots.sum() == 8


@pytest.mark.usefixtures("empty_pictures")
def test_a_backward_pass_that_failed_leaves_no_trace_in_the_next_fit(tmp_path):
    callback, failing = ExpertLoadMonitor(), Foreign()
    failing.backward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(failing, callback, default_root_dir=tmp_path)
    module = Foreign()
    fit(module, callback, max_epochs=1, limit_train_batches=1, default_root_dir=tmp_path)
    assert module.first.gate.expert_slots.sum() == 4 * 2


@pytest.mark.slow
@pytest.mark.usefixtures("empty_pictures")
def test_another_fit_starts_anew(tmp_path):
    callback = ExpertLoadMonitor()
    for _ in range(2):
        fit(Foreign(), callback, default_root_dir=tmp_path)
        assert callback.steps == list(range(1, 13))


@pytest.mark.usefixtures("empty_pictures")
def test_module_without_mixtures_is_refused():
    class Plain(Foreign):
        def __init__(self):
            L.LightningModule.__init__(self)
            self.layer = nn.Linear(2, 2)

    with pytest.raises(TypeError, match="ExpertLoadMonitor found no MixtureOfExperts in Plain"):
        fit(Plain(), ExpertLoadMonitor())
