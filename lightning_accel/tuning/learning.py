"""Changes of batches, most of which are tried only where they are allowed by name."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

import lightning as L

from lightning_accel.callbacks.batching import larger_batches, why_not_larger, why_not_scalable
from lightning_accel.callbacks.length_buckets import why_not_bucketed
from lightning_accel.callbacks.padding import Padding, has_padding, why_not_padded
from lightning_accel.callbacks.speedups import loaders_of
from lightning_accel.tuning.choices import ALLOWABLE
from lightning_accel.tuning.factors import Factor, Refusal
from lightning_accel.tuning.project import Changes

_LOOKED_AT = 64  # samples whose lengths tell whether a data set has several
BATCH_SIZE_FACTORS = (2, 4, 8)
_NO_LOADER = "the training data is not in one torch DataLoader"


def require_known(allow: Sequence[str]) -> None:
    """Check the names of changes that are allowed.

    Raises:
        ValueError: if one is unknown.
    """
    if isinstance(allow, str) or not isinstance(allow, Sequence):
        raise ValueError(
            f"allow takes a list of names, such as ['packed'], among {', '.join(ALLOWABLE)}; got {allow!r}"
        )
    for name in allow:
        if name not in ALLOWABLE:
            near = "".join(f"; did you mean {one!r}?" for one in get_close_matches(str(name), ALLOWABLE, n=1))
            raise ValueError(f"allow takes names among {', '.join(ALLOWABLE)}; got {name!r}{near}")


def learning_changes_for(facts: Mapping[str, Any], allow: Sequence[str]) -> Iterator[Factor | Refusal]:
    """Yield the changes of batches that are allowed and that a run admits, and why others are not tried.

    Args:
        facts: see :func:`lightning_accel.tuning.recorder.facts_of`.
        allow: names among :data:`ALLOWABLE`.
    """
    tried: list[Factor | Refusal] = []
    for factor in BATCH_SIZE_FACTORS:
        name = f"batch_size x {factor}"
        if reason := facts["larger_batches"][str(factor)]["reason"]:
            tried.append(Refusal(name, reason))
        else:
            tried.append(Factor(name, "batch_size", "learned", Changes(batching={"batch_size_factor": factor})))
    if "batch_size" in allow:
        yield from tried
    elif any(isinstance(one, Factor) for one in tried):
        yield _not_allowed("batch_size")
    name = "length_bucketed"
    if name in allow:
        changes = Changes(batching={name: True})
        reason = facts["not_bucketed"]
        yield Refusal(name, reason) if reason else Factor(name, name, "learned", changes)
    elif not facts["not_bucketed"]:
        yield _not_allowed(name)
    for padding, reason in facts["not_padded"].items():
        is_asked_for = padding in allow
        if reason:
            yield from [Refusal(f"padding={padding}", reason)] if is_asked_for else []
        elif is_asked_for or padding == "trimmed":
            yield Factor(f"padding={padding}", "padding", "checked", Changes(batching={"padding": padding}))
        else:
            yield Refusal(padding, f"it puts several samples in a row: allow it by name with --allow {padding}")


def _not_allowed(name: str) -> Refusal:
    return Refusal(name, f"it changes what is learned: allow it by name with --allow {name}")


def samples_per_step(facts: Mapping[str, Any], changes: Changes) -> float:
    """Return how many times as many samples a step sees with the changes, on average over an epoch."""
    factor = changes.batching.get("batch_size_factor", 1)
    return 1.0 if factor == 1 else facts["larger_batches"][str(factor)]["samples"]


def larger_batches_of(trainer: L.Trainer, loaders: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return, for each factor of the batch size, how many times as many samples a step sees, or why it cannot.

    Args:
        trainer: of a run that has begun.
        loaders: its training loaders.
    """
    return {str(factor): _larger(trainer, loaders, factor) for factor in BATCH_SIZE_FACTORS}


def why_not_padded_of(batch: Any) -> dict[str, str]:
    """Return why padding cannot be taken out of batches like this one, by what would be made of it, or nothing."""
    return {
        padding: why_not_padded(batch, padding)
        or ("" if has_padding(batch, padding) else "a batch has no such padding")
        for padding in get_args(Padding)
    }


def why_not_bucketed_of(loaders: Sequence[Any]) -> str:
    """Return why batches cannot be of samples of similar length, as far as some of them tell, or nothing.

    Args:
        loaders: training loaders of a run.
    """
    if len(loaders) != 1 or not list(loaders_of(loaders[0])):
        return _NO_LOADER
    return why_not_bucketed(loaders[0], _LOOKED_AT)


def _larger(trainer: L.Trainer, loaders: Sequence[Any], factor: int) -> dict[str, Any]:
    reasons = []
    if len(loaders) != 1 or not list(loaders_of(loaders[0])):
        reasons.append(_NO_LOADER)
    elif reason := why_not_larger(loaders[0], factor):
        reasons.append(reason)
    if trainer.max_steps != -1:
        reasons.append(f"max_steps={trainer.max_steps} counts updates, so that larger ones would not shorten the run")
    if isinstance(trainer.limit_train_batches, int):
        reasons.append("the Trainer limits the batches of an epoch by their number")
    reasons += filter(None, (why_not_scalable(optimizer, factor) for optimizer in trainer.optimizers))
    if reasons:
        return {"reason": reasons[0], "samples": 1.0}
    before = len(loaders[0])
    with larger_batches(loaders[0], factor):
        # the last batch may be incomplete; where incomplete ones are dropped, every batch is larger by the factor
        return {"reason": "", "samples": min(float(factor), before / len(loaders[0]))}
