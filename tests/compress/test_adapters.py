import copy
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_accel import MoELanguageModel
from lightning_accel.compress import add_adapters_, load_adapted, merge_adapters_
from lightning_accel.compress.adapters import (
    adapter_parameters,
    dequantized,
    digest_of_base,
    has_adapters,
    trained_state,
)
from lightning_accel.models import Experts
from tests.tolerance import CLOSE

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.usefixtures("eager")


def net(dtype=torch.float64):
    layers = OrderedDict(first=nn.Linear(5, 7), act=nn.Tanh(), second=nn.Linear(7, 6, bias=False), head=nn.Linear(6, 3))
    return nn.Sequential(layers).to(dtype)


def drawn(module, std=0.3):
    """Give the adapters weights as of some training; B is zero at first."""
    for value in adapter_parameters(module).values():
        nn.init.normal_(value, std=std)
    return module


def zeroed(module, *names):
    """Set two of five weights of layers to zero."""
    with torch.no_grad():
        for name in names:
            weight = module.get_submodule(name).weight
            weight[torch.rand_like(weight) < 0.4] = 0
    return module


def masks(module):
    return {name: value.ne(0) for name, value in module.named_parameters() if value.ndim == 2}


@pytest.mark.parametrize(
    ("options", "scale"),
    [({"alpha": 6.0}, 2), ({}, 2), ({"alpha": 3.0, "options": {"use_rslora": True}}, 3**0.5)],
    ids=["alpha", "by default", "stabilized"],
)
def test_layers_add_a_product_of_the_rank(options, scale):
    module, x = net(), torch.randn(4, 5, dtype=torch.float64)
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    plain = module(x)
    add_adapters_(module, 3, **options)
    assert module(x).equal(plain), "B is zero"
    drawn(module)
    first, second = (module.get_submodule(name) for name in ("first", "second"))
    a, b = first.lora_A["default"].weight, first.lora_B["default"].weight
    assert (a.shape, b.shape) == ((3, 5), (7, 3))
    hidden = torch.tanh(x @ before["first.weight"].T + before["first.bias"] + scale * x @ a.T @ b.T)
    a, b = second.lora_A["default"].weight, second.lora_B["default"].weight
    output = hidden @ before["second.weight"].T + scale * hidden @ a.T @ b.T
    expected = output @ before["head.weight"].T + before["head.bias"]
    torch.testing.assert_close(module(x), expected)
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    assert trained == set(adapter_parameters(module))
    assert len(trained) == 4, "the head has none"

    adapted = module(x)
    assert merge_adapters_(module) is module
    torch.testing.assert_close(module(x), adapted)
    torch.testing.assert_close(second.base_layer.weight, before["second.weight"] + scale * b @ a)
    assert list(module.state_dict()) == list(before)
    assert type(module.first) is nn.Linear
    assert all(value.requires_grad for value in module.parameters())


def test_layers_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=12, n_layer=1, n_head=2, **sizes)).eval()
    names, tokens = list(gpt2.state_dict()), torch.randint(50, (2, 5))
    plain = gpt2(tokens).logits
    zeroed(gpt2, "transformer.h.0.mlp.c_fc")
    drawn(add_adapters_(gpt2, 2))
    adapted = gpt2(tokens).logits
    zeros = gpt2.transformer.h[0].mlp.c_fc.base_layer.weight.eq(0)
    assert not hasattr(gpt2.lm_head, "lora_A"), "its weight is that of the embedding"
    merge_adapters_(gpt2)
    torch.testing.assert_close(gpt2(tokens).logits, adapted)
    assert not torch.allclose(adapted, plain)
    assert list(gpt2.state_dict()) == names
    assert gpt2.transformer.h[0].mlp.c_fc.weight.eq(0).equal(zeros)
    with pytest.raises(ValueError, match=r"stores nn.Linear in 4 bits, and adapters go to Conv1D; take base='float'"):
        add_adapters_(gpt2, 2, base="nf4")


def test_a_tied_head_that_is_adapted_gets_a_weight_of_its_own():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 5)
            self.output = nn.Linear(5, 9, bias=False)
            self.output.weight = self.embedding.weight

        def forward(self, tokens):
            return self.output(self.embedding(tokens))

    module, tokens = Tied(), torch.randint(9, (4, 3))
    embedding = module.embedding.weight.detach().clone()
    with pytest.raises(ValueError, match="no linear layer to adapt beside heads, gates and shared ones"):
        add_adapters_(module)
    adapted = drawn(add_adapters_(module, 2, include="output"))(tokens)
    torch.testing.assert_close(merge_adapters_(module)(tokens), adapted)
    assert module.embedding.weight.equal(embedding)
    assert module.output.weight is not module.embedding.weight


