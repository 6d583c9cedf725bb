"""Cost and quality report of a trained model, its plain forms and the original model."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_accel.callbacks.deployment.copies import WholeCopy, run_folder, run_in_first_process
from lightning_accel.callbacks.deployment.deployed import (
    Deployed,
    dry_run,
    evaluate,
    find_deployed,
    reasons_left_out,
    require_deployable,
    require_validation,
)
from lightning_accel.callbacks.deployment.loaders import undistributed
from lightning_accel.callbacks.fit_end import failures_as_warnings
from lightning_accel.compress.calls import Run, device_of, first_line, num_samples, smallest_call
from lightning_accel.compress.report.forms import measure_forms, plain_forms
from lightning_accel.compress.report.macs import count_macs
from lightning_accel.compress.report.progress import Progress
from lightning_accel.compress.report.report import Report, Row, count_parameters, describe_layers, saved_bytes
from lightning_accel.ops.bounds import require_above, require_flags
from lightning_accel.ops.extras import require_module

AT_FIRST = "before training"
VALIDATED = "samples of a validation batch"


class CompressionReport(L.Callback):
    """Measure the trained model at the end of ``fit``; print a table, write a figure and JSON to ``figures/``.

    The rows are the model as trained, compiled, and in bfloat16, each with its latency at batch size 1 and at the
    validation batch size, and with the metrics that ``validation_step`` logs. If training has changed shapes, there is
    a row for the original model too: its latency, which does not depend on the weights, without metrics. A second table
    lists the remaining parameters of each layer. :class:`~lightning_accel.Quantization` and
    :class:`~lightning_accel.Export` report their own results.

    Args:
        module: name of the submodule to measure; by default the one that ``validation_step`` calls.
        compiled: whether to measure compiled forms too, which takes about a minute.
        seconds: measuring time of each form at each batch size.

    Attributes:
        report: the report in the first process after a fit; None if it failed, with a warning.

    Raises:
        TypeError: before training, if there is no ``validation_step``.
        ValueError: before training, if there is no submodule ``module``, no validation data, or ``validation_step``
            calls no module with parameters. Any other failure on a validation batch is raised then, too.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import CompressionReport
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[CompressionReport(compiled=False)])
    """

    def __init__(self, module: str | None = None, *, compiled: bool = True, seconds: float = 0.5) -> None:
        require_above(0, seconds=seconds)
        require_flags(compiled=compiled)
        self.module = module
        self.compiled = compiled
        self.seconds = seconds
        self.report: Report | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        for package in ("matplotlib", "rich"):
            require_module(package)
        self.report = None
        self._copy = WholeCopy(pl_module)
        require_deployable(pl_module, "CompressionReport", self.module)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        require_validation(trainer, "CompressionReport")
        dry_run(trainer, pl_module, self._copy, _try_layers, "report", self.module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
            return
        folder = run_folder(trainer)
        with failures_as_warnings("CompressionReport failed"):
            make = partial(self._copy.make, trainer, pl_module)
            run_in_first_process(trainer, make, lambda made: self._report(trainer, made, folder), "report")

    def _report(self, trainer: L.Trainer, copied: L.LightningModule, folder: Path) -> None:
        self.report = self._measure(trainer, copied)
        self.report.print()
        self.report.save(folder)

    def _measure(self, trainer: L.Trainer, copied: L.LightningModule) -> Report:
        datamodule = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
        loader = undistributed(trainer.val_dataloaders)
        found = find_deployed(copied, loader, self.module, datamodule=datamodule)
        plain = plain_forms(found.module, self.compiled)
        start = shrunk_from(self._copy, found)
        others: dict[str, Run] = {} if start is None else {AT_FIRST: start}
        progress = Progress(rank_zero_info, "compression report")
        rows = measure_forms(found.module, found.inputs[0], plain | others, seconds=self.seconds, progress=progress)
        report = Report("compression", device_of(found.module))
        report.conditions = VALIDATED
        if start is not None:
            report.add(complete_row(rows.pop(AT_FIRST), start, found))
        for name, row in rows.items():
            if not row.note:
                progress(f"validates {name}", if_slow=True)
                run = None if plain[name] is found.module else plain[name]
                row = validated(row, copied, loader, found.name, run, datamodule=datamodule)
            form = plain[name]  # compiled ones have no file
            report.add(row._replace(file_bytes=saved_bytes(form) if isinstance(form, nn.Module) else None))
        report.layers = describe_layers(
            found.module, *smallest_call(found.module, found.inputs[0]), reasons_left_out(trainer, found.name)
        )
        return report


def validated(row: Row, copied: L.LightningModule, loader: Any, name: str, run: Run | None, **options: Any) -> Row:
    """Return the row of a form, ``run``, with its metrics by :func:`evaluate`, or with a note if the form fails.

    Compilers can fail at the size of the last batch, which no call before had.
    """
    try:
        return row._replace(metrics=evaluate(copied, loader, name, run, **options))
    except Exception as error:
        if run is None:  # the model as it is
            raise
        return row._replace(note=f"fails in validation: {first_line(error)}", status="failed")


def shrunk_from(copy: WholeCopy, found: Deployed) -> nn.Module | None:
    """Return the deployed module as it was before training, with other weights; None if its size is the same."""
    start = copy.with_original_shapes().get_submodule(found.name)
    sizes = [count_parameters(one.parameters())[0] for one in (start, found.module)]
    return None if sizes[0] == sizes[1] else start.to(device_of(found.module))


def complete_row(row: Row, start: nn.Module, found: Deployed) -> Row:
    """Return the row of ``start``, what the deployed module was before training, with its sizes, and no metrics."""
    call = smallest_call(start, found.inputs[0])
    return row._replace(
        parameters=count_parameters(start.parameters())[0],
        macs=count_macs(start, *call).total // num_samples(call),
        file_bytes=saved_bytes(start),
    )


def _try_layers(found: Deployed) -> None:
    describe_layers(found.module, *smallest_call(found.module, found.inputs[0]))
