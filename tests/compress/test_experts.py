import copy
from functools import partial

import pytest
import torch

from lightning_accel.compress import (
    apply_plan_,
    busiest_experts,
    measure_expert_load,
    plan_of_experts,
    remove_experts_,
)
from lightning_accel.nn import ExpertChoiceGate, MixtureOfExperts, TopKGate

TOKENS = torch.randn(9, 6)


def mixture(num_experts=5, k=2, **options):
    made = MixtureOfExperts(6, 8, num_experts, k, **options)
    return made.double().eval()


def test_tokens_go_to_the_best_of_those_that_are_left():
    whole = mixture(gate=partial(TopKGate, bias_update_rate=0.001))
    small = copy.deepcopy(whole)
    plan = remove_experts_(small, [3, 0, 4])
    assert (small.num_experts, small.gate.num_experts, small.gate.k) == (3, 3, 2)
    assert small.experts.up_weight.shape[0] == small.gate.weight.shape[0] == len(small.gate.expert_slots) == 3
    assert len(small.gate.bias_steps) == 3
    x, keep = TOKENS.double(), [0, 3, 4]
    weights, chosen = (x @ whole.gate.weight[keep].T).softmax(1).topk(2)
    weights = weights / weights.sum(1, keepdim=True)
    expected = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, number in zip(weights[token], chosen[token], strict=True):
            one = keep[number]
            hidden = torch.nn.functional.gelu(whole.experts.up_weight[one] @ x[token] + whole.experts.up_bias[one])
            expected[token] += weight * (whole.experts.down_weight[one] @ hidden + whole.experts.down_bias[one])
    torch.testing.assert_close(small(x).features, expected)
    again = copy.deepcopy(whole)
    apply_plan_(again, type(plan).of_state(plan.state_dict()))
    torch.testing.assert_close(again(x).features, expected)


def test_a_gate_asks_for_no_more_than_are_left():
    small = mixture(4, 3)
    remove_experts_(small, [2, 1])
    assert small.gate.k == 2
    assert small(TOKENS.double()).report.expert_counts.tolist() == [9, 9]
    remove_experts_(small, [1])
    assert small.gate.k == 1


def test_optimizers_go_on():
    module = mixture().train()
    optimizer = torch.optim.AdamW(module.parameters())
    for keep in ([1, 4], None):
        module(TOKENS.double()).features.square().sum().backward()
        optimizer.step()
        if keep is not None:
            moment = optimizer.state[module.experts.up_weight]["exp_avg"][keep]
            remove_experts_(module, keep, [optimizer])
            assert optimizer.state[module.experts.up_weight]["exp_avg"].equal(moment)
    assert all(optimizer.state[one]["exp_avg"].shape == one.shape for one in module.parameters())


def test_the_busiest_stay():
    module = torch.nn.Sequential(mixture())
    batches = [TOKENS.double(), (TOKENS.double() * 2,)]
    run = lambda module, batch: module[0](batch[0] if isinstance(batch, tuple) else batch)  # noqa: E731
    (load,) = measure_expert_load(module.train(), batches, run).values()
    expected = sum(module[0](batch).report.expert_counts for batch in (TOKENS.double(), TOKENS.double() * 2))
    torch.testing.assert_close(load, expected / expected.sum(), check_dtype=False)
    assert module.training
    assert busiest_experts(torch.tensor([0.1, 0.4, 0.1, 0.3, 0.1]), 3) == [0, 1, 3]
    with pytest.raises(ValueError, match=r"number must be in \[1, 2\].*got 3"):
        busiest_experts(torch.ones(2), 3)
    with pytest.raises(ValueError, match="has 0 mixtures of experts"):
        measure_expert_load(torch.nn.Linear(2, 2), [torch.ones(1, 2)])


def test_groups_of_experts_stay_equal():
    gate = partial(TopKGate, num_groups=2, top_groups=1)
    small = mixture(6, 2, gate=gate)
    with pytest.raises(ValueError, match=r"must stay equally large.*\[3, 1\] would be left"):
        plan_of_experts(small, [0, 1, 2, 4])
    remove_experts_(small, [0, 2, 3, 4])
    assert small(TOKENS.double()).features.shape == TOKENS.shape


def test_what_cannot_be_kept_is_refused():
    for keep in ([], [1, 1], [5], [-1]):
        with pytest.raises(ValueError, match="keep must name one or more of experts 0 to 4"):
            plan_of_experts(mixture(), keep)
    small = mixture(gate=ExpertChoiceGate)
    remove_experts_(small, [0, 2])
    assert small(TOKENS.double()).features.shape == TOKENS.shape
    small.gate.register_buffer("table", torch.zeros(7))
    with pytest.raises(TypeError, match=r"a row for each of them.*got ExpertChoiceGate"):
        plan_of_experts(small, [0])
