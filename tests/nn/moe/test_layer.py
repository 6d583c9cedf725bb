import copy
import math
from functools import partial

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_accel.nn import ExpertChoiceGate, ExpertLoad, FeedForward, MixtureOfExperts, TopKGate
from tests.ranks import run_ranks


def reference(mixture, x, capacity=None):
    """Slot by slot: each token through each of its experts."""
    routing = mixture.gate(x)
    experts, taken = mixture.experts, [0] * mixture.num_experts
    rows = [torch.zeros_like(row) for row in x]
    for token, e, weight in zip(routing.token_of_slot, routing.expert_of_slot, routing.weight_of_slot, strict=True):
        taken[e] += 1
        if capacity is None or taken[e] <= capacity:
            hidden = F.gelu(experts.up_weight[e] @ x[token] + experts.up_bias[e])
            rows[token] = rows[token] + weight * (experts.down_weight[e] @ hidden + experts.down_bias[e])
    return torch.stack(rows), sum(max(0, t - capacity) for t in taken) if capacity else 0


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(7, 3, 1), (7, 3, 2), (5, 9, 3), (1, 4, 4)])
def test_matches_loop_over_tokens(num_tokens, num_experts, k):
    mixture = MixtureOfExperts(dim=5, hidden_dim=6, num_experts=num_experts, k=k).double()
    x = torch.randn(num_tokens, 5, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(num_tokens, 5, dtype=torch.float64)
    grads = []
    for output in (mixture(x).features, reference(mixture, x)[0]):
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
    features, report = mixture(torch.randn(2, 3))
    features.sum().backward()
    idle = report.expert_counts == 0
    assert idle.any()
    assert all(parameter.grad is not None for parameter in mixture.parameters())
    assert mixture.experts.up_weight.grad[idle].abs().sum() == 0


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (4,), (2, 3, 4)])
def test_any_leading_shape(shape):
    mixture = MixtureOfExperts(dim=4, hidden_dim=3, num_experts=3)
    x = torch.randn(shape)
    features, report = mixture(x)
    assert features.shape == shape
    assert int(report.expert_counts.sum()) == 2 * x.numel() // 4
    (features.sum() + report.balance_loss).backward()


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
    assert actual.report.expert_counts.equal(expected.report.expert_counts)
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
        assert actual.report.expert_counts.cpu().equal(expected.report.expert_counts)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(actual.features.float().cpu(), expected.features, rtol=0, atol=tolerance)


