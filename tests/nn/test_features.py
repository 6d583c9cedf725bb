"""What layers say of inputs that have another width or dtype than they were made for."""

import re

import pytest
import torch
from lightning import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_geometric.nn import GIN

from lightning_accel.models import Classifier, Experts, MoEClassifier, MoERegressor
from lightning_accel.nn import (
    RBM,
    AdaptiveComputation,
    CausalSelfAttention,
    ContrastiveDivergence,
    DynamicRNN,
    ExpertChoiceGate,
    FeedForward,
    MixtureOfExperts,
    RBMStack,
    TopKGate,
    TransformerBlock,
    TreeRNN,
)
from lightning_accel.nn.features import require_width
from lightning_accel.nn.relational.layers import RO3Conv, RO3Pooling
from lightning_accel.nn.relational.pooling import RelationalPooling

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")  # of a block's norm, once a process

WIDTH = 6
EDGES = torch.tensor([[0, 1, 2, 1], [1, 2, 1, 0]])
PARENT = torch.tensor([-1, 0, 0])


class OnGraph(nn.Module):
    """A layer that is called with a graph beside the features."""

    def __init__(self, layer: nn.Module, graph: Tensor) -> None:
        super().__init__()
        self.layer, self.graph = layer, graph

    def forward(self, x):
        return self.layer(x, self.graph)


class OnImages(nn.Module):
    """A classifier of images, which have the features of a row as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Classifier(WIDTH, 3, channels=[4]).eval()

    def forward(self, x):
        return self.layer(x[:, :, None, None].expand(-1, -1, 4, 5))


class OnSequence(nn.Module):
    """A layer of sequences, of which a row is a step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x[None])


