import contextlib
import dataclasses
import math
import subprocess
import sys
import zipfile
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch_geometric.data import Data

from lightning_accel import Classifier, MoEClassifier, MoELanguageModel, MoERegressor, RelationalGNN, SequenceModel
from lightning_accel.compress import ExportError, Probabilities, export, load_compressed
from lightning_accel.compress import export as package_export
from lightning_accel.compress.export import loading as compressed
from lightning_accel.compress.quantization import form as quantization_form
from lightning_accel.compress.quantization import pt2e
from lightning_accel.compress.quantization.form import Form
from lightning_accel.compress.quantization.layers import find_layers
from lightning_accel.compress.quantization.onnx import onnx_dynamic
from lightning_accel.models import Experts, RecurrentLayers
from lightning_accel.nn import MixtureOfExperts

FORMATS = [("pt2", "m.pt2"), ("onnx", "m.onnx")]


class Batch(NamedTuple):
    x: torch.Tensor
    lengths: torch.Tensor


@dataclasses.dataclass
class Scores:
    logits: torch.Tensor
    extra: dict


class Structured(nn.Module):
    """Takes a NamedTuple, a dict with a plain value, and a tensor by name; gives a dataclass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch: Batch, options, *, shift):
        valid = torch.arange(batch.x.shape[1]) < batch.lengths.unsqueeze(1)
        mean = (batch.x * valid.unsqueeze(2)).sum(1) / batch.lengths.unsqueeze(1)
        logits = self.layer(mean) * options["factor"] + options["added"] + shift
        return Scores(logits, {"mean": mean, "largest": logits.max(), "name": "own"})


def structured_call(rows, steps):
    batch = Batch(torch.randn(rows, steps, 3), torch.randint(1, steps + 1, (rows,)))
    return (batch, {"added": torch.randn(rows, 2), "factor": 2.0}), {"shift": torch.randn(rows, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(("format", "name"), FORMATS)
def test_file_gives_what_the_module_gives_for_any_number_of_rows(format, name, tmp_path):
    module = Structured().train()
    calls = [structured_call(4, 5), structured_call(4, 6)]
    made = export(module, calls, tmp_path / name, format)
    assert made.outputs == ["logits", "extra.mean"]
    assert made.left_out == ["extra.largest"]
    assert made.num_checked == 4
    assert made.largest_difference < 1e-5
    assert made.file_bytes == (tmp_path / name).stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert module.training
    loaded = load_compressed(tmp_path / name)
    for rows, steps in ((1, 5), (7, 3)):
        (batch, options), kwargs = structured_call(rows, steps)
        expected = module(batch, options, **kwargs)
        found = loaded(batch, options=options, **kwargs)
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(found.extra["mean"], expected.extra["mean"])
        assert found.extra["largest"] is None
        assert found.extra["name"] == "own"
        assert type(found).__name__ == "Scores"


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return (x - self.mean) / 4


@pytest.mark.parametrize(("format", "name"), [FORMATS[0], pytest.param(*FORMATS[1], marks=pytest.mark.slow)])
def test_what_comes_before_and_after_is_inside(format, name, tmp_path):
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), torch.randn(5, 3)
    export(
        module, [((x,), {})], tmp_path / name, format, preprocess=Scaled(), postprocess=Probabilities(),
        class_names=["a", "b", "c", "d"], metadata={"step": 3},
    )  # fmt: skip
    loaded = load_compressed(tmp_path / name)
    expected = module[0]((x - Scaled().mean) / 4).softmax(1)
    torch.testing.assert_close(loaded(x), expected)
    predicted = loaded.predict(x)
    assert predicted["class"] == ["abcd"[number] for number in expected.argmax(1)]
    torch.testing.assert_close(predicted["probability"], expected.amax(1))
    torch.testing.assert_close(predicted["probabilities"], expected)
    assert loaded.class_names == ["a", "b", "c", "d"]
    assert loaded.metadata["metadata"] == {"step": 3}
    assert loaded.metadata["inputs"] == [{"name": "input", "dtype": "float32", "shape": [None, 3]}]


class Sharper(nn.Module):
    """Takes a NamedTuple."""

    def forward(self, batch):
        return Batch(batch.x * 2 - 1, batch.lengths)


class Halved(nn.Module):
    def forward(self, scores):
        return Scores(scores.logits / 2, scores.extra)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(None, None), (Sharper(), Halved())])
def test_what_comes_before_and_after_is_in_a_quantized_onnx_file(before, after, tmp_path):
    module, calls = Structured(), [structured_call(6, 5), structured_call(4, 7)]
    inner = [((before(args[0]) if before else args[0], *args[1:]), kwargs) for args, kwargs in calls]
    form = onnx_dynamic(module, inner, find_layers(module))
    export(module, calls, tmp_path / "m.onnx", "onnx", preprocess=before, postprocess=after, quantized=form)
    export(module, calls, tmp_path / "float.onnx", "onnx", preprocess=before, postprocess=after)
    sessions = [compressed.onnx_session(tmp_path / name, ["CPUExecutionProvider"]) for name in ("m.onnx", "float.onnx")]
    ends = [[one.name for one in [*each.get_inputs(), *each.get_outputs()]] for each in sessions]
    assert ends[0] == ends[1]
    assert {each.get_inputs()[0].shape[0] for each in sessions} == {"batch"}
    assert {each.get_outputs()[0].shape[0] for each in sessions} == {"batch"}
    loaded = load_compressed(tmp_path / "m.onnx")
    (batch, *args), kwargs = structured_call(3, 6)
    expected = form.run(before(batch) if before else batch, *args, **kwargs)
    expected = after(expected) if after else expected
    found = loaded(batch, *args, **kwargs)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.extra["mean"], expected.extra["mean"])
    assert not torch.equal(found.logits, module(batch, *args, **kwargs).logits)  # it is the int8 one that was written


@pytest.mark.slow
@pytest.mark.parametrize("largest", [127, 255])
@pytest.mark.parametrize("vnni", [False, True])
def test_int8_programs_are_compiled_where_their_products_do_not_overflow(
    vnni, largest, tmp_path, monkeypatch, uncompiled
):
    """Sums of two products of uint8 and int8 overflow int16 in compiled kernels of CPUs without VNNI."""
    module, x = nn.Linear(6, 4).eval(), torch.rand(5, 6)
    monkeypatch.setattr(pt2e, "INPUT_LIMIT", largest)
    form = pt2e.pt2e_static(module, [((x,), {})], find_layers(module))
    export(module, [((x,), {})], tmp_path / "m.pt2", quantized=form)
    compiled = []
    monkeypatch.setattr(compressed, "compile_frozen", lambda graph, *_: compiled.append(graph) or graph)
    monkeypatch.setattr(compressed, "has_vnni", lambda: vnni)
    overflows = largest == 255 and not vnni
    with pytest.warns(UserWarning, match="on a CPU with VNNI") if overflows else contextlib.nullcontext():
        loaded = load_compressed(tmp_path / "m.pt2", compiled=True)
    assert (loaded(x) - module(x)).abs().max() < 0.02
    assert bool(compiled) == (not overflows)


@pytest.mark.slow
@pytest.mark.parametrize("make", [pt2e.torchao_dynamic, pytest.param(pt2e.torchao_weight_only, marks=pytest.mark.slow)])
def test_weights_of_torchao_are_plain_tensors_in_a_file(make, tmp_path, uncompiled):
    module, x = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)).eval(), torch.randn(5, 6)
    form = make(module, [((x,), {})], find_layers(module))
    export(module, [((x,), {})], tmp_path / "m.pt2", quantized=form)
    for size in (5, 1, 4):
        torch.testing.assert_close(load_compressed(tmp_path / "m.pt2")(x[:size]), form.run(x[:size]))
    weights = torch.export.load(tmp_path / "m.pt2").state_dict.values()
    assert {(type(one.data), one.dtype) for one in weights if one.dim() > 1} >= {(torch.Tensor, torch.int8)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "x", "compilations"),
    [
        (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.rand(5, 6), 1),
        (nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.Flatten(2)), torch.rand(5, 1, 7, 7), 4),
    ],
    ids=["for all sizes", "quantized convolution"],
)
def test_int8_programs_are_compiled_for_all_sizes_or_for_each(
    module, x, compilations, tmp_path, monkeypatch, uncompiled
):
    form = pt2e.pt2e_static(module.eval(), [((x,), {})], find_layers(module))
    export(module, [((x,), {})], tmp_path / "m.pt2", quantized=form)
    monkeypatch.undo()
    monkeypatch.setattr("lightning_accel.compress.autotuning.MIN_MS", math.inf)  # or slow machines compile twice
    made = []
    for room in (compressed, quantization_form):
        compile_frozen = room.compile_frozen
        monkeypatch.setattr(room, "compile_frozen", lambda *args, run=compile_frozen: made.append(1) or run(*args))
    loaded, plain = (load_compressed(tmp_path / "m.pt2", compiled=how) for how in (True, False))
    for size in (5, 5, 1, 3):
        torch.testing.assert_close(loaded(x[:size]), plain(x[:size]), atol=0.02, rtol=0)
    assert len(made) == compilations


@pytest.mark.slow
def test_a_quantized_file_may_be_off_by_what_rounding_is_off(tmp_path):
    x = torch.randn(5, 3)
    low, module, high = (nn.Linear(3, 4) for _ in range(3))
    for one, output in ((low, 0.96), (module, 1.0), (high, 1.05)):
        nn.init.zeros_(one.weight)
        nn.init.constant_(one.bias, output)

    def written(kept, reference):
        program = torch.export.export(kept, (x,), dynamic_shapes=({0: Dim("rows", min=1)},))
        return export(module, [((x,), {})], tmp_path / "m.pt2", quantized=Form("", reference, program))

    assert written(low, low).largest_difference < 1e-5
    assert 0.05 < written(low, high).largest_difference < 0.1  # one is about as far below as the other above
    with pytest.raises(ExportError, match=r"the tolerance is 0\.02\."):
        written(low, module)


def test_predict_takes_scores_for_probabilities_no_more_than_once(tmp_path):
    module, x = nn.Linear(3, 4), torch.randn(5, 3)
    export(module, [((x,), {})], tmp_path / "m.pt2")
    predicted = load_compressed(tmp_path / "m.pt2").predict(x)
    torch.testing.assert_close(predicted["probabilities"], module(x).softmax(1))
    assert predicted["class"].tolist() == module(x).argmax(1).tolist()
    export(nn.Flatten(0), [((x,), {})], tmp_path / "flat.pt2", dynamic=False)
    with pytest.raises(TypeError, match=r"a score for each row and class.*gives \(15,\)"):
        load_compressed(tmp_path / "flat.pt2").predict(x)


def test_files_hold_no_pickle(tmp_path):
    export(nn.Linear(3, 4), [((torch.randn(5, 3),), {})], tmp_path / "m.pt2")
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive:
        assert not [name for name in archive.namelist() if name.endswith(".pkl")]
        assert not [name for name in archive.namelist() if archive.read(name)[:2] in (b"\x80\x02", b"PK")]


class RowsFixed(nn.Module):
    """A branch that torch.export follows as the traced batch goes."""

    def forward(self, x):
        scale = 1.0 if len(x.reshape(-1)) > 12 else 2.0
        return x * scale


class Random(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


@pytest.mark.parametrize(("format", "name"), [("pt2", "m.pt2"), pytest.param("onnx", "m.onnx", marks=pytest.mark.slow)])
def test_a_file_that_gives_something_else_is_not_kept(format, name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"earlier")
    with pytest.raises(ExportError, match=rf"{name} was not written: .*differs .* by [\d.]+.*on x \(4, 5\); the tol"):
        export(Random(), [((torch.randn(4, 5),), {})], path, format)
    assert path.read_bytes() == b"earlier"
    assert [one.name for one in tmp_path.iterdir()] == [name]
    path.unlink()
    with pytest.raises(ExportError):
        export(Random(), [((torch.randn(4, 5),), {})], path, format)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_file_for_the_traced_rows_alone_is_refused(tmp_path):
    with pytest.raises(ExportError, match=r"RowsFixed cannot be exported as pt2: .*takes only the size 4"):
        export(RowsFixed(), [((torch.randn(4, 5),), {})], tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_unrolled_loops_and_values_are_refused_with_a_way_out(tmp_path):
    class Unrolled(nn.Module):
        def forward(self, x):
            state = torch.zeros_like(x[:, 0])
            for step in x.unbind(1):
                state = (state + step).tanh()
            return state

    model = Unrolled()
    calls = [((torch.randn(4, steps, 3),), {}) for steps in (5, 4)]
    with pytest.raises(ExportError, match=r"Unrolled .* size 5 .*pad sequences.* dynamic=False"):
        export(model.eval(), calls, tmp_path / "m.pt2")
    graphs = RelationalGNN(num_features=3, num_classes=4, target_kind="classification", level="graph")
    graphs.configure_model()
    edges = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]])
    call = (torch.rand(7, 3), edges, None, torch.tensor([0, 0, 0, 1, 1, 1, 1]), 2), {}
    with pytest.raises(ExportError, match=r"RelationalGNN .* depends on values.*module="):
        export(graphs.eval(), [call], tmp_path / "m.pt2")


@pytest.mark.slow
@pytest.mark.parametrize(("format", "name"), FORMATS)
def test_a_number_of_rows_that_a_call_makes_plain_stays_free(format, name, tmp_path):
    class Ranks(nn.Module):
        def forward(self, x):
            return x + torch.arange(len(x)).unsqueeze(1)

    written = export(Ranks().eval(), [((torch.randn(4, 5),), {})], tmp_path / name, format)
    x = torch.randn(7, 5)
    torch.testing.assert_close(load_compressed(written.path)(x), Ranks()(x))


@pytest.mark.slow
def test_dynamic_sizes_have_names(tmp_path):
    class Twice(nn.Module):
        def forward(self, x, other):
            return torch.cat([x, x], 1), x.sum(1), other + 1

    calls = [((torch.randn(4, length), torch.randn(4, 3, 2 * length)), {}) for length in (6, 8)]
    export(Twice().eval(), calls, tmp_path / "m.onnx", "onnx")
    session = compressed.onnx_session(tmp_path / "m.onnx", ["CPUExecutionProvider"])
    assert [one.shape for one in session.get_inputs()] == [["batch", "length"], ["batch", 3, "other_2"]]
    assert [one.shape for one in session.get_outputs()] == [["batch", "2*length"], ["batch"], ["batch", 3, "other_2"]]


@pytest.mark.slow
def test_halves_of_any_length_are_written_as_onnx(tmp_path):
    class Halves(nn.Module):
        def forward(self, x):
            first, second = x.chunk(2, dim=1)
            return first - second

    calls = [((torch.randn(4, length),), {}) for length in (6, 8)]
    written = export(Halves().eval(), calls, tmp_path / "m.onnx", "onnx")
    x = torch.randn(3, 10)
    torch.testing.assert_close(load_compressed(written.path)(x), Halves()(x))


def test_what_is_no_tensor_is_refused_by_name(tmp_path):
    """Such as a batch of graphs of PyTorch Geometric."""
    graph = Data(torch.ones(2, 3), num_nodes=2)
    for dynamic in (True, False):
        with pytest.raises(ExportError, match=r"Identity cannot be exported: .* it has Data\. Choose a submodule"):
            export(nn.Identity(), [((graph,), {})], tmp_path / "m.pt2", dynamic=dynamic)


MODELS = {
    "classifier": (lambda: Classifier(1, 3, channels=[4]), lambda rows: (torch.rand(rows, 1, 6, 6),)),
    "experts": (
        lambda: MoEClassifier(6, 3, dim=8, experts=Experts(hidden_dim=4)),
        lambda rows: (torch.randn(rows, 6),),
    ),
    "regressor": (lambda: MoERegressor(6, dim=8, experts=Experts(hidden_dim=4)), lambda rows: (torch.randn(rows, 6),)),
    "sequences": (
        lambda: SequenceModel(
            num_features=2,
            num_classes=3,
            target_kind="classification",
            layers=RecurrentLayers(cell="lstm", hidden_dim=4),
        ),
        lambda rows: (torch.randn(rows, 5 + rows, 2), torch.arange(rows) % 5 + 1),
    ),
    "scan": (
        lambda: SequenceModel(
            num_features=2, num_classes=3, target_kind="classification", layers=RecurrentLayers(cell="mingru")
        ),
        lambda rows: (torch.randn(rows, 5 + rows, 2), torch.arange(rows) % 5 + 1),
    ),
    "language": (
        lambda: MoELanguageModel(
            vocab_size=9,
            dim=8,
            num_layers=2,
            attention={"num_heads": 4, "num_key_value_heads": 2, "separate_documents": True},
            tie_embeddings=True,
        ),
        lambda rows: (torch.randint(9, (rows, 3 + rows)),),
    ),
}


@pytest.mark.sampled(slow=5)
@pytest.mark.slow
@pytest.mark.parametrize("format", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "which",
    [
        pytest.param(which, marks=[pytest.mark.slow] if which in ("experts", "regressor", "language", "scan") else [])
        for which in MODELS
    ],
)
def test_our_models_with_rows_that_were_not_traced(which, format, tmp_path):
    make, batch = MODELS[which]
    model = make()
    model.configure_model()
    model.eval()
    path = tmp_path / f"m.{format}"
    if (which, format) == ("scan", "onnx"):
        with pytest.raises(ExportError, match=r"cannot be written as onnx: .*linear_scan"):
            export(model, [(batch(4), {})], path, format)
        return
    export(model, [(batch(4), {}), (batch(6), {})], path, format)
    loaded = load_compressed(path)
    for rows in (1, 9):
        arguments = batch(rows)
        expected, found = model(*arguments), loaded(*arguments)
        first = expected if isinstance(expected, torch.Tensor) else expected[0]
        torch.testing.assert_close(found if isinstance(found, torch.Tensor) else found[0], first, rtol=1e-4, atol=1e-5)


def test_dense_experts_are_those_that_tokens_visit():
    mixture = MixtureOfExperts(dim=4, hidden_dim=3, num_experts=5, k=2, capacity_factor=0.8, gated=True).double()
    tokens = torch.randn(17, 4, dtype=torch.float64)
    expected = mixture(tokens)
    mixture.experts.backend = "dense"
    found = mixture(tokens)
    torch.testing.assert_close(found.features, expected.features)
    assert int(found.report.dropped) == int(expected.report.dropped) > 0


def test_what_the_caller_gets_wrong_is_told(tmp_path):
    module, call = nn.Linear(3, 4), ((torch.randn(5, 3),), {})
    with pytest.raises(ValueError, match="format must be one of pt2, onnx; got 'tflite'"):
        export(module, [call], tmp_path / "m.tflite", "tflite")
    with pytest.raises(ValueError, match=r"'onnx' must end in \.onnx; got .*m\.pt2"):
        export(module, [call], tmp_path / "m.pt2", "onnx")
    with pytest.raises(ValueError, match="at least one call"):
        export(module, [], tmp_path / "m.pt2")
    export(module, [call], tmp_path / "m.pt2")
    loaded = load_compressed(tmp_path / "m.pt2")
    with pytest.raises(ValueError, match=r"takes input \(any, 3\) float32; got input \(5, 2\)"):
        loaded(torch.ones(5, 2))
    with pytest.raises(TypeError, match=r"takes input \(any, 3\) float32; got input of torch.float64"):
        loaded(torch.ones(5, 3).double())
    with pytest.raises(TypeError, match="takes 1 arguments, input; got 2"):
        loaded(torch.ones(5, 3), torch.ones(1))
    with pytest.raises(TypeError, match=r"takes input \(any, 3\) float32; got no tensor"):
        loaded()


def test_plain_arguments_are_fixed(tmp_path):
    class Own(nn.Module):
        def forward(self, x, scale=1.0, shift=None):
            return x * scale

    export(Own(), [((torch.ones(3, 2),), {"scale": 2.0})], tmp_path / "m.pt2")
    loaded = load_compressed(tmp_path / "m.pt2")
    assert loaded(torch.ones(4, 2), scale=2.0).max() == 2
    with pytest.raises(TypeError, match=r"exported with scale=2\.0, which forward requires or has another default of"):
        loaded(torch.ones(4, 2))  # by 1, as the module has it
    with pytest.raises(ValueError, match=r"exported with scale=2.0, which is fixed; got 3.0"):
        loaded(torch.ones(4, 2), scale=3.0)


def test_files_that_cannot_be_read_are_told(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no file"):
        load_compressed(tmp_path / "none.pt2")
    (tmp_path / "text.pt2").write_text("not a model")
    with pytest.raises(ValueError, match=r"text.pt2 is neither a whole \.pt2 nor an ONNX file"):
        load_compressed(tmp_path / "text.pt2")
    torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"no program of torch\.export"):
        load_compressed(tmp_path / "last.ckpt")
    module, call = nn.Linear(3, 4), ((torch.randn(5, 3),), {})
    torch.export.save(torch.export.export(module, call[0]), tmp_path / "foreign.pt2")
    with pytest.raises(ValueError, match="not written by lightning_accel"):
        load_compressed(tmp_path / "foreign.pt2")
    monkeypatch.setattr(sys.modules["lightning_accel.compress.export.writing"], "FORMAT_VERSION", 2)
    monkeypatch.setattr(compressed, "FORMAT_VERSION", 2)
    package_export(module, [call], tmp_path / "newer.pt2")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"in version 2 of its files; this one reads up to 1\. Upgrade"):
        load_compressed(tmp_path / "newer.pt2")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match=r"onnxruntime is needed here .*: pip install .*\[compress\]"):
        export(nn.Linear(3, 4), [((torch.randn(5, 3),), {})], tmp_path / "n.onnx", "onnx")
    with pytest.raises(ModuleNotFoundError, match=r"onnxruntime is needed here .*: pip install .*\[compress\]"):
        load_compressed(tmp_path / "m.onnx")


@pytest.mark.slow
def test_importing_brings_no_optional_package():
    script = (
        "import sys, lightning_accel.compress, lightning_accel.callbacks; "
        "assert not {'onnx', 'onnxruntime', 'onnxscript', 'torchao'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def transformers_call(name):
    """A model of transformers with random weights, and a call with labels and rows of unequal length."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    tokens, heads = sizes | {"vocab_size": 11, "max_position_embeddings": 16}, {"num_key_value_heads": 1}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    ids = torch.randint(1, 11, (4, 6))
    call = {"input_ids": ids, "attention_mask": torch.ones(4, 6).tril(3).long()}
    images = {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.tensor([0, 1, 0, 1])}
    t5 = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    gpt2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    found = {
        "BertForSequenceClassification": ("BertConfig", tokens, call | {"labels": images["labels"]}),
        "ViTForImageClassification": ("ViTConfig", sizes | {"image_size": 8, "patch_size": 4}, images),
        "GPT2LMHeadModel": ("GPT2Config", gpt2 | special | {"vocab_size": 11}, call | {"labels": ids.clone()}),
        "LlamaForCausalLM": ("LlamaConfig", tokens | heads | special, call | {"labels": ids.clone()}),
        "MixtralForCausalLM": (
            "MixtralConfig",
            tokens | heads | special | {"num_local_experts": 3},
            call | {"labels": ids.clone()},
        ),
        "T5ForConditionalGeneration": ("T5Config", t5 | {"vocab_size": 11}, call | {"labels": ids.clone()}),
    }
    config, options, inputs = found[name]
    return getattr(transformers, name)(getattr(transformers, config)(**options)).eval(), inputs


