"""How near does ``Quantization`` come to the best that is written by hand, on networks of transformers?

python benchmarks/bench_foreign_quantization.py [--only vit] [--quick] [--json FILE]

Three networks, trained in this run: a ViT on scikit-learn's digits, a BERT that tags the letters of Python's library
by the kind of their token, and a Llama that reads Python's documentation letter by letter. Each is trained by a
LightningModule that knows nothing of this package; ``Quantization`` converts it, and the same weights are compressed by
hand, as the documentation of torch, torchao and ONNX Runtime writes it: compiled with frozen weights, in bfloat16, with
``max-autotune``; int8 by torchao's dynamic and static (PT2E) forms, compiled in both ways; ONNX files in float and
int8, dynamic and static, after ONNX Runtime's own fusions. Quality is that of the validation set; forms that lose more
than ``max_drop`` do not count. Latencies are measured in blocks that take turns in this process, one thread; ``share``
is the speed of the picked form over that of the fastest by hand, 98 % interval.
"""

import argparse
import copy
import gc
import io
import itertools
import json
import keyword
import math
import os
import platform
import tempfile
import tokenize
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import multiclass_accuracy
from transformers import (
    BertConfig,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from lightning_accel.callbacks import Quantization
from lightning_accel.compress.report.latency import measure_latency, speedup

LENGTH = 128
KINDS = {tokenize.NAME: 1, tokenize.NUMBER: 3, tokenize.STRING: 4, tokenize.COMMENT: 5, tokenize.OP: 6}  # 2: keywords
Run = Callable[[Tensor], Tensor]  # logits of inputs


class Supervised(L.LightningModule):
    """Train a network of transformers that takes one tensor by name and returns logits."""

    def __init__(self, model: nn.Module, argument: str, score: Callable[[Tensor, Tensor], Tensor], lr: float) -> None:
        super().__init__()
        self.model, self.argument, self.score, self.lr = model, argument, score, lr

    def forward(self, x: Tensor) -> Tensor:
        return self.model(**{self.argument: x}).logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, labels = batch
        return F.cross_entropy(self(x).flatten(0, -2), labels.flatten())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, labels = batch
        self.log("val_score", self.score(self(x).flatten(0, -2), labels.flatten()), batch_size=len(x))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        total = self.trainer.estimated_stepping_batches
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total),
                              "interval": "step"}]  # fmt: skip


@dataclass
class Task:
    """Hold a network, its data, and how much worse its score may become.

    Attributes:
        make: returns the module.
        train: rows and labels.
        val: rows and labels.
        mode: whether a higher (``max``) or a lower score is better.
        max_drop: of the score.
    """

    make: Callable[[], Supervised]
    train: TensorDataset
    val: TensorDataset
    mode: str
    max_drop: float
    epochs: int


