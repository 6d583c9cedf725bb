"""Quantization of the deployed module, after training or with quantization-aware training."""

import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_accel.callbacks.compression_phase import defer_best_checkpoints
from lightning_accel.callbacks.deployment.copies import WholeCopy, run_folder, run_in_first_process
from lightning_accel.callbacks.deployment.deployed import (
    Deployed,
    calibration_calls,
    dry_run,
    evaluate,
    part_to_name,
    require_deployable,
)
from lightning_accel.callbacks.deployment.export import exported_modules, file_of_quantized
from lightning_accel.callbacks.deployment.integer_training import IntegerTraining
from lightning_accel.callbacks.deployment.loaders import in_random_order, undistributed
from lightning_accel.callbacks.deployment.memory import memory_of
from lightning_accel.callbacks.early_stopping import warn_of_early_end
from lightning_accel.callbacks.fit_end import failures_as_warnings
from lightning_accel.callbacks.resume.random_state import restored_random_state
from lightning_accel.callbacks.trainer_callbacks import callbacks_of, not_logged
from lightning_accel.compress.calls import Inputs, first_line, first_samples, num_samples, smallest_call
from lightning_accel.compress.export.decoding import CachedDecoder, tokens_of
from lightning_accel.compress.export.structure import Flat, Structure, tensors_of
from lightning_accel.compress.quantization.decoding import quantize_decoder
from lightning_accel.compress.quantization.fake_quant import detach
from lightning_accel.compress.quantization.form import CannotConvertError, export, require_same_values
from lightning_accel.compress.quantization.inputs import noise_share
from lightning_accel.compress.quantization.layers import find_layers
from lightning_accel.compress.quantization.onnx import write_float
from lightning_accel.compress.quantization.picking import NothingPickedError, Quantized
from lightning_accel.compress.quantization.quantized import judge, quantize
from lightning_accel.compress.quantization.trial import Backend, Limit, require_form
from lightning_accel.compress.report.latency import speedup
from lightning_accel.compress.report.perplexity import PERPLEXITY, measured_perplexity
from lightning_accel.compress.report.progress import Progress
from lightning_accel.compress.report.report import Report, describe_speedup
from lightning_accel.ops.bounds import if_set, require_above, require_at_least, require_integers
from lightning_accel.ops.names import list_of_names, require_one_of
from lightning_accel.ops.renames import DROPPED_IN, renamed_arguments
from lightning_accel.strategies import PipelineStrategy

_CONDITIONS = (
    "samples of a training batch, in this process; fp32 eager is the model after training, and quantized forms are "
    "compiled or run by ONNX Runtime"
)
_BEGIN = 0.5  # share of the run
_BY_VALIDATION = " validation_step has to log it"
Mode: TypeAlias = Literal["auto", "static", "dynamic", "weight_only", "qat"]


