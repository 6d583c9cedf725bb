"""Subcommand ``lightning-accel export``, which writes a file that runs without the model's classes."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_accel.callbacks import Export
from lightning_accel.cli.errors import UsageError
from lightning_accel.compress.export.writing import SUFFIXES, Probabilities, require_exportable


class ExportingTrainer(L.Trainer):
    """Add a method ``export`` to the Trainer."""

    is_exporting = False

    def export(
        self,
        model: L.LightningModule,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        format: Literal["pt2", "onnx"] | None = None,
        output: str | None = None,
        preprocess: bool = False,
        probabilities: bool = False,
        compare: bool = True,
        weights_only: bool | None = None,
    ) -> None:
        """Write the model to a file that runs without its class, and compare the two on validation data.

        Options of an Export callback in the config apply unless they are given here.

        Args:
            model: a model with a ``validation_step``, which shows what is called and on what.
            datamodule: datamodule with validation batches.
            ckpt_path: checkpoint whose weights to export: a file, ``best`` or ``last``.
            format: ``pt2`` for torch.export, or ``onnx``; by default by the suffix of ``output``.
            output: path of the file; by default ``model.pt2`` or ``model.onnx`` in the run folder.
            preprocess: include the datamodule's preprocessing in the file, so that it takes raw data.
            probabilities: return probabilities instead of scores.
            compare: measure the model in bfloat16 and compiled for the report, too, which takes about a minute; else
                the model as it is and the file.
            weights_only: false for a checkpoint that holds objects other than tensors and plain values.
        """
        callbacks: list[L.Callback] = self.callbacks  # type: ignore[attr-defined]  # set by a connector
        exporter = next((one for one in callbacks if isinstance(one, Export)), None)
        if exporter is None:
            callbacks.append(exporter := Export())
        if preprocess:
            exporter.preprocess = "datamodule"
        if probabilities:
            exporter.postprocess = Probabilities()
        exporter.compare = exporter.compare and compare
        exporter.exports_on = {TrainerFn.VALIDATING}
        if format is not None or output is not None:
            exporter.format = format or ("onnx" if str(output).endswith(".onnx") else "pt2")
        if output is not None:
            exporter.filename = str(Path(output).absolute())
        require_output(exporter.format, output)
        self.is_exporting = True
        self.validate_loop.inference_mode = False  # inference tensors cannot be traced
        self.validate(model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=weights_only, verbose=False)
        if exporter.exported is not None:
            path = str(exporter.exported.path)
            alone = (
                f", or run it without lightning_accel by onnxruntime.InferenceSession({path!r})"
                if path.endswith(".onnx")
                else ""
            )
            rank_zero_info(f"load it with lightning_accel.compress.load_compressed({path!r}){alone}")


def require_output(format: str, output: str | None) -> None:
    """Reject an output that cannot be written, before data and model are created.

    Raises:
        UsageError: saying what to change.
    """
    try:
        require_exportable("pt2" if format == "auto" else format)
    except ModuleNotFoundError as error:
        raise UsageError(str(error)) from error
    wanted = SUFFIXES.get(format)
    if output is not None and wanted is not None and Path(output).suffix not in ("", wanted):
        raise UsageError(f"--output {output}: a file of --format {format} ends in {wanted}")


def rebuild_shapes(trainer: L.Trainer, model: L.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Let callbacks that remove parts of a model, such as pruned channels, do so before weights are loaded.

    Such a callback has a method ``rebuild(model, state)``, which takes its state in the checkpoint. If it fails,
    because the checkpoint is of another model, the error is left to the comparison of shapes, whose message names all
    differences.
    """
    for rebuild, state in _rebuilders(trainer, checkpoint):
        with contextlib.suppress(KeyError, ValueError):
            rebuild(model, state)


def rebuilt_skeleton(trainer: L.Trainer, model: L.LightningModule, checkpoint: dict[str, Any]) -> L.LightningModule:
    """Return ``model``, or a copy on the meta device that callbacks have rebuilt to the shapes of ``checkpoint``.

    A resumed fit rebuilds the model itself later, after callbacks such as Distillation have seen the whole model.
    """
    if not _rebuilders(trainer, checkpoint):
        return model
    tensors = [*model.named_parameters(), *model.named_buffers()]
    memo: dict[int, Any] = {id(tensor): _without_data(tensor) for _, tensor in tensors}
    skeleton = copy.deepcopy(model, memo)
    rebuild_shapes(trainer, skeleton, checkpoint)
    return skeleton


def _without_data(tensor: Tensor) -> Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _rebuilders(trainer: L.Trainer, checkpoint: dict[str, Any]) -> list[tuple[Callable[..., None], Any]]:
    states = checkpoint.get("callbacks", {})
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    known = [callback for callback in callbacks if callback.state_key in states and hasattr(callback, "rebuild")]
    return [(callback.rebuild, states[callback.state_key]) for callback in known]