def windows(text: str, tags: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Return windows of a text, (N, LENGTH + 1) bytes each, and of the tags of its letters."""
    count = len(text) // (LENGTH + 1)
    letters = [min(ord(letter), 255) for letter in text]
    return tuple(torch.tensor(one[: count * (LENGTH + 1)]).view(count, -1) for one in (letters, tags or letters))


def tagged_source(size: int = 400_000) -> tuple[str, list[int]]:
    """Return code of Python's library, and of each letter the kind of its token: 0 between tokens."""
    text, tags = "", []
    for path in sorted(Path(os.__file__).parent.glob("[a-d]*.py")):
        source = path.read_text()
        starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
        kinds = [0] * len(source)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            kind = KINDS.get(token.type, 0) + (keyword.iskeyword(token.string) and token.type == tokenize.NAME)
            start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            kinds[start:end] = [kind] * (end - start)
        text, tags = text + source, tags + kinds
        if len(text) > size:
            break
    return text, tags


def split(x: Tensor, y: Tensor) -> tuple[TensorDataset, TensorDataset]:
    held_out = torch.arange(len(x)) % 8 == 7
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def vit() -> Task:
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16 - 0.5
    config = ViTConfig(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=768, image_size=8, patch_size=2,
        num_channels=1, num_labels=10,
    )  # fmt: skip
    score = partial(multiclass_accuracy, num_classes=10, average="micro")
    return Task(
        lambda: Supervised(ViTForImageClassification(config), "pixel_values", score, 1e-3),
        *split(images, torch.from_numpy(digits.target)), "max", 0.01, 10,
    )  # fmt: skip


def bert() -> Task:
    letters, tags = windows(*tagged_source())
    config = BertConfig(
        vocab_size=256, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        max_position_embeddings=LENGTH, num_labels=7,
    )  # fmt: skip
    score = partial(multiclass_accuracy, num_classes=7, average="micro")
    return Task(
        lambda: Supervised(BertForTokenClassification(config), "input_ids", score, 1e-3),
        *split(letters[:, :LENGTH], tags[:, :LENGTH]), "max", 0.01, 5,
    )  # fmt: skip


def llama() -> Task:
    letters, _ = windows("\n".join(topics.values()))
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return Task(
        lambda: Supervised(LlamaForCausalLM(config), "input_ids", F.cross_entropy, 1e-3),
        *split(letters[:, :LENGTH], letters[:, 1:]), "min", 0.01, 3,
    )  # fmt: skip


TASKS = {"vit": vit, "bert": bert, "llama": llama}


def score_of(run: Run, task: Task, module: Supervised) -> float:
    """Return the mean over batches of 32 of the validation set."""
    scores = [
        module.score(run(x).flatten(0, -2), y.flatten()) for x, y in DataLoader(task.val, 32, drop_last=True)
    ]  # fmt: skip
    return float(torch.stack(scores).mean())


def compiled(module: nn.Module, x: Tensor, autotune: bool) -> Run:
    """Compile with frozen weights, as torch's documentation of inference on CPUs has it."""
    options = {"freezing": True} | (
        {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"} if autotune else {}
    )
    made = torch.compile(module, dynamic=False)
    with torch.inference_mode(), torch._inductor.config.patch(options):  # as it is measured, else it is compiled anew
        for _ in range(3):
            made(x)
    return made


def dynamic_int8(module: nn.Module) -> nn.Module:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    module = copy.deepcopy(module)
    quantize_(module, Int8DynamicActivationInt8WeightConfig())
    return module


def static_int8(module: nn.Module, calls: list[Tensor]) -> nn.Module:
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    program = torch.export.export(module, (calls[0],)).module()
    prepared = prepare_pt2e(program, X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config()))
    for x in calls:
        prepared(x)
    return move_exported_model_to_eval(convert_pt2e(prepared))


class InBfloat16(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(x)


def onnx_file(module: nn.Module, x: Tensor, path: Path) -> Path:
    """Write the network as ONNX with a free batch, after ONNX Runtime's fusions for transformers."""
    from onnxruntime.transformers.optimizer import optimize_model

    shapes = ({0: torch.export.Dim.DYNAMIC},)
    torch.onnx.export(module, (x,), path, dynamo=True, input_names=["x"], dynamic_shapes=shapes, verbose=False,
                      external_data=False)  # fmt: skip
    with redirect_stdout(io.StringIO()):
        fused = optimize_model(str(path), "bert", num_heads=0, hidden_size=0, opt_level=0)
    fused.save_model_to_file(str(path.with_name("fused.onnx")))
    return path.with_name("fused.onnx")


class Calls:
    """Give the calls of a calibration to ONNX Runtime."""

    def __init__(self, calls: list[Tensor]) -> None:
        self.calls = iter(calls)

    def get_next(self) -> dict[str, Any] | None:
        x = next(self.calls, None)
        return None if x is None else {"x": x.numpy()}


def session(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    made = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(made.run(None, {"x": x.numpy()})[0])


def onnx_forms(module: nn.Module, calls: list[Tensor], folder: Path) -> Iterator[tuple[str, Callable[[], Run]]]:
    import onnx
    from onnxruntime.quantization import QuantFormat, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    fused = onnx_file(module, calls[0], folder / "float.onnx")

    quant_pre_process(folder / "float.onnx", folder / "ready.onnx", skip_symbolic_shape=True)

    def dynamic() -> Run:
        model = onnx.load(folder / "ready.onnx")
        del model.graph.value_info[:]  # else quantize_dynamic fails, as its issues have it
        quantize_dynamic(model, folder / "dynamic.onnx", per_channel=True)
        return session(folder / "dynamic.onnx")

    def static() -> Run:
        reader = Calls(calls)
        quantize_static(
            folder / "ready.onnx", folder / "static.onnx", reader, QuantFormat.QDQ, per_channel=True,
            op_types_to_quantize=["MatMul", "Gemm", "Conv"],
        )  # fmt: skip
        return session(folder / "static.onnx")

    yield "fp32 ONNX Runtime, fused", lambda: session(fused)
    yield "fp32 ONNX Runtime", lambda: session(folder / "float.onnx")
    yield "int8 ONNX Runtime dynamic", dynamic
    yield "int8 ONNX Runtime static", static


def forms_by_hand(
    module: nn.Module, calls: list[Tensor], x: Tensor, folder: Path
) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Yield the forms by name, as functions that make them for batches of the size of ``x``."""
    yield from onnx_forms(module, calls, folder)
    # exports come first: torch.export drops what torch.compile has made, which would be compiled anew, unfrozen
    static = static_int8(module, [call[: len(x)] for call in calls])
    dynamic = dynamic_int8(module)
    for autotune in (False, True):
        with_it = ", max-autotune" * autotune
        yield f"fp32 compiled{with_it}", partial(compiled, module, x, autotune)
        yield f"bf16 compiled{with_it}", partial(compiled, InBfloat16(module), x, autotune)
        yield f"int8 torchao dynamic{with_it}", partial(compiled, copy.deepcopy(dynamic), x, autotune)
        yield f"int8 PT2E static{with_it}", partial(compiled, copy.deepcopy(static), x, autotune)


def measure(name: str, quick: bool) -> Iterator[dict[str, Any]]:
    L.seed_everything(0, verbose=False)
    task = TASKS[name]()
    quantization = Quantization(
        monitor="val_score", monitor_mode=task.mode, max_drop=task.max_drop, seconds=0.2 if quick else 1.0
    )
    module, train, val = task.make(), DataLoader(task.train, 32, shuffle=True), DataLoader(task.val, 32, drop_last=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(os.cpu_count() or 1)
        L.Trainer(
            accelerator="cpu", max_epochs=task.epochs, default_root_dir=folder, logger=False,
            limit_train_batches=20 if quick else 1.0, limit_val_batches=0, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, train, val)  # fmt: skip
        torch.set_num_threads(1)
        module.eval().requires_grad_(False)
        picked = quantization.convert(module, train, val)
        calls = [batch[0] for batch, _ in zip(DataLoader(task.train, 32), range(8), strict=False)]
        baseline = score_of(module, task, module)
        yield {"network": name, "form": "fp32 eager", "score": baseline}
        for batch, form in picked.picks.items():
            yield {"network": name, "batch": batch, "form": f"picked: {form.name}", "bytes": form.file_bytes,
                   "score": score_of(form.run, task, module)}  # fmt: skip
        for batch in (1, 32):
            yield from measure_batch(name, task, module, picked, calls, batch, Path(folder), baseline, quick)


def measure_batch(
    name: str, task: Task, module: Supervised, picked: Any, calls: list[Tensor], batch: int, folder: Path,
    baseline: float, quick: bool,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    x = calls[0][:batch]
    runs: dict[str, Callable[[], object]] = {
        "fp32 eager": partial(module, x),
        "picked": partial(picked.picks[batch].run, x),
    }
    for form, make in forms_by_hand(module, calls, x, folder):
        try:
            with redirect_stderr(io.StringIO()), torch.inference_mode():
                run = make()
                error = float((run(x) - module(x)).abs().max())
                score = score_of(run, task, module) if batch == 32 or "ONNX" in form else baseline
        except Exception as failure:
            yield {"network": name, "batch": batch, "form": form, "note": f"{type(failure).__name__}: {failure}"[:120]}
            continue
        worse = (baseline - score) * (1 if task.mode == "max" else -1)
        if worse > task.max_drop or not math.isfinite(error):
            yield {"network": name, "batch": batch, "form": form, "note": f"score {score:.4f}: too much worse"}
            continue
        runs[form] = partial(run, x)
    with torch.inference_mode():
        latencies = measure_latency(runs, 0.5 if quick else 2.0)
    by_hand = [form for form in runs if form not in ("fp32 eager", "picked")]
    best = min(by_hand, key=lambda form: latencies[form].p50_ms)
    for form, latency in latencies.items():
        ratio = speedup(latency, latencies["fp32 eager"])
        yield {"network": name, "batch": batch, "form": form, "ms": latency.p50_ms, "times": ratio.ratio}
    share = speedup(latencies["picked"], latencies[best])
    yield {"network": name, "batch": batch, "form": "picked", "best by hand": best, "share": share.ratio,
           "low": share.low, "high": share.high}  # fmt: skip
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch._dynamo.config.recompile_limit = 64  # all forms share the code of forward
    print(f"torch {torch.__version__}, {platform.processor()}, {torch.backends.cpu.get_cpu_capability()}, one thread")
    rows = []
    for name in arguments.only:
        for row in measure(name, arguments.quick):
            rows.append(row)
            print(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                            for key, value in row.items()), flush=True)  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1, default=str))


if __name__ == "__main__":
    main()
