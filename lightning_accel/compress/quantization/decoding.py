"""Quantization of decoders of text: forms that are good enough for the model, picked by the time of a token."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from lightning_accel.compress.calls import device_of
from lightning_accel.compress.export.decoding import CachedDecoder
from lightning_accel.compress.quantization.layers import find_layers
from lightning_accel.compress.quantization.onnx import sharing_export
from lightning_accel.compress.quantization.quantized import (
    MAKERS,
    Backend,
    Mode,
    Quantized,
    Trial,
    is_compared,
    is_wanted,
    pick,
)
from lightning_accel.compress.report.progress import Progress


def quantize_decoder(
    decoder: CachedDecoder,
    texts: Sequence[Tensor],
    judged: Quantized,
    mode: Mode = "auto",
    backend: Backend = "auto",
    *,
    exclude: Iterable[str] = (),
    seconds: float = 0.5,
    file_format: str | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Make the forms of a decoder that were not refused for its model, and pick the fastest at a token after a prompt.

    Args:
        decoder: in evaluation mode; not changed.
        texts: batches of prompts (B, T) int64, which calibrate; the next token of the first batch is timed.
        judged: the forms of ``decoder.model`` with their metrics, of :func:`~lightning_accel.compress.quantize`.
        mode: as there.
        backend: as there.
        exclude: names of layers of ``decoder.model`` to keep in float.
        seconds: as there.
        file_format: as there.
        progress: reporter of progress.

    Returns:
        The picked form, with a report of all that has the metrics of those of ``judged``.

    Raises:
        NothingPickedError: if none of the forms can be made of the decoder.
        ValueError: if a text is too short or too long.
    """
    assert judged.report is not None
    rows = {row.name: row for row in judged.report.rows if row.status not in ("refused", "failed")}
    here = [name for name, maker in MAKERS.items() if device_of(decoder).type in maker.devices]
    wanted = [name for name in here if name in rows and is_wanted(MAKERS[name], mode, backend, file_format)]
    layers = find_layers(decoder, [f"model.{name}".rstrip(".") for name in exclude])
    calls = decoder.calls(texts[0])
    prompts = [decoder.calls(tokens)[0] for tokens in texts[1:]]
    trial = Trial(decoder, [*calls, *prompts], None, None, Progress(None) if progress is None else progress)
    with sharing_export():
        trial.make([name for name in here if name in wanted or is_compared(name, wanted)], layers)
    result = pick(trial, wanted, None, seconds, timed=calls[1])
    assert result.report is not None
    result.report.title = "decoding"
    result.report.rows = [
        row._replace(metrics=rows[row.name].metrics) if row.name in rows else row for row in result.report.rows
    ]
    return result
