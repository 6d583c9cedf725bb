"""Export of the trained model to a self-contained file, with a report. Shapes: B samples."""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_accel.callbacks.compression_phase import HasPhases
from lightning_accel.callbacks.deployment.copies import WholeCopy, run_folder, run_in_first_process
from lightning_accel.callbacks.deployment.deployed import (
    Deployed,
    dry_run,
    find_deployed,
    part_to_name,
    reasons_left_out,
    require_deployable,
    require_validation,
)
from lightning_accel.callbacks.deployment.loaders import first_batches_of, undistributed
from lightning_accel.callbacks.deployment.report import AT_FIRST, VALIDATED, complete_row, shrunk_from, validated
from lightning_accel.callbacks.fit_end import failures_as_warnings
from lightning_accel.callbacks.trainer_callbacks import callbacks_of, move_last
from lightning_accel.compress.calls import Inputs, Run, device_of, smallest_call
from lightning_accel.compress.export.decoding import CachedDecoder, tokens_of
from lightning_accel.compress.export.loading import load_compressed
from lightning_accel.compress.export.structure import named_tensors, numbers_of_call, restore, tensors_of
from lightning_accel.compress.export.traced import ExportError, Format
from lightning_accel.compress.export.writing import (
    SUFFIXES,
    Exported,
    Probabilities,
    export,
    require_exportable,
    try_export,
)
from lightning_accel.compress.report.forms import measure_forms, plain_forms
from lightning_accel.compress.report.progress import Progress
from lightning_accel.compress.report.report import Report, describe_layers
from lightning_accel.ops.bounds import if_set, require_filename, require_flags, require_integers
from lightning_accel.ops.names import list_of_names, list_some, require_one_of

_NUM_BATCHES = 2  # of validation, that the file is compared on


