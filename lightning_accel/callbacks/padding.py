"""Batches of padded sequences without columns that hold padding alone, or with several sequences in a row.

Shapes: B samples, T tokens of a padded sample, R rows of a packed batch, P tokens of a packed row.
"""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_accel.callbacks.repeated_step import repeat_training_step, without_traces

Padding = Literal["trimmed", "packed"]
_MULTIPLE = 8  # of lengths, which units for matrix products work in
_IGNORED = -100  # a label that torch's and transformers' losses leave out


def why_not_padded(batch: Any, padding: Padding) -> str:
    """Return why the padding of batches like this one cannot be taken out, or nothing.

    Args:
        batch: a mapping with an ``attention_mask``, (B, T), or a tuple or list with a tensor of 0 and 1 beside tensors
            of tokens of the same shape.
        padding: ``packed`` needs a mapping with ``input_ids`` and ``labels``, both (B, T), and nothing else that has
            samples.
    """
    key = _mask_key(batch)
    if key is None:
        return "batches have no attention_mask of one number for each token"
    if padding == "trimmed":
        return ""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return "batches are no mappings with input_ids"
    shape = batch[key].shape
    if "labels" not in batch:
        return "batches have no labels, of which packing needs one for each token"
    if getattr(batch["labels"], "shape", None) != shape:
        return "labels are not those of tokens: each sample has to be in a row of its own"
    others = [name for name, value in batch.items() if not isinstance(value, Tensor) or value.shape != shape]
    return f"{', '.join(others)} would have to be packed as well, and has no number for each token" if others else ""


def has_padding(batch: Any, padding: Padding) -> bool:
    """Return whether a batch that :func:`why_not_padded` has no objection to gets smaller."""
    mask = batch[_mask_key(batch)]
    return _length(mask) < mask.shape[1] or (padding == "packed" and len(_rows(mask)) < len(mask))


def _mask_key(batch: Any) -> Any:
    """Return the key or the place of the attention mask, (B, T), of 0 and 1; None if there is none."""
    if isinstance(batch, Mapping):
        mask = batch.get("attention_mask")
        return "attention_mask" if isinstance(mask, Tensor) and mask.ndim == 2 and mask.numel() else None
    if not isinstance(batch, list | tuple):
        return None
    tokens = [place for place, one in enumerate(batch) if _is_of_tokens(one)]
    masks = [place for place in tokens if _looks_like_mask(batch[place])]
    others = [place for place in tokens if place not in masks and len(masks) == 1]
    return masks[0] if any(batch[place].shape == batch[masks[0]].shape for place in others) else None


def _is_of_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.numel() > 0 and not value.is_floating_point()


def _looks_like_mask(value: Tensor) -> bool:
    """Return whether each row is ones, then zeros."""
    whole = value.long()
    return bool(whole[:, 0].all()) and bool(whole.max() == 1) and bool((whole.diff(dim=1) <= 0).all())


def _length(mask: Tensor) -> int:
    """Return the columns up to the last that is no padding of all samples, as a multiple of 8, and T at most."""
    used = mask.any(0).nonzero()
    return min(mask.shape[1], _rounded_up(int(used[-1]) + 1 if len(used) else 1))


