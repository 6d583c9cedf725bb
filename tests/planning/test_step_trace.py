"""Time of a recorded step, against sums by hand."""

import pytest

from lightning_accel.planning.hardware import DEVICES, Cluster, Device, find_device
from lightning_accel.planning.step_trace import (
    ATTENTION,
    LATENCY,
    LAUNCH,
    LINK,
    MEMORY,
    PRODUCTS,
    Collective,
    StepTrace,
    Work,
    time_together,
)

DEVICE = Device("d", 2**30, {"fp64": 5e11, "fp32": 1e12, "bf16": 4e12}, bandwidth=1e11, link=1e10, network=1e9)
CLUSTER = Cluster(DEVICE, per_machine=4, machines=2)


def trace(*events):
    made = StepTrace()
    made.events.extend(events)
    return made


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work("forward", 10**12, "fp32", 0), 1 / PRODUCTS),
        (Work("forward", 10**12, "bf16", 0), 0.25 / PRODUCTS),
        (Work("forward", 10**12, "fp16", 0), 1 / PRODUCTS),  # the device has no rate of its own for it
        (Work("forward", 10**12, "bf16", 0, is_attention=True), 0.25 / ATTENTION),
        (Work("forward", 10**12, "fp64", 0), 2 / PRODUCTS),
        (Work("forward", 10**6, "bf16", 10**11), 1 / MEMORY),
        (Work("forward", 0, "fp32", 8), LAUNCH),
    ],
)
def test_an_operation_takes_the_longer_of_arithmetic_and_traffic(work, seconds):
    assert trace(work).time_on(CLUSTER).total == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("ranks", "direct", "bandwidth"),
    [
        ((0, 1, 2, 3), False, 1e10),
        (tuple(range(8)), False, 4e9),  # a ring enters a machine by the ports of its four devices
        (tuple(range(8)), True, 1e9 * 7 / 4),  # three others are in the same machine
        ((0, 4), False, 1e9),
    ],
)
def test_bandwidth_between_processes(ranks, direct, bandwidth):
    assert CLUSTER.bandwidth_between(ranks, direct) == bandwidth


def test_bytes_that_a_process_sends():
    inside, outside = (0, 1, 2, 3), tuple(range(8))
    events = [
        Collective("backward", "all_reduce", 800, outside),
        Collective("forward", "all_gather", 400, inside),
        Collective("forward", "all_to_all", 80, inside),
        Collective("forward", "barrier", 0, outside),
    ]
    assert trace(*events).sent_bytes(CLUSTER) == (300 + 60 + 1400 * 3 / 4, 1400 / 4)
    assert trace(*events).bytes_by_name() == {"all_reduce": 800, "all_gather": 400, "all_to_all": 80, "barrier": 0}


WORK = Work("forward", 10**12, "fp32", 0)
SECOND = 1 / PRODUCTS
BACK = Work("backward", 10**12, "fp32", 0)


def gather(seconds, phase="forward"):
    size = (seconds - LATENCY) * 1e10 * LINK * 4 / 3
    return Collective(phase, "all_gather", round(size), (0, 1, 2, 3))


def reduce(seconds):
    size = (seconds - LATENCY) * 1e10 * LINK * 4 / 3
    return Collective("backward", "reduce_scatter", round(size), (0, 1, 2, 3))


def exchange(seconds):
    size = (seconds - LATENCY) * 1e10 * LINK * 4 / 3
    return Collective("forward", "all_to_all", round(size), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("events", "total"),
    [
        ([gather(0.5), WORK, gather(0.5), WORK], 0.5 + 2 * SECOND),  # the second hides behind the first block
        ([gather(0.5), WORK, gather(5), WORK], 0.5 + 5 + SECOND),  # which it outlasts
        # the third begins with the second block, not before
        ([gather(0.5), WORK, gather(0.5), WORK, gather(2), WORK], 0.5 + SECOND + 2 + SECOND),
        ([exchange(0.5), WORK, exchange(0.5), WORK], 1 + 2 * SECOND),
        ([BACK, reduce(0.5), BACK, reduce(0.5)], 2 * SECOND + 0.5),
        ([BACK, reduce(5), BACK, reduce(0.5)], SECOND + 5.5),
        ([BACK, reduce(0.5), Work("optimizer", 10**12, "fp32", 0)], 2 * SECOND + 0.5),
        ([gather(0.5, "forward"), WORK, Collective("forward", "all_reduce", 0, (0,))], 0.5 + SECOND),
    ],
)
def test_what_communication_hides_behind(events, total):
    time = trace(*events).time_on(CLUSTER)
    assert time.total == pytest.approx(total, rel=1e-6)
    assert time.exposed == pytest.approx(total - time.computation)


@pytest.mark.parametrize(
    ("name", "bandwidth", "share"), [("all_to_all", 1e9 * 7 / 4, 7 / 8), ("all_reduce", 4e9, 14 / 8)]
)
def test_exchanges_of_tokens_leave_by_one_port_each(name, bandwidth, share):
    time = trace(Collective("forward", name, 10**9, tuple(range(8)))).time_on(CLUSTER)
    assert time.communication == pytest.approx(LATENCY + share * 1e9 / (LINK * bandwidth))


@pytest.mark.parametrize("num_stages", [2, 5])
def test_stages_wait_for_each_other(num_stages):
    """One batch after another, forward and backward, takes as long as a pipeline of micro-batches does."""
    num, traces = 7, []
    for stage in range(num_stages):
        events, ahead = [], num_stages - stage
        forward = [("receive", stage - 1, stage), WORK, ("send", stage, stage + 1)]
        backward = [("receive", stage + 1, stage), BACK, BACK, ("send", stage, stage - 1)]
        order = [*["f"] * ahead, *["b", "f"] * (num - ahead), *["b"] * ahead]  # 1F1B
        for one in order:
            events += forward if one == "f" else backward
        made = [
            one if isinstance(one, Work) else Collective("forward", one[0], 0, one[1:])
            for one in events
            if isinstance(one, Work) or set(one[1:]) <= set(range(num_stages))
        ]
        traces.append(trace(*made))
    time = time_together(traces, Cluster(DEVICE, num_stages))
    assert time.total == pytest.approx((num + num_stages - 1) * 3 * SECOND, rel=1e-3)
    assert time.computation == pytest.approx(num * 3 * SECOND)
    with pytest.raises(ValueError, match="wait for messages that none sends"):
        time_together(traces[:1], CLUSTER)


def test_messages_leave_one_after_the_other():
    size = round((1 - LATENCY) * 1e10 * LINK)
    sends = trace(*[Collective("forward", "send", size, (0, 1))] * 3)
    receives = trace(*[Collective("forward", "receive", size, (0, 1))] * 3)
    assert time_together([receives, sends], CLUSTER).total == pytest.approx(3, rel=1e-6)


def test_tensor_cores_for_float32():
    work = trace(Work("forward", 10**15, "fp32", 0))
    cluster = Cluster(DEVICES["A100-80GB"], 1)
    assert work.time_on(cluster).total == pytest.approx(8 * work.time_on(cluster, tf32=True).total)


@pytest.mark.parametrize("text", ["8xH100-81GB", "0xL4-24GB", "", "8 x L4-24GB"])
def test_devices_that_are_not_known(text):
    with pytest.raises(ValueError, match="gpus must be a number and a kind"):
        find_device(text)


def test_devices_are_found_by_name():
    assert find_device("4xl4") == (4, DEVICES["L4-24GB"])
    assert find_device("A100-80GB") == (1, DEVICES["A100-80GB"])
