import math
import warnings

import pytest
import torch
import torch.distributed as dist

from lightning_accel.nn import ExpertLoad, MixtureOfExperts, TopKGate, summarise_load
from tests.ranks import run_ranks


def reports(*counts, dropped=0, confidence=0.5):
    template = TopKGate(dim=2, num_experts=len(counts))(torch.randn(3, 2)).report
    others = {"dropped": torch.tensor(dropped), "confidence": torch.tensor(confidence)}
    return [template._replace(expert_counts=torch.tensor(counts), **others)]


def test_statistics_are_those_of_the_whole_step():
    gate = TopKGate(dim=2, num_experts=4, bias_update_rate=0.1)
    load = ExpertLoad([gate])
    load.add(reports(8, 0, 0, 0, dropped=3, confidence=0.2))
    load.add(reports(0, 4, 2, 2, dropped=1, confidence=0.4))
    (one,) = load.step()
    shares = [0.5, 0.25, 0.125, 0.125]
    assert one.load.tolist() == shares
    assert float(one.entropy) == pytest.approx(-sum(p * math.log(p) for p in shares) / math.log(4))
    assert float(one.max_violation) == 1
    assert float(one.dropped) == 0.25
    assert float(one.confidence) == pytest.approx(0.3)
    assert gate.expert_slots.tolist() == [8, 4, 2, 2]
    assert gate.bias_steps.tolist() == [-1, 0, 1, 1]
    assert load.step() == []
    assert gate.expert_slots.tolist() == [8, 4, 2, 2]


def test_summary_tells_of_the_worst():
    load = ExpertLoad([TopKGate(2, 4), TopKGate(2, 2)])
    load.add(reports(4, 4, 4, 4) + reports(6, 2, dropped=4))
    summary = {name: float(value) for name, value in summarise_load(load.step()).items()}
    assert summary["max_violation"] == 0.5
    assert summary["load_entropy"] == pytest.approx(0.811278, abs=1e-6)
    assert summary["dropped_fraction"] == 0.25
    assert summary["gate_confidence"] == 0.5


@pytest.mark.parametrize(
    ("counts", "collapsed"),
    [
        ((200, 200, 0, 0, 0, 0), "4 of its 6 experts"),
        ((1000, 0), None),  # k is 2: any load is what the gate was made for
        ((5, 5, 0, 0, 0, 0), None),  # too few to tell
        ((200, 190, 180, 0, 0, 0), None),
        ((1000, 900, 1, 1, 1, 1), "4 of its 6 experts"),
        ((1000, 900, 20, 20, 20, 20), None),  # a twentieth of an equal share
        ((30, 30, 0, 0, 0, 0), None),
        ((500, 400, 300, *[0] * 9), "9 of its 12 experts"),  # a quarter of them is left
    ],
)
def test_collapse_is_told_once(counts, collapsed):
    load = ExpertLoad([TopKGate(2, len(counts))])
    for _ in range(2):
        load.add(reports(*counts))
        load.step()
    if collapsed:
        with pytest.warns(UserWarning, match=f"gate 0 has collapsed: {collapsed}"):
            load.warn_if_collapsed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load.warn_if_collapsed()


def test_each_check_looks_at_what_came_since_the_last():
    load = ExpertLoad([TopKGate(2, 6)])
    load.add(reports(*[10_000] * 6))
    load.step()
    load.warn_if_collapsed()
    load.add(reports(200, 200, 0, 0, 0, 0))
    load.step()
    with pytest.warns(UserWarning, match="collapsed"):
        load.warn_if_collapsed()


def test_a_bias_has_time_to_balance_the_load():
    gate = TopKGate(2, 6, bias_update_rate=0.1)
    load = ExpertLoad([gate])
    for step in range(4):
        load.add(reports(200, 200, 0, 0, 0, 0))
        load.step()
        assert int(gate.bias_steps.max() - gate.bias_steps.min()) == 2 * (step + 1)
        if step < 2:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                load.warn_if_collapsed()
    with pytest.warns(UserWarning, match="gate 0 has collapsed: 4 of its 6 experts"):
        load.warn_if_collapsed()


def test_start_leaves_what_a_resumed_gate_knows():
    fresh, resumed = TopKGate(2, 3), TopKGate(2, 3)
    resumed.update(torch.tensor([5, 1, 0]))
    ExpertLoad([fresh, resumed]).start()
    assert fresh.expert_slots.tolist() == [1, 1, 1]
    assert resumed.expert_slots.tolist() == [5, 1, 0]


def test_a_step_of_some_mixtures_alone_tells_those():
    gates = TopKGate(2, 2), TopKGate(2, 2)
    load = ExpertLoad(gates)
    load.add_one(1, reports(3, 1)[0])
    assert len(load.step()) == 1
    assert gates[1].expert_slots.tolist() == [3, 1]
    assert not gates[0].expert_slots.any()
    load.add_one(0, reports(2, 2)[0])
    load.step()
    assert gates[0].expert_slots.tolist() == [2, 2]
    assert gates[1].expert_slots.tolist() == [3, 1]


def test_a_single_expert_is_in_balance():
    load = ExpertLoad([TopKGate(2, 1, k=1)])
    load.add(reports_of_one())
    (one,) = load.step()
    assert (float(one.entropy), float(one.max_violation)) == (1, 0)


def reports_of_one():
    return [TopKGate(dim=2, num_experts=1, k=1)(torch.randn(3, 2)).report]


def gradients(batches, *, dtype=torch.float64):
    """Of three steps over ``batches`` of micro-batches, the weights moving in between; averaged over processes."""
    torch.manual_seed(3)
    mixture = MixtureOfExperts(dim=6, hidden_dim=4, num_experts=5).to(dtype)
    load = ExpertLoad([mixture.gate])
    load.start()
    optimizer = torch.optim.SGD(mixture.parameters(), lr=0.3)
    kept = []
    for micro_batches in batches:
        for x in micro_batches:
            features, report = mixture(x)
            load.add([report])
            loss = features.square().mean() + 0.5 * report.balance_loss + 0.1 * report.z_loss
            (loss / len(micro_batches)).backward()
        load.step()
        for parameter in mixture.parameters():
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        kept.append([parameter.grad.clone() for parameter in mixture.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return kept


def rows():
    return torch.randn(3, 64, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def test_four_micro_batches_give_the_gradients_of_one():
    whole = gradients([[batch] for batch in rows()])
    torch.testing.assert_close(gradients([batch.split(16) for batch in rows()]), whole)
    balance_matters = gradients([[batch] for batch in rows().flip(1)[:, :60]])
    assert not torch.allclose(balance_matters[1][0], whole[1][0])


def check_gradients_of_two_processes(rank):
    return gradients([batch.chunk(2)[rank].split(16) for batch in rows()])


def test_two_processes_give_the_gradients_of_one():
    whole = gradients([[batch] for batch in rows()])
    for result in run_ranks(check_gradients_of_two_processes):
        torch.testing.assert_close(result, whole)


def check_step_of_one_process(rank):
    gates = TopKGate(2, 2), TopKGate(2, 2)
    load = ExpertLoad(gates)
    if rank == 1:
        load.add_one(1, reports(3, 1)[0])
    told = list(load.step()), list(load.step())
    return [len(one) for one in told], gates[0].expert_slots.tolist(), gates[1].expert_slots.tolist()


def test_gates_that_ran_on_one_process_alone_are_told_on_all():
    assert run_ranks(check_step_of_one_process) == [([1, 0], [0, 0], [3, 1])] * 2
