"""Changes that may make a run faster, as far as facts about the run admit them."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_accel._private.torch import has_amx
from lightning_accel.measure.allocators import ALLOCATORS, LIBRARIES, why_no_allocator
from lightning_accel.ops.matmul import onednn_outruns_mkl, why_no_onednn_matmul
from lightning_accel.ops.native import missing_kernel
from lightning_accel.tuning.comparison import Shares
from lightning_accel.tuning.project import Changes

Kind = Literal["checked", "equal", "exact", "random", "rounding", "learned"]
_BFLOAT16 = {
    "precision=bf16-mixed": Changes(trainer={"precision": "bf16-mixed"}),
    "Bfloat16Precision": Changes(precision={"Bfloat16Precision": {}}),
}
_SPARSE = Changes(sparsity={"exclude": None})
# names of changes begin with these; of a group, the order is that of simplicity
_LOADING = "persistent_workers", "num_workers", "prefetch_factor", "batched_fetch"
_PART_OF = dict.fromkeys(_LOADING, "data") | {
    "fused_optimizer": "optimizer",
    "keep_freed_memory": "system",
    "allocator": "system",
}
# the share of a step on the CPU that a change saves of runs that gain by it, where no part of the run tells
_SAVED = {
    "precision=bf16-mixed": 0.5,
    "fused_rnn": 0.4,
    "onednn_matmul": 0.3,
    "fused_messages": 0.25,
    "attention=native": 0.2,
    "channels_last": 0.12,
    "native_dropout": 0.1,
}
_SAVED_BY_OTHERS = 0.05
_FIRST_ON_CUDA = (  # what most runs gain by, the most first
    "matmul_precision",
    "precision=bf16",
    "strategy",
    "channels_last",
    "fused_optimizer",
    "compile=children, compile_mode=reduce-overhead",
    "compile",
)
_LAST = {"cpu": "compile", "cuda": "compile=children, compile_mode=max-autotune"}
_SLOW_LOADING = 0.6  # share of a step, from which on a change to loading gains most; a GPU computes in the meantime
_LEAST_PART = 0.02  # share of a step that a change may save, less than which is within the noise of turns
_PREFETCH = 8  # batches ahead of a step, which level out items that take unequally long


@dataclass(frozen=True)
class Factor:
    """Hold one change.

    Attributes:
        name: for tables.
        group: at most one factor of a group is chosen. Simpler ones come first: one that comes later is chosen only if
            it is shown to gain more.
        kind: ``exact``: losses are equal up to rounding; ``equal``: so they are, or else it is dropped, since nothing
            can draw other random numbers; ``checked``: the run itself compares losses and gradients with those of the
            run as it is, and fails if they differ by more than rounding; ``random``: losses have the same distribution,
            but other random numbers are drawn; ``rounding``: numbers have fewer digits; ``learned``: the run learns
            otherwise, which has to be allowed.
        changes: the change.
    """

    name: str
    group: str
    kind: Kind
    changes: Changes


@dataclass(frozen=True)
class Refusal:
    """Hold a factor's name, and why it is not tried."""

    name: str
    reason: str


def factors_for(facts: Mapping[str, Any], shares: Shares) -> list[Factor | Refusal]:
    """Return what can be tried on a run, and what cannot; what to try first comes first.

    On the CPU, that is what can save most of a step: the part of it that was measured, or where none was, what runs
    that gain by the change save. Compilation comes last, since it starts much more slowly than the other changes. On a
    GPU, whose parts of a step overlap, changes that most runs gain by come first.

    Args:
        facts: see :func:`lightning_accel.tuning.recorder.facts_of`.
        shares: parts of a step.
    """
    device = "cuda" if facts["device"] == "cuda" else "cpu"
    places: dict[str, float]
    if device == "cuda":
        first = (*(_LOADING if shares.data > _SLOW_LOADING else ()), *_FIRST_ON_CUDA)
        places, others = {name: number for number, name in enumerate(first)}, float(len(first))
    else:
        saved = {name: getattr(shares, part) for name, part in _PART_OF.items()} | _SAVED
        places, others = {name: -share for name, share in saved.items()}, -_SAVED_BY_OTHERS

    def place(one: Factor | Refusal) -> tuple[bool, float]:
        found = (number for name, number in places.items() if one.name.startswith(name))
        return one.name.startswith(_LAST[device]), next(found, others)

    return sorted(_factors_for(facts, shares), key=place)


