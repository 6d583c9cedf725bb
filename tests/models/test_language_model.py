import math
import os
from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_accel import MoELanguageModel, TextDataModule, TopKGate
from lightning_accel.models import Experts, Generation
from lightning_accel.nn import ExpertChoiceGate, FeedForward, KeyValueCache, MixtureOfExperts
from tests.ranks import run_ranks

SMALL = {"dim": 16, "num_layers": 2, "attention": {"num_heads": 2}, "experts": Experts(4, hidden_dim=8)}


def small(vocab_size=11, **kwargs):
    return MoELanguageModel(vocab_size, **SMALL | kwargs)


def quiet_trainer(**kwargs) -> L.Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **dict.fromkeys(off, False), **kwargs})


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{i} and {i * i} make {i + i * i}.\n" for i in range(400)))
    return partial(TextDataModule, tmp_path, context_length=16, batch_size=8)


def test_no_score_depends_on_later_tokens():
    model = small().eval()
    tokens = torch.randint(11, (2, 9))
    before = model(tokens).logits
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    torch.testing.assert_close(model(changed).logits[:, :5], before[:, :5])
    assert not torch.allclose(model(changed).logits[:, 5:], before[:, 5:])


def test_loss_is_cross_entropy_and_the_means_of_the_gates_losses():
    model = small(experts=Experts(4, hidden_dim=8, balance_weight=0.5, z_weight=0.25))
    batch = torch.randint(11, (3, 6))
    logits, reports = model(batch[:, :-1])
    probs = logits.softmax(dim=-1)
    nll = torch.stack([-probs[b, t, batch[b, t + 1]].log() for b in range(3) for t in range(5)]).mean()
    assert len(reports) == 2
    auxiliary = sum(0.5 * report.balance_loss + 0.25 * report.z_loss for report in reports) / 2
    torch.testing.assert_close(model.training_step(batch, 0), nll + auxiliary)


@pytest.mark.slow
def test_overfits_one_batch():
    torch.manual_seed(1)
    model = small(optimizer=partial(torch.optim.AdamW, lr=0.01))
    batch = torch.randint(11, (2, 8))
    trainer = quiet_trainer(max_epochs=150)
    trainer.fit(model, torch.utils.data.DataLoader([batch], batch_size=None))
    assert model(batch[:, :-1]).logits.argmax(dim=-1).equal(batch[:, 1:])


@pytest.mark.parametrize(("moe_every", "kinds"), [(1, "MMM"), (2, "DMD"), (3, "DDM"), (0, "DDD")])
def test_every_so_many_blocks_have_a_mixture(moe_every, kinds):
    model = MoELanguageModel(5, **SMALL | {"num_layers": 3}, moe_every=moe_every)
    layers = [block.feed_forward for block in model.blocks]
    assert "".join("M" if isinstance(layer, MixtureOfExperts) else "D" for layer in layers) == kinds
    assert all(layer.down.in_features == 2 * 8 for layer in layers if isinstance(layer, FeedForward))
    assert model.training_step(torch.randint(5, (2, 4)), 0).requires_grad


