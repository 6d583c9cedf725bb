import logging
import math
import sys
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_accel import Classifier, DigitsDataModule, MoEClassifier, SequenceModel
from lightning_accel.callbacks import CompressionReport, Export, Quantization
from lightning_accel.callbacks.compression_phase import current_phase, in_final_phase
from lightning_accel.callbacks.deployment.deployed import Deployed, calibration_calls
from lightning_accel.compress import Latency, NothingPickedError, Report, Row
from lightning_accel.compress.quantization.form import Form
from lightning_accel.compress.quantization.picking import Quantized
from lightning_accel.models import Experts, RecurrentLayers
from tests.ranks import run_ranks

ROWS = TensorDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3)


class Plain(L.LightningModule):
    """Knows nothing of us."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.seen.append((loss.item(), torch.rand(1).item()))
        return loss

    def validation_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        self.log("val/accuracy", scores.argmax(1).eq(batch[1]).float().mean(), batch_size=len(scores))
        self.log("val/loss", nn.functional.cross_entropy(scores, batch[1]), batch_size=len(scores))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.05)


class Convert:
    """In place of :func:`quantize`: keeps what it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, module, inputs, *args, **options):
        self.calls.append((module, inputs, args, options))
        limit = options["limit"]
        self.figures = (
            None if limit is None else [limit.evaluate(module), limit.evaluate(lambda x: torch.zeros(len(x), 3))]
        )
        return Quantized("int8", module, report=Report("quantization", "cpu"), refused={})


@pytest.fixture
def converted(monkeypatch):
    found = Convert()
    monkeypatch.setattr("lightning_accel.callbacks.deployment.quantization.quantize", found)
    return found


def fit(module, callbacks, folder, max_epochs=2, ckpt_path=None, batch_size=8, validate=True, **options):
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=max_epochs, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks, default_root_dir=folder,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks), **options,
    )  # fmt: skip
    loaders = [DataLoader(ROWS, batch_size, shuffle=True), *([DataLoader(ROWS, 16)] if validate else [])]
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run on")
def test_a_gpu_that_is_not_there_is_asked_for_in_vain(tmp_path, converted):
    module = Plain()
    with pytest.raises(ValueError, match=r"Quantization\(device='cuda'\) needs a GPU"):
        fit(module, [Quantization(device="cuda")], tmp_path)
    for options in ({"mode": "qat"}, {"mode": "static"}, {"backend": "pt2e"}):
        with pytest.raises(
            ValueError, match=r"has no form on cuda; there are: mode='dynamic', backend='torchao'; mode"
        ):
            fit(module, [Quantization(device="cuda", **options)], tmp_path)
    assert not module.seen


def exact_losses(folder):
    torch.manual_seed(0)
    module = Plain()
    fit(module, [], folder)
    return [loss for loss, _ in module.seen]


@pytest.mark.slow
def test_what_would_be_missed_at_the_end_is_missed_before_training(tmp_path, converted):
    cases = [
        (
            [Quantization(monitor="val/acuracy")],
            "'val/acuracy', which is not logged; did you mean 'val/accur.*validation_step has",
        ),
        ([Quantization(), Quantization("dynamic")], r"2 Quantization callbacks, and takes one.*measure another set"),
        ([Quantization("qat", begin=12)], r"begin=12 leaves none of the run's 12 steps for int8"),
        ([Quantization("qat", begin=0.99)], r"begin=0\.99 leaves none of the run's 12 steps for int8"),
        (
            [Quantization(backend="onnxruntime"), Export("pt2")],
            r"on cpu that a file of format 'pt2' can hold; there are",
        ),
        ([Export("onnx"), Quantization(backend="torchao")], r"of format 'onnx' can hold; there are: mode='dynamic', b"),
    ]
    for callbacks, message in cases:
        module = Plain()
        with pytest.raises(ValueError, match=message):
            fit(module, callbacks, tmp_path)
        assert not module.seen
    for begin in (12, 0.99):
        fit(Plain(), [Quantization("qat", begin=begin)], tmp_path, fast_dev_run=True)
    for callback in (Export(), CompressionReport()):
        module = Plain()
        with pytest.raises(ValueError, match=r"measures on validation batches, and this run has none: give fit a"):
            fit(module, [callback], tmp_path, limit_val_batches=0)
        assert not module.seen


