"""Batches without padding, or with several samples in a row, of modules and loaders that know nothing of it."""

import math
from collections import UserDict, namedtuple

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric

from lightning_accel.callbacks import Batching, Distillation, ExpertLosses, MemorySavings
from lightning_accel.callbacks.padding import (
    FORMS,
    has_padding,
    longest_of,
    packed,
    training_of,
    trimmed,
    why_not_padded,
)
from lightning_accel.tuning.learning import why_not_padded_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not have many workers|number of training batches|treespec)")
VOCABULARY, WIDTH, LONGEST, PAD = 13, 12, 30, 3
DECODER, ENCODER = FORMS[1], FORMS[2]


def sequences(n=20, longest=19):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, longest + 1, (n,), generator=generator).tolist()
    return [torch.randint(4, VOCABULARY, (length,), generator=generator) for length in lengths]


def collate(samples, to=LONGEST):
    """Pad to one length, as ``padding="max_length"`` of tokenizers does."""
    shape = len(samples), to
    ids, mask, labels = torch.full(shape, PAD), torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    for place, sample in enumerate(samples):
        ids[place, : len(sample)] = labels[place, : len(sample)] = sample
        mask[place, : len(sample)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Transformer(nn.Module):
    """Predict tokens by one layer of attention, which takes a mask of four dimensions as it is, as transformers' do.

    Args:
        is_decoder: each token is predicted from those before; otherwise from all, itself hidden.
        window: how far a token looks back; a mask that is given is taken to say so itself.
        pooling: predict the first label of each sample from the mean of all tokens, padding among them.
        takes_masks: otherwise, masks are not looked at.
    """

    def __init__(self, is_decoder=True, window=LONGEST, pooling=False, takes_masks=True):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.projection, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.is_decoder, self.window, self.pooling, self.takes_masks = is_decoder, window, pooling, takes_masks

    def forward(self, input_ids, labels, attention_mask=None, position_ids=None):
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length).expand_as(input_ids)
        hidden = input_ids if self.is_decoder else torch.zeros_like(input_ids)
        x = self.tokens(hidden) + self.places(position_ids)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool)
        if self.is_decoder:
            mask = mask.tril().triu(1 - self.window)
        if attention_mask is not None and self.takes_masks:
            is_whole = attention_mask.ndim == 4
            mask = attention_mask if is_whole else mask & attention_mask.bool()[:, None, None]
        query, key, value = (one[:, None] for one in self.projection(x).chunk(3, dim=-1))
        x = self.head(F.scaled_dot_product_attention(query, key, value, mask)[:, 0])
        if self.pooling:
            return F.cross_entropy(x.mean(1), labels[:, 0])
        if self.is_decoder:
            x, labels = x[:, :-1], labels[:, 1:]
        return F.cross_entropy(x.reshape(-1, VOCABULARY), labels.reshape(-1))


class Module(L.LightningModule):
    def __init__(self, dropout=0.0, by_hand=False, **options):
        super().__init__()
        self.net = Transformer(**options)
        self.dropout, self.mean = nn.Dropout(dropout), MeanMetric()
        self.automatic_optimization = not by_hand
        self.losses, self.shapes, self.validated = [], [], []

    def training_step(self, batch, batch_idx):
        loss = self.net(**batch) * self.dropout(torch.ones(()))
        self.mean(loss)
        self.log("loss", loss)
        if self.training:
            self.losses.append(loss.item())
            self.shapes.append(tuple(batch["input_ids"].shape))
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated.append(tuple(batch["input_ids"].shape))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def fit(padding, data=None, make=Module, collate=collate, **options):
    L.seed_everything(0, verbose=False)
    module, samples = make(**options), data or sequences()
    callbacks = [Batching(padding=padding)] if padding else []
    trainer = L.Trainer(accelerator="cpu", max_epochs=2, num_sanity_val_steps=0, callbacks=callbacks, **QUIET)
    loaders = (DataLoader(samples, 6, collate_fn=collate) for _ in range(2))
    try:
        trainer.fit(module, *loaders)
    finally:
        module.has_ended = "batch_to_device" not in vars(trainer.strategy)
    return module


