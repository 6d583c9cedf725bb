"""Single samples through models in use, in the process of the test, and once for real."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from lightning_accel.tuning import TrialError, tune
from lightning_accel.tuning.latency_recorder import LatencyRecorder
from lightning_accel.tuning.recorder import TrialEnd
from lightning_accel.tuning.serving import NUM_SAMPLES, ServingError, one_by_one, serve_isolated, stage_of
from tests.tuning import foreign_run

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not have many workers|treespec|sync_dist|ModelCheckpoint)")
CONFIG = Path(__file__).parents[2] / "configs/moe_digits.yaml"


def pad(rows):
    return pad_sequence([row for (row,) in rows], batch_first=True)


class Rows(torch.utils.data.Dataset):
    """Rows of 1, 2, 3... numbers."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return (torch.full((index + 1,), float(index)),)


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(30.0)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_collates_each_sample_alone(drop_last):
    loader = DataLoader(Rows(), batch_size=40 if drop_last else 4, collate_fn=pad, drop_last=drop_last)
    found = one_by_one(loader)
    assert [batch.shape for batch in found] == [(1, length) for length in range(1, NUM_SAMPLES + 1)]
    assert loader.batch_sampler.batch_size in (4, 40)


def test_batches_from_elsewhere_are_split():
    assert [one.tolist() for one in one_by_one(DataLoader(Stream(), batch_size=4), 3)] == [[0], [1], [2]]
    batches = [{"x": torch.arange(6.0).reshape(3, 2), "name": list("abc")}] * 2
    for loader in (batches, DataLoader(batches, batch_size=None)):
        found = one_by_one(loader, 5)
        assert [one["name"] for one in found] == [["a"], ["b"], ["c"], ["a"], ["b"]]
        assert found[1]["x"].tolist() == [[2.0, 3.0]]
    with pytest.raises(TypeError, match="give a DataLoader with a batch_size"):
        one_by_one([{"x": torch.zeros(2, 3), "f": object()}])


