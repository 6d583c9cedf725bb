"""Perplexity of causal language models on the texts that they are called with.

Shapes: B samples, T tokens, V words of the vocabulary, N predicted tokens.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # label of tokens that are not predicted, as in torch and transformers
PERPLEXITY = "perplexity"  # name of the metric


@dataclass
class Perplexity:
    """Add up the losses of predicted tokens."""

    nats: float = 0.0
    num_tokens: int = 0

    def add(self, losses: Tensor) -> None:
        """Add losses in nats, (N,)."""
        self.nats += float(losses.double().sum())
        self.num_tokens += len(losses)

    @property
    def value(self) -> float | None:
        """Return the exponential of the mean loss; None without tokens."""
        if not self.num_tokens:
            return None
        return float(torch.tensor(self.nats / self.num_tokens, dtype=torch.float64).exp())


@contextmanager
def measured_perplexity(module: nn.Module) -> Iterator[Perplexity]:
    """Add up the losses of all calls of a causal language model while open, whatever runs in place of its ``forward``.

    Calls whose tokens or logits cannot be told are left out, see :func:`token_losses`.
    """
    found = Perplexity()
    names = tuple(signature(module.forward).parameters)  # before another function takes its place

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found.add(token_losses(dict(zip(names, args, strict=False)) | kwargs, output))

    handle = module.register_forward_hook(add, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


@torch.no_grad()
def token_losses(arguments: Mapping[str, Any], output: Any) -> Tensor:
    """Return the losses of the next tokens in one call of a causal language model.

    Each token of a text is predicted from those before it, so that the first one is not. Tokens are left out whose
    label is -100, or that a mask of padding leaves out, or the token before them.

    Args:
        arguments: those of ``forward``, by name: ``input_ids``, or else the first int64 (B, T), are the tokens;
            ``labels`` (B, T), if there are any, are what is predicted, shifted as in transformers; an
            ``attention_mask`` (B, T) is 0 at padding.
        output: what ``forward`` returned, with ``logits`` (B, T, V).

    Returns:
        (N,) float32, in nats; empty if the call has no such tokens, or the output no such logits.
    """
    named = [arguments["input_ids"]] if "input_ids" in arguments else arguments.values()
    tokens = next(filter(_is_text, named), None)
    logits = getattr(output, "logits", None)
    if tokens is None or not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        return torch.zeros(0)
    labels, mask = (arguments.get(name) for name in ("labels", "attention_mask"))
    labels = tokens if labels is None else labels
    if not _is_text(labels) or labels.shape != tokens.shape:
        return torch.zeros(0)
    is_counted = labels[:, 1:] != IGNORED
    if isinstance(mask, Tensor) and mask.shape == tokens.shape:
        is_counted = is_counted & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    samples = zip(logits[:, :-1], labels[:, 1:], is_counted, strict=True)  # one by one: logits may fill the memory
    return torch.cat([_losses(*sample) for sample in samples])


def _losses(logits: Tensor, labels: Tensor, is_counted: Tensor) -> Tensor:
    return F.cross_entropy(logits[is_counted].float(), labels[is_counted], reduction="none")


def _is_text(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype == torch.int64