@pytest.mark.sampled(slow=2)
@pytest.mark.parametrize(
    ("name", "format"),
    [
        pytest.param(name, format, marks=[pytest.mark.weekly] if (number + (format == "onnx")) % 2 else [])
        for number, name in enumerate((
            "BertForSequenceClassification", "ViTForImageClassification", "MixtralForCausalLM", "GPT2LMHeadModel",
            "LlamaForCausalLM", "T5ForConditionalGeneration",
        ))
        for format in ("pt2", "onnx")
        if (name, format) != ("MixtralForCausalLM", "onnx")
    ],
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers and of torch on the way
def test_models_of_transformers(name, format, tmp_path):
    module, inputs = transformers_call(name)
    exported = export(module, [((), inputs)], tmp_path / f"model.{format}", format)
    loaded = load_compressed(exported.path)
    torch.testing.assert_close(loaded(**inputs).logits, module(**inputs).logits, rtol=1e-4, atol=1e-5)
    if name.startswith("T5"):  # shifts them into its decoder
        return
    assert exported.unused == ["labels"]
    if "input_ids" in inputs:
        other = {"input_ids": inputs["input_ids"][:3, :4], "attention_mask": torch.ones(3, 4).long()}
        torch.testing.assert_close(loaded(**other)[0], module(**other).logits, rtol=1e-4, atol=1e-5)
