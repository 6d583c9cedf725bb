"""Runs that begin together."""

import pytest
from lightning.pytorch.loggers import CSVLogger

from tests.cli.test_runs import OWN, QUIET


@pytest.mark.usefixtures("own")
def test_runs_that_begin_together_take_folders_of_their_own(command, run_folder, monkeypatch):
    """All see that 0 is free; two other runs make 0 and 1 first."""
    monkeypatch.setattr(CSVLogger, "_get_next_version", lambda self: 0)
    for number in (0, 1):
        (run_folder / f"x/version_{number}").mkdir(parents=True)
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=.", "--trainer.logger.name=x"]
    assert command("fit", *QUIET, *OWN, *logger, "--trainer.max_epochs=1").status == 0
    assert not any([*(run_folder / f"x/version_{number}").iterdir()] for number in (0, 1))
    assert (run_folder / "x/version_2/metrics.csv").is_file()
