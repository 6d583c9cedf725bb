"""fit --ckpt_path auto, in one process; restarts by torchrun are in tests/test_launch.py."""

import pytest

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
