"""Pruning by calibration data: against loops in float64, and which weights, layers and inputs are seen."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_accel._private.torch import num_compiled_graphs
from lightning_accel.callbacks.deployment.deployed import find_deployed
from lightning_accel.compress import find_prunable, prune_on_data_
from lightning_accel.compress.calibration import layerwise
from lightning_accel.compress.pruning.one_shot import prune_by_sparsegpt, prune_by_wanda
from lightning_accel.nn import DynamicRNN, MixtureOfExperts
from tests.zoo import ZOO

DOUBLE = torch.float64


def correlated(rows=300, features=200, scale=2.0):
    mixed = torch.randn(rows, features, dtype=DOUBLE) @ torch.randn(features, features, dtype=DOUBLE)
    return mixed * torch.logspace(0, -scale, features, dtype=DOUBLE) / math.sqrt(features)


def wanda_by_loops(weight, x, sparsity, pattern):
    norms = [float(x[:, column].norm()) for column in range(x.shape[1])]
    kept = torch.ones(weight.shape, dtype=torch.bool)
    for row in range(len(weight)):
        scores = [abs(float(value)) * norm for value, norm in zip(weight[row], norms, strict=True)]
        if pattern is None:
            groups, count = [range(len(scores))], round(sparsity * len(scores))
        else:
            groups = [range(at, at + pattern[1]) for at in range(0, len(scores), pattern[1])]
            count = pattern[1] - pattern[0]
        for group in groups:
            kept[row, sorted(group, key=scores.__getitem__)[:count]] = False
    return weight * kept, kept


def sparsegpt_by_inverses(weight, x, sparsity, pattern):
    """Remove columns one by one, with the inverse of what is left computed anew: the optimal brain surgeon's step."""
    products = x.t() @ x
    products += 0.01 * products.diagonal().mean() * torch.eye(len(products), dtype=DOUBLE)
    inverses = [torch.linalg.inv(products[column:, column:]) for column in range(len(products))]
    spread = torch.stack([inverse[0, 0] for inverse in inverses])
    weight, kept = weight.clone(), torch.ones(weight.shape, dtype=torch.bool)
    limits = (weight**2 / spread).sort(1).values[:, round(sparsity * weight.shape[1]), None]
    first_choice = weight**2 / spread < limits
    for column in range(len(products)):
        if pattern is None and column % 128 == 0:
            block = slice(column, column + 128)
            for row, scores in enumerate(weight[:, block] ** 2 / spread[block]):
                gone = scores.sort().indices[: int(first_choice[row, block].sum())]
                kept[row, column + gone] = False
        elif pattern is not None and column % pattern[1] == 0:
            block = slice(column, column + pattern[1])
            scores = weight[:, block] ** 2 / spread[block]
            limits = scores.sort(1).values[:, pattern[1] - pattern[0], None]
            kept[:, block] = scores >= limits
        gone = torch.where(kept[:, column], 0, weight[:, column])
        weight[:, column:] -= gone[:, None] * inverses[column][0] / inverses[column][0, 0]
    return weight, kept


@pytest.mark.parametrize("pattern", [None, (2, 4)])
@pytest.mark.parametrize(
    ("prune", "reference"), [(prune_by_wanda, wanda_by_loops), (prune_by_sparsegpt, sparsegpt_by_inverses)]
)
def test_methods_are_those_of_their_papers(prune, reference, pattern):
    torch.manual_seed(0)
    x, weight = correlated(), torch.randn(9, 200, dtype=DOUBLE)
    statistic = x.t() @ x if prune is prune_by_sparsegpt else x.square().sum(0)
    found, kept = prune(weight, statistic, 0.5, pattern)
    expected, expected_kept = reference(weight, x, 0.5, pattern)
    assert kept.equal(expected_kept)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert (found[~kept] == 0).all()
    single, _ = prune(weight.float(), statistic.float(), 0.5, pattern)
    change = [float(((one.double() - weight) @ x.t()).norm()) for one in (found, single)]
    assert change[1] == pytest.approx(change[0], rel=0.02)  # a few masks differ


