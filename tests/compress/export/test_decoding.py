import json
import math
import sys
from functools import cache
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from lightning_accel.callbacks import Export, Quantization
from lightning_accel.compress import CachedDecoder, export, load_compressed, quantize
from lightning_accel.compress.export import loading
from lightning_accel.compress.quantization.decoding import quantize_decoder
from lightning_accel.compress.quantization.form import Form
from lightning_accel.compress.quantization.layers import find_layers
from lightning_accel.compress.quantization.onnx_blockwise import onnx_int8
from lightning_accel.compress.quantization.trial import Trial
from lightning_accel.compress.report.progress import Progress
from lightning_accel.models import MoELanguageModel
from lightning_accel.ops.token_sampling import draw_tokens
from tests.zoo import ZOO

SLOW = pytest.mark.slow
MAX_LENGTH = 14


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "ours":
        return MoELanguageModel(
            vocab_size=24, dim=8, num_layers=2, attention={"num_heads": 2, "num_key_value_heads": 1}
        ).eval()
    pytest.importorskip("transformers")
    return ZOO[name].make().model.eval().requires_grad_(False)


def prompts(batch: int = 3, length: int = 6) -> torch.Tensor:
    return torch.arange(batch * length).view(batch, length) * 7 % 24


def most_probable(model: nn.Module, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Continue ``tokens`` by whole forward passes."""
    options = {} if isinstance(model, MoELanguageModel) else {"use_cache": False}
    with torch.no_grad():
        for _ in range(count):
            following = model(tokens, **options).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], 1)
    return tokens


OFTEN = ("ours", "onnx"), ("mistral", "onnx"), ("gpt2", "pt2"), ("olmoe", "pt2")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns a model and the file of its decoder, which is written once."""

    @cache
    def write(name: str, format: str) -> tuple[nn.Module, Path]:
        model = model_of(name)
        decoder = CachedDecoder(model, MAX_LENGTH)
        path = tmp_path_factory.mktemp("decoder") / f"model.{format}"
        return model, export(decoder, decoder.calls(prompts()), path, format).path

    return write


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format"),
    [
        pytest.param(name, format, marks=[] if (name, format) in OFTEN else [pytest.mark.weekly])
        for name in ("ours", "gpt2", "llama", "mistral", "qwen3", "olmoe")
        for format in ("pt2", "onnx")
    ],
)
def test_files_continue_texts_as_whole_forward_passes_do(name, format, written):
    """Mistral's window of 8 tokens is shorter than the texts, and Llama's heads share keys and values."""
    model, path = written(name, format)
    loaded = load_compressed(path)
    for tokens in (prompts(), prompts(1, 1), prompts(2, MAX_LENGTH - 1)):
        count = min(7, MAX_LENGTH - tokens.shape[1])
        torch.testing.assert_close(
            loaded.generate(tokens, count, temperature=0), most_probable(model, tokens, count), rtol=0, atol=0
        )
    with pytest.raises(ValueError, match=rf"up to {MAX_LENGTH} tokens; got prompts \(B, T\) \(3, 6\) .* by 9"):
        loaded.generate(prompts(), 9)
    with pytest.raises(ValueError, match=r"at least one token, .* got \(6,\) and 2"):
        loaded.generate(prompts()[0], 2)
    with pytest.raises(ValueError, match="temperature must be at least 0; got -1"):
        loaded.generate(prompts(), 2, temperature=-1)


@pytest.mark.slow
def test_texts_end_at_the_end_token(written, monkeypatch):
    loaded = load_compressed(written("ours", "pt2")[1])
    drawn = iter([[[1], [2]], [[9], [3]], [[4], [9]]])
    monkeypatch.setattr(loading, "draw_tokens", lambda *_: torch.tensor(next(drawn)))
    assert loaded.generate(prompts(2, 2), 5, end_token=9)[:, 2:].tolist() == [[1, 9, 9], [2, 3, 9]]


