"""Forms run uncompiled here unless a test is slow: what they compute is the same."""

import io
import itertools
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn

from lightning_accel.compress.quantization import pt2e as quant_torch
from lightning_accel.compress.quantization import quantized
from lightning_accel.compress.quantization.fake_quant import attach, detach
from lightning_accel.compress.quantization.form import CannotConvertError, Compiled, Form, suppress_output
from lightning_accel.compress.quantization.layers import find_layers, weight_scale
from lightning_accel.compress.quantization.onnx import (
    onnx_dynamic,
    onnx_float,
    onnx_static,
    sharing_export,
    write_float,
)
from lightning_accel.compress.quantization.picking import NothingPickedError, Quantized
from lightning_accel.compress.quantization.pt2e import compiled_bfloat16, pt2e_static, torchao_dynamic, torchao_int4
from lightning_accel.compress.quantization.quantized import quantize
from lightning_accel.compress.quantization.trial import MAKERS, Limit, Maker, require_similar_outputs
from lightning_accel.compress.report.progress import Progress
from lightning_accel.compress.report.report import saved_bytes
from tests.tolerance import rounding


class Block(nn.Module):
    """A residual block as torchvision writes it: one ReLU, called twice, in place."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class TakesBatch(nn.Module):
    """Called as wrappers of transformers' models often are."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, **batch):
        fixed_if_traced_so = torch.zeros(batch["x"].shape[0], 1)
        return {"logits": self.layer(batch["x"]) * batch["mask"][:, None] + fixed_if_traced_so}


class Scores(NamedTuple):
    scores: torch.Tensor
    state: list


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x, scale=None, *, shift):
        out, state = self.rnn(x * scale)
        return Scores(self.head(out[:, -1]) + shift["by"], list(state))


def network():
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(),
        nn.Conv2d(5, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4),
    )  # fmt: skip
    for _ in range(4):
        module(torch.randn(30, 2, 6, 6) + 0.5)
    with torch.no_grad():
        module[3].weight[:, :3] = 0
        module[6].weight[:, ::2] = 0
    return module.eval()


def trained_for_int8(module, x):
    attached = attach(find_layers(module).quantized)
    module.train()
    for layer in attached.values():
        layer.enabled = True
    for _ in range(3):
        module(x)
        for layer in attached.values():
            layer.update_range(layer.seen.clone())
    module.eval()
    with torch.no_grad():
        expected = module(x)
    detach(module)
    return expected, {name: tuple(layer.range.tolist()) for name, layer in attached.items()}


@pytest.mark.slow
def test_static_form_is_what_was_trained_for(uncompiled):
    """Number by number, though the batch norm is folded into the convolution; and zeros are zeros."""
    x = torch.randn(9, 2, 6, 6) + 0.5
    module = network()
    expected, ranges = trained_for_int8(module, x)
    form = pt2e_static(module, [((x,), {})], find_layers(module), ranges=ranges)
    differences = (form.run(x) - expected).abs().amax(1)
    # a number in the middle of two of the grid goes either way, by how a kernel rounds, which moves all of its row
    assert differences.median() < rounding(torch.float32, 100) * expected.abs().max()
    assert differences.max() < 0.03 * expected.abs().max()
    assert not torch.equal(form.run(x), module(x))
    other = pt2e_static(module, [((x,), {})], find_layers(module), {**ranges, "6": (0.0, 99.0)})
    assert not torch.allclose(other.run(x), expected, atol=1e-3)
    state = form.program.state_dict | form.program.constants
    eights = {value.shape: value for value in state.values() if value.dtype == torch.int8}
    assert eights[module[3].weight.shape][:, :3].eq(0).all()
    assert eights[module[6].weight.shape][:, ::2].eq(0).all()
    by_hand = (module[6].weight / weight_scale(module[6].weight)[:, None]).round()
    torch.testing.assert_close(eights[module[6].weight.shape], by_hand.to(torch.int8))
    assert not any(value.numel() > 30 for value in state.values() if value.dtype == torch.float32)  # no dead weights
    assert form.program.example_inputs is None
    for rows in (1, 4):
        (found,) = form.program.module()(x[:rows])
        assert found.shape == (rows, 4)


