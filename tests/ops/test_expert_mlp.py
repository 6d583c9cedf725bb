import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch._dynamo.testing
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

from lightning_accel.ops import expert_mlp
from lightning_accel.ops.expert_mlp import choose_backend
from lightning_accel.ops.native import KERNELS

ACTIVATIONS = {
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
LAYOUTS = list(product(ACTIVATIONS, [False, True], [False, True]))


def inputs(counts, dtype=torch.float64, num_tokens=7, dim=5, hidden_dim=3, gated=True, bias=True, left_out=0):
    """Arguments of expert_mlp as far as they have gradients, and those that have none."""
    counts = torch.tensor(counts)
    num_slots, num_experts = int(counts.sum()) + left_out, len(counts)
    up_dim = (1 + gated) * hidden_dim
    shapes = [(num_tokens, dim), (num_slots,), (num_experts, up_dim, dim), (num_experts, dim, hidden_dim)]
    if bias:
        shapes += [(num_experts, up_dim), (num_experts, dim)]
    learned = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    return learned, torch.randint(num_tokens, (num_slots,)), counts


def run(learned, token_of_slot, counts, **kwargs):
    tokens, weights, *layers = learned
    return expert_mlp(tokens, token_of_slot, weights, counts, *layers, **kwargs)


def slot_by_slot(learned, token_of_slot, counts, activation):
    tokens, weights, up, down, *biases = learned
    act = ACTIVATIONS[activation]
    out = [torch.zeros_like(token) for token in tokens]
    experts = torch.arange(len(counts)).repeat_interleave(counts).tolist()
    for expert, token, weight in zip(experts, token_of_slot.tolist(), weights, strict=False):
        hidden = up[expert] @ tokens[token] + (biases[0][expert] if biases else 0)
        hidden_dim = down.shape[2]
        h = act(hidden[:hidden_dim])
        if len(hidden) > hidden_dim:
            h = h * hidden[hidden_dim:]
        out[token] = out[token] + weight * (down[expert] @ h + (biases[1][expert] if biases else 0))
    return torch.stack(out)


@pytest.mark.parametrize("backend", ["blocks", "dense", "loop"])
@pytest.mark.parametrize(("activation", "gated", "bias"), LAYOUTS)
def test_matches_slot_by_slot(backend, activation, gated, bias):
    arguments = inputs([2, 0, 4, 1], gated=gated, bias=bias, left_out=2)
    actual = run(*arguments, activation=activation, backend=backend)
    expected = slot_by_slot(*arguments, activation)
    probe = torch.randn_like(actual)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, arguments[0], probe), torch.autograd.grad(expected, arguments[0], probe)
    )


