import copy
import io
import json

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_accel.compress import (
    ChannelPlan,
    apply_plan_,
    choose_channels,
    find_channel_groups,
    load_pruned,
    score_channels,
)
from lightning_accel.compress.channels import rules as channel_rules
from lightning_accel.compress.channels.groups import zero_channels_
from lightning_accel.models import Classifier
from lightning_accel.nn import RBM, DynamicRNN, FeedForward, MixtureOfExperts, RBMStack
from lightning_accel.nn.transformer import TransformerBlock
from tests.compress.networks import Attention, Dense, Pools, Reads, ResNet18, Squeeze, mobile

IMAGES = torch.randn(2, 3, 9, 8)
STEPS = torch.randn(2, 5, 3)
FLAT = torch.randn(2, 216)
TOKENS = torch.randn(2, 5, 12)


def classifier(**options):
    return Classifier(3, **{"channels": [8, 6, 12], "hidden_dims": [20]} | options)


class Conv1D(nn.Module):
    """As in transformers: a transposed linear layer, with its width in an attribute that forward reads."""

    def __init__(self, nx, nf):
        super().__init__()
        self.nx, self.nf = nx, nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


class CutsBySize(nn.Module):
    """Cuts what one layer makes into parts whose size is an attribute, as GPT-2 does its queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.split_size = 12
        self.packed, self.out = nn.Linear(12, 36), nn.Linear(12, 3)

    def forward(self, x):
        first, second, third = self.packed(x).split(self.split_size, dim=2)
        return self.out(first * second.sigmoid() + third)


class Propagates(nn.Module):
    """Add the features of neighbours, of all heads as in the attention of GAT, or as in GCN."""

    def __init__(self, heads, reduce):
        super().__init__()
        self.heads, self.reduce = heads, reduce
        self.first, self.second = nn.Linear(3, 12), nn.Linear(12, 4)
        self.scores = nn.Parameter(torch.randn(1, heads, 12 // heads))

    def forward(self, x):
        x, index = x.flatten(0, 1), torch.arange(10) % 4  # node i is a neighbour of node i modulo 4
        x = self.first(x)
        if self.heads > 1:
            x = x.view(-1, self.heads, 12 // 4)
            weight = (x * self.scores).sum(-1).sigmoid().unsqueeze(-1)
            x = x * weight
        index = index.view(-1, *[1] * (x.ndim - 1)).expand_as(x)
        out = x.new_zeros(4, *x.shape[1:])
        out = out.scatter_add_(0, index, x) if self.reduce == "sum" else out.scatter_reduce_(0, index, x, self.reduce)
        return self.second(out.view(4, -1).relu())


class FusedExperts(nn.Module):
    """Have the matrices of all experts in one parameter, gates and first layers too, as transformers has."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(2, 64, 8)), nn.Parameter(torch.randn(2, 8, 32))

    def forward(self, x):
        x, offs = x.flatten(0, 1), torch.tensor([7, 10], dtype=torch.int32)
        if x.dtype == torch.float64:  # which grouped products do not take
            inside = [part @ matrix.T for part, matrix in zip(x.split([7, 3]), self.gate_up_proj, strict=True)]
        else:
            inside = [torch._grouped_mm(x, self.gate_up_proj.mT, offs=offs)]
        gate, up = torch.cat(inside).chunk(2, dim=-1)
        hidden = nn.functional.silu(gate) * up
        if x.dtype == torch.float64:
            parts = zip(hidden.split([7, 3]), self.down_proj, strict=True)
            return torch.cat([part @ matrix.T for part, matrix in parts])
        return torch._grouped_mm(hidden, self.down_proj.mT, offs=offs)


