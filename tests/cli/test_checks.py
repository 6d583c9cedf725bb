"""Values that types allow and no run can work with: one message before training starts."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_accel.cli.checks import MonitorCheck, report_unused_schedule, require_valid_values
from lightning_accel.cli.errors import UsageError

SHORT = [
    "--trainer.accelerator=cpu", "--trainer.max_epochs=2", "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1", "--trainer.enable_progress_bar=false", "--trainer.log_every_n_steps=1",
]  # fmt: skip
OURS = ["fit", *SHORT, "--model=MoEClassifier", "--data=DigitsDataModule", "--optimizer=AdamW"]
CHECKPOINT = "--trainer.callbacks+=ModelCheckpoint"


def options(section: str, **given: object) -> Namespace:
    return Namespace(**{section: Namespace(class_path="a.B", init_args=Namespace(**given))})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (options("optimizer", lr=math.nan), r"optimizer\.lr: expected a finite number; got nan"),
        (options("optimizer", weight_decay=math.inf), r"optimizer\.weight_decay: expected a finite number; got inf"),
        (options("optimizer", lr=2**62), r"optimizer\.lr: expected a number from 0 to 1e\+06; got 4\.6"),
        (
            options("lr_scheduler", max_lr=[0.1, 1e30]),
            r"lr_scheduler\.max_lr\[1\]: expected a number from 0 to 1e\+06; got 1e\+30",
        ),
        (options("model", fine_tuning={"lr": 2**62}), r"model\.fine_tuning\.lr: expected a number from 0 to 1e\+06"),
        (
            options("model", gate=Namespace(class_path="a.G", init_args=Namespace(bias_update_rate=math.inf))),
            r"model\.gate\.bias_update_rate: expected a finite number; got inf",
        ),
        (options("lr_scheduler", max_lr=-0.5), r"max_lr: expected a number from 0 to 1e\+06; got -0\.5"),
        (
            options("model", experts={"balance_weight": 1e30}),
            r"experts.balance_weight: expected a number from 0 to 1e\+06",
        ),
        (options("model", stages=[{"lr": -(10**9)}]), r"model\.stages\[0\]\.lr: expected a number from 0 to 1e\+06"),
        (options("optimizer", momentum=1e9), r"momentum: expected a number from 0 to 1e\+06"),
        (options("lr_scheduler", gamma=1e20), r"gamma: expected a number from 0 to 1e\+06"),
        (options("lr_scheduler", step_size=0), r"step_size: expected more than 0; got 0"),
        (Namespace(trainer=Namespace(accumulate_grad_batches=0)), r"accumulate_grad_batches: expected more than 0"),
        (Namespace(trainer=Namespace(val_check_interval=0.0)), r"val_check_interval: expected more than 0"),
        (Namespace(trainer=Namespace(check_val_every_n_epoch=0)), r"check_val_every_n_epoch: expected more than 0"),
        (Namespace(trainer=Namespace(num_sanity_val_steps=-7)), r"num_sanity_val_steps: expected -1 or more; got -7"),
        (options("lr_scheduler", patience=-2), r"lr_scheduler\.patience: expected 0 or more; got -2"),
        (Namespace(trainer=Namespace(gradient_clip_val=-1.0)), r"gradient_clip_val: expected 0, .* or more; got -1"),
        (Namespace(trainer=Namespace(log_every_n_steps=-5)), r"log_every_n_steps: expected 0, .* or more; got -5"),
        (Namespace(trainer=Namespace(strategy="accel_pipelin")), r"'accel_pipelin'; did you mean 'accel_pipeline'\?"),
    ],
)
def test_nonsense_is_refused(config, said):
    with pytest.raises(UsageError, match=said):
        require_valid_values(config)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "DDP", "accel_fsdp2", None, Namespace(class_path="a.B")])
def test_sense_is_accepted(strategy):
    trainer = Namespace(strategy=strategy, log_every_n_steps=0, max_steps=-1, gradient_clip_val=None)
    require_valid_values(Namespace(trainer=trainer, optimizer=None, model=Namespace(class_path="a.B")))
    require_valid_values(options("optimizer", lr=10.0, betas=[0.9, 0.99], fused=True, patience=2**62))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([CHECKPOINT, "--trainer.callbacks.monitor=val/los"], "monitors 'val/los'.*; did you mean 'val/loss'"),
        ([CHECKPOINT, "--trainer.callbacks.monitor=val_x"], r"monitors 'val_x'.*\nIt logs: val/accuracy, val/loss"),
        (
            ["--trainer.callbacks+=lightning.pytorch.callbacks.EarlyStopping", "--trainer.callbacks.monitor=train/los"],
            "conditioned on metric `train/los` which is not available",  # seen when the first epoch has ended
        ),
        (["--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=val/los"], "Plateau monitors 'val/los'"),
        (
            ["--trainer.callbacks+=Quantization", "--trainer.callbacks.mode=qat", "--trainer.callbacks.begin=100000"],
            "begin=100000 leaves none of the run's",
        ),
    ],
)  # fmt: skip
def test_what_shows_when_training_starts_is_one_message(command, arguments, said):
    result = command(*OURS, *arguments)
    assert result.status in (1, 2)
    assert result.err.startswith("lightning-accel: error: ")
    assert "Traceback" not in result.err
    assert re.search(said, result.err, re.DOTALL), result.err


@pytest.mark.parametrize("asker", ["ReduceLROnPlateau", "EarlyStopping"])
@pytest.mark.parametrize(
    ("monitor", "is_refused"),
    [
        ("train/accuracy", False),  # near val/accuracy, and logged by training
        ("train_loss", False),
        ("loss", False),
        ("val/accuracy", False),
        ("val/acc", True),
        ("vl/accuracy", True),
        ("vall/loss", True),
    ],
)
def test_figures_of_training_may_be_monitored(asker, monitor, is_refused):
    plateau = asker == "ReduceLROnPlateau"
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1)
    config = LRSchedulerConfig(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), reduce_on_plateau=True)
    config.monitor = monitor
    trainer = SimpleNamespace(
        callback_metrics={"val/accuracy": 0.5, "val/loss": 1.0},
        callbacks=[] if plateau else [EarlyStopping(monitor)],
        lr_scheduler_configs=[config] if plateau else [],
    )
    if is_refused:
        with pytest.raises(UsageError, match=f"{asker} monitors '{monitor}', which validation does not log"):
            MonitorCheck().on_sanity_check_end(trainer, None)
    else:
        MonitorCheck().on_sanity_check_end(trainer, None)


@pytest.mark.parametrize(
    ("total", "steps", "is_told"), [(100, 6, True), (100, 95, False), (100, math.inf, False), (100, -1, False)]
)
def test_a_schedule_longer_than_the_run_is_told(caplog, total, steps, is_told):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 1, total_steps=total),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total),
        torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=total),
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
    ]
    with caplog.at_level("INFO"):
        for scheduler in schedulers:
            report_unused_schedule(scheduler, steps, "step")
    assert caplog.text.count("goes through the first 6 % of its schedule alone") == 3 * is_told


@pytest.mark.slow
def test_no_checkpoint_is_the_best_where_the_monitored_figure_diverges(command, run_folder):
    diverges = [
        "--optimizer=SGD",
        "--optimizer.lr=1e6",
        "--optimizer.weight_decay=1e6",
        "--trainer.limit_train_batches=9",
    ]
    monitors = "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {monitor: val/loss}}"
    result = command("fit", *SHORT, "--model=Classifier", "--data=DigitsDataModule", *diverges, monitors)
    assert result.status == 0
    assert re.search(r"val/loss was nan or infinite in every checkpoint.*epoch=\d\S* is one of them", result.log)
    assert "best checkpoint" not in result.log
