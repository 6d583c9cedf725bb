import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch import func
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from lightning_accel.ops import log_clip
from lightning_accel.ops.log_clip import log_clip_reference
from tests.ranks import run_ranks

CLIP = 0.25  # the same number in every dtype
HARD = torch.tensor([0.0, -0.0, -2.0, CLIP, 0.5, 3.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

modes = pytest.mark.parametrize("straight_through", [False, True], ids=["exact", "straight_through"])


def points(straight_through=False):
    """Numbers above the clip, and below where the derivative is one."""
    x = torch.rand(5, 3, dtype=torch.float64) + CLIP + 0.1
    if not straight_through:
        x[::2] *= -1
        x[0, 0] = 0
    return x.requires_grad_()


def derivative(x, straight_through, order=1):
    """In closed form; of NaN NaN."""
    above = (-1) ** (order - 1) * math.factorial(order - 1) / x**order
    return torch.where(x <= CLIP, 1 / CLIP if straight_through and order == 1 else 0.0, above)


@modes
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_logarithm_of_the_larger(dtype, straight_through):
    expected = [math.log(max(x, CLIP)) for x in HARD.tolist()[:-1]] + [math.nan]
    for call in (log_clip, log_clip_reference):
        out = call(HARD.to(dtype), CLIP, straight_through)
        torch.testing.assert_close(out, torch.tensor(expected, dtype=dtype), equal_nan=True)


@modes
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_above_at_and_below_the_clip(dtype, straight_through):
    x = HARD.to(dtype, copy=True).requires_grad_()
    expected = derivative(HARD, straight_through).to(dtype)
    for create_graph in (False, True):
        (grad,) = torch.autograd.grad(log_clip(x, CLIP, straight_through).sum(), x, create_graph=create_graph)
        torch.testing.assert_close(grad.detach(), expected, equal_nan=True)


def test_no_gradient_reaches_what_is_clipped_however_large_it_is():
    x = torch.tensor([0.0, -1.0, 0.1], requires_grad=True)
    for upstream in (torch.inf, -torch.inf, torch.nan):
        (grad,) = torch.autograd.grad(log_clip(x, CLIP), x, torch.full_like(x, upstream))
        assert grad.tolist() == [0, 0, 0]


@modes
def test_derivatives(straight_through):
    x = points(straight_through)
    call = partial(log_clip, clip_value=CLIP, straight_through=straight_through)
    assert gradcheck(call, x, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(call, x, check_fwd_over_rev=True, check_batched_grad=True)


@modes
def test_second_and_third_derivative_of_what_is_clipped_are_0(straight_through):
    x = HARD[:6].clone().requires_grad_()
    grad = log_clip(x, CLIP, straight_through)
    for order in (1, 2, 3):
        (grad,) = torch.autograd.grad(grad.sum(), x, create_graph=True)
        torch.testing.assert_close(grad, derivative(x, straight_through, order))


@modes
@pytest.mark.parametrize(
    ("orders", "nested"),
    [
        (1, func.jacrev),
        (1, func.jacfwd),
        (1, lambda f: func.vmap(func.grad(f))),
        (1, lambda f: lambda x: func.jvp(f, (x,), (torch.ones_like(x),))[1]),
        (2, lambda f: func.vmap(func.hessian(f))),
        (2, lambda f: func.jacfwd(func.jacfwd(f))),  # 0 through a Function's jvp
        (2, lambda f: func.jacrev(func.jacrev(f))),
        (2, lambda f: func.jacrev(func.jacfwd(f))),
        (2, lambda f: func.jacfwd(func.jacrev(f))),
        (3, lambda f: func.jacfwd(func.jacrev(func.jacfwd(f)))),
    ],
    ids=["jacrev", "jacfwd", "grad", "jvp", "hessian", "fwd-fwd", "rev-rev", "rev-fwd", "fwd-rev", "fwd-rev-fwd"],
)
def test_transforms_of_torch_func(orders, nested, straight_through):
    x = HARD[:6]
    found = nested(lambda x: log_clip(x, CLIP, straight_through))(x)
    while found.ndim > 1:  # numbers depend on themselves alone
        found = found.diagonal()
    torch.testing.assert_close(found, derivative(x, straight_through, orders))


@pytest.mark.parametrize("in_dim", [0, 1, -1])
def test_vmap_over_any_dimension(in_dim):
    x = torch.randn(4, 3)
    assert torch.equal(func.vmap(lambda x: log_clip(x, CLIP), in_dim, in_dim)(x), log_clip(x, CLIP))


@modes
def test_forward_mode_through_a_plain_backward(straight_through):
    """Of numbers that are 0, where the derivative of 1 / x is NaN."""
    values = HARD[[0, 1, 2, 4, 5]]
    x = values.clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        (grad,) = torch.autograd.grad(log_clip(dual, CLIP, straight_through).sum(), x)
        torch.testing.assert_close(forward_ad.unpack_dual(grad).tangent, derivative(values, straight_through, 2))


@pytest.mark.slow
@modes
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.weekly])]
)
def test_compiles_whole(backend, straight_through):
    torch._dynamo.reset()
    call = partial(log_clip, clip_value=1e-3, straight_through=straight_through)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for dtype in DTYPES:
        eager, traced = (HARD.to(dtype, copy=True).requires_grad_() for _ in range(2))
        expected, found = call(eager), compiled(traced)
        expected.backward(torch.ones_like(expected))
        found.backward(torch.ones_like(found))
        torch.testing.assert_close(found, expected, equal_nan=True)
        # A compiler cannot tell minus infinity from numbers that have no slope.
        kept = ~HARD.isneginf() if straight_through else slice(None)
        torch.testing.assert_close(traced.grad[kept], eager.grad[kept], equal_nan=True)


