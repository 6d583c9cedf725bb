import pytest
import torch
from torch.autograd import gradcheck

from lightning_accel.nn import TopKGate


@torch.no_grad()
def reference(x, weight, k):
    """Row by row: weights, experts and balance loss."""
    probs = (x @ weight.T).softmax(dim=-1)
    weights, experts = torch.zeros(len(x), k), torch.zeros(len(x), k, dtype=torch.int64)
    visits = torch.zeros(len(weight))
    for row, p in enumerate(probs):
        best = sorted(range(len(p)), key=lambda e: -float(p[e]))[:k]
        for slot, expert in enumerate(best):
            experts[row, slot] = expert
            weights[row, slot] = p[expert] if k == 1 else p[expert] / p[best].sum()
            visits[expert] += 1
    return weights, experts, len(weight) * float((visits / visits.sum() * probs.mean(dim=0)).sum()), visits


@pytest.mark.parametrize("k", [1, 2, 5])
def test_matches_routing_row_by_row(k):
    gate = TopKGate(dim=3, num_experts=5, k=k)
    x = torch.randn(7, 3)
    routing = gate(x)
    weights, experts, balance_loss, visits = reference(x, gate.weight, k)
    torch.testing.assert_close(routing.weights, weights)
    assert routing.experts.equal(experts)
    assert routing.balance_loss.item() == pytest.approx(balance_loss, rel=1e-5)
    assert routing.expert_counts.tolist() == visits.tolist()


def test_balance_loss_is_one_for_even_shares_and_larger_for_uneven_ones():
    gate = TopKGate(dim=4, num_experts=4, k=1)
    torch.nn.init.zeros_(gate.weight)
    gate.weight.data.fill_diagonal_(1e-4)  # all but uniform probabilities, each row to an expert of its own
    assert gate(torch.eye(4)).balance_loss.item() == pytest.approx(1, abs=1e-3)
    gate.weight.data.fill_diagonal_(9.0)
    assert gate(torch.eye(4)[:1]).balance_loss.item() > 3.9


@pytest.mark.parametrize("k", [1, 2])
def test_gate_learns_from_its_weights(k):
    x = torch.randn(4, 3, dtype=torch.float64)
    gate = TopKGate(dim=3, num_experts=4, k=k)
    gate(x).weights[:, 0].sum().backward()
    assert gate.weight.grad.abs().sum() > 0


def test_gradients_of_weights_and_balance_loss():
    x = torch.randn(6, 3, dtype=torch.float64)
    gate = TopKGate(dim=3, num_experts=4).double()

    def run(weight):
        routing = torch.func.functional_call(gate, {"weight": weight}, (x,))
        return routing.weights, routing.balance_loss

    assert gradcheck(run, (gate.weight,))


def test_scores_are_float32_under_autocast():
    gate, x = TopKGate(dim=8, num_experts=4), torch.randn(5, 8)
    expected = gate(x)
    with torch.autocast("cpu", torch.bfloat16):
        actual = gate(x)
    assert actual.weights.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_no_tokens():
    routing = TopKGate(dim=3, num_experts=2)(torch.empty(0, 3))
    assert routing.weights.shape == (0, 2)
    assert routing.balance_loss.item() == 0


@pytest.mark.parametrize("k", [0, 4])
def test_impossible_k_is_refused(k):
    with pytest.raises(ValueError, match=rf"k must lie in \[1, num_experts\]; got k={k}, num_experts=3"):
        TopKGate(dim=2, num_experts=3, k=k)
