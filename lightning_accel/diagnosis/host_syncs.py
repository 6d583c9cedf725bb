"""Places where the host waits for a number that a device computes, as torch.profiler sees them."""

from typing import NamedTuple

from lightning_accel.diagnosis.call_tree import CallTree, callers, place_of, walk


class HostSync(NamedTuple):
    """Hold a line of the user's, how often a batch waits there, how long in ms, and whether it prints."""

    place: str
    times: float
    ms: float
    is_print: bool


def host_syncs(tree: CallTree, batches: int) -> list[HostSync]:
    """Return the lines at which ``.item()``, ``float``, ``if`` or ``print`` read a tensor, the slowest first.

    What Lightning and torchmetrics read themselves is left out: logging and metrics are parts of their own.

    Args:
        tree: what ran.
        batches: number of batches that it holds.
    """
    found: dict[tuple[str, bool], HostSync] = {}
    for event in (each for root in tree.roots for each in walk(root) if each.name == "aten::item"):
        place, is_users = place_of(event)
        if not is_users or place.endswith(" in <module>"):  # the call that trains, as where a backward pass reads
            continue
        is_print = any("_tensor_str.py" in call.name for call in callers(event))
        _, times, ms, _ = found.get((place, is_print), HostSync(place, 0.0, 0.0, is_print))
        ms += event.duration_time_ns / 1e6 / batches
        found[place, is_print] = HostSync(place, times + 1 / batches, ms, is_print)
    return sorted(found.values(), key=lambda sync: -sync.ms)