@pytest.mark.parametrize("counts", [[0, 0], [1, 0], [5000, 3], [300, 2100], [1, 1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_match_loop_whatever_the_counts(counts, dtype):
    """5000 rows of one expert take several blocks and panels; sums over so many slots are wide in both."""
    arguments = inputs(counts, dtype, num_tokens=900, left_out=17)
    for tensor in arguments[0][2:]:
        tensor.data *= 0.3
    results = []
    for backend in ("blocks", "loop"):
        out = run(*arguments, backend=backend)
        results.append((out, *torch.autograd.grad(out, arguments[0], torch.ones_like(out))))
    scale = [reference.abs().amax().item() if reference.numel() else 0 for reference in results[1]]
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    for actual, expected, largest in zip(*results, scale, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=bound * max(largest, 1e-3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("activation", "gated", "bias"), LAYOUTS)
def test_the_kernel_computes_what_python_does(native, activation, gated, bias, dtype):
    """Blocks end within experts, and panels of the backward pass, too; an expert and a token have no slot."""
    counts = [2100, 0, 530, 1, 17]
    learned, token_of_slot, counts = inputs(counts, dtype, 900, gated=gated, bias=bias, left_out=5)
    out = run(learned, token_of_slot, counts, activation=activation, backend="blocks")
    found = [out, *torch.autograd.grad(out.square().sum(), learned)]
    with KERNELS.switched_off():
        out = run(learned, token_of_slot, counts, activation=activation, backend="blocks")
        expected = [out, *torch.autograd.grad(out.square().sum(), learned)]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.02)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * other.abs().max().item())


def test_what_would_read_other_memory_is_an_error(native):
    learned, token_of_slot, counts = inputs([2, 1])
    with pytest.raises(IndexError, match=r"token_of_slot must lie in \[0, N\)"):
        run(learned, token_of_slot + 7, counts, backend="blocks")
    with pytest.raises(RuntimeError, match="at most the number of slots"):
        run(learned, token_of_slot, counts + 1, backend="blocks")
    for wrong in ([*learned[:2], learned[2][..., :-1], *learned[3:]], [*learned[:4], learned[4][:1], learned[5]]):
        with pytest.raises(RuntimeError, match=r"tokens \(N, D\), .* disagree in shape or dtype"):
            run(wrong, token_of_slot, counts, backend="blocks")
    expected = run(learned, token_of_slot, counts, backend="blocks")
    assert run(learned, token_of_slot.int(), counts.int(), backend="blocks").equal(expected)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_nan_of_an_expert_stays_out_of_the_padding_of_the_next(has_kernel):
    learned, _, counts = inputs([130, 70], torch.bfloat16, 200)
    learned[0].data[75] = torch.nan  # 70 rows are padded to 80
    with nullcontext() if has_kernel else KERNELS.switched_off():
        out = run(learned, torch.arange(200), counts, backend="blocks")
        gradients = torch.autograd.grad(out[torch.arange(200) != 75].sum(), learned)
    assert all(one[1].isfinite().all() for one in gradients[2:])


def test_second_derivatives_are_those_of_the_loop():
    learned, token_of_slot, counts = inputs([2, 0, 4, 1], left_out=1)

    def penalty(backend):
        out = run(learned, token_of_slot, counts, backend=backend)
        gradients = torch.autograd.grad(out.sum(), learned, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in gradients) + out.square().sum(), learned)

    torch.testing.assert_close(penalty("blocks"), penalty("loop"))
    batched = [
        torch.autograd.grad(
            run(learned, token_of_slot, counts, backend=backend), learned, torch.eye(35).double().view(35, 7, 5),
            is_grads_batched=True,
        )
        for backend in ("blocks", "loop")
    ]  # fmt: skip
    torch.testing.assert_close(*batched)


def test_transforms_take_the_loop():
    learned, token_of_slot, counts = inputs([2, 0, 4, 1])
    expected = torch.autograd.grad(run(learned, token_of_slot, counts).sum(), learned[0])[0]

    def total(tokens):
        return run([tokens, *learned[1:]], token_of_slot, counts, backend="blocks").sum()

    by_func = torch.func.grad(total)(learned[0])
    torch.testing.assert_close(by_func, expected)


def test_operations_are_counted(native):
    learned, token_of_slot, counts = inputs([2, 1], bias=False)
    with FlopCounterMode(display=False) as forward:
        out = run(learned, token_of_slot, counts, backend="blocks")
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 2 * 3 * (6 * 5 + 3 * 5)
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


@pytest.mark.slow
def test_gradients():
    learned, *rest = inputs([2, 0, 1], num_tokens=3, dim=2, hidden_dim=2, left_out=1)
    assert gradcheck(lambda *tensors: run(tensors, *rest, backend="blocks"), learned)
    assert gradgradcheck(lambda *tensors: run(tensors, *rest, backend="loop"), learned)


def test_op_is_registered_right():
    learned, token_of_slot, counts = inputs([2, 0, 4, 1], torch.float32)
    tokens, weights, up, down, *biases = learned
    for x in (tokens, torch.randn(5, 7).t().requires_grad_()):  # the latter with other strides
        arguments = x, token_of_slot, weights, counts, up, down, biases, "gelu", True
        torch.library.opcheck(
            torch.ops.lightning_accel.expert_mlp_blocks.default,
            arguments,
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


@pytest.mark.slow
def test_compiles_whole_and_once_for_any_split_of_the_slots():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for counts in ([2, 0, 4, 1], [7, 0, 0, 0], [1, 2, 2, 2]):
        arguments = inputs(counts, torch.float32)
        actual, expected = compiled(*arguments), run(*arguments, backend="blocks")
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            torch.autograd.grad(actual.sum(), arguments[0]), torch.autograd.grad(expected.sum(), arguments[0])
        )
    assert counter.frame_count == 1


def test_garbage_in_fresh_memory_does_not_show():
    arguments = inputs([37, 5, 0, 70], torch.bfloat16, num_tokens=50)  # rows that are padded, in 16 bits
    results = []
    for deterministic in (True, False):  # which fills fresh memory with NaN
        torch.use_deterministic_algorithms(deterministic)
        try:
            out = run(*arguments, backend="blocks")
            results.append((out, *torch.autograd.grad(out.sum(), arguments[0])))
        finally:
            torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_without_gradients_a_block_is_kept_at_most():
    arguments = inputs([700, 0, 900, 300], torch.bfloat16, num_tokens=1000)
    expected = run(*arguments, backend="blocks")
    with torch.no_grad():
        torch.testing.assert_close(run(*arguments, backend="blocks"), expected, rtol=0, atol=0)
    learned, token_of_slot, counts = arguments
    tokens, weights, up, down, *biases = (tensor.detach() for tensor in learned)
    _, before, visited = torch.ops.lightning_accel.expert_mlp_blocks(
        tokens, token_of_slot, weights, counts, up, down, biases, "gelu", False
    )
    assert max(len(before), len(visited)) < 600 * torch.get_num_threads()  # a block has rows for each


def test_frozen_experts_pass_gradients_on():
    arguments = inputs([2, 0, 4, 1])
    for tensor in arguments[0][2:]:
        tensor.requires_grad_(False)
    results = [torch.autograd.grad(run(*arguments, backend=b).sum(), arguments[0][:2]) for b in ("blocks", "loop")]
    torch.testing.assert_close(*results)


def test_many_slots_of_a_token_are_summed_in_float32():
    """In bf16, 4096 ones would add up to 256."""
    counts, ones = torch.tensor([4096]), torch.ones(4096, dtype=torch.bfloat16)
    tokens, weights = torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, 1, dtype=torch.bfloat16)
    for backend in ("blocks", "loop"):
        out = expert_mlp(
            tokens, torch.zeros(4096, dtype=torch.int64), ones, counts, weights, weights, None, None, "relu", backend
        )
        assert out.item() == 4096


