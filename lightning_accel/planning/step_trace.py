"""A recorded step of one process, and the time that it would take on a cluster."""

from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from lightning_accel.planning.hardware import Cluster

# Shares of the published rates that training reaches
PRODUCTS = 0.65  # matrix products in bfloat16 of a few thousand rows and columns, limited by power on H100s
ATTENTION = 0.35  # of the same rate: fused attention, forward and backward
MEMORY = 0.8
LINK = 0.8  # of NVLink and the network: bus bandwidth of NCCL for messages of megabytes
LAUNCH = 4e-6  # seconds of the shortest kernel
LATENCY = 20e-6  # seconds of the shortest collective


class Work(NamedTuple):
    """Hold one operation: its phase, operations of matrix products and their dtype, and the bytes it moves."""

    phase: str
    flops: int
    dtype: str
    size: int
    is_attention: bool = False


@dataclass(frozen=True)
class Collective:
    """Hold one collective of a step.

    Attributes:
        phase: part of the step: forward, backward or optimizer.
        name: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or barrier; send or receive for a message.
        size: bytes of the whole tensor that is reduced, gathered, scattered, exchanged or sent.
        ranks: the processes that take part; the sender and the receiver of a message.
    """

    phase: str
    name: str
    size: int
    ranks: tuple[int, ...]

    @property
    def is_direct(self) -> bool:
        """Return whether each process sends to each other something of its own."""
        return self.name == "all_to_all"

    @property
    def sent(self) -> float:
        """Return the bytes that this process has to send, by the algorithms that send least."""
        n = len(self.ranks)
        shares = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "barrier": 0.0, "send": 1.0, "receive": 0.0}
        return self.size * shares.get(self.name, (n - 1) / n)


@dataclass(frozen=True)
class StepTime:
    """Hold the seconds of a step: all of it, its computation alone, and the communication that nothing hides."""

    total: float
    computation: float
    communication: float
    exposed: float


class StepTrace:
    """Record the operations and collectives of a step in order."""

    def __init__(self) -> None:
        self.events: list[Work | Collective] = []

    @property
    def collectives(self) -> list[Collective]:
        return [event for event in self.events if isinstance(event, Collective)]

    @property
    def flops(self) -> int:
        """Return the operations of matrix products, convolutions and attention, two for each term."""
        return sum(event.flops for event in self.events if isinstance(event, Work))

    def bytes_by_name(self) -> Counter[str]:
        """Return the bytes of the tensors in each kind of collective."""
        found: Counter[str] = Counter()
        for event in self.collectives:
            found[event.name] += event.size
        return found

    def sent_bytes(self, cluster: Cluster) -> tuple[float, float]:
        """Return the bytes that this process sends within its machine, and those over the network."""
        inside = outside = 0.0
        for event in self.collectives:
            over_network = event.sent * cluster.network_share(event.ranks, event.is_direct)
            outside += over_network
            inside += event.sent - over_network
        return inside, outside

    def time_on(self, cluster: Cluster, tf32: bool = False) -> StepTime:
        """Estimate the time of the step on a cluster.

        Each operation takes the longer of its arithmetic and its memory traffic. Gathers of weights begin while the
        block before computes; reductions of gradients run beside the backward pass, and the optimizer waits for them;
        exchanges of tokens and all other collectives hold the computation up.
        """
        return time_together([self], cluster, tf32)

    def _clock(
        self, cluster: Cluster, tf32: bool, arrivals: dict[tuple[int, ...], list[float]]
    ) -> Generator[None, None, StepTime]:
        """Yield while a message has not been sent yet; return the times."""
        now = computed = busy_until = communicated = 0.0
        gather_may_begin = 0.0
        phase = ""
        received: Counter[tuple[int, ...]] = Counter()
        for event in self.events:
            if event.phase != phase:
                phase = event.phase
                if phase == "optimizer":
                    now = max(now, busy_until)
            if isinstance(event, Work):
                seconds = _seconds(event, cluster, tf32)
                now, computed = now + seconds, computed + seconds
                continue
            if event.name == "barrier" or len(event.ranks) < 2:
                continue
            if event.name == "receive":
                arrived = arrivals[event.ranks]
                while len(arrived) <= received[event.ranks]:
                    yield
                now = max(now, arrived[received[event.ranks]])
                received[event.ranks] += 1
                continue
            bandwidth = cluster.bandwidth_between(event.ranks, event.is_direct)
            seconds = LATENCY + event.sent / (LINK * bandwidth)
            communicated += seconds
            if event.name == "send":  # beside the computation
                begin = max([now, *arrivals[event.ranks][-1:]])
                arrivals[event.ranks].append(begin + seconds)
            elif event.name == "all_gather":
                begin = max(busy_until, gather_may_begin)
                gather_may_begin = now
                busy_until = begin + seconds
                now = max(now, busy_until)
            elif event.name in ("reduce_scatter", "all_reduce") and phase == "backward":
                busy_until = max(busy_until, now) + seconds
            else:
                busy_until = now = max(busy_until, now) + seconds
        total = max(now, busy_until)
        return StepTime(total, computed, communicated, total - computed)


def time_together(traces: Sequence[StepTrace], cluster: Cluster, tf32: bool = False) -> StepTime:
    """Estimate the time of a step of processes that send each other messages, as the stages of a pipeline do.

    Args:
        traces: of one step of each process.
        cluster: where they run.
        tf32: whether float32 products may use tensor cores.

    Returns:
        the time of the longest, the means of its parts over the processes.

    Raises:
        ValueError: if processes wait for messages that none sends.
    """
    arrivals: dict[tuple[int, ...], list[float]] = defaultdict(list)
    waiting = [trace._clock(cluster, tf32, arrivals) for trace in traces]
    times: list[StepTime] = []
    while waiting:
        before = sum(map(len, arrivals.values())), len(waiting)
        for clock in list(waiting):
            try:
                next(clock)
            except StopIteration as end:
                times.append(end.value)
                waiting.remove(clock)
        if before == (sum(map(len, arrivals.values())), len(waiting)):
            raise ValueError(f"{len(waiting)} of {len(traces)} processes wait for messages that none sends")
    total = max(one.total for one in times)
    computed, communicated = (fmean(getattr(one, name) for one in times) for name in ("computation", "communication"))
    return StepTime(total, computed, communicated, total - computed)


def _seconds(work: Work, cluster: Cluster, tf32: bool) -> float:
    device = cluster.device
    rate = device.product_rate(work.dtype, tf32) * (ATTENTION if work.is_attention else PRODUCTS)
    busy = max(work.flops / rate, work.size / (MEMORY * device.bandwidth))
    return max(busy, LAUNCH) if device.is_gpu else busy
