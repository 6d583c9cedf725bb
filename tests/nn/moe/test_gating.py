import pytest
import torch
from torch.autograd import gradcheck

from lightning_accel.nn import ExpertChoiceGate, TopKGate


@torch.no_grad()
def reference(x, gate, bias=None, mask=None):
    """Token by token: {(token, expert): weight}, visits of each expert, balance loss."""
    logits = x @ gate.weight.T
    scores = logits.softmax(dim=-1) if gate.score == "softmax" else logits.sigmoid()
    weights, visits, num_experts = {}, [0] * gate.num_experts, gate.num_experts
    present = [n for n in range(len(x)) if mask is None or mask[n]]
    for n in present:
        chosen_by = scores[n] if bias is None else scores[n] + bias
        best = sorted(range(num_experts), key=lambda e: -float(chosen_by[e]))[: gate.k]
        total = sum(float(scores[n, e]) for e in best) if gate.normalize else 1
        for e in best:
            weights[n, e] = gate.scale * float(scores[n, e]) / total
            visits[e] += 1
    mean = (scores / scores.sum(dim=-1, keepdim=True))[present].mean(dim=0)
    load = torch.tensor(visits) / sum(visits)
    return weights, visits, float(num_experts * (load * mean).sum())


def slots(routing):
    triples = zip(*(t.tolist() for t in routing[:3]), strict=True)
    return {(token, expert): weight for token, expert, weight in triples}


