"""Weights in integers of 4 and 8 bits with scales of blocks: rounding, packing, and the forms of ONNX Runtime."""

import copy
import math
from importlib import import_module

import pytest
import torch
from torch import nn

from lightning_accel.callbacks.deployment.deployed import find_deployed
from lightning_accel.compress import CachedDecoder, ExportError, export, load_compressed, quantize
from lightning_accel.compress.export.structure import tensors_of
from lightning_accel.compress.quantization import onnx_blockwise, onnx_products
from lightning_accel.compress.quantization.blockwise import Rounded, round_in_blocks, round_layers
from lightning_accel.compress.quantization.form import CannotConvertError, require_memory
from lightning_accel.compress.quantization.inputs import noise_share
from lightning_accel.compress.quantization.layers import find_layers
from lightning_accel.compress.quantization.onnx import onnx_dynamic, onnx_float, sharing_export, write_float
from lightning_accel.compress.quantization.onnx_blockwise import onnx_int4, onnx_int8
from lightning_accel.compress.quantization.onnx_products import pack
from lightning_accel.compress.quantization.picking import NothingPickedError
from lightning_accel.compress.quantization.trial import Limit
from lightning_accel.nn import MixtureOfExperts
from tests.zoo import ZOO

DOUBLE = torch.float64


def correlated(rows, features):
    mixed = torch.randn(rows, features, dtype=DOUBLE) @ torch.randn(features, features, dtype=DOUBLE)
    return mixed * torch.logspace(0, -2, features, dtype=DOUBLE) / math.sqrt(features)


def best_scale(row, importance, bits):
    """Return the scale of one row of a block with the smallest weighted squared error."""
    largest = max(abs(value) for value in row) / (2 ** (bits - 1) - 1) or 1.0
    shares = [1.0] if bits == 8 else [1 - 0.05 * step for step in range(7)]

    def error(share):
        scale = largest * share
        return sum(
            own * (scale * max(-(2 ** (bits - 1)), min(2 ** (bits - 1) - 1, round(value / scale))) - value) ** 2
            for own, value in zip(importance, row, strict=False)
        )

    return largest * min(shares, key=error)


def round_by_inverses(weight, products, bits, block):
    """Round columns one by one, with the inverse of what is left computed anew: the optimal brain surgeon's step."""
    importance = products.diagonal().tolist()
    products = products + 0.01 * products.diagonal().mean() * torch.eye(len(products), dtype=DOUBLE)
    weight, values = weight.clone(), torch.zeros_like(weight)
    for column in range(weight.shape[1]):
        if column % block == 0:
            places = slice(column, column + block)
            scales = torch.tensor([best_scale(row, importance[places], bits) for row in weight[:, places].tolist()])
        inverse = torch.linalg.inv(products[column:, column:])
        whole = (weight[:, column] / scales).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        values[:, column] = whole * scales
        weight[:, column:] -= (weight[:, column] - values[:, column])[:, None] * inverse[0] / inverse[0, 0]
    return values


@pytest.mark.parametrize(("bits", "block"), [(4, 32), (8, 128)])
def test_errors_are_made_up_for_as_by_inverses(bits, block):
    x, weight = correlated(500, 150), torch.randn(7, 150, dtype=DOUBLE)
    products = x.t() @ x
    rounded = round_in_blocks(weight, bits, block, products)
    expected = round_by_inverses(weight, products, bits, block)
    same = (rounded.values() - expected).abs() < 1e-4
    assert same.float().mean() > 0.97  # float32 rounds a few the other way, and then all to their right
    off = lambda values: float(((values.to(DOUBLE) - weight) @ x.t()).norm())  # noqa: E731
    assert off(rounded.values()) == pytest.approx(off(expected), rel=0.02)
    assert off(rounded.values()) < 0.7 * off(round_in_blocks(weight, bits, block).values())


