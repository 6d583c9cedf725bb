"""A plan as tables, values for JSON and an overlay of the config."""

from dataclasses import asdict
from typing import Any

from lightning_accel.measure.table import Table, in_bytes, with_unit
from lightning_accel.planning import step_trace
from lightning_accel.planning.hardware import Cluster
from lightning_accel.planning.program import CONTEXT, RESERVED, Option, Plan


def plan_tables(plan: Plan) -> list[Table]:
    """Return the strategies compared, the parts of the fastest, and what was assumed."""
    columns = ("strategy", "memory", "fits", "step", "samples/s", "sends", *_network(plan, "to network"), "waits")
    tables = [Table(f"Plan for {plan.cluster}", columns, [_row(plan, option) for option in plan.options])]
    shown = plan.best or next(option for option in plan.options if option.simulation is not None)
    assert shown.simulation is not None
    kinds = shown.simulation.memory.items()
    rows = [(kind, in_bytes(size)) for kind, size in kinds if size >= shown.simulation.peak / 1000]
    where = " of the largest stage" if shown.simulation.stages else ""
    tables.append(
        Table(f"Memory of {shown.candidate.name} at its peak{where}, in {shown.simulation.phase_of_peak}", (), rows)
    )
    names = [f"{name}: {in_bytes(size)}" for name, size in shown.simulation.trace.bytes_by_name().items() if size]
    if names:
        tables.append(Table(f"Collectives of a step of {shown.candidate.name}", (), [(name,) for name in names]))
    tables.append(Table("Notes", (), [(note,) for note in notes(plan, shown)]))
    return tables


def _network(plan: Plan, cell: str) -> tuple[str, ...]:
    return (cell,) if plan.cluster.machines > 1 else ()


def _row(plan: Plan, option: Option) -> tuple[str, ...]:
    simulation, name = option.simulation, option.candidate.name
    if simulation is None:
        return name, "", "not planned", "", "", "", *_network(plan, ""), ""
    time = option.time
    samples = with_unit(simulation.samples * option.batches_per_second, "") if simulation.samples else ""
    inside, outside = simulation.trace.sent_bytes(plan.cluster)
    step, waits = f"{time.total * 1e3:.3g} ms", f"{time.exposed / time.total:.0%}" if time.total else ""
    sends = in_bytes(inside + outside), *_network(plan, in_bytes(outside))
    return name, in_bytes(option.needed), "yes" if option.fits else "no", step, samples, *sends, waits


def notes(plan: Plan, shown: Option) -> list[str]:
    """Return what the numbers stand on, and what to do where nothing fits."""
    assert shown.simulation is not None
    device = plan.cluster.device
    found = [f"{one.candidate.name}: {one.reason}" for one in plan.options if one.simulation is None]
    if plan.best is None:
        need = f"{in_bytes(shown.needed)} of {in_bytes(device.memory)}"
        if plan.fits_from is not None:
            candidate, larger = plan.fits_from
            found.append(f"Nothing fits; {candidate.name} fits on {larger}.")
        else:
            found.append(
                f"Nothing fits, also on many more machines with the strategies above: {shown.candidate.name} needs "
                f"{need}. Take smaller batches "
                "(MemorySavings(micro_batches=2), or batch_size), shorter sequences, or bf16 weights."
            )
    if shown.simulation.small_batch is not None:
        size, wanted = shown.simulation.small_batch
        found.append(
            f"Batches have {size} samples instead of {wanted}, since there is no more data for each process: give as "
            "much as the real run has."
        )
    if shown.simulation.left_out:
        found.append(f"Planned for the whole model, without {', '.join(shown.simulation.left_out)}.")
    whole = shown.simulation.num_parameters * 4 * plan.cluster.per_machine
    if plan.cluster.size > 1:
        found.append(
            f"Each process makes the whole model in the memory of its machine first, {in_bytes(whole)} for "
            f"{plan.cluster.per_machine} of them, unless the module makes it on the meta device."
        )
    if device.is_gpu:
        found.append(
            f"Memory is that of tensors times {RESERVED:g} for the allocator, plus {in_bytes(CONTEXT)} for CUDA and "
            f"NCCL, of {in_bytes(device.memory)}."
        )
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in device.products.items())
    source = "published rates" if device.is_gpu else "rates measured here"
    memory, link, network = (f"{rate / 1e9:.4g} GB/s" for rate in (device.bandwidth, device.link, device.network))
    found.append(
        f"Times by {source}: {rates}, memory {memory}, links {link}, network {network} a device; products reach "
        f"{step_trace.PRODUCTS:.0%} of them, attention {step_trace.ATTENTION:.0%}, memory and links "
        f"{step_trace.MEMORY:.0%}. Loading of data is left out."
    )
    return found


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as values that JSON can hold."""
    options = []
    for option in plan.options:
        entry: dict[str, Any] = {"name": option.candidate.name, "trainer": option.candidate.config()}
        if option.simulation is None:
            options.append(entry | {"reason": option.reason})
            continue
        simulation = option.simulation
        inside, outside = simulation.trace.sent_bytes(plan.cluster)
        options.append(
            entry
            | {
                "fits": option.fits,
                "needed_bytes": option.needed,
                "peak_bytes": simulation.peak,
                "peak_by_kind": simulation.memory,
                "peak_in": simulation.phase_of_peak,
                "step": asdict(option.time),
                "flops": simulation.trace.flops,
                "samples": simulation.samples,
                "collectives": dict(simulation.trace.bytes_by_name()),
                "sent_inside_bytes": inside,
                "sent_outside_bytes": outside,
            }
        )
    fits_from = None
    if plan.fits_from is not None:
        fits_from = {"name": plan.fits_from[0].name, "cluster": _cluster_dict(plan.fits_from[1])}
    return {
        "cluster": _cluster_dict(plan.cluster),
        "options": options,
        "fits_from": fits_from,
        "seconds": plan.seconds,
    }


def _cluster_dict(cluster: Cluster) -> dict[str, Any]:
    return {"device": cluster.device.name, "per_machine": cluster.per_machine, "machines": cluster.machines}