class Chosen(nn.Linear):
    def forward(self, x):
        if len(x) > 9:
            raise RuntimeError("at most 9 rows")
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


def test_the_part_with_most_parameters_is_named_where_batches_hold_no_tensor():
    deployed = Deployed("net", nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 1)), [((object(),), {})], {})
    with pytest.raises(ValueError, match=r"has object\. Choose a submodule .*\. Quantization\(module='net\.0'\) would"):
        Quantization()._check_calls(deployed)


class Chooses(Plain):
    """Takes a path by its values, which no graph does, and few rows."""

    def __init__(self):
        super().__init__()
        self.net = Chosen(6, 3)


@pytest.mark.slow
def test_what_forms_cannot_be_made_of_is_refused_before_training(tmp_path, converted):
    for options, message in [
        ({"monitor": "val/acuracy"}, "monitors 'val/acuracy', which is not logged; did you mean 'val/accuracy'"),
        ({"backend": "pt2e"}, r"the end of the run: backend='pt2e' needs a graph of Chosen, and torch\.export cannot"),
        ({"backend": "onnxruntime"}, r"run: backend='onnxruntime' needs a graph of Chosen, and torch\.onnx cannot"),
        ({"backend": "torchao", "exclude": ["*"]}, "has no linear layer for backend='torchao' to quantize"),
    ]:
        module, rows = Chooses(), DataLoader(ROWS, 8)
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
            callbacks=[Quantization(**options)], default_root_dir=tmp_path,
        )  # fmt: skip
        with pytest.raises(ValueError, match=message):
            trainer.fit(module, rows, rows)
        assert not module.seen


@pytest.mark.slow
def test_training_goes_on_as_if_nothing_had_been_converted(tmp_path, converted):
    found = []
    reported = CompressionReport(compiled=False, seconds=0.01)
    for callbacks in ([Quantization("static", calibrate=20, monitor="val/accuracy"), reported], []):
        torch.manual_seed(0)
        module = Plain()
        fit(module, callbacks, tmp_path)
        fit(module, [], tmp_path, max_epochs=1)
        found.append((weights(module), module.seen))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    assert found[0][1] == found[1][1]
    (copied, inputs, args, options) = converted.calls[0]
    assert args == ("static", "auto")
    assert copied is not module.net
    assert not copied.training
    assert [len(one[0][0]) for one in inputs] == [8, 8, 8]
    rows = torch.cat([one[0][0] for one in inputs])
    assert not torch.equal(rows, ROWS.tensors[0][:24])  # not the first ones, which may be of one class
    assert all(any(torch.equal(row, other) for other in ROWS.tensors[0]) for row in rows)
    assert converted.figures[1]["val/loss"] == pytest.approx(math.log(3), rel=1e-5)
    assert converted.figures[0]["val/loss"] != converted.figures[1]["val/loss"]
    assert options["limit"].monitor == "val/accuracy"


