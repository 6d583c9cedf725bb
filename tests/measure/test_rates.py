import os

import pytest
import torch

from lightning_accel._private.torch import onednn_multiplies_float32
from lightning_accel.measure import measure_rates, rates
from tests.planted import use_clock

CPU = torch.device("cpu")


def test_a_matrix_product_counts_two_operations_for_each_term(monkeypatch):
    """Products whose time is that of a sleep: a rate is 2 n³ over it."""
    clock, sizes = use_clock(monkeypatch, rates), []

    def product(precision, size, device):
        sizes.append(size)
        return lambda: clock.sleep(0.004 * (size / 512) ** 3)

    monkeypatch.setattr(rates, "_product", product)
    rate = rates.matmul_rate("fp32", CPU, 0.2, 2)
    assert sizes == [512, 1024]  # the next would take 256 ms, more than a quarter of the time
    assert rate == pytest.approx(2 * 1024**3 / 0.032, rel=0.01)


def test_bytes_are_those_read_and_written(monkeypatch):
    monkeypatch.setattr(rates, "_best_time", lambda *_: 0.5)
    monkeypatch.setattr(rates, "last_cache_bytes", lambda: 2**25)
    assert rates._memory_rate(CPU, 0.1, 1) == 2 * 2**27 / 0.5  # a buffer of four caches


def test_the_best_time_is_that_of_the_call_nothing_disturbed(monkeypatch):
    clock, delays = use_clock(monkeypatch, rates), iter([0.05, 0.02, 0.05])
    assert rates._best_time(lambda: clock.sleep(next(delays)), 0.0, 3, CPU) == pytest.approx(0.02, rel=0.01)


def test_what_cannot_be_measured_is_told_and_the_rest_is_measured(small_rates, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("no network\nat all")

    monkeypatch.setattr(rates, "measure_collective", fail)
    before = torch.backends.cuda.matmul.allow_tf32
    found = measure_rates(tmp_path, seconds=0.001, repeats=1, device=CPU)
    assert found.failed == {"collective": "no network"}
    assert found.collective is None
    assert all(rate > 1e6 for rate in (*found.matmul.values(), found.memory_bytes_per_s, found.disk_bytes_per_s))
    assert {"fp32", "bf16"} <= found.matmul.keys()
    is_replaced = torch.backends.mkl.is_available() and onednn_multiplies_float32()
    assert ("fp32 by oneDNN" in found.matmul) == is_replaced
    assert not os.listdir(tmp_path)
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_times_must_be_positive():
    with pytest.raises(ValueError, match="seconds must be positive and repeats at least 1; got 0 and 3"):
        measure_rates(seconds=0)


@pytest.mark.slow
def test_two_processes_reduce():
    found = rates.measure_collective(0.02, 2)
    assert (found.backend, found.processes) == ("gloo", 2)
    assert 0 < found.latency_s < rates._REDUCED_BYTES / found.bytes_per_s


@pytest.mark.slow
def test_the_error_of_a_process_is_raised(monkeypatch):
    monkeypatch.setattr(rates, "_COLLECTIVE", "import sys; sys.exit('no such backend')")
    with pytest.raises(RuntimeError, match="no such backend"):
        rates.measure_collective(0.02, 2)
