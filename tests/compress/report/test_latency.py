import math

import numpy as np
import pytest
import torch

from lightning_accel.compress import Latency, measure_latency, speedup
from lightning_accel.compress.report.latency import CONFIDENCE, ROUNDS, Stopwatch, ties


class Clock:
    """Stands still but for what calls add to it."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("lightning_accel.compress.report.latency.time", made)
    return made


def test_medians_and_tails_are_of_single_calls(clock):
    slow = iter(range(10_000))

    def even():
        clock.now += 0.01

    def now_and_then():
        clock.now += 0.03 if next(slow) % 8 == 7 else 0.001

    latencies = measure_latency({"even": even, "mixed": now_and_then}, seconds=0, rounds=24, warmup=0)
    assert latencies["even"].num_calls == latencies["mixed"].num_calls == 48  # the first of 3 in a block is left out
    assert len(latencies["mixed"].rounds_ms) == 24
    assert latencies["even"][:2] == pytest.approx((10, 10))
    assert latencies["mixed"][:2] == pytest.approx((1, 30))
    assert sum(taken > 10 for taken in latencies["mixed"].rounds_ms) == 6


def test_blocks_of_one_call_in_a_row_take_turns(clock):
    """The first call of a block finds the caches full of another's data; a server's calls do not."""
    order, last = [], [None]

    def call(name):
        order.append(name)
        clock.now += 0.009 if last[0] != name else 0.002
        last[0] = name

    calls = {name: lambda name=name: call(name) for name in "abc"}
    latencies = measure_latency(calls, seconds=0.3, rounds=10, warmup=1)
    for latency in latencies.values():
        assert latency.p50_ms == latency.p95_ms == pytest.approx(2)
        assert len(latency.rounds_ms) == 10
    rounds = np.array_split(np.array(order[3:]), 10)
    starts = {"".join(dict.fromkeys(one.tolist())) for one in rounds}
    assert len(starts) > 1  # the order differs
    assert all(len(one) == 3 for one in starts)


def test_calls_keep_no_gradients(clock):
    weight, seen = torch.ones(2, requires_grad=True), []

    def call():
        clock.now += 1
        seen.append((2 * weight).requires_grad)

    measure_latency({"a": call}, seconds=0, rounds=2, warmup=1)
    assert seen == [False] * 3


def rounds(*values):
    return Latency(float(np.median(values)), max(values), len(values), values)


def test_interval_is_that_of_the_sign_test():
    found = speedup(rounds(*[1.0] * 11), rounds(*range(1, 12)))
    assert found == (6, 2, 10)  # misses with probability 2 (1 + 11) / 2**11 = 1.2%, the next one with 6.5%
    assert found.is_faster
    assert found.margin == pytest.approx(2)
    paired = speedup(rounds(1, 50, 2, 3, 1, 9, 1), rounds(2, 100, 4, 6, 2, 18, 2))  # a busy machine slows both alike
    assert paired == (2, 2, 2)
    few = speedup(rounds(1, 1, 1), rounds(2, 2, 2))
    assert few == (2, 0, math.inf)
    assert not few.is_faster
    assert few.margin is None


def test_equal_calls_are_rarely_told_apart():
    noise = np.exp(0.2 * np.random.default_rng(0).standard_normal((2000, 2, ROUNDS)))
    found = [speedup(rounds(*a), rounds(*b)) for a, b in noise]
    missed = np.mean([one.low > 1 or one.high < 1 for one in found])
    assert missed <= 1 - CONFIDENCE
    assert missed > 0.005  # 1.2% is what eleven rounds can have; an interval of anything would miss nothing


def test_ties_are_resolved_by_more_rounds(clock):
    """Rounds of which half are disturbed show nothing; what is measured again takes no turn from others."""
    count = {"quick": 0, "other": 0, "slow": 0}

    def call(name, own):
        count[name] += 1
        disturbed = name == "quick" and count[name] <= ROUNDS and count[name] % 2
        clock.now += own * (3 if disturbed else 1)

    calls = {
        "quick": lambda: call("quick", 0.01),
        "other": lambda: call("other", 0.012),
        "slow": lambda: call("slow", 1),
    }
    stopwatch = Stopwatch(calls, warmup=0)
    stopwatch.run(0)
    assert set(ties(stopwatch.latencies(), list(calls))) == {"quick", "other"}
    for _ in range(2):
        stopwatch.run(0, names=["quick", "other"])
    latencies = stopwatch.latencies()
    assert [len(latencies[name].rounds_ms) for name in calls] == [3 * ROUNDS, 3 * ROUNDS, ROUNDS]
    assert ties(latencies, list(calls)) == ["quick"]
    assert ties(latencies, []) == []