def test_drawn_tokens_follow_their_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(4000, 1)
    drawn = draw_tokens(logits, 0.5, 3, torch.Generator().manual_seed(0))
    expected = torch.tensor([0.0, 2.0, 4.0]).softmax(0)
    shares = torch.bincount(drawn[:, 0], minlength=4) / len(logits)
    torch.testing.assert_close(shares, torch.cat([expected, torch.zeros(1)]), atol=0.02, rtol=0)


class Text(nn.Module):
    """Return logits that differ with a cache, as those of a model do that attends to all places of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of("ours")
        self.blocks = self.inner.blocks

    def forward(self, tokens, caches=None):
        output = self.inner(tokens, caches)
        return output._replace(logits=output.logits + (caches is not None))


def test_models_without_such_a_cache_are_refused(tmp_path):
    with pytest.raises(TypeError, match="Linear has no cache of keys and values that can be an argument"):
        CachedDecoder(nn.Linear(3, 2), 8)
    with pytest.raises(TypeError, match=r"^Sequential has no cache .* MoELanguageModel\. Take module='1', which has$"):
        CachedDecoder(nn.Sequential(nn.Identity(), model_of("ours")), 8)
    with pytest.raises(ValueError, match="max_length must be at least 3"):
        CachedDecoder(model_of("ours"), 2)
    with pytest.raises(
        TypeError, match=r"with a cache of fixed length, logits of Text differ by [\d.]+ of the largest"
    ):
        CachedDecoder(Text(), 8).calls(prompts())
    with pytest.raises(ValueError, match=r"of 2 to 7 tokens, one less than max_length; got \(3, 8\)"):
        CachedDecoder(model_of("ours"), 8).calls(prompts(3, 8))
    with pytest.raises(ValueError, match="GPT2LMHeadModel has positions for 24 tokens; got max_length=25"):
        CachedDecoder(model_of("gpt2"), 25)
    apart = MoELanguageModel(24, dim=8, attention={"num_heads": 2, "separate_documents": True})
    with pytest.raises(TypeError, match=r"MoELanguageModel separates documents, .* Export it without max_length"):
        CachedDecoder(apart, 6)
    with pytest.raises(TypeError, match="T5ForConditionalGeneration has an encoder"):
        CachedDecoder(model_of("t5"), 8)
    net = nn.Linear(3, 2)
    plain = load_compressed(export(net, [((torch.rand(4, 3),), {})], tmp_path / "m.pt2").path)
    with pytest.raises(TypeError, match="keeps no keys and values of previous tokens"):
        plain.generate(prompts(), 2)


@SLOW
def test_positions_that_change_with_the_length_of_the_text_are_refused():
    transformers = pytest.importorskip("transformers")
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.5, 2.0],
        "original_max_position_embeddings": 12,
    }  # fmt: skip
    config = transformers.Phi3Config(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
        max_position_embeddings=64, original_max_position_embeddings=12, rope_parameters=rope, initializer_range=0.3,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.Phi3ForCausalLM(config).eval()
    CachedDecoder(model, 12).calls(prompts())
    with pytest.raises(TypeError, match="at texts of other lengths perhaps, on which its positions depend"):
        CachedDecoder(model, 30).calls(prompts())


@pytest.mark.weekly
@SLOW
def test_half_precision_may_differ_by_its_roundings(tmp_path):
    model = model_of("llama")
    for weight in model.parameters():  # as large as those of a trained model
        weight.mul_(10 if weight.ndim > 1 else 1)
    model.bfloat16()
    decoder = CachedDecoder(model, MAX_LENGTH)
    loaded = load_compressed(export(decoder, decoder.calls(prompts()), tmp_path / "m.pt2").path)
    assert loaded.generate(prompts(), 2, temperature=0).shape == (3, 8)


@SLOW
def test_layers_that_keep_states_are_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.RecurrentGemmaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, lru_width=16
    )
    with pytest.raises(TypeError, match="Export it without max_length"):
        CachedDecoder(transformers.RecurrentGemmaForCausalLM(config).eval(), 8).calls(prompts())


@SLOW
@pytest.mark.weekly
def test_quantized_decoders(tmp_path, uncompiled):
    model = model_of("llama")
    decoder = CachedDecoder(model, MAX_LENGTH).eval()
    calls = decoder.calls(prompts())
    form = quantize(decoder, calls, "dynamic", "torchao", seconds=0.02)
    loaded = load_compressed(export(decoder, calls, tmp_path / "m.pt2", quantized=form).path)
    followed = loaded.generate(prompts(), 1, temperature=0)
    assert followed.shape == (3, 7)
    torch.testing.assert_close(loaded(*calls[1][0]).logits, decoder(*calls[1][0]).logits, atol=0.05, rtol=0.2)


@pytest.mark.slow
@pytest.mark.weekly
@SLOW
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.weekly), "ours"])
def test_compiled_once_for_prompts_of_all_lengths(name, written, monkeypatch):
    (model, path), made = written(name, "pt2"), []
    loaded = load_compressed(path, compiled=True)
    compile_frozen = loading.compile_frozen
    monkeypatch.setattr(loading, "compile_frozen", lambda *args: made.append(1) or compile_frozen(*args))
    for tokens in (prompts(), prompts(2, 9)):
        assert torch.equal(loaded.generate(tokens, 3, temperature=0), most_probable(model, tokens, 3))
    assert len(made) == 1


def fit(module: L.LightningModule, name: str, folder, *callbacks: L.Callback) -> None:
    trainer = L.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(module, ZOO[name].loader(), ZOO[name].loader(4))


@pytest.mark.weekly
@SLOW
def test_export_after_a_fit(tmp_path):
    pytest.importorskip("transformers")
    module, callback = ZOO["llama"].make(), Export(module="model", max_length=MAX_LENGTH, compare=False)
    fit(module, "llama", tmp_path, callback)
    loaded, model = load_compressed(callback.exported.path), module.model.eval()
    assert torch.equal(loaded.generate(prompts(), 4, temperature=0), most_probable(model, prompts(), 4))
    assert [row["name"] for row in callback.report.as_dict()["rows"]] == ["fp32 eager", "pt2 file"]


@SLOW
@pytest.mark.weekly
@pytest.mark.parametrize("one_file", [2**31, 10_000], ids=["one_file", "split"])
def test_the_decoder_is_written_in_the_form_that_is_fastest_at_a_token(one_file, tmp_path, monkeypatch, uncompiled):
    """Float weights of more than ``one_file`` bytes are in a file of their own, as above 2 GB."""
    pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(sys.modules["lightning_accel.compress.export.onnx"], "ONE_FILE", one_file)
    module = ZOO["llama"].make()
    quantization = Quantization(
        "weight_only", "onnxruntime", module="model", exclude=["model.lm_head"], monitor="val_loss", monitor_mode="min",
        max_drop=1.0, seconds=0.05,
    )  # fmt: skip
    export = Export(module="model", max_length=MAX_LENGTH, compare=False)
    fit(module, "llama", tmp_path, quantization, export)
    forms = {"int8 ONNX Runtime weight-only", "int4 ONNX Runtime weight-only"}
    assert quantization.result.name in forms
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "decoding.json", "decoding.png", "decoding_frontier.png", "export.json", "export.png"
    }  # fmt: skip
    rows = {row["name"]: row for row in json.loads((tmp_path / "figures/decoding.json").read_text())["rows"]}
    before, picked = rows["fp32 eager"], rows[quantization.result.name]
    for row in (before, *(rows[name] for name in forms)):
        assert row["metrics"]["perplexity"] == pytest.approx(math.exp(row["metrics"]["val_loss"]), rel=1e-5)
        assert row["latencies"].keys() == row["prompts"].keys() == {"1", "4"}
        assert row["tokens_per_second"]["prompt"]["4"] == pytest.approx(4 * 12e3 / row["prompts"]["4"]["p50_ms"])
    assert next(iter(rows)) == "fp32 eager"
    assert all("model.lm_head" in rows[name]["note"] for name in forms)
    assert before["metrics"]["perplexity"] != picked["metrics"]["perplexity"]
    assert min(before["memory_bytes"], picked["memory_bytes"]) > 0
    assert before["file_bytes"] > 4 * sum(one.numel() for one in module.model.parameters())
    assert export.exported.path.suffix == ".onnx"
    decoder = CachedDecoder(module.model.eval(), MAX_LENGTH)
    (args, _), _ = decoder.calls(prompts())
    exact, found = decoder(*args).logits, quantization.result.run(*args).logits
    assert 1e-6 < (found - exact).abs().max() < 0.2 * exact.abs().max()
    texts = load_compressed(export.exported.path).generate(prompts(), 4, temperature=0)
    assert torch.equal(texts[:, prompts().shape[1]], found.argmax(-1))


@SLOW
@pytest.mark.weekly
def test_forms_made_of_single_texts_take_several(tmp_path):
    pytest.importorskip("onnxruntime")
    decoder = CachedDecoder(model_of("ours"), MAX_LENGTH).eval()
    calls = decoder.calls(prompts()[:1])
    form = onnx_int8(decoder, calls, find_layers(decoder))
    loaded = load_compressed(export(decoder, calls, tmp_path / "model.onnx", "onnx", quantized=form).path)
    (args, _), _ = decoder.calls(prompts())
    torch.testing.assert_close(loaded(*args), form.run(*args))
    assert loaded.generate(prompts(), 2, temperature=0).shape == (3, prompts().shape[1] + 2)


@pytest.mark.slow
@pytest.mark.weekly
@SLOW
def test_forms_that_were_refused_for_the_model_are_not_made_of_its_decoder():
    pytest.importorskip("onnxruntime")
    names = [f"int{bits} ONNX Runtime weight-only" for bits in (8, 4)]
    decoder = CachedDecoder(model_of("ours"), MAX_LENGTH)
    judged = Trial(decoder.model, [], names, None, None, Progress(None))
    judged.made = dict.fromkeys(names, Form("", decoder.model))
    judged.refused, judged.figures = {names[1]: "val/loss is 2 worse"}, {name: {"val/loss": 3.0} for name in names}
    result = quantize_decoder(decoder, [prompts(), prompts(2)], judged, seconds=0.01)
    assert result.name == names[0]
    rows = {row.name: row for row in result.report.rows}
    assert list(rows) == ["fp32 eager", *names]
    refused = rows[names[1]]
    assert (refused.status, refused.note, refused.metrics) == ("refused", "val/loss is 2 worse", {"val/loss": 3.0})
    assert not refused.latencies
    assert not refused.prompts
    assert rows["fp32 eager"].latencies.keys() == rows[names[0]].prompts.keys() == {1, 3}
    assert not judged.made


def test_what_cannot_work_is_refused_before_training(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(TypeError, match=r"BertForSequenceClassification has no cache .*Export it without max_length"):
        fit(ZOO["bert"].make(), "bert", tmp_path, Export(module="model", max_length=MAX_LENGTH))
    with pytest.raises(ValueError, match=r"Export\(max_length=...\) writes a decoder; take mode='weight_only'"):
        fit(ZOO["llama"].make(), "llama", tmp_path, Export(max_length=MAX_LENGTH), Quantization("qat"))
    with pytest.raises(ValueError, match="leave preprocess and postprocess"):
        Export(max_length=8, postprocess="probabilities")
    with pytest.raises(ValueError, match="called with prompts and single tokens: leave dynamic=True"):
        Export(max_length=8, dynamic=False)
    with pytest.raises(
        TypeError, match=r"Export would fail .*LlamaModel does not run .* no attribute 'logits'"
    ) as error:
        fit(ZOO["llama"].make(), "llama", tmp_path, Export(module="model.model", max_length=MAX_LENGTH))
    assert "Export(module=" not in str(error.value)
    with pytest.raises(ValueError, match=r"Export would fail .*positions for 24 tokens; got max_length=25"):
        fit(ZOO["llama"].make(), "llama", tmp_path, Export(module="model", max_length=25))