def test_calibration_reads_what_the_sampler_of_training_reads(tmp_path, converted):
    class Keys(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(["row 3", "row 5", "row 7", "row 9"])

        def __len__(self):
            return 4

    class Named(torch.utils.data.Dataset):
        def __getitem__(self, key):
            return ROWS[int(key.removeprefix("row "))]

        def __len__(self):
            return 48

    found = []
    for loader in (
        DataLoader(Named(), 2, sampler=Keys()),
        DataLoader(ROWS, 2, sampler=torch.utils.data.SubsetRandomSampler([3, 5, 7, 9])),
    ):
        Quantization().convert(Plain().eval(), loader)
        found.append(torch.cat([args[0] for args, _ in converted.calls[-1][1]]))
    wanted = ROWS.tensors[0][[3, 5, 7, 9]]
    assert all(torch.equal(one.sort(0).values, wanted.sort(0).values) for one in found)


@pytest.mark.slow
def test_what_export_names_is_quantized(tmp_path, converted, monkeypatch):
    monkeypatch.setattr(Export, "_run", lambda *_: None)
    quantization = Quantization(seconds=0.01)
    fit(Plain(), [quantization, Export(module="net.3", compare=False)], tmp_path)
    assert quantization.result.deployed == "net.3"
    fit(Plain(), [quantization], tmp_path)
    assert quantization.result.deployed == "net"


@pytest.mark.slow
def test_names_to_exclude_are_those_of_the_module(tmp_path, converted):
    fit(Plain(), [Quantization(exclude=["net.0"])], tmp_path)
    fit(Plain(), [Quantization(exclude=["Linear"], module="net.3")], tmp_path)
    assert converted.calls[0][3]["exclude"] == ["0"]
    assert converted.calls[1][3]["exclude"] == [""]


@pytest.mark.slow
def test_layers_train_for_int8_from_the_start_on(tmp_path, converted):
    """With ranges of what they see, equal losses before, and validation of what is wanted afterwards."""
    phases, losses = [], {}

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            phases.append((current_phase(trainer), in_final_phase(trainer)))
            trainer.should_stop = ends_early and len(phases) == 6

    for begin in (0.5, 6, "never"):
        torch.manual_seed(0)
        module = Plain()
        ends_early = begin == "never"
        quantization = Quantization("qat", begin=0.9 if ends_early else begin)
        phases.clear()
        if ends_early:
            with warnings.catch_warnings(record=True) as caught:
                warnings.filterwarnings("always", "no step was trained in int8")
                fit(module, [quantization, Watch()], tmp_path)
            assert any("no step was trained in int8" in str(one.message) for one in caught)
            assert quantization.result is None
        else:
            fit(module, [quantization, Watch()], tmp_path)
            assert phases == [("float", False)] * 6 + [("int8", True)] * 6
        losses[begin] = [loss for loss, _ in module.seen]
        assert not any("forward" in one.__dict__ for one in module.modules())
        assert list(module.state_dict()) == list(Plain().state_dict())
    assert losses[0.5] == losses[6]
    assert losses[6][:6] == losses["never"]
    assert losses[6][6:] != exact_losses(tmp_path)[6:]
    ranges = converted.calls[0][3]["ranges"]
    assert list(ranges) == ["0", "3"]
    assert ranges["3"][0] == 0
    low, high = ROWS.tensors[0].min().item(), ROWS.tensors[0].max().item()
    assert low <= ranges["0"][0] < 0.5 * low
    assert 0.5 * high < ranges["0"][1] <= high


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_resumed_training_is_bit_equal(tmp_path, converted, killed_at):
    class Stop(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == killed_at:
                trainer.save_checkpoint(tmp_path / "killed.ckpt")
                raise KeyboardInterrupt

    found = []
    for resumes in (False, True):
        torch.manual_seed(0)
        module, quantization = Plain(), Quantization("qat", begin=0.4)
        loader = {"max_epochs": 3}
        if resumes:
            with pytest.raises((KeyboardInterrupt, SystemExit)):
                in_order(Plain(), [Quantization("qat", begin=0.4), Stop()], tmp_path, **loader)
            in_order(module, [quantization], tmp_path, ckpt_path=tmp_path / "killed.ckpt", **loader)
        else:
            in_order(module, [quantization], tmp_path, **loader)
        found.append((weights(module), converted.calls[-1][3]["ranges"]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    assert found[0][1] == found[1][1]
    state = torch.load(tmp_path / "killed.ckpt", weights_only=True)["callbacks"]
    assert list(next(iter(state.values()))["ranges"]) == ["net.0", "net.3"]


def in_order(module, callbacks, folder, ckpt_path=None, **options):
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        enable_checkpointing=False, default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(ROWS, 8), DataLoader(ROWS, 16), ckpt_path=ckpt_path)


@pytest.mark.slow
def test_best_checkpoint_is_one_of_int8(tmp_path, converted):
    class Worse(Plain):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.log("val/epoch", float(self.trainer.current_epoch))

    keeper = ModelCheckpoint(tmp_path, monitor="val/epoch", filename="{epoch}")
    fit(Worse(), [Quantization("qat", begin=6), keeper], tmp_path)
    assert keeper.best_model_path.endswith("epoch=1.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize(("start", "first"), [(1, 6), (0.25, 3)])
def test_the_old_start_is_an_epoch_or_a_share(tmp_path, converted, start, first):
    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            if in_final_phase(trainer):
                steps.append(trainer.global_step)

    steps = []
    with pytest.warns(FutureWarning, match="Quantization: start=.* gives way to begin") as warned:
        quantization = Quantization("qat", start=start)
    assert warned[0].filename == __file__
    fit(Plain(), [quantization, Watch()], tmp_path)
    assert steps[0] == first + 1
    with pytest.warns(FutureWarning):
        late = Quantization("qat", start=2)
    with pytest.raises(ValueError, match="start=2 leaves none of the run's 12 steps"):
        fit(Plain(), [late], tmp_path)


def ranges_of(rank, strategy, devices, folder, batch_size):
    torch.manual_seed(0)
    module = Plain()
    module.net[1] = nn.Identity()  # its moments would be those of each process
    quantization = Quantization("qat", begin=0)
    found = Convert()
    import lightning_accel.callbacks.deployment.quantization as own

    kept, own.quantize = own.quantize, found
    try:
        options = {"strategy": strategy, "devices": devices} if devices > 1 else {}
        trainer = L.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[quantization], enable_checkpointing=False, default_root_dir=folder, max_epochs=1,
            use_distributed_sampler=False, **options,
        )  # fmt: skip
        sampler = DistributedSampler(ROWS, devices, rank, shuffle=False)
        trainer.fit(module, DataLoader(ROWS, batch_size, sampler=sampler), DataLoader(ROWS, 16))
    finally:
        own.quantize = kept
    return {name: layer.range.tolist() for name, layer in quantization._training.layers.items()}, len(found.calls)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("accel_fsdp2", marks=pytest.mark.slow)])
def test_ranges_are_those_of_one_process(tmp_path, strategy):
    one, _ = ranges_of(0, "auto", 1, tmp_path, 8)
    two = run_ranks(ranges_of, strategy, 2, tmp_path, 4)
    for ranges, _ in two:
        for name, expected in one.items():
            assert ranges[name] == pytest.approx(expected, rel=1e-3)
    assert [calls for _, calls in two] == [1, 0]


def fails(*_):
    raise RuntimeError("planted")


def check_a_failure_in_the_first_process_ends_no_run(rank, folder):
    quantization = Quantization("static")
    quantization.convert = fails
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=1,
        callbacks=[quantization], enable_checkpointing=False, default_root_dir=folder, strategy="ddp",
        devices=2,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Plain(), DataLoader(ROWS, 8), DataLoader(ROWS, 16))
    assert quantization.result is None
    return [str(one.message) for one in caught if "Quantization" in str(one.message)]


