"""Instruments: the machine and its measured rates, and where the steps of a fit spend time, operations and memory."""

from lightning_accel.measure.machine import Gpu, Machine, describe_machine
from lightning_accel.measure.rates import Collective, Rates, measure_rates

__all__ = ["Collective", "Gpu", "Machine", "Rates", "describe_machine", "measure_rates"]