def test_activation_checkpointing_changes_no_gradient_and_counts_once():
    batch = torch.randint(11, (3, 6))
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        model = small(activation_checkpointing=on)
        model.training_step(batch, 0).backward()
        counts = torch.stack([one.load for one in model.expert_load.step()])
        results.append((counts, *(parameter.grad for parameter in model.parameters())))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_compiled_model_trains_like_the_eager_one(activation_checkpointing):
    torch._dynamo.reset()
    batch, results = torch.randint(11, (3, 6)), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = small(activation_checkpointing=activation_checkpointing)
        forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager") if compiled else model.forward
        logits, reports = forward(batch)
        (logits.square().mean() + model.auxiliary_loss(reports)).backward()
        results.append((logits, [report.expert_counts for report in reports], *(p.grad for p in model.parameters())))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("temperature", "attention"), [(0.0, {}), (0.8, {"num_key_value_heads": 1, "separate_documents": True})], ids=str
)
def test_cached_generation_equals_running_the_whole_text_each_time(temperature, attention):
    model, tokens = small(attention={"num_heads": 2, **attention}).eval(), torch.randint(11, (2, 3))
    tokens[0, 1] = 10  # the separator
    torch.nn.init.normal_(model.head.weight)
    draws = partial(torch.Generator().manual_seed, 5)
    actual = model.generate(tokens, 6, temperature, sample_from=4, generator=draws())
    generator, expected = draws(), tokens
    for _ in range(6):
        logits = model(expected).logits[:, -1]
        if temperature == 0:
            new = logits.argmax(dim=1, keepdim=True)
        else:
            values, indices = logits.topk(4)
            probs = torch.zeros_like(logits).scatter(1, indices, (values / temperature).softmax(dim=1))
            new = torch.multinomial(probs, 1, generator=generator)
        expected = torch.cat([expected, new], dim=1)
    assert actual.equal(expected)
    assert not model.training
    model.train().generate(tokens, 1)
    assert model.training


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_documents_of_a_row_are_scored_as_if_alone(activation_checkpointing):
    """The separator begins a document: it scores its first token, and the last token before it scores the separator."""
    attention = {"num_heads": 2, "separate_documents": True}
    model = small(attention=attention, activation_checkpointing=activation_checkpointing)
    tokens = torch.randint(10, (3, 9))
    tokens[0, 4] = tokens[1, 0] = tokens[1, 3] = tokens[1, 8] = 10
    alike = small(attention={"num_heads": 2})
    alike.load_state_dict(model.state_dict())
    logits = model(tokens).logits
    parts = [(0, 0, 4), (0, 4, 9), (1, 0, 3), (1, 3, 8), (1, 8, 9), (2, 0, 9)]
    for row, start, stop in parts:
        alone = alike(tokens[row : row + 1, start:stop]).logits[0]
        torch.testing.assert_close(logits[row, start:stop], alone, rtol=1e-4, atol=1e-6)
    caches = [KeyValueCache(9) for _ in model.blocks]
    cached = torch.cat([model(piece, caches).logits for piece in tokens.split([2, 1, 3, 3], dim=1)], dim=1)
    torch.testing.assert_close(cached, logits, rtol=1e-4, atol=1e-6)
    gradients = torch.autograd.grad(logits[0, 4:].square().sum(), model.parameters(), allow_unused=True)
    alone = model(tokens[:1, 4:]).logits.square().sum()
    torch.testing.assert_close(gradients, torch.autograd.grad(alone, model.parameters(), allow_unused=True))


def test_tied_embeddings_are_one_weight_after_loading_too(data, tmp_path):
    model = small(vocab_size=None, tie_embeddings=True, dropout=0.1)
    trainer = quiet_trainer(default_root_dir=tmp_path, max_steps=2, precision="bf16-mixed")
    trainer.fit(model, data())
    trainer.save_checkpoint(tmp_path / "tied.ckpt")
    loaded = MoELanguageModel.load_from_checkpoint(tmp_path / "tied.ckpt")
    assert loaded.head.weight is loaded.embedding.weight
    assert model.head.weight is model.embedding.weight
    assert torch.equal(loaded.head.weight, model.head.weight)
    untied = small(vocab_size=model.vocab_size)
    assert sum(p.numel() for p in loaded.parameters()) == sum(
        p.numel() for name, p in untied.named_parameters() if name != "head.weight"
    )
    with pytest.raises(ValueError, match=r"and they differ; load it with tie_embeddings=False"):
        loaded.load_state_dict(untied.state_dict())
    untied.load_state_dict(loaded.state_dict())


def test_generation_leaves_modes_as_they_were():
    model = small().train()
    model.blocks[0].eval()  # frozen, say
    modes = [part.training for part in model.modules()]

    def fail(*_):
        raise KeyboardInterrupt

    for hook, raised in ((lambda *_: None, None), (fail, KeyboardInterrupt)):
        handle = model.blocks[1].register_forward_hook(hook)
        if raised is None:
            model.generate(torch.ones(1, 2, dtype=torch.int64), 2)
        else:
            with pytest.raises(raised):
                model.generate(torch.ones(1, 2, dtype=torch.int64), 2)
        handle.remove()
        assert [part.training for part in model.modules()] == modes


def test_a_temperature_close_to_0_takes_the_likeliest_token():
    model = small().eval()
    torch.nn.init.normal_(model.head.weight)
    tokens = torch.randint(11, (2, 3))
    assert model.generate(tokens, 4, temperature=1e-38).equal(model.generate(tokens, 4, temperature=0))


