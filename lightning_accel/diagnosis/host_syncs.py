"""Places where the host waits for a number that a device computes, as torch.profiler sees them."""

from typing import NamedTuple

from torch.profiler import profile

_TORCH = ("torch/", "<built-in", "typing_extensions.py", "contextlib.py", "functools.py")
_OWN = ("lightning/", "pytorch_lightning/", "lightning_fabric/", "torchmetrics/", "lightning_accel/")


class HostSync(NamedTuple):
    """Hold a function of the user's, how often a batch waits there, how long in ms, and whether it prints."""

    place: str
    times: float
    ms: float
    is_print: bool


def host_syncs(profiled: profile, batches: int) -> list[HostSync]:
    """Return the functions in which ``.item()``, ``float``, ``if`` or ``print`` read a tensor, the slowest first.

    What Lightning and torchmetrics read themselves is left out: logging and metrics are parts of their own.

    Args:
        profiled: a profile with stacks.
        batches: number of batches that it saw.
    """
    found: dict[tuple[str, bool], HostSync] = {}
    for event in profiled.events() or []:
        if event.name != "aten::item":
            continue
        stack = [frame for frame in event.stack if not frame.startswith("nn.Module:")]
        place = next((_short(frame) for frame in stack if not _short(frame).startswith(_TORCH)), None)
        if place is None or place.startswith(_OWN):
            continue
        is_print = any("_tensor_str.py" in frame for frame in stack)
        _, times, ms, _ = found.get((place, is_print), HostSync(place, 0.0, 0.0, is_print))
        ms += event.cpu_time_total / 1000 / batches
        found[place, is_print] = HostSync(place, times + 1 / batches, ms, is_print)
    return sorted(found.values(), key=lambda sync: -sync.ms)


def _short(frame: str) -> str:
    """Return the frame without the folder of installed packages."""
    return frame.partition("site-packages/")[2] or frame
