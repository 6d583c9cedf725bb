"""Every layer, operation and model's step on a GPU: its numbers, its waits, and that it compiles."""

import copy
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.nn import GIN

from lightning_accel import ops
from lightning_accel.nn import (
    RBM,
    AdaptiveComputation,
    ContrastiveDivergence,
    DynamicRNN,
    ExpertChoiceGate,
    FeedForward,
    MixtureOfExperts,
    RBMStack,
    TransformerBlock,
    TreeRNN,
)
from lightning_accel.nn.relational.layers import RO3Conv, RO3Pooling
from lightning_accel.nn.relational.pooling import RelationalPooling
from lightning_accel.precision import Bfloat16Precision
from tests.strategies.trained import SGD, fit, whole_weights

pytestmark = pytest.mark.gpu

EMULATED = "EMULATED_GPUS" in os.environ
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # the last two: autocast


class Path(NamedTuple):
    call: Callable[..., Any]  # a module, or a function that takes `of` first
    inputs: tuple[Any, ...]
    of: nn.Module | None = None
    waits: bool = False  # by its nature: shapes depend on values
    branches: bool = False  # the host reads values, which compiled kernels do not compute on an emulated GPU
    draws: bool = False  # random numbers, which are not those of the CPU


def tokens(gate: Any = None, **options: Any) -> Path:
    mixture = MixtureOfExperts(6, 10, 4, **({} if gate is None else {"gate": gate}), **options)
    return Path(mixture, (torch.randn(3, 7, 6), torch.arange(7).expand(3, 7) < torch.tensor([[7], [3], [0]])))


def sequences(cell: str, execution: str, **options: Any) -> Path:
    rnn = DynamicRNN(4, 6, cell=cell, execution=execution, bidirectional=True, **options)
    return Path(rnn, (torch.randn(5, 7, 4), torch.tensor([3, 7, 0, 7, 1])), waits=execution != "padded")


def edges() -> tuple[Tensor, Tensor, Tensor]:
    edge_index = torch.tensor([[0, 1, 2, 0, 3, 4, 1, 2, 0, 3], [1, 2, 0, 3, 4, 0, 0, 1, 2, 0]])
    return torch.randn(6, 4), edge_index, torch.tensor([0, 0, 0, 0, 0, 1])


