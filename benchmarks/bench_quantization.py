"""How much faster and smaller is a quantized model than the float one, and what does it lose?

python benchmarks/bench_quantization.py [--device cuda] [--quick] [--json FILE]

Digits: a CNN (64, 128 and 256 channels, 256 hidden units), an MLP (three layers of 1024), an LSTM (two layers of 512, 8
steps of 8 pixels), trained in this run; accuracy of the test images. All forms that this machine can run are measured
at batch 1 and 256, in blocks of calls in a row that take turns in one process, one thread; ratios are medians against
fp32 eager; those ``alone`` were measured without the other forms between. File sizes are to that of the float model in
the same format. ``CNN trained for int8``, on the CPU alone, is trained by ``Quantization(mode="qat")`` inside a
Trainer. With ``--quick`` models train less, and fewer calls are timed.

What can be expected: a CPU with AVX512 VNNI does 4 times as many multiplications of int8 as of float32 a cycle, with
AMX 32 times as many. Beyond that a ratio comes of what fp32 eager wastes.
"""

import argparse
import copy
import io
import json
import logging
import platform
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel import Classifier, DigitsDataModule
from lightning_accel.callbacks import Quantization
from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.quantization.form import Form
from lightning_accel.compress.quantization.onnx import write_float
from lightning_accel.compress.quantization.picking import Quantized
from lightning_accel.compress.quantization.quantized import quantize
from lightning_accel.compress.quantization.trial import Limit
from lightning_accel.compress.report.latency import measure_latency

BATCHES = (1, 256)
# (model, form, batch): times faster than fp32 eager, on a CPU with AMX
WANTED = {
    ("CNN", "int8 PT2E static", 256): 10,
    ("LSTM", "int8 ONNX Runtime dynamic", 256): 2.5,
    ("LSTM", "int8 ONNX Runtime dynamic", 1): 10,
    ("MLP", "int8 PT2E static", 256): 6,
}