@pytest.mark.parametrize(
    "options",
    [
        {"k": 1},
        {"k": 2},
        {"k": 6},
        {"k": 1, "normalize": True},
        {"k": 3, "normalize": False, "scale": 2.5},
        {"k": 2, "score": "sigmoid"},
        {"k": 2, "scale": 2.5},
        {"k": 2, "bias_update_rate": 0.1, "score": "sigmoid"},
        {"k": 2, "bias_update_rate": 0.1},
        {"k": 3, "score": "sigmoid", "bias_update_rate": 0.3},  # scores below 0
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_matches_routing_token_by_token(options, masked):
    gate = TopKGate(dim=3, num_experts=6, **options)
    bias = None
    if gate.bias_steps is not None:
        gate.bias_steps += torch.tensor([3, -4, 1, 0, 9, -2])
        bias = gate.bias_update_rate * gate.bias_steps
    x = torch.randn(7, 3)
    mask = torch.tensor([True, False, True, True, False, True, True]) if masked else None
    routing = gate(x, mask)
    weights, visits, balance_loss = reference(x, gate, bias, mask)
    found = {slot: weight for slot, weight in slots(routing).items() if slot[1] < 6}
    assert found == pytest.approx(weights, rel=1e-5)
    assert routing.report.expert_counts.tolist() == visits
    assert routing.report.balance_loss.item() == pytest.approx(balance_loss, rel=1e-5)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradient_of_the_balance_loss_goes_through_the_normalised_scores(score):
    gate, x = TopKGate(dim=3, num_experts=5, score=score), torch.randn(7, 3)
    report = gate(x).report
    scores = x @ gate.weight.T
    scores = scores.softmax(dim=1) if score == "softmax" else scores.sigmoid()
    expected = 5 * (report.expert_counts / 14 * (scores / scores.sum(dim=1, keepdim=True)).mean(dim=0)).sum()
    gradients = [torch.autograd.grad(loss, gate.weight)[0] for loss in (report.balance_loss, expected)]
    torch.testing.assert_close(*gradients)


def test_first_choices_of_all_tokens_come_before_second_ones():
    gate, x = TopKGate(dim=3, num_experts=5, k=3), torch.randn(7, 3)
    routing = gate(x)
    ranked = (x @ gate.weight.T).argsort(dim=1, descending=True)
    assert routing.expert_of_slot.view(3, 7).equal(ranked[:, :3].T)
    assert routing.token_of_slot.view(3, 7).equal(torch.arange(7).expand(3, 7))


def test_other_figures_match_their_formulas():
    gate, x = TopKGate(dim=3, num_experts=5), torch.randn(7, 3)
    logits = x @ gate.weight.T
    report = gate(x).report
    z_loss = torch.stack([row.exp().sum().log() ** 2 for row in logits]).mean()  # Zoph et al. 2022, eq. 5
    torch.testing.assert_close(report.z_loss, z_loss)
    torch.testing.assert_close(report.confidence, logits.softmax(dim=1).max(dim=1).values.mean())
    assert report.dropped == 0


def test_balance_loss_is_one_for_even_shares_and_larger_for_uneven_ones():
    gate = TopKGate(dim=4, num_experts=4, k=1)
    torch.nn.init.zeros_(gate.weight)
    gate.weight.data.fill_diagonal_(1e-4)  # all but uniform probabilities, each row to an expert of its own
    assert gate(torch.eye(4)).report.balance_loss.item() == pytest.approx(1, abs=1e-3)
    gate.weight.data.fill_diagonal_(9.0)
    assert gate(torch.eye(4)[:1]).report.balance_loss.item() > 3.9


def test_balance_loss_in_training_takes_the_load_it_was_told():
    gate, x = TopKGate(dim=3, num_experts=4), torch.randn(9, 3)
    probs = (x @ gate.weight.T).softmax(dim=1).mean(dim=0)
    told = torch.tensor([1, 0, 5, 4])
    untold = gate(x).report.balance_loss
    gate.update(told)
    torch.testing.assert_close(gate(x).report.balance_loss, 4 * (told / 10 * probs).sum())
    torch.testing.assert_close(gate.eval()(x).report.balance_loss, untold)


def test_balance_loss_is_float32_whatever_the_default_dtype():
    gate, x = TopKGate(dim=3, num_experts=4), torch.randn(9, 3)
    expected = gate(x).report.balance_loss
    torch.set_default_dtype(torch.bfloat16)  # as Lightning does for bf16-true
    try:
        torch.testing.assert_close(gate(x).report.balance_loss, expected, rtol=0, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_bias_moves_against_the_load_and_evens_it():
    gate, x = TopKGate(dim=3, num_experts=5, bias_update_rate=0.01), torch.randn(200, 3)
    x[:, 0] += 1
    gate.weight.data[:, 0] = torch.tensor([1.0, 0, 0, 0, -1.0])
    gate.update(torch.tensor([4, 2, 3, 0, 1]))  # their mean is 2
    assert gate.bias_steps.tolist() == [-1, 0, -1, 1, 1]
    before = gate(x).report.expert_counts
    for _ in range(200):
        gate.update(gate(x).report.expert_counts)
    after = gate(x).report.expert_counts
    assert before.max() > 120
    assert after.max() < 90  # of 400 slots, 80 each at best
    assert gate.weight.grad is None


@pytest.mark.slow
def test_gate_that_nobody_tells_its_load_says_so_once():
    gate, x = TopKGate(dim=2, num_experts=3, bias_update_rate=0.1), torch.randn(1, 2)
    for _ in range(999):
        gate(x)
    gate.update(torch.ones(3))
    for _ in range(999):
        gate(x)
    with pytest.warns(UserWarning, match="bias_update_rate=0.1 has had no effect in 1000 training passes"):
        gate(x)
    gate(x)


def test_bias_survives_a_cast_to_bf16():
    gate = TopKGate(dim=3, num_experts=4, bias_update_rate=0.001)
    gate.update(torch.tensor([1, 0, 0, 0]))
    gate.to(torch.bfloat16)
    for _ in range(1000):
        gate.update(torch.tensor([1, 0, 0, 0]))
    assert gate.bias_steps.tolist() == [-1001, 1001, 1001, 1001]


@pytest.mark.parametrize("k", [1, 2])
def test_gate_learns_from_its_weights(k):
    x = torch.randn(4, 3, dtype=torch.float64)
    gate = TopKGate(dim=3, num_experts=4, k=k)
    gate(x).weight_of_slot[:4].sum().backward()
    assert gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("gate_class", [TopKGate, ExpertChoiceGate])
def test_gradients_of_weights_and_losses(gate_class):
    x = torch.randn(6, 3, dtype=torch.float64)
    gate = gate_class(dim=3, num_experts=4).double()

    def run(weight):
        routing = torch.func.functional_call(gate, {"weight": weight}, (x,))
        return routing.weight_of_slot, routing.report.balance_loss, routing.report.z_loss

    assert gradcheck(run, (gate.weight,))


@pytest.mark.parametrize("gate_class", [TopKGate, ExpertChoiceGate])
def test_scores_are_float32_under_autocast(gate_class):
    gate, x = gate_class(dim=8, num_experts=4), torch.randn(5, 8)
    expected = gate(x)
    with torch.autocast("cpu", torch.bfloat16):
        actual = gate(x)
    assert actual.weight_of_slot.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("gate_class", [TopKGate, ExpertChoiceGate])
def test_no_tokens(gate_class):
    routing = gate_class(dim=3, num_experts=2)(torch.empty(0, 3))
    assert routing.weight_of_slot.shape == (0,)
    assert routing.report.z_loss.item() == 0
    assert gate_class(dim=3, num_experts=2)(torch.randn(4, 3), torch.zeros(4, dtype=torch.bool)).report.z_loss == 0


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_ties_give_distinct_experts(score):
    gate = TopKGate(dim=3, num_experts=6, k=4, score=score)
    torch.nn.init.zeros_(gate.weight)
    routing = gate(torch.zeros(5, 3))
    assert len(slots(routing)) == 20
    torch.testing.assert_close(routing.weight_of_slot, torch.full((20,), 0.25))


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "bias_update_rate": 0.1}], ids=str)
def test_a_token_of_nans_touches_no_other(options):
    gate, x = TopKGate(dim=3, num_experts=4, **options), torch.randn(5, 3)
    expected = slots(gate(x))
    x[2] = torch.nan
    actual = slots(gate(x))
    assert sum(token == 2 for token, _ in actual) == 2
    assert all(weight != weight for (token, _), weight in actual.items() if token == 2)
    assert {slot: weight for slot, weight in actual.items() if slot[0] != 2} == {
        slot: weight for slot, weight in expected.items() if slot[0] != 2
    }