class Used(L.LightningModule):
    """Count what the Trainer calls; ``collected`` are the outputs of an epoch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9), nn.Linear(4, 2))
        self.collected, self.epochs, self.setups, self.met = [], 0, 0, set()

    def setup(self, stage):
        self.setups += 1

    def forward(self, batch):
        x = batch.pop("x")
        self.met.add((tuple(x.shape), x.count_nonzero().item(), self.training, torch.is_grad_enabled()))
        y = self.net(x)
        x.zero_()  # a step may change its batch
        return y

    def validation_step(self, batch, batch_idx):
        y = batch["y"]
        self.collected.append(self(batch))
        loss = F.cross_entropy(self.collected[-1], y)
        self.log("val_loss", loss)
        self.log_dict({"val_first": loss * 2}, on_epoch=True)

    def on_validation_epoch_end(self):
        self.epochs += 1
        self.collected.clear()


class Data(L.LightningDataModule):
    def __init__(self, num_samples=20):
        super().__init__()
        self.setups = 0
        self.num_samples = num_samples

    def setup(self, stage):
        self.setups += 1
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(self.num_samples, 3, generator=generator)
        self.rows = [{"x": row, "y": torch.tensor(i % 2)} for i, row in enumerate(rows)]

    def loader(self):
        return DataLoader(self.rows, batch_size=5)


class Validated(Data):
    val_dataloader = Data.loader


class Predicted(Validated):
    predict_dataloader = Data.loader


class Enough(Exception):
    pass


class End(L.Callback):
    """End what would go on for ever after some samples."""

    def __init__(self, after):
        self.after = after

    def on_predict_batch_end(self, *_):
        self.after -= 1
        if self.after == 0:
            raise Enough

    on_validation_batch_end = on_predict_batch_end


def serve(folder, data, module=None, end=10**6, callbacks=(), **options):
    torch.manual_seed(0)
    module = module or Used()
    recorder = LatencyRecorder(folder, **options)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_model_summary=False, limit_val_batches=0, callbacks=list(callbacks)
    )
    trainer.callbacks += [recorder, End(end)]
    with pytest.raises(TrialEnd if options else Enough):
        serve_isolated(trainer, module, data, folder)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("data", "stage"), [(Validated(), "validate"), (Predicted(), "predict")])
def test_single_samples_go_through_the_stage_that_has_data(tmp_path, data, stage):
    rounds = 1 + 32 + 1
    module = serve(tmp_path, data, end=rounds * NUM_SAMPLES)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["stage"], facts["planned_steps"], facts["num_children"]) == (stage, None, 1)
    lines = (tmp_path / "steps.csv").read_text().splitlines()
    assert len(lines) >= rounds * NUM_SAMPLES - 1
    times = [float(value) for line in lines for value in line.split(",")[:2]]
    assert times == sorted(times)
    assert module.met == {((1, 3), 3, False, False)}
    assert (module.setups, data.setups) == (1, 1)
    if stage == "validate":
        assert module.epochs == 2  # what a module collects is freed
        assert len(module.collected) == NUM_SAMPLES
    assert not list(tmp_path.rglob("*.ckpt"))


def outputs(folder, data, **options):
    folder.mkdir()
    module = serve(folder, data, with_outputs=True, **options)
    return module, torch.load(folder / "outputs.pt")


def test_outputs_are_what_the_step_returns_or_logs(tmp_path):
    module, found = outputs(tmp_path / "predict", Predicted())
    data = Data()
    data.setup("")
    expected = module.net.eval()(torch.stack([row["x"] for row in data.rows]))[:NUM_SAMPLES].detach()
    torch.testing.assert_close(torch.cat([logits for (logits,) in found]), expected.double())
    _, moved = outputs(tmp_path / "perturbed", Predicted(), perturb=True)
    deviation = max((a - b).abs().max() for (a,), (b,) in zip(found, moved, strict=True))
    assert 0 < deviation < 1e-5
    module, logged = outputs(tmp_path / "validate", Validated())
    losses = F.cross_entropy(expected, torch.arange(NUM_SAMPLES) % 2, reduction="none").double()
    torch.testing.assert_close(torch.stack([loss for loss, _ in logged]), losses)
    torch.testing.assert_close(torch.stack([double for _, double in logged]), 2 * losses)
    assert "log" not in vars(module)


class Silent(Used):
    def validation_step(self, batch, batch_idx):
        self(batch)


class Failing(Used):
    def predict_step(self, batch, batch_idx):
        return self.net(batch["images"])


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        (Used(), Data(), "no data for either: give .* a predict_dataloader .* or a val_dataloader"),
        (Used(), DataLoader(Rows()), "no data for either"),
        (foreign_run.Net(), Validated(), "and the module a validation_step"),
        (Failing(), Predicted(), "predict fails on its first sample: KeyError: 'images'"),
        (Used(), Predicted(0), "a loader of predict_dataloader has no samples"),
        (Silent(), Validated(), "validation_step returns and logs no number or tensor"),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(tmp_path, module, data, message):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_model_summary=False)
    trainer.callbacks += [LatencyRecorder(tmp_path)]
    with pytest.raises((ServingError, ValueError), match=message):
        serve_isolated(trainer, module, data, tmp_path)


def test_loaders_of_the_module_are_found():
    class Own(Used):
        predict_dataloader = Data.loader

    assert stage_of(Own(), None) == "predict"
    assert stage_of(Own(), Validated()) == "predict"
    assert stage_of(Used(), Validated()) == "validate"


@pytest.mark.slow
@pytest.mark.weekly
def test_latency_of_a_function_is_tuned_for_real(tmp_path, command, run_folder):
    """Which changes win depends on the machine; on one that is busy, none may."""
    outcome = tune(foreign_run.serves, 60, tmp_path / "tuned", "latency")
    assert outcome.facts["stage"] == "predict"
    assert 2 < outcome.latency.median_ms < 100  # it sleeps for 2 ms
    assert {"threads=1", "keep_freed_memory"} & set(outcome.alone)
    assert "one sample takes" in (tmp_path / "tuned/report.md").read_text()
    with pytest.raises(TrialError, match="ServingError: latency is that of one sample in predict or validate"):
        tune(foreign_run.works, 60, tmp_path / "without", "latency")


@pytest.mark.slow
@pytest.mark.weekly
def test_latency_of_a_config_has_the_weights_of_its_checkpoint(command, run_folder, tmp_path):
    run = ("--config", str(CONFIG), "--trainer.accelerator", "cpu")
    fit = command("fit", *run, "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2")
    assert fit.status == 0, fit.err
    checkpoint = next(Path(run_folder).rglob("*.ckpt"))
    done = command("tune", *run, "--ckpt_path", str(checkpoint), "--goal", "latency", "--budget", "30s")
    assert done.status == 0, done.err
    report = (run_folder / "tuned/report.md").read_text()
    assert "in `predict`" in report or "in `validate`" in report
    overlay = run_folder / "tuned/tuned.yaml"
    if overlay.exists():
        assert yaml.safe_load(overlay.read_text())["trainer"]
    journal = (run_folder / "tuned/journal.jsonl").read_text().splitlines()
    assert str(checkpoint) in json.loads(journal[0])["identity"]["files"]
    done = command("tune", *run, "--ckpt_path", str(tmp_path / "none.ckpt"), "--goal", "latency", "--output", "no")
    assert done.status == 2
    assert "none.ckpt" in done.err
