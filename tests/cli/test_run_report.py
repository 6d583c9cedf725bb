"""The report at the end of a fit of the command line."""

import json
import shlex

import pytest

FIT = (
    "--model=own_module.OwnModule", "--model.width=3", "--data=own_module.OwnData", "--trainer.max_epochs=2",
    "--trainer.log_every_n_steps=1", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false",
    "--trainer.accelerator=cpu", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=my runs",
    "--trainer.logger.name=x",
)  # fmt: skip
KEEPER = ("--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.monitor=val_loss")


def lines_of(out):
    return [shlex.split(line)[1:] for line in out.splitlines() if line.strip().startswith("lightning-accel ")]


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_what_to_type_next_works_as_it_is(command, run_folder):
    done = command("fit", *FIT, *KEEPER)
    assert done.status == 0
    told = json.loads((run_folder / "my runs/x/version_0/run_report.json").read_text())
    lines = lines_of(done.out)
    assert [line[0] for line in lines] == ["test", "predict", "export", "tune"]
    assert [shlex.join(["lightning-accel", *line]) for line in lines] == told["commands"]
    assert told["best"][0]["monitor"] == "val_loss"
    best = told["best"][0]["path"]
    assert {line[-1] for line in lines[:3]} == {best.removeprefix(f"{run_folder}/")}
    for line in lines[:2]:
        again = command(*line)
        assert again.status == 0
        assert "The fit: " not in again.out
    for name, *options in lines:  # these take longer
        assert command("fit" if name == "tune" else name, *options, "--print_config").status == 0


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_an_interrupted_fit_tells_how_to_go_on(command, run_folder, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)  # Lightning ignores further interrupts for good
    own = run_folder / "own_module.py"
    own.write_text(own.read_text() + "\n\nclass Stopped(OwnModule):\n    def on_train_epoch_start(self):\n"
                   "        if self.current_epoch == 1:\n            raise KeyboardInterrupt\n")  # fmt: skip
    done = command("fit", "--model=own_module.Stopped", *FIT[1:])
    assert done.status == 1
    (line,) = lines_of(done.out)
    assert line[:3] == ["fit", "--config", "my runs/x/version_0/config_fit.yaml"]
    again = command(*line, "--model.class_path=own_module.OwnModule")
    assert again.status == 0
    assert "The fit: epochs 1, batches 4," in again.out
    assert lines_of(again.out)[-1][-2:] == ["--ckpt_path", "null"]  # tune trains from the start


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_a_fit_that_is_told_to_stop_goes_on_from_what_was_saved_then(command, run_folder):
    own = run_folder / "own_module.py"
    own.write_text(own.read_text() + "\n\nclass Told(OwnModule):\n    def on_train_batch_start(self, batch, index):\n"
                   "        if self.global_step == 1:\n            signal.raise_signal(signal.SIGTERM)\n"
                   "\nimport signal\n")  # fmt: skip
    done = command("fit", "--model=own_module.Told", *FIT[1:], "--trainer.callbacks=SaveOnSignal")
    assert done.status == 143
    (line,) = lines_of(done.out)
    assert line[-1] == "my runs/x/version_0/checkpoints/signal-step=2.ckpt"


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_it_can_be_switched_off_and_is_not_added_twice(command, run_folder):
    done = command("fit", *FIT, "--run_report=false")
    assert done.status == 0
    assert "The fit: " not in done.out
    done = command("fit", *FIT, "--trainer.callbacks=RunReport")
    assert done.out.count("The fit: ") == 1
    assert lines_of(done.out)
    assert [path.parent.name for path in run_folder.rglob("run_report.json")] == ["version_1"]