def test_without_inputs_each_weight_goes_to_the_nearest():
    weight = torch.randn(5, 70)
    weight[1, :32] = 0
    rounded = round_in_blocks(weight, 4, 32)
    scales = [[best_scale(row[at : at + 32], [1.0] * 32, 4) for at in range(0, 70, 32)] for row in weight.tolist()]
    torch.testing.assert_close(rounded.scales, torch.tensor(scales))
    torch.testing.assert_close(rounded.scales.repeat_interleave(32, 1)[:, :70] * rounded.integers, rounded.values())
    assert (rounded.values() - weight)[1, :32].eq(0).all()
    assert rounded.integers.min() >= -8
    assert rounded.integers.max() <= 7


def test_layers_are_rounded_on_what_rounded_layers_make():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 40)).eval()
    x = correlated(300, 64).float()
    found = round_layers(module, [((x,), {})], ["0", "2"], 4, 32)
    first = round_in_blocks(module[0].weight.detach(), 4, 32, x.t() @ x)
    assert torch.equal(found["0.weight"][0].integers, first.integers)
    with torch.no_grad():
        hidden = nn.functional.linear(x, first.values(), module[0].bias).relu()
    second = round_in_blocks(module[2].weight.detach(), 4, 32, hidden.t() @ hidden)
    assert found["2.weight"][0].integers.eq(second.integers).float().mean() > 0.99
    assert module[0].weight.unique().numel() > 1000  # the module is not changed


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(90, 48), nn.Linear(48, 48)
        self.head = nn.Linear(48, 90, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)).relu())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tied_heads_are_rounded_on_their_inputs_and_embeddings_stay(seed):
    torch.manual_seed(seed)
    module = Tied().eval()
    module.body.requires_grad_(False)  # frozen in training, as of a base below adapters
    tokens = torch.randint(0, 20, (9, 30))
    found = round_layers(module, [((tokens,), {})], ["body", "head"], 4, 16)
    assert module.head.weight is module.embedding.weight
    with torch.no_grad():
        embedded = module.embedding(tokens).flatten(0, 1)
        hidden = nn.functional.linear(embedded, found["body.weight"][0].values(), module.body.bias).relu()
        expected = round_in_blocks(module.head.weight, 4, 16, hidden.t() @ hidden)
        plain = round_in_blocks(module.head.weight, 4, 16)
        wanted = hidden @ module.head.weight.t()
        errors = [float((hidden @ one.values().t() - wanted).norm()) for one in (found["head.weight"][0], plain)]
    assert found["head.weight"][0].integers.eq(expected.integers).float().mean() > 0.99
    assert errors[0] < 0.8 * errors[1]
    body = round_in_blocks(module.body.weight, 4, 16, embedded.t() @ embedded)
    assert (
        found["body.weight"][0].integers.eq(body.integers).float().mean() > 0.99
    )  # on what the embedding has in float


