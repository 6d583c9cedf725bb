"""What do matrix products in float32 cost on the CPU, by MKL and by oneDNN?

python benchmarks/bench_matmul.py [--quick] [--threads N]

Products of single and of batched matrices, whole training steps of networks that know nothing of this package and of a
mixture of experts, and calls of compiled networks. Subjects take turns in one process: torch's MKL, ``onednn_matmul``
of ``Speedups``, and ``matmul_precision="medium"``, by which torch calls oneDNN itself (and rounds to bfloat16 where the
CPU has AMX). Quoted are medians of the rounds, how many times as fast oneDNN is (median over rounds and quartiles), and
the largest difference of a product from float64, relative to its largest value.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from lightning_accel.compress import autotuning
from lightning_accel.compress.autotuning import compile_frozen
from lightning_accel.measure.machine import describe_machine
from lightning_accel.nn import MixtureOfExperts
from lightning_accel.ops.matmul import replace_matmul, restore_matmul

Subject = Callable[[], object]
# rows, inner size and columns, after the number of matrices in a batch
SIZES = [
    (2048, 768, 3072), (2048, 3072, 768), (544, 256, 1024), (512, 64, 64), (64, 128, 128), (32, 64, 64),
    (64, 128, 64, 128), (8, 512, 256, 256), (16, 32, 16, 32),
]  # fmt: skip


@contextmanager
def by_onednn() -> Iterator[None]:
    replace_matmul()
    yield
    restore_matmul()


@contextmanager
def by_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


WAYS = {"MKL": nullcontext, "onednn_matmul": by_onednn, "medium": by_precision}


def timed(call: Subject, rounds: int, ways: dict[str, Subject] | None = None) -> dict[str, list[float]]:
    """Return the seconds of a call in each round, by way."""
    subjects = ways or dict.fromkeys(WAYS, call)
    begin = time.perf_counter()
    call()
    repeats = max(1, int(0.05 / (time.perf_counter() - begin)))
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(rounds + 2):
        for name, subject in subjects.items():
            with WAYS[name]() if ways is None else nullcontext():
                begin = time.perf_counter()
                for _ in range(repeats):
                    subject()
                if turn >= 2:
                    times[name].append((time.perf_counter() - begin) / repeats)
    return times


def ratio(times: dict[str, list[float]], name: str) -> str:
    first = next(iter(times.values()))
    low, middle, high = statistics.quantiles([one / other for one, other in zip(first, times[name], strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def products(sizes: tuple[int, ...]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the operands of a layer's output, of the gradient of its input, and of that of its weights."""
    *batch, rows, inner, columns = sizes
    x, weight = torch.randn(*batch, rows, inner), torch.randn(*batch, columns, inner)
    grad = torch.randn(*batch, rows, columns)
    yield "output", x, weight.mT
    yield "input", grad, weight
    yield "weights", grad.mT, x