class Method(nn.Module):
    """Another method of a layer than its forward."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        super().__init__()
        self.layer, self.name = layer, name

    def forward(self, x):
        return getattr(self.layer, self.name)(x)


# makes the layer; what it says of a width of 5; whether it takes integers, and whether it converts other float dtypes
LAYERS = {
    "mixture": (lambda: MixtureOfExperts(WIDTH, 8, 4), "MixtureOfExperts(dim=6) takes tokens (..., 6)", False, False),
    "top_k": (lambda: TopKGate(WIDTH, 4), "TopKGate(dim=6) takes tokens (N, 6)", False, True),
    "choice": (lambda: ExpertChoiceGate(WIDTH, 4), "ExpertChoiceGate(dim=6) takes tokens (N, 6)", False, True),
    "feed_forward": (lambda: FeedForward(WIDTH, 8), "FeedForward(dim=6) takes x (..., 6)", False, False),
    "attention": (
        lambda: OnSequence(CausalSelfAttention(WIDTH, 1)), "CausalSelfAttention(dim=6) takes x (B, T, 6)", False, False
    ),
    "block": (
        lambda: OnSequence(TransformerBlock(WIDTH, 1, FeedForward(WIDTH, 8))),
        "TransformerBlock(dim=6) takes x (B, T, 6)", False, False,
    ),
    "rbm": (lambda: RBM(WIDTH, 4), "RBM(num_visible=6) takes rows (..., 6)", True, True),
    "rbm_labels": (
        lambda: RBM(4, 3, num_labels=2), "RBM(num_visible=6) takes rows (..., 6), labels included", True, True
    ),
    "free_energy": (lambda: Method(RBM(WIDTH, 4), "free_energy"), "RBM(num_visible=6) takes rows (..., 6)", True, True),
    "sample_visible": (
        lambda: Method(RBM(4, WIDTH), "sample_visible"), "RBM(num_hidden=6) takes hidden states (..., 6)", True, True
    ),
    "stack": (lambda: RBMStack([RBM(WIDTH, 4), RBM(4, 3)]), "RBMStack(num_visible=6) takes rows (B, 6)", True, True),
    "rnn": (lambda: OnSequence(DynamicRNN(WIDTH, 4)), "DynamicRNN needs x of shape (B, T, 6)", False, True),
    "rnn_step": (
        lambda: Method(DynamicRNN(WIDTH, 4), "step"), "DynamicRNN(input_size=6) takes a step x (B, 6)", False, True
    ),
    "tree": (lambda: OnGraph(TreeRNN(WIDTH, 4), PARENT), "TreeRNN(input_size=6) takes x (N, 6)", False, False),
    "adaptive": (
        lambda: AdaptiveComputation(nn.GRUCell(WIDTH + 1, 4), 4, 3),
        "AdaptiveComputation(cell.input_size - 1=6) takes x (B, 6)", False, False,
    ),
    "classifier": (
        lambda: Classifier(WIDTH, 3), "Classifier(num_features=6) takes rows (B, ...) of 6 values", False, False
    ),
    "images": (OnImages, "Classifier(num_features=6) takes images (B, 6, H, W)", False, False),
    "moe_classifier": (
        lambda: MoEClassifier(WIDTH, 3, dim=8, experts=Experts(hidden_dim=8)),
        "MoEClassifier(num_features=6) takes rows (B, ...) of 6 values", False, False,
    ),
    "moe_regressor": (
        lambda: MoERegressor(WIDTH, dim=8, experts=Experts(hidden_dim=8)),
        "MoERegressor(num_features=6) takes rows (B, ...) of 6 values", False, False,
    ),
    "ro3_conv": (lambda: OnGraph(RO3Conv(WIDTH, 4), EDGES), "RO3Conv(in_channels=6) takes x (N, 6)", True, True),
    "ro3_pooling": (
        lambda: OnGraph(RO3Pooling(WIDTH, 4), EDGES),
        "RelationalOrder3Pooling(in_channels=6) takes x (N, 6)", True, True,
    ),
    "relational_pooling": (
        lambda: OnGraph(RelationalPooling(GIN(WIDTH + 2, 8, num_layers=1), tuples="edges"), EDGES),
        "RelationalPooling calls its base_gnn with rows of 7 features, 5 of a node and 2 marks; GIN does not take them",
        False, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_wrong_widths_and_dtypes_are_refused_by_the_layers_name(name):
    make, of_width, takes_integers, converts = LAYERS[name]
    layer, x = make(), torch.rand(3, WIDTH)
    named = of_width.partition("(")[0].partition(" ")[0]
    layer(x)
    with pytest.raises(ValueError, match=re.escape(of_width)):
        layer(torch.rand(3, WIDTH - 1))
    if takes_integers:
        torch.manual_seed(1)
        ones = layer(torch.ones(3, WIDTH))
        torch.manual_seed(1)
        torch.testing.assert_close(layer(torch.ones(3, WIDTH, dtype=torch.int64)), ones, check_dtype=False)
    else:
        with pytest.raises((TypeError, ValueError), match=rf"({named}|x must be).*floating.*got torch.int64"):
            layer(torch.ones(3, WIDTH, dtype=torch.int64))
    if converts:
        layer(x.double())
    else:
        with pytest.raises(TypeError, match=r"has torch.float32 weights and takes torch.float32 .* got torch.float64"):
            layer(x.double())
    if name not in ("block", "relational_pooling") and not converts:  # whose norm, or eps, makes x as wide
        with pytest.raises(TypeError, match=rf"{named} has torch.float64 weights and takes .* got torch.float32"):
            layer.double()(x)


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_mixes_dtypes_and_low_precision_modules_run(name):
    layer, x = LAYERS[name][0](), torch.rand(3, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
        layer(x.bfloat16())
    layer.bfloat16()(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize(
    "name", ["mixture", "feed_forward", "rbm", "classifier", pytest.param("images", marks=pytest.mark.slow), "rnn_step"]
)
def test_checks_leave_no_trace_in_compiled_exported_and_mapped_layers(name):
    layer, x = LAYERS[name][0]().eval(), torch.rand(3, WIDTH)
    expected = _first(layer(x))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(_first(compiled(x)), expected)
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    torch.testing.assert_close(_first(exported.module()(torch.cat([x, x])))[: len(expected)], expected)
    parameters = dict(layer.named_parameters())
    mapped = torch.func.vmap(lambda one: _first(torch.func.functional_call(layer, parameters, (one,))))
    if name != "mixture":  # its sort has no rule
        torch.testing.assert_close(mapped(x.expand(2, 3, WIDTH))[1], expected)
    if name != "mixture":  # nor has meta autocast, which its gate turns off
        assert _first(layer.to("meta")(x.to("meta"))).shape == expected.shape
    with pytest.raises((ValueError, TypeError), match=r"takes .*got"):
        layer.to("meta")(torch.empty(3, WIDTH - 1, device="meta"))


def _first(output):
    return output if isinstance(output, Tensor) else output[0]


def test_contrastive_divergence_names_the_width_of_the_rbm():
    with pytest.raises(ValueError, match=r"RBM\(num_visible=6\) takes rows \(..., 6\); got \(3, 5\)"):
        ContrastiveDivergence()(RBM(WIDTH, 4), torch.rand(3, 5))


def test_a_base_that_fails_for_another_reason_is_not_explained_away():
    class Failing(nn.Module):
        def forward(self, x, edge_index):
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match=r"^out of luck$"):
        RelationalPooling(Failing())(torch.rand(3, 2), EDGES)


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match=r"MixtureOfExperts\(dim=6\) takes tokens \(..., 6\); got a list"):
        MixtureOfExperts(WIDTH, 8, 4)([[0.0] * WIDTH])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MoEClassifier(num_features=10, num_classes=3), r"MoEClassifier\(num_features=10\) takes rows"),
        (lambda: Classifier(num_features=10, num_classes=3), r"Classifier\(num_features=10\) takes rows"),
    ],
)
def test_a_fit_on_rows_of_another_width_says_so(make, message, tmp_path):
    rows = DataLoader(TensorDataset(torch.rand(4, 8, 8), torch.zeros(4, dtype=torch.long)), batch_size=2)
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", fast_dev_run=True, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=rf"{message} .* of 10 values; got \(2, 8, 8\)"):
        trainer.fit(make(), rows)


def test_another_width_names_the_argument_that_sets_it():
    with pytest.raises(ValueError, match=r"got \(5, 3\). Pass input_size=3, or an input of that width"):
        require_width(torch.nn.Linear(4, 2), torch.ones(5, 3), "input_size", 4, "x (N, {})", ndim=2)
    with pytest.raises(ValueError, match=r"got \(5,\)$"):
        require_width(torch.nn.Linear(4, 2), torch.ones(5), "input_size", 4, "x (N, {})", ndim=2)
