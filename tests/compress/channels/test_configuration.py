"""What is left of a transformers model is read back from a folder as the same model."""

import copy

import pytest
import torch
from torch import nn

from lightning_accel.compress import (
    apply_plan_,
    choose_channels,
    find_channel_groups,
    plan_without_blocks,
    plan_without_experts,
    score_channels,
    update_config_,
)
from tests.zoo import ZOO

pytest.importorskip("transformers")


def narrowed(name, exact=False):
    torch.manual_seed(0)
    module = ZOO[name].make().eval()
    batch = next(iter(ZOO[name].loader()))
    groups = find_channel_groups(module, kwargs=batch, exact=exact)
    multiples = {layer.name: layer.multiple for layer in groups.layers}
    removed = choose_channels(score_channels(module, groups), 0.5, round_to=multiples)
    apply_plan_(module, groups.plan(module, removed))
    return module, batch


def assert_read_back(model, batch, folder):
    before = model(**batch)
    model.save_pretrained(folder)
    again = type(model).from_pretrained(folder).eval()
    torch.testing.assert_close(again(**batch)[0], before[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2", *(pytest.param(one, marks=pytest.mark.slow) for one in
                                                     ["bert", "distilbert", "mistral", "qwen3", "t5"])])  # fmt: skip
def test_width(name, tmp_path):
    module, batch = narrowed(name)
    update_config_(module.model)
    assert module.model.config.hidden_size == (16 if name == "t5" else 8)  # relative positions keep T5's width
    assert_read_back(module.model, batch, tmp_path)


def test_blocks_and_experts(tmp_path):
    torch.manual_seed(0)
    module, batch = ZOO["olmoe"].make().eval(), next(iter(ZOO["olmoe"].loader()))
    for make in (plan_without_blocks, plan_without_experts):
        apply_plan_(module, make(module, [((), batch)], 0.5)[0])
    update_config_(module.model)
    assert_read_back(module.model, batch, tmp_path)


def test_what_no_configuration_describes_leaves_it_as_it_is():
    module, _ = narrowed("gpt2", exact=True)
    before = copy.deepcopy(module.model.config.to_dict())
    with pytest.raises(ValueError, match=r"no GPT2Config describes what is left: .*c_attn.* would be .* equal share"):
        update_config_(module.model)
    assert module.model.config.to_dict() == before
    module, _ = narrowed("gpt2")
    module.model.transformer.h[1].attn.num_heads = 1  # which no shape shows
    with pytest.raises(ValueError, match=r"transformer.h.1.attn.num_heads would be 2; it is 1"):
        update_config_(module.model)
    with pytest.raises(TypeError, match=r"Transformer is no model of transformers; give the one within it"):
        update_config_(module)
    with pytest.raises(TypeError, match="Linear is no model of transformers"):
        update_config_(nn.Linear(2, 2))