# module, input, channels of each layer in the order in which they are found
CASES = {
    "mlp": (lambda: Classifier(216, hidden_dims=[16, 9]), IMAGES, [16, 9]),
    "cnn": (classifier, IMAGES, [8, 6, 12, 20]),
    "residual": (lambda: ResNet18((4, 6, 8, 10), 3), IMAGES, [4, 4, 4, 6, 6, 6, 8, 8, 8, 10, 10, 10]),
    "concatenated": (Dense, IMAGES, [6, 5, 7]),
    "mobile": (mobile, IMAGES, [2, 6, 4, 6, 5, 5]),
    "squeeze": (Squeeze, IMAGES, [6, 4]),
    "lstm": (lambda: Reads(nn.LSTM(3, 5, batch_first=True), 5), STEPS, [5]),
    "gru, deep": (lambda: Reads(nn.GRU(3, 5, 2, batch_first=True, bidirectional=True), 10), STEPS, [5]),
    "rnn": (lambda: Reads(nn.RNN(3, 5, batch_first=True), 5), STEPS, [5]),
    "DynamicRNN lstm": (lambda: Reads(DynamicRNN(3, 5, 2, cell="lstm", bidirectional=True), 10), STEPS, [5]),
    "DynamicRNN mingru": (lambda: Reads(DynamicRNN(3, 5, cell="mingru"), 5), STEPS, [5]),
    **{
        f"rows of unequal length, {cell}": (
            lambda cell=cell: Pools(DynamicRNN(3, 5, 2, cell=cell, pooling="attention"), 5),
            STEPS,
            [5, 5],
        )
        for cell in ("rnn", "gru", "lstm", "mingru", "minlstm")
    },
    "encoder": (lambda: nn.TransformerEncoderLayer(12, 3, 16), TOKENS, [16]),
    "attention": (Attention, TOKENS, [3]),
    "attention, heads shared": (
        lambda: nn.Sequential(Attention(12, 4, num_shared=2), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 2)),
        TOKENS,
        [2, 12, 16],
    ),
    "attention, heads repeated": (lambda: Attention(12, 6, num_shared=3, repeats=True), TOKENS, [3]),
    "attention, cut by an attribute": (CutsBySize, TOKENS, [12]),
    "linear layers of transformers": (lambda: nn.Sequential(Conv1D(216, 9), nn.ReLU(), Conv1D(9, 4)), FLAT, [9]),
    "attention, packed": (lambda: Attention(12, 2, packed=True), TOKENS, [2]),
    "block": (lambda: TransformerBlock(12, 3, FeedForward(12, 16)), TOKENS, [3, 16]),
    "block, heads shared": (  # whose groups have as many parts as there are heads
        lambda: TransformerBlock(16, 4, FeedForward(16, 24), num_key_value_heads=2),
        torch.randn(2, 5, 16),
        [2, 24],
    ),
    "graph, sum": (lambda: Propagates(1, "sum"), STEPS, [12]),
    "graph, largest": (lambda: Propagates(1, "amax"), STEPS, [12]),
    "graph, heads": (lambda: Propagates(4, "sum"), STEPS, [4]),
    "grouped products": (FusedExperts, torch.randn(2, 5, 8), [32]),
    "experts": (lambda: TransformerBlock(12, 3, MixtureOfExperts(12, 16, 4, gated=True)), TOKENS, [3, 16]),
}


def first(output):
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return output


@pytest.mark.parametrize("name", ["attention", "attention, heads shared", "attention, packed", "experts"])
def test_attention_is_followed_whatever_computes_it(name):
    """By products and a softmax, for one, where a GPU has no kernel for the dtype or the mask."""
    make, x, sizes = CASES[name]
    with sdpa_kernel(SDPBackend.MATH):
        groups = find_channel_groups(make().double().eval(), (x,))
    assert [len(layer) for layer in groups.layers] == sizes


def test_attention_of_an_exported_program_is_followed():
    make, x, _ = CASES["attention"]
    program = torch.export.export(make().eval(), (x.float(),)).module(check_guards=False)
    reasons = find_channel_groups(program, (x.float(),)).left_out.values()
    assert reasons
    assert not [one for one in reasons if "not followed" in one]


@pytest.mark.parametrize("name", CASES)
def test_a_smaller_module_computes_what_the_whole_does_with_channels_at_zero(name):
    make, x, sizes = CASES[name]
    module = make().double().eval()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.bias)
            nn.init.normal_(part.running_mean)
    groups = find_channel_groups(module, (x,))
    assert [len(layer) for layer in groups.layers] == sizes
    removed = {layer.name: list(range(0, len(layer), 2))[: len(layer) - 1] for layer in groups.layers}
    small = copy.deepcopy(module)
    apply_plan_(small, groups.plan(small, removed))
    before, after = (sum(one.numel() for one in each.parameters()) for each in (module, small))
    assert after < 0.9 * before
    assert list(dict(small.named_parameters())) == list(dict(module.named_parameters()))
    if name in ("block", "block, heads shared"):
        heads = small.attention.num_heads, small.attention.num_key_value_heads
        assert heads == {"block": (1, 1), "block, heads shared": (2, 1)}[name]
    zero_channels_(module, groups, removed)
    x = x.double()
    torch.testing.assert_close(first(small(x)), first(module(x)), rtol=1e-9, atol=1e-9)


