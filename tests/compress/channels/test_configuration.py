"""What is left of a transformers model is read back from a folder as the same model."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from lightning_accel.compress import (
    add_adapters_,
    apply_plan_,
    choose_channels,
    find_channel_groups,
    merge_adapters_,
    plan_without_blocks,
    plan_without_experts,
    prune_on_data_,
    score_channels,
    update_config_,
)
from lightning_accel.compress.adapters import adapter_parameters
from tests.zoo import ZOO

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
READ = """
import sys, torch
from transformers import AutoModelForCausalLM
tokens, *folders = torch.load(sys.argv[1])
models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders]
assert not any("lightning" in name for name in sys.modules)
torch.save([model(tokens).logits.detach() for model in models], sys.argv[2])
"""


def narrow_(module, batch, exact=False):
    groups = find_channel_groups(module, kwargs=batch, exact=exact)
    multiples = {layer.name: layer.multiple for layer in groups.layers}
    removed = choose_channels(score_channels(module, groups), 0.5, round_to=multiples)
    apply_plan_(module, groups.plan(module, removed))


def narrowed(name, exact=False):
    torch.manual_seed(0)
    module = ZOO[name].make().eval()
    batch = next(iter(ZOO[name].loader()))
    narrow_(module, batch, exact)
    return module, batch


def adapted(model, **how):
    """Return the model with merged adapters whose weights are as of some training."""
    for value in adapter_parameters(add_adapters_(model, 2, **how)).values():
        nn.init.normal_(value, std=0.3)
    return merge_adapters_(model)


def assert_read_back(model, batch, folder):
    before = model(**batch)
    model.save_pretrained(folder)
    again = type(model).from_pretrained(folder).eval()
    torch.testing.assert_close(again(**batch)[0], before[0], rtol=0, atol=0)


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "olmoe", *(pytest.param(one, marks=pytest.mark.slow) for one in
                                                     ["bert", "distilbert", "mistral", "qwen3", "t5"])])  # fmt: skip
def test_width(name, tmp_path):
    module, batch = narrowed(name)
    update_config_(module.model)
    assert module.model.config.hidden_size == (16 if name == "t5" else 8)  # relative positions keep T5's width
    assert_read_back(module.model, batch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("embedding", [16, 24])
def test_width_of_opt(embedding, tmp_path):
    config = transformers.OPTConfig(
        vocab_size=50, hidden_size=16, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=embedding, max_position_embeddings=20,
    )  # fmt: skip
    model, tokens = transformers.OPTForCausalLM(config).eval(), torch.randint(2, 50, (2, 7))
    narrow_(model, {"input_ids": tokens})
    update_config_(model)
    assert (config.hidden_size, config.word_embed_proj_dim) == (8, embedding // 2)
    assert_read_back(model, {"input_ids": tokens}, tmp_path)


@pytest.mark.slow
def test_width_of_phi3_keeps_the_size_of_heads(tmp_path):
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES)).eval()
    update_config_(model)
    assert not hasattr(model.config, "head_dim")
    tokens = torch.randint(2, 50, (2, 7))
    narrow_(model, {"input_ids": tokens})
    update_config_(model)
    assert (model.config.hidden_size, model.config.head_dim) == (8, 4)
    assert_read_back(model, {"input_ids": tokens}, tmp_path)


@pytest.mark.slow
def test_experts_of_gpt_oss(tmp_path):
    config = transformers.GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    model, tokens = transformers.GptOssForCausalLM(config).eval(), torch.randint(2, 50, (2, 7))
    apply_plan_(model, plan_without_experts(model, [((tokens,), {})], 0.5)[0])
    update_config_(model)
    assert (config.num_local_experts, config.intermediate_size) == (2, 48)
    assert_read_back(model, {"input_ids": tokens}, tmp_path)


@pytest.mark.slow
def test_blocks_of_encoder_and_decoder(tmp_path):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=48, num_layers=3, num_decoder_layers=4, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    model, tokens = transformers.T5ForConditionalGeneration(config).eval(), torch.randint(2, 50, (2, 7))
    batch = {"input_ids": tokens, "labels": tokens}
    apply_plan_(model, plan_without_blocks(model, [((), batch)], 0.6)[0])
    update_config_(model)
    assert (config.num_layers, config.num_decoder_layers) == (len(model.encoder.block), len(model.decoder.block))
    assert config.num_layers < 3
    assert config.num_decoder_layers < 4
    model.save_pretrained(tmp_path)
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**batch).logits, model(**batch).logits, rtol=0, atol=0)


def test_advice_is_not_what_was_done():
    config = transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=4)
    model, tokens = transformers.BloomForCausalLM(config).eval(), torch.randint(2, 50, (2, 7))
    narrow_(model, {"input_ids": tokens})
    with pytest.raises(ValueError, match=r"no BloomConfig describes what is left: .*Keep the width: OneShotPruning"):
        update_config_(model)


def test_widths_of_experts_beside_others(tmp_path):
    config = transformers.Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=32, shared_expert_intermediate_size=24, num_experts=4, mlp_only_layers=[1]
    )
    model, tokens = transformers.Qwen2MoeForCausalLM(config).eval(), torch.randint(50, (2, 7))
    narrow_(model, {"input_ids": tokens})
    update_config_(model)
    widths = "hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"
    assert [getattr(config, name) for name in widths] == [8, 24, 16, 12]
    assert_read_back(model, {"input_ids": tokens}, tmp_path)


def test_a_head_with_a_weight_of_its_own_is_not_tied(tmp_path):
    pytest.importorskip("peft")
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    model, tokens = transformers.LlamaForCausalLM(config).eval(), torch.randint(50, (2, 7))
    update_config_(adapted(model, include=["*.q_proj"]))
    assert config.tie_word_embeddings
    update_config_(adapted(model, include=["lm_head"]))
    assert not config.tie_word_embeddings
    assert_read_back(model, {"input_ids": tokens}, tmp_path)


@pytest.mark.weekly
@pytest.mark.slow
def test_folders_are_read_without_this_package(tmp_path):
    pytest.importorskip("peft")
    config = transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)
    whole, tokens = transformers.Qwen3ForCausalLM(config).eval(), torch.randint(50, (2, 7))
    narrow, masked, merged = (copy.deepcopy(whole) for _ in range(3))
    apply_plan_(narrow, plan_without_blocks(narrow, [((tokens,), {})], 0.5)[0])
    narrow_(narrow, {"input_ids": tokens})
    update_config_(narrow)
    prune_on_data_(masked, [((tokens,), {})], 0.5)
    adapted(merged)
    expected = []
    for name, model in {"narrow": narrow, "masked": masked, "merged": merged}.items():
        model.save_pretrained(tmp_path / name)
        expected.append(model(tokens).logits)
    torch.save([tokens, *(str(tmp_path / name) for name in ("narrow", "masked", "merged"))], tmp_path / "given.pt")
    subprocess.run([sys.executable, "-c", READ, tmp_path / "given.pt", tmp_path / "read.pt"], check=True)
    for read, wanted in zip(torch.load(tmp_path / "read.pt"), expected, strict=True):
        torch.testing.assert_close(read, wanted, rtol=0, atol=0)
    assert not any(torch.equal(one, whole(tokens).logits) for one in expected)


def test_blocks_and_experts(tmp_path):
    torch.manual_seed(0)
    module, batch = ZOO["olmoe"].make().eval(), next(iter(ZOO["olmoe"].loader()))
    for make in (plan_without_blocks, plan_without_experts):
        apply_plan_(module, make(module, [((), batch)], 0.5)[0])
    update_config_(module.model)
    assert_read_back(module.model, batch, tmp_path)


@pytest.mark.slow
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
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=8)
    model = transformers.Gemma3ForCausalLM(config).eval()
    narrow_(model, {"input_ids": torch.randint(50, (2, 7))})
    with pytest.raises(ValueError, match=r"embed_scale would be 2.82.*; it is 4.0. Keep what this factor depends on"):
        update_config_(model)
    assert config.hidden_size == 16
    with pytest.raises(TypeError, match=r"Transformer is no model of transformers; give the one within it"):
        update_config_(module)
    with pytest.raises(TypeError, match="Linear is no model of transformers"):
        update_config_(nn.Linear(2, 2))
