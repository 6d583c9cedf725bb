import pytest
import torch
from torch import nn

from lightning_accel.compress import find_prunable, prune_, sparsity_at
from lightning_accel.compress.pruning.masks import counts_by_erk
from lightning_accel.nn import RBM, DynamicRNN, MixtureOfExperts


def network():
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.Flatten(), nn.Linear(24, 7), nn.Linear(7, 3))


@pytest.mark.parametrize("scope", ["layer", "global", "erk"])
def test_the_smallest_weights_go(scope):
    module = network()
    before = {name: value.clone() for name, value in module.named_parameters()}
    kept = prune_(module, 0.8, scope=scope)
    sizes = {name: mask.numel() for name, mask in kept.items()}
    assert list(sizes) == ["0.weight", "2.weight", "3.weight"]
    zeros = {name: int((value == 0).sum()) for name, value in module.named_parameters() if name in kept}
    assert abs(sum(zeros.values()) - 0.8 * sum(sizes.values())) <= 1.5
    limit = torch.cat([before[name].abs()[mask] for name, mask in kept.items()]).min()
    for name, mask in kept.items():
        value = module.get_parameter(name)
        assert value.equal(before[name] * mask)
        if scope == "global":
            assert (before[name].abs()[~mask] <= limit).all()
        else:
            assert before[name].abs()[~mask].max() <= before[name].abs()[mask].min()
        if scope == "layer":
            assert zeros[name] == round(0.8 * sizes[name])


@pytest.mark.parametrize("scope", ["layer", "global", "erk"])
def test_a_weight_is_left(scope):
    """A layer of which all are zero would let nothing through."""
    module = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3))
    kept = prune_(module, 0.999, scope=scope)
    left = [int(one.sum()) for one in kept.values()]
    assert sum(left) == 1 if scope == "global" else left == [1, 1]
    assert int(module[0].weight.count_nonzero()) == left[0]


def test_erk_is_the_formula_of_the_paper():
    """Layers of one dimension sum per weight keep shares in proportion to it, none more than all."""
    shapes = {"a": (8, 4), "b": (100, 50), "c": (60, 30, 3, 3)}
    for sparsity in (0.0, 0.3, 0.6, 0.9, 0.99):
        counts = counts_by_erk(shapes, sparsity)
        sizes = [32, 5000, 16200]
        density = [1 - count / size for count, size in zip(counts, sizes, strict=True)]
        assert sum(counts) == pytest.approx(sparsity * sum(sizes), abs=2)
        raw = [12 / 32, 150 / 5000, 96 / 16200]
        assert density[2] / raw[2] == pytest.approx(density[1] / raw[1], rel=0.05) or density[1] == 1
        assert density[0] == 1 or density[0] / raw[0] == pytest.approx(density[1] / raw[1], rel=0.1)


def test_experts_count_one_by_one_under_erk():
    """A mixture with 16 experts of a shape keeps the share that a linear layer of that shape keeps."""
    counts = counts_by_erk({"experts": (16, 20, 30), "linear": (20, 30)}, 0.7, ["experts"])
    assert counts[0] / 9600 == pytest.approx(counts[1] / 600, abs=1e-3)


@pytest.mark.parametrize(("kept_of", "size"), [(2, 4), (1, 4), (3, 8)])
def test_n_of_m_neighbours_along_the_input_are_kept(kept_of, size):
    module = nn.Sequential(nn.Conv2d(8, 6, 3), nn.ConvTranspose2d(8, 5, 2), nn.Linear(16, 3), nn.Linear(15, 3))
    before = [layer.weight.detach().clone() for layer in module]
    kept = prune_(module, structure=f"{kept_of}:{size}")
    assert list(kept) == ["0.weight", "1.weight", "2.weight"]
    for number, input_dim in enumerate([1, 0, 1]):
        groups = module[number].weight.detach().movedim(input_dim, -1).reshape(-1, size)
        assert ((groups != 0).sum(1) == kept_of).all()
        whole = before[number].movedim(input_dim, -1).reshape(-1, size).abs()
        torch.testing.assert_close(groups.abs().sum(1), whole.topk(kept_of).values.sum(1))
    assert (module[3].weight != 0).all()


def test_recurrent_attention_and_expert_weights_are_found():
    module = nn.ModuleDict({
        "lstm": nn.LSTM(4, 5, num_layers=2, bidirectional=True),
        "gru": nn.GRU(4, 5),
        "attention": nn.MultiheadAttention(8, 2),
        "crossed": nn.MultiheadAttention(8, 2, kdim=4, vdim=6),
        "ours": DynamicRNN(4, 5, cell="lstm"),
        "mixture": MixtureOfExperts(8, 16, 4),
        "rbm": RBM(6, 4),
        "transposed": nn.ConvTranspose1d(4, 3, 2),
        "embedding": nn.Embedding(9, 4),
        "norm": nn.LayerNorm((3, 4)),
        "frozen": nn.Linear(3, 4).requires_grad_(False),
    })  # fmt: skip
    module.register_parameter("query", nn.Parameter(torch.ones(2, 3)))
    found, left_out = find_prunable(module)
    names = {one.name for one in found}
    assert {"lstm.weight_ih_l0", "lstm.weight_hh_l1_reverse", "gru.weight_hh_l0"} < names
    assert {"attention.in_proj_weight", "attention.out_proj.weight", "crossed.k_proj_weight"} < names
    assert {"mixture.experts.up_weight", "mixture.experts.down_weight", "rbm.weight", "transposed.weight"} < names
    assert any(name.startswith("ours") and name.endswith("weight_hh") for name in names)
    assert names.isdisjoint(left_out)
    assert names | left_out.keys() == {name for name, _ in module.named_parameters()}
    assert left_out["mixture.gate.weight"] == "a gate, which says where rows go"
    assert left_out["embedding.weight"] == "an embedding"
    assert left_out["norm.weight"] == "a normalisation"
    assert left_out["frozen.weight"] == "frozen"
    assert left_out["query"] == "a parameter of ModuleDict that is not called a weight"
    assert left_out["mixture.experts.up_bias"] == left_out["lstm.bias_hh_l0"] == "a bias"