def test_sparsegpt_changes_outputs_less_than_wanda_and_that_less_than_magnitude():
    torch.manual_seed(0)
    layer, x = nn.Linear(200, 30).double(), correlated(scale=1.0)
    errors = []
    for method in ("sparsegpt", "wanda", None):
        pruned = copy.deepcopy(layer)
        if method:
            prune_on_data_(pruned, [((part,), {}) for part in x.split(70)], 0.5, method=method)
        else:
            magnitudes = layer.weight.detach().abs()
            pruned.weight.data.masked_fill_(magnitudes <= magnitudes.median(1, keepdim=True).values, 0)
        assert int((pruned.weight == 0).sum()) == pytest.approx(3000, abs=31)
        errors.append(float((pruned(x) - layer(x)).detach().norm()))
    assert errors[0] < 0.9 * errors[1] < 0.9 * errors[2]


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_dead_and_tiny_inputs_and_unknown_ones(method):
    prune = {"wanda": prune_by_wanda, "sparsegpt": prune_by_sparsegpt}[method]
    weight = torch.randn(5, 8)
    x = torch.randn(50, 8) * (torch.arange(8) % 4 > 0)
    for scale in (1.0, 1e-18, 1e-25):
        part = x * scale
        found, kept = prune(weight, part.t() @ part if method == "sparsegpt" else part.square().sum(0), 0.25)
        assert found.isfinite().all()
        assert int(kept.sum()) == 30
        if scale == 1:
            assert not kept[:, ::4].any()
    by_magnitude, kept = prune(weight, None, 0.25)
    assert found.equal(by_magnitude)  # all squares of the last scale are 0
    assert by_magnitude.equal(weight * kept)


class Columns(nn.Module):
    """Multiply by a weight from the left."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, x):
        return self.weight @ x.t()


class Unused(nn.Module):
    """Multiply by the first of three experts."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.matrices = 3, nn.Parameter(torch.randn(3, 5, 6))

    def forward(self, x):
        return x @ self.matrices[0].t()


ATTENTION = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
CASES = {
    "linear": (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.randn(9, 6),)),
    "convolutions": (
        nn.Sequential(
            nn.Conv2d(3, 8, (3, 2), stride=(2, 1), padding=(1, 0)), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2, dilation=2)
        ),
        (torch.randn(2, 3, 9, 11),),
    ),
    "convolution of sequences": (nn.Conv1d(4, 6, 3, padding="same", dilation=2), (torch.randn(3, 4, 10),)),
    "convolution of volumes": (nn.Conv3d(2, 4, 2, stride=2), (torch.randn(3, 2, 4, 6, 5),)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), (torch.randn(3, 7, 8),)),
    "cross attention": (ATTENTION, (torch.randn(3, 7, 8), torch.randn(3, 5, 6), torch.randn(3, 5, 6))),
    "columns": (Columns(), (torch.randn(9, 6),)),
    "experts without data": (Unused(), (torch.randn(9, 6),)),
    "recurrent": (nn.LSTM(6, 8, 2, batch_first=True), (torch.randn(3, 5, 6),)),
    "ours, recurrent": (DynamicRNN(6, 8), (torch.randn(3, 5, 6), torch.tensor([5, 3, 2]))),
    "experts": (MixtureOfExperts(6, 8, num_experts=4, k=2, gated=True), (torch.randn(40, 6),)),
}


@pytest.mark.parametrize("name", CASES)
def test_all_weights_get_the_sparsity_whatever_multiplies_them(name, recwarn):
    module, args = copy.deepcopy(CASES[name][0]), CASES[name][1]
    module.train()
    modes = {path: one.training for path, one in module.named_modules()}
    kept = prune_on_data_(module, [(args, {})], 0.5)
    assert list(kept) == [one.name for one in find_prunable(module)[0]]
    assert not [one for one in recwarn if "prune_on_data_" in str(one.message)]
    for weight, mask in kept.items():
        assert float(mask.float().mean()) == pytest.approx(0.5, abs=0.02)
        assert not module.get_parameter(weight).data[~mask].any()
    assert modes == {path: one.training for path, one in module.named_modules()}


