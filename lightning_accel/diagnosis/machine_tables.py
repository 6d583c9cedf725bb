"""Tables of a machine and its measured rates."""

from lightning_accel.measure import Gpu, Machine, Rates
from lightning_accel.measure.table import Table, in_bytes, with_unit

_UNKNOWN = "unknown"


def machine_tables(machine: Machine, rates: Rates) -> list[Table]:
    """Return the tables that describe a machine: what it is, what it runs, and what it reaches."""
    return [_hardware(machine), _software(machine), _rates(rates)]


def _hardware(machine: Machine) -> Table:
    limit = machine.memory_limit_bytes
    rows = [
        ("processor", machine.cpu),
        ("cores", f"{machine.cores:g} usable of {machine.logical_cores} ({machine.physical_cores} physical)"),
        ("instruction sets", ", ".join(machine.instruction_sets) or _UNKNOWN),
        ("last cache", in_bytes(machine.cache_bytes) if machine.cache_bytes else _UNKNOWN),
        ("memory", in_bytes(machine.memory_bytes) + (f", limited to {in_bytes(limit)}" if limit else "")),
        ("shared memory", _UNKNOWN if machine.shared_memory_bytes is None else in_bytes(machine.shared_memory_bytes)),
        ("open files", _open_files(machine)),
    ]
    rows += [(f"GPU {index}", _gpu(gpu)) for index, gpu in enumerate(machine.gpus)] or [("GPUs", "none")]
    return Table(f"Machine {machine.digest}", (), rows)


def _gpu(gpu: Gpu) -> str:
    peers = ", ".join(map(str, gpu.peers))
    link = f", reads the memory of GPU {peers} directly" if gpu.peers else ""
    size = f"{gpu.multiprocessors} multiprocessors, {in_bytes(gpu.memory_bytes)}"
    return f"{gpu.name}, capability {gpu.capability}, {size}{link}"


def _open_files(machine: Machine) -> str:
    if machine.open_files is None:
        return _UNKNOWN
    soft, hard = ("unlimited" if value < 0 else str(value) for value in machine.open_files)
    return f"{soft} (at most {hard})"


def _software(machine: Machine) -> Table:
    rows = [
        ("system", machine.system),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
        ("torch's libraries", machine.blas),
        ("threads", f"{machine.threads} within an operation, {machine.interop_threads} between operations"),
        ("C++ compiler", machine.compiler or "none: native kernels cannot be built, nor torch.compile run on CPUs"),
        ("native kernels", ", ".join(f"{device}: {state}" for device, state in machine.kernels.items())),
    ]
    return Table("Software", (), rows)


def _rates(rates: Rates) -> Table:
    threads = f", {rates.threads} thread{'s' * (rates.threads != 1)}" if rates.device == "cpu" else ""
    rows = [
        (
            f"matrix products in {name}",
            with_unit(rate, "op/s" if name == "int8" else "FLOP/s") + f" ({rates.device}{threads})",
        )
        for name, rate in rates.matmul.items()
    ]
    rows.append(("memory, read and written", with_unit(rates.memory_bytes_per_s, "B/s")))
    if rates.pinned_bytes_per_s is not None:
        rows.append(("host to device, pinned", with_unit(rates.pinned_bytes_per_s, "B/s")))
    if rates.pageable_bytes_per_s is not None:
        rows.append(("host to device, pageable", with_unit(rates.pageable_bytes_per_s, "B/s")))
    if (one := rates.collective) is not None:
        speed = f"{with_unit(one.bytes_per_s, 'B/s')}, {1e6 * one.latency_s:.0f} µs at least"
        rows.append((f"all-reduce, {one.processes} processes", f"{speed} ({one.backend})"))
    if rates.disk_bytes_per_s is not None:
        rows.append(("disk, read", with_unit(rates.disk_bytes_per_s, "B/s")))
    rows += [(f"{name}: not measured", reason) for name, reason in rates.failed.items()]
    return Table("Measured rates", (), rows)