def test_one_bias_is_refused():
    learned, *rest = inputs([2, 1])
    with pytest.raises(ValueError, match="give both biases, or none"):
        run(learned[:-1], *rest, backend="blocks")


def test_biases_alone_may_learn():
    arguments = inputs([2, 0, 4, 1])
    for tensor in arguments[0][:-2]:
        tensor.requires_grad_(False)
    results = [torch.autograd.grad(run(*arguments, backend=b).sum(), arguments[0][-2:]) for b in ("blocks", "loop")]
    torch.testing.assert_close(*results)


def test_float64_stays_under_autocast():
    arguments = inputs([2, 0, 4, 1])
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(*arguments)
    torch.testing.assert_close(actual, run(*arguments), rtol=0, atol=0)


def test_autocast_rounds():
    learned, *rest = inputs([2, 0, 4, 1], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(learned, *rest)
    rounded = [tensor.bfloat16() if tensor.ndim > 1 else tensor for tensor in learned]
    torch.testing.assert_close(actual, run(rounded, *rest), rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(learned, *rest, backend="blocks")
    torch.testing.assert_close(actual, run(rounded, *rest, backend="blocks"), rtol=0, atol=0)


def test_backends_are_chosen_and_checked():
    def chosen(*options):
        layers = [torch.empty(shape, **kwargs) for kwargs, shapes in options for shape in shapes]
        return [choose_backend(*layers, num_slots) for num_slots in (63, 64, 255, 256)]

    small, large = [(2, 8, 8)] * 2, [(2, 512, 256), (2, 256, 512)]
    with KERNELS.switched_off():
        assert chosen(({"requires_grad": True}, small)) == ["loop"] * 3 + ["blocks"]
        assert chosen(({"requires_grad": True}, large)) == ["blocks"] * 4
        assert chosen(({}, large)) == ["loop"] * 3 + ["blocks"]
    with_kernel = ["blocks"] if KERNELS.serves(torch.device("cpu")) else ["loop"]
    assert chosen(({}, small)) == with_kernel * 3 + ["blocks"]
    up, down = torch.empty(2, 8, 8), torch.empty(2, 8, 8)
    assert choose_backend(up.to("meta"), down.to("meta"), 256) == "loop"
    arguments = inputs([2, 1])
    with pytest.raises(
        ValueError, match="backend must be one of auto, blocks, dense, grouped_mm, loop, triton; got 'fast'"
    ):
        run(*arguments, backend="fast")
    with pytest.raises(
        ValueError, match="activation must be one of gelu, gelu_tanh, quick_gelu, relu, silu; got 'tanh'"
    ):
        run(*arguments, activation="tanh")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_matches_float64(dtype):
    learned, token_of_slot, counts = inputs([20, 0, 41, 13], dtype, num_tokens=40, dim=16, hidden_dim=8, left_out=3)
    for tensor in learned[2:]:
        tensor.data *= 0.3
    wide = [tensor.detach().double().requires_grad_() for tensor in learned]
    expected = run(wide, token_of_slot, counts)
    on_gpu = [tensor.detach().cuda().requires_grad_() for tensor in learned]
    has_kernel = dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] in (9, 10)
    assert choose_backend(*on_gpu[2:4], len(token_of_slot)) == ("grouped_mm" if has_kernel else "triton")
    actual = run(on_gpu, token_of_slot.cuda(), counts.cuda())
    tolerance = {"rtol": 0, "atol": 1e-4 if dtype == torch.float32 else 0.1}
    torch.testing.assert_close(actual.double().cpu(), expected, **tolerance)
    grads = torch.autograd.grad(actual.sum(), on_gpu)
    for grad, reference in zip(grads, torch.autograd.grad(expected.sum(), wide), strict=True):
        torch.testing.assert_close(grad.double().cpu(), reference, rtol=0, atol=tolerance["atol"] * 10)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_never_waits_for_the_device(dtype):
    learned, token_of_slot, counts = inputs([20, 0, 41, 13], dtype, num_tokens=40, dim=16, hidden_dim=8)
    on_gpu = [tensor.detach().cuda().requires_grad_() for tensor in learned], token_of_slot.cuda(), counts.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*on_gpu).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(arguments):
    learned, token_of_slot, counts = arguments
    return [tensor.detach().cuda().requires_grad_() for tensor in learned], token_of_slot.cuda(), counts.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["grouped_mm", "triton"])