def _factors_for(facts: Mapping[str, Any], shares: Shares) -> Iterator[Factor | Refusal]:
    is_cuda = facts["device"] == "cuda"
    yield from precisions(facts, is_cuda)
    yield from attention(facts, is_cuda)
    yield from _loaders(facts, shares.data, is_cuda)
    if facts["world_size"] > 1:
        yield from _ddp(facts)
        if is_cuda:
            yield from strategies(facts)
    yield from device_settings(facts, is_cuda)
    if not is_cuda:
        yield _dropout(facts)
        yield _native_attention(facts)
    else:
        yield deferred_weights(facts)
    if facts["num_fusible_rnns"] and not is_cuda:
        yield speedup("fused_rnn", "rnn", "exact", fused_rnn=True)
    else:
        yield Refusal("fused_rnn", "the model trains no nn.LSTM or nn.GRU without proj_size on the CPU")
    if facts["num_fusible_convolutions"] and not is_cuda:
        yield speedup("fused_messages", "messages", "exact", fused_messages=True)
    else:
        yield Refusal("fused_messages", "no convolution of PyTorch Geometric sums or averages its messages on the CPU")
    yield channels_last(facts)
    if not facts["fusible_optimizers"] or facts["fused"]:
        yield Refusal("fused_optimizer", "no optimizer has a fused implementation that is not used already")
    elif not is_cuda and shares.optimizer < _LEAST_PART:
        yield Refusal("fused_optimizer", f"optimizers take {shares.optimizer:.1%} of a step")
    else:
        yield speedup("fused_optimizer", "optimizer", "exact", fused_optimizer=True)
    yield from compilations(facts)


def speedup(name: str, group: str, kind: Kind, **arguments: Any) -> Factor:
    """Return a change that :class:`lightning_accel.callbacks.Speedups` makes."""
    return Factor(name, group, kind, Changes(speedups=arguments))