@pytest.mark.slow
def test_a_failure_in_the_first_process_ends_no_run(tmp_path):
    found = run_ranks(check_a_failure_in_the_first_process_ends_no_run, tmp_path)
    assert found == [["Quantization failed, and the model is kept in float: RuntimeError: planted"], []]


def test_reasons_and_report_are_shown_where_nothing_is_picked(tmp_path, monkeypatch, capsys):
    """After the run, so its checkpoint and weights stay, and ``fit`` returns."""

    def refuse(*_, **__):
        report = Report("quantization", "cpu")
        report.add(Row("int8 own", note="cannot run at batch 1: IndexError: planted", status="failed"))
        raise NothingPickedError("no form can be picked. int8 own: cannot run at batch 1: IndexError: planted", report)

    monkeypatch.setattr("lightning_accel.callbacks.deployment.quantization.quantize", refuse)
    quantization, keeper = Quantization(), ModelCheckpoint(tmp_path, filename="last")
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "Quantization failed")
        trainer = fit(Plain(), [quantization, keeper], tmp_path)
    (warning,) = [str(one.message) for one in caught if "Quantization failed" in str(one.message)]
    assert "kept in float: no form can be picked. int8 own: cannot run at batch 1: IndexError: planted" in warning
    assert trainer.state.finished
    assert keeper.best_model_path.endswith("last.ckpt")
    assert quantization.result is None
    assert "IndexError: planted" in capsys.readouterr().out
    assert "IndexError: planted" in (tmp_path / "figures/quantization.json").read_text()
    with pytest.raises(NothingPickedError, match="no form can be picked"):
        quantization.convert(Plain().eval(), DataLoader(ROWS, 8))