def test_cuda_ignores_slots_past_the_counts(backend, dtype):
    learned, *slots = on_gpu(inputs([20, 0, 41, 13], dtype, num_tokens=40, dim=16, hidden_dim=8, left_out=30))
    learned[1].data[-30:] = torch.nan
    out = run(learned, *slots, backend=backend)
    gradients = torch.autograd.grad(out.sum(), learned)
    without = [learned[0], learned[1].detach()[:-30].requires_grad_(), *learned[2:]]
    expected = run(without, slots[0][:-30], slots[1], backend=backend)
    references = torch.autograd.grad(expected.sum(), without)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    torch.testing.assert_close(out, expected, **tolerance)
    assert gradients[1][-30:].abs().sum() == 0
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient[: len(reference)], reference, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_cuda_has_second_derivatives(bias):
    learned, *slots = on_gpu(inputs([2, 0, 4, 1], torch.float32, bias=bias, left_out=2))
    results = []
    for backend in ("triton", "loop"):
        first = torch.autograd.grad(run(learned, *slots, backend=backend).pow(3).sum(), learned, create_graph=True)
        second = torch.autograd.grad(sum(part.square().sum() for part in first), learned, create_graph=True)
        third = torch.autograd.grad(sum(part.abs().sum() for part in second), learned)
        results.append((*first, *second, *third))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.detach().abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["grouped_mm", "triton"])
def test_cuda_sums_in_one_order(backend):
    learned, *slots = on_gpu(inputs([200, 0, 410, 130], torch.bfloat16, num_tokens=4, dim=64, hidden_dim=32))
    runs = []
    for _ in range(5):
        out = run(learned, *slots, backend=backend)
        runs.append((out, *torch.autograd.grad(out.float().square().sum(), learned)))
    for repeated in runs[1:]:
        torch.testing.assert_close(repeated, runs[0], rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["grouped_mm", "triton"])
def test_cuda_within_torch_func_and_in_forward_mode(backend):
    learned, *slots = on_gpu(inputs([2, 0, 4, 1], torch.float32))
    learned = [one.detach() for one in learned]
    found = []
    for one in (backend, "loop"):
        call = lambda tokens, one=one: run([tokens, *learned[1:]], *slots, backend=one)  # noqa: E731
        gradient = torch.func.grad(lambda tokens, call=call: call(tokens).sum())(learned[0])
        tangent = torch.func.jvp(call, (learned[0],), (torch.ones_like(learned[0]),))[1]
        with forward_ad.dual_level():
            dual = call(forward_ad.make_dual(learned[0], torch.ones_like(learned[0])))
            found.append((gradient, tangent, forward_ad.unpack_dual(dual).tangent))
    torch.testing.assert_close(*found)
    assert found[0][1].abs().sum() > 0


@pytest.mark.gpu
def test_triton_gathers_tokens_within_the_product():
    learned, *slots = on_gpu(inputs([20, 0, 41, 13], torch.float32, num_tokens=40, dim=12, hidden_dim=8))
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.setdefault(one.data_ptr(), one), lambda one: one):
        run(learned, *slots, backend="triton")
    outputs_of_experts = [one for one in saved.values() if one.shape == (len(slots[0]), 12)]
    assert len(outputs_of_experts) == 1
