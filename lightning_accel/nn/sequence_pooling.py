"""Pooling of the valid steps of sequences to one vector. Shapes: B samples, T steps, H features."""

import torch
from torch import Tensor, nn

POOLINGS = ("last", "mean", "max", "attention", "none")


def pool(x: Tensor, lengths: Tensor | None, how: str) -> Tensor | None:
    """Pool ``x`` (B, T, H), zero after ``lengths`` (B,), by ``mean`` or ``max``; 0 for a sample of length 0."""
    if how == "none":
        return None
    if how == "mean":
        count = x.shape[1] if lengths is None else lengths.to(x.device)[:, None]
        return (x.sum(1) / torch.as_tensor(count, device=x.device).clamp(min=1)).to(x.dtype)
    if x.shape[1] == 0:
        return x.sum(1)
    if lengths is None:
        return x.amax(1)
    lengths = lengths.to(x.device)
    top = x.masked_fill(_past_end(x, lengths)[..., None], -torch.inf).amax(1)
    return top.masked_fill((lengths == 0)[:, None], 0)


class AttentionPooling(nn.Module):
    """Pool steps by attention with a learned query (Yang et al. 2016, eq. 5 to 7).

    >>> AttentionPooling(4)(torch.ones(2, 3, 4), torch.tensor([3, 0])).sum(1).detach()
    tensor([4., 0.])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.key = nn.Linear(dim, dim)
        self.query = nn.Parameter(torch.randn(dim) / dim**0.5)

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Pool ``x`` (B, T, H), finite also after ``lengths`` (B,), to (B, H); 0 for a sample of length 0."""
        scores = (self.key(x).tanh() @ self.query).to(torch.promote_types(x.dtype, torch.float32))  # (B, T)
        if lengths is None:
            weights = scores.softmax(1)
        else:
            over = _past_end(x, lengths.to(x.device))
            # finite, then set to 0: with -inf a sample of length 0 would become NaN
            weights = scores.masked_fill(over, -1e30).softmax(1).masked_fill(over, 0)
        return torch.einsum("bt,bth->bh", weights.to(x.dtype), x)


def _past_end(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
