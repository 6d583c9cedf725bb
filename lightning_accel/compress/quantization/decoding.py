"""Quantization of decoders of text: forms that are good enough for the model, picked by the time of a token."""

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.export.decoding import CachedDecoder
from lightning_accel.compress.quantization.form import Form, describe_failure
from lightning_accel.compress.quantization.layers import find_layers
from lightning_accel.compress.quantization.onnx import sharing_export
from lightning_accel.compress.quantization.picking import NothingPickedError, Quantized, pick, quality_of
from lightning_accel.compress.quantization.trial import EAGER, Trial, is_compared
from lightning_accel.compress.report.forms import measure_forms
from lightning_accel.compress.report.latency import speedup
from lightning_accel.compress.report.progress import Progress
from lightning_accel.compress.report.report import Report, Row, describe_speedup, saved_bytes

Memory: TypeAlias = Callable[[Form, Sequence[Inputs], float], int]
_MEMORY_SECONDS = 90.0  # for all forms together
_FLOAT_PROGRAM = "fp32 compiled"  # whose program is that of the model as it is


def quantize_decoder(
    decoder: CachedDecoder,
    texts: Sequence[Tensor],
    judged: Trial,
    *,
    exclude: Iterable[str] = (),
    batch_sizes: Sequence[int] | None = None,
    seconds: float = 0.5,
    memory: Memory | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Make the forms of a decoder that were not refused for its model, and pick the fastest at a token after a prompt.

    Args:
        decoder: in evaluation mode; not changed.
        texts: batches of prompts (B, T) int64, which calibrate; the prompts of the first batch, and the next token of
            each, are timed.
        judged: the forms of ``decoder.model``, which it no longer holds afterwards, and their metrics.
        exclude: names of layers of ``decoder.model`` to keep in float.
        batch_sizes: as in :func:`~lightning_accel.compress.quantize`.
        seconds: as there.
        memory: function that returns the bytes that a form takes to be loaded and to run calls, within some seconds; it
            is called for the picked form, the decoder as it is, and ties. Its errors become notes.
        progress: reporter of progress.

    Returns:
        The picked form, with a report of all, with the metrics of those of ``judged``.

    Raises:
        NothingPickedError: if none of the forms can be made of the decoder.
        ValueError: if a text is too short or too long.
    """
    length = texts[0].shape[1]
    trial = _make(decoder, texts, judged, exclude, Progress(None) if progress is None else progress)
    of_prompts = _measure_prompts(trial, batch_sizes, seconds)
    try:
        result = pick(trial, batch_sizes, seconds, timed=trial.inputs[1])
    except NothingPickedError as error:
        _complete(error.report, judged, length, of_prompts, saved_bytes(decoder))
        raise
    assert result.report is not None
    _complete(result.report, judged, length, of_prompts, saved_bytes(decoder))
    _note_faster_prompts(result, trial)
    if memory is not None:
        _measure_memory(result, trial, memory)
    return result


def _make(
    decoder: CachedDecoder, texts: Sequence[Tensor], judged: Trial, exclude: Iterable[str], progress: Progress
) -> Trial:
    """Make the forms of the decoder that were made of its model and not refused, and drop those of the model."""
    allowed = [name for name in judged.made if name not in judged.refused]
    judged.made.clear()
    gc.collect()  # compiled graphs refer to themselves, and hold weights
    calls = decoder.calls(texts[0])
    prompts = [decoder.calls(tokens)[0] for tokens in texts[1:]]
    trial = Trial(decoder, [*calls, *prompts], judged.wanted, None, None, progress)
    trial.refused, trial.figures = dict(judged.refused), judged.figures
    wanted = [name for name in allowed if name in judged.wanted]
    excluded = [f"model.{name}".rstrip(".") for name in exclude]
    layers_of = {}
    for name in allowed:
        if name in wanted or is_compared(name, wanted):
            sensitive = {f"model.{layer}": reason for layer, reason in judged.sensitive.get(name, {}).items()}
            layers_of[name] = find_layers(decoder, [*excluded, *sensitive])
            layers_of[name].left_float.update(sensitive)
    with sharing_export():
        trial.make(layers_of)
    return trial


def _complete(
    report: Report, judged: Trial, prompt_length: int, of_prompts: Mapping[str, Row], decoder_bytes: int
) -> None:
    """Add to the report of next tokens what is known of prompts, of the decoder as it is, and from validation."""
    report.title, report.quality, report.prompt_length = "decoding", quality_of(judged), prompt_length
    for place, row in enumerate(report.rows):
        was_refused = row.name in judged.refused and row.name in judged.figures  # else it was not even made
        report.rows[place] = row._replace(
            prompts=of_prompts[row.name].latencies if row.name in of_prompts else {},
            file_bytes=decoder_bytes if row.name == EAGER else row.file_bytes,
            status="refused" if was_refused else row.status,
        )


def _measure_prompts(trial: Trial, batch_sizes: Sequence[int] | None, seconds: float) -> dict[str, Row]:
    """Measure the forms on the prompts, and refuse those that fail."""
    trial.progress("measures prompts, then next tokens")
    runs = {EAGER: trial.module} | {name: form.run for name, form in trial.made.items()}
    rows = measure_forms(
        trial.module, trial.inputs[0], runs, batches=batch_sizes, seconds=seconds, progress=trial.progress
    )
    trial.refused.update({name: row.note for name, row in rows.items() if row.status == "failed"})
    return rows


def _note_faster_prompts(result: Quantized, trial: Trial) -> None:
    """Note beside the picked form if another that might have been picked is faster at prompts."""
    assert result.report is not None
    rows = {row.name: row for row in result.report.rows}
    for batch, own in rows[result.name].prompts.items():
        others = {
            name: rows[name].prompts[batch]
            for name in trial.wanted
            if name in trial.made and name not in trial.refused and batch in rows[name].prompts
        }
        fastest = min(others, key=lambda name: others[name].p50_ms, default=None)
        if fastest is not None and (found := speedup(others[fastest], own)).is_faster:
            note = f"{fastest} is {describe_speedup(found)} as fast at prompts, at batch {batch}"
            _add_note(result.report, result.name, note)


def _measure_memory(result: Quantized, trial: Trial, memory: Memory) -> None:
    """Measure what the picked form, those that are as fast, and the decoder as it is take."""
    assert result.report is not None
    program = trial.made[_FLOAT_PROGRAM].program if _FLOAT_PROGRAM in trial.made else None
    no_program = trial.refused.get(_FLOAT_PROGRAM, "torch.export cannot trace it")
    as_it_is = Form(EAGER, trial.module, program, no_file=no_program if program is None else "")
    deadline = time.monotonic() + _MEMORY_SECONDS
    for form in (as_it_is, trial.made[result.name], *(trial.made[name] for name in result.ties)):
        trial.progress(f"measures the memory of {form.name}", if_slow=True)
        try:
            taken = memory(form, trial.inputs[:2], _remaining(deadline))
        except Exception as error:  # of exporters, and of the process that runs the file
            _add_note(result.report, form.name, f"memory not measured: {describe_failure(error)}")
        else:
            result.report.rows = [
                row._replace(memory_bytes=taken) if row.name == form.name else row for row in result.report.rows
            ]


def _remaining(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError(f"the {_MEMORY_SECONDS:.0f} s for all forms are over")
    return seconds


def _add_note(report: Report, name: str, note: str) -> None:
    report.rows = [
        row._replace(note="; ".join(filter(None, (row.note, note)))) if row.name == name else row for row in report.rows
    ]