@pytest.mark.parametrize("capacity_factor", [0.4, 1.0, 9.0])
def test_capacity_leaves_out_what_is_over_and_counts_it(capacity_factor):
    mixture = MixtureOfExperts(dim=5, hidden_dim=6, num_experts=4, capacity_factor=capacity_factor).double()
    x = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    features, report = mixture(x)
    expected, dropped = reference(mixture, x, capacity=math.ceil(capacity_factor * 22 / 4))
    torch.testing.assert_close(features, expected)
    assert report.dropped == dropped
    assert report.expert_counts.sum() == 22  # what was asked for
    parameters = [x, *mixture.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(features.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
    )


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
@pytest.mark.parametrize("backend", ["blocks", "loop"])
def test_masked_tokens_leave_no_trace(capacity_factor, backend):
    mixture = MixtureOfExperts(dim=5, hidden_dim=6, num_experts=4, capacity_factor=capacity_factor)
    mixture.experts.backend = backend
    x, mask = torch.randn(3, 4, 5), torch.rand(3, 4) > 0.4
    features, report = mixture(x, mask)
    x[~mask] = torch.nan
    again, report_again = mixture(x, mask)
    torch.testing.assert_close(again, features, rtol=0, atol=0)
    torch.testing.assert_close(report_again, report, rtol=0, atol=0)
    assert features[~mask].abs().sum() == 0
    assert report.expert_counts.sum() == 2 * mask.sum()
    alone = mixture(x[mask])
    torch.testing.assert_close(features[mask], alone.features)
    torch.testing.assert_close(report, alone.report)


def test_masked_tokens_take_no_place_where_experts_choose():
    mixture = MixtureOfExperts(dim=5, hidden_dim=6, num_experts=3, k=1, gate=ExpertChoiceGate)
    x, mask = torch.randn(30, 5), torch.arange(30) % 3 > 0
    features, report = mixture(x, mask)
    alone = mixture(x[mask])
    torch.testing.assert_close(features[mask], alone.features)
    torch.testing.assert_close(report, alone.report)


@pytest.mark.parametrize(
    "mask", [torch.ones(1, dtype=torch.bool), torch.ones(4, 3, dtype=torch.bool), torch.ones(3, 4)]
)
def test_masks_of_other_shapes_and_dtypes_are_refused(mask):
    with pytest.raises(ValueError, match=r"mask must be bool of shape \(3, 4\); got"):
        MixtureOfExperts(dim=5, hidden_dim=6, num_experts=4)(torch.randn(3, 4, 5), mask)


def test_shared_expert_is_added_for_every_token():
    mixture, x = MixtureOfExperts(dim=5, hidden_dim=6, num_experts=4, shared_dim=7), torch.randn(9, 5)
    both = mixture(x).features
    shared, mixture.shared = mixture.shared, None
    torch.testing.assert_close(both, mixture(x).features + shared(x))


def test_drops_of_the_gate_and_of_the_capacity_add_up():
    x = torch.randn(9, 5)
    gate_alone = MixtureOfExperts(dim=5, hidden_dim=6, num_experts=3, k=1, gate=ExpertChoiceGate)
    both = MixtureOfExperts(dim=5, hidden_dim=6, num_experts=3, k=1, gate=ExpertChoiceGate, capacity_factor=0.34)
    both.load_state_dict(gate_alone.state_dict())
    left_out = gate_alone(x).report.dropped
    assert both(x).report.dropped == left_out + 3 * (3 - 2)
    assert left_out > 0


def test_experts_are_drawn_as_linear_layers_are():
    experts, linear = MixtureOfExperts(400, 100, num_experts=3).experts, nn.Linear(400, 100)
    for ours, theirs in ((experts.up_weight, linear.weight), (experts.up_bias, linear.bias)):
        assert float(ours.detach().abs().max()) == pytest.approx(float(theirs.detach().abs().max()), rel=0.05)
    assert float(experts.down_weight.detach().abs().max()) == pytest.approx(100**-0.5, rel=0.05)


def test_each_expert_chooses_its_tokens():
    mixture = MixtureOfExperts(dim=5, hidden_dim=6, num_experts=4, gate=ExpertChoiceGate).double()
    x = torch.randn(9, 5, dtype=torch.float64)
    torch.testing.assert_close(mixture(x).features, reference(mixture, x)[0])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_upcycled_mixture_equals_the_dense_one(gated, bias):
    dense, x = FeedForward(5, 7, "gelu", gated, bias), torch.randn(11, 5)
    mixture = MixtureOfExperts.from_dense(dense, num_experts=6, k=3, gate=partial(TopKGate, score="sigmoid"))
    torch.testing.assert_close(mixture(x).features, dense(x))
    sequential = nn.Sequential(nn.Linear(5, 7, bias), nn.SiLU(), nn.Dropout(0.1), nn.Linear(7, 5, bias)).double()
    mixture = MixtureOfExperts.from_dense(sequential, num_experts=6, capacity_factor=100.0)
    torch.testing.assert_close(mixture(x.double()).features, sequential.eval()(x.double()))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("granularity", "k", "bias"), [(2, 2, True), (2, 4, False), (3, 3, True)])