@pytest.mark.parametrize("masked", [False, True])
def test_experts_choose_the_tokens_that_they_score_highest(masked):
    gate, x = ExpertChoiceGate(dim=3, num_experts=4, k=2), torch.randn(7, 3)
    mask = torch.tensor([True, False, True, True, True, True, True]) if masked else None
    routing = gate(x, mask)
    probs = (x @ gate.weight.T).softmax(dim=1).detach()
    present = [n for n in range(7) if mask is None or mask[n]]
    expected = {}
    for e in range(4):
        capacity = 3 if masked else 4  # 6 or 7 tokens * 2 / 4 experts, rounded up
        for n in sorted(present, key=lambda n: -float(probs[n, e]))[:capacity]:
            expected[n, e] = float(probs[n, e])
    assert {slot: weight for slot, weight in slots(routing).items() if slot[1] < 4} == pytest.approx(expected)
    assert routing.report.expert_counts.tolist() == [capacity] * 4
    assert routing.report.dropped == len(present) - len({n for n, _ in expected})


def test_experts_choose_no_token_that_is_masked_even_where_others_are_too_few():
    gate, mask = ExpertChoiceGate(dim=3, num_experts=2, k=2), torch.arange(8) < 3
    routing = gate(torch.randn(8, 3), mask)
    assert routing.report.expert_counts.tolist() == [3, 3]
    assert (routing.expert_of_slot == 2).sum() == 10
    assert routing.token_of_slot[routing.expert_of_slot < 2].max() == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be at least 1; got 0"),
        ({"k": 7}, r"k must lie in \[1, num_experts\]; got k=7, num_experts=6"),
        ({"score": "tanh"}, "score must be softmax or sigmoid; got 'tanh'"),
        ({"bias_update_rate": -0.1}, "bias_update_rate must not be negative; got -0.1"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TopKGate(dim=2, num_experts=6, **options)
    if options.keys() == {"k"}:
        with pytest.raises(ValueError, match=message):
            ExpertChoiceGate(dim=2, num_experts=6, **options)