@pytest.mark.slow
def test_residual_blocks_with_one_relu_in_place(uncompiled):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 5, 3), Block(5), nn.Flatten(), nn.Linear(125, 3)).eval()
    x = torch.randn(9, 2, 7, 7)
    form = pt2e_static(module, [((x,), {})], find_layers(module), ranges={"1.conv1": (-9.0, 9.0)})
    assert form.left_float == {}
    wanted = module(x)
    torch.testing.assert_close(form.run(x[:2]), wanted[:2], rtol=0, atol=0.1 * wanted.std().item())
    scales = [node.args[1] for node in form.program.graph.nodes if "quantize_per_tensor" in str(node.target)]
    assert any(scale == pytest.approx(18 / 255) or scale == pytest.approx(18 / 127) for scale in scales)


@pytest.mark.slow
def test_a_call_by_names_alone_runs_with_any_number_of_rows(uncompiled):
    module = TakesBatch().eval()
    call = {"x": torch.randn(8, 3), "mask": torch.arange(8.0)}
    form = pt2e_static(module, [((), call)], find_layers(module))
    for rows in (1, 5):
        some = {name: value[:rows] for name, value in call.items()}
        found = form.run(**some)["logits"]
        torch.testing.assert_close(found, module(**some)["logits"], rtol=0, atol=0.3)
        (logits,) = form.program.module()(*some.values())
        assert logits.shape == (rows, 4)


@pytest.mark.slow  # traces a BERT twice
def test_transformers_bert_runs_at_batch_1(uncompiled):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3,
             "intermediate_size": 24, "max_position_embeddings": 16}  # fmt: skip

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))

        def forward(self, **batch):
            return self.model(**batch)

    module = Wrapped().eval()
    call = {"input_ids": torch.randint(50, (6, 9)), "attention_mask": (torch.arange(9) < 7).long().expand(6, 9)}
    form = pt2e_static(module, [((), call)], find_layers(module))
    assert list(form.left_float) == [name for name in form.left_float if "embeddings" in name]
    for rows in (1, 5):
        some = {name: value[:rows].contiguous() for name, value in call.items()}
        wanted = module(**some).logits
        torch.testing.assert_close(form.run(**some).logits, wanted, rtol=0, atol=0.3 * wanted.abs().max().item())


@pytest.mark.slow
def test_onnx_static_form_has_the_ranges_of_training(monkeypatch):
    import onnx
    from onnx import numpy_helper

    x = torch.randn(9, 2, 6, 6) + 0.5
    module = network()
    _, ranges = trained_for_int8(module, x)
    wide = {**ranges, "0": (-7.0, 9.0), "6": (0.0, 20.0)}
    calls, layers, writes = [((x,), {})], find_layers(module), []

    def count(*args):
        writes.append(args)
        return write_float(*args)

    monkeypatch.setattr("lightning_accel.compress.quantization.onnx.write_float", count)
    with sharing_export():
        floating = onnx_float(module, calls, layers)
        form = onnx_static(module, calls, layers, wide)
    assert len(writes) == 1
    torch.testing.assert_close(floating.run(x[:4]), module(x[:4]))
    assert floating.left_float == {}
    assert floating.onnx != form.onnx
    graph = onnx.load_model_from_string(form.onnx).graph
    values = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    scales = [float(values[node.input[1]]) for node in graph.node if node.op_type == "QuantizeLinear"
              and values[node.input[1]].ndim == 0]  # fmt: skip
    assert any(scale == pytest.approx(16 / 255) for scale in scales)
    assert any(scale == pytest.approx(20 / 255) for scale in scales)
    eights = [one for one in values.values() if one.dtype == "int8" and one.ndim > 1]
    assert [one[:, ::2].any() for one in eights if one.shape == (4, 12)] == [False]
    assert [one[:, :3].any() for one in eights if one.shape == (3, 5, 3, 3)] == [False]
    assert form.run(x[:1]).shape == (1, 4)