@pytest.mark.slow
@modes
def test_compiles_whole_under_autocast_and_within_torch_func(straight_through):
    torch._dynamo.reset()

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def slopes(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return func.vmap(func.grad(lambda x: log_clip(x, CLIP, straight_through)))(x)

    x = torch.tensor([0.0, 0.3, 2.0], dtype=torch.bfloat16)
    torch.testing.assert_close(slopes(x), derivative(x, straight_through))


@pytest.mark.sampled(default=3)
@modes
@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_any_batch(strict, straight_through):
    class Model(torch.nn.Module):
        def forward(self, x):
            return log_clip(x, CLIP, straight_through)

    sizes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(Model(), (torch.randn(3, 2),), dynamic_shapes=sizes, strict=strict)
    x = torch.randn(5, 2)
    torch.testing.assert_close(exported.module()(x), log_clip(x, CLIP))


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_widens_16_bits(dtype):
    x = torch.rand(3).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = log_clip(x, 1e-12)  # 0 in float16
    assert out.dtype == (dtype if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out, x.to(out.dtype).log(), rtol=0, atol=0)
    assert torch.autograd.grad(out.sum(), x)[0].dtype == dtype


@pytest.mark.parametrize("clip_value", [1e-6, 3.1e-8, 0.1, 7, 65504.0, 1e-5, 1 / 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_clip_is_rounded_as_tensors_are(dtype, clip_value):
    x = torch.tensor([clip_value, 0], dtype=dtype, requires_grad=True)
    out = log_clip(x, clip_value)
    torch.testing.assert_close(out.detach(), x.detach()[:1].log().expand(2), rtol=0, atol=0)
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [0, 0]  # both are at the clip or below


def test_saves_x_and_reads_it_once():
    x = torch.rand(4, 3, requires_grad=True)
    saved, read = [], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: read.append(t) or t):
        out = log_clip(x)
    out.sum().backward()
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()]
    assert len(read) == 1


@pytest.mark.parametrize("context", [torch.autograd.graph.save_on_cpu, None])
def test_checkpointing_and_offloading_change_nothing(context):
    x = torch.rand(4, 3, requires_grad=True)
    if context is None:
        out = checkpoint(lambda x: log_clip(x * 2, CLIP).square(), x, use_reentrant=False)
    else:
        with context():
            out = log_clip(x * 2, CLIP).square()
    expected = torch.autograd.grad((x * 2).clamp(min=CLIP).log().square().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), expected)


