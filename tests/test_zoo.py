"""Networks that nobody here wrote, each with each feature: it works, or is refused before training.

``python -m tests.test_zoo`` writes the table of docs/compatibility.md from it. One cell of each network is ``slow``, so
that each feature is in some, and files and one of each kind of int8 of small networks; all others are ``weekly``.
"""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import nn

from lightning_accel.callbacks import Distillation, ExpertLosses, Export, Pruning, Quantization
from lightning_accel.compress import load_compressed
from lightning_accel.nn import replace_mlps_
from lightning_accel.strategies import FullyShardedStrategy, PipelineStrategy
from tests.ranks import run_ranks
from tests.zoo import ZOO, Autoencoder

pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that the networks are from
PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
QUIET = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
ONCE = {"schedule": "one_shot", "begin": 0, "end": 1, "scope": "layer"}
BACKENDS = {"qat": "onnxruntime", "static": "onnxruntime", "dynamic": "onnxruntime", "weight_only": "torchao"}
COMPILE = "lightning_accel.compress.quantization.form.compile_flat"
PROJECT = """
import lightning as L
from tests.zoo import ZOO

def make(**options):
    trainer = L.Trainer(**{{"max_epochs": 50, "accelerator": "cpu"}} | options)
    return trainer, ZOO[{name!r}].make(), ZOO[{name!r}].loader()

if __name__ == "__main__":
    from lightning_accel import tune
    tune(make, budget=60)
"""


class RefusedError(Exception):
    """Report that a run was refused before its first step."""


def make(name: str) -> L.LightningModule:
    """Return the module of a network, without dropout and noise, which strategies draw otherwise."""
    pytest.importorskip(ZOO[name].requires)
    L.seed_everything(0, verbose=False)
    module = ZOO[name].make()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, Autoencoder):
            part.noise = 0.0
    return module


def fit(name: str, *callbacks: L.Callback, module=None, devices=1, batch_size=4, **options) -> L.LightningModule:
    """Train for three steps, and validate on four samples."""
    module = make(name) if module is None else module
    L.seed_everything(0, verbose=False)
    options = QUIET | {"max_epochs": 1, "use_distributed_sampler": devices == 1} | options
    trainer = L.Trainer(accelerator="cpu", devices=devices, callbacks=list(callbacks), **options)
    try:
        trainer.fit(module, ZOO[name].loader(batch_size=batch_size), ZOO[name].loader(4))
    except (RuntimeError, TypeError, ValueError) as error:
        if trainer.global_step or not str(error):
            raise
        raise RefusedError(str(error)) from error
    assert torch.isfinite(trainer.callback_metrics["val_loss"])
    return module


def masks(name: str, folder: Path, structure: str = "unstructured", **options) -> None:
    """Zero half of each parameter that the callback does not name with a reason."""
    pruning = Pruning(0.5 if structure == "unstructured" else None, structure=structure, **ONCE)
    module = fit(name, pruning, **options)
    pruned = {key: one for key, one in module.named_parameters() if key not in pruning.left_out}
    assert sum(one.numel() for one in pruned.values()) > 0.3 * sum(one.numel() for one in module.parameters())
    for key, one in pruned.items():
        assert (one == 0).double().mean() == pytest.approx(0.5, abs=0.5 / min(one.shape) if one.ndim > 1 else 1), key


def masks_2_of_4(name: str, folder: Path, **options) -> None:
    masks(name, folder, "2:4", **options)


def channels(name: str, folder: Path, **options) -> None:
    """Remove a quarter of the channels, and train what is left."""
    before = sum(one.numel() for one in make(name).parameters())
    module = fit(name, Pruning(0.25, structure="channel", **ONCE), **options)
    assert sum(one.numel() for one in module.parameters()) < before


def quantized(mode: str) -> Callable[..., None]:
    """Make and validate forms in int8, beside floats that are compiled only where int8 is."""

    def run(name: str, folder: Path, **options) -> None:
        with nullcontext() if mode == "weight_only" else patch(COMPILE, lambda flat, _: flat):
            make_forms(name, folder, **options)

    def make_forms(name: str, folder: Path, **options) -> None:
        begin = {"begin": 0} if mode == "qat" else {}
        quantization = Quantization(
            mode, BACKENDS[mode], seconds=0.01, monitor="val_loss", monitor_mode="min", max_drop=0.2, **begin
        )
        module = fit(name, quantization, default_root_dir=folder, **options)
        if not module.trainer.is_global_zero:
            return
        assert quantization.result is not None
        int8 = [row for row in quantization.result.report.rows if row.name.startswith("int8") and row.latencies]
        assert int8
        assert quantization.result.report.rows[0].macs > 0
        assert all(row.metrics["val_loss"] > 0 for row in int8)

    return run