def test_narrow_experts_start_as_the_dense_one(granularity, k, gated, bias):
    dense, x = FeedForward(5, 12, "silu", gated, bias).double(), torch.randn(11, 5).double()
    mixture = MixtureOfExperts.from_dense(dense, 4 * granularity, k, granularity=granularity)
    assert mixture.experts.down_weight.shape == (4 * granularity, 5, 12 // granularity)
    torch.testing.assert_close(mixture(x).features, dense(x))
    counts = mixture(x).report.expert_counts.view(4, granularity)
    assert counts.eq(counts[:, :1]).all()
    assert counts.count_nonzero(0).gt(1).all()
    mixture(x).features.square().sum().backward()
    assert not mixture.gate.weight.grad[0].equal(mixture.gate.weight.grad[1])


def test_perceptron_of_llama_is_upcycled():
    class LlamaMLP(nn.Module):
        def __init__(self, bias):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(5, 7, bias), nn.Linear(5, 7, bias)
            self.down_proj, self.act_fn = nn.Linear(7, 5, bias), nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    x = torch.randn(11, 5)
    for bias in (False, True):
        dense = LlamaMLP(bias)
        torch.testing.assert_close(MixtureOfExperts.from_dense(dense, num_experts=4)(x).features, dense(x))


def test_what_cannot_be_upcycled_is_refused():
    class Tokens(nn.Module):
        def __init__(self, *sizes):
            super().__init__()

    dense = FeedForward(5, 7)
    with pytest.raises(ValueError, match=r"must sum to 1 .* k=1, normalize=False.*Take k=2 or more, or"):
        MixtureOfExperts.from_dense(dense, num_experts=4, k=1)
    with pytest.raises(ValueError, match="do not sum to 1; upcycle with a TopKGate"):
        MixtureOfExperts.from_dense(dense, num_experts=4, gate=ExpertChoiceGate)
    with pytest.raises(ValueError, match=r"must sum to 1 .* scale=2.0"):
        MixtureOfExperts.from_dense(dense, num_experts=4, gate=partial(TopKGate, scale=2.0))
    with pytest.raises(TypeError, match="both layers of the perceptron must have a bias, or none"):
        MixtureOfExperts.from_dense(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5, bias=False)), 4)
    for sizes, found in (((6, 4, 4), "num_experts=6, hidden_dim=7"), ((4, 2, 0), "num_experts=4, k=2, hidden_dim=7")):
        with pytest.raises(ValueError, match=f"must be multiples of granularity={sizes[2]}; got {found}"):
            MixtureOfExperts.from_dense(dense, *sizes[:2], granularity=sizes[2])
    with pytest.raises(ValueError, match="granularity=7 needs a TopKGate; got Tokens"):
        MixtureOfExperts.from_dense(dense, 14, 7, granularity=7, gate=Tokens)
    x = torch.randn(3, 5)
    one = MixtureOfExperts.from_dense(dense, num_experts=4, k=1, gate=partial(TopKGate, normalize=True))
    torch.testing.assert_close(one(x).features, dense(x))
    with pytest.raises(TypeError, match="need a module with two linear layers, or three of which one is a gate; got"):
        MixtureOfExperts.from_dense(nn.Linear(5, 5), num_experts=4)
    tanh = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    with pytest.raises(TypeError, match=r"one of gelu, gelu_tanh, quick_gelu, relu, silu; got Tanh\(\)"):
        MixtureOfExperts.from_dense(tanh, num_experts=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gate",
    [
        TopKGate,
        ExpertChoiceGate,
        pytest.param(partial(TopKGate, score="sigmoid", bias_update_rate=0.01), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiles_whole_and_once_for_any_routing(gate):
    torch._dynamo.reset()
    mixture = MixtureOfExperts(dim=8, hidden_dim=6, num_experts=4, gate=gate, shared_dim=3, capacity_factor=1.0).eval()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mixture, fullgraph=True, backend=counter)
    for scale in (1.0, 30.0, -5.0):
        x = scale * torch.randn(9, 8)
        torch.testing.assert_close(compiled(x), mixture(x))
    assert counter.frame_count == 1


def test_activation_checkpointing_and_second_backends_change_nothing():
    mixture, x = MixtureOfExperts(dim=8, hidden_dim=6, num_experts=4), torch.randn(9, 8)
    results = []
    for run, backend in (
        (mixture, "blocks"),
        (partial(checkpoint, mixture, use_reentrant=False), "blocks"),
        (mixture, "loop"),
    ):
        mixture.experts.backend = backend
        features, report = run(x)
        loss = features.square().sum() + report.balance_loss + report.z_loss
        results.append((features, *report, *torch.autograd.grad(loss, list(mixture.parameters()))))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0])


def check_sharded(rank):
    torch.manual_seed(0)
    whole = nn.ModuleList(MixtureOfExperts(dim=8, hidden_dim=6, num_experts=4, shared_dim=3) for _ in range(2))
    sharded, x = copy.deepcopy(whole), torch.randn(6, 8)
    for layer in sharded:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    results = []
    for layers, rows in ((whole, x), (sharded, x.chunk(2)[rank])):
        loads = ExpertLoad([layer.gate for layer in layers])
        loads.start()  # equal loads, so that no loss depends on the process
        losses = 0.0
        for layer in layers:
            rows, report = layer(rows)
            losses = losses + report.balance_loss + report.z_loss
        (rows.square().mean() + losses).backward()
        assert loads.gates[0].expert_slots.tolist() == [1] * 4
        grads = {name: parameter.grad for name, parameter in layers.named_parameters()}
        results.append({name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()})
    torch.testing.assert_close(*results)


@pytest.mark.slow
def test_sharded_mixtures_give_the_gradients_of_whole_ones():
    run_ranks(check_sharded)


@pytest.mark.parametrize("capacity_factor", [0.0, -1.0])
def test_impossible_capacity_is_refused(capacity_factor):
    with pytest.raises(ValueError, match="capacity_factor must be above 0, or None for no bound"):
        MixtureOfExperts(dim=2, hidden_dim=2, num_experts=2, capacity_factor=capacity_factor)


@pytest.mark.parametrize("sizes", [{"dim": 0, "hidden_dim": 3}, {"dim": 3, "hidden_dim": 0}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match=r"dim.* must be at least 1"):
        MixtureOfExperts(**sizes, num_experts=2)


def test_a_gate_that_is_a_name_is_refused():
    with pytest.raises(TypeError, match="gate must be called to make the gate, such as the class TopKGate; got 'topk'"):
        MixtureOfExperts(4, 5, 3, gate="topk")