def device_settings(facts: Mapping[str, Any], is_cuda: bool) -> Iterator[Factor | Refusal]:
    """Yield settings of the device and of its libraries."""
    if is_cuda:
        yield Factor("benchmark", "benchmark", "exact", Changes(trainer={"benchmark": True}))
        return
    for threads in sorted({1, max(1, facts["cores"] // facts["world_size"])} - {facts["threads"]}):
        yield speedup(f"threads={threads}", "threads", "exact", threads=threads)
    yield _onednn_matmul(facts)
    if platform.libc_ver()[0] == "glibc":
        yield speedup("keep_freed_memory", "memory", "exact", keep_freed_memory=True)
    else:
        yield Refusal("keep_freed_memory", "the C library is not glibc")
    yield from _allocators(facts)


def _onednn_matmul(facts: Mapping[str, Any]) -> Factor | Refusal:
    name = "onednn_matmul"
    if facts["precision"] != "32-true":
        return Refusal(name, f"it is for matrices in float32, and the run has precision {facts['precision']}")
    if not onednn_outruns_mkl():
        return Refusal(name, "MKL, which it replaces, uses the instructions of this processor, or torch has none")
    if reason := why_no_onednn_matmul():
        return Refusal(name, reason)
    return speedup(name, "matmul", "exact", onednn_matmul=True)


def _allocators(facts: Mapping[str, Any]) -> Iterator[Factor | Refusal]:
    """Yield the first library that is installed, and huge pages."""
    in_use, library = facts["allocator"], ""
    for name in ALLOCATORS:
        reason = f"the process runs with {in_use} already" if in_use else why_no_allocator(name)
        if not reason and library and name in LIBRARIES:
            reason = f"{library} is installed, which was as fast or faster where both were measured"
        if reason:
            yield Refusal(f"allocator={name}", reason)
            continue
        library = library or name
        yield speedup(f"allocator={name}", "memory", "exact", allocator=name)


def channels_last(facts: Mapping[str, Any]) -> Factor | Refusal:
    """Return the other order in memory of 2D convolutions, or why there is none."""
    if facts["num_conv2d"]:
        return speedup("channels_last", "channels_last", "exact", channels_last=True)
    return Refusal("channels_last", "the model has no 2D convolution")


def deferred_weights(facts: Mapping[str, Any]) -> Factor | Refusal:
    """Return attention weights that are computed where they are used, or why there are none."""
    name = "defer_attention_weights"
    if facts["num_deferrable_attentions"]:
        return speedup(name, name, "exact", defer_attention_weights=True)
    return Refusal(name, "the model calls no nn.MultiheadAttention without dropout itself")


def precisions(facts: Mapping[str, Any], is_cuda: bool) -> Iterator[Factor | Refusal]:
    """Yield precisions with fewer digits."""
    if facts["precision"] != "32-true":
        yield Refusal("precision", f"the run has one of its own: {facts['precision']}")
        return
    if is_cuda:
        yield speedup("matmul_precision=high", "precision", "rounding", matmul_precision="high")
    elif facts["bfloat16_units"] and has_amx():  # without tiles, products of oneDNN stay in float32: onednn_matmul
        yield speedup("matmul_precision=medium", "precision", "rounding", matmul_precision="medium")
    if facts["bfloat16_units"]:
        for name, changes in _BFLOAT16.items():
            # with attention on the CPU, its backend decides, so that both are tried together alone
            if name == "precision=bf16-mixed" or is_cuda or not facts["has_attention"]:
                yield Factor(name, "precision", "rounding", changes)
    else:
        yield Refusal("precision=bf16-mixed", "the processor has no bfloat16 units")
    if is_cuda:
        yield Factor("precision=16-mixed", "precision", "rounding", Changes(trainer={"precision": "16-mixed"}))


def attention(facts: Mapping[str, Any], is_cuda: bool) -> Iterator[Factor | Refusal]:
    """Yield backends of torch; on the CPU with bfloat16 alone, since in float32 torch's choice is the faster."""
    if not facts["has_attention"]:
        yield Refusal("attention", "no layer of the model has attention in its name")
    elif is_cuda:
        yield speedup("attention=cudnn", "attention", "exact", attention="cudnn")
        yield speedup("attention=efficient", "attention", "exact", attention="efficient")
    elif "bf16" in facts["precision"]:
        yield speedup("attention=math", "attention", "exact", attention="math")
    elif facts["precision"] == "32-true" and facts["bfloat16_units"]:
        math = Changes(speedups={"attention": "math"})
        for name, changes in _BFLOAT16.items():
            yield Factor(f"{name} with attention=math", "precision", "rounding", changes | math)
    else:
        yield Refusal("attention", "on the CPU, torch's own choice is the faster one without bfloat16")


def strategies(facts: Mapping[str, Any]) -> Iterator[Factor]:
    """Yield whole parameters on each rank in place of shards, or shards in place of whole ones."""
    other = {"ddp": "accel_fsdp2", "sharded": "ddp"}.get(facts["strategy"])
    if other:
        yield Factor(f"strategy={other}", "strategy", "exact", Changes(trainer={"strategy": other}))


def float8_for(facts: Mapping[str, Any], allow: Sequence[str]) -> Iterator[Factor | Refusal]:
    """Yield compiled linear layers in float8 where they are allowed, or why not; nothing if they are not possible.

    Args:
        facts: see :func:`lightning_accel.tuning.recorder.facts_of`.
        allow: names among :data:`lightning_accel.tuning.choices.ALLOWABLE`.
    """
    name = "float8"
    if facts["not_float8"]:
        if name in allow:
            yield Refusal(name, facts["not_float8"])
    elif name in allow:
        changes = Changes(precision={"Float8Precision": {}}, speedups={"compile": "children"})
        yield Factor(f"{name} with compile=children", "precision", "rounding", changes)
    else:
        yield Refusal(name, f"numbers have three or four digits in base 2: allow it by name with --allow {name}")


def sparsity_for(facts: Mapping[str, Any], allow: Sequence[str]) -> Iterator[Factor | Refusal]:
    """Yield 2:4 sparse weights where they are allowed, or why not; nothing if they are not possible.

    Args:
        facts: see :func:`lightning_accel.tuning.recorder.facts_of`.
        allow: names among :data:`lightning_accel.tuning.choices.ALLOWABLE`.
    """
    name = "2:4"
    if facts["not_sparsifiable"]:
        if name in allow:
            yield Refusal(name, facts["not_sparsifiable"])
    elif name not in allow:
        yield Refusal(name, f"half of the weights are left out: allow it by name with --allow {name}")
    elif facts["precision"] == "32-true":
        bfloat16 = _BFLOAT16["precision=bf16-mixed"]
        yield Factor(f"{name} with precision=bf16-mixed", "precision", "learned", bfloat16 | _SPARSE)
    else:
        yield Factor(name, "sparsity", "learned", _SPARSE)


def compilations(facts: Mapping[str, Any]) -> Iterator[Factor | Refusal]:
    """Yield what can be compiled; on CUDA in graphs, too, which start without the CPU."""
    if facts["num_children"]:
        yield speedup("compile=children", "compile", "exact", compile="children")
        for mode in ("reduce-overhead", "max-autotune") if facts["device"] == "cuda" else ():
            name = f"compile=children, compile_mode={mode}"
            yield speedup(name, "compile", "exact", compile="children", compile_mode=mode)
    else:
        yield Refusal("compile=children", "the module has no submodule with parameters")
    if facts["num_children"] and facts["shapes_vary"]:
        name = "compile=children, compile_dynamic"
        yield speedup(name, "compile", "exact", compile="children", compile_dynamic=True)
    if facts["num_blocks"] > 1:
        yield speedup("compile=blocks", "compile", "exact", compile="blocks")
    else:
        yield Refusal("compile=blocks", "the model has no repeated blocks")


def _dropout(facts: Mapping[str, Any]) -> Factor | Refusal:
    if not facts["has_dropout"]:
        return Refusal("native_dropout", "the model has no dropout")
    if reason := missing_kernel():
        return Refusal("native_dropout", reason)
    return speedup("native_dropout", "dropout", "random", native_dropout=True)


def _native_attention(facts: Mapping[str, Any]) -> Factor | Refusal:
    if not facts["has_attention"]:
        return Refusal("attention=native", "no layer of the model has attention in its name")
    if reason := missing_kernel():
        return Refusal("attention=native", reason)
    kind: Kind = "random" if facts["has_dropout"] else "exact"
    if facts["num_deferrable_attentions"]:  # which the kernel does not reach otherwise; without it, torch's is slower
        name, deferred = "attention=native with defer_attention_weights", {"defer_attention_weights": True}
    else:
        name, deferred = "attention=native", {}
    return speedup(name, "attention", kind, attention="native", **deferred)


def _loaders(facts: Mapping[str, Any], wait_share: float, is_cuda: bool) -> Iterator[Factor | Refusal]:
    loaders = facts["loaders"]
    if not loaders:
        yield Refusal("num_workers", "the training data is not in a torch DataLoader")
        return
    if is_cuda and not all(loader["pin_memory"] for loader in loaders):
        yield speedup("pin_memory", "pin_memory", "exact", pin_memory=True)
    now = max(loader["num_workers"] for loader in loaders)
    is_fed = now == 0 and wait_share < _LEAST_PART
    never_waits = f"the run waits for data {wait_share:.1%} of a step" if is_fed else ""
    if reason := never_waits or (all(loader["by_sample"] for loader in loaders) and loaders[0]["by_sample"]):
        yield Refusal("batched_fetch", reason)
    else:
        yield speedup("batched_fetch", "batched_fetch", "exact", batched_fetch=True)
    if any(loader["is_iterable"] for loader in loaders):
        yield Refusal("num_workers", "with more workers, an IterableDataset would yield each item more than once")
        return
    if never_waits:
        yield Refusal("num_workers", never_waits)
        return
    if now and not all(loader["persistent_workers"] for loader in loaders):
        yield speedup("persistent_workers", "num_workers", "random", num_workers=now)
    if now and not any(loader["prefetch_factor"] >= _PREFETCH for loader in loaders):
        yield speedup(f"prefetch_factor={_PREFETCH}", "prefetch_factor", "exact", prefetch_factor=_PREFETCH)
    for number in sorted({0, 1, 2, facts["cores"]} - {now}):
        yield speedup(f"num_workers={number}", "num_workers", "random", num_workers=number)


def _ddp(facts: Mapping[str, Any]) -> Iterator[Factor | Refusal]:
    now = facts["ddp"]
    if not now:
        yield Refusal("DDP", "the strategy is another one, and synchronizes gradients in its own way")
        return

    def change(kind: Kind, **arguments: Any) -> Factor:
        ((name, value),) = arguments.items()
        return Factor(f"{name}={value}", name, kind, Changes(ddp=arguments))

    for size in sorted({5, 100} - {now.get("bucket_cap_mb", 25)}):
        yield change("exact", bucket_cap_mb=size)
    if not now.get("gradient_as_bucket_view"):
        yield change("exact", gradient_as_bucket_view=True)
    if not now["is_plain"]:
        reason = "accel_ddp looks for unused parameters, and compresses gradients by an argument of its own"
        yield from (Refusal(name, reason) for name in ("static_graph", "find_unused_parameters", "compression"))
        return
    if not now.get("static_graph"):
        yield change("exact", static_graph=True)
    if now.get("find_unused_parameters"):
        yield change("exact", find_unused_parameters=False)
    yield change("rounding", compression="bf16")
