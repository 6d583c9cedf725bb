"""Attention weights that are computed when they are used: which, when, and what their absence changes."""

import copy

import pytest
import torch
from torch import nn

from lightning_accel.nn.deferred_weights import defer_weights_, is_deferrable, restore_weights_

N, L, S, E, HEADS = 3, 5, 7, 12, 4


@pytest.fixture
def softmaxes(monkeypatch):
    """Return a list with an entry for each tensor of weights that is computed."""
    found, softmax = [], torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda *args, **kwargs: found.append(1) or softmax(*args, **kwargs)
    )
    return found


def pair(**options):
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(E, HEADS, **options)
    return plain, copy.deepcopy(plain)


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"batch_first": True}, {}),
        ({}, {"average_attn_weights": False}),
        ({"add_bias_kv": True, "add_zero_attn": True, "batch_first": True}, {}),
        ({"batch_first": True}, {"attn_mask": torch.ones(L, S).triu(3).bool()}),
        ({"batch_first": True}, {"key_padding_mask": torch.arange(S) >= torch.tensor([7, 3, 5])[:, None]}),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_outputs_weights_and_gradients_are_the_layers(softmaxes, options, call, dtype):
    plain, layer = pair(**options)
    assert defer_weights_(nn.Sequential(layer)) == [layer]
    first = options.get("batch_first", False)
    query, memory = (torch.randn(*((N, n) if first else (n, N)), E, requires_grad=True) for n in (L, S))
    found = []
    for one in (plain, layer):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            out, weights = one(query, memory, memory, **call)
        assert len(softmaxes) == 1  # not of the layer
        tensors = [query, memory, *one.parameters()]
        only = torch.autograd.grad(out.float().square().sum(), tensors, retain_graph=True)
        found.append([out, *only])
        if one is layer:
            assert len(softmaxes) == 1
        both = out.float().square().sum() + (weights.float() ** 3).sum()  # of another autocast context
        found[-1] += [weights + 0, *torch.autograd.grad(both, tensors)]
    assert len(softmaxes) == 2  # once for all uses
    bound = 1e-5 if dtype is None else 5e-2
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def test_weights_are_tensors_to_any_program():
    plain, layer = pair()
    defer_weights_(layer)
    query = torch.randn(L, E)  # without a batch
    expected = plain(query, query, query)[1]
    (weights,) = layer(query, query, query)[1:]
    assert isinstance(weights, torch.Tensor)
    assert weights.shape == expected.shape
    assert weights.requires_grad
    assert repr(weights) == repr(expected)
    assert torch.equal(torch.stack([weights, weights])[1], expected)
    assert torch.equal(copy.deepcopy(weights.detach()), expected)
    assert weights.tolist() == expected.tolist()
    with torch.no_grad():
        assert not layer(query, query, query)[1].requires_grad
    with torch.inference_mode():
        assert torch.equal(layer(query, query, query)[1], expected)


def test_weights_of_a_call_are_never_those_of_later_parameters():
    _, layer = pair()
    defer_weights_(layer)
    query = torch.randn(L, N, E)
    before, unused = layer(query, query, query)[1], layer(query, query, query)[1]
    value = before.clone()
    with torch.no_grad():
        layer.in_proj_weight.mul_(2)
    assert torch.equal(before, value)
    with pytest.raises(RuntimeError, match=r"changed.*before the optimizer steps.*defer_attention_weights"):
        unused.sum()


def test_other_layers_are_left_as_they_are(softmaxes):
    class Own(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    plain, dropping = nn.MultiheadAttention(E, HEADS), nn.MultiheadAttention(E, HEADS, dropout=0.1)
    model = nn.ModuleList([plain, dropping, Own(E, HEADS), nn.Linear(2, 2)])
    layers = defer_weights_(model)
    assert layers == [plain]
    assert not any(is_deferrable(one) for one in model)
    query = torch.randn(L, N, E)
    assert plain(query, query, query, need_weights=False)[1] is None
    state = copy.deepcopy(model).state_dict()
    assert list(state) == list(model.state_dict())
    restore_weights_(layers)
    assert "forward" not in vars(plain)
    plain(query, query, query)
    assert softmaxes == [1]