@pytest.mark.parametrize("bits", [4, 8])
def test_packs_as_it_is_read(bits):
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    integers = torch.randint(low, high, (3, 70), dtype=torch.int8)
    packed = pack(integers, bits, 32)
    assert packed.shape == (3, 3, 32 * bits // 8)
    for row, column in [(0, 0), (1, 33), (2, 69), (0, 68)]:
        block, place = divmod(column, 32)
        if bits == 8:
            value = int(packed[row, block, place])
        else:
            value = int(packed[row, block, place // 2]) >> 4 * (place % 2) & 15
        assert value + low == integers[row, column]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(70, 48), nn.Linear(48, 5, bias=False)
        self.head = nn.Linear(48, 3)

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.second(hidden), self.head(hidden)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "bits"), [(onnx_int4, 4), (onnx_int8, 8)])
def test_files_compute_what_the_integers_stand_for(make, bits, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(onnx_products, "_IN_INT8", 0)  # inputs stay float
    monkeypatch.setattr(onnx_blockwise, "BLOCK", 32)
    module, x = Net().eval(), torch.randn(40, 70)
    form = make(module, [((x,), {})], find_layers(module, ["head"]))
    assert form.name == f"int{bits} ONNX Runtime weight-only"
    assert list(form.left_float) == ["head"]
    block = onnx_blockwise.BLOCK
    known = round_layers(module, [((x,), {})], ["first", "second"], 4, block) if bits == 4 else {}
    values = {
        name: (known.get(f"{name}.weight") or [round_in_blocks(getattr(module, name).weight.detach(), bits, block)])[
            0
        ].values()
        for name in ("first", "second")
    }
    hidden = nn.functional.linear(x, values["first"], module.first.bias).relu()
    found = form.run(x[:7])
    torch.testing.assert_close(found[0], (hidden @ values["second"].t())[:7], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], module.head(hidden)[:7], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_modules_of_16_bits_are_written_in_32_and_keep_their_dtypes(dtype, tmp_path):
    pytest.importorskip("onnxruntime")
    module, x = Net().eval().to(dtype), torch.randn(40, 70).to(dtype)
    wide, calls = copy.deepcopy(module).float(), [((x,), {})]
    for make in (onnx_float, onnx_int8, onnx_int4):
        form = make(module, calls, find_layers(module))
        expected = make(wide, [((x.float(),), {})], find_layers(wide))
        found = form.run(x[:7])
        assert [one.dtype for one in found] == [dtype, dtype]
        assert all(map(torch.equal, found, [one.to(dtype) for one in expected.run(x[:7].float())]))
    assert module.first.weight.dtype == dtype
    path = export(module, calls, tmp_path / "model.onnx", "onnx", quantized=form).path
    loaded = load_compressed(path)(x[:7])
    assert [one.dtype for one in loaded] == [dtype, dtype]
    assert all(map(torch.equal, loaded, found))


class Mixture(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.mixture = MixtureOfExperts(24, 40, 5, k=2, **options)

    def forward(self, x):
        return self.mixture(x).features


def test_experts_are_rounded_on_their_own_rows():
    torch.manual_seed(3)
    module, x = Mixture().eval(), correlated(60, 24).float()
    seen = []
    hook = module.mixture.experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    for part in (x[:9], x[9:]):
        module(part)
    hook.remove()
    rounded = round_layers(module, [((x[:9],), {}), ((x[9:],), {})], ["mixture.experts"], 4, 16)
    assert set(rounded) == {"mixture.experts.up_weight", "mixture.experts.down_weight"}
    for number, weight in enumerate(module.mixture.experts.up_weight.detach()):
        own = torch.cat([tokens[slots].split(counts.tolist())[number] for tokens, slots, _, counts in seen])
        expected = round_in_blocks(weight, 4, 16, own.t() @ own)
        assert rounded["mixture.experts.up_weight"][number].integers.eq(expected.integers).float().mean() > 0.99


def with_rounded_weights(module, rounded):
    """Return a copy of a module whose weights are what the integers stand for."""
    copied = copy.deepcopy(module)
    for name, ones in rounded.items():
        values = torch.stack([one.values() for one in ones])
        weight = copied.get_parameter(name)
        weight.data = (values.mT if values.shape[-2:] != weight.shape[-2:] else values).reshape(weight.shape)
    return copied


def experts_of_transformers(name):
    """Return a decoder with fused experts; those of GPT-OSS multiply from the right, and have biases."""
    import transformers

    options = {"OlmoeForCausalLM": {"num_experts": 6}, "GptOssForCausalLM": {"head_dim": 8, "num_local_experts": 6}}
    kind = getattr(transformers, name)
    config = kind.config_class(
        vocab_size=50, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
        **options[name],
    )  # fmt: skip
    return CachedDecoder(kind(config), 20).eval()


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "ours",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gated", "GptOssForCausalLM")),
        pytest.param("OlmoeForCausalLM", marks=[pytest.mark.slow, pytest.mark.weekly]),
    ],
)
def test_products_of_experts_are_those_with_rounded_weights(name, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(onnx_products, "_IN_INT8", 0)  # inputs stay float
    monkeypatch.setattr(onnx_blockwise, "BLOCK", 16)
    if name in ("ours", "gated"):
        module = Mixture(gated=name == "gated", bias=name == "ours").eval()
        calls = [((torch.randn(7, 24),), {}), ((torch.randn(1, 24),), {})]
    else:
        pytest.importorskip("transformers")
        module = experts_of_transformers(name)
        calls = module.calls(torch.randint(2, 50, (3, 9)))
    layers = find_layers(module)
    form = onnx_int4(module, calls, layers)
    assert all(one.endswith(("gate", "router", "embed_tokens")) for one in form.left_float)
    names = [key for key, one in layers.quantized.items() if isinstance(one, nn.Linear)]
    names += [key for key, one in module.named_modules() if key.endswith("experts")]
    expected = with_rounded_weights(module, round_layers(module, calls, names, 4, 16))
    for args, _ in calls:
        with torch.no_grad():
            wanted, plain = (tensors_of(one(*args))[0] for one in (expected, module))
        found = tensors_of(form.run(*args))[0]
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
        assert not torch.allclose(found, plain, rtol=1e-2, atol=1e-3)


def split_files_above(limit, monkeypatch):
    for name in ("onnx", "writing"):
        monkeypatch.setattr(import_module(f"lightning_accel.compress.export.{name}"), "ONE_FILE", limit)


@pytest.mark.slow
def test_weights_beside_the_file_change_nothing(monkeypatch):
    """What is done above 2 GB, where one file cannot hold the float weights."""
    pytest.importorskip("onnxruntime")
    module = Tied().eval()
    module.body.requires_grad_(False)
    calls = [((torch.randint(0, 90, (5, 7)),), {})]
    whole = onnx_int8(module, calls, find_layers(module))
    split_files_above(10_000, monkeypatch)
    split = onnx_int8(module, calls, find_layers(module))
    assert torch.equal(whole.run(*calls[0][0]), split.run(*calls[0][0]))
    assert list(whole.left_float) == list(split.left_float) == ["embedding"]
    assert abs(len(whole.onnx) - len(split.onnx)) < 1000


class OfTenTokens(Tied):
    def forward(self, tokens):
        assert tokens.shape[1] == 10
        return super().forward(tokens)


class Branching(Tied):
    def forward(self, tokens):
        return super().forward(tokens) * (2 if tokens.shape[1] > 6 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_texts", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_texts_of_one_length_make_a_form_for_others(num_texts):
    pytest.importorskip("onnxruntime")
    module = Tied().eval()
    form = onnx_float(module, [((torch.randint(0, 90, (num_texts, 7)),), {})], find_layers(module))
    for shape in ((num_texts, 7), (3, 4), (2, 11)):
        tokens = torch.randint(0, 90, shape)
        torch.testing.assert_close(form.run(tokens), module(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OfTenTokens, pytest.param(Branching, marks=pytest.mark.slow)])
def test_modules_of_one_length_keep_their_rows_free(kind):
    pytest.importorskip("onnxruntime")
    module = kind().eval()
    form = onnx_float(module, [((torch.randint(0, 90, (5, 10)),), {})], find_layers(module))
    tokens = torch.randint(0, 90, (3, 10))
    torch.testing.assert_close(form.run(tokens), module(tokens), rtol=1e-5, atol=1e-5)
    with pytest.raises(Exception, match="invalid dimensions"):  # ONNX Runtime's, of no public class
        form.run(tokens[:, :5])


@pytest.mark.slow
def test_forms_of_models_above_the_size_of_a_file(monkeypatch, tmp_path):
    pytest.importorskip("onnxruntime")
    module = Tied().eval()
    calls = [((torch.randint(0, 90, (5, 7)),), {})]
    layers = find_layers(module)
    with sharing_export():
        whole = [make(module, calls, layers) for make in (onnx_float, onnx_int4)]
    split_files_above(10_000, monkeypatch)
    write_float(module, calls, tmp_path / "float.onnx")
    assert (tmp_path / "float.onnx.data").stat().st_size >= 90 * 48 * 4
    with sharing_export():
        split = [make(module, calls, layers) for make in (onnx_float, onnx_int4)]
        with pytest.raises(CannotConvertError, match="less than 2 GB"):
            onnx_dynamic(module, calls, layers)
        monkeypatch.setattr(onnx_blockwise, "ONE_FILE", 10_000)
        with pytest.raises(CannotConvertError, match=r"its file would have 0\.0 GB"):
            onnx_int4(module, calls, layers)
    for one, other in zip(whole, split, strict=True):
        assert torch.equal(one.run(*calls[0][0]), other.run(*calls[0][0]))
    assert split[0].onnx is None
    assert "less than 2 GB" in split[0].no_file
    assert split[0].file_bytes > 90 * 48 * 4
    with pytest.raises(ExportError, match=r"less than 2\. Take format='pt2'"):
        export(module, calls, tmp_path / "model.onnx", "onnx")
    assert not (tmp_path / "model.onnx").exists()
    path = export(module, calls, tmp_path / "model.onnx", "onnx", quantized=split[1]).path
    assert torch.equal(load_compressed(path)(*calls[0][0]), whole[1].run(*calls[0][0]))


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("llama", marks=pytest.mark.weekly), "gpt2", pytest.param("olmoe", marks=pytest.mark.weekly)]
)
def test_language_models_of_transformers(name):
    """Tied embeddings and grouped queries in Llama, weights of (inputs, outputs) in GPT-2, fused experts in OLMoE."""
    pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    found = find_deployed(ZOO[name].make().eval(), ZOO[name].loader(), None, 2, None)
    layers = find_layers(found.module)
    for make, limit in ((onnx_int8, 0.02), (onnx_int4, 0.2)):
        form = make(found.module, found.inputs, layers)
        left = ("embed", "wte", "wpe", "mlp.gate")
        assert not [one for one in form.left_float if not one.endswith(left) and "embed" not in one]
        args, kwargs = found.inputs[0]
        with torch.no_grad():
            assert noise_share(found.module(*args, **kwargs), form.run(*args, **kwargs)) < limit


@pytest.mark.slow
def test_four_bits_are_picked_within_a_limit_alone(uncompiled):
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval(), torch.randn(32, 64)
    calls = [((x,), {})]

    def evaluate(run):
        with torch.no_grad():
            return {"error": float((run(x) - module(x)).abs().mean())}

    name = "int4 ONNX Runtime weight-only"
    options = {"mode": "weight_only", "backend": "onnxruntime", "seconds": 0.01, "batch_sizes": [32]}
    free = quantize(module, calls, **options)
    assert "give max_drop" in free.refused[name]
    assert free.name == "int8 ONNX Runtime weight-only"
    assert next(row for row in free.report.rows if row.name == name).latencies  # it is measured all the same
    within = quantize(module, calls, **options, limit=Limit(evaluate, "error", 1.0, higher_is_better=False))
    assert name in {*within.ties, within.name}
    tight = Limit(evaluate, "error", 0.0, higher_is_better=False)
    with pytest.raises(NothingPickedError) as failure:
        quantize(module, calls, **options, limit=tight)
    assert "error is" in str(failure.value)
    plain = quantize(module, calls, "auto", "onnxruntime", seconds=0.01, batch_sizes=[32])
    assert name not in {row.name for row in plain.report.rows}  # nor made


def test_forms_that_need_more_memory_than_is_free_are_not_made(monkeypatch, tmp_path):
    """The weights have 72,000 bytes."""
    pytest.importorskip("onnxruntime")
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr("lightning_accel.compress.quantization.form._MEMORY", meminfo)
    module = nn.Linear(180, 100, bias=False)
    meminfo.write_text("MemFree: 7 kB\nMemAvailable: 142 kB\n")
    require_memory(module, 2.0)
    with pytest.raises(CannotConvertError, match=r"it needs about 0\.0 GB of memory, and 0\.0 are free"):
        require_memory(module, 3.0)
    meminfo.write_text("MemAvailable: 90 kB\n")
    with pytest.raises(NothingPickedError, match="of memory, and"):
        quantize(module, [((torch.randn(4, 180),), {})], "weight_only", "onnxruntime", seconds=0.01)
    meminfo.unlink()
    require_memory(module, 1e9)  # systems that do not tell


def test_values_have_the_last_block_cut():
    rounded = Rounded(torch.ones(2, 5, dtype=torch.int8), torch.tensor([[2.0, 3.0], [4.0, 5.0]]), block=3)
    assert rounded.values().tolist() == [[2.0] * 3 + [3.0] * 2, [4.0] * 3 + [5.0] * 2]
