"""fit --ckpt_path auto, in one process; restarts by torchrun are in tests/test_launch.py."""

from pathlib import Path

import pytest
import torch

from tests.cli.test_runs import OWN, QUIET

AUTO = ["fit", *QUIET, *OWN, "--ckpt_path=auto"]


@pytest.mark.usefixtures("own")
def test_begins_goes_on_and_stays_in_one_folder(command, run_folder):
    first = command(*AUTO, "--trainer.max_epochs=2")
    assert first.status == 0, first.err
    assert "no checkpoint yet, a new run begins" in first.log
    checkpoints = run_folder / "lightning_logs/version_0/checkpoints"
    (checkpoints / "epoch=9-step=999.ckpt").write_bytes(b"PK half of one")
    second = command(*AUTO, "--trainer.max_epochs=4")
    assert second.status == 0, second.err
    assert "auto: going on from lightning_logs/version_0/checkpoints/epoch=1-step=8.ckpt" in second.log.replace(
        f"{run_folder}/", ""
    )
    assert (checkpoints / "epoch=3-step=16.ckpt").is_file()
    assert [path.name for path in (run_folder / "lightning_logs").iterdir()] == ["version_0"]


@pytest.mark.usefixtures("own")
def test_auto_is_for_fit(command):
    result = command("test", *QUIET, *OWN, "--ckpt_path=auto")
    assert result.status == 2
    assert "--ckpt_path auto is for fit; give test a file, best or last" in result.err


PRUNED = ["--model=Classifier", "--model.in_features=1", "--model.channels=[6, 9]", "--model.hidden_dims=[5]"]
PRUNING = [
    "--trainer.callbacks+={class_path: Pruning, init_args: {target: 0.5, structure: channel, begin: 1, end: 3}}",
    "--trainer.callbacks+={class_path: Distillation, init_args: {teacher: dense}}",  # a copy of the whole model
    "--trainer.callbacks+=ExactResume",
    "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {filename: kept}}",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
]


def test_a_run_whose_channels_are_removed_goes_on_as_if_never_stopped(command, run_folder):
    fit = ["fit", *QUIET, "--data=DigitsDataModule", "--data.num_workers=0", *PRUNING]
    kept = Path("lightning_logs/version_0/checkpoints/kept.ckpt")

    def weights(root, *runs):
        for model, more in runs:
            result = command(*fit, *model, f"--trainer.default_root_dir={root}", *more)
            assert result.status == 0, result.err
        return torch.load(run_folder / root / kept, weights_only=True)["state_dict"]

    whole = weights("whole", (PRUNED, ["--trainer.max_epochs=4"]))
    first = (PRUNED, ["--trainer.max_epochs=2", "--ckpt_path=auto"])
    resumed = weights("auto", first, (PRUNED, ["--trainer.max_epochs=4", "--ckpt_path=auto"]))
    assert whole["network.0.weight"].shape == (3, 1, 3, 3)
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
    file = f"--ckpt_path={run_folder / 'auto' / kept}"
    other = command(*fit, *PRUNED, "--model.channels=[7, 9]", file, "--trainer.max_epochs=5")
    assert (other.status, "channels: [6, 9] in the checkpoint, [7, 9] in the model" in other.err) == (2, True)
    result = command(*fit, *PRUNED, file, "--trainer.max_epochs=5")
    assert result.status == 0, result.err