class Export(L.Callback):
    """Write the trained model to one file that runs without its class or this package, and verify it before it is kept.

    The exported module is the one that ``validation_step`` calls: the module itself, or the submodule with the most
    parameters; with a :class:`~lightning_accel.Quantization` in the Trainer, its quantized form. At the end
    of ``fit``, in the first process, a copy with the current weights is exported, loaded from the file, and compared
    with the copy on validation batches as they are, and on 1 and on an odd number of samples. A file with other outputs
    is removed, an earlier file stays, and a warning gives the reason; ``fit`` still succeeds. As much as possible is
    checked on a batch before training. Read the file with :func:`lightning_accel.compress.load_compressed`.

    The length of token sequences, integers (B, T), is dynamic if the module can be traced so; otherwise, as with
    transformers' T5, the file takes sequences of the length of the validation batches, which is announced before
    training. With a ``Quantization`` that makes an ONNX file, labels that the module is called with stay inputs.

    A report beside it, in ``figures/`` of the run folder and in the terminal, lists parameters, size,
    multiply-accumulates, latency at batch size 1 and at the validation batch size, and the metrics that
    ``validation_step`` logs, for the file and for the model as it is, compiled, and in bfloat16. If training has
    changed shapes, as pruned channels do, the model before training has a row without metrics.

    Args:
        format: ``pt2`` (``torch.export``) or ``onnx``; ``auto`` is ``onnx`` where Quantization made an ONNX file, else
            ``pt2``.
        filename: path, absolute, or relative to the run folder (the Trainer's ``log_dir``, or its
            ``default_root_dir``); a missing suffix is added.
        module: name of the submodule to export, to override the rule above.
        preprocess: module placed before the model in the file, such as a normalisation; needs a method ``inverse`` from
            the model's input to the file's input, to compare on validation batches. ``datamodule`` takes it from the
            datamodule's method ``preprocessing()``, as the digits and tables of this package have it.
        postprocess: ``probabilities`` of the scores, a module, or None for the model's output.
        class_names: names of the classes; by default those of the datamodule or the module, if either has them.
        dynamic: whether the file accepts batches of any size.
        compare: whether the report measures the model in bfloat16 and compiled, too, which takes about a minute; else
            it measures the model as it is and the file.
        max_length: for causal language models, the largest number of tokens of a text, prompt included. The file is
            that of a :class:`~lightning_accel.compress.CachedDecoder`, whose prompts and further tokens
            :meth:`lightning_accel.compress.Compressed.generate` runs; the report measures one further token.

    Raises:
        ValueError: before training, if the format or ``postprocess`` is unknown, ``filename`` has another suffix, the
            folder cannot be written, there are no validation data, or ``max_length`` has what excludes it.
        TypeError: before training, if the module has no ``validation_step``, or ``preprocess`` no ``inverse``.
        ModuleNotFoundError: before training, if a package is missing.
        RuntimeError: before training, if the model cannot be traced, or translated, on a validation batch; at the end
            of a validation run, if it cannot be exported or the file has other outputs.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import Export
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[Export(format="pt2", filename="classifier.pt2")])
    """

    def __init__(
        self,
        format: Literal["auto", "pt2", "onnx"] = "auto",
        filename: str = "model",
        *,
        module: str | None = None,
        preprocess: nn.Module | Literal["datamodule"] | None = None,
        postprocess: nn.Module | Literal["probabilities"] | None = None,
        class_names: Sequence[str] | None = None,
        dynamic: bool = True,
        compare: bool = True,
        max_length: int | None = None,
    ) -> None:
        require_one_of("format", format, ["auto", *get_args(Format)])
        _require_module_or("probabilities", "postprocess", postprocess)
        _require_module_or("datamodule", "preprocess", preprocess)
        if isinstance(preprocess, nn.Module):
            _require_inverse(preprocess)
        require_filename("filename", filename, "model")
        require_flags(dynamic=dynamic, compare=compare)
        suffix = Path(filename).suffix
        if format != "auto" and suffix in SUFFIXES.values() and suffix != SUFFIXES[format]:
            raise ValueError(f"a file of format {format!r} must end in {SUFFIXES[format]}; got filename={filename!r}")
        require_integers(3, **if_set(max_length=max_length))
        self.format = format
        self.filename = filename
        self.module = module
        self.preprocess = preprocess
        self.postprocess = Probabilities() if postprocess == "probabilities" else postprocess
        self.class_names = _in_order(class_names)
        self.dynamic = dynamic
        self.compare = compare
        self.max_length = max_length
        if max_length is not None and (preprocess is not None or postprocess is not None):
            raise ValueError(
                "a file that continues texts takes tokens and gives scores: leave preprocess and postprocess"
            )
        if max_length is not None and not dynamic:
            raise ValueError("a file that continues texts is called with prompts and single tokens: leave dynamic=True")
        self.exports_on: set[TrainerFn] = {TrainerFn.FITTING}  # the command line adds VALIDATING
        self.exported: Exported | None = None
        self.report: Report | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.state.fn not in self.exports_on:
            return
        require_exportable("pt2" if self.format == "auto" else self.format)
        self._require_path(trainer)
        self._copy = WholeCopy(pl_module)
        self._loaded_step = None if trainer.ckpt_path else trainer.global_step
        require_deployable(pl_module, "Export", self.module)
        if self.preprocess == "datamodule" and not callable(getattr(trainer.datamodule, "preprocessing", None)):  # type: ignore[attr-defined]
            raise TypeError(
                "preprocess='datamodule' needs a datamodule with a method preprocessing(), which returns a module from "
                "what the file takes to what the model takes, with a method inverse; or give Export(preprocess=module)"
            )
        move_last(trainer, self)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded_step = checkpoint["global_step"]  # not called for a checkpoint of weights alone

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        require_validation(trainer, "Export")
        dry_run(
            trainer, pl_module, self._copy, lambda found: self._check_exportable(trainer, found), "export", self.module
        )

    def _check_exportable(self, trainer: L.Trainer, deployed: Deployed) -> None:
        """Raise before training what would fail in the export after it."""
        preprocess = self._preprocess(trainer.datamodule)  # type: ignore[attr-defined]  # set by a connector
        raw = None if preprocess is None else _FileInputs(preprocess)
        options: dict[str, Any] = {"preprocess": preprocess, "postprocess": self.postprocess}
        format: Format = "pt2" if self.format == "auto" else self.format
        self._require_class_names(deployed)
        try:
            deployed = self._with_cache(deployed)
            inputs = deployed.inputs if raw is None else [raw.from_call(call) for call in deployed.inputs]
            specs = try_export(deployed.module, inputs, format, dynamic=self.dynamic, **options)
        except (TypeError, ValueError, ExportError) as error:
            # with a cache, the error names the language model within, if there is one
            hint = "" if self.max_length is not None else part_to_name(deployed, "Export")
            raise type(error)(f"Export would fail at the end of the run: {error}{hint}") from error
        fixed = [one["name"] for one in specs if one["dtype"].startswith("int") and _is_fixed_length(one["shape"])]
        if fixed and self.dynamic:
            rank_zero_info(f"the file that Export writes will take {', '.join(fixed)} of the length of now alone")
        if constants := numbers_of_call(deployed.module.forward, inputs[0]):
            known = ", ".join(f"{name}={value!r}" for name, value in constants.items())
            rank_zero_warn(
                f"the file that Export writes will hold {known} as a constant, for all its inputs, since forward takes "
                "it as a Python number. Unless it is one setting of the model, let forward take it from its tensors"
            )

    @torch.no_grad()
    def _require_class_names(self, deployed: Deployed) -> None:
        """Raise a ValueError if there are other class names than scores."""
        if self.class_names is None:
            return
        args, kwargs = deployed.inputs[0]
        scores = next(iter(tensors_of(deployed.module(*args, **kwargs))), None)
        if scores is not None and scores.dim() == 2 and scores.shape[1] != len(self.class_names):
            raise ValueError(
                f"class_names must name the {scores.shape[1]} classes that {type(deployed.module).__name__} has scores "
                f"of; got {len(self.class_names)}, {list_some(self.class_names)}"
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
            self._run(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING and TrainerFn.VALIDATING in self.exports_on:
            self._run(trainer, pl_module)

    def _run(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.exported = None
        folder = run_folder(trainer)
        with self._failure_handling(trainer, "Export wrote no file"):
            make = partial(self._copy.make, trainer, pl_module)
            run_in_first_process(trainer, make, lambda made: self._export(trainer, made, folder), "export")

    def _failure_handling(self, trainer: L.Trainer, failed: str) -> AbstractContextManager[None]:
        """Reduce errors to a warning in a fit; let a validation run, whose purpose is the file, fail."""
        return failures_as_warnings(failed) if trainer.state.fn == TrainerFn.FITTING else nullcontext()

    def _export(self, trainer: L.Trainer, copied: L.LightningModule, folder: Path) -> None:
        datamodule = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
        loader = undistributed(trainer.val_dataloaders)
        result = _quantization_result(trainer)
        if result is not None:
            copied = copied.to(result.device)
        name = self.module if self.module is not None or result is None else result.deployed
        deployed = self._with_cache(find_deployed(copied, first_batches_of(loader), name, _NUM_BATCHES, datamodule))
        result = result if result is not None and result.deployed == deployed.name else None
        format = self._format(result)
        preprocess = self._preprocess(datamodule)
        names = self.class_names or getattr(datamodule, "class_names", None) or getattr(copied, "class_names", None)
        raw = None if preprocess is None else _FileInputs(preprocess)
        self.exported = export(
            deployed.module,
            deployed.inputs if raw is None else [raw.from_call(call) for call in deployed.inputs],
            _with_suffix(folder / self.filename, SUFFIXES[format]),
            format,
            dynamic=self.dynamic,
            preprocess=preprocess,
            postprocess=self.postprocess,
            class_names=names,
            metadata={
                "model": type(copied).__name__,
                "submodule": deployed.name,
                "step": trainer.global_step if trainer.state.fn == TrainerFn.FITTING else self._loaded_step,
                **{name: getattr(preprocess, name, None) for name in ("columns", "missing", "decimal")},
            },
            quantized=result,
        )
        _log_export(self.exported, isinstance(self.postprocess, Probabilities))
        if preprocess is None and callable(getattr(datamodule, "preprocessing", None)):
            rank_zero_info(
                "the file takes what the datamodule makes of the data; with Export(preprocess='datamodule'), or export "
                "--preprocess true, it takes the data as they are"
            )
        label = f"{format} file" if result is None else f"{result.name}, {format} file"
        with self._failure_handling(trainer, f"Export wrote {self.exported.path}, but made no report of it"):
            self.report = self._measure(trainer, copied, deployed, loader, label, raw)
            self.report.print()
            self.report.save(folder)

    def _measure(
        self,
        trainer: L.Trainer,
        copied: L.LightningModule,
        deployed: Deployed,
        loader: Any,
        label: str,
        raw: "_FileInputs | None",
    ) -> Report:
        assert self.exported is not None
        files: dict[str, Run] = {label: load_compressed(self.exported.path)}
        if self.compare and self.exported.format == "pt2":
            files[f"{label}, compiled"] = load_compressed(self.exported.path, compiled=True)
        if raw is not None:
            files = {name: raw.wrap(run) for name, run in files.items()}
        plain = plain_forms(deployed.module) if self.compare else {"fp32 eager": deployed.module}
        progress = Progress(rank_zero_info, "export")
        timed = deployed.inputs[0 if self.max_length is None else -1]
        start = shrunk_from(self._copy, deployed) if self.max_length is None else None
        others: dict[str, Run] = {} if start is None else {AT_FIRST: start}
        rows = measure_forms(deployed.module, timed, {**others, **plain, **files}, progress=progress)
        judged: dict[str, Run | None] = {**plain, "fp32 eager": None}
        judged |= {name: partial(_run_as_module, deployed.module, run, self.postprocess) for name, run in files.items()}
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        limits = trainer.limit_val_batches if trainer.limit_val_batches is not None else 1.0
        report = Report("export", device_of(deployed.module))
        report.conditions = f"{VALIDATED}; a file runs as load_compressed reads it, uncompiled unless it says so"
        if start is not None:
            report.add(complete_row(rows.pop(AT_FIRST), start, deployed))
        for name, row in rows.items():
            comparable = name not in files or self.postprocess is None or isinstance(self.postprocess, Probabilities)
            if not row.note and comparable and self.max_length is None:
                progress(f"validates {name}", if_slow=True)
                options = {"limit_batches": limits, "datamodule": datamodule}
                row = validated(row, copied, loader, deployed.name, judged[name], **options)
                if row.note and name == label:
                    rank_zero_warn(
                        f"{self.exported.path} {row.note}. It gives what the model gives on the {_NUM_BATCHES} batches "
                        "that it was compared on; do not rely on it"
                    )
            report.add(row._replace(file_bytes=self.exported.file_bytes) if name in files else row)
        call = smallest_call(deployed.module, deployed.inputs[0])
        report.layers = describe_layers(deployed.module, *call, reasons_left_out(trainer, deployed.name))
        return report

    def _with_cache(self, deployed: Deployed) -> Deployed:
        """Replace a language model by one that takes keys and values of previous tokens, if ``max_length`` is given."""
        if self.max_length is None:
            return deployed
        decoder = CachedDecoder(deployed.module, self.max_length)
        return deployed._replace(module=decoder, inputs=decoder.calls(tokens_of(deployed.inputs[0], self.max_length)))

    def _format(self, result: Any) -> Format:
        if self.format != "auto":
            return self.format
        return "onnx" if result is not None and result.onnx is not None and result.program is None else "pt2"

    def _preprocess(self, datamodule: Any) -> nn.Module | None:
        if not isinstance(self.preprocess, str):
            return self.preprocess
        found: nn.Module = datamodule.preprocessing()
        _require_inverse(found)
        return found

    def _require_path(self, trainer: L.Trainer) -> None:
        path = run_folder(trainer) / self.filename
        others = [one for one in callbacks_of(trainer, Export) if one is not self and one.filename == self.filename]
        if any(one.format == self.format for one in others):
            raise ValueError(
                f"two Export callbacks write {self.filename!r} as {self.format}; give one another filename"
            )
        if self.format != "auto":
            require_exportable(self.format, _with_suffix(path, SUFFIXES[self.format]))
        if not trainer.is_global_zero:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ValueError(
                f"Export cannot write to {path.parent}: {error.strerror or error}; give filename"
            ) from error


class _FileInputs:
    """Convert the model's inputs to the file's inputs."""

    def __init__(self, preprocess: nn.Module) -> None:
        self.inverse: Callable[[Any], Any] = preprocess.inverse  # type: ignore[assignment]
        self._last: tuple[Any, Any] = None, None

    def from_call(self, call: Inputs) -> Inputs:
        args, kwargs = call
        if args:
            return (self._invert(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return (), {**kwargs, first: self._invert(kwargs[first])}

    def wrap(self, run: Run) -> Run:
        def from_model_inputs(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.from_call((args, kwargs))
            return run(*args, **kwargs)

        return from_model_inputs

    def _invert(self, value: Any) -> Any:
        """Return the inverse of ``value``, computed once per batch so that latencies do not include it."""
        if self._last[0] is not value:
            self._last = value, self.inverse(value)
        return self._last[1]


def _run_as_module(module: nn.Module, run: Run, postprocess: nn.Module | None, *args: Any, **kwargs: Any) -> Any:
    """Return the outputs of a file, ``run``, in the module's output class, with omitted ones taken from the module."""
    output = type(module).forward(module, *args, **kwargs)
    given = named_tensors(run(*args, **kwargs))
    if postprocess is not None:  # the logarithms have the same softmax as the scores
        first = next(iter(given))
        given[first] = given[first].log()
    return restore(output, iter({**named_tensors(output, others=[]), **given}.values()))


def file_of_quantized(trainer: L.Trainer) -> tuple[str | None, int | None]:
    """Return what the Trainer's Export callback writes of a model that was quantized.

    Returns:
        The format, None if any will do; and ``max_length``, if it writes a decoder of text.
    """
    exports = callbacks_of(trainer, Export)
    formats = [one.format for one in exports if one.format != "auto"]
    lengths = [one.max_length for one in exports if one.max_length is not None]
    return next(iter(formats), None), next(iter(lengths), None)


def exported_modules(trainer: L.Trainer) -> list[str]:
    """Return the names of the modules that the Trainer's Export callbacks are told to write."""
    return [one.module for one in callbacks_of(trainer, Export) if one.module is not None]


def _is_fixed_length(shape: Sequence[int | None]) -> bool:
    return len(shape) == 2 and shape[0] is None and shape[1] is not None


def _quantization_result(trainer: L.Trainer) -> Any:
    """Return the result of a ``Quantization``: with ``name``, ``run``, ``program``, ``onnx``, ``deployed``."""
    for callback in callbacks_of(trainer, L.Callback):
        result: Any = getattr(callback, "result", None)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if result is None and not is_fit and isinstance(callback, HasPhases) and hasattr(callback, "result"):
            rank_zero_warn(
                f"Export writes the float model: {type(callback).__name__} makes its form at the end of a fit alone. "
                "For int8, add Export to the callbacks of the fit, or quantize the checkpoint in Python: "
                "Quantization('static').convert(module, train_loader, val_loader)"
            )
        if hasattr(result, "run") and hasattr(result, "deployed"):
            if result.program is None and result.onnx is None:
                rank_zero_warn(f"{result.name} has no form that a file can hold; Export writes the float model")
                return None
            return result
    return None


def _log_export(exported: Exported, has_probabilities: bool) -> None:
    left = f"; outputs of the model that are left out: {', '.join(exported.left_out)}" if exported.left_out else ""
    if exported.unused:
        left += f"; works without {', '.join(exported.unused)}"
    checked = (
        f"on {exported.num_checked} batches it differs from the model by at most {exported.largest_difference:.1e} of "
        "the largest value"
    )
    first, *rest = exported.outputs
    gives = ", ".join([f"probabilities of {first}" if has_probabilities else first, *rest])
    rank_zero_info(f"exported {exported.path} ({exported.file_bytes:,} bytes), which gives {gives}{left}; {checked}")


def _with_suffix(path: Path, suffix: str) -> Path:
    return path if path.suffix in SUFFIXES.values() else path.with_name(path.name + suffix)


def _in_order(class_names: Sequence[str] | None) -> list[str] | None:
    """Return the names as a list.

    Raises:
        TypeError: if they have no order, or are no names.
        ValueError: if one is empty or stands twice.
    """
    if class_names is None:
        return None
    if isinstance(class_names, Set | Mapping | bytes):
        raise TypeError(f"class_names must be a list, in the order of the scores; got {class_names!r}")
    names = list_of_names(class_names, "class_names")
    if len({*names}) < max(1, len(names)) or {None, ""} & {*names}:
        raise ValueError(f"class_names must name each class once, none by nothing; got {names}")
    return names


def _require_module_or(name: str, option: str, value: Any) -> None:
    if not (value is None or value == name or isinstance(value, nn.Module)):
        raise ValueError(f"{option} must be {name!r}, a module (torch.nn.Module) or None; got {value!r}")


def _require_inverse(preprocess: nn.Module) -> None:
    if not callable(getattr(preprocess, "inverse", None)):
        raise TypeError(
            f"preprocess, a {type(preprocess).__name__}, needs a method inverse(x), from what the model takes to what "
            "the file is to take: the file is compared with the model on validation batches, which are preprocessed"
        )