# ---- pruned weights


@pytest.mark.parametrize("base", ["float", "nf4"])
def test_zeros_stay_zero_and_the_merged_weights_give_the_outputs_of_training(base):
    module, x = zeroed(net(torch.float32), "first"), torch.randn(4, 5)
    zeros = module.first.weight.eq(0)
    drawn(add_adapters_(module, 3, alpha=3, base=base))
    first = module.first
    weight = first.base_layer.weight if base == "float" else dequantized(first.base_layer)
    delta = first.lora_B["default"].weight @ first.lora_A["default"].weight
    hidden = x @ (weight + weight.ne(0) * delta).T + first.base_layer.bias
    torch.testing.assert_close(first(x), hidden)
    (loss := module(x).square().sum()).backward()
    assert loss > 0
    assert first.lora_A["default"].weight.grad.count_nonzero() == 15
    adapted = module(x)
    torch.testing.assert_close(merge_adapters_(module)(x), adapted)
    assert module.first.weight[zeros].eq(0).all()
    assert module.second.weight.ne(0).all(), "it was dense"


def test_zeros_that_would_be_filled_are_refused():
    with pytest.raises(TypeError, match=r"^first is pruned.*plain LoRA keep them. Leave out use_dora$"):
        add_adapters_(zeroed(net(), "first"), 2, options={"use_dora": True})
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2))
    zeroed(network, "0")
    with pytest.raises(TypeError, match=r"^0 is pruned.*those of linear layers keep them. Name them in exclude$"):
        add_adapters_(network, 2, include=["Conv2d", "Linear"])
    add_adapters_(network, 2, include=["Conv2d", "Linear"], exclude="0")


# ---- 4 bits


def test_four_bits_are_those_of_bitsandbytes_and_of_the_table():
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    module, x = nn.Sequential(nn.Linear(80, 12), nn.ReLU(), nn.Linear(12, 64)), torch.randn(3, 80)
    weights = [module[0].weight.detach().clone(), module[2].weight.detach().clone()]
    add_adapters_(module, 2, base="nf4")
    # rows are padded to whole blocks: bitsandbytes 0.50 gives others wrong scales on CPUs with AVX-512
    assert [module[0].base_layer.weight.numel(), module[2].base_layer.weight.numel()] == [12 * 128 // 2, 64 * 64 // 2]
    values = [dequantized(module[0].base_layer), dequantized(module[2].base_layer)]
    padded = [F.pad(weight, (0, -weight.shape[1] % 64)) for weight in weights]
    for weight, whole, value in zip(weights, padded, values, strict=True):
        packed, state = quantize_4bit(whole, blocksize=64, compress_statistics=True, quant_type="nf4")
        assert value.equal(dequantize_4bit(packed, state)[:, : weight.shape[1]])
    # Dettmers et al. 2023, appendix E, of 16 quantiles of a normal distribution
    table = torch.tensor(
        [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
         0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
    )  # fmt: skip
    for whole, value in zip(padded, values, strict=True):
        blocks = whole.reshape(-1, 64)
        found = F.pad(value, (0, whole.shape[1] - value.shape[1])).reshape(-1, 64)
        largest = blocks.abs().amax(dim=1, keepdim=True)
        nearest = (blocks / largest).unsqueeze(-1).sub(table).abs().argmin(dim=-1)
        step = largest.max() - largest.min()  # scales are in 8 bits themselves, of such steps
        torch.testing.assert_close(found, table[nearest] * largest, rtol=0, atol=float(step) / 100 + 1e-6)
    for options in {"use_dora": True}, {"init_lora_weights": "olora"}:
        own = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 8))
        with pytest.raises(ValueError, match=f"{next(iter(options))} of peft .* multiple of 64, as those of 1: name"):
            add_adapters_(own, 2, base="nf4", options=options)
        add_adapters_(own, 2, base="nf4", options=options, exclude="1")
        assert own(torch.randn(2, 64)).shape == (2, 8)
    with pytest.raises(ValueError, match=r"Linear4bit\(in_features=80\) takes x \(..., 80\); got \(3, 79\)"):
        module(x[:, 1:])
    first = x @ values[0].T + module[0].base_layer.bias
    torch.testing.assert_close(module(x), first.relu() @ values[1].T + module[2].base_layer.bias, **CLOSE)


