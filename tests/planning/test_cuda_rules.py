"""Functions of the CPU that take the ways of CUDA."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_accel.planning.cuda_rules import as_on_cuda
from lightning_accel.planning.live_memory import LiveMemory


def saved_bytes(function, *inputs):
    """Return the bytes that autograd keeps for the backward pass of a function, without its inputs."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs)
    return sum(kept.values()) - sum(kept.get(one.untyped_storage().data_ptr(), 0) for one in inputs)


def test_autocast_computes_in_float32_what_it_does_on_cuda():
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    norm, head = nn.LayerNorm(8), nn.Linear(8, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.softmax(x, -1).dtype == norm(x).dtype == torch.bfloat16
        with as_on_cuda(LiveMemory(), 8):
            assert F.softmax(x, -1).dtype == x.softmax(-1).dtype == norm(x).dtype == torch.float32
            assert F.cross_entropy(x, torch.tensor([1, 2])).dtype == torch.float32
            assert head(x).dtype == torch.bfloat16
    with as_on_cuda(LiveMemory(), 8):
        assert F.softmax(x, -1).dtype == torch.bfloat16  # as without autocast everywhere


def test_dropout_keeps_a_mask_of_bytes():
    x = torch.ones(64, 100, requires_grad=True)
    assert saved_bytes(nn.Dropout(0.3), x) == 4 * 6400
    with as_on_cuda(LiveMemory(), 8):
        assert saved_bytes(nn.Dropout(0.3), x) == 6400
        assert saved_bytes(nn.Dropout(0.3).eval(), x) == 0


def test_attention_with_dropout_keeps_no_weights():
    query = torch.ones(1, 2, 300, 4, requires_grad=True)

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    assert saved_bytes(attend, query) > 2 * 300 * 300 * 4
    with as_on_cuda(LiveMemory(), 8):
        assert saved_bytes(attend, query) < 2 * 300 * 300


@pytest.mark.parametrize(
    ("dtype", "heads", "is_fused"),
    [(torch.float32, 2, True), (torch.float32, 4, False), (torch.bfloat16, 4, True), (torch.float64, 2, False)],
)
def test_attention_of_grouped_queries_in_float32_and_all_in_float64_keeps_its_weights(dtype, heads, is_fused):
    query = torch.ones(1, heads, 300, 4, dtype=dtype, requires_grad=True)
    key = torch.ones(1, 2, 300, 4, dtype=dtype)

    def attend(x):
        return F.scaled_dot_product_attention(x, key, key, None, 0.0, True, enable_gqa=heads > 2)

    with as_on_cuda(LiveMemory(), 8):
        assert (saved_bytes(attend, query) < heads * 300 * 300 * dtype.itemsize) == is_fused
        torch.testing.assert_close(attend(query), torch.ones_like(query))


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 2, 3, 5, 4)])
def test_attention_of_other_numbers_of_dimensions_is_computed_in_parts(shape):
    """The kernel for values of another width takes a batch and heads."""
    query, value = torch.ones(shape), torch.ones(*shape[:-1], 2)
    with as_on_cuda(LiveMemory(), 8):
        assert F.scaled_dot_product_attention(query, query, value).shape == value.shape


def test_optimizers_take_lists_of_tensors():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]

    def names():
        for one in parameters:
            one.grad = torch.ones(2)
        optimizer = torch.optim.SGD(parameters, lr=1)
        with torch.profiler.profile() as profiler:
            optimizer.step()
        return {event.name for event in profiler.events()}

    assert "aten::_foreach_add_" not in names()
    with as_on_cuda(LiveMemory(), 8):
        assert "aten::_foreach_add_" in names()
    assert "aten::_foreach_add_" not in names()