@pytest.mark.sampled(default=3)
@pytest.mark.parametrize("is_decoder", [True, False])
@pytest.mark.parametrize("padding", ["trimmed", "packed"])
def test_losses_are_those_with_padding(padding, is_decoder):
    plain, module = fit(None, is_decoder=is_decoder), fit(padding, is_decoder=is_decoder)
    assert len(module.losses) == 8
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(plain.losses), rtol=1e-5, atol=1e-6)
    assert set(plain.shapes) == {(6, LONGEST), (2, LONGEST)}
    assert all(columns <= 24 for _, columns in module.shapes)
    rows = [shape[0] for shape in module.shapes]
    assert (rows == [6, 6, 6, 2] * 2) == (padding == "trimmed")
    assert set(module.validated) == set(plain.validated)
    assert module.has_ended
    assert module.mean.compute() == pytest.approx(plain.mean.compute().item(), rel=1e-5)


class Items(UserDict):
    """Hold a batch as tokenizers of transformers return it."""


Fields = namedtuple("Fields", "ids mask weight")


def test_columns_of_padding_are_left_out():
    batch = collate([torch.ones(5), torch.ones(11)]) | {"weight": torch.ones(2), "features": torch.ones(2, LONGEST, 4)}
    for given in (batch, Items(batch)):
        found = trimmed(given)
        assert type(found) is type(given)
        assert {name: tuple(value.shape) for name, value in found.items()} == {
            "input_ids": (2, 16), "attention_mask": (2, 16), "labels": (2, 16), "weight": (2,), "features": (2, 16, 4),
        }  # fmt: skip
        assert torch.equal(found["labels"], batch["labels"][:, :16])
        assert all(value.is_contiguous() for value in found.values())
        assert given["input_ids"].shape == (2, LONGEST)
    for kind in (Fields, lambda *items: list(items), lambda *items: items):
        found = trimmed(kind(batch["input_ids"], batch["attention_mask"], torch.ones(2)))
        assert [tuple(one.shape) for one in found] == [(2, 16), (2, 16), (2,)]
    assert type(trimmed(Fields(batch["input_ids"], batch["attention_mask"], torch.ones(2)))) is Fields
    assert trimmed(collate([torch.ones(29)]))["input_ids"].shape == (1, LONGEST)
    left = {name: value.flip(1) for name, value in batch.items() if value.ndim == 2}
    assert not has_padding(left, "trimmed")
    assert has_padding(batch, "trimmed")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_each_sample_is_in_one_row(form):
    """Against a loop over rows, which finds each sample by where its positions begin."""
    samples = sequences(9)
    batch = collate(samples) | {"token_type_ids": collate(samples)["input_ids"] % 2}
    found, begin = packed(batch, form), PAD + 1 if form.begins_after_padding else 0
    assert list(found) == [
        *("input_ids", "labels", "token_type_ids", "position_ids"),
        *(["attention_mask"] if form.attention_mask else []),
    ]
    assert len(found["input_ids"]) < 9
    longest = max(map(len, samples))
    assert found["input_ids"].shape[1] == math.ceil(longest / 8) * 8
    told = []
    for row, positions in enumerate(found["position_ids"]):
        starts = [place for place, position in enumerate(positions) if position == begin]
        ends = [*starts[1:], len(positions)]
        sample_of = torch.repeat_interleave(torch.arange(len(starts)), torch.tensor(ends) - torch.tensor(starts))
        if form.attention_mask:
            allowed = sample_of[:, None] == sample_of
            mask = found["attention_mask"][row, 0]
            expected = allowed.tril() if form.shifts_labels else allowed
            assert torch.equal(mask if mask.dtype == torch.bool else mask == 0, expected)
        for start, end in zip(starts, ends, strict=True):
            assert positions[start:end].tolist() == list(range(begin, begin + end - start))
            ids, labels, types = (found[name][row, start:end] for name in ("input_ids", "labels", "token_type_ids"))
            if (ids == PAD).all():
                assert (labels == -100).all()
                continue
            told.append(ids.tolist())
            assert torch.equal(types, ids % 2)
            assert labels[form.shifts_labels :].tolist() == ids[form.shifts_labels :].tolist()
            assert labels[0] == (-100 if form.shifts_labels else ids[0])
    assert sorted(told) == sorted(sample.tolist() for sample in samples)