def test_weights_in_four_bits_are_merged_in_floats_and_copied():
    module, x = net(torch.float32), torch.randn(4, 5)
    drawn(add_adapters_(module, 3, base="nf4"))
    adapted, digest = module(x), digest_of_base(module)
    other = copy.deepcopy(module)
    assert digest_of_base(other) == digest
    torch.testing.assert_close(merge_adapters_(other)(x), adapted)
    assert type(other.first) is nn.Linear
    assert other.first.weight.dtype == torch.float32
    assert has_adapters(module)
    assert not has_adapters(other)
    module.to(torch.bfloat16)  # as a precision plug-in does
    torch.testing.assert_close(module(x.bfloat16()).float(), adapted, rtol=0.1, atol=0.1)
    assert [name for name in module.state_dict() if name.startswith("first.base")] == [
        "first.base_layer.weight", "first.base_layer.bias",
    ]  # fmt: skip


# ---- what gets adapters


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = MoELanguageModel(
            11, dim=16, num_layers=1, attention={"num_heads": 2}, experts=Experts(4, hidden_dim=6)
        )

    def forward(self, tokens):
        return self.model(tokens)[0]


def test_stacked_weights_of_experts():
    module, tokens = Language().eval(), torch.randint(11, (2, 6))
    stacked = [name for name, value in module.named_parameters() if value.ndim == 3]
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    add_adapters_(copy.deepcopy(module), 2)  # linear layers alone
    drawn(add_adapters_(module, 2, include=stacked))
    adapted = module(tokens)
    adapted.sum().backward()
    assert all(value.grad is not None for value in adapter_parameters(module).values())
    merge_adapters_(module)
    torch.testing.assert_close(module(tokens), adapted)
    changed = [name for name, value in module.state_dict().items() if not value.equal(before[name])]
    assert changed == stacked
    assert len(stacked) >= 2


def test_convolutions_and_what_trains_in_full():
    module, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)),
        torch.randn(2, 3, 4, 4),
    )
    add_adapters_(module, 2, include=["Conv2d"], train=["3", "1.bias"])
    trained = [name for name, value in module.named_parameters() if value.requires_grad and ".lora_" not in name]
    assert trained == ["1.bias", "3.weight", "3.bias"]
    assert list(trained_state(module)) == [
        "0.lora_A.default.weight", "0.lora_B.default.weight", "1.bias", "1.running_mean", "1.running_var",
        "1.num_batches_tracked", "3.weight", "3.bias",
    ]  # fmt: skip
    adapted = drawn(module.eval())(x)
    torch.testing.assert_close(merge_adapters_(module)(x), adapted, **CLOSE)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_inference_of_a_transformer_calls_the_layers_whose_weights_it_would_read():
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0, batch_first=True)
    module, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 4, 8)
    drawn(add_adapters_(module, 2))
    assert [name for name in adapter_parameters(module) if "out_proj" in name] == []
    expected = module(x)
    padding = torch.tensor([[False] * 4, [False] * 3 + [True], [False] * 4])
    padded = module(x, src_key_padding_mask=padding)
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected)
        torch.testing.assert_close(module(x, src_key_padding_mask=padding)[~padding], padded[~padding])
        torch.testing.assert_close(merge_adapters_(module)(x), expected)


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(ValueError, match=r"include has 'q_proj', which is no parameter, submodule .* first"):
        add_adapters_(net(), include="q_proj")
    with pytest.raises(ValueError, match=r"train has 'norm'"):
        add_adapters_(net(), train="norm")
    with pytest.raises(ValueError, match=r"Sequential has no linear layer to adapt beside .*it consists of GRU, ReLU"):
        add_adapters_(nn.Sequential(nn.GRU(3, 4), nn.ReLU()))
    with pytest.raises(ValueError, match=r"no linear layer to adapt among those that include names"):
        add_adapters_(net(), include="act")
    with pytest.raises(ValueError, match=r"^first would train in full and get adapters"):
        add_adapters_(net(), train="first", include="first")
    with pytest.raises(ValueError, match=r"has adapters already"):
        add_adapters_(add_adapters_(net()))
    for options, message in {"rank": "rank must be at least 1; got 0", "alpha": "alpha must be above 0"}.items():
        with pytest.raises(ValueError, match=message):
            add_adapters_(net(), **{options: 0})
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\); got 1"):
        add_adapters_(net(), dropout=1)
    with pytest.raises(ValueError, match=r"base must be one of float, nf4; got 'int8'"):
        add_adapters_(net(), base="int8")


def test_a_checkpoint_without_adapters():
    with pytest.raises(ValueError, match="written without LowRankAdapters"):
        load_adapted(net(), {"state_dict": net().state_dict()})