@modes
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3, 4)])
def test_any_shape_and_layout(shape, straight_through):
    x = torch.randn(shape).T if len(shape) == 2 else torch.randn(shape).transpose(0, -1) if shape else torch.randn(())
    x.requires_grad_()
    out = log_clip(x, CLIP, straight_through)
    assert torch.equal(out, x.clamp(min=CLIP).log())
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, derivative(x.detach(), straight_through))


@modes
def test_meta_tensors(straight_through):
    x = torch.empty(4, 3, dtype=torch.float16, device="meta", requires_grad=True)
    out = log_clip(x, straight_through=straight_through)
    out.sum().backward()
    assert (out.shape, out.dtype, x.grad.device.type) == (x.shape, torch.float16, "meta")


def check_sharded_tensors(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, whole = init_device_mesh("cpu", (2,)), torch.randn(5, 3)
    for straight_through in (False, True):
        x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
        log_clip(x, CLIP, straight_through).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), derivative(whole, straight_through))


def test_sharded_tensors():
    run_ranks(check_sharded_tensors)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, dtype=torch.int64), r"needs a floating tensor; got torch.int64. Call x.float\(\)"),
        (torch.ones(2, dtype=torch.bool), r"got torch.bool. Call x.float\(\)"),
        (torch.ones(2, dtype=torch.complex64), r"got torch.complex64. Call x.abs\(\) or take its real part"),
    ],
)
def test_refuses_what_has_no_logarithm_here(x, message):
    with pytest.raises(TypeError, match=message):
        log_clip(x)


@pytest.mark.parametrize("clip_value", [True, "0.1", None, torch.tensor(0.1)])
def test_refuses_a_clip_that_is_no_number(clip_value):
    with pytest.raises(TypeError, match=r"clip_value must be a real number; got .*give clip_value.item"):
        log_clip(torch.ones(2), clip_value)


@pytest.mark.parametrize("clip_value", [np.float32(0.25), np.float64(0.25), np.float16(0.25), Fraction(1, 4)], ids=repr)
def test_takes_any_real_number(clip_value):
    assert torch.equal(log_clip(HARD[:6], clip_value), log_clip(HARD[:6], CLIP))
    assert torch.equal(log_clip(HARD[:6], np.int64(2)), log_clip(HARD[:6], 2))


@pytest.mark.parametrize("clip_value", [0, 0.0, -0.0, -1e-6, math.inf, -math.inf, math.nan])
def test_refuses_a_clip_without_logarithm(clip_value):
    with pytest.raises(ValueError, match=f"clip_value must be finite and above 0; got {float(clip_value)}"):
        log_clip(torch.ones(2), clip_value)


@pytest.mark.parametrize(
    ("dtype", "clip_value", "message"),
    [
        (torch.float16, 2.9e-8, "from 5.96e-08 to 6.55e[+]04 in torch.float16; got 2.9e-08, which is 0 there"),
        (torch.float16, 1e5, "got 100000.0, which is infinite there"),
        (torch.float32, 1e-46, "got 1e-46, which is 0 there. Take one in that range, or give x in a wider dtype"),
        (torch.bfloat16, 1e300, "which is infinite there"),
    ],
)
def test_refuses_a_clip_that_the_dtype_does_not_have(dtype, clip_value, message):
    with pytest.raises(ValueError, match=message):
        log_clip(torch.ones(2, dtype=dtype), clip_value)


@pytest.mark.gpu
@modes
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_matches_cpu(dtype, straight_through):
    torch.use_deterministic_algorithms(True)
    try:
        on_cpu, on_gpu = HARD.to(dtype, copy=True).requires_grad_(), HARD.to("cuda", dtype).requires_grad_()
        expected, out = log_clip(on_cpu, CLIP, straight_through), log_clip(on_gpu, CLIP, straight_through)
        expected.sum().backward()
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(out.cpu(), expected, equal_nan=True)
    torch.testing.assert_close(on_gpu.grad.cpu(), on_cpu.grad, equal_nan=True)


@pytest.mark.gpu
def test_gpu_autocast_is_that_of_log():
    x = torch.rand(3, device="cuda", dtype=torch.float16)
    with torch.autocast("cuda"):
        assert log_clip(x).dtype == x.log().dtype == torch.float32