@pytest.mark.slow
def test_onnx_runs_structures_of_any_number_of_rows():
    module = Recurrent().eval()
    calls = [((torch.randn(rows, 5, 3), torch.ones(3)), {"shift": {"by": torch.randn(4)}}) for rows in (6, 6, 2)]
    form = onnx_dynamic(module, calls, find_layers(module))
    assert b"DynamicQuantizeLSTM" in form.onnx
    assert form.left_float == {}
    for rows in (6, 1, 9):
        args, kwargs = (torch.randn(rows, 5, 3), torch.full((3,), 2.0)), {"shift": {"by": torch.randn(4)}}
        found, wanted = form.run(*args, **kwargs), module(*args, **kwargs)
        assert type(found) is Scores
        assert type(found.state) is list
        torch.testing.assert_close(found.scores, wanted.scores, rtol=0, atol=0.03)
        torch.testing.assert_close(found.state, wanted.state, rtol=0, atol=0.03)
    skipped = onnx_dynamic(module, calls, find_layers(module, ["head"]))
    assert b"DynamicQuantizeLSTM" in skipped.onnx
    assert (b"MatMulInteger" in form.onnx, b"MatMulInteger" in skipped.onnx) == (True, False)
    assert list(skipped.left_float) == ["head"]


@pytest.mark.slow
def test_dynamic_form_rounds_by_the_range_of_each_call(uncompiled):
    module = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 4)).eval()
    x = torch.randn(8, 7)
    form = torchao_dynamic(module, [((x,), {})], find_layers(module))
    for factor in (1e-3, 1, 1e3):
        wanted = module(factor * x)
        torch.testing.assert_close(form.run(factor * x), wanted, rtol=0, atol=0.05 * wanted.abs().max().item())


@pytest.mark.slow
def test_bfloat16_takes_and_returns_floats(uncompiled):
    module = network()
    x = torch.randn(9, 2, 6, 6)
    found = compiled_bfloat16(module, [((x,), {})], find_layers(module)).run(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, module(x), rtol=0, atol=0.1)
    assert not torch.equal(found, module(x))


class Clock:
    """Stands still but for what calls add to it."""

    now = 0.0

    def perf_counter(self):
        return self.now


CLOCK = Clock()


class Eager(nn.Module):
    def __init__(self, seconds=0.1):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        self.seconds = seconds

    def forward(self, x):
        CLOCK.now += self.seconds
        return self.layers(x)


class Slow:
    """Makes a form that takes ``seconds`` (or the next of them), and whose outputs are wrong by ``error``."""

    def __init__(self, seconds, error=0.0, file_bytes=None):
        self.seconds, self.error, self.file_bytes = seconds, error, file_bytes

    def __call__(self, module, inputs, layers, ranges=None):
        left = len(layers.left_float)
        turns = itertools.cycle(self.seconds if isinstance(self.seconds, list) else [self.seconds])

        def run(x):
            found, CLOCK.now = CLOCK.now + next(turns), CLOCK.now
            result = module(x) + (self.error if not left else 0)
            CLOCK.now = found
            return result

        return Form("", run, left_float=dict(layers.left_float), file_bytes=self.file_bytes)


def failing(module, inputs, layers, ranges=None):
    raise CannotConvertError("needs nothing that there is")


@pytest.fixture
def makers(monkeypatch):
    monkeypatch.setattr("lightning_accel.compress.report.latency.time", CLOCK)

    def put(**made):
        found = {name: Maker(kind, "pt2e", maker, float_row=row[0] if row else "")
                 for name, (kind, maker, *row) in made.items()}  # fmt: skip
        MAKERS.clear()
        MAKERS.update(found)

    with patch.dict(MAKERS):
        yield put


def run(module, mode="auto", **options):
    return quantize(module, [((torch.randn(4, 3),), {})], mode, seconds=0.02, **options)


def judge(module):
    x = torch.randn(50, 3)
    wanted = module(x)
    return lambda form: {"val/error": (form(x) - wanted).abs().mean().item()}


def test_the_fastest_form_is_picked(makers):
    module = Eager().eval()
    makers(half=("float", Slow(0.001)), fixed=("static", Slow(0.004), "half"), moving=("dynamic", Slow(0.006), "half"),
           never=("static", failing))  # fmt: skip
    lines = []
    found = run(module, progress=Progress(lines.append))
    assert found.name == ""
    rows = {row.name: row for row in found.report.rows}
    assert list(rows) == ["fp32 eager", "half", "fixed", "moving", "never"]
    assert (rows["never"].note, rows["never"].status) == ("needs nothing that there is", "failed")
    assert [row.status for row in rows.values()] == ["", "picked", "", "", "failed"]
    assert [row.float_row for row in rows.values()] == ["", "", "half", "half", ""]
    assert list(rows["half"].latencies) == [1, 4]
    assert rows["half"].latencies[4].p50_ms == pytest.approx(1)
    assert (found.faster_float, found.ties) == (None, [])
    assert [line.partition(" (")[0] for line in lines] == [
        "form 1 of 4: half", "form 2 of 4: fixed", "form 3 of 4: moving", "form 4 of 4: never",
        "measures 4 forms at batch 1, 0.02 s each", "measures 4 forms at batch 4, 0.02 s each",
    ]  # fmt: skip
    static = run(module, "static")
    assert static.faster_float == "half"
    assert "moving" not in {row.name for row in static.report.rows}
    assert run(Eager(0.0001).eval()).faster_float == "fp32 eager"


