"""A run of the command line with another function in place of the Trainer's fit."""

from collections.abc import Callable, Sequence

import lightning as L

from lightning_accel.cli.command import AccelCLI
from lightning_accel.cli.errors import UsageError


class BareRun(AccelCLI):
    """Call a function in place of the fit of a command line; no run folder is made for it.

    Args:
        args: command line, that of ``fit``.
        callbacks: callbacks to add to those of the config.
        fit: called with the Trainer, the module and the datamodule, which may be None.

    Raises:
        argparse.ArgumentError: if the command line or a config does not fit the signatures it names.
        UsageError: if it fits, but cannot work.
    """

    def __init__(
        self,
        args: list[str],
        callbacks: Sequence[L.Callback],
        fit: Callable[[L.Trainer, L.LightningModule, L.LightningDataModule | None], object],
    ) -> None:
        self._fit = fit
        super().__init__(args, callbacks)

    def after_instantiate_classes(self) -> None:
        if self.config_init["fit"].ckpt_path is not None:
            raise UsageError("doctor and tune train from the start; leave --ckpt_path out")
        self._use_optimizer_of_config()

    def fit(self, model: L.LightningModule, datamodule: L.LightningDataModule | None = None, **_: object) -> None:
        """Take the place of the Trainer's fit; LightningCLI calls it."""
        self._fit(self.trainer, model, datamodule)