@pytest.mark.slow
def test_what_was_picked_is_told_to_users(tmp_path, monkeypatch, caplog):
    """On the logger that the Trainer's own lines go to; others show warnings alone."""
    report = Report("quantization", "cpu")
    rounds = {"fp32 eager": 6.0, "fp32 runtime": 1.2, "int8 own": 1.0}
    for name, taken in rounds.items():
        latencies = {batch: Latency(taken, taken, 11, (taken,) * 11) for batch in (1, 8)}
        report.add(Row(name, latencies=latencies, float_row="fp32 runtime" if name == "int8 own" else ""))

    def pick(module, *_, progress, **__):
        progress("form 1 of 1: int8 own")
        left = {"head": "left out by exclude: head"}
        picks = {1: Form("int8 other", module), 8: Form("int8 own", module)}
        options = {"left_float": left, "refused": {}, "ties": ["int8 other"], "picks": picks}
        return Quantized("int8 own", module, report=report, **options)

    monkeypatch.setattr("lightning_accel.callbacks.deployment.quantization.quantize", pick)
    fit(Plain(), [Quantization("qat", begin=0)], tmp_path)
    told = {one.getMessage() for one in caplog.records if one.name.startswith("lightning.pytorch")}
    assert "2 layers train for int8" in told
    assert "quantization: form 1 of 1: int8 own (after 0 s)" in told
    assert (
        "Quantization picked int8 own: 6.00x ±0% at batch 1 and 6.00x ±0% at batch 8 as fast as fp32 eager; "
        "1.20x ±0% at batch 1 and 1.20x ±0% at batch 8 as fast as fp32 runtime; as fast, as far as could be measured: "
        "int8 other; at batch 1, int8 other is faster: result.picks[1]; "
        "in float: head (left out by exclude: head)"
    ) in told


def test_what_cannot_work_is_refused_before_training(tmp_path):
    for options, match in [
        ({"mode": "int8"}, "mode must be one of auto, static"),
        ({"backend": "tensorrt"}, "backend must be one of auto, pt2e"),
        ({"max_drop": 0.1}, "max_drop needs monitor"),
        ({"max_drop": -1.0, "monitor": "val/loss"}, "max_drop must be at least 0.*got -1.0"),
        ({"monitor_mode": "best"}, "monitor_mode must be"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"calibrate": 0}, "calibrate must be at least 1; got 0"),
        ({"begin": 1.0}, r"begin must be a share.*got 1.0"),
        ({"mode": "static", "begin": 0.3}, "begin is when mode='qat' begins; got begin=0.3 and mode='static'"),
        ({"mode": "qat", "backend": "torchao"}, "mode='qat' is converted by"),
    ]:
        with pytest.raises(ValueError, match=match):
            Quantization(**options)
    for options, match in [
        ({"exclude": ["head"]}, r"exclude has 'head'.*net.0, net.1"),
        ({"module": "head"}, "no submodule 'head'; it has: net"),
        ({"batch_size": 9}, r"batch_size=9\) measures that many samples of a training batch, which has 8; lower it"),
        ({"mode": "qat", "exclude": ["net"]}, "Plain has no linear layer or convolution for mode='qat'"),
    ]:
        module = Plain()
        with pytest.raises(ValueError, match=match):
            fit(module, [Quantization(**options)], tmp_path)
        assert module.seen == []
    module = Plain()
    with pytest.raises(ValueError, match=r"Export\(module='net.0'\) would not write.*same module in both"):
        fit(module, [Quantization(module="net"), Export(module="net.0")], tmp_path)
    assert module.seen == []
    with pytest.raises(ValueError, match="monitors 'val/loss', but this run does not validate"):
        fit(Plain(), [Quantization(monitor="val/loss")], tmp_path, validate=False)

    class Silent(Plain):
        validation_step = L.LightningModule.validation_step

    with pytest.raises(TypeError, match="Quantization needs a validation_step of Silent"):
        fit(Silent(), [Quantization()], tmp_path, validate=False)


def test_a_limit_that_allows_any_accuracy_is_told_before_training(tmp_path):
    module = Plain()
    with pytest.warns(UserWarning, match="max_drop=1 allows any loss of 'val/accuracy', which is 0.* one percent"):
        fit(module, [Quantization(monitor="val/accuracy", max_drop=1.0)], tmp_path, fast_dev_run=1)


def test_missing_packages_are_named_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match=r"onnxruntime is needed here .*lightning_accel\[compress"):
        fit(Plain(), [Quantization(backend="onnxruntime")], tmp_path)