def step_of(module: nn.Module, loss: Callable[[], Tensor]) -> Subject:
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def classified(module: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> Subject:
    labels = torch.randint(2, (len(x),))
    return step_of(module, lambda: F.cross_entropy((forward or module)(x), labels))


def bert() -> BertForSequenceClassification:
    config = BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=5000,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def vit() -> ViTForImageClassification:
    config = ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768, image_size=32, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def train_bert() -> Subject:
    model = bert()
    return classified(model, torch.randint(5000, (16, 64)), lambda x: model(input_ids=x).logits)


def train_vit() -> Subject:
    model = vit()
    return classified(model, torch.randn(32, 3, 32, 32), lambda x: model(x).logits)


def train_gpt2() -> Subject:
    config = GPT2Config(
        n_embd=384, n_layer=4, n_head=6, vocab_size=4000, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model, tokens = GPT2LMHeadModel(config), torch.randint(4000, (8, 128))
    return step_of(model, lambda: F.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


def train_encoder() -> Subject:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return classified(model, torch.randn(32, 32, 128), lambda x: model(x)[:, 0])


def train_perceptron(batch: int, width: int) -> Subject:
    layers = nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    return classified(nn.Sequential(*layers), torch.randn(batch, 64))


def train_recurrent(kind: type[nn.LSTM] | type[nn.GRU]) -> Subject:
    layer = kind(64, 128, batch_first=True)
    return classified(layer, torch.randn(32, 40, 64), lambda x: layer(x)[0][:, -1])


def train_resnet() -> Subject:
    config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], layer_type="basic")
    model = ResNetForImageClassification(config)
    return classified(model, torch.randn(16, 3, 64, 64), lambda x: model(x).logits)


def train_mixture() -> Subject:
    layer, x = MixtureOfExperts(256, hidden_dim=512, num_experts=8, k=2), torch.randn(2048, 256, requires_grad=True)
    return step_of(layer, lambda: layer(x)[0].square().mean())


STEPS: dict[str, Callable[[], Subject]] = {
    "BERT, 4 layers of 256, 16 x 64 tokens": train_bert,
    "GPT-2, 4 layers of 384, 8 x 128 tokens": train_gpt2,
    "ViT, 4 layers of 192, 32 x 65 patches": train_vit,
    "nn.TransformerEncoder, 3 layers of 128, 32 x 32": train_encoder,
    "perceptron, width 512, 1024 samples": lambda: train_perceptron(1024, 512),
    "perceptron, width 128, 64 samples": lambda: train_perceptron(64, 128),
    "nn.LSTM, width 128, 32 x 40 steps": lambda: train_recurrent(nn.LSTM),
    "nn.GRU, width 128, 32 x 40 steps": lambda: train_recurrent(nn.GRU),
    "ResNet, 4 stages, 16 images of 64": train_resnet,
    "MixtureOfExperts, 8 experts of 512, 2048 tokens": train_mixture,
}
CALLS = {
    "BERT, 1 x 64 tokens": lambda: (bert(), torch.randint(5000, (1, 64))),
    "BERT, 32 x 64 tokens": lambda: (bert(), torch.randint(5000, (32, 64))),
    "ViT, 1 image": lambda: (vit(), torch.randn(1, 3, 32, 32)),
    "ViT, 32 images": lambda: (vit(), torch.randn(32, 3, 32, 32)),
}


@torch.no_grad()
def compiled(model: nn.Module, x: Tensor) -> dict[str, Subject]:
    """Return calls of a module that was compiled with MKL and with oneDNN."""
    graph = torch.export.export(model.eval(), (x,)).module()
    assert isinstance(graph, torch.fx.GraphModule)
    subjects: dict[str, Subject] = {}
    for name, outruns in (("MKL", False), ("oneDNN", True)):
        autotuning.onednn_outruns_mkl = lambda outruns=outruns: outruns  # type: ignore[assignment]
        run = compile_frozen(graph, [x])
        subjects[name] = lambda run=run: run(x)  # type: ignore[misc]
        subjects[name]()
    return subjects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five rounds of the first two rows of each table")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rounds, rows = (5, 2) if arguments.quick else (15, None)
    machine = describe_machine()
    kind = f"{machine.cpu} ({', '.join(machine.instruction_sets)})"
    print(f"torch {torch.__version__}, {kind}, {arguments.threads} threads")
    print("\n| sizes | product | MKL, GFLOP/s | onednn_matmul, GFLOP/s | times as fast | medium | difference |")
    print("| --- | --- | ---: | ---: | --- | --- | ---: |")
    for sizes in SIZES[:rows]:
        for name, a, b in products(sizes):
            with torch.no_grad():
                times = timed(lambda a=a, b=b: a @ b, rounds)  # type: ignore[misc]
                exact = a.double() @ b.double()
                with by_onednn():
                    difference = float(((a @ b).double() - exact).abs().max() / exact.abs().max())
            operations = 2e-9 * a.numel() * b.shape[-1]
            rates = " | ".join(f"{operations / statistics.median(times[way]):.0f}" for way in list(WAYS)[:2])
            ratios = " | ".join(ratio(times, way) for way in list(WAYS)[1:])
            print(f"| {' x '.join(map(str, sizes))} | {name} | {rates} | {ratios} | {difference:.0e} |", flush=True)
    print("\n| training step | MKL, ms | onednn_matmul, ms | times as fast | medium |")
    print("| --- | ---: | ---: | --- | --- |")
    for name, make in list(STEPS.items())[:rows]:
        times = timed(make(), rounds)
        medians = " | ".join(f"{1e3 * statistics.median(times[way]):.2f}" for way in list(WAYS)[:2])
        print(f"| {name} | {medians} | {' | '.join(ratio(times, way) for way in list(WAYS)[1:])} |", flush=True)
    print("\n| call of a compiled network | MKL, ms | oneDNN, ms | times as fast |")
    print("| --- | ---: | ---: | --- |")
    for name, case in list(CALLS.items())[:rows]:
        with torch.no_grad():
            subjects = compiled(*case())
            times = timed(subjects["MKL"], rounds, subjects)
        medians = " | ".join(f"{1e3 * statistics.median(one):.2f}" for one in times.values())
        print(f"| {name} | {medians} | {ratio(times, 'oneDNN')} |", flush=True)


if __name__ == "__main__":
    main()