def distilled(name: str, folder: Path, **options) -> None:
    """Learn from the module as it was at the beginning, from which two steps have led away."""
    module = fit(name, Distillation("initial"), **options)
    assert 0 < module.trainer.callback_metrics["train/distillation_loss"] < 100


def exported(format: str) -> Callable[..., None]:
    """Write a file, which the callback keeps only if its outputs are those of the module."""

    def run(name: str, folder: Path, **options) -> None:
        export = Export(format, compare=False)
        module = fit(name, export, default_root_dir=folder, **options)
        if module.trainer.is_global_zero:
            assert export.exported is not None
            load_compressed(export.exported.path)

    return run


def sharded(name: str, folder: Path) -> None:
    """End with the loss of one process, whose gradients are those of two with the same samples."""
    expected = float(fit(name).trainer.callback_metrics["val_loss"])
    assert outcomes_in_ranks(loss_of, name, FullyShardedStrategy) == pytest.approx([expected] * 2, rel=2e-3)


def in_stages(name: str, folder: Path) -> None:
    """End with the loss of one process; statistics of BatchNorm are those of micro-batches there as well."""
    module = make(name)
    has_statistics = any(getattr(part, "running_mean", None) is not None for part in module.modules())
    same = {"batch_size": 2, "accumulate_grad_batches": 2} if has_statistics else {}
    expected = float(fit(name, module=module, **same).trainer.callback_metrics["val_loss"])
    assert outcomes_in_ranks(loss_of, name, PipelineStrategy) == pytest.approx([expected] * 2, rel=2e-3)


def outcomes_in_ranks(check: Callable[..., object], *arguments: object) -> list[object]:
    """Return what ``check`` returns in each of two processes.

    Raises:
        RefusedError: if it raises that in all of them.
    """
    answers = run_ranks(refusal_or, check, *arguments)
    refusals = [answer.removeprefix("refused: ") for answer in answers if str(answer).startswith("refused: ")]
    if refusals:
        assert len(refusals) == 2
        raise RefusedError(refusals[0])
    return answers


def refusal_or(rank: int, check: Callable[..., object], *arguments: object) -> object:
    try:
        return check(*arguments)
    except RefusedError as error:
        return f"refused: {error}"


def loss_of(name: str, strategy: Callable[..., object]) -> float:
    options = {"num_micro_batches": 2} if strategy is PipelineStrategy else {}
    module = fit(name, devices=2, strategy=strategy(**options))
    return float(module.trainer.callback_metrics["val_loss"])


def mixtures(name: str, folder: Path, **options) -> None:
    """Give the losses of the perceptrons before training, then train with those of gates."""
    module = make(name).eval()
    batch = next(iter(ZOO[name].loader()))
    with torch.no_grad():
        expected = module.training_step(copy.copy(batch), 0)
    try:
        replace_mlps_(module, 3)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    with torch.no_grad():
        torch.testing.assert_close(module.eval().training_step(copy.copy(batch), 0), expected, rtol=1e-4, atol=1e-5)
    fit(name, ExpertLosses(), module=module.train(), **options)


def tuned(name: str, folder: Path) -> None:
    """Search for a minute for a faster run: nothing fails, and something is measured."""
    (folder / "project.py").write_text(PROJECT.format(name=name))
    command = [sys.executable, "-W", "ignore", "project.py"]
    result = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(PAGE.parents[1])}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    alone = json.loads((folder / "tuned/report.json").read_text())["alone"]
    assert alone
    assert not [one["reason"] for one in alone.values() if "Error" in one["reason"]]


