import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from lightning_accel.nn import MixtureOfExperts


def reference(mixture, x):
    """Every token through each of its experts, one after the other."""
    routing = mixture.gate(x)
    rows = []
    for row, weights, experts in zip(x, routing.weights, routing.experts, strict=True):
        total = torch.zeros_like(row)
        for weight, e in zip(weights, experts, strict=True):
            hidden = F.gelu(mixture.up_weight[e] @ row + mixture.up_bias[e])
            total = total + weight * (mixture.down_weight[e] @ hidden + mixture.down_bias[e])
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(7, 3, 1), (7, 3, 2), (5, 9, 3), (1, 4, 4)])
def test_matches_loop_over_tokens(num_tokens, num_experts, k):
    mixture = MixtureOfExperts(dim=5, hidden_dim=6, num_experts=num_experts, k=k).double()
    x = torch.randn(num_tokens, 5, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(num_tokens, 5, dtype=torch.float64)
    grads = []
    for output in (mixture(x).features, reference(mixture, x)):
        grads.append((output, *torch.autograd.grad((output * probe).sum(), [x, *mixture.parameters()])))
    torch.testing.assert_close(*grads)


def test_gradients():
    mixture = MixtureOfExperts(dim=3, hidden_dim=2, num_experts=3).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    names = [name for name, _ in mixture.named_parameters()]

    def run(*values):
        return torch.func.functional_call(mixture, dict(zip(names, values, strict=True)), (x,)).features

    assert gradcheck(run, tuple(mixture.parameters()))


def test_idle_expert_gets_a_zero_gradient():
    mixture = MixtureOfExperts(dim=3, hidden_dim=2, num_experts=6, k=1)
    features, _, expert_counts = mixture(torch.randn(2, 3))
    features.sum().backward()
    idle = expert_counts == 0
    assert idle.any()
    assert all(parameter.grad is not None for parameter in mixture.parameters())
    assert mixture.up_weight.grad[idle].abs().sum() == 0


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (4,), (2, 3, 4)])
def test_any_leading_shape(shape):
    mixture = MixtureOfExperts(dim=4, hidden_dim=3, num_experts=3)
    x = torch.randn(shape)
    features, balance_loss, expert_counts = mixture(x)
    assert features.shape == shape
    assert int(expert_counts.sum()) == 2 * x.numel() // 4
    (features.sum() + balance_loss).backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_output_has_the_dtype_of_the_input(dtype):
    mixture = MixtureOfExperts(dim=8, hidden_dim=6, num_experts=3)
    x = torch.randn(5, 8)
    expected = mixture(x).features
    features = mixture.to(dtype)(x.to(dtype)).features
    assert features.dtype == dtype
    tolerance = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float64: 1e-6}[dtype]
    torch.testing.assert_close(features.float(), expected, rtol=0, atol=tolerance)


def test_autocast_keeps_the_gate_and_rounds_the_experts():
    mixture, x = MixtureOfExperts(dim=8, hidden_dim=6, num_experts=3), torch.randn(5, 8)
    expected = mixture(x)
    with torch.autocast("cpu", torch.bfloat16):
        actual = mixture(x)
    assert actual.expert_counts.equal(expected.expert_counts)
    assert actual.features.dtype == torch.float32
    assert not actual.features.equal(expected.features)
    torch.testing.assert_close(actual.features, expected.features, rtol=0, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_matches_cpu(dtype):
    mixture, x = MixtureOfExperts(dim=8, hidden_dim=16, num_experts=5), torch.randn(33, 8)
    expected = mixture(x)
    actual = mixture.to("cuda", dtype)(x.to("cuda", dtype))
    if dtype == torch.float32:
        assert actual.expert_counts.cpu().equal(expected.expert_counts)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(actual.features.float().cpu(), expected.features, rtol=0, atol=tolerance)


@pytest.mark.parametrize("sizes", [{"dim": 0, "hidden_dim": 3}, {"dim": 3, "hidden_dim": 0}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="dim and hidden_dim must be at least 1"):
        MixtureOfExperts(**sizes, num_experts=2)
