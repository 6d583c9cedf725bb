"""Statistics of the load of experts. Shapes: E experts, L mixtures."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_accel.nn.moe.gating import GateReport
from lightning_accel.ops.float32 import dtype_of_sums

_IDLE_SHARE = 0.01  # experts with less than this part of an equal share count as idle
# threads with one device each may share an ExpertLoad; global, as objects with locks cannot be copied
_ADD_LOCK = Lock()
_LARGE_BIAS = 0.5  # scores are within 0 and 1
_MIN_MEAN_SLOTS = 64  # from this mean number of slots on, an expert without slots is no accident


class LoadStatistics(NamedTuple):
    """Hold the gating statistics of one mixture in an optimizer step, over all micro-batches and processes."""

    load: Tensor  # (E,) float64, share of the slots assigned to each expert; sums to 1
    dropped: Tensor  # () float64, share of the slots without an expert
    confidence: Tensor  # () float64, mean over tokens of the largest probability

    @property
    def entropy(self) -> Tensor:
        """Return the entropy of the load divided by that of equal loads, (); 0 if one expert gets all slots."""
        entropy = torch.special.entr(self.load).sum() / torch.log(self.load.new_tensor(len(self.load)))
        return torch.nan_to_num(entropy, nan=1.0)  # a single expert

    @property
    def max_violation(self) -> Tensor:
        """Return the excess of the largest load over an equal share, (), in equal shares (Wang et al. 2024, eq. 4)."""
        return self.load.max() * len(self.load) - 1


class ExpertLoad:
    """Sum the reports of gates over an optimizer step, then update the gates and compute statistics.

    Call :meth:`add` with the reports of each training forward pass, outside of regions that activation checkpointing
    recomputes, and :meth:`step` once per optimizer step; neither waits for the device. After the first :meth:`step`,
    or after :meth:`start`, the balance losses of the gates refer to whole optimizer steps.

    Args:
        gates: L gates, with an attribute ``num_experts``, in the order of the reports.
        group: the process group over which reports are summed; by default all processes.
    """

    def __init__(self, gates: Sequence[Any], group: torch.distributed.ProcessGroup | None = None) -> None:
        self.group = group
        self.track(gates)

    def track(self, gates: Sequence[Any]) -> None:
        """Begin anew with these gates, as after some of them, or of their experts, were removed."""
        self.gates = gates
        self.last_step: dict[int, LoadStatistics] = {}
        self._sums: list[Tensor | None] = [None] * len(gates)
        self._since_check: list[Tensor | int] = [0] * len(gates)
        self._warned: set[int] = set()

    def start(self) -> None:
        """Assume equal loads in the first step, unless the gates have counts already, as in a resumed run.

        Without this call, the balance loss of the first step uses the load of each micro-batch and process.
        """
        for gate in self.gates:
            slots = getattr(gate, "expert_slots", None)
            if slots is not None and not slots.any():
                slots.fill_(1)

    def add(self, reports: Sequence[GateReport]) -> None:
        """Add the reports of one forward pass of all L mixtures."""
        for number, report in enumerate(reports):
            self.add_one(number, report)

    def add_one(self, number: int, report: GateReport) -> None:
        """Add the report of one forward pass of mixture ``number``."""
        others = torch.stack([report.dropped, report.confidence.detach(), torch.ones_like(report.dropped)])
        dtype = dtype_of_sums(others.device)  # counts beyond 2**24 stay whole
        sums = torch.cat([report.expert_counts.to(dtype), others.to(dtype)])
        with nullcontext() if torch.compiler.is_compiling() else _ADD_LOCK:  # a lock would break the graph
            before = self._sums[number]
            self._sums[number] = sums if before is None else before + sums.to(before.device)

    @torch.no_grad()
    def step(self) -> list[LoadStatistics]:
        """Sum reports over processes, call ``update`` of each gate that ran on any process, and reset the sums.

        Every process must call it, even if none or only some gates ran there, as with pipeline stages; only a process
        on which some gates did not run waits for the device. Returns the statistics of the gates that ran, which
        ``last_step`` also holds by the gates' numbers.
        """
        sums, self._sums = self._sums, [None] * len(self.gates)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        ran = next((one for one in sums if one is not None), None)
        if not self.gates or (ran is None and not distributed):
            return []
        zero = _zero_like_gates(self.gates) if ran is None else ran
        sizes = [int(gate.num_experts) + 3 for gate in self.gates]
        total = torch.cat([zero.new_zeros(size) if one is None else one for size, one in zip(sizes, sums, strict=True)])
        if distributed:
            torch.distributed.all_reduce(total, group=self.group)
        self.last_step = {}
        for number, one in enumerate(total.split(sizes)):
            # gates that did not run, such as a frozen one, keep their counts; the last number counts passes
            if sums[number] is not None or (distributed and bool(one[-1] > 0)):
                self._update_gate(number, one[:-3], *one[-3:])
        return list(self.last_step.values())

    def _update_gate(self, number: int, counts: Tensor, dropped: Tensor, confidence: Tensor, passes: Tensor) -> None:
        self._since_check[number] = self._since_check[number] + counts
        if callable(update := getattr(self.gates[number], "update", None)):
            update(counts.round().to(torch.int64))
        slots = counts.sum().clamp(min=1)
        self.last_step[number] = LoadStatistics(counts / slots, dropped / slots, confidence / passes)

    def warn_if_collapsed(self) -> None:
        """Warn, once per gate, if a few of its experts got nearly all slots since the last check.

        This waits for the device. As long as there are too few slots for a decision, they keep adding up. A bias that
        balances the load has some hundred steps to do so: until biases differ by half the range of scores.
        """
        for number, (gate, counts) in enumerate(zip(self.gates, self._since_check, strict=True)):
            if isinstance(counts, int) or counts.mean() < _MIN_MEAN_SLOTS:
                continue
            self._since_check[number] = 0
            num_experts = len(counts)
            idle = int((counts < _IDLE_SHARE * counts.mean()).sum())
            is_collapsed = num_experts - idle <= max(getattr(gate, "k", 1), num_experts // 4) < num_experts
            if is_collapsed and not _has_bias_on_its_way(gate):
                self._warn(number, idle, num_experts)

    def _warn(self, number: int, idle: int, num_experts: int) -> None:
        if number not in self._warned:
            self._warned.add(number)
            warnings.warn(
                f"gate {number} has collapsed: {idle} of its {num_experts} experts got less than a hundredth of an "
                "equal share of late. Raise the weight of its balance loss, set bias_update_rate of TopKGate, or lower "
                "the learning rate",
                stacklevel=3,
            )


def _has_bias_on_its_way(gate: Any) -> bool:
    steps = getattr(gate, "bias_steps", None)
    return steps is not None and float(steps.max() - steps.min()) * gate.bias_update_rate < _LARGE_BIAS


def summarise_load(statistics: Sequence[LoadStatistics]) -> dict[str, Tensor]:
    """Compute statistics over all mixtures, () each.

    These are the smallest ``load_entropy``, the largest ``max_violation``, and the mean ``dropped_fraction`` and
    ``gate_confidence``.
    """
    return {
        "load_entropy": torch.stack([one.entropy for one in statistics]).min(),
        "max_violation": torch.stack([one.max_violation for one in statistics]).max(),
        "dropped_fraction": torch.stack([one.dropped for one in statistics]).mean(),
        "gate_confidence": torch.stack([one.confidence for one in statistics]).mean(),
    }


def _zero_like_gates(gates: Sequence[Any]) -> Tensor:
    """Return a zero on the device of the gates; gates of other processes may have parameters on the meta device."""
    of_gates = [
        tensor for gate in gates if isinstance(gate, nn.Module) for tensor in (*gate.buffers(), *gate.parameters())
    ]
    real = next((tensor for tensor in of_gates if not tensor.is_meta), torch.zeros(()))
    return torch.zeros((), dtype=dtype_of_sums(real.device), device=real.device)