class Fused(nn.Module):
    """Experts as transformers has them: 3-D parameters that are not called weights."""

    def __init__(self, is_transposed=False):
        super().__init__()
        self.num_experts, self.is_transposed = 3, is_transposed
        self.gate_up_proj = nn.Parameter(torch.randn(3, 10, 4))
        self.down_proj = nn.Parameter(torch.randn(3, 4, 5))
        self.down_proj_bias = nn.Parameter(torch.randn(3, 4))
        self.table = nn.Parameter(torch.randn(2, 4))


def test_fused_experts_are_weights():
    module = nn.Sequential(nn.Linear(4, 6), Fused(), Fused(is_transposed=True))
    found, left_out = find_prunable(module)
    dims = {one.name: one.input_dim for one in found}
    assert dims == {"0.weight": 1, "1.gate_up_proj": 2, "1.down_proj": 2, "2.gate_up_proj": 1, "2.down_proj": 1}
    assert left_out["1.down_proj_bias"] == "a bias"
    assert left_out["1.table"] == "a parameter of Fused that is not called a weight"
    kept = prune_(module, 0.5, scope="erk")
    shapes = {one.name: one.weight.shape for one in found}
    counts = counts_by_erk(shapes, 0.5, [name for name in shapes if name != "0.weight"])
    assert [int((~kept[name]).sum()) for name in shapes] == counts


def test_a_weight_shared_with_an_embedding_is_left_out():
    module = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    found, left_out = find_prunable(module)
    assert [one.name for one in found] == ["2.weight"]
    assert left_out == {"0.weight": "an embedding", "2.bias": "a bias"}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [("2", "excluded by '2'"), ("Linear", "excluded by 'Linear'"),
     pytest.param(nn.Linear, "excluded by 'Linear'", id="class"),
     ("?.weight", "excluded by '?.weight'"), ("2.*", "excluded by '2.*'")],
)  # fmt: skip
def test_exclusion_by_name_pattern_and_class(entry, reason):
    _, left_out = find_prunable(network(), [entry])
    assert left_out["2.weight"] == reason


def test_an_exclusion_that_fits_nothing_is_refused():
    with pytest.raises(ValueError, match=r"exclude has 'heads'.*in Sequential.*there are 0, 1, 2, 3"):
        find_prunable(network(), ["heads"])


def test_wrong_options_are_refused():
    for options, message in [
        ({"sparsity": 1.0}, r"share in \[0, 1\).*got 1.0"),
        ({"structure": "4:2"}, r"0 < N < M.*'4:2'"),
        ({"sparsity": 0.9, "structure": "2:4"}, r"0.5 are pruned; got a sparsity of 0.9"),
        ({"sparsity": 0.9, "scope": "all"}, "layer, global, erk; got 'all'"),
        ({"sparsity": 0.9, "criterion": lambda name, value: value[0]}, r"scores of shape \(6, 2, 3, 3\) for 0.weight"),
    ]:
        with pytest.raises(ValueError, match=message):
            prune_(network(), **options)
    with pytest.raises(ValueError, match="has no weight to prune; left out"):
        prune_(nn.Embedding(3, 4), 0.5)


def test_own_criteria():
    layer = nn.Linear(6, 4)
    prune_(layer, 0.5, criterion=lambda name, value: torch.arange(24.0).view(4, 6))
    assert (layer.weight[:2] == 0).all()
    assert (layer.weight[2:] != 0).all()
    with pytest.raises(ValueError, match="criterion must be 'magnitude', or a function; got 'taylor'"):
        prune_(layer, 0.5, criterion="taylor")


def test_schedules_are_absolute_and_reach_the_target():
    shares = [sparsity_at(step, 3, 13, 0.9, "cubic") for step in range(20)]
    assert shares[:4] == [0.0] * 4
    assert shares == sorted(shares)
    assert shares[13:] == [0.9] * 7
    assert shares[8] == pytest.approx(0.9 * 7 / 8)
    assert [sparsity_at(step, 3, 3, 0.9, "one_shot") for step in (2, 3)] == [0.0, 0.9]


def test_sparsity_must_be_said():
    layer = nn.Linear(4, 6)
    before = layer.weight.detach().clone()
    with pytest.raises(TypeError, match=r"prune_ needs sparsity, the share .* got none with structure='unstructured'"):
        prune_(layer)
    assert torch.equal(layer.weight, before)
    assert int(prune_(layer, structure="2:4")["weight"].sum()) == 12