@pytest.mark.parametrize(
    ("padding", "options", "message"),
    [
        (
            "trimmed",
            {"pooling": True},
            r"padding='trimmed'\) would train Module otherwise than with padding: its loss is",
        ),
        ("packed", {"pooling": True}, "with a mask for a decoder"),
        ("packed", {"takes_masks": False}, "with positions that begin again, (its loss|a gradient of)"),
        ("trimmed", {"by_hand": True}, "needs automatic optimization.*in your collate function"),
        ("trimmed", {"collate": lambda samples: torch.stack([one[:2] for one in samples])}, "have no attention_mask"),
        ("packed", {"collate": lambda samples: tuple(collate(samples).values())}, "are no mappings with input_ids"),
        (
            "packed",
            {"collate": lambda samples: collate(samples) | {"labels": torch.ones(len(samples))}},
            "labels are not those of tokens",
        ),
        (
            "packed",
            {"collate": lambda samples: collate(samples) | {"weight": torch.ones(len(samples))}},
            "weight would",
        ),
        ("packed", {"collate": lambda samples: collate(samples) | {"name": ["a"] * len(samples)}}, "name would"),
        (
            "packed",
            {"collate": lambda samples: {k: v for k, v in collate(samples).items() if k != "labels"}},
            "batches have no labels",
        ),
    ],
)
def test_rejects_what_would_train_otherwise(padding, options, message):
    started = []

    class Watched(Module):
        def __init__(self, **options):
            super().__init__(**options)
            started.append(self)

        def optimizer_step(self, *args, **kwargs):
            raise AssertionError("a step was made")

    Watched.__name__ = "Module"
    with pytest.raises(TypeError, match=message):
        fit(padding, make=Watched, **options)
    assert started[0].has_ended


@pytest.mark.parametrize("other", [Distillation("initial"), ExpertLosses()])
def test_losses_of_callbacks_that_count_padding_are_refused(other):
    module = Module()
    trainer = L.Trainer(callbacks=[Batching(padding="trimmed"), other], accelerator="cpu", max_epochs=1, **QUIET)
    with pytest.raises(ValueError, match=rf"Batching\(padding='trimmed'\) and {type(other).__name__}, whose loss"):
        trainer.fit(module, DataLoader(sequences(8), 4, collate_fn=collate))
    assert not module.losses


def test_rejects_another_word():
    with pytest.raises(ValueError, match="padding must be one of trimmed, packed; got 'none'"):
        Batching(padding="none")


def test_gradients_tell_what_losses_do_not():
    """Before training, queries and keys of small weights hardly matter to a loss."""

    class Fresh(Module):
        def __init__(self, **options):
            super().__init__(**options)
            for parameter in self.net.projection.parameters():
                nn.init.normal_(parameter, std=1e-4)

    with pytest.raises(TypeError, match="with positions that begin again, a gradient of"):
        fit("packed", make=Fresh, takes_masks=False)


def test_samples_that_are_longer_than_all_before_are_looked_at_again():
    """A window that the mask of a packed batch does not have matters to samples that are longer than it."""
    short, long = sequences(12, longest=6), sequences(12, longest=19)
    assert len(fit("packed", short, window=7).losses) == 4
    assert len(fit("trimmed", [*short, *long], window=7).losses) == 8
    seen = []

    class Watched(Module):
        def on_train_batch_end(self, *_):
            seen.append(self.global_step)

    with pytest.raises(TypeError, match="otherwise than with padding"):
        fit("packed", [*short, *long], make=Watched, window=7)
    assert seen == [1, 2]


