"""Operations of a training batch, by torch's counter, and what share of the measured peak they are."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from torch.utils.flop_counter import FlopCounterMode

import lightning_accel.ops.attention
import lightning_accel.ops.grouped_linear  # noqa: F401  # formulas of these operations
from lightning_accel.measure.rates import BY_ONEDNN, Rates
from lightning_accel.ops.matmul import takes_onednn

_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


class FlopCount(L.Callback):
    """Count the floating-point operations of one training batch, forward and backward.

    Matrix products, convolutions and attention are counted, two operations for each term; what torch's counter does not
    know (recurrent layers of a single kernel, custom operations) is not. Counting makes the step slower.

    Args:
        batch: number of the batch to count, from 0, within this fit.

    Attributes:
        flops: operations of that batch in this process; None before it ends, or if a formula of torch's fails on it.
        onednn_flops: those of matrix products that ``Speedups(onednn_matmul=True)`` serves, in whatever dtype.
    """

    def __init__(self, batch: int = 1) -> None:
        self.batch = batch
        self.flops: int | None = None
        self.onednn_flops: int | None = None
        self._onednn_flops = 0
        self._seen = 0
        self._has_failed = False
        self._mode: ExitStack | None = None
        self._counter: FlopCounterMode | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._seen == self.batch:
            self._mode = ExitStack()
            if "torch._dynamo" in sys.modules:  # what it meets under a mode, it would not compile in later batches
                self._mode.enter_context(torch.compiler.set_stance("force_eager"))
            self._counter = self._mode.enter_context(FlopCounterMode(display=False))
            formulas = self._counter.flop_registry
            self._counter.flop_registry = {
                operation: self._guarded(operation, formulas[operation]) for operation in formulas
            }
        self._seen += 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._mode is not None:
            assert self._counter is not None
            if not self._has_failed:
                self.flops, self.onednn_flops = self._counter.get_total_flops(), self._onednn_flops
            self._close()

    def _guarded(self, operation: Any, formula: Callable[..., int]) -> Callable[..., int]:
        """Return a formula for operations that does not end the step, which would run without it, where it raises."""

        def count(*args: Any, **kwargs: Any) -> int:
            try:
                counted = formula(*args, **kwargs)
                if operation in _PRODUCTS and takes_onednn(*(matrix.shape for matrix in args[-2:])):
                    self._onednn_flops += counted
                return counted
            except Exception:
                self._has_failed = True
                return 0

        return count

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._mode is not None:
            self._mode.close()
            self._mode = self._counter = None


def share_of_peak(flops: float, seconds: float, rates: Rates, precision: str) -> float | None:
    """Return which share of the measured rate of matrix products ``flops`` in ``seconds`` is; None if not measured.

    Args:
        flops: operations of a step.
        seconds: wall time of the step.
        rates: rates of the device that ran it.
        precision: key of ``rates.matmul`` in which the step multiplies, such as ``bf16``.
    """
    # what emulates fewer digits by float32 multiplies no faster than that
    names = (precision,) if precision == "fp64" else (precision, "fp32", BY_ONEDNN)
    peak = max(rates.matmul.get(name, 0.0) for name in names)
    return flops / seconds / peak if precision in rates.matmul else None


def precision_of_products(precision: str, device: torch.device, has_float64: bool = False) -> str:
    """Return the key of measured rates for the matrix products of a run.

    Args:
        precision: the Trainer's, such as ``bf16-mixed``.
        device: of the module.
        has_float64: whether weights or batches of a Trainer of 32 bits are float64.
    """
    if precision.startswith(("bf16", "16", "64")):
        return {"b": "bf16", "1": "fp16", "6": "fp64"}[precision[0]]
    is_tf32 = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if is_tf32 else "fp64" if has_float64 else "fp32"