def _rounded_up(length: int) -> int:
    return -(-length // _MULTIPLE) * _MULTIPLE


def trimmed(batch: Any) -> Any:
    """Return a batch without the last columns that are padding of all samples, but for a multiple of 8.

    >>> mask = torch.arange(20).expand(2, 20) < 5
    >>> trimmed({"input_ids": torch.ones(2, 20), "attention_mask": mask})["input_ids"].shape
    torch.Size([2, 8])
    """
    mask = batch[_mask_key(batch)]
    length = _length(mask)

    def cut(value: Any) -> Any:
        is_of_tokens = isinstance(value, Tensor) and value.shape[:2] == mask.shape
        return value[:, :length].contiguous() if is_of_tokens else value

    if isinstance(batch, Mapping):
        return _with_values(batch, {name: cut(value) for name, value in batch.items()})
    values = [cut(value) for value in batch]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _with_values(batch: Mapping[str, Any], values: dict[str, Any]) -> Mapping[str, Any]:
    """Return a mapping of the type of ``batch`` with other items."""
    if not isinstance(batch, MutableMapping):
        return values
    result = copy(batch)
    result.clear()
    result.update(values)
    return result


@dataclass(frozen=True)
class Form:
    """Tell a model which tokens of a row are of one sample.

    Attributes:
        name: for messages.
        attention_mask: returns the mask that the model takes, if it takes one, for the number of the sample of each
            token, (R, P).
        shifts_labels: whether the loss predicts each token from those before it, and thus never the first of a sample.
        begins_after_padding: whether the first position is the padding token plus one, in place of 0.
    """

    name: str
    attention_mask: Callable[[Tensor], Tensor] | None = None
    shifts_labels: bool = False
    begins_after_padding: bool = False


def _same_sample(samples: Tensor) -> Tensor:
    """Return which tokens may look at which, those of one sample; (R, 1, P, P)."""
    return (samples[:, :, None] == samples[:, None, :])[:, None]


def _before_in_sample(samples: Tensor) -> Tensor:
    return _same_sample(samples).tril()


def _additive(mask: Callable[[Tensor], Tensor], samples: Tensor) -> Tensor:
    allowed = mask(samples)
    return torch.zeros_like(allowed, dtype=torch.float32).masked_fill(~allowed, torch.finfo(torch.float32).min)


FORMS = (
    Form("positions that begin again", shifts_labels=True),
    Form("a mask for a decoder", _before_in_sample, shifts_labels=True),
    Form("a mask for an encoder", _same_sample),
    Form("a mask for an encoder with positions as RoBERTa's", _same_sample, begins_after_padding=True),
    Form("a mask for a decoder to add to scores", partial(_additive, _before_in_sample), shifts_labels=True),
    Form("a mask for an encoder to add to scores", partial(_additive, _same_sample)),
)


def packed(batch: Mapping[str, Any], form: Form) -> Mapping[str, Any]:
    """Return a batch with several samples in a row, as long as the longest sample.

    Args:
        batch: one that :func:`why_not_padded` has no objection to.
        form: of what tells samples apart.

    Returns:
        A mapping of the same type with what was (B, T) as (R, P), ``position_ids`` and, as the form has it,
        ``attention_mask``.
    """
    mask = batch["attention_mask"].bool()
    rows = _rows(mask)
    length = _rounded_up(int(mask.sum(1).max()))
    padding_token = _padding_token(batch["input_ids"], mask)
    fills = {"labels": _IGNORED, "input_ids": padding_token}
    values: dict[str, Any] = {}
    for name, value in batch.items():
        if name in ("attention_mask", "position_ids"):
            continue
        values[name] = value.new_full((len(rows), length), fills.get(name, 0))
        for place, row in enumerate(rows):
            parts = [value[sample, mask[sample]] for sample in row]
            if name == "labels" and form.shifts_labels:
                parts = [torch.cat([part.new_full((1,), _IGNORED), part[1:]]) for part in parts]
            joined = torch.cat(parts)
            values[name][place, : len(joined)] = joined
    samples, positions = _samples_and_positions(mask, rows, length)
    values["position_ids"] = positions + (padding_token + 1 if form.begins_after_padding else 0)
    if form.attention_mask is not None:
        values["attention_mask"] = form.attention_mask(samples)
    return _with_values(batch, values)


def _rows(mask: Tensor) -> list[list[int]]:
    """Return the samples of each row, by first fit, the longest sample first."""
    lengths = mask.long().sum(1).tolist()
    rows: list[list[int]] = []
    free: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        place = next((place for place, room in enumerate(free) if room >= lengths[sample]), len(rows))
        if place == len(rows):
            rows.append([])
            free.append(max(lengths))
        rows[place].append(sample)
        free[place] -= lengths[sample]
    return rows


def _padding_token(tokens: Tensor, mask: Tensor) -> int:
    found = tokens[~mask]
    return int(found[0]) if len(found) else 0


def _samples_and_positions(mask: Tensor, rows: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor]:
    """Return the number of each token's sample in its row, and its place in it, (R, P); padding is a sample more."""
    lengths = mask.sum(1).tolist()
    samples, positions = [], []
    for row in rows:
        used = [lengths[sample] for sample in row]
        used.append(length - sum(used))
        samples.append(torch.repeat_interleave(torch.arange(len(used)), torch.tensor(used)))
        positions.append(torch.cat([torch.arange(each) for each in used]))
    return torch.stack(samples).to(mask.device), torch.stack(positions).to(mask.device)


def padding_shares(batch: Any) -> tuple[float, float] | None:
    """Return the share of columns that padding="trimmed" leaves out, and that of tokens that are padding.

    None is returned for a batch without an attention mask.
    """
    if (key := _mask_key(batch)) is None:
        return None
    mask = batch[key].bool()
    return 1 - _length(mask) / mask.shape[1], 1 - mask.double().mean().item()


def longest_of(batch: Any) -> int:
    """Return the tokens of the longest sample."""
    return int(batch[_mask_key(batch)].bool().sum(1).max())


def changes_for(padding: Padding) -> dict[str, Callable[[Any], Any]]:
    """Return functions that take padding out of batches, by what tells models apart that take their results."""
    if padding == "trimmed":
        return {"": trimmed}
    return {f"with {form.name}, ": partial(packed, form=form) for form in FORMS}


def choose_change(
    changes: Mapping[str, Callable[[Any], Any]], run: Callable[[Any], tuple[Tensor, list[Tensor]]], batch: Any
) -> str:
    """Return the name of the first of some functions after which a batch has the same loss and gradients.

    Args:
        changes: functions of a batch, by name.
        run: returns the loss and the gradients of a batch.
        batch: one that has padding.

    Raises:
        ValueError: if there is none, with what each has changed.
    """
    expected, reasons = run(batch), []
    for name, change in changes.items():
        try:
            found = run(change(batch))
        except Exception as error:  # whatever a module raises that expects other batches
            reasons.append(f"{name}{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        if not (reason := _deviation(expected, found)):
            return name
        reasons.append(f"{name}{reason}")
    raise ValueError("; ".join(reasons[:3]))


def training_of(module: L.LightningModule, batch: Any, with_gradients: bool = True) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of a training step in eval mode, and its gradients, without logs and changes of metrics.

    Args:
        module: on the device of the batch.
        batch: of training.
        with_gradients: whether to compute them, which modules whose parameters are sharded cannot do alone.

    Raises:
        TypeError: if the step returns no loss.
    """
    was_training = [one for one in module.modules() if one.training]
    parameters = [one for one in module.parameters() if one.requires_grad]
    with ExitStack() as contexts:
        contexts.enter_context(torch.set_grad_enabled(with_gradients))
        contexts.enter_context(isolate_rng())
        contexts.enter_context(without_traces(module))
        if with_gradients:
            contexts.enter_context(_in_float32(module))
        try:
            module.eval()
            with torch.autocast(module.device.type, enabled=False):
                output = repeat_training_step(module, batch)
        finally:
            for one in was_training:
                one.training = True
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise TypeError(f"training_step of {type(module).__name__} returns no loss that could be compared")
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if with_gradients else ()
    return loss.detach(), [one.detach() for one in gradients if one is not None]


@contextmanager
def _in_float32(module: L.LightningModule) -> Iterator[None]:
    """Hold what has fewer digits in float32, in which other batches deviate by less than tokens that see each other."""
    tensors = (*module.parameters(), *module.buffers())
    low = [(one, one.dtype) for one in tensors if one.is_floating_point() and one.dtype.itemsize < 4]
    for one, _ in low:
        one.data = one.data.float()
    try:
        yield
    finally:
        for one, dtype in low:
            one.data = one.data.to(dtype)


def _deviation(expected: tuple[Tensor, list[Tensor]], found: tuple[Tensor, list[Tensor]]) -> str:
    """Return what differs by more than rounding does, or nothing.

    Before training, losses hardly depend on what other tokens a token sees; gradients of queries and keys do.
    """
    (loss, gradients), (other, others) = expected, found
    tolerance = 1e-4 if loss.dtype in (torch.float32, torch.float64) else 5e-2
    if not torch.allclose(other.double(), loss.double(), rtol=tolerance, atol=tolerance):
        return f"its loss is {other.item():.6g} in place of {loss.item():.6g}"
    if len(gradients) != len(others):
        return "other parameters have gradients"
    whole = math.sqrt(sum(one.double().square().sum().item() for one in gradients))
    for one, another in zip(gradients, others, strict=True):
        norm, deviation = one.double().norm().item(), (another.double() - one.double()).norm().item()
        if deviation > 20 * tolerance * norm + 0.02 * tolerance * whole:  # some gradients are 0 but for rounding
            return f"a gradient of {norm:.3g} deviates by {deviation:.3g}"
    return ""