def reconstruct(weight, x, sparsity):
    kept = prune_by_sparsegpt(weight, x.t() @ x, sparsity)
    return kept[0]


def test_inputs_of_convolutions_are_patches_and_memory_of_channels_stays():
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2, bias=False).to(
        memory_format=torch.channels_last
    )
    x = torch.randn(5, 4, 7, 6)
    patches = F.unfold(x, (3, 2), stride=(2, 1), padding=(1, 0)).transpose(1, 2).reshape(-1, 24)
    expected = [reconstruct(layer.weight[3 * g : 3 * g + 3].detach().flatten(1), patches[:, 12 * g : 12 * g + 12], 0.5)
                for g in (0, 1)]  # fmt: skip
    prune_on_data_(layer, [((x,), {})], 0.5)
    torch.testing.assert_close(layer.weight.flatten(1), torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)


def test_experts_are_pruned_by_their_own_tokens_and_those_without_by_magnitude():
    torch.manual_seed(0)
    layer = MixtureOfExperts(6, 8, num_experts=3, k=1)
    nn.init.zeros_(layer.gate.weight)
    layer.gate.weight.data[0, 0], layer.gate.weight.data[1, 0] = 5.0, -5.0  # tokens by the sign; none for the last
    x = torch.randn(60, 6)
    before = layer.experts.up_weight.detach().clone()
    prune_on_data_(layer, [((x,), {})], 0.5)
    for expert, tokens in enumerate((x[x[:, 0] > 0], x[x[:, 0] < 0])):
        expected = reconstruct(before[expert], tokens, 0.5)
        torch.testing.assert_close(layer.experts.up_weight[expert], expected, rtol=1e-4, atol=1e-5)
    small = before[2].abs() < before[2].abs().sort(1).values[:, 3, None]
    assert layer.experts.up_weight[2].equal(before[2].masked_fill(small, 0))


class Skips(nn.Module):
    """Use the output of the first block again after the last one."""

    def __init__(self, again):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.again = again

    def forward(self, x):
        x = first = self.blocks[0](x)
        for block in self.blocks[1:3]:
            x = block(x.mul_(2))  # changes an output in place
        return self.blocks[3](x + first if self.again else x)


@pytest.mark.parametrize("again", [False, True])
def test_each_layer_is_pruned_on_what_the_pruned_ones_before_it_give(again, monkeypatch):
    """Whether the layers before are left out or, where their outputs are used later, computed again."""
    torch.manual_seed(0)
    module = Skips(again)
    inputs = [((torch.randn(rows, 6),), {}) for rows in (30, 50)]
    expected = copy.deepcopy(module)
    for block in expected.blocks:
        seen = []
        hook = block.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].detach()))
        for args, _ in inputs:
            expected(*args)
        hook.remove()
        block[0].weight.data = reconstruct(block[0].weight.detach(), torch.cat(seen), 0.5)
    calls = [0] * 4
    for number, block in enumerate(module.blocks):
        block.register_forward_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    chains = []
    own = layerwise._Replay.run
    monkeypatch.setattr(layerwise._Replay, "run", lambda self, at: chains.append(self.is_chain) or own(self, at))
    prune_on_data_(module, inputs, 0.5)
    assert chains == [True, True, True, not again]
    for one, other in zip(module.blocks, expected.blocks, strict=True):
        torch.testing.assert_close(one[0].weight, other[0].weight, rtol=1e-4, atol=1e-5)


class Varies(nn.Module):
    """Go another way in some calls."""

    def __init__(self, way):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.way = way

    def forward(self, x, varies=False):
        first = self.layers[0](x)
        second = self.layers[1](first if self.way != "twice" or not varies else torch.tanh(self.layers[0](first)))
        if self.way == "skip" and varies:
            second = second + first
        if self.way == "host" and varies and bool(first.abs().sum() < 1):
            second = second + 1
        if self.way == "mask":
            second = second.masked_fill(first.abs().sum(-1, keepdim=True) == 0, 0)
        if self.way == "unused" and varies:
            return second
        return self.layers[2](second)


