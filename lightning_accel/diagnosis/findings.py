"""Findings: what a run is slow at, what it costs in ms a step, and what mends it."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from torch import nn

from lightning_accel._private.torch import BatchNormBase
from lightning_accel.diagnosis.examination import Examined
from lightning_accel.measure import Machine, Rates, Step, action_times, part_times
from lightning_accel.measure.rates import BY_ONEDNN

_NOTABLE = 0.03  # share of a step from which a cost is worth a line
_WORK = "forward and backward"
_SELDOM = 50  # Lightning's own log_every_n_steps
_TINY_BATCH = 8
_SAVED_OF_GPS = 0.5  # share of the time of PyTorch Geometric's attention, as benchmarks/bench_molecules.py measures
_MUCH_PADDING = 0.15  # share of tokens; batches of similar lengths have some as well
_MUCH_WORK = 0.5  # share of a step
_THREADED_MS = 5.0  # operations of shorter passes are mostly too small to be shared among threads
_WIDTHS = {"cuda": 8, "cpu": 32}  # in elements of 16 bits: tensor cores; AMX tiles of 64 bytes


@dataclass(frozen=True)
class Finding:
    """Hold one cause of lost time.

    Attributes:
        name: of the kind of finding, such as ``slow loader``.
        what: what was seen.
        cost_ms: time that it takes of each step; 0 if it costs something else.
        mend: what to do.
        part: part of the step in which that time is, empty if it may be in any. Findings of one part may count the same
            milliseconds.
    """

    name: str
    what: str
    cost_ms: float
    mend: str
    part: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_slowness(seen: Examined, machine: Machine, rates: Rates) -> list[Finding]:
    """Return the findings of a run, the most expensive first.

    Args:
        seen: what was seen of the run.
        machine: the machine that it ran on.
        rates: rates of that machine, measured with the threads of the run.
    """
    parts = part_times(seen.steps)
    found = [
        *_bad_loss(seen),
        *_slow_loader(seen, parts, machine),
        *_unpinned(seen, rates),
        *_host_syncs(seen),
        *_small_operations(seen, parts),
        *_frequent_logging(seen),
        *_slow_callbacks(seen, parts),
        *_waiting(parts),
        *_padding(seen, parts),
        *_padded_attention(seen, parts),
        *_float64(seen, parts, rates),
        *_slow_products(seen, parts, rates),
        *_full_precision(seen, parts, rates),
        *_emulated_precision(seen, parts, rates),
        *_too_many_threads(seen, machine),
        *_unused_cores(seen, parts, machine),
        *_too_many_workers(seen, machine),
        *_restarted_workers(seen, parts),
        *_graph_breaks(seen),
        *_compilations(seen),
        *_unused(seen),
        *_tiny_batch_norms(seen),
        *_training_in_validation(seen),
        *_narrow_widths(seen, machine),
    ]
    return sorted(found, key=lambda finding: (finding.name != "bad loss", -finding.cost_ms))


def hint_of_tune(steps: Sequence[Step], findings: Sequence[Finding]) -> str:
    """Return a line that names tune, "" unless both passes are the largest part of a step and no finding names them."""
    parts = part_times(steps)
    work = parts["forward"] + parts["backward"]
    others = [spent for part, spent in parts.items() if part not in ("forward", "backward")]
    if work <= max(others) or any(one.part == _WORK or one.name == "bad loss" for one in findings):
        return ""
    share = work / sum(parts.values())
    return f"{_WORK} take {share:.0%} of a step, and no finding names them: tune measures what makes them faster"


def _bad_loss(seen: Examined) -> Iterator[Finding]:
    if seen.bad_loss:
        mend = "return a finite loss from training_step; nothing else is worth mending before"
        yield Finding("bad loss", f"in the first batch, {seen.bad_loss}", 0.0, mend)


def _slow_loader(seen: Examined, parts: dict[str, float], machine: Machine) -> Iterator[Finding]:
    step = sum(parts.values())
    if parts["data"] < _NOTABLE * step:
        return
    workers = sum(facts["num_workers"] or 0 for facts in seen.loader_facts)
    alone = "" if seen.loading_ms is None else f"; alone it takes {seen.loading_ms:.3g} ms a batch"
    most = max(int(machine.cores) // seen.world_size, 1)
    once = "augment whole batches in on_after_batch_transfer" if seen.loader_draws else "prepare samples once, ahead"
    if not workers:
        mend = (
            f"try num_workers=1 to {most} with persistent_workers=True, which pays where loading a batch takes longer "
            f"than sending it from another process; or {once} (tune measures what workers bring)"
        )
    elif workers > most:
        mend = f"num_workers={most}: {workers} workers share {machine.cores:g} cores with the training"
    else:
        mend = f"{once}, or make __getitem__ faster; more workers where there are more cores"
    what = f"the run waits for data {parts['data'] / step:.0%} of a step; the loader has {workers} workers{alone}"
    lines = [f"{line.share:.0%} in {line.place} ({line.text})" for line in seen.loader_lines]
    what += f"; of loading, {' and '.join(lines)}" if lines else ""
    yield Finding("slow loader", what, parts["data"], mend, "data")


def _unpinned(seen: Examined, rates: Rates) -> Iterator[Finding]:
    unpinned = [facts for facts in seen.loader_facts if facts["pin_memory"] is False]
    if seen.device.type != "cuda" or not unpinned:
        return
    cost = 0.0
    if rates.pinned_bytes_per_s and rates.pageable_bytes_per_s:
        cost = 1000 * seen.batch_bytes * (1 / rates.pageable_bytes_per_s - 1 / rates.pinned_bytes_per_s)
    what = "batches are copied to the GPU from memory that is not pinned"
    yield Finding("no pinned memory", what, max(cost, 0.0), "DataLoader(pin_memory=True)", "transfer")


def _host_syncs(seen: Examined) -> Iterator[Finding]:
    is_cpu = seen.device.type == "cpu"
    for sync in seen.syncs:
        if is_cpu and sync.is_loading and not sync.is_print:  # no device to wait for, neither here nor on a GPU
            continue
        verb = "prints a tensor" if sync.is_print else "reads a number of a tensor"
        waits = "which on a CPU has been computed" if is_cpu else "and waits until it is computed"
        waits += " if it is on the GPU" if sync.is_loading and not is_cpu else ""
        what = f"{sync.place} {verb} {sync.times:g} times a batch, {waits}"
        mend = "print every so often" if sync.is_print else "keep it a tensor (detach()), or read it every so often"
        yield Finding("host sync", what, sync.ms, mend)


def _small_operations(seen: Examined, parts: dict[str, float]) -> Iterator[Finding]:
    for loop in seen.loops:
        cost = loop.ms * (1 - 1 / loop.times)  # whole tensors in place of the loop take about as long as it does once
        if cost >= _NOTABLE * sum(parts.values()):
            what = f"{loop.place} runs {loop.times} times a batch, {loop.operations} small operations in all"
            mend = "operations on whole tensors in place of the loop (torch.stack, torch.vmap), or torch.compile"
            yield Finding("small operations", f"{what}, with their backward pass {loop.ms:.3g} ms", cost, mend, _WORK)


def _frequent_logging(seen: Examined) -> Iterator[Finding]:
    if not any(seen.logged) or seen.log_every_n_steps >= _SELDOM:
        return
    with_it = [step.parts_ns()["logging"] / 1e6 for step, logged in zip(seen.steps, seen.logged, strict=True) if logged]
    # where each step logs, what the Trainer does without loggers cannot be told apart, and is small
    without = [step.parts_ns()["logging"] / 1e6 for step, one in zip(seen.steps, seen.logged, strict=True) if not one]
    extra = fmean(with_it) - (fmean(without) if without else 0.0)
    cost = extra * (1 / seen.log_every_n_steps - 1 / _SELDOM)
    step = sum(part_times(seen.steps).values())
    if cost >= _NOTABLE * step:
        what = f"metrics go to the loggers every {seen.log_every_n_steps} steps, {extra:.3g} ms each time"
        yield Finding("frequent logging", what, cost, f"Trainer(log_every_n_steps={_SELDOM})", "logging")


def _slow_callbacks(seen: Examined, parts: dict[str, float]) -> Iterator[Finding]:
    for action, cost in action_times(seen.steps, "callbacks").items():
        if cost >= _NOTABLE * sum(parts.values()):
            yield Finding(
                "slow hook",
                f"{action} runs in every step",
                cost,
                "run it every so often, or make it faster",
                "callbacks",
            )


def _waiting(parts: dict[str, float]) -> Iterator[Finding]:
    if parts["waiting"] >= _NOTABLE * sum(parts.values()):
        what = "this rank waits for slower ones"
        mend = "give all ranks equal work: equal batches, equal devices, no work on one rank alone"
        yield Finding("uneven ranks", what, parts["waiting"], mend, "waiting")


def _padding(seen: Examined, parts: dict[str, float]) -> Iterator[Finding]:
    work = parts["forward"] + parts["backward"]
    if seen.padded_columns >= _NOTABLE:
        what = f"{seen.padded_columns:.0%} of the columns of batches are padding of all samples"
        mend = 'pad to the longest sample of a batch, or Batching(padding="trimmed")'
        yield Finding("padding", what, seen.padded_columns * work, mend, _WORK)
    rest = seen.padding - seen.padded_columns
    if rest >= _MUCH_PADDING:
        what = f"{rest:.0%} of the tokens of batches are padding of samples that are shorter than the longest"
        mend = 'Batching(length_bucketed=True), or where labels are of tokens Batching(padding="packed")'
        yield Finding("uneven lengths", what, rest * work, mend, _WORK)


def _padded_attention(seen: Examined, parts: dict[str, float]) -> Iterator[Finding]:
    # half of it is saved, and of the backward pass as much in proportion: an estimate
    cost = _SAVED_OF_GPS * seen.padding_gps_ms * (1 + parts["backward"] / max(parts["forward"], 1e-9))
    if cost >= _NOTABLE * sum(parts.values()):
        what = f"the attention of {seen.padding_gps} GPSConv pads each graph to the largest one of a batch"
        mend = 'Speedups(attention="native"), which changes rounding alone'
        yield Finding("padded attention", what, cost, mend)


def _float64(seen: Examined, parts: dict[str, float], rates: Rates) -> Iterator[Finding]:
    if not seen.float64 or seen.precision.startswith("64"):
        return
    double, single = rates.matmul.get("fp64"), rates.matmul.get("fp32")
    saved = 1 - double / single if double and single and double < single else 0.0
    what = f"float64, twice the memory, in {_listed(seen.float64)}, though precision is {seen.precision}"
    # those parts at the ratio of the measured rates: an estimate
    cost = saved * (parts["forward"] + parts["backward"])
    yield Finding(
        "float64", what, cost, "module.float(), and dtype=torch.float32 where data come from NumPy or lists", _WORK
    )


def _slow_products(seen: Examined, parts: dict[str, float], rates: Rates) -> Iterator[Finding]:
    by_mkl, by_onednn = rates.matmul.get("fp32"), rates.matmul.get(BY_ONEDNN)
    if seen.multiplies_in != "fp32" or seen.multiplies_by_onednn or not (seen.onednn_flops and by_mkl and by_onednn):
        return
    cost = 1000 * seen.onednn_flops * (1 / by_mkl - 1 / by_onednn)
    if cost >= _NOTABLE * sum(parts.values()):
        what = f"MKL multiplies float32 matrices, and oneDNN is here {by_onednn / by_mkl:.3g} times as fast"
        yield Finding("slow products", what, cost, "Speedups(onednn_matmul=True), which changes rounding alone", _WORK)


def _full_precision(seen: Examined, parts: dict[str, float], rates: Rates) -> Iterator[Finding]:
    now, lower = rates.matmul.get(seen.multiplies_in), rates.matmul.get("bf16")
    if not seen.precision.startswith("32") or seen.multiplies_in == "fp64" or not (seen.flops and now and lower):
        return
    # what is not products, and what they wait for, stays as it is: an estimate from above
    cost = min(1000 * seen.flops * (1 / now - 1 / lower), (1 - now / lower) * (parts["forward"] + parts["backward"]))
    if cost >= _NOTABLE * sum(parts.values()):
        what = f"precision is {seen.precision}, and products in bfloat16 are here {lower / now:.3g} times as fast"
        mend = "try Trainer(precision='bf16-mixed'), whose rounding may change metrics, or let tune try it"
        yield Finding("full precision", what, cost, mend, _WORK)


def _emulated_precision(seen: Examined, parts: dict[str, float], rates: Rates) -> Iterator[Finding]:
    now, full = rates.matmul.get(seen.multiplies_in), rates.matmul.get("fp32")
    if not seen.precision.startswith(("bf16", "16")) or not (seen.flops and now and full and now < full):
        return
    cost = min(1000 * seen.flops * (1 / now - 1 / full), (1 - now / full) * (parts["forward"] + parts["backward"]))
    if cost >= _NOTABLE * sum(parts.values()):
        what = f"precision is {seen.precision}, and products in float32 are here {full / now:.3g} times as fast"
        mend = (
            "Trainer(precision='32-true'), or AmpPrecision(), which takes bfloat16 only where the device computes in it"
        )
        yield Finding("emulated precision", what, cost, mend, _WORK)


def _too_many_threads(seen: Examined, machine: Machine) -> Iterator[Finding]:
    workers = sum(facts["num_workers"] or 0 for facts in seen.loader_facts)
    if seen.device.type != "cpu" or seen.threads * seen.world_size <= machine.cores:
        return
    right = max(int(machine.cores) // seen.world_size, 1)
    what = f"{seen.world_size} processes of {seen.threads} threads" + (f" and {workers} workers" if workers else "")
    what += f" share {machine.cores:g} cores"
    mend = f"OMP_NUM_THREADS={right}, or torch.set_num_threads({right})"
    saved = seen.fewer_threads_saved_ms or 0.0
    if saved < 0:  # such as beside other processes: threads that have a core each wait for each other without pause
        what += f", and with {right} threads a step took {-saved:.3g} ms longer"
        mend += ", where no other process uses the cores"
    yield Finding("too many threads", what, max(saved, 0.0), mend)


def _unused_cores(seen: Examined, parts: dict[str, float], machine: Machine) -> Iterator[Finding]:
    work = parts["forward"] + parts["backward"]
    workers = sum(facts["num_workers"] or 0 for facts in seen.loader_facts)
    cores = min(int(machine.cores), machine.physical_cores)  # torch takes no threads for hyperthreads by itself
    right = cores // seen.world_size - workers
    if seen.device.type != "cpu" or work < max(_MUCH_WORK * sum(parts.values()), _THREADED_MS) or seen.threads >= right:
        return
    each = "torch uses" if seen.world_size == 1 else f"each of {seen.world_size} processes uses"
    what, mend = f"{each} {seen.threads} of {cores} cores", f"call torch.set_num_threads({right})"
    if os.environ.get("OMP_NUM_THREADS") == str(seen.threads):
        what, mend = f"{what} (OMP_NUM_THREADS={seen.threads})", f"set it to {right}, or leave it out"
    if workers:
        what += f", beside {workers} workers"
    yield Finding("unused cores", what, 0.0, f"{mend}; tune measures which is faster", _WORK)


def _too_many_workers(seen: Examined, machine: Machine) -> Iterator[Finding]:
    if seen.fewer_workers_saved_ms is None:
        return
    workers = sum(facts["num_workers"] or 0 for facts in seen.loader_facts)
    started = (seen.workers_start_ms or 0.0) - (seen.fewer_workers_start_ms or 0.0)
    what = f"{workers} workers share {machine.cores:g} cores with the training"
    mend = f"num_workers={max(int(machine.cores), 1)} at most"
    yield Finding("too many workers", what, max(seen.fewer_workers_saved_ms + started, 0.0), mend)


def _restarted_workers(seen: Examined, parts: dict[str, float]) -> Iterator[Finding]:
    every = seen.workers_start_ms if seen.fewer_workers_start_ms is None else seen.fewer_workers_start_ms
    if every is not None and every >= _NOTABLE * sum(parts.values()):
        what = "workers start and end with each epoch, which takes this long for each of its batches"
        yield Finding("restarted workers", what, every, "DataLoader(persistent_workers=True), or num_workers=0", "data")


def _graph_breaks(seen: Examined) -> Iterator[Finding]:
    for each in seen.graph_breaks:
        what = f"the compiled {each.name or 'module'} breaks its graph {each.breaks} times; first: {each.reason}"
        cost = seen.graph_breaks_ms * each.breaks / sum(one.breaks for one in seen.graph_breaks)
        yield Finding(
            "graph breaks", what, cost, "rewrite that line in torch, or compile only the parts without such", _WORK
        )


def _compilations(seen: Examined) -> Iterator[Finding]:
    if seen.compilations is not None:
        times, ms, first = seen.compilations
        what = f"compiled {times} times in {len(seen.steps)} steps, after the first ones; first: {first}"
        mend = "inputs of one shape (drop_last=True, padding to a few lengths), or torch.compile(dynamic=True)"
        yield Finding("recompilations", what, ms / len(seen.steps), mend, _WORK)


def _unused(seen: Examined) -> Iterator[Finding]:
    if seen.unused:
        what = f"{len(seen.unused)} parameters get no gradient: {_listed(seen.unused)}"
        mend = "remove them, or requires_grad_(False); DDP needs find_unused_parameters for them, or accel_ddp"
        if seen.unused_ms:
            what += f"; their forward pass takes {seen.unused_ms:.3g} ms"
        yield Finding("unused parameters", what, seen.unused_ms, mend, _WORK)


def _tiny_batch_norms(seen: Examined) -> Iterator[Finding]:
    names = [name for name, each in seen.module.named_modules() if isinstance(each, BatchNormBase)]
    if names and seen.batch_size is not None and seen.batch_size < _TINY_BATCH:
        what = f"batch norms ({_listed(names)}) over {seen.batch_size} samples: their statistics are noise"
        sync = "Trainer(sync_batchnorm=True), or " if seen.world_size > 1 else ""
        yield Finding("tiny batch norms", what, 0.0, f"{sync}larger batches, or GroupNorm")


def _training_in_validation(seen: Examined) -> Iterator[Finding]:
    if seen.training_in_validation:
        what = f"in train mode during validation: {_listed(seen.training_in_validation)}"
        yield Finding("train mode in validation", what, 0.0, "do not call .train() in validation hooks or forward")


def _narrow_widths(seen: Examined, machine: Machine) -> Iterator[Finding]:
    kind = "BF16" if seen.precision.startswith("bf16") else "FP16" if seen.precision.startswith("16") else ""
    has_tiles = seen.device.type == "cuda" or f"AMX-{kind}" in machine.instruction_sets
    if not kind or not has_tiles or seen.device.type not in _WIDTHS:
        return
    width = _WIDTHS[seen.device.type]
    names = [
        f"{name} ({each.in_features} to {each.out_features})"
        for name, each in seen.module.named_modules()
        if isinstance(each, nn.Linear) and (each.in_features % width or each.out_features % width)
    ]
    if names:
        what = f"widths that are no multiples of {width} fill tiles badly: {_listed(names)}"
        yield Finding("narrow widths", what, 0.0, f"pad them to multiples of {width}, vocabularies too")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name or "the module itself" for name in names[:3]) + more