def test_each_batch_size_has_a_pick(makers):
    def by_rows(at_1, at_4):
        def make(module, inputs, layers, ranges=None):
            def run(x):
                CLOCK.now += at_1 if len(x) == 1 else at_4
                return module.layers(x)

            return Form(f"{at_1} {at_4}", run)

        return make

    makers(few=("float", by_rows(0.001, 0.004)), many=("static", by_rows(0.003, 0.002)))
    module = Eager().eval()
    names = {size: form.name for size, form in run(module).picks.items()}
    assert names == {1: "0.001 0.004", 4: "0.003 0.002"}
    assert run(module).name == names[4]
    assert run(module, batch_sizes=[4, 1]).name == names[1]


def test_what_is_too_close_to_call_is_a_tie(makers):
    """Of forms as fast as each other the smallest file is picked, of files of like size the simplest form."""
    module = Eager().eval()
    busy = [0.002, 0.002, 0.007, 0.002, 0.003]
    makers(
        large=("static", Slow([0.001, *busy[1:]], file_bytes=300)),
        small=("dynamic", Slow(busy, file_bytes=104)),
        weights=("weight_only", Slow(busy[::-1], file_bytes=107)),
        slow=("static", Slow(0.02, file_bytes=9)),
    )
    found = run(module, batch_sizes=[4])
    rows = {row.name: row for row in found.report.rows}
    assert {name: row.status for name, row in rows.items()} == {
        "fp32 eager": "", "large": "tie", "small": "tie", "weights": "picked", "slow": "",
    }  # fmt: skip
    assert sorted(found.ties) == ["large", "small"]
    assert [len(row.latencies[4].rounds_ms) for row in rows.values()] == [11, 33, 33, 33, 11]


def test_a_tie_of_a_much_slower_median_is_not_picked_for_its_size(makers):
    noise = [factor for factor in (3.0, 0.5, 3.0, 0.5, 1.0) for _ in range(3)]  # of the calls of a block
    makers(
        large=("static", Slow([0.002 * one for one in noise], file_bytes=300)),
        small=("static", Slow([0.00225 * one for one in noise[3:] + noise[:3]], file_bytes=100)),
    )
    found = run(Eager().eval(), batch_sizes=[4])
    assert {row.name: row.status for row in found.report.rows} == {"fp32 eager": "", "large": "picked", "small": "tie"}


def test_forms_that_cost_too_much_are_not_picked(makers):
    module = Eager().eval()
    makers(half=("float", Slow(0.004)), moving=("dynamic", Slow(0.001, 0.3)), quick=("float", Slow(0.001, 0.3)),
           fixed=("static", Slow(0.008)))  # fmt: skip
    limit = Limit(judge(module), "val/error", 0.1, higher_is_better=False)
    found = run(module, limit=limit)
    assert found.refused == {"moving": "val/error is 0.3 worse", "quick": "val/error is 0.3 worse"}
    rows = {row.name: row for row in found.report.rows}
    assert [row.status for row in rows.values()] == ["", "picked", "refused", "refused", ""]
    assert rows["moving"].metrics["val/error"] == pytest.approx(0.3)
    for mode in ("auto", "static"):  # whether or not it asks for what is in float
        assert run(module, mode, limit=limit).faster_float == (None if mode == "auto" else "half")
    with pytest.raises(NothingPickedError, match=r"no form can be picked. moving: val/error is 0.3 worse") as error:
        run(module, "dynamic", limit=limit)
    assert {row.name: row.note for row in error.value.report.rows}["moving"] == "val/error is 0.3 worse"
    with pytest.raises(ValueError, match=r"monitor='val/acc' is not logged in validation; what is: val/error"):
        run(module, limit=limit._replace(monitor="val/acc"))


