"""Whatever moment a run is stopped in, the resumed one ends with the weights, figures and files of the whole one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score

from lightning_accel.callbacks import ExactResume, RestoringEarlyStopping, SaveOnSignal
from tests.ranks import run_ranks
from tests.resumption import Killed, StopAfterWriting, StopAt, assert_same_end, ended, newest, run_until_stopped

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* not empty")
CLOCKS = ("/seconds", "/ExactResume/kept")  # times, and names of files that one kill in the middle of a save leaves out


class Logging(L.LightningModule):
    """Logs in every way there is, and draws dropout."""

    def __init__(self, scheduler):
        super().__init__()
        self.scheduler = scheduler
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.figures = MetricCollection([BinaryAccuracy(), BinaryF1Score()], prefix="train/")
        self.val_loss = MeanMetric()
        self.by_hand = MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        score = self.net(x).squeeze(1)
        loss = (score - y).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train/mean", score.mean(), on_step=False, on_epoch=True, sync_dist=True)
        self.log("train/largest", score.max(), on_step=False, on_epoch=True, reduce_fx=max, sync_dist=True)
        self.log("train/count", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.figures(score.sigmoid(), y.long())
        self.log_dict(self.figures, on_step=True, on_epoch=True)
        self.by_hand.update(score)
        if batch_idx == 0:  # and no more in this epoch
            self.log("train/first", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.log("train/by_hand", self.by_hand.compute(), sync_dist=True)
        self.by_hand.reset()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.net(x).squeeze(1) - y).square().mean()
        self.log("val/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.val_loss.update(loss)
        self.log("val/metric", self.val_loss)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        if self.scheduler == "cycle":
            steps = int(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        monitor = {"plateau val": "val/loss", "plateau train": "train/loss"}[self.scheduler]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": monitor}}


class StopAfterBatch(L.Callback):
    """Save at the start of the ``number``-th batch (from 1), and kill the run."""

    def __init__(self, number, folder):
        self.left, self.folder = number, folder

    def on_train_batch_start(self, trainer, *_):
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint(self.folder / "middle.ckpt")
            raise Killed


class AsUnderAuto(L.Callback):
    """Leave the checkpoint that the run came from to its ModelCheckpoint, as ``fit --ckpt_path auto`` does."""

    def on_train_start(self, trainer, pl_module):
        trainer.ckpt_path = None


def loader(count, batch_size, **options):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).float()), batch_size=batch_size, **options)


def fit(folder, scheduler="cycle", accumulated=1, stop=(), disk=None, resume=None, more=list, **options):
    """Five batches an epoch of each process, the last of them smaller."""
    L.seed_everything(3 if resume is None else 4, verbose=False)
    trainer = L.Trainer(
        **{"max_epochs": 3, "devices": 1} | options, accelerator="cpu", accumulate_grad_batches=accumulated,
        log_every_n_steps=2, logger=CSVLogger(folder, name="", version=f"part_{len(list(folder.glob('part_*')))}"),
        enable_progress_bar=False, enable_model_summary=False, plugins=[disk or StopAfterWriting()],
        callbacks=[
            *stop, *more(), SaveOnSignal(),
            RestoringEarlyStopping("train/loss", patience=9, check_on_train_epoch_end=True),
            ExactResume(), RestoringEarlyStopping("val/loss", patience=9, restore_best=False), AsUnderAuto(),
            ModelCheckpoint(folder, "best", monitor="val/loss"),
            ModelCheckpoint(folder, "validated-{step}", "val/metric", save_on_train_epoch_end=False),
            ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_last=True),
        ],
    )  # fmt: skip
    rows = 18 * trainer.world_size
    trainer.fit(Logging(scheduler), loader(rows, 4, shuffle=True), loader(rows // 3, 4), ckpt_path=resume)
    return trainer


def check(folder, *stops, whole=None, **options):
    """Stop a run as each of ``stops`` says, go on from its newest checkpoint, and compare it with one not stopped."""
    if whole is None:
        whole = whole_run(folder / "whole", **options)
    parts = folder / "parts"
    parts.mkdir(exist_ok=True)
    for stop in stops:
        run_until_stopped(lambda stop=stop: fit(parts, resume=newest(parts), **stop, **options))
    assert_same_end(ended(fit(parts, resume=newest(parts), **options), parts), whole, CLOCKS)


def whole_run(folder, **options):
    folder.mkdir(exist_ok=True)
    return ended(fit(folder, **options), folder)


MOMENTS = {
    "within an epoch": lambda: {"stop": [StopAt("on_train_batch_start", 9)]},
    "before validation": lambda: {"stop": [StopAt("on_validation_start", 2)]},
    "in validation": lambda: {"stop": [StopAt("on_validation_batch_end", 3)]},
    "after validation": lambda: {"stop": [StopAt("on_train_epoch_end", 2)]},
    "before the next epoch": lambda: {"stop": [StopAt("on_train_epoch_start", 3)]},
    "signal in the last batch": lambda: {"stop": [StopAt("on_train_batch_start", 10, sends=signal.SIGTERM)]},
}
WAYS = [(scheduler, accumulated) for scheduler in ("cycle", "plateau val", "plateau train") for accumulated in (1, 2)]
PAIRS = [
    ("plateau val", 1, "before validation"),
    ("cycle", 2, "in validation"),
    ("cycle", 1, "before the next epoch"),
    ("plateau train", 2, "signal in the last batch"),
]
CASES = [(*way, moment) for way in WAYS for moment in MOMENTS]


@pytest.mark.sampled(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "accumulated", "moment"),
    [pytest.param(*case, marks=[] if case in PAIRS else [pytest.mark.slow, pytest.mark.weekly]) for case in CASES],
)
def test_a_stopped_run_ends_as_the_whole_one(tmp_path, scheduler, accumulated, moment):
    check(tmp_path, MOMENTS[moment](), scheduler=scheduler, accumulated=accumulated)


def change_accumulation():
    return [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]


def average_weights():
    return [StochasticWeightAveraging(0.1, swa_epoch_start=2, annealing_epochs=5, annealing_strategy="linear")]


@pytest.mark.slow
@pytest.mark.parametrize("more", [pytest.param(change_accumulation, marks=pytest.mark.slow), average_weights])
def test_callbacks_that_are_set_up_at_the_start_of_an_epoch(tmp_path, more):
    moments = [MOMENTS["within an epoch"](), {"stop": [StopAt("on_train_batch_start", 6)]}]  # of epochs 1 and 2
    check(tmp_path, *moments, scheduler="plateau val", more=more)


def test_the_epoch_of_batch_norms_is_not_entered_in_its_midst(tmp_path):
    def run(resume=None, stop=()):
        module = Logging("plateau val")
        module.net.insert(1, nn.BatchNorm1d(4))
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", devices=1, logger=False, limit_val_batches=0, enable_progress_bar=False,
            callbacks=[*stop, *average_weights(), ExactResume(), ModelCheckpoint(tmp_path, every_n_train_steps=2)],
            enable_model_summary=False,
        )  # fmt: skip
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.02)
        trainer.fit(module, loader(18, 4), ckpt_path=resume)
        return trainer

    run_until_stopped(lambda: run(stop=[StopAfterBatch(13, tmp_path)]))
    with pytest.raises(ValueError, match="statistics of batch norms after training, which"):
        run(tmp_path / "middle.ckpt")


@pytest.mark.slow
def test_a_run_that_is_stopped_again_and_again(tmp_path):
    moments = [{"disk": StopAfterWriting(3)}, {"disk": StopAfterWriting(2)}, MOMENTS["within an epoch"]()]
    check(tmp_path, *moments, scheduler="plateau train")


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"scheduler": "plateau val", "accumulated": 2}, marks=pytest.mark.weekly),
        pytest.param({"scheduler": "plateau train", "val_check_interval": 2}, marks=pytest.mark.weekly),
        pytest.param({"scheduler": "plateau val", "max_steps": 13, "max_epochs": -1}, marks=pytest.mark.weekly),
        pytest.param({"check_val_every_n_epoch": 2, "max_epochs": 4}, marks=pytest.mark.weekly),
    ],
)
def test_a_kill_after_any_checkpoint(tmp_path, options):
    disk = StopAfterWriting()
    whole = whole_run(tmp_path / "whole", disk=disk, **options)
    assert disk.written > 10
    for number in range(1, disk.written):  # the last is that of the comparison
        folder = tmp_path / str(number)
        folder.mkdir()
        check(folder, {"disk": StopAfterWriting(number)}, whole=whole, **options)


@pytest.mark.slow
def test_a_run_that_is_stopped_before_it_writes_its_last_file(tmp_path):
    """What is left is no validation, so that the counters of the last one stay, whatever the sanity check counts."""
    written = StopAfterWriting()
    whole = whole_run(tmp_path / "whole", disk=written, scheduler="plateau val", accumulated=2)
    last = {"disk": StopAfterWriting(written.written - 1)}  # one more is that of the comparison
    check(tmp_path, last, whole=whole, scheduler="plateau val", accumulated=2)


def check_ranks(rank, folder):
    options = {"devices": 2, "strategy": "ddp", "scheduler": "plateau train"}
    for moment in ("within an epoch", "before validation", "after validation"):
        (folder / moment).mkdir(exist_ok=True)
        check(folder / moment, MOMENTS[moment](), **options)


@pytest.mark.weekly
@pytest.mark.slow
def test_figures_of_several_processes(tmp_path):
    run_ranks(check_ranks, tmp_path)


def run_in_a_process(folder: Path, stop: str) -> int:
    program = (
        "import signal; from pathlib import Path; from tests.callbacks.resume.test_metrics import *; "
        f"folder = Path({str(folder)!r}); fit(folder, 'plateau val', stop=[{stop}], resume=newest(folder))"
    )
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, check=False, stderr=subprocess.DEVNULL
    ).returncode


@pytest.mark.slow
def test_real_signals(tmp_path):
    whole = whole_run(tmp_path / "whole", scheduler="plateau val")
    parts = tmp_path / "parts"
    parts.mkdir()
    assert run_in_a_process(parts, "StopAt('on_validation_start', 1, signal.SIGKILL)") == -signal.SIGKILL
    assert run_in_a_process(parts, "StopAt('on_train_batch_start', 5, signal.SIGTERM)") == 128 + signal.SIGTERM
    check(tmp_path, whole=whole, scheduler="plateau val")


@pytest.mark.slow
def test_a_kill_while_columns_are_added_leaves_the_rows(tmp_path):
    """A CSVLogger writes its file anew when a figure is logged for the first time, as those of validation are."""
    program = f"""
import os
from pathlib import Path
import lightning as L
from lightning.pytorch.loggers import CSVLogger
from tests.callbacks.resume.test_metrics import Logging
from lightning_accel.callbacks import ExactResume
logger = CSVLogger({str(tmp_path)!r})
callback = ExactResume()
trainer = L.Trainer(logger=logger, callbacks=[callback], accelerator="cpu", enable_checkpointing=False)
callback.setup(trainer, Logging("plateau val"), "fit")
for step in range(3):
    logger.log_metrics({{"train/loss": 0.5}}, step)
    logger.save()
opened = Path.open
def open_and_die(path, *arguments, **options):
    file = opened(path, *arguments, **options)
    if "w" in arguments:
        os._exit(9)
    return file
Path.open = open_and_die
logger.experiment._fs.open = lambda path, mode, **options: open_and_die(Path(path), mode, **options)
logger.log_metrics({{"val/loss": 0.25}}, 3)
logger.save()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 9
    rows = next(tmp_path.rglob("metrics.csv")).read_text().split()
    assert rows == ["step,train/loss", "0,0.5", "1,0.5", "2,0.5"]