@pytest.mark.slow
def test_onnx_file_of_a_plain_module(tmp_path, caplog, uncompiled):
    module = Plain()
    quantization = Quantization("dynamic", "onnxruntime", monitor="val/accuracy", max_drop=0.05, seconds=0.02)
    with caplog.at_level(logging.INFO):
        fit(module, [quantization], tmp_path)
    result = quantization.result
    assert result.name == "int8 ONNX Runtime dynamic"
    assert result.deployed == "net"
    x = torch.randn(5, 6)
    torch.testing.assert_close(result.run(x), module.eval().net(x), rtol=0, atol=0.3)
    assert f"Quantization picked {result.name}" in caplog.text
    assert {one.name for one in (tmp_path / "figures").iterdir()} == {
        "quantization.png",
        "quantization.json",
        "quantization_frontier.png",
    }
    rows = {row.name: row for row in result.report.rows}
    assert set(rows[result.name].latencies) == {1, 8}
    assert "val/accuracy" in rows["fp32 eager"].metrics
    again = Quantization("dynamic", "onnxruntime", batch_size=4, seconds=0.02)
    found = again.convert(module, DataLoader(ROWS, 8), DataLoader(ROWS, 16))
    assert found.onnx == result.onnx
    assert list(found.picks) == [1, 8, 4]


@pytest.mark.slow
def test_cnn_trained_for_int8_in_a_trainer(tmp_path, uncompiled):
    torch.manual_seed(0)
    module = Classifier(1, 10, channels=[16, 32], hidden_dims=[32])
    data = DigitsDataModule(batch_size=64)
    quantization = Quantization("qat", "pt2e", monitor="val/accuracy", max_drop=0.01, seconds=0.05)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=6, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[quantization], enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, data)
    metrics = {row.name: row.metrics for row in quantization.result.report.rows}
    # the last validation of the fit saw the layers rounded
    assert metrics["int8 PT2E static"]["val/loss"] == pytest.approx(
        float(trainer.callback_metrics["val/loss"]), rel=0.01
    )
    assert metrics["int8 PT2E static"]["val/accuracy"] >= metrics["fp32 eager"]["val/accuracy"] - 0.01
    assert quantization.result.program is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("moe", marks=pytest.mark.weekly), "sequence"])
def test_models_of_ours(kind, uncompiled):
    if kind == "moe":
        module, rows = (
            MoEClassifier(12, 3, experts=Experts(num_experts=4)),
            TensorDataset(torch.randn(32, 12), torch.arange(32) % 3),
        )
    else:
        module = SequenceModel(2, 3, target_kind="classification", layers=RecurrentLayers(cell="mingru", hidden_dim=16))
        lengths = torch.arange(32) % 4 + 1
        rows = TensorDataset(torch.randn(32, 4, 2), lengths, torch.arange(32) % 3)
    quantization = Quantization("static", "pt2e", seconds=0.02)  # and what is in float
    found = quantization.convert(module.eval(), DataLoader(rows, 16), DataLoader(rows, 16))
    notes = {row.name: row.note for row in found.report.rows if not row.latencies}
    assert "fp32 compiled" not in notes
    assert "int8 PT2E static" not in notes
    inputs = [rows.tensors[0][:5]] if kind == "moe" else [rows.tensors[0][:5], rows.tensors[1][:5]]
    with torch.no_grad():
        wanted, result = module(*inputs), found.run(*inputs)
    assert type(result) is type(wanted)
    torch.testing.assert_close(result[0], wanted[0], rtol=0, atol=0.1)


class OfGraphs(Plain):
    def forward(self, x, edge_index):
        return self.net(x.index_add(0, edge_index[1], x[edge_index[0]]))

    def validation_step(self, batch, batch_idx):
        x, edge_index = batch
        self.log("val/loss", self(x, edge_index).mean(), batch_size=len(x))


def test_calls_of_graphs_are_two_at_least_so_that_their_edges_are_seen_to_differ():
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(9, 6), torch.randint(0, 9, (2, edges), generator=generator)) for edges in (11, 14, 17)]
    loader = DataLoader(batches, batch_size=None)
    found = calibration_calls(OfGraphs().eval(), loader, num_samples=8)
    assert [args[1].shape[1] for args, _ in found.inputs] == [11, 14]
    rows = DataLoader(ROWS, batch_size=12)
    assert len(calibration_calls(Plain().eval(), rows, num_samples=8).inputs) == 1