@pytest.mark.slow
def test_every_figure_is_logged_and_bits_are_of_bytes(data, tmp_path):
    model = MoELanguageModel(**SMALL)
    trainer = quiet_trainer(logger=CSVLogger(tmp_path), log_every_n_steps=2, max_epochs=1)
    datamodule = data(batch_size=7)  # which leaves fewer for the last batch of an evaluation
    trainer.fit(model, datamodule)
    assert int(model.tokens_seen) == trainer.global_step * 7 * 16
    assert set(trainer.logged_metrics) == {
        "train/loss", "train/tokens", "train/balance_loss", "train/load_entropy", "train/max_violation",
        "train/dropped_fraction", "train/gate_confidence",
        "val/loss", "val/perplexity", "val/bits_per_byte", "val/max_violation",
    }  # fmt: skip
    datamodule.bytes_per_token = 2.5  # as of a tokenizer
    (figures,) = trainer.test(model, datamodule, verbose=False)
    rows = torch.stack([datamodule.test_windows[i] for i in range(len(datamodule.test_windows))])
    with torch.no_grad():
        nll = F.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert figures["test/loss"] == pytest.approx(nll, rel=1e-5)
    assert figures["test/perplexity"] == pytest.approx(math.exp(nll), rel=1e-4)
    assert figures["test/bits_per_byte"] == pytest.approx(nll / math.log(2) / 2.5, rel=1e-5)


def test_each_validation_has_a_load_of_its_own(data):
    model, datamodule = MoELanguageModel(**SMALL), data()
    trainer = quiet_trainer(limit_train_batches=5, max_epochs=2)
    trainer.fit(model, datamodule)
    rows = torch.stack([datamodule.val_windows[i] for i in range(len(datamodule.val_windows))])
    counts = torch.stack([report.expert_counts for report in model.eval()(rows[:, :-1]).reports])
    expected = (counts / counts.sum(dim=1, keepdim=True)).max() * 4 - 1
    assert float(trainer.callback_metrics["val/max_violation"]) == pytest.approx(float(expected), abs=1e-6)


def test_what_blocks_add_is_drawn_smaller_the_more_there_are():
    model = MoELanguageModel(5, **SMALL | {"num_layers": 8}, moe_every=2)
    for name, fan_in in (("attention.out.weight", 16), ("feed_forward.down.weight", 16)):
        weight = model.blocks[0].get_parameter(name)
        assert float(weight.detach().abs().max()) == pytest.approx((fan_in * 16) ** -0.5, rel=0.05)  # 2 * 8 additions
    weight = model.blocks[1].feed_forward.experts.down_weight
    assert float(weight.detach().abs().max()) == pytest.approx((8 * 16) ** -0.5, rel=0.05)


def test_predict_goes_on_from_prompts(data):
    model, datamodule = (
        MoELanguageModel(**SMALL, generation=Generation(max_new_tokens=5)),
        data(prompts=["12 and", "3"]),
    )
    trainer = quiet_trainer(limit_train_batches=2, limit_val_batches=1)
    trainer.fit(model, datamodule)
    first, second = trainer.predict(model, datamodule)
    assert (first["prompt"], second["prompt"]) == (["12 and"], ["3"])
    assert len(first["text"][0]) <= 5
    model.predict_step(torch.tensor([[1, 2]]), 0)
    model.tokenizer = None
    assert model.predict_step(torch.tensor([[1, 2]]), 0)["tokens"].shape == (1, 7)


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_averaged_weights_are_kept_of_a_model_whose_size_the_datamodule_tells(data):
    model = MoELanguageModel(**SMALL)
    quiet_trainer(callbacks=[EMAWeightAveraging()], limit_train_batches=2, limit_val_batches=1).fit(model, data())
    assert model.head.out_features == 257


def test_validate_may_come_before_fit(data):
    model = MoELanguageModel(**SMALL)
    short = {"limit_train_batches": 2, "limit_val_batches": 1}
    quiet_trainer(**short).validate(model, data(), verbose=False)
    quiet_trainer(**short).fit(model, data())
    quiet_trainer(**short).test(model, data(), verbose=False)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_activation_checkpointing_runs_in_every_precision(data, precision):
    model = MoELanguageModel(**SMALL, activation_checkpointing=True)
    quiet_trainer(precision=precision, limit_train_batches=2, limit_val_batches=1).fit(model, data())
    assert model.blocks[0].feed_forward.gate.expert_slots.sum() == 2 * 8 * 16