class Recurrent(L.LightningModule):
    """Reads an image line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 512, 2, batch_first=True)
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.squeeze(1))[0][:, -1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def cnn() -> Classifier:
    return Classifier(1, 10, channels=[64, 128, 256], hidden_dims=[256])


def train(module: L.LightningModule, data: DigitsDataModule, epochs: int, *callbacks: L.Callback) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=list(callbacks), num_sanity_val_steps=0, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, data)
    module.eval()


def accuracy(run: Any, data: DigitsDataModule, device: torch.device | str = "cpu") -> float:
    x, target = data.test_rows.tensors
    with torch.no_grad():
        return run(x.to(device)).argmax(dim=1).cpu().eq(target).float().mean().item()


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def forms_of(module: nn.Module, data: DigitsDataModule, seconds: float) -> Quantized:
    device = device_of(module)
    inputs: list[Inputs] = [((data.train_rows.tensors[0][:256].to(device),), {})]
    judged = Limit(lambda run: {"test/accuracy": accuracy(run, data, device)})
    return quantize(module, inputs, limit=judged, batch_sizes=BATCHES, seconds=seconds)


def rows_of(model: str, found: Quantized, float_bytes: dict[str, int]) -> Iterator[dict[str, Any]]:
    assert found.report is not None
    rows = {row.name: row for row in found.report.rows}
    eager, wanted = rows["fp32 eager"], WANTED if found.device == "cpu" else {}
    for name, row in rows.items():
        made = {"subject": name, "baseline": "fp32 eager"}
        for batch, latency in row.latencies.items():
            ratio = eager.latencies[batch].p50_ms / latency.p50_ms
            yield made | {"case": f"{model}, batch {batch}", "metric": "latency", "value": latency.p50_ms, "unit": "ms",
                          "ratio": ratio, "wanted": wanted.get((model, name, batch))}  # fmt: skip
        for metric, value in row.metrics.items():
            yield made | {"case": model, "metric": metric, "value": value, "unit": "", "ratio": None}
        if row.file_bytes:
            whole = float_bytes["onnx" if "ONNX" in name else "pt2"]
            yield made | {"case": model, "metric": "file", "value": row.file_bytes, "unit": "bytes",
                          "ratio": row.file_bytes / whole}  # fmt: skip
        if row.note:
            yield made | {"case": model, "metric": "note", "value": row.note, "unit": "", "ratio": None}


def warm_rows(
    model: str, module: nn.Module, found: Quantized, data: DigitsDataModule, seconds: float
) -> Iterator[dict[str, Any]]:
    """What was picked and fp32 eager, without the forms between which the report measures them."""
    device = device_of(module)
    for batch in BATCHES:
        x = data.train_rows.tensors[0][:batch].to(device)
        calls = {name: partial(run, x) for name, run in (("fp32 eager", module), (found.name, found.run))}
        eager, picked = (one.p50_ms for one in measure_latency(calls, seconds).values())
        yield {"case": f"{model}, batch {batch}, alone", "subject": found.name, "metric": "latency", "value": picked,
               "unit": "ms", "baseline": "fp32 eager", "ratio": eager / picked,
               "wanted": WANTED.get((model, found.name, batch)) if device.type == "cpu" else None}  # fmt: skip


def float_sizes(module: nn.Module, found: Quantized, data: DigitsDataModule) -> dict[str, int]:
    assert found.report is not None
    sizes = {row.name: row.file_bytes for row in found.report.rows}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "float.onnx")
        write_float(copy.deepcopy(module).cpu(), [((data.train_rows.tensors[0][:256],), {})], path)
        return {"pt2": sizes["fp32 compiled"] or 0, "onnx": path.stat().st_size}


class Annealed(Classifier):
    """The step falls to zero by half a cosine, as it should where rounding is to be trained for."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def qat_row(data: DigitsDataModule, epochs: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = Annealed(1, 10, channels=[64, 128, 256], hidden_dims=[256])
    callback = Quantization("qat", "pt2e", begin=0.6, seconds=0.1)
    with redirect_stdout(io.StringIO()):  # the report of its own
        train(module, data, epochs, callback)
    result: Form | None = callback.result
    assert result is not None
    return {"case": f"CNN trained for int8, seed {seed}", "subject": result.name, "metric": "test/accuracy",
            "value": accuracy(result.run, data), "unit": "", "baseline": "the same weights in float",
            "ratio": accuracy(result.run, data) / accuracy(module, data), "wanted": 0.99}  # fmt: skip


def show(row: dict[str, Any]) -> None:
    value = row["value"] if isinstance(row["value"], str) else f"{row['value']:.4g} {row['unit']}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.3g}"
    wanted = f" (wanted {row['wanted']})" if row.get("wanted") else ""
    print(f"| {row['case']} | {row['subject']} | {row['metric']} | {value} | {ratio}{wanted} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seconds, share = (0.1, 0.2) if options.quick else (2.0, 1.0)
    data = DigitsDataModule(batch_size=64, max_shift=1)
    data.setup()
    found = {name for name, has in torch.cpu.get_capabilities().items() if has is True}
    units = ", ".join(sorted(found & {"avx2", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"}))
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()}, 1 thread, {units}"
    print(f"torch {torch.__version__}, {machine}")
    print("| case | subject | metric | value | ratio |\n|-|-|-|-|-|")
    made = []
    models: dict[str, Any] = {
        "CNN": (cnn, 20), "MLP": (lambda: Classifier(64, 10, hidden_dims=[1024] * 3), 20), "LSTM": (Recurrent, 15)
    }  # fmt: skip
    for name, (make, epochs) in models.items():
        torch.manual_seed(0)
        module = make()
        train(module, data, max(1, round(share * epochs)))
        module.to(options.device)
        result = forms_of(module, data, seconds)
        for row in rows_of(name, result, float_sizes(module, result, data)):
            made.append(row)
            show(row)
        for row in warm_rows(name, module, result, data, seconds):
            made.append(row)
            show(row)
        print(f"| {name} | picked: {result.name} | | | |", flush=True)
    for seed in range(0 if options.device == "cuda" else 1 if options.quick else 3):
        made.append(qat_row(data, max(5, round(share * 40)), seed))
        show(made[-1])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(made, file, indent=1)


if __name__ == "__main__":
    main()
