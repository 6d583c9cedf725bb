"""Quantization beside an Export of a decoder of text: what it validates by."""

import math
from functools import partial

import lightning as L
import pytest
import torch

from lightning_accel.callbacks import Export, Quantization
from lightning_accel.compress import Quantized, Report
from tests.zoo import ZOO, Transformer

JUDGED = "lightning_accel.callbacks.deployment.quantization.judge"
PICKED = "lightning_accel.callbacks.deployment.quantization.quantize_decoder"


class Unwritten(Export):
    """Declare that a decoder is written, and write none."""

    def on_fit_start(self, trainer, pl_module):
        pass

    def on_fit_end(self, trainer, pl_module):
        pass


def fit(module, folder, *callbacks):
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(module, ZOO["llama"].loader(), ZOO["llama"].loader(4))
    return trainer


@pytest.mark.slow
def test_forms_are_validated_by_perplexity_that_is_not_logged(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    figures, options = [], {}

    def judge(module, inputs, *_, limit, **__):
        def worse(*args, **kwargs):
            output = type(module).forward(module, *args, **kwargs)
            output.logits = 0 * output.logits
            return output

        figures.extend([limit.evaluate(module), limit.evaluate(worse)])
        options["limit"] = limit

    def pick(decoder, texts, judged, **given):
        options.update(given)
        return Quantized("int8", decoder, report=Report("decoding", "cpu"), refused={})

    monkeypatch.setattr(JUDGED, judge)
    monkeypatch.setattr(PICKED, pick)
    module = ZOO["llama"].make()
    quantization = Quantization(
        "weight_only", module="model", monitor="perplexity", monitor_mode="min", max_drop=0.5, batch_size=1, seconds=0.2
    )
    fit(module, tmp_path, quantization, Unwritten(max_length=12))
    exact, uniform = figures
    assert exact["perplexity"] == pytest.approx(math.exp(exact["val_loss"]), rel=1e-5)
    vocabulary = module.model.config.vocab_size
    assert uniform["perplexity"] == pytest.approx(vocabulary, rel=1e-5)
    assert options["limit"].drop(exact, uniform) == uniform["perplexity"] - exact["perplexity"]
    assert not options["limit"].allows(exact, {"perplexity": exact["perplexity"] + 0.6})
    assert options["batch_sizes"] == [4, 1]  # single texts decide, as without a decoder
    assert (tmp_path / "figures/decoding.json").exists()
    assert not (tmp_path / "figures/quantization.json").exists()


class OfEmbeddings(Transformer):
    def validation_step(self, batch, batch_idx):
        embedded = self.model.get_input_embeddings()(batch["input_ids"])
        self.log("val_loss", self.model(inputs_embeds=embedded).logits.logsumexp(-1).mean())


@pytest.mark.slow
def test_perplexities_that_cannot_be_measured_are_refused_before_training(tmp_path):
    pytest.importorskip("transformers")
    perplexity = partial(Quantization, module="model", monitor="perplexity")
    with pytest.raises(ValueError, match=r"lower perplexities are better: .* needs monitor_mode='min'"):
        perplexity()
    with pytest.raises(ValueError, match=r"'perplexity'.*val_loss"):
        fit(ZOO["llama"].make(), tmp_path, perplexity(monitor_mode="min"))
    module = OfEmbeddings(ZOO["llama"].make().model)
    before = module.model.lm_head.weight.detach().clone()
    with pytest.raises(
        ValueError, match=r"needs calls of LlamaForCausalLM with tokens, .* gets CausalLMOutputWithPast without such"
    ):
        fit(module, tmp_path, perplexity(monitor_mode="min"), Unwritten(max_length=12))
    assert torch.equal(module.model.lm_head.weight, before)
