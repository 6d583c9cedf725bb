"""A run of the command line that is examined for some seconds in place of its fit."""

import lightning as L

from lightning_accel.cli.command import AccelCLI
from lightning_accel.cli.errors import UsageError
from lightning_accel.diagnosis import Examined, TooShortError, examine


class ExaminedRun(AccelCLI):
    """Examine the fit of a command line; no run folder is made for it.

    Args:
        args: command line, that of ``fit``.
        callbacks: callbacks to add to those of the config.
        seconds: how long to train.

    Raises:
        argparse.ArgumentError: if the command line or a config does not fit the signatures it names.
        UsageError: if it fits, but cannot work.
    """

    def __init__(self, args: list[str], callbacks: list[L.Callback], seconds: float) -> None:
        self.seconds = seconds
        self.examined: Examined | None = None
        super().__init__(args, callbacks)

    def after_instantiate_classes(self) -> None:
        if self.config_init["fit"].ckpt_path is not None:
            raise UsageError("doctor trains from the start; leave --ckpt_path out")
        self._use_optimizer_of_config()

    def fit(self, model: L.LightningModule, datamodule: L.LightningDataModule | None = None, **_: object) -> None:
        """Take the place of the Trainer's fit; LightningCLI calls it."""
        try:
            self.examined = examine(self.trainer, model, datamodule, seconds=self.seconds)
        except TooShortError as error:
            raise UsageError(str(error)) from error