def test_the_reason_why_a_form_cannot_run_is_told(makers):
    def of_many(module, inputs, layers, ranges=None):
        def run(x):
            CLOCK.now += 0.001
            if len(x) == 1:
                raise IndexError("index 1 is out of bounds")
            return module(x)

        return Form("", run)

    makers(many=("static", of_many), half=("float", Slow(0.001)))
    reason = "cannot run at batch 1: IndexError: index 1 is out of bounds"
    with pytest.raises(NothingPickedError, match=f"no form can be picked. many: {reason}") as error:
        run(Eager().eval(), "static")
    rows = {row.name: row for row in error.value.report.rows}
    assert (rows["many"].note, rows["many"].status) == (reason, "failed")
    assert run(Eager().eval()).refused == {"many": reason}


def test_layers_are_reported_as_they_are_computed(makers):
    module = Eager().eval()
    module.layers[1] = nn.LayerNorm(5)
    floats = {"fp32": ("float", Slow(0.1)), "bf16": ("float", Slow(0.0005))}
    makers(**floats, **{"int8 own": ("static", Slow(0.001), "fp32")})
    layers = {one.name: one for one in run(module, "static", exclude=["*.2"]).report.layers}
    found = {name: one.dtype for name, one in layers.items()}
    assert found == {"layers.0": "int8", "layers.1": "float32", "layers.2": "float32"}
    assert layers["layers.2"].note == "left out by exclude: *.2"
    assert {one.dtype for one in run(module).report.layers} == {"bfloat16"}


def test_sensitive_layers_are_left_in_float(makers):
    module = Eager().eval()
    with torch.no_grad():
        module.layers[2].weight[:, 0] = 4000.0
        module.layers[0].weight[0] = 0
        module.layers[0].bias[0] = -1
    makers(fixed=("static", Slow(0.001, 0.3)))
    found = run(module, limit=Limit(judge(module), "val/error", 0.1, higher_is_better=False))
    assert list(found.left_float) == ["layers.2"]
    assert found.left_float["layers.2"].startswith("sensitive: ")
    assert not found.refused
    fine = run(module, limit=Limit(judge(module), "val/error", 0.4, higher_is_better=False))
    assert not fine.left_float


def test_forms_that_are_wrong_are_refused():
    module = nn.Linear(3, 2).eval()
    x = torch.randn(20, 3)
    require_similar_outputs(Form("", lambda x: module(x) * 1.1), module, ((x,), {}))
    for wrong in (torch.zeros_like, lambda y: y[torch.randperm(20)], lambda y: y * torch.nan):
        with pytest.raises(CannotConvertError, match="its outputs are wrong"):
            require_similar_outputs(Form("", lambda x, wrong=wrong: wrong(module(x))), module, ((x,), {}))


def test_options_that_are_none_are_refused():
    module = nn.Linear(3, 2).eval()
    for options in ({"mode": "dynamics"}, {"backend": "fbgemm"}, {"exclude": ["head"]}):
        with pytest.raises(ValueError, match=next(iter(options))):
            quantize(module, [((torch.randn(4, 3),), {})], **options)


@pytest.mark.slow
@pytest.mark.weekly
def test_all_forms_of_a_network():
    """Compiled: int8 within the steps of its grid, the file as small as it says, each size of batch."""
    module = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 5),
    ).eval()  # fmt: skip
    with torch.no_grad():
        module[7].weight[:, ::2] = 0
    state = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(12, 3, 8, 8)
    options = {"seconds": 0.05, "batch_sizes": [12]}
    found = quantize(module, [((x,), {})], **options)
    assert [row.name for row in found.report.rows if not row.latencies] == []
    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)
    static = pt2e_static(module, [((x,), {})], find_layers(module))
    wanted = module(x)
    # four layers round inputs and weights by a 255th of a range, which is some three deviations
    steps, deviation = 4 * 2 * 3 / 255, wanted.std().item()
    for rows_now in (12, 1, 5):
        torch.testing.assert_close(static.run(x[:rows_now]), wanted[:rows_now], rtol=0, atol=steps * deviation)
    with torch.inference_mode():
        torch.testing.assert_close(static.run(x[:5]), static.run(x)[:5])
    file = io.BytesIO()
    torch.export.save(static.program, file)
    with suppress_output():  # torch 2.11 warns of its own reading
        loaded = torch.export.load(io.BytesIO(file.getvalue())).module()
    # compiled kernels for processors without VNNI cut off sums of two products at 16 bits
    torch.testing.assert_close(loaded(x)[0], static.run(x), rtol=0, atol=steps * deviation)
    again = pt2e_static(module, [((x,), {})], find_layers(module))
    torch.testing.assert_close(again.run(x), static.run(x), rtol=0, atol=0)


