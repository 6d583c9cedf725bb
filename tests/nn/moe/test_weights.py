from functools import partial

import pytest
import torch

from lightning_accel.nn import MixtureOfExperts, TopKGate, read_transformers, write_transformers

DIM, HIDDEN, EXPERTS = 10, 6, 11


def ours(**kwargs):
    options = {"activation": "silu", "gated": True, "bias": False, **kwargs}
    return MixtureOfExperts(DIM, HIDDEN, EXPERTS, 2, **options)


def mixtral():
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = modeling.MixtralConfig(
        hidden_size=DIM, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2
    )
    return modeling.MixtralSparseMoeBlock(config), ours()


def olmoe():
    modeling = pytest.importorskip("transformers.models.olmoe.modeling_olmoe")
    config = modeling.OlmoeConfig(
        hidden_size=DIM, intermediate_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=2, norm_topk_prob=False
    )
    return modeling.OlmoeSparseMoeBlock(config), ours(gate=partial(TopKGate, normalize=False))


def deepseek():
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=DIM, moe_intermediate_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=1,
        topk_group=1, n_shared_experts=2, routed_scaling_factor=2.5,
    )  # fmt: skip
    gate = partial(TopKGate, score="sigmoid", scale=2.5)
    return modeling.DeepseekV3MoE(config), ours(gate=gate, shared_dim=2 * HIDDEN)


@pytest.mark.parametrize("backend", ["blocks", "loop"])
@pytest.mark.parametrize("make", [mixtral, olmoe, deepseek])
def test_matches_the_block_of_transformers(make, backend):
    block, mixture = make()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    missing, unexpected = mixture.load_state_dict(read_transformers(block.state_dict()), strict=False)
    assert (missing, unexpected) == (["gate.expert_slots"], [])
    mixture.experts.backend = backend
    x = torch.randn(3, 7, DIM, requires_grad=True)
    expected, actual = block(x), mixture(x).features
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    probe = torch.randn_like(expected)
    names = ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    theirs = torch.autograd.grad(expected, [x, *(block.get_parameter(name) for name in names)], probe)
    names = ["gate.weight", "experts.up_weight", "experts.down_weight"]
    own = torch.autograd.grad(actual, [x, *(mixture.get_parameter(name) for name in names)], probe)
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("make", [mixtral, olmoe])
def test_block_of_transformers_takes_what_was_written(make):
    block, mixture = make()
    block.load_state_dict(write_transformers(mixture.state_dict(), "stacked"))
    x = torch.randn(3, 7, DIM)
    torch.testing.assert_close(block(x), mixture(x).features, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("naming", ["mixtral", "olmoe", "stacked"])
def test_there_and_back(naming):
    state = ours().state_dict()
    written = write_transformers(state, naming, prefix="model.layers.3.block.")
    back = read_transformers({"model.norm": torch.ones(2)} | written, prefix="model.layers.3.block.")
    assert back.keys() == state.keys() - {"gate.expert_slots"}
    torch.testing.assert_close(back, {name: state[name] for name in back}, rtol=0, atol=0)


def test_names_are_those_of_the_files():
    """https://huggingface.co/mistralai/Mixtral-8x7B-v0.1 and allenai/OLMoE-1B-7B-0924, model.safetensors.index.json."""
    state = ours().state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in write_transformers(state, "mixtral").items()}
    assert shapes["block_sparse_moe.gate.weight"] == (EXPERTS, DIM)
    assert shapes["block_sparse_moe.experts.4.w1.weight"] == (HIDDEN, DIM)
    assert shapes["block_sparse_moe.experts.4.w2.weight"] == (DIM, HIDDEN)
    assert shapes["block_sparse_moe.experts.4.w3.weight"] == (HIDDEN, DIM)
    written = write_transformers(state, "olmoe")
    gate = written["mlp.experts.1.gate_proj.weight"]
    torch.testing.assert_close(gate, state["experts.up_weight"][1, :HIDDEN])
    assert gate.untyped_storage().nbytes() == gate.nbytes
    assert "mlp.experts.1.up_proj.weight" in written
    assert "mlp.experts.1.down_proj.weight" in written


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"no place for experts.down_bias, experts.up_bias, shared.down.bias"):
        write_transformers(ours(bias=True, shared_dim=3).state_dict(), "olmoe")
    with pytest.raises(ValueError, match="make the mixture with gated=True"):
        write_transformers(ours(gated=False).state_dict(), "mixtral")
    written = write_transformers(ours().state_dict(), "mixtral")
    with pytest.raises(
        ValueError, match=r"no x.gate.weight among the weights; such as block_sparse_moe.gate.*Set prefix"
    ):
        read_transformers(written, prefix="x.")
    biased = written | {"block_sparse_moe.gate.e_score_correction_bias": torch.zeros(EXPERTS)}
    assert read_transformers(biased, prefix="block_sparse_moe.").keys() == ours().state_dict().keys() - {
        "gate.expert_slots"
    }
    for name in (
        "e_score_correction_bias",
        "gate.e_score_correction_bias",
        "shared_expert_gate.weight",
        "experts.0.w1.bias",
    ):
        with pytest.raises(ValueError, match=f"no place for block_sparse_moe.{name}, and would compute something else"):
            read_transformers(written | {f"block_sparse_moe.{name}": torch.ones(3)}, prefix="block_sparse_moe.")
    with pytest.raises(ValueError, match=r"no block_sparse_moe.shared_experts.gate_proj.weight among the weights, but"):
        read_transformers(
            written | {"block_sparse_moe.shared_experts.up_proj.weight": torch.ones(3)}, prefix="block_sparse_moe."
        )
    del written["block_sparse_moe.experts.2.w3.weight"]
    with pytest.raises(ValueError, match=r"no block_sparse_moe.experts.2.w3.weight among the weights, nor"):
        read_transformers(written, prefix="block_sparse_moe.")
