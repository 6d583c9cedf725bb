"""Machines that a run is planned for: what their makers publish, and what share of it training reaches."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Device:
    """Hold the rates of one GPU, or of a process on a CPU.

    Attributes:
        name: as in ``8xH100-80GB``, without the number.
        memory: bytes.
        products: operations per second of dense matrix products, by dtype: ``fp32``, and ``fp64``, ``tf32``, ``bf16``
            and ``fp16`` where they differ from it.
        bandwidth: bytes per second of its memory.
        link: bytes per second to the other devices of its machine, in one direction.
        network: bytes per second to other machines, in one direction, for each device.
        is_gpu: whether kernels have to be launched, and torch chooses those of CUDA.
        capability: major number of a GPU's compute capability, by which kernels are chosen; 0 if it is not NVIDIA's.
    """

    name: str
    memory: int
    products: dict[str, float]
    bandwidth: float
    link: float
    network: float
    is_gpu: bool = True
    capability: int = 8

    def product_rate(self, dtype: str, tf32: bool = False) -> float:
        """Return the operations per second in a dtype, that of the next wider one if it has none of its own."""
        if dtype == "fp32" and tf32:
            return self.products.get("tf32", self.products["fp32"])
        return self.products.get(dtype, self.products["fp32"])


def _gpu(
    name: str,
    capability: int,
    gigabytes: int,
    rates: tuple[float, float, float, float],
    bandwidth: float,
    link: float,
    network: float,
) -> Device:
    fp64, fp32, tf32, bf16 = (rate * _TERA for rate in rates)
    products = {"fp64": fp64, "fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": bf16}
    speeds = (bandwidth * _GIGA, link * _GIGA, network * _GIGA)
    return Device(name, gigabytes * 2**30, products, *speeds, capability=capability)


# Data sheets of NVIDIA and AMD: major number of the compute capability, GiB, dense rates of fp64, fp32, tf32 and bf16
# in TFLOP/s, GB/s of memory, of NVLink (or PCIe) in one direction, and of the network port that machines with eight of
# them usually have for each
DEVICES = {
    device.name: device
    for device in (
        _gpu("B200-180GB", 10, 180, (37, 75, 1100, 2250), 7700, 900, 50),
        _gpu("H200-141GB", 9, 141, (67, 67, 494, 989), 4800, 450, 50),
        _gpu("H100-80GB", 9, 80, (67, 67, 494, 989), 3350, 450, 50),
        _gpu("H100-96GB", 9, 96, (67, 67, 494, 989), 2400, 450, 50),  # HBM2e, as in Grand Teton
        _gpu("MI300X-192GB", 0, 192, (163, 163, 653, 1307), 5300, 448, 50),
        _gpu("A100-80GB", 8, 80, (19.5, 19.5, 156, 312), 2039, 300, 25),
        _gpu("A100-40GB", 8, 40, (19.5, 19.5, 156, 312), 1555, 300, 25),
        _gpu("L40S-48GB", 8, 48, (1.4, 91.6, 183, 362), 864, 32, 12.5),
        _gpu("A10G-24GB", 8, 24, (0.55, 31, 35, 70), 600, 16, 6.25),
        _gpu("L4-24GB", 8, 24, (0.47, 30, 60, 121), 300, 16, 6.25),
        _gpu("V100-32GB", 7, 32, (7.8, 15.7, 15.7, 125), 900, 150, 12.5),
        _gpu("T4-16GB", 7, 16, (0.25, 8.1, 8.1, 65), 320, 16, 3.1),
        _gpu("RTX4090-24GB", 8, 24, (1.3, 82.6, 82.6, 165), 1008, 16, 3.1),
        _gpu("RTX3090-24GB", 8, 24, (0.56, 35.6, 35.6, 71), 936, 16, 3.1),
    )
}


@dataclass(frozen=True)
class Cluster:
    """Hold equal machines.

    Attributes:
        device: its devices are all of one kind.
        per_machine: devices of a machine, each of which has a process.
        machines: number of machines.
    """

    device: Device
    per_machine: int
    machines: int = 1

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return self.per_machine * self.machines

    def network_share(self, ranks: Sequence[int], direct: bool = False) -> float:
        """Return which share of what each of some processes sends goes to other machines.

        Rings and trees bring data into a machine once, by the ports of all its devices that take part; what goes from
        each process to each other (``direct``) leaves by its own port.
        """
        first, last = ranks[0] // self.per_machine, ranks[-1] // self.per_machine
        if first == last:
            return 0.0
        beside = sum(1 for rank in ranks[: self.per_machine] if rank // self.per_machine == first)
        return (len(ranks) - beside) / (len(ranks) - 1) if direct else 1 / beside

    def bandwidth_between(self, ranks: Sequence[int], direct: bool = False) -> float:
        """Return the bytes per second that each of some processes sends."""
        share = self.network_share(ranks, direct)
        return min(self.device.link, self.device.network / share) if share else self.device.link

    def __str__(self) -> str:
        machines = f"{self.machines} machines of " if self.machines > 1 else ""
        return f"{machines}{self.per_machine}x{self.device.name}"


def find_device(text: str) -> tuple[int, Device]:
    """Return the number and the kind of ``8xH100-80GB``, or of ``H100`` where one kind begins so.

    Raises:
        ValueError: if the table has none, or several, of that name.

    >>> number, device = find_device("8xA100-40GB")
    >>> number, device.name
    (8, 'A100-40GB')
    """
    match = re.fullmatch(r"(?:(\d+)x)?([\w-]+)", text)
    name = match[2].upper() if match else ""
    found = [device for key, device in DEVICES.items() if name in (key, key.split("-")[0])]
    if len(found) > 1:
        raise ValueError(f"which {name}: {' or '.join(device.name for device in found)}? got {text!r}")
    if match is None or not found or int(match[1] or 1) == 0:
        raise ValueError(
            f"gpus must be a number and a kind, as 8xH100-80GB; got {text!r}. Kinds: {', '.join(DEVICES)}; or give a "
            "Device of your own in Python"
        )
    return int(match[1] or 1), found[0]
