"""Attention within segments: against a formula in float64, segment by segment, by the kernel and by padding."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_accel.ops.attention import replace_attention, restore_attention
from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.segment_attention import segment_attention

LENGTHS = 3, 0, 1, 130, 17  # more than a block, none, and no multiples of vectors


def inputs(dtype=torch.float32, lengths=LENGTHS, heads=(6, 3, 3), widths=(20, 20, 7), seed=0):
    """Return queries, keys and values whose heads do not lie side by side, and where segments begin."""
    random = torch.Generator().manual_seed(seed)
    begins = torch.tensor([0, *lengths]).cumsum(0)
    shapes = [(number, sum(lengths), width) for number, width in zip(heads, widths, strict=True)]
    drawn = [torch.randn(shape, generator=random).to(dtype).transpose(0, 1) for shape in shapes]
    drawn[0] = drawn[0].permute(2, 0, 1).contiguous().permute(1, 2, 0)  # not even its features
    return [one.requires_grad_() for one in drawn], begins


def formula(query, key, value, begins, causal=False):
    query, key, value = (one.double().transpose(0, 1) for one in (query, key, value))
    key, value = (one.repeat_interleave(len(query) // len(one), 0) for one in (key, value))
    parts = []
    for start, stop in pairwise(begins.tolist()):
        scores = query[:, start:stop] @ key[:, start:stop].transpose(1, 2) / query.shape[2] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        parts.append(scores.softmax(2) @ value[:, start:stop])
    return torch.cat(parts, dim=1).transpose(0, 1)


def with_gradients(out, tensors, seed=9, **options):
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, grad, **options)]


def assert_near(found, expected, dtype=torch.float32):
    bound = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float64: 1e-10}[dtype]
    for one, exact in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), exact.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_each_segment_is_what_the_formula_gives(dtype, causal, native):
    tensors, begins = inputs(dtype)
    found = with_gradients(segment_attention(*tensors, begins, causal), tensors)
    expected = with_gradients(formula(*tensors, begins, causal), tensors)
    assert_near(found, expected, dtype)
    with KERNELS.switched_off():
        assert_near(with_gradients(segment_attention(*tensors, begins, causal), tensors), expected, dtype)
    assert found[0].requires_grad
    with torch.no_grad():
        torch.testing.assert_close(segment_attention(*tensors, begins, causal), found[0], rtol=0, atol=0)


def test_equal_results_on_any_number_of_threads(native):
    tensors, begins = inputs(lengths=[9, 40, 1] * 20)
    runs = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            runs.append(with_gradients(segment_attention(*tensors, begins), tensors))
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("widths", [(20, 20, 7), (8, 8, 8)])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_second_derivatives_and_batched_gradients_are_those_of_the_formula(widths, is_replaced, native):
    """Torch's own implementations, and the kernel in their place, have no second derivatives where widths are equal."""
    tensors, begins = inputs(lengths=(3, 1, 4), widths=widths)
    if is_replaced:
        replace_attention()

    def penalty(attend):
        _, *gradients = with_gradients(attend(*tensors, begins), tensors, create_graph=True)
        return torch.autograd.grad(sum((one**2).sum() for one in gradients), tensors)

    try:
        found = penalty(segment_attention)
    finally:
        if is_replaced:
            restore_attention()
    assert_near(found, penalty(lambda *args: formula(*args).float()))
    out = segment_attention(*tensors, begins)
    directions = torch.randn(2, *out.shape)
    batched = torch.autograd.grad(out, tensors, directions, is_grads_batched=True, retain_graph=True)
    for i, direction in enumerate(directions):
        assert_near([one[i] for one in batched], torch.autograd.grad(out, tensors, direction, retain_graph=True))


@pytest.mark.slow
def test_transforms_and_compilation_take_the_padded_formula(native):
    tensors, begins = inputs(lengths=(3, 1, 4), widths=(8, 8, 8))
    query, key, value = (one.detach() for one in tensors)
    tangent = torch.func.jvp(lambda x: segment_attention(x, key, value, begins), (query,), (query,))[1]
    exact = torch.func.jvp(lambda x: formula(x, key, value, begins), (query,), (query,))[1]
    assert_near([tangent], [exact])
    compiled = torch.compile(segment_attention, backend="eager")
    assert_near([compiled(query, key, value, begins)], [formula(query, key, value, begins)])


@pytest.mark.parametrize("begins", [[0, 3, 2, 8], [1, 8], [0, 7], [0.0, 8.0]], ids=str)
@pytest.mark.parametrize("is_native", [True, False])
def test_segments_that_do_not_ascend_to_the_number_of_rows_are_refused(begins, is_native, native):
    tensors, _ = inputs(lengths=(8,))
    with nullcontext() if is_native else KERNELS.switched_off(), pytest.raises(RuntimeError, match="begins must"):
        segment_attention(*tensors, torch.tensor(begins))


def test_rows_without_segments_and_counts_of_operations(native):
    tensors, begins = inputs(lengths=())
    assert segment_attention(*tensors, begins).shape == (0, 6, 7)
    tensors, begins = inputs(lengths=(5, 5))
    with FlopCounterMode(display=False) as counter:
        segment_attention(*tensors, begins).sum().backward()
    # scores and weighted sums of 2 segments of 5; then both again, and the gradients of three tensors
    assert counter.get_total_flops() == 2 * 2 * 25 * 6 * ((20 + 7) + (3 * 20 + 2 * 7))


@pytest.mark.parametrize(("heads", "widths"), [((6, 4, 4), (8, 8, 8)), ((6, 3, 3), (8, 4, 8)), ((6, 3, 2), (8, 8, 8))])
def test_shapes_that_disagree_are_named(heads, widths, native):
    tensors, begins = inputs(lengths=(2, 1), heads=heads, widths=widths)
    with pytest.raises(ValueError, match=r"segment_attention needs query \(N, H, D\).*; got torch\."):
        segment_attention(*tensors, begins)


def test_autocast_leaves_the_dtype_as_it_is(native):
    tensors, begins = inputs(lengths=(2, 1))
    with torch.autocast("cpu", torch.bfloat16):
        found = [segment_attention(*tensors, begins)]
        with KERNELS.switched_off():
            found.append(segment_attention(*tensors, begins))
    assert_near(found, [formula(*tensors, begins)] * 2)
