"""Changes that may make a run need less memory, as far as facts about the run admit them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_accel.tuning.comparison import Ratio, ratio_of
from lightning_accel.tuning.factors import Factor, Kind, Refusal, compilations, precisions, strategies
from lightning_accel.tuning.project import Changes
from lightning_accel.tuning.variant import Variant

_PAIRS = 4  # of processes, which prove that memory is saved


def savings_for(facts: Mapping[str, Any]) -> Iterator[Factor | Refusal]:
    """Yield what can be tried to save memory on a run, and what cannot.

    Args:
        facts: see :func:`lightning_accel.tuning.recorder.facts_of`.
    """
    yield from _micro_batches(facts)
    yield _checkpointing(facts)
    yield from strategies(facts) if facts["strategy"] == "ddp" and facts["world_size"] > 1 else ()
    yield from _offloads(facts)
    yield from precisions(facts, facts["device"] == "cuda")
    yield from compilations(facts)
    workers = max((loader["num_workers"] for loader in facts["loaders"]), default=0)
    for number in sorted({0, 1} - {workers}) if workers else []:
        changes = Changes(speedups={"num_workers": number})
        yield Factor(f"num_workers={number}", "num_workers", "random", changes)


def _micro_batches(facts: Mapping[str, Any]) -> Iterator[Factor | Refusal]:
    size = facts["items_per_step"] // facts["world_size"]
    reason = ""
    if not facts["automatic_optimization"]:
        reason = "the module optimizes by hand, and has to split its batches itself"
    elif facts["has_batch_norms"]:
        reason = "batch norms would see smaller batches, and train otherwise"
    elif facts["strategy"] not in ("single", "ddp"):
        reason = "the strategy splits parameters or batches itself: use its own micro-batches"
    elif facts["precision"].startswith("16"):
        reason = "float16 scales the loss of a whole batch"
    elif size < 2:
        reason = "a batch has one sample"
    if reason:
        yield Refusal("micro_batches", reason)
        return
    # a step that draws nothing cannot draw otherwise: if its losses deviate, they are no means over samples
    kind: Kind = "exact" if facts["draws"] else "equal"
    for number in (2, 4, 8):
        if number <= size:
            yield Factor(f"micro_batches={number}", "micro_batches", kind, Changes(savings={"micro_batches": number}))


def _checkpointing(facts: Mapping[str, Any]) -> Factor | Refusal:
    name = "activation_checkpointing"
    if not facts["num_repeated"]:
        return Refusal(name, "the model has no repeated blocks")
    if facts["batch_norms_in_blocks"]:
        return Refusal(name, "the batch norms in the blocks would run twice, and have other running statistics")
    return Factor(name, name, "exact", Changes(savings={name: True}))


def _offloads(facts: Mapping[str, Any]) -> Iterator[Factor | Refusal]:
    """Yield what keeps activations, or parameters and what belongs to them, on the host."""
    name = "activation_offload"
    if facts["device"] != "cuda":
        yield Refusal(name, "activations are in the memory of the host already")
        return
    if facts["strategy"] in ("single", "ddp"):
        yield Factor(name, name, "exact", Changes(savings={name: True}))
    else:
        yield Refusal(name, "the strategy splits parameters itself: it may keep them on the host")
    if facts["strategy"] != "other":
        changes = Changes(trainer={"strategy": "accel_fsdp2_offload"})
        yield Factor("strategy=accel_fsdp2_offload", "strategy", "exact", changes)


def saving_of(reference: Variant, variant: Variant) -> float:
    """Return how many times less memory ``variant`` has needed, after as many steps of each."""
    before, after = reference.peak_bytes(), variant.peak_bytes()
    num_steps = max(before.keys() & after.keys())
    return before[num_steps] / max(1, after[num_steps])


def prove_saving(new_variant: Callable[[Changes], Variant], changes: Changes, seconds: float, deadline: float) -> Ratio:
    """Return how many times less memory training needs, from fresh processes of the baseline and the changes.

    Args:
        new_variant: makes a variant that has not started.
        changes: the changes.
        seconds: that each trains for after it has warmed up.
        deadline: when to stop, a time of ``time.monotonic``.

    Raises:
        TrialError: if one fails, or there is not the time.
    """
    savings = []
    for _ in range(_PAIRS):
        pair = [new_variant(each) for each in (Changes(), changes)]
        for variant in pair:
            try:
                variant.start()
                variant.warm_up(deadline)
                variant.run_for(seconds, deadline)
            finally:
                variant.stop()
        savings.append(saving_of(*pair))
    return ratio_of(savings)