def test_forms_that_may_be_picked_are_made_first():
    """A module of a billion weights leaves no memory for all forms, and those for comparison are the largest."""
    made = []

    def recorded(name, module):
        made.append(name)
        return Form(name, module)

    makers = {
        name: maker._replace(make=lambda module, *_, name=name: recorded(name, module))
        for name, maker in MAKERS.items()
    }
    with patch.dict(MAKERS, makers):
        trial = quantized.judge(nn.Linear(3, 2).eval(), [((torch.randn(4, 3),), {})], "weight_only", "onnxruntime")
    assert made == [
        "int8 ONNX Runtime weight-only", "int4 ONNX Runtime weight-only", "bf16 compiled", "fp32 compiled",
        "fp32 ONNX Runtime",
    ]  # fmt: skip
    assert list(trial.made) == [name for name in makers if name in made]


def test_sizes_of_files_are_those_of_what_is_written():
    layer, file = nn.Linear(300, 20), io.BytesIO()
    torch.save(layer.state_dict(), file)
    assert saved_bytes(layer) == file.tell()
    program, file = torch.export.export(layer, (torch.randn(2, 300),)), io.BytesIO()
    torch.export.save(program, file)
    assert quant_torch.size_of(program) == len(file.getvalue())


@pytest.mark.slow
def test_a_form_without_a_file_says_why(monkeypatch):
    def fails(program):
        raise RuntimeError("its sizes are odd")

    monkeypatch.setattr(quant_torch, "size_of", fails)
    report = quantize(nn.Linear(3, 2).eval(), [((torch.randn(5, 3),), {})], backend="inductor", seconds=0.01).report
    notes = [row.note for row in report.rows if row.name == "fp32 compiled"]
    assert notes == ["no file: RuntimeError: its sizes are odd"]


@pytest.mark.slow
def test_compiled_forms_take_slices():
    """Validation calls a language model with all but the last token."""
    module, x = nn.Linear(3, 2).eval(), torch.randn(5, 4)
    run = Compiled(module)
    for taken in (x[:, :3], x[:, 1:].contiguous(), torch.randn(3, 5).t()):
        torch.testing.assert_close(run(taken), module(taken))
    assert len(run._compiled) == 1
    module, image = nn.Conv2d(2, 3, 1).eval(), torch.randn(2, 2, 4, 4)
    run = Compiled(module)
    for taken in (image, image.to(memory_format=torch.channels_last), image[:, :, 1:]):
        torch.testing.assert_close(run(taken), module(taken))


def test_groups_of_4_bits_divide_the_inputs_of_a_layer(monkeypatch, uncompiled):
    quantization, taken = pytest.importorskip("torchao.quantization"), {}
    monkeypatch.setattr(quantization, "quantize_", lambda layer, config, _: taken.update({layer.in_features: config}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    module = nn.Sequential(*(nn.Linear(*sizes) for sizes in [(256, 192), (192, 96), (96, 50), (50, 8)])).eval()
    call = ((torch.randn(3, 256),), {})
    form = torchao_int4(module, [call], find_layers(module))
    assert {size: config.group_size for size, config in taken.items()} == {256: 128, 192: 64, 96: 32}
    assert form.left_float == {"3": "4 bits need a multiple of 32 inputs, not 50"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(CannotConvertError, match=r"int4 needs compute capability 8\.0; this GPU has 7\.5"):
        torchao_int4(module, [call], find_layers(module))


def test_a_result_is_printed_without_what_it_runs():
    result = Quantized("int8", run=print, onnx=bytes(10_000), file_bytes=10_000, picks={1: Form("int8", print)})
    assert len(repr(result)) < 300
    assert "name='int8'" in repr(result)
