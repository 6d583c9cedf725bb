"""Peaks of memory: of this process since some moment, and of its children."""

import mmap
import subprocess
import sys
import time

import pytest
import torch

from lightning_accel.measure.peak_memory import PeakMemory, resident_bytes

MIB = 2**20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def touched(size):
    """Return memory that goes back to the system at once, whatever allocator other tests have chosen."""
    block = mmap.mmap(-1, size)
    for page in range(0, size, mmap.PAGESIZE):
        block[page] = 1
    return block


@pytest.mark.slow
def test_the_peak_is_that_since_the_beginning():
    touched(60 * MIB).close()
    held = touched(20 * MIB)
    peak = PeakMemory(torch.device("cpu"))
    assert peak.read() < 5 * MIB  # neither what was freed nor what is held
    touched(40 * MIB).close()
    assert peak.read() == pytest.approx(40 * MIB, abs=5 * MIB)
    held.close()


@pytest.mark.slow
def test_children_count_with_what_they_hold_alone():
    peak = PeakMemory(torch.device("cpu"))
    before = peak.read()
    script = f"import sys; held = bytearray(b'x' * {50 * MIB}); print(len(held), flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline()
        assert peak.read() - before == pytest.approx(60 * MIB, abs=15 * MIB)  # with its interpreter
        assert PeakMemory(torch.device("cpu")).read() < 5 * MIB  # which leaves it out
    finally:
        child.communicate()
    time.sleep(0.01)
    assert peak.read() - before < 5 * MIB


def test_what_is_resident_rises_and_falls():
    before = resident_bytes(torch.device("cpu"))
    with touched(2**26) as held:
        during = resident_bytes(torch.device("cpu"))
        assert len(held) * 0.9 < during - before < len(held) * 1.5
    assert resident_bytes(torch.device("cpu")) < during - 2**25