class Quantization(L.Callback):
    """Convert a copy of the model to int8, or to another form that is faster on this machine, and compare the forms.

    At the end of a fit the first process creates the forms of the model that this machine can run (see
    :func:`lightning_accel.compress.quantize`), validates each with the module's own ``validation_step``, measures them
    on one sample and on a training batch (on the whole call if its samples cannot be separated, like the nodes of
    graphs), and picks the fastest at the batch. The trained module stays unchanged. The picked form is in
    ``result``, and the fastest at each batch size in ``result.picks``; a report goes to ``figures/`` in the run folder,
    and :class:`~lightning_accel.Export` writes the file. If no form can be picked, the report and a warning
    give the reasons, and the module is kept in float.

    Beside ``Export(max_length=...)``, which writes a decoder of text, the forms that validation allows are made of that
    decoder, and the fastest at one token after a prompt is picked. Its report, ``decoding``, has tokens per second of
    prompts and of next tokens, file sizes, metrics, and the memory that a process needs for the decoder as it is, the
    picked form and its ties. A further metric, ``perplexity``, is that of the texts that ``validation_step`` calls the
    deployed module with: the exponential of the mean loss, in nats, of a token after those before it in the call.
    Padding and labels of -100 do not count.

    A picture beside the report, ``..._frontier.png``, shows quality against latency, and which forms no other beats.

    With ``mode="qat"`` linear layers and convolutions round their weights and inputs to int8 while they train, from
    ``begin`` on, with the grid of the later static form on this CPU: inputs have 8 bits with VNNI, else 7. No parameter
    is replaced, so that optimizers, checkpoints and strategies see the same ones as ever; ranges are in the callback's
    state, and equal on all processes.

    Args:
        mode: ``auto`` measures all kinds; ``static``, ``dynamic``, ``weight_only``, in 8 bits, and in 4 within
            ``max_drop``; ``qat`` trains for ``static``.
        backend: ``pt2e``, ``torchao``, ``onnxruntime``, ``inductor`` (compiled, no int8), or ``auto`` for any.
        calibrate: number of training samples for calibrating the ranges, and for rounding to 4 bits.
        exclude: layers that stay in float, or modules around them: names or patterns of them (``"head"``,
            ``"blocks.*.norm"``), or classes by name.
        monitor: validation metric that measures the quality of a form; beside ``Export(max_length=...)`` it may be
            ``perplexity``, which need not be logged.
        monitor_mode: ``max`` if higher values are better, ``min`` if lower values are.
        max_drop: how much worse than in float ``monitor`` may become. The layers that harm it most stay in float until
            it is within this limit; a form that stays beyond it is not picked. Only with a limit are weights in 4 bits
            picked.
        module: name of the deployed submodule; by default the one that ``Export`` names, or ``validation_step`` calls.
        begin: begin of ``qat``: optimizer step, or share of the run if a float in [0, 1).
        batch_size: number of samples at which the fastest is picked, that of the calls to come; at most, and by
            default, the training batch.
        seconds: measuring time of each form at each batch size; forms too close to call take up to three times as long.
        device: device to run on: ``cpu``, or ``cuda``, which has ``dynamic`` int8 and float8, and ``weight_only``
            int8 and, within ``max_drop``, int4, of linear layers, with the rest in bfloat16.
        start: old name of ``begin``; as an int, an epoch.

    Raises:
        ValueError: if an option is out of range; before training, if ``exclude`` or ``module`` names nothing, if
            ``Export`` writes another module, if no layer can be quantized, if there is no validation data for
            ``monitor``, or if there are several of these callbacks.
        TypeError: before training, if the module has no ``validation_step``.
        ModuleNotFoundError: before training, if a package of the ``backend`` is missing.

    Attributes:
        result: the picked form, in the first process after a fit; None if there is none.

    Source: ``static`` and ``qat``: Jacob et al. 2018, https://arxiv.org/abs/1712.05877; rounding to 4 bits: Frantar et
    al. 2022, GPTQ, https://arxiv.org/abs/2210.17323.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import Quantization
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[Quantization("static", monitor="val/accuracy", max_drop=0.01)])
    """

    @renamed_arguments(skip="exclude")
    def __init__(
        self,
        mode: Mode = "auto",
        backend: Backend = "auto",
        *,
        calibrate: int = 256,
        exclude: Sequence[str | type[nn.Module]] = (),
        monitor: str | None = None,
        monitor_mode: Literal["max", "min"] = "max",
        max_drop: float | None = None,
        module: str | None = None,
        begin: int | float = _BEGIN,
        batch_size: int | None = None,
        seconds: float = 0.5,
        device: Literal["cpu", "cuda"] = "cpu",
        start: int | float | None = None,
    ) -> None:
        require_one_of("mode", mode, get_args(Mode))
        require_one_of("backend", backend, get_args(Backend))
        require_one_of("device", device, ["cpu", "cuda"])
        if mode == "qat" and backend not in ("auto", "pt2e", "onnxruntime"):
            raise ValueError(f"mode='qat' is converted by backend 'pt2e' or 'onnxruntime'; got {backend!r}")
        if monitor_mode not in ("max", "min"):
            raise ValueError(f"monitor_mode must be 'max' or 'min'; got {monitor_mode!r}")
        if monitor is not None and (not isinstance(monitor, str) or not monitor):
            raise ValueError(f"monitor must be the name of a metric, such as 'val/accuracy'; got {monitor!r}")
        if max_drop is not None and monitor is None:
            raise ValueError("max_drop needs monitor, the figure of validation that may drop, such as 'val/accuracy'")
        if monitor == PERPLEXITY and monitor_mode == "max":
            raise ValueError("lower perplexities are better: monitor='perplexity' needs monitor_mode='min'")
        require_at_least(0, **if_set(max_drop=max_drop))
        require_integers(1, calibrate=calibrate, **if_set(batch_size=batch_size))
        require_above(0, seconds=seconds)
        require_at_least(0, **if_set(start=start))
        if start is not None:
            kind = "a share of the run" if isinstance(start, float) else "an epoch, which begin cannot name"
            warnings.warn(
                f"Quantization: start={start}, {kind}, gives way to begin, an optimizer step or a share of the run; "
                f"start goes in lightning_accel {DROPPED_IN}",
                FutureWarning,
                stacklevel=3,
            )
            begin = start if isinstance(start, float) else begin
        require_at_least(0, begin=begin)
        if isinstance(begin, float) and begin >= 1:
            raise ValueError(f"begin must be a share of the run in [0, 1), or an optimizer step as an int; got {begin}")
        if mode != "qat" and begin != _BEGIN:
            raise ValueError(f"begin is when mode='qat' begins; got begin={begin} and mode={mode!r}: leave it out")
        self.mode = mode
        self.backend = backend
        self.calibrate = calibrate
        self.exclude = list_of_names(exclude, "exclude")
        self.monitor = monitor
        self.monitor_mode = monitor_mode
        self.max_drop = max_drop
        self.module = module
        self.begin = begin
        self.batch_size = batch_size
        self.seconds = seconds
        self.device = device
        self._file_format: str | None = None
        self._exported: str | None = None  # the module that Export names
        self._max_length: int | None = None  # of the decoder of text that is exported, if one is
        self.result: Quantized | None = None
        self._training = IntegerTraining(begin, None if isinstance(start, float) else start)

    @property
    def _name(self) -> str | None:
        """Return the name of the deployed submodule, None for the one that ``validation_step`` calls."""
        return self._exported if self.module is None else self.module

    @property
    def phase(self) -> str:
        return "int8" if self._training.enabled else "float"

    @property
    def is_final_phase(self) -> bool:
        return self.mode != "qat" or self._training.enabled

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if (count := len(callbacks_of(trainer, Quantization))) > 1:
            raise ValueError(
                f"the Trainer has {count} Quantization callbacks, and takes one, since Export writes one form. "
                "mode='auto' compares all forms of a run; measure another set of options with convert(), after the fit"
            )
        self._file_format, self._max_length = file_of_quantized(trainer)
        self._exported = self._require_exported(exported_modules(trainer))
        kind = "static" if self.mode == "qat" else self.mode
        require_form(kind, self.backend, self.device, self._file_format)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("Quantization(device='cuda') needs a GPU, and there is none; take device='cpu'")
        if self.mode == "qat":
            if self._max_length is not None:
                raise ValueError(
                    "mode='qat' trains for a form of the model, and Export(max_length=...) writes a decoder; take "
                    "mode='weight_only', or Export without max_length"
                )
            if isinstance(trainer.strategy, PipelineStrategy):
                raise ValueError(
                    "mode='qat' does not work under accel_pipeline, where each process has layers of its own. Train "
                    "with accel_ddp or accel_fsdp2, or take mode='static', which quantizes afterwards"
                )
            defer_best_checkpoints(trainer)
        self.result = None
        self._training.enabled = False
        self._copy = WholeCopy(pl_module)
        require_deployable(pl_module, "Quantization", self._name)
        quantized = find_layers(pl_module, self.exclude).quantized
        if self.mode in ("static", "qat") and not quantized:
            raise ValueError(
                f"{type(pl_module).__name__} has no linear layer or convolution for mode={self.mode!r} to quantize; "
                "take mode='auto', or 'dynamic' for an LSTM"
            )
        if self.backend == "torchao" and not any(isinstance(one, nn.Linear) for one in quantized.values()):
            raise ValueError(
                f"{type(pl_module).__name__} has no linear layer for backend='torchao' to quantize; take mode='auto' "
                "and backend='auto'"
            )

    def _require_exported(self, names: Sequence[str]) -> str | None:
        """Return the module that Export callbacks name, if it is one; raise if they write another than ``module``."""
        if self.module is not None and names and self.module not in names:
            raise ValueError(
                f"Quantization(module={self.module!r}) makes a form that Export(module={names[0]!r}) would not write; "
                "name the same module in both, or in one of them"
            )
        return names[0] if len(set(names)) == 1 else None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.monitor is not None and not trainer.enable_validation:
            raise ValueError(f"Quantization monitors {self.monitor!r}, but this run does not validate")
        self._check_early(trainer, pl_module)
        if self.mode == "qat":
            self._training.attach(pl_module, self.exclude, self._name)
            if self.begin:
                warn_of_early_end(trainer, "Quantization(mode='qat') begins to round weights")

    def _check_early(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise before training what would make all measurements fail after it."""
        dry_run(trainer, pl_module, self._copy, self._check_calls, "quantize", self._name, of_training=True)
        if self.monitor is not None:
            dry_run(trainer, pl_module, self._copy, self._check_monitor, "quantize", self._name)

    def _check_calls(self, found: Deployed) -> None:
        call = found.inputs[0]
        try:
            is_cut = num_samples(smallest_call(found.module, call)) == 1
        except ValueError as error:
            raise ValueError(f"{error}{part_to_name(found, 'Quantization')}") from error
        if self.batch_size is not None and (self.batch_size > num_samples(call) or not is_cut):
            raise ValueError(
                f"Quantization(batch_size={self.batch_size}) measures that many samples of a training batch, which has "
                f"{num_samples(call)}{'' if is_cut else ', and cannot be cut'}; lower it, or raise that of the loader"
            )
        for size in (1, num_samples(call)) if is_cut else (num_samples(call),):
            try:
                _call_flat(found.module, first_samples(call, size))
            except Exception as error:
                raise ValueError(
                    f"Quantization would fail at the end of the run: it measures {type(found.module).__name__} on "
                    f"{size} rows, and that fails with {first_line(error)}. Name what takes batches of any number of "
                    "rows and returns tensors by module"
                ) from error
        if self.backend in ("pt2e", "onnxruntime"):
            try:
                if self.backend == "pt2e":
                    export(found.module, found.inputs)
                else:
                    with tempfile.TemporaryDirectory() as folder:
                        write_float(found.module, found.inputs, Path(folder, "model.onnx"))
            except CannotConvertError as error:
                raise ValueError(
                    f"Quantization would fail at the end of the run: backend={self.backend!r} needs a graph of "
                    f"{type(found.module).__name__}, and {error}. Take backend='auto', or name a part by module"
                ) from error
            return
        try:
            require_same_values(found.module, found.inputs)
        except CannotConvertError as error:
            rank_zero_warn(
                f"Quantization will make no form of {type(found.module).__name__} for ONNX Runtime or PT2E: {error}"
            )

    def _check_monitor(self, found: Deployed) -> None:
        figure = None if self.monitor is None else found.figures.get(self.monitor)
        allows_all = self.max_drop is not None and self.max_drop >= 1 and self.monitor_mode == "max"
        if figure is not None and allows_all and 0 <= figure <= 1:
            rank_zero_warn(
                f"max_drop={self.max_drop:g} allows any loss of {self.monitor!r}, which is {figure:.3g} before "
                "training: it is in the unit of the metric, so that 0.01 is one percent of an accuracy"
            )
        if self.monitor is None or figure is not None:
            return
        if not self._is_measured_here:
            raise not_logged("Quantization", self.monitor, found.figures, _BY_VALIDATION)
        _require_perplexity(found)

    @property
    def _is_measured_here(self) -> bool:
        """Return whether the monitored metric is the perplexity, which need not be logged, of a decoder of text."""
        return self.monitor == PERPLEXITY and self._max_length is not None

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reject an unknown ``monitor``, which usually happens in the sanity check before training."""
        if self.monitor is None or self._is_measured_here:
            return
        if trainer.callback_metrics and self.monitor not in trainer.callback_metrics:
            raise not_logged("Quantization", self.monitor, trainer.callback_metrics, _BY_VALIDATION)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.mode == "qat":
            self._training.schedule(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._training.start_batch(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._training.update_ranges()

    # Lightning rejects two callbacks with a state_dict() in a message of its own, before setup
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["callbacks"][self.state_key] = self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._training.load_state_dict(state_dict)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
            return
        if self.mode == "qat" and not self._training.has_begun:
            detach(pl_module)  # other callbacks use the module in float
            rank_zero_warn("no step was trained in int8: the run ended before begin; nothing is quantized")
            return
        folder = run_folder(trainer)
        try:
            with failures_as_warnings("Quantization failed, and the model is kept in float"):
                make = partial(self._copy.make, trainer, pl_module)
                run_in_first_process(trainer, make, lambda made: self._convert(trainer, made, folder), "quantize")
        finally:
            detach(pl_module)

    def _convert(self, trainer: L.Trainer, copied: L.LightningModule, folder: Path) -> None:
        datamodule = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
        loaders = undistributed(trainer.train_dataloader), undistributed(trainer.val_dataloaders)
        try:
            report = self.convert(copied.to(self.device), *loaders, datamodule).report
        except NothingPickedError as error:
            _save_report(error.report, folder)
            raise
        _save_report(report, folder)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._training.abandon_batch()
        detach(pl_module)

    def convert(
        self,
        module: L.LightningModule,
        train_loader: Any,
        val_loader: Any = None,
        datamodule: L.LightningDataModule | None = None,
    ) -> Quantized:
        """Quantize a copy of ``module`` without a Trainer, such as one from ``load_from_checkpoint``.

        Args:
            module: the module, on the device to run on, in evaluation mode; not changed.
            train_loader: batches for calibrating the ranges.
            val_loader: batches for validating the forms, if any.
            datamodule: the datamodule whose batch hooks are applied.

        Raises:
            NothingPickedError: if no form can be created, or none is within ``max_drop``; it holds the report.
        """
        detach(module)
        with restored_random_state():
            deployed = self._find(module, train_loader, datamodule)
            self.result = self._quantize(module, deployed, val_loader, datamodule)
        self.result.deployed = deployed.name
        rank_zero_info(_summary(self.result, self.mode))
        return self.result

    def _find(self, module: L.LightningModule, loader: Any, datamodule: L.LightningDataModule | None) -> Deployed:
        """Find the deployed module, with calls of ``calibrate`` samples in total."""
        return calibration_calls(module, in_random_order(loader), self.calibrate, self._name, datamodule)

    def _quantize(
        self, module: L.LightningModule, deployed: Deployed, loader: Any, datamodule: L.LightningDataModule | None
    ) -> Quantized:
        ranges = self._training.ranges_in(deployed.name) if self.mode == "qat" else None
        limit = None
        if loader:
            judged = partial(_validate, module, loader, deployed, datamodule, self._max_length is not None)
            limit = Limit(judged, self.monitor, self.max_drop, self.monitor_mode == "max")
        excluded = self._excluded_of(module, deployed)
        options: dict[str, Any] = {
            "exclude": excluded,
            "limit": limit,
            "ranges": ranges,
            "file_format": self._file_format,
            "progress": Progress(rank_zero_info, "quantization"),
        }
        batch_sizes = self._batch_sizes(deployed.inputs[0])
        mode = "static" if self.mode == "qat" else self.mode
        if self._max_length is None:
            return quantize(deployed.module, deployed.inputs, mode, self.backend, batch_sizes=batch_sizes,
                            seconds=self.seconds, **options)  # fmt: skip
        decoder = CachedDecoder(deployed.module, self._max_length)
        return quantize_decoder(
            decoder,
            [tokens_of(call, self._max_length) for call in deployed.inputs],
            judge(deployed.module, deployed.inputs, mode, self.backend, **options),
            exclude=excluded,
            batch_sizes=batch_sizes,
            seconds=self.seconds,
            memory=partial(memory_of, decoder),
            progress=Progress(rank_zero_info, "decoding"),
        )

    def _excluded_of(self, module: L.LightningModule, deployed: Deployed) -> list[str]:
        """Return the names of the layers to exclude within the deployed module, "" for itself."""
        prefix = f"{deployed.name}." if deployed.name else ""
        return [
            name.removeprefix(prefix) if prefix != f"{name}." else ""
            for name in sorted(find_layers(module, self.exclude).excluded)
            if f"{name}.".startswith(prefix)
        ]

    def _batch_sizes(self, call: Inputs) -> list[int] | None:
        """Return the batch sizes to measure, the one that decides last."""
        if self.batch_size is None:
            return None
        return [size for size in (1, num_samples(call)) if size != self.batch_size] + [self.batch_size]


@torch.no_grad()
def _call_flat(module: nn.Module, call: Inputs) -> None:
    """Flatten and rebuild a call and its result, as forms of ``module`` do, to find errors early."""
    structure = Structure.of(module, call)
    result = Flat(module, structure)(*tensors_of(call))
    noise_share(result, structure.rebuild(result))


def _require_perplexity(found: Deployed) -> None:
    """Raise a ValueError if the perplexity of calls of the deployed module cannot be told."""
    args, kwargs = found.inputs[0]
    with torch.no_grad(), measured_perplexity(found.module) as perplexity:
        output = found.module(*args, **kwargs)
    if perplexity.value is None:
        raise ValueError(
            f"monitor='perplexity' needs calls of {type(found.module).__name__} with tokens, int64 (B, T), that return "
            f"logits (B, T, V) of them all; validation_step gets {type(output).__name__} without such. Call the "
            "language model itself there, or monitor a metric that validation_step logs"
        )


def _validate(
    module: L.LightningModule, loader: Any, deployed: Deployed, datamodule: Any, is_of_text: bool, run: Any
) -> dict[str, float]:
    """Return the metrics of validation with ``run`` in place of the deployed module, and the perplexity of text."""
    run = None if run is deployed.module else run  # a module cannot replace its own forward
    if not is_of_text:
        return evaluate(module, loader, deployed.name, run, datamodule=datamodule)
    with measured_perplexity(deployed.module) as perplexity:
        figures = evaluate(module, loader, deployed.name, run, datamodule=datamodule)
    return ({} if perplexity.value is None else {PERPLEXITY: perplexity.value}) | figures


def _save_report(report: Report | None, folder: Path) -> None:
    """Print a report and write its files; reduce errors to a warning."""
    if report is not None:
        report.conditions = _CONDITIONS
        with failures_as_warnings("Quantization could not write its report"):
            report.print()
            report.save(folder)


def _summary(result: Quantized, mode: str) -> str:
    text = f"Quantization picked {result.name}" + _speed_summary(result)
    if result.ties:
        text += f"; as fast, as far as could be measured: {', '.join(result.ties)}"
    if result.faster_float == "fp32 eager":
        text += "; the model as it is, fp32 eager, is faster here"
    elif result.faster_float:
        text += f"; {result.faster_float} is faster here, and mode={mode!r} leaves it out"
    elif result.name.startswith(("fp32", "bf16")):
        text += "; nothing quantized is faster here"
    for size, form in result.picks.items():
        if form.name != result.name:
            text += f"; at batch {size}, {form.name} is faster: result.picks[{size}]"
    if result.left_float:
        text += "; in float: " + "; ".join(f"{name} ({why})" for name, why in result.left_float.items())
    return text


def _speed_summary(result: Quantized) -> str:
    """Describe the speedup at each batch size over the original model and over float in the same runtime."""
    rows = {row.name: row for row in result.report.rows} if result.report is not None else {}
    if result.name not in rows:
        return ""
    own, parts = rows[result.name], []
    for other in filter(None, ("fp32 eager", own.float_row)):
        found = [
            f"{describe_speedup(speedup(latency, rows[other].latencies[batch]))} at batch {batch}"
            for batch, latency in own.latencies.items()
            if other in rows and batch in rows[other].latencies
        ]
        if found:
            parts.append(f"{' and '.join(found)} as fast as {other}")
    return f": {'; '.join(parts)}" if parts else ""