class HandWrittenRMSNorm(nn.Module):
    """As in transformers."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Residual(nn.Module):
    def __init__(self, norm, width=8, inner=6):
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.norms = nn.ModuleList([norm(width), norm(width)])
        self.up, self.down, self.head = nn.Linear(width, inner), nn.Linear(inner, width), nn.Linear(width, 3)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.down(self.up(self.norms[0](x)).relu())
        return self.head(self.norms[1](x))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, HandWrittenRMSNorm])
def test_channels_that_are_normalized_over_go_where_it_need_not_be_exact(norm):
    """Then the module computes what one does that was made with that width."""
    module, x = Residual(norm).double(), torch.arange(5).view(1, 5)
    nn.init.normal_(module.norms[0].weight)
    assert [(layer.name, layer.exact) for layer in find_channel_groups(module, (x,)).layers] == [("up", True)]
    groups = find_channel_groups(module, (x,), exact=False)
    assert {layer.name: (len(layer), layer.exact) for layer in groups.layers} == {
        "embedding": (8, False),
        "up": (6, True),
    }
    apply_plan_(module, groups.plan(module, {"embedding": [0, 3, 4], "up": [5]}))
    made = Residual(norm, width=5, inner=5).double()
    made.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), made(x), rtol=1e-9, atol=1e-9)
    assert str(module) == str(made)


def test_grouped_products_keep_multiples_of_16_bytes():
    module, x = FusedExperts(), torch.randn(2, 5, 8)
    groups = find_channel_groups(module, (x,))
    assert [layer.multiple for layer in groups.prefixed("inner").layers] == [8]
    chosen = choose_channels({"": torch.arange(32.0)}, 0.6, round_to={layer.name: 8 for layer in groups.layers})
    assert len(chosen[""]) == 16
    apply_plan_(module, groups.plan(module, chosen))
    module.bfloat16()(x.bfloat16())


def test_neither_the_module_nor_the_generator_is_changed():
    module = classifier().train()
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    find_channel_groups(module, (IMAGES,))
    assert torch.get_rng_state().equal(random)
    assert all(part.training for part in module.modules())
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_layers_know_their_sizes():
    module = mobile()
    groups = find_channel_groups(module, (IMAGES,))
    apply_plan_(module, groups.plan(module, {layer.name: [0] for layer in groups.layers}))
    assert (module[0].out_channels, module[1].num_groups, module[1].num_channels) == (4, 2, 4)
    assert (module[3].groups, module[3].in_channels, module[3].out_channels) == (4, 4, 8)
    assert (module[4].num_parameters, module[5].groups, module[5].in_channels, module[5].out_channels) == (8, 2, 8, 10)
    assert (module[8].in_channels, module[8].out_channels, module[9].num_features) == (3, 5, 5)
    assert (module[16].in_features, module[16].out_features) == (16, 4)
    rnn = Reads(nn.LSTM(3, 5, batch_first=True), 5)
    groups = find_channel_groups(rnn, (STEPS,))
    apply_plan_(rnn, groups.plan(rnn, {"recurrent": [1]}))
    assert rnn.recurrent.hidden_size == 4
    assert rnn.recurrent._flat_weights[0] is rnn.recurrent.weight_ih_l0
    assert rnn.recurrent.weight_ih_l0.shape == (16, 3)


@pytest.mark.slow
def test_resnet_18_at_half_the_channels():
    """Multiplications of the layers in closed form, and what Torch-Pruning counts beside them."""
    module = ResNet18()
    groups = find_channel_groups(module, (torch.randn(1, 3, 64, 64),))
    assert sum(one.numel() for one in module.parameters()) == 11_689_512
    scores = score_channels(module, groups)
    apply_plan_(module, groups.plan(module, choose_channels(scores, 0.5)))
    assert sum(one.numel() for one in module.parameters()) == 3_055_880
    expected = ResNet18((32, 64, 128, 256))
    assert {name: one.shape for name, one in module.named_parameters()} == {
        name: one.shape for name, one in expected.named_parameters()
    }
    module.eval()(torch.randn(1, 3, 64, 64))
    assert _gmacs(ResNet18()) == pytest.approx(1.822, abs=5e-4)
    assert _gmacs(module) == pytest.approx(0.487, abs=5e-4)


def _gmacs(module):
    total = 0

    def count(layer, args, out):
        nonlocal total
        if isinstance(layer, nn.Conv2d):
            total += out[0].numel() * layer.weight[0].numel()
        elif isinstance(layer, nn.Linear):
            total += layer.weight.numel() + layer.out_features
        elif isinstance(layer, nn.BatchNorm2d):
            total += 2 * out.numel()
        elif isinstance(layer, nn.ReLU):
            total += out.numel()
        elif isinstance(layer, (nn.MaxPool2d, nn.AdaptiveAvgPool2d)):
            total += args[0].numel()

    handles = [part.register_forward_hook(count) for part in module.modules()]
    with torch.no_grad():
        module.eval()(torch.randn(1, 3, 224, 224))
    for handle in handles:
        handle.remove()
    return total / 1e9


class Stubborn(nn.Module):
    """One layer of a size that its code knows, one that an unknown operation reads, and one like others."""

    def __init__(self):
        super().__init__()
        self.fixed, self.sorted, self.free, self.unused = (nn.Linear(4, 6) for _ in range(4))
        self.out = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

    def forward(self, x):
        fixed = self.fixed(x).view(-1, 6)
        ordered = torch.cdist(self.sorted(x), torch.zeros(6, 6))
        return self.out[0](fixed) + self.out[1](ordered) + self.out[2](self.free(x).relu())


def test_what_cannot_be_removed_is_named_and_the_rest_is_served():
    groups = find_channel_groups(Stubborn(), (torch.randn(3, 4),))
    assert [layer.name for layer in groups.layers] == ["free"]
    assert "forward of the smaller module fails: RuntimeError: shape '[-1, 6]'" in groups.left_out["fixed.weight"]
    assert "_cdist_forward, through which channels are not followed" in groups.left_out["sorted.weight"]
    assert groups.left_out["unused.weight"] == "no product takes what it makes"
    assert groups.left_out["out.0.weight"] == "the module's output"


def test_a_rule_that_fails_pins_what_it_is_about(monkeypatch):
    def fails(trace, given, out):
        raise IndexError("a case that was not thought of")

    def gives_too_few(trace, given, out):
        return [[*trace.of(given["self"])[:-1], trace.nodes.make(1)]]

    for rule in (fails, gives_too_few):
        monkeypatch.setitem(channel_rules.RULES, "cumsum", rule)
        module = nn.Sequential(nn.Linear(4, 7), Sums(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 2))
        groups = find_channel_groups(module, (torch.randn(3, 4),))
        assert [layer.name for layer in groups.layers] == ["2"]
        assert groups.left_out["0.weight"] == "1 runs aten::cumsum in a way that is not followed"


class Sums(nn.Module):
    def forward(self, x):
        return x.cumsum(0)


def test_outputs_of_excluded_layers_stay():
    module = classifier()
    for exclude, left in (
        ([], ["network.0", "network.3", "network.6", "network.11"]),
        ([nn.Conv2d], ["network.11"]),
        (["Conv2d"], ["network.11"]),
        (["network.3", "network.11.*"], ["network.0", "network.6"]),
        (["network.4"], ["network.0", "network.6", "network.11"]),
    ):
        groups = find_channel_groups(module, (IMAGES,), exclude=exclude)
        assert [layer.name for layer in groups.layers] == left
        assert all(groups.left_out[f"{name}.weight"] == "excluded" for name in {"network.3"} - set(left))
    with pytest.raises(ValueError, match=r"exclude has 'network.99', which is no parameter.*there are network"):
        find_channel_groups(module, (IMAGES,), exclude=["network.99"])


def test_what_cannot_be_traced_is_refused():
    with pytest.raises(TypeError, match=r"Classifier could not be run on the CPU.*Give the arguments"):
        find_channel_groups(classifier(), (torch.randn(2, 5),))
    with pytest.raises(TypeError, match="not here whole"):
        find_channel_groups(nn.Linear(2, 3, device="meta"), (torch.randn(2, 2),))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "adam, foreach, amsgrad": lambda p: torch.optim.Adam(p, 0.1, foreach=True, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_go_on_as_on_the_whole_module_with_channels_held_at_zero(name):
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    make, x = OPTIMIZERS[name], torch.randn(7, 3, dtype=torch.float64)
    small = copy.deepcopy(whole)
    groups = find_channel_groups(whole, (x,))
    removed = {"0": [1, 3, 4], "2": [0, 5]}
    optimizers = [make(module.parameters()) for module in (whole, small)]

    def step(module, optimizer):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        if module is whole:
            for parameter in module.parameters():
                parameter.grad *= masks[parameter]
        optimizer.step()

    masks = {one: torch.ones_like(one) for one in whole.parameters()}
    for module, optimizer in zip((whole, small), optimizers, strict=True):
        step(module, optimizer)
    plan = groups.plan(small, removed)
    apply_plan_(small, plan, [optimizers[1]])
    zero_channels_(whole, groups, removed)
    ones = copy.deepcopy(whole)
    for parameter in ones.parameters():
        nn.init.ones_(parameter)
    zero_channels_(ones, groups, removed)
    masks = dict(zip(whole.parameters(), ones.parameters(), strict=True))
    for parameter, mask in masks.items():
        for value in optimizers[0].state[parameter].values():
            if value.shape == parameter.shape:
                value.mul_(mask.detach())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[1], 1, gamma=1.0)
    for _ in range(3):
        for module, optimizer in zip((whole, small), optimizers, strict=True):
            step(module, optimizer)
        scheduler.step()
        zero_channels_(whole, groups, removed)
    torch.testing.assert_close(small(x), whole(x))
    held = {id(one) for group in optimizers[1].param_groups for one in group["params"]}
    assert held == {id(one) for one in small.parameters()}
    assert len(optimizers[1].state) == len(held)


def test_an_optimizer_that_cannot_be_sliced_leaves_all_as_it_was():
    module = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    plan = find_channel_groups(module, (torch.randn(1, 3),)).plan(module, {"0": [2]})
    weight = module[0].weight
    with pytest.raises(ValueError, match="LBFGS keeps the history of all parameters as one vector"):
        apply_plan_(module, plan, [torch.optim.LBFGS(module.parameters())])
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    optimizer.state[weight]["sketch"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"SGD sketch has shape \[5\]"):
        apply_plan_(module, plan, [optimizer])
    assert module[0].weight is weight


def test_plans_go_through_json():
    module = classifier()
    whole, x = copy.deepcopy(module), IMAGES
    groups = find_channel_groups(module, (x,))
    plan = groups.plan(module, choose_channels(score_channels(module, groups), 0.6))
    apply_plan_(module, plan)
    plan = ChannelPlan.of_state(json.loads(json.dumps(plan.state_dict())))
    apply_plan_(whole, plan)
    torch.testing.assert_close(whole.eval()(x), module.eval()(x), rtol=0, atol=0)
    assert whole.network[3].in_channels == module.network[3].in_channels == module.network[0].out_channels
    with pytest.raises(ValueError, match=r"network.0.weight of shape \[8, 3, 3, 3\]; got \[3, 3, 3, 3\]"):
        apply_plan_(whole, plan)
    with pytest.raises(KeyError, match=r"has no 'network.0.weight'"):
        apply_plan_(nn.Linear(2, 2), plan)


def test_a_file_without_pickle_makes_the_smaller_module():
    module = classifier()
    groups = find_channel_groups(module, (IMAGES,))
    plan = groups.plan(module, choose_channels(score_channels(module, groups), 0.5))
    apply_plan_(module, plan)
    file = io.BytesIO()
    torch.save({"channel_plan": plan.state_dict(), "state_dict": module.state_dict()}, file)
    file.seek(0)
    loaded = load_pruned(classifier(), torch.load(file, weights_only=True))
    torch.testing.assert_close(loaded.eval()(IMAGES), module.eval()(IMAGES), rtol=0, atol=0)
    with pytest.raises(ValueError, match="must be in 'state_dict'"):
        load_pruned(classifier(), {"weights": {}})
    later = {"state_dict": module.state_dict()}  # of a fit that began with the smaller module
    with pytest.raises(ValueError, match=r"other weights than the checkpoint: .* load both in turn"):
        load_pruned(classifier(), later)
    with pytest.raises(ValueError, match=r"and missing there; 1 differ"):
        load_pruned(nn.Linear(3, 2), {"state_dict": {"weight": torch.ones(2, 3)}})
    again = load_pruned(load_pruned(classifier(), {"channel_plan": plan.state_dict(), **later}), later)
    torch.testing.assert_close(again.eval()(IMAGES), module(IMAGES), rtol=0, atol=0)


def test_shared_parameters_stay_shared():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.out = nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(5, 2)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.out(self.one(x) * self.two(x))

    module = Tied()
    groups = find_channel_groups(module, (torch.randn(2, 3),))
    apply_plan_(module, groups.plan(module, {"one": [0, 2]}))
    assert module.two.weight is module.one.weight
    assert module(torch.randn(2, 3)).shape == (2, 2)


def test_scores_are_those_of_a_loop():
    module = classifier()
    groups = find_channel_groups(module, (IMAGES,))
    conv, norm, after = module.network[3], module.network[4], module.network[6]
    nn.init.normal_(norm.weight)
    parts = [[conv.weight[i], norm.weight[i], norm.bias[i], after.weight[:, i]] for i in range(6)]
    expected = {
        "magnitude": [sum(one.square().sum() for one in each).sqrt() for each in parts],
        lambda name, value: value.abs(): [sum(one.abs().sum() for one in each) for each in parts],
    }
    for criterion, values in expected.items():
        scores = score_channels(module, groups, criterion)["network.3"]
        torch.testing.assert_close(scores, torch.stack([*values]).detach().double(), rtol=1e-5, atol=1e-9)
    with pytest.raises(ValueError, match=r"criterion must be 'magnitude', or a function; got 'wanda'"):
        score_channels(module, groups, "wanda")


def test_the_lowest_scores_go():
    scores = {"a": torch.tensor([4.0, 1, 3, 2, 5, 6, 8, 7]), "b": torch.tensor([1.0, 1, 1, 100])}
    assert choose_channels(scores, 0.5) == {"a": [0, 1, 2, 3], "b": [0, 1]}
    assert choose_channels(scores, 0.5, round_to=3) == {"a": [1, 3], "b": [0]}
    assert choose_channels(scores, 0.99) == {"a": [0, 1, 2, 3, 4, 5, 7], "b": [0, 1, 2]}
    # of twelve, relative to the mean of their layer: three of b, and the three lowest of a
    assert choose_channels(scores, 0.5, "global") == {"a": [1, 2, 3], "b": [0, 1, 2]}
    assert choose_channels(scores, 0.9, "global") == {"a": [0, 1, 2, 3, 4, 5, 7], "b": [0, 1, 2]}
    uneven = {"a": torch.tensor([3.0, 3, 30]), "b": torch.tensor([1.5, 9, 9])}  # 0.25 and 0.23 of the means
    assert choose_channels(uneven, 1 / 6, "global") == {"a": [], "b": [0]}
    assert choose_channels(scores, 0.0) == {"a": [], "b": []}
    with pytest.raises(ValueError, match=r"sparsity must be in \[0, 1\); got 1"):
        choose_channels(scores, 1)


def test_all_channels_of_a_layer_cannot_go():
    module = classifier()
    groups = find_channel_groups(module, (IMAGES,))
    with pytest.raises(ValueError, match=r"all 8 channels of network.0 are to be removed"):
        groups.plan(module, {"network.0": range(8)})
    with pytest.raises(KeyError, match=r"no layer 'network.99'"):
        groups.plan(module, {"network.99": [0]})


def test_lower_machines_of_a_belief_network_are_left_out_in_the_words_of_the_field():
    stack = RBMStack([RBM(7, 6), RBM(6, 5), RBM(5, 4)])
    groups = find_channel_groups(nn.Sequential(stack, nn.Linear(4, 3)), [torch.rand(2, 7)])
    assert [layer.name for layer in groups.layers] == ["0.rbms.2"]
    assert groups.left_out["0.rbms.0.weight"].startswith("its units are the visible units of 0.rbms.1, whose size is")
    assert groups.left_out["0.rbms.1.weight"].startswith("its units are the visible units of 0.rbms.2, whose size is")