FEATURES: dict[str, Callable[..., None]] = {
    "masks": masks,
    "2:4": masks_2_of_4,
    "channels": channels,
    "QAT": quantized("qat"),
    "static": quantized("static"),
    "dynamic": quantized("dynamic"),
    "weight-only": quantized("weight_only"),
    "distillation": distilled,
    ".pt2": exported("pt2"),
    "ONNX": exported("onnx"),
    "FSDP2": sharded,
    "pipeline": in_stages,
    "mixtures": mixtures,
    "tune": tuned,
}
ALONE = "FSDP2", "pipeline", "tune"  # start processes themselves
LONG = "QAT", "static", "dynamic", "weight-only", "tune"  # half a minute to two
FILES = ".pt2", "ONNX"  # up to a minute
SHORT = ("distilbert", "QAT"), ("audio", "static"), ("vae", "dynamic"), ("gcn", ".pt2"), ("gps", "ONNX")

NO_PERCEPTRON = r"has no perceptron to replace, .* Put MixtureOfExperts into the network's own code"
NO_LAYERS = r"Give it a method pipeline_layers\(self\)"
REFUSED = {
    **dict.fromkeys(
        [
            *((name, "mixtures") for name in ("resnet", "resnet_bottleneck", "mobilenet", "efficientnet", "unet")),
            *((name, "mixtures") for name in ("audio", "seq2seq", "vae", "gcn", "gat")),
        ],
        NO_PERCEPTRON,
    ),
    ("olmoe", "mixtures"): NO_PERCEPTRON,
    **dict.fromkeys([(name, "pipeline") for name in ("clip", "unet", "audio", "seq2seq")], NO_LAYERS),
    ("unet", "weight-only"): "has no linear layer for backend='torchao' to quantize; take mode='auto'",
}


def cells() -> list[object]:
    """Return all cells; of each network one of those not in ``LONG`` and ``FILES``, and ``SHORT`` ones, are slow."""
    slow, weekly = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.weekly]
    brief = [feature for feature in FEATURES if feature not in {*LONG, *FILES}]
    chosen = {*SHORT, *((name, brief[2 * i % len(brief)]) for i, name in enumerate(ZOO))}
    return [
        pytest.param(name, feature, marks=slow if (name, feature) in chosen else weekly)
        for name in ZOO
        for feature in FEATURES
    ]


def test_the_zoo_is_large():
    assert len(ZOO) >= 24


@pytest.mark.parametrize("name", ZOO)
def test_models_train(name):
    assert fit(name).trainer.global_step == 3


@pytest.mark.parametrize(("name", "feature"), cells())
def test_cell(name, feature, tmp_path):
    pattern = REFUSED.get((name, feature))
    if pattern is None:
        FEATURES[feature](name, tmp_path)
    else:
        with pytest.raises(RefusedError, match=re.compile(pattern, re.DOTALL)):
            FEATURES[feature](name, tmp_path)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def check_feature(rank: int, name: str, feature: str, folder: Path) -> None:
    FEATURES[feature](name, folder, devices=2, strategy="ddp_find_unused_parameters_true")


@pytest.mark.sampled(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "feature"),
    [pytest.param(name, feature, marks=[pytest.mark.weekly] if feature in LONG else [])
     for name, feature in zip(["bert", "llama", "vit", "t5", "convnext", "gpt2", "gat", "swin", "unet", "seq2seq",
                               "qwen3"], [one for one in FEATURES if one not in ALONE], strict=True)],
)  # fmt: skip
def test_features_in_two_processes(name, feature, tmp_path):
    run_ranks(check_feature, name, feature, tmp_path)


def table() -> str:
    """Return what works as Markdown, a row for each network."""
    lines = ["| | " + " | ".join(FEATURES) + " |", "| --- |" + " --- |" * len(FEATURES)]
    for name in ZOO:
        row = ["refused" if (name, feature) in REFUSED else "yes" for feature in FEATURES]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    total = len(ZOO) * len(FEATURES)
    lines += ["", f"{total - len(REFUSED)} of {total} cells work; {len(REFUSED)} are refused."]
    return "\n".join(lines)


def test_table_of_the_readme_is_this_one():
    assert table() in PAGE.read_text(), "run python -m tests.test_zoo"


if __name__ == "__main__":
    begin, end = "<!-- table of tests/test_zoo.py -->\n", "\n<!-- end of table -->"
    before, _, after = PAGE.read_text().partition(begin)
    PAGE.write_text(before + begin + table() + end + after.partition(end)[2])