def train_rbm(rbm: RBM, rows: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(rbm.parameters(), lr=0.1)
    ContrastiveDivergence("pcd", num_chains=5).train_(rbm, rows, 4, optimizer)
    return rbm.free_energy(rows)


def paths() -> dict[str, Callable[[], Path]]:
    x, edge_index, batch = edges()
    rows = (torch.rand(20, 6) < 0.5).float()
    parent = torch.tensor([-1, 0, 0, 2, -1])
    starts = torch.rand(3, 70) < 0.1
    pooled = {"marks": 2, "kind": "edges"}
    return {
        "mixture, top k": tokens,
        "mixture, expert choice": lambda: tokens(ExpertChoiceGate),
        "mixture, capacity, shared expert": lambda: tokens(capacity_factor=1.0, shared_dim=3),
        "mixture, capacity, no mask": lambda: Path(
            MixtureOfExperts(8, 8, 4, capacity_factor=0.7), (torch.randn(30, 8),)
        ),
        "transformer block": lambda: Path(TransformerBlock(8, 2, MixtureOfExperts(8, 16, 4)), (torch.randn(2, 9, 8),)),
        "feed-forward": lambda: Path(FeedForward(8, 12), (torch.randn(5, 8),)),
        "recurrent, padded": lambda: sequences("gru", "padded"),
        "recurrent, staircase": lambda: sequences("lstm", "staircase"),
        "recurrent, packed": lambda: sequences("lstm", "packed"),
        "recurrent, lanes": lambda: sequences("mingru", "lanes"),
        "recurrent, scan": lambda: sequences("minlstm", "padded", pooling="mean"),
        "tree": lambda: Path(TreeRNN(4, 5), (torch.randn(5, 4), parent), waits=True, branches=True),
        "adaptive computation": lambda: Path(
            AdaptiveComputation(nn.GRUCell(5, 6), 6, max_steps=4), (torch.randn(3, 4),), waits=True
        ),
        "linear scan": lambda: Path(ops.linear_scan, (torch.rand(3, 70, 5), torch.randn(3, 70, 5), None, starts)),
        "gated scan": lambda: Path(
            lambda x, lengths: ops.gated_scan("mingru", x, None, None, lengths),
            (torch.randn(2, 9, 4), torch.tensor([3, 9])),
        ),
        "log_clip": lambda: Path(ops.log_clip, (torch.rand(40),)),
        "RBM, free energy": lambda: Path(RBM.free_energy, (rows,), RBM(6, 4)),
        "RBM, contrastive divergence": lambda: Path(
            train_rbm, (rows,), RBM(6, 4), waits=True, branches=True, draws=True
        ),
        "RBM, partition function": lambda: Path(RBM.log_prob, (rows,), RBM(6, 4), waits=True, branches=True),
        "belief network, bound": lambda: Path(
            lambda stack, rows: stack.transform(rows), (rows,), RBMStack([RBM(6, 4), RBM(4, 3)])
        ),
        "relational convolution": lambda: Path(RO3Conv(4, 3), (x, edge_index), waits=True),
        "relational pooling of triples": lambda: Path(
            RO3Pooling(4, 3, types=("triangle", "wedge", "edge", "empty")), (x, edge_index, None, batch, 2), waits=True
        ),
        "relational pooling of marks": lambda: Path(
            RelationalPooling(GIN(4 + 2, 5, 2), pooled["marks"], pooled["kind"]).eval(),
            (x, edge_index, None, batch),
            waits=True,
        ),
    }


NAMES = list(paths())


Step = Callable[[], list[Tensor]]


@pytest.fixture(autouse=True)
def whole_float32(monkeypatch):
    """Have cuDNN compute float32 as such: by default it rounds the products of recurrent networks to TF32."""
    for operations in (
        torch.backends.cudnn.rnn,
        torch.backends.cudnn.conv,
    ):  # torch refuses to be asked for unequal ones
        monkeypatch.setattr(operations, "fp32_precision", "ieee")


def without_waits(step: Step) -> list[Tensor]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        return step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def in_a_cuda_graph(step: Step) -> list[Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for one in found:
        one.zero_()
    graph.replay()
    return found


def run(
    path: Path, device: str, dtype: torch.dtype, execute: Callable[[Step], list[Tensor]] | None = None, wrap: Any = None
) -> list[Tensor]:
    """Return the floating outputs of a path and the gradients of its weights and inputs, on the CPU in float64."""
    autocast = device != "cpu" and dtype != torch.float32
    own = torch.float32 if autocast else dtype
    place = {"device": device, "dtype": own}

    def move(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return one.to(**place).requires_grad_() if one.is_floating_point() else one.to(device)

    inputs = tree_map(move, path.inputs)
    module = path.of if path.of is not None else path.call if isinstance(path.call, nn.Module) else None
    module = None if module is None else copy.deepcopy(module).to(**place)
    call = module if module is not None and path.of is None else path.call
    given = (module, *inputs) if path.of is not None else inputs
    if wrap is not None:
        call = wrap(call)
    learned = [one for one in inputs if isinstance(one, Tensor) and one.requires_grad]
    learned += [] if module is None or path.draws else list(module.parameters())

    def step() -> list[Tensor]:
        with torch.autocast("cuda", dtype, enabled=autocast):
            output = [one for one in tree_leaves(call(*given)) if isinstance(one, Tensor)]
            output = [one for one in output if one.is_floating_point()]
            assert all(one.device.type == device for one in output)
            losses = [one.float().square().mean() for one in output if one.requires_grad]
            gradients = torch.autograd.grad(sum(losses), learned, allow_unused=True) if losses else ()
        return [one.detach() for one in (*output, *gradients) if one is not None]

    return [one.double().cpu() for one in (step() if execute is None else execute(step))]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_the_cpu(name, precision):
    path = paths()[name]()
    actual = run(path, "cuda", PRECISIONS[precision])
    if path.draws:
        assert all(one.isfinite().all() for one in actual)
        return
    expected = run(path, "cpu", torch.float64)
    tolerance = 1e-4 if precision == "float32" else 0.1
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


ASYNCHRONOUS = [name for name in NAMES if not paths()[name]().waits]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_host_never_waits(name, precision):
    path = paths()[name]()
    run(path, "cuda", PRECISIONS[precision])  # what is planned once for a shape, is
    run(path, "cuda", PRECISIONS[precision], without_waits)


@pytest.mark.gpu(kernels=True)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_steps_are_captured_in_a_cuda_graph(name, precision):
    path = paths()[name]()
    actual = run(path, "cuda", PRECISIONS[precision], in_a_cuda_graph)
    tolerance = 1e-4 if precision == "float32" else 0.1
    torch.testing.assert_close(actual, run(path, "cpu", torch.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles nothing where Triton's kernels are interpreted")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_compiles(name, precision):
    torch.compiler.reset()
    path = paths()[name]()
    if EMULATED and path.branches:
        pytest.skip("the host reads what compiled kernels do not compute on an emulated GPU")
    actual = run(path, "cuda", PRECISIONS[precision], wrap=torch.compile)
    if not EMULATED and not path.draws:
        tolerance = 1e-4 if precision == "float32" else 0.1
        torch.testing.assert_close(actual, run(path, "cpu", torch.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "masters"])
@pytest.mark.parametrize("name", ["sequence", "graphs", "belief_network", "classifier", "language_model"])
def test_models_train(name, precision):
    given = {"plugins": [Bfloat16Precision()]} if precision == "masters" else {"precision": precision}
    options = {"optimizer": SGD, "num_rows": 8, "max_steps": 2, "accelerator": "gpu", "devices": 1}
    weights = whole_weights(fit(name, **options, **given))
    assert all(one.isfinite().all() for one in weights.values())