@pytest.mark.parametrize("way", ["skip", "twice", "host", "mask", "unused"])
def test_calls_that_differ_from_the_first_count_as_they_are(way):
    """The last layer is pruned on what a run of the whole gives, whichever call comes first."""
    torch.manual_seed(0)
    module = Varies(way)
    module.layers[0].bias.data.zero_()
    inputs = [
        ((torch.randn(30, 6) * (torch.arange(30)[:, None] % 2), way_of_call), {}) for way_of_call in (False, True)
    ]
    if way == "mask":
        inputs[0] = ((torch.randn(30, 6), False), {})
    results = []
    for order in (inputs, inputs[::-1]):
        pruned = copy.deepcopy(module)
        prune_on_data_(pruned, order, 0.5)
        results.append(pruned)
        assert not any(one._forward_pre_hooks for one in pruned.modules())
    for one, other in zip(*(result.parameters() for result in results), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    expected, seen = copy.deepcopy(results[0]), []
    expected.layers[2].weight.data.copy_(module.layers[2].weight)
    expected.layers[2].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    for args, _ in inputs:
        expected(*args)
    wanted = reconstruct(module.layers[2].weight.detach(), torch.cat(seen), 0.5)
    torch.testing.assert_close(results[0].layers[2].weight, wanted, rtol=1e-4, atol=1e-5)


class Draws(nn.Module):
    """Draw noise, and change the input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x):
        x.sub_(1)
        return self.layers[1](F.dropout(self.layers[0](x), 0.5))


def test_inputs_random_numbers_and_settings_stay():
    module, x = Draws(), torch.randn(20, 6)
    before, state = x.clone(), torch.get_rng_state()
    prune_on_data_(module, [((x,), {})], 0.5)
    assert x.equal(before)
    assert torch.get_rng_state().equal(state)
    layer, convolution = nn.Linear(6, 6), nn.Conv1d(2, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert prune_on_data_(layer, [((x,), {})], 0.5)
    with torch.inference_mode():
        assert prune_on_data_(convolution, [((torch.randn(3, 2, 9),), {})], 0.5)
    assert torch.backends.mkldnn.enabled
    assert torch.backends.mha.get_fastpath_enabled()


class Shared(nn.Module):
    """Hold a parameter twice, and a view of another."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[1].weight = self.layers[0].weight
        self.up = nn.ConvTranspose1d(1, 1, 3)
        self.back = nn.Linear(6, 6)
        self.back.weight.data = self.layers[2].weight.data.t()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.back(self.up(x.unsqueeze(1)).squeeze(1)[:, 1:7])


def test_shared_weights_and_transposed_convolutions_are_named():
    module, x = Shared(), torch.randn(20, 6)
    with pytest.warns(UserWarning, match="several layers share its memory") as caught:
        kept = prune_on_data_(module, [((x,), {})], 0.5)
    message = str(caught[-1].message)
    assert [*kept] == ["layers.3.weight"]
    for name in ("layers.0.weight", "layers.2.weight", "back.weight"):
        assert f"{name}: several layers share its memory" in message
    assert "up.weight: the inputs of a transposed convolution are not looked at" in message
    assert module.back.weight.data_ptr() == module.layers[2].weight.data_ptr()


def test_a_layer_that_is_called_twice_counts_all_its_inputs():
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    module, x = nn.Sequential(shared, nn.Tanh(), shared), torch.randn(50, 6)
    with torch.no_grad():
        expected = reconstruct(shared.weight.detach(), torch.cat([x, torch.tanh(shared(x))]), 0.5)
    prune_on_data_(module, [((x,), {})], 0.5)
    torch.testing.assert_close(shared.weight, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(default=3)
@pytest.mark.parametrize("name", ["gpt2", "olmoe", "t5", "whisper", "swin", "gps"])
def test_networks_that_nobody_here_wrote(name, recwarn):
    model = ZOO[name]
    pytest.importorskip(model.requires)
    found = find_deployed(model.make().eval(), model.loader(), None, 2, None)
    before = {one.name: one.weight.detach().clone() for one in find_prunable(found.module)[0]}
    kept = prune_on_data_(found.module, found.inputs, 0.5)
    assert not [one for one in recwarn if "prune_on_data_" in str(one.message)]
    assert [*kept] == [*before]
    for weight, mask in kept.items():
        assert float(mask.float().mean()) == pytest.approx(0.5, abs=0.03)
        assert not found.module.get_parameter(weight)[mask].equal(before[weight][mask])  # made up for the others


def test_half_precision_compiled_layers_and_ties():
    model = ZOO["llama"].make().model.bfloat16().eval()
    model.tie_weights()
    model.model.layers[0].compile()
    before = num_compiled_graphs()
    ids = torch.randint(0, 29, (4, 12))
    kept = prune_on_data_(model, [((), {"input_ids": ids})], structure="2:4", exclude=["lm_head"])
    assert all(int(mask.view(-1, 4).sum(1).max()) == 2 for mask in kept.values())
    assert all(not model.get_parameter(name)[~mask].any() for name, mask in kept.items())
    assert "model.layers.0.mlp.up_proj.weight" in kept
    assert num_compiled_graphs() == before
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}


class Odd(nn.Module):
    """Have weights that are multiplied from both sides, in part, and never."""

    def __init__(self):
        super().__init__()
        self.both, self.part, self.never, self.plain = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = self.plain(x)
        return self.both(x) @ self.both.weight.t().t() + x @ self.part.weight[:2].t().repeat(1, 2)


def test_weights_that_cannot_be_pruned_are_named():
    module = Odd()
    with pytest.warns(UserWarning, match="prune_on_data_ leaves weights as they are: .*both.weight") as caught:
        kept = prune_on_data_(module, [((torch.randn(20, 4),), {})], 0.5)
    (message,) = [str(one.message) for one in caught if "prune_on_data_" in str(one.message)]
    assert "both.weight: it is multiplied in several ways" in message
    assert "part.weight: no product with it was seen" in message
    assert "never.weight: no product with it was seen" in message
    assert [*kept] == ["plain.weight"]


def test_wrong_calls_say_what_is_needed():
    layer, x = nn.Linear(6, 3), torch.randn(5, 6)
    call = [((x,), {})]
    with pytest.raises(TypeError, match="needs sparsity, the share of weights"):
        prune_on_data_(layer, call)
    with pytest.raises(ValueError, match="method must be one of"):
        prune_on_data_(layer, call, 0.5, method="obs")
    for wrong, found in (
        (x, "Tensor"),
        ([x], "Tensor in it"),
        ([{"input": x}], "dict in it"),
        (iter(call), "list_iter"),
    ):
        with pytest.raises(TypeError, match=rf"list of pairs of positional and keyword .*; got {found}"):
            prune_on_data_(layer, wrong, 0.5)
    with pytest.raises(ValueError, match="needs calibration data"):
        prune_on_data_(layer, [], 0.5)
    with pytest.raises(ValueError, match="has no weight to prune"):
        prune_on_data_(nn.ReLU(), call, 0.5)
    with pytest.raises(ValueError, match=r"no weight of Linear was pruned: weight: its inputs are no multiple of 4"):
        prune_on_data_(layer, call, structure="2:4")
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match="weight is multiplied with NaN, infinity or what is too large to be squared"):
        prune_on_data_(layer, [((x / 0,), {})], 0.5)
    assert layer.weight.equal(before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_seen_in_kernels_of_gpus(dtype):
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, 24, num_experts=3, k=2)
    x = torch.randn(50, 16)
    on_gpu = copy.deepcopy(layer).to("cuda", dtype)
    prune_on_data_(layer, [((x,), {})], 0.5)
    kept = prune_on_data_(on_gpu, [((x.to("cuda", dtype),), {})], 0.5)
    assert [*kept] == ["experts.up_weight", "experts.down_weight"]
    for name, mask in kept.items():
        assert float((mask.cpu() == (layer.get_parameter(name) != 0)).float().mean()) > 0.95
        assert not on_gpu.get_parameter(name)[~mask].any()
