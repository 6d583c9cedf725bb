"""How busy experts are kept. Shapes: E experts, L mixtures."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_accel.nn.gating import GateReport

_IDLE = 0.01  # of an equal share
_ADDING = Lock()  # threads with one device each may share an ExpertLoad, which must remain one that can be copied
_TELLING = 64  # slots of an equal share from which on an expert without any is no accident


class LoadStatistics(NamedTuple):
    """What the gate of one mixture did in an optimizer step, over all micro-batches and processes."""

    load: Tensor  # (E,) float64, share of the slots that each expert was asked for; sums to 1
    dropped: Tensor  # () float64, share of the slots that got no expert
    confidence: Tensor  # () float64, mean over tokens of the largest probability

    @property
    def entropy(self) -> Tensor:
        """Entropy of the load over that of equal loads, (); 0 when one expert gets all."""
        entropy = torch.special.entr(self.load).sum() / torch.log(self.load.new_tensor(len(self.load)))
        return torch.nan_to_num(entropy, nan=1.0)  # a single expert

    @property
    def max_violation(self) -> Tensor:
        """How far the busiest expert is above an equal share, (), in shares (Wang et al. 2024, eq. 4)."""
        return self.load.max() * len(self.load) - 1


class ExpertLoad:
    """Adds up what gates report within an optimizer step, then tells each gate, and whoever asks.

    Call :meth:`add` with the reports of each forward pass in training, outside what activation checkpointing repeats,
    and :meth:`step` once an optimizer step; neither waits for the device. From the first :meth:`step` on, or from
    :meth:`start` if called, the balance losses of the gates are those of whole optimizer steps.

    Args:
        gates: L gates, with an attribute ``num_experts``, in the order of the reports.
        group: the processes that see tokens of their own; by default all.
    """

    def __init__(self, gates: Sequence[Any], group: torch.distributed.ProcessGroup | None = None) -> None:
        self.gates = gates
        self.group = group
        self.last_step: dict[int, LoadStatistics] = {}
        self._sums: list[Tensor | None] = [None] * len(gates)
        self._since_check: list[Tensor | int] = [0] * len(gates)
        self._warned: set[int] = set()

    def start(self) -> None:
        """Let the first step take equal loads, unless the gates know better, as in a run that is resumed.

        Without it the first step, which has none before it, takes the load of each micro-batch and process.
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
        sums = torch.cat([report.expert_counts.to(_wide(others)), others.to(_wide(others))])
        with nullcontext() if torch.compiler.is_compiling() else _ADDING:  # a lock would break the graph
            before = self._sums[number]
            self._sums[number] = sums if before is None else before + sums.to(before.device)

    @torch.no_grad()
    def step(self) -> list[LoadStatistics]:
        """Sum over processes, call ``update`` of each gate that ran on any and has one, and start anew.

        Every process must call it, those too where some gates or none ran, such as the stages of a pipeline; only for
        gates that did not run on it does a process wait for the device. The statistics are those of the gates that
        ran, and by their numbers in ``last_step``.
        """
        sums, self._sums = self._sums, [None] * len(self.gates)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        ran = next((one for one in sums if one is not None), None)
        if not self.gates or (ran is None and not distributed):
            return []
        zero = _zero_for(self.gates) if ran is None else ran
        sizes = [int(gate.num_experts) + 3 for gate in self.gates]
        total = torch.cat([zero.new_zeros(size) if one is None else one for size, one in zip(sizes, sums, strict=True)])
        if distributed:
            torch.distributed.all_reduce(total, group=self.group)
        self.last_step = {}
        for number, one in enumerate(total.split(sizes)):
            # those that did not run, such as a frozen one, keep what they know; the last number counts passes
            if sums[number] is not None or (distributed and bool(one[-1] > 0)):
                self._tell(number, one[:-3], *one[-3:])
        return list(self.last_step.values())

    def _tell(self, number: int, counts: Tensor, dropped: Tensor, confidence: Tensor, passes: Tensor) -> None:
        self._since_check[number] = self._since_check[number] + counts
        if callable(update := getattr(self.gates[number], "update", None)):
            update(counts.round().to(torch.int64))
        slots = counts.sum().clamp(min=1)
        self.last_step[number] = LoadStatistics(counts / slots, dropped / slots, confidence / passes)

    def warn_if_collapsed(self) -> None:
        """Warn, once for each gate, if a few of its experts got nearly all slots since the last check.

        It waits for the device. Where slots are too few to tell, it lets them add up.
        """
        for number, (gate, counts) in enumerate(zip(self.gates, self._since_check, strict=True)):
            if isinstance(counts, int) or counts.mean() < _TELLING:
                continue
            self._since_check[number] = 0
            num_experts = len(counts)
            idle = int((counts < _IDLE * counts.mean()).sum())
            if num_experts - idle <= max(getattr(gate, "k", 1), num_experts // 4) < num_experts:
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


def summarise_load(statistics: Sequence[LoadStatistics]) -> dict[str, Tensor]:
    """Figures over all mixtures, () each.

    ``load_entropy``, the smallest; ``max_violation``, the largest; ``dropped_fraction`` and ``gate_confidence``, means.
    """
    return {
        "load_entropy": torch.stack([one.entropy for one in statistics]).min(),
        "max_violation": torch.stack([one.max_violation for one in statistics]).max(),
        "dropped_fraction": torch.stack([one.dropped for one in statistics]).mean(),
        "gate_confidence": torch.stack([one.confidence for one in statistics]).mean(),
    }


def _zero_for(gates: Sequence[Any]) -> Tensor:
    """A zero where the gates are; those that another process holds may have parameters on the meta device."""
    of_gates = [
        tensor for gate in gates if isinstance(gate, nn.Module) for tensor in (*gate.buffers(), *gate.parameters())
    ]
    real = next((tensor for tensor in of_gates if not tensor.is_meta), torch.zeros(()))
    return torch.zeros((), dtype=_wide(real), device=real.device)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # counts beyond 2**24 stay whole
