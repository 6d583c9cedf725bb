import time

import torch

from lightning_accel.compress import measure_latency


def test_medians_and_tails_are_of_single_calls():
    slow = iter(range(10_000))

    def now_and_then():
        time.sleep(0.03 if next(slow) % 8 == 7 else 0.001)

    latencies = measure_latency({"sleep": lambda: time.sleep(0.01), "mixed": now_and_then}, seconds=0, min_calls=24)
    assert latencies["sleep"].num_calls == latencies["mixed"].num_calls == 24
    assert latencies["sleep"].p50_ms >= 10
    assert 1 <= latencies["mixed"].p50_ms < 30 <= latencies["mixed"].p95_ms


def test_calls_take_turns_after_a_warm_up_and_keep_no_gradients():
    weight, order = torch.ones(2, requires_grad=True), []
    calls = {name: lambda name=name: order.append((name, (2 * weight).requires_grad)) for name in "ab"}
    measure_latency(calls, seconds=0, min_calls=2, warmup=1)
    assert order == 3 * [("a", False), ("b", False)]