def test_a_text_ends_at_the_separator(data):
    model, datamodule = MoELanguageModel(**SMALL), data()
    trainer = quiet_trainer(limit_train_batches=1, limit_val_batches=1)
    trainer.fit(model, datamodule)
    assert model._decode([97, 98, 256, 99]) == "ab"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_killed_run_ends_with_the_weights_of_one_never_killed(data, tmp_path):
    gate = partial(TopKGate, score="sigmoid", bias_update_rate=0.01)

    def run(name, **kwargs):
        torch.manual_seed(2)
        model = MoELanguageModel(**SMALL, gate=gate)
        keeper = ModelCheckpoint(dirpath=tmp_path / name, every_n_train_steps=7, save_top_k=-1, filename="{step}")
        trainer = quiet_trainer(enable_checkpointing=True, callbacks=[keeper], max_steps=20, limit_val_batches=0)
        trainer.fit(model, data(), **kwargs)
        return model.state_dict()

    whole = run("whole")
    torch.testing.assert_close(run("resumed", ckpt_path=tmp_path / "whole" / "step=7.ckpt"), whole, rtol=0, atol=0)
    assert whole["blocks.0.feed_forward.gate.bias_steps"].any()


def test_a_checkpoint_loads_without_the_datamodule(data, tmp_path):
    model = MoELanguageModel(**SMALL)
    trainer = quiet_trainer(limit_train_batches=2, limit_val_batches=1)
    trainer.fit(model, data())
    trainer.save_checkpoint(tmp_path / "lm.ckpt")
    loaded = MoELanguageModel.load_from_checkpoint(tmp_path / "lm.ckpt", weights_only=True).eval()
    tokens = torch.randint(257, (2, 5))
    torch.testing.assert_close(loaded(tokens).logits, model.eval()(tokens).logits, rtol=0, atol=0)


def trained(folder, world_size=1, batch_size=8, micro_batches=1):
    torch.manual_seed(3)
    gate = partial(TopKGate, score="sigmoid", bias_update_rate=0.01)
    model = MoELanguageModel(
        **SMALL | {"experts": Experts(4, hidden_dim=8, balance_weight=0.5)},
        gate=gate,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    trainer = quiet_trainer(
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        max_steps=6,
        accumulate_grad_batches=micro_batches,
    )
    trainer.fit(model, TextDataModule(folder, context_length=16, batch_size=batch_size))
    figures = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    return {name: value.clone() for name, value in model.state_dict().items()}, figures


def check_trained(rank, folder):
    return trained(folder, world_size=2, batch_size=4)


@pytest.mark.slow
def test_ranks_and_micro_batches_train_the_model_of_one_process(data, tmp_path):
    expected = trained(tmp_path)
    torch.testing.assert_close(trained(tmp_path, batch_size=2, micro_batches=4), expected)
    for actual in run_ranks(check_trained, tmp_path):
        torch.testing.assert_close(actual, expected)


def test_what_cannot_work_is_refused_before_training(data):
    with pytest.raises(ValueError, match=r"ExpertChoiceGate looks at later tokens.*Use TopKGate"):
        small(gate=ExpertChoiceGate)
    with pytest.raises(ValueError, match="num_layers must be at least 1; got 0"):
        MoELanguageModel(num_layers=0)
    with pytest.raises(ValueError, match=r"temperature must be at least 0; got -1.0"):
        MoELanguageModel(generation=Generation(temperature=-1.0))
    with pytest.raises(ValueError, match=r"vocab_size=11, but TextDataModule has vocab_size=257. Leave vocab_size out"):
        quiet_trainer().fit(small(), data())
    with pytest.raises(ValueError, match="needs vocab_size; pass it, or train with a datamodule"):
        quiet_trainer().fit(MoELanguageModel(**SMALL), torch.utils.data.DataLoader([torch.ones(2, 2).long()]))
    with pytest.raises(RuntimeError, match="the vocabulary of this MoELanguageModel is not known yet"):
        MoELanguageModel()(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"need prompts \(B, T\) of at least one token; got \(2, 0\)"):
        small().generate(torch.zeros(2, 0, dtype=torch.int64), 3)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "bf16-true"])
def test_trains_on_cuda(data, precision):
    model = MoELanguageModel(**SMALL, optimizer=partial(torch.optim.AdamW, lr=0.01))
    emulated = "EMULATED_GPUS" in os.environ  # hours of interpretation
    limits = {"max_steps": 2, "limit_val_batches": 1} if emulated else {"max_epochs": 10}
    trainer = quiet_trainer(accelerator="gpu", precision=precision, **limits)
    trainer.fit(model, data())
    if emulated:
        assert all(one.isfinite().all() for one in model.parameters())
    else:
        assert trainer.callback_metrics["val/bits_per_byte"] < 4
