"""Distances between a student and its teacher.

Shapes: B samples, T steps, C classes, k of them, N values per sample.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel._private.torch import tree_leaves
from lightning_accel.strategies.batch_splitting import leaves

_LEAST = -1e4  # logarithm of a probability of 0, where the reverse divergence would be infinite


class TopClasses(NamedTuple):
    """Hold the k most probable classes at each position.

    Attributes:
        log_probs: (..., k) float32, logarithms of their probabilities.
        classes: (..., k) int64.
    """

    log_probs: Tensor
    classes: Tensor


def top_classes(logits: Tensor, k: int, temperature: float) -> TopClasses:
    """Return the ``k`` most probable classes of ``logits`` (..., C) divided by ``temperature``, all if C is less."""
    log_probs = F.log_softmax(_to_float32(logits) / temperature, dim=-1)
    return TopClasses(*log_probs.topk(min(k, logits.shape[-1]), dim=-1))


def divergence(
    student: Tensor,
    teacher: Tensor | TopClasses,
    temperature: float,
    class_dim: int = -1,
    keep: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """Compute the Kullback-Leibler divergence of softened distributions, in nats times ``temperature`` squared, ().

    Args:
        student: logits, with classes in ``class_dim``.
        teacher: logits of the same shape; or its most probable classes at this temperature, where all others count as
            one class, and ``class_dim`` is the last.
        temperature: divisor of both.
        class_dim: dimension of the classes.
        keep: mask of the positions to include, of the shape without ``class_dim``; by default all.
        reverse: whether the divergence is that of the student from the teacher, which punishes what the teacher finds
            improbable rather than what the student misses.

    Source: Hinton, Vinyals and Dean 2015, Distilling the Knowledge in a Neural Network, section 2, where the factor
        keeps gradients as large as those of hard targets; averaged over positions here. In reverse: Gu et al. 2023,
        MiniLLM, eq. 1, https://arxiv.org/abs/2306.08543, with the teacher's texts.
    >>> divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]]), 2.0)
    tensor(0.4438)
    """
    own = F.log_softmax(_to_float32(student) / temperature, dim=class_dim)
    if isinstance(teacher, TopClasses):
        own, aim = _with_one_for_others(own, teacher)
    else:
        aim = F.log_softmax(_to_float32(teacher) / temperature, dim=class_dim)
    if reverse:
        own, aim = aim.clamp(min=_LEAST), own
    terms = torch.where(aim == -torch.inf, 0.0, aim.exp() * (aim - own))  # 0 for classes masked out in both
    return mean_of(terms.sum(class_dim), keep) * temperature**2


def _with_one_for_others(own: Tensor, teacher: TopClasses) -> tuple[Tensor, Tensor]:
    """Return logarithms of probabilities of the teacher's classes, and of all others together, (..., k + 1)."""
    student = own.gather(-1, teacher.classes)
    rest = own.scatter(-1, teacher.classes, -torch.inf).logsumexp(-1, keepdim=True).clamp(min=_LEAST)
    aim = teacher.log_probs
    left = (1 - aim.exp().sum(-1, keepdim=True)).clamp(min=0).log()
    if aim.shape[-1] == own.shape[-1]:
        return student, aim
    return torch.cat([student, rest], -1), torch.cat([aim, left], -1)


def squared_error(student: Tensor, teacher: Tensor, keep: Tensor | None = None) -> Tensor:
    """Compute the mean squared difference of equal shapes, (); ``keep`` masks their first dimensions."""
    difference = (_to_float32(student) - _to_float32(teacher)).square()
    if keep is not None and keep.ndim < difference.ndim:
        difference = difference.flatten(keep.ndim).mean(-1)
    return mean_of(difference, keep)


def mean_of(values: Tensor, keep: Tensor | None) -> Tensor:
    """Return the mean of the values where ``keep`` is True; 0 if none is."""
    if keep is None:
        return values.mean()
    return torch.where(keep, values, 0.0).sum() / keep.sum().clamp(min=1)


def output_tensor(output: Any, of_what: str) -> Tensor:
    """Return the main tensor of an output: its ``logits`` or ``scores``, or its first floating one with a dimension.

    Raises:
        TypeError: if the output holds no such tensor.
    """
    if not isinstance(output, Tensor):
        named = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
        if hasattr(output, "_asdict"):
            named = output._asdict()
        for name in ("logits", "scores"):
            if isinstance(named.get(name), Tensor):
                return named[name]
    for value in tree_leaves(output):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:  # not a loss, as of CLIP
            return value
    raise TypeError(f"distillation needs a floating tensor of samples from {of_what}; it gives {type(output).__name__}")


def position_mask(shape: torch.Size, lengths: Tensor | None, batch: Any, ignore_index: int) -> Tensor | None:
    """Return a mask of the positions of ``shape``, (B, ...), that the step's criterion includes; None for all.

    Steps past the ``lengths`` (B,) of sequences are excluded, and so are positions that a tensor of classes in
    ``batch``, of the same shape, marks with ``ignore_index``.
    """
    keep = None
    if lengths is not None and len(shape) > 1 and lengths.shape == shape[:1]:
        number = torch.arange(shape[1], device=lengths.device)
        within = number < lengths[:, None]
        keep = within.reshape(*within.shape, *[1] * (len(shape) - 2)).expand(shape)
    for value in leaves(batch):
        if isinstance(value, Tensor) and value.dtype == torch.int64 and value.shape == shape:
            there = value != ignore_index
            keep = there if keep is None else keep.to(there.device) & there
    return keep


def denominator_ratio(keep: Tensor | None, weight: Any) -> Tensor | float:
    """Return the factor that turns a mean over the kept positions, (B, ...), into one with the denominator ``weight``.

    Processes with more positions then contribute more, as in a loss that is a sum divided by a ``weight`` that is equal
    on all processes. The weight is taken to count positions or samples, whichever number is closer to it.
    """
    if keep is None or weight is None:
        return 1.0
    weight = torch.as_tensor(weight, device=keep.device).detach().float()
    rows = keep.flatten(1).any(1) if keep.ndim > 1 else keep
    by_position, by_row = keep.sum() / weight, rows.sum() / weight
    ratio = torch.where(by_position.log().abs() <= by_row.log().abs(), by_position, by_row)
    return torch.where(weight > 0, ratio, 1.0)


def lengths_in(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the argument ``lengths`` of a call of ``module``, if its ``forward`` has that parameter."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # forward is replaced by something without a matching signature
        return None
    lengths = bound.get("lengths")
    return lengths if isinstance(lengths, Tensor) else None


def _to_float32(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))
