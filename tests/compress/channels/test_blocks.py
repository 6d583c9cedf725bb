"""Blocks of the least influence are removed, and what is left of foreign networks runs, generates and says its size."""

import copy
import math

import pytest
import torch
from torch import nn

from lightning_accel import MoELanguageModel
from lightning_accel.compress import ChannelPlan, apply_plan_, load_pruned, measure_influence, plan_without_blocks
from lightning_accel.models import Experts
from tests.zoo import ZOO


class Block(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        with torch.no_grad():
            self.linear.weight.mul_(scale)
            self.linear.bias.mul_(scale)

    def forward(self, x):
        return x + self.linear(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(map(Block, (2.0, 0.01, 1.0, 0.3)))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make():
    torch.manual_seed(0)
    return Net(), [((torch.randn(2, 5, 3),), {}), ((torch.randn(2, 5, 3),), {})]


def test_influence_is_that_of_a_loop_over_positions():
    module, inputs = make()
    found = measure_influence(module, inputs)
    assert found.left_out == {}
    sums = dict.fromkeys(found.influence, 0.0)
    module.requires_grad_(False)
    for (x,), _ in inputs:
        for row in module.inner(x).double().flatten(0, 1):
            for name in sums:
                after = module.get_submodule(name).double()(row)
                sums[name] += 1 - float(row @ after / (row.norm() * after.norm()))
                row = after
    assert found.influence == pytest.approx({name: value / 20 for name, value in sums.items()}, abs=1e-6)
    assert min(found.influence, key=found.influence.get) == "blocks.1"


def test_optimizers_and_names_follow():
    module, inputs = make()
    plan, _ = plan_without_blocks(module, inputs, 0.5, exclude=["blocks.1"])
    assert plan.blocks == {"blocks": [0, 1]}
    plan, _ = plan_without_blocks(module, inputs, 0.5)
    assert plan.blocks == {"blocks": [0, 2]}
    kept = module.blocks[2]
    optimizer = torch.optim.AdamW(module.parameters(), 0.1)
    module(inputs[0][0][0]).sum().backward()
    optimizer.step()
    moments = optimizer.state[kept.linear.weight]["exp_avg"]
    whole = copy.deepcopy(module)
    apply_plan_(module, plan, [optimizer])
    assert module.blocks[1] is kept
    assert [*optimizer.param_groups[0]["params"]] == [*module.parameters()]
    assert optimizer.state.keys() == set(module.parameters())
    assert optimizer.state[kept.linear.weight]["exp_avg"] is moments
    x = inputs[0][0][0]
    torch.testing.assert_close(module(x), whole.head(whole.blocks[2](whole.blocks[0](whole.inner(x)))))
    fresh, again = make()[0], ChannelPlan.of_state(plan.state_dict())
    load_pruned(fresh, {"channel_plan": again.state_dict(), "state_dict": module.state_dict()})
    torch.testing.assert_close(fresh(x), module(x))
    with pytest.raises(ValueError, match="plan is for 4 blocks in blocks; got 2"):
        apply_plan_(module, plan)


def test_what_cannot_go_says_why():
    module, inputs = make()
    module.blocks[0].bias = nn.Parameter(torch.zeros(()))
    assert measure_influence(module, inputs).left_out == {"blocks.0": "alone has bias"}
    with pytest.raises(ValueError, match=r"0.1 of the 4 blocks of Net is 0, and 0 can"):
        plan_without_blocks(module, inputs, 0.1)
    with pytest.raises(ValueError, match=r"is 4, and 3 can be removed, since each list keeps one \(blocks.0: alone"):
        plan_without_blocks(module, inputs, 0.9)
    with torch.no_grad():
        module.blocks[1].linear.bias.fill_(math.nan)
    with pytest.raises(ValueError, match=r"blocks.1, blocks.2, blocks.3 gives NaN"):
        measure_influence(module, inputs)
    stages = nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.Sequential(nn.Linear(4, 3)))
    found = measure_influence(stages, inputs)
    assert set(found.left_out.values()) == {"its output has another shape than its input"}


class Named(nn.Module):
    """Fail without one of its blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*map(Block, (0.01, 1.0, 1.0)))

    def forward(self, x):
        return self.blocks[2](self.blocks[1](self.blocks[0](x)))


def test_a_module_that_fails_without_is_refused_and_stays():
    module, x = Named(), torch.randn(2, 6)
    with pytest.raises(ValueError, match=r"Named does not run without blocks.0: IndexError.*Exclude"):
        plan_without_blocks(module, [((x,), {})], 0.34)
    assert len(module.blocks) == 3


DECODERS = [name for name, model in ZOO.items() if model.is_decoder and name != "t5"]


@pytest.mark.parametrize("name", DECODERS)
def test_foreign_decoders_generate_without_a_block(name):
    pytest.importorskip(ZOO[name].requires)
    torch.manual_seed(0)
    module = ZOO[name].make().eval()
    batch = next(iter(ZOO[name].loader()))
    plan, found = plan_without_blocks(module, [((), batch)], 0.5)
    small = copy.deepcopy(module)
    apply_plan_(small, plan)
    count = len(found.influence) - sum(plan.lengths.values()) + sum(map(len, plan.blocks.values()))
    assert small.model.config.num_hidden_layers == count
    tokens = batch["input_ids"][:, :4]
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    made = small.model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    without_cache = small.model.generate(tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **options)
    assert torch.equal(made, without_cache)
    fresh = type(small.model)(copy.deepcopy(small.model.config))  # as from_pretrained makes it
    fresh.load_state_dict(small.model.state_dict())


def test_our_language_model_counts_the_load_of_what_is_left():
    model = MoELanguageModel(
        vocab_size=11,
        dim=8,
        num_layers=3,
        attention={"num_heads": 2, "num_key_value_heads": 1},
        tie_embeddings=True,
        experts=Experts(hidden_dim=8),
    )
    tokens = torch.randint(11, (2, 5))
    plan, _ = plan_without_blocks(model, [((tokens,), {})], 0.34)
    apply_plan_(model, plan)
    model.train()(tokens)
    assert len(model.expert_load.step()) == 2
    model.val_load.update(model(tokens).reports)
    assert model.val_load.compute().shape == (2, 8)
