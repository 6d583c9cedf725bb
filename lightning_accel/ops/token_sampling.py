"""Drawing of tokens by the scores of a language model. Shapes: B samples, V words of the vocabulary."""

import torch
from torch import Tensor


def draw_tokens(
    logits: Tensor, temperature: float = 1.0, sample_from: int = 0, generator: torch.Generator | None = None
) -> Tensor:
    """Draw a token for each sample of ``logits`` (B, V), (B, 1).

    Args:
        logits: scores, floating point.
        temperature: divides the scores; 0 takes the most probable token.
        sample_from: draw from this many of the most probable tokens; 0 for all.
        generator: random number generator.

    Raises:
        ValueError: if ``temperature`` is negative or NaN.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0; got {temperature}")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if 0 < sample_from < logits.shape[1]:
        least = logits.topk(sample_from).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    below = logits - logits.max(dim=-1, keepdim=True).values  # so that small temperatures do not overflow
    return torch.multinomial((below / temperature).softmax(dim=-1), 1, generator=generator)
