"""Perplexities against a loop over tokens in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_accel.compress.report.perplexity import Perplexity, measured_perplexity, token_losses

WORDS = 7


class Model(nn.Module):
    """Score tokens by the one before, in transformers' order of arguments."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WORDS)

    def forward(self, input_ids, attention_mask=None, labels=None):
        return SimpleNamespace(logits=3 * self.table(input_ids))


def by_loop(model, tokens, labels=None, mask=None):
    """Return the perplexity of texts, token by token."""
    labels = tokens if labels is None else labels
    mask = torch.ones_like(tokens) if mask is None else mask
    losses = []
    for text, wanted, is_text in zip(tokens.tolist(), labels.tolist(), mask.tolist(), strict=True):
        for place in range(1, len(text)):
            if wanted[place] == -100 or not is_text[place] or not is_text[place - 1]:
                continue
            scores = [3 * float(one) for one in model.table.weight.detach()[text[place - 1]].double()]
            losses.append(math.log(sum(map(math.exp, scores))) - scores[wanted[place]])
    return math.exp(sum(losses) / len(losses)), len(losses)


def texts(rows=3, length=6):
    return torch.randint(WORDS, (rows, length))


def test_perplexity_is_that_of_a_loop_over_all_batches():
    model, batches = Model(), [texts(), texts(2, 5)]
    with torch.no_grad(), measured_perplexity(model) as found:
        for batch in batches:
            model(batch)
    losses = [by_loop(model, batch) for batch in batches]
    total = sum(math.log(value) * count for value, count in losses) / (15 + 8)
    assert found.num_tokens == 15 + 8  # by tokens: a mean of batches would differ
    assert found.value == pytest.approx(math.exp(total), rel=1e-6)


@pytest.mark.parametrize("is_padded_left", [False, True])
def test_labels_that_are_ignored_and_padding_do_not_count(is_padded_left):
    model, tokens = Model(), texts()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    mask = mask.flip(1) if is_padded_left else mask
    labels = tokens.clone()
    labels[1, :3] = -100
    with torch.no_grad():
        for given in (None, labels):
            for padding in (None, mask):
                with measured_perplexity(model) as found:
                    model(tokens, padding, labels=given)
                value, count = by_loop(model, tokens, given, padding)
                assert (found.num_tokens, found.value) == (count, pytest.approx(value, rel=1e-6))
    assert count == 3 + 3 + 1


def test_labels_are_what_is_predicted_and_shifted_as_in_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=1
    )
    model, tokens = transformers.GPT2LMHeadModel(config).eval(), texts()
    labels = texts().masked_fill(torch.rand(3, 6) < 0.3, -100)
    with torch.no_grad(), measured_perplexity(model) as found:
        output = model(input_ids=tokens, labels=labels)
    assert found.value == pytest.approx(float(output.loss.exp()), rel=1e-5)


def test_what_runs_in_place_of_forward_is_measured():
    model, other, tokens = Model(), Model(), texts()
    with torch.no_grad(), measured_perplexity(model) as found:
        object.__setattr__(model, "forward", lambda *args, **kwargs: other(*args, **kwargs))
        model(tokens, torch.ones_like(tokens))
        model(tokens, attention_mask=None, labels=tokens)
    assert found.value == pytest.approx(by_loop(other, tokens)[0], rel=1e-6)
    assert found.value != pytest.approx(by_loop(model, tokens)[0], rel=1e-3)
    model(tokens)
    assert found.num_tokens == 30  # nothing is added after it has ended


def test_calls_without_tokens_or_their_logits_are_left_out():
    tokens, logits = texts(), torch.randn(3, 6, WORDS)
    assert len(token_losses({"x": tokens}, SimpleNamespace(logits=logits))) == 15
    for arguments, output in [
        ({"x": torch.randn(3, 6)}, SimpleNamespace(logits=logits)),
        ({"input_ids": None, "x": tokens}, SimpleNamespace(logits=logits)),  # of embeddings
        ({"x": tokens}, SimpleNamespace(logits=logits[:, -1])),
        ({"x": tokens}, SimpleNamespace(logits=logits[:, -2:])),
        ({"x": tokens, "labels": tokens[:, 1:]}, SimpleNamespace(logits=logits)),
        ({"x": tokens}, logits),
    ]:
        assert not len(token_losses(arguments, output))
    assert Perplexity().value is None


def test_hopeless_perplexities_are_infinite():
    found = Perplexity()
    found.add(torch.tensor([3e4]))
    assert found.value == math.inf
