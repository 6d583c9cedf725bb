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
        loads_weights: whether ``--ckpt_path`` may name a file, which ``fit`` is given by this name, and
            ``weights_only``.

    Raises:
        argparse.ArgumentError: if the command line or a config does not fit the signatures it names.
        UsageError: if it fits, but cannot work.
    """

    def __init__(
        self,
        args: list[str],
        callbacks: Sequence[L.Callback],
        fit: Callable[..., object],
        loads_weights: bool = False,
    ) -> None:
        self._fit = fit
        self._loads_weights = loads_weights
        super().__init__(args, callbacks)

    def after_instantiate_classes(self) -> None:
        path = self.config_init["fit"].ckpt_path
        if path is not None and not self._loads_weights:
            raise UsageError("doctor and tune train from the start; leave --ckpt_path out")
        if path == "auto":
            raise UsageError("--ckpt_path auto is for fit; name the file of the weights")
        self._use_optimizer_of_config()

    def fit(
        self,
        model: L.LightningModule,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        **_: object,
    ) -> None:
        """Take the place of the Trainer's fit; LightningCLI calls it."""
        weights = {} if ckpt_path is None else {"ckpt_path": ckpt_path, "weights_only": weights_only}
        self._fit(self.trainer, model, datamodule, **weights)