class Count(Metric):
    """Count updates in place."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()))

    def update(self, value):
        self.total.add_(1)

    def compute(self):
        return self.total


def test_the_comparison_leaves_no_trace():
    module = Module(dropout=0.5)
    module.mean = Count()
    module.net.eval()
    module.mean.update(7.0)
    total = module.mean.total
    before = torch.get_rng_state()
    loss, gradients = training_of(module, collate(sequences(4)))
    assert loss == training_of(module, collate(sequences(4)), with_gradients=False)[0]
    assert len(gradients) == len(list(module.parameters()))
    assert torch.equal(torch.get_rng_state(), before)
    assert module.mean.total is total
    assert total == 1
    assert [module.training, module.net.training, module.dropout.training] == [True, False, True]
    assert all(parameter.grad is None for parameter in module.parameters())
    assert "log" not in vars(module)


def test_fewer_digits_are_compared_in_float32():
    """In which alone a mask that is not looked at is told from rounding."""

    class Low(Module):
        def __init__(self, **options):
            super().__init__(**options)
            self.net.bfloat16()

        def training_step(self, batch):  # Lightning leaves batch_idx out
            return super().training_step(batch, 0)

    module, batch = Low(), collate(sequences(4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    loss, gradients = training_of(module, batch)
    assert {one.dtype for one in (loss, *gradients)} == {torch.float32}
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.net.head.weight.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="with positions that begin again"):
        fit("packed", make=Low, takes_masks=False)


def test_steps_that_callbacks_have_changed_are_compared_as_they_were():
    """Micro-batches log for themselves, which is no time for before the first step."""
    L.seed_everything(0, verbose=False)
    module = Module()
    callbacks = [MemorySavings(micro_batches=2), Batching(padding="trimmed")]
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **QUIET)
    trainer.fit(module, DataLoader(sequences(), 6, collate_fn=collate))
    assert module.shapes[0] == (3, 24)


def test_facts_tell_which_padding_a_run_has():
    batch = collate(sequences(4))
    assert why_not_padded_of(batch) == {"trimmed": "", "packed": ""}
    assert longest_of(batch) == max(map(len, sequences(4)))
    of_samples = batch | {"labels": torch.ones(4)}
    assert not why_not_padded_of(of_samples)["trimmed"]
    assert "labels" in why_not_padded_of(of_samples)["packed"]
    full = collate([torch.ones(LONGEST)] * 2)
    assert set(why_not_padded_of(full).values()) == {"a batch has no such padding"}
    for other in (torch.ones(3), [torch.ones(3, 4), torch.ones(3).long()], {"attention_mask": torch.ones(2, 1, 3, 3)}):
        assert why_not_padded(other, "trimmed") == "batches have no attention_mask of one number for each token"
    several = [torch.ones(2, 5).long(), torch.ones(2, 5).long()]
    assert why_not_padded(several, "trimmed")


def train_on_rank(rank):
    found = []
    for padding in (None, "packed"):
        L.seed_everything(0, verbose=False)
        module = Module()
        trainer = L.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[Batching(padding=padding)], **QUIET
        )
        trainer.fit(module, DataLoader(sequences(), 5, collate_fn=collate))
        found.append((torch.tensor(module.losses), sum(map(math.prod, module.shapes))))
    return found


@pytest.mark.slow
def test_each_process_packs_its_own_batches():
    for (plain, num_tokens), (losses, fewer) in run_ranks(train_on_rank):
        torch.testing.assert_close(losses, plain, rtol=1e-5, atol=1e-6)
        assert fewer < 0.6 * num_tokens


@pytest.mark.sampled(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "head", "options"),
    [
        ("GPT2", "LMHeadModel", {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
        ("Llama", "ForCausalLM", {"num_key_value_heads": 2}),
        ("Qwen3", "ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
        ("Olmoe", "ForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
        ("Bert", "ForMaskedLM", {}),
        ("Bert", "ForMaskedLM", {"attn_implementation": "eager"}),
        ("Roberta", "ForMaskedLM", {}),
        ("T5", "ForConditionalGeneration", {"d_kv": 8, "dropout_rate": 0, "decoder_start_token_id": 0}),
    ],
)
def test_models_of_transformers_train_alike(family, head, options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 40}
    if family in ("Bert", "Roberta"):
        options = options | {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    others = ends | {"vocab_size": VOCABULARY, "pad_token_id": PAD}
    config = getattr(transformers, f"{family}Config")(**sizes | others | options)

    class Foreign(Module):
        def __init__(self):
            super().__init__()
            self.net = getattr(transformers, f"{family}{head}")(config)

        def training_step(self, batch, batch_idx):
            loss = self.net(**batch).loss
            if self.training:
                self.losses.append(loss.item())
                self.shapes.append(tuple(batch["input_ids"].shape))
            return loss

    plain = fit(None, make=Foreign)
    for padding in ("trimmed", "packed"):
        if family == "T5" and padding == "packed":  # relative positions of tokens that see each other all
            with pytest.raises(TypeError, match="otherwise than with padding"):
                fit(padding, make=Foreign)
            continue
        module = fit(padding, make=Foreign)
        torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(plain.losses), rtol=1e-4, atol=1e-4)
        assert sum(map(math.prod, module.shapes)) < 0.85 * sum(map(math.prod, plain.shapes))
