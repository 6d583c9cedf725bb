"""What do the native kernels gain over the formulas in torch, alone and in the steps that use them?

python benchmarks/bench_native.py [--quick] [--device cpu|cuda] [--only TEXT] [--threads N ...] [--json FILE]

``formula`` is the same call with ``KERNELS.switched_off()``, what runs where nothing can be compiled. Subjects are
interleaved in one process; the median of the rounds is quoted, the process's CPU time with one thread, wall time with
more and on CUDA, as a ratio to the formula's: 0.5 is twice as fast. Each case has rows for an operation alone, forward
and backward where it has one, and for a step that users run: forward, backward and optimizer of a layer, or what else
the case says. Errors are the largest of what is compared (the result and, where there are gradients, those) against
float64, relative to the largest value there.

A case is a function of the device that gives :class:`Work` by name: of operations alone, and of steps that use them.
To add one, add it to ``CASES``.
"""

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, Dataset

from lightning_accel import DynamicRNN, GraphDataModule, RelationalGNN
from lightning_accel.data import AddRelationalTriples, GraphBatches, GraphLayout
from lightning_accel.models import ConvolutionLayers
from lightning_accel.nn import RBM, RBMStack
from lightning_accel.ops import Triples, find_triples, gated_scan
from lightning_accel.ops.gibbs import sample_bernoulli
from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.scan.linear import NUM_GATES

SUBJECTS = {"formula": KERNELS.switched_off, "kernel": contextlib.nullcontext}


class Work(NamedTuple):
    """What is timed, and what tells whether it is right."""

    run: Callable[[], object]
    compared: Callable[[torch.dtype], list[Tensor]] | None = None  # in float64 the formula alone may answer
    limit: float = 1e-5  # of the error


def gated_scan_case(device: torch.device, quick: bool) -> Iterator[tuple[str, Work]]:
    """The op, and training of minGRU and minLSTM."""
    shapes = [(32, 100, 64), (32, 300, 128), (32, 500, 256), (4, 2000, 64)]
    for cell, gates in NUM_GATES.items():
        for shape in shapes[:1] if quick else shapes:
            inputs, probe = draw((*shape[:2], gates * shape[2]), device), draw(shape, device)
            call = lambda x, cell=cell: gated_scan(cell, x)  # noqa: E731
            yield f"gated_scan alone, {cell}, {size(shape)}", with_gradients(call, call, (inputs,), probe)
    shapes = [(32, 100, 64), (32, 300, 128), (32, 500, 64), (32, 500, 256), (4, 2000, 64), (4, 2000, 256)]
    for cell in NUM_GATES:
        for shape in shapes[:1] if quick else shapes:
            yield from rnn_steps(f"gated_scan in a step, {cell}", cell, shape, device, quick)


def gibbs_case(device: torch.device, quick: bool) -> Iterator[tuple[str, Work]]:
    """Draws of Bernoulli units, and what samples with them; draws have no error, tests compare their frequencies."""
    generator = torch.Generator(device).manual_seed(0)
    for count in (640, 6400) if quick else (64, 640, 6400, 25_600, 200_704, 2_000_000):
        logits, calls = draw((count,), device), max(1, 100_000 // count)  # one call would be lost in the clock
        run = lambda x=logits, n=calls: [sample_bernoulli(x, generator) for _ in range(n)]  # noqa: E731
        yield f"gibbs alone, {calls} x {count} draws", Work(run)

    for num_visible, num_hidden, steps in ((64, 64, 100),) if quick else ((64, 64, 100), (784, 1024, 5)):
        torch.manual_seed(0)
        rbm = RBM(num_visible, num_hidden, initial_std=0.05).to(device)
        stack = RBMStack([rbm, RBM(num_hidden, num_hidden, initial_std=0.05).to(device)])
        steps_of = {
            f"RBM.sample, 100 chains, {steps} steps": lambda rbm=rbm, steps=steps: rbm.sample(
                100, steps, generator=generator
            ),
            f"RBMStack.sample, 100 chains, {steps} steps": lambda stack=stack, steps=steps: stack.sample(
                100, steps, generator=generator
            ),
            f"log_z, 200 chains, {steps + 1} temperatures": lambda rbm=rbm, steps=steps: rbm.log_z(
                num_chains=200, num_temperatures=steps + 1, generator=generator
            ),
        }
        for bf16 in (False,) if quick else (False, True):
            for name, call in steps_of.items():
                kind = ", bf16 autocast" * bf16
                yield f"gibbs in {name}, {num_visible}x{num_hidden}{kind}", Work(under_autocast(call, device, bf16))


def find_triples_case(device: torch.device, quick: bool) -> Iterator[tuple[str, Work]]:
    """The op, the transform that stores triangles, and training where graphs are new in every batch."""
    for kind, num_nodes in (
        ("random", 10_000),
        ("small world", 300),
        ("small world", 10_000),
        ("small world", 100_000),
    ):
        if quick and num_nodes > 10_000:
            continue
        edges = ring_with_shortcuts(num_nodes, 0.1 if kind == "small world" else 1.0).to(device)
        call = lambda edges=edges, num_nodes=num_nodes: find_triples(edges, num_nodes)  # noqa: E731
        yield (
            f"find_triples alone, {kind}, {num_nodes} nodes",
            Work(call, lambda dtype, call=call: floats(call(), dtype)),
        )
    counting = GraphDataModule(task="substructures", layout=GraphLayout(target=["triangle"]), global_batch_size=32)
    counting.setup("fit")
    batches = [next(iter(counting.train_dataloader())) for _ in range(4)]
    graphs = batches[0].to_data_list()
    transform = AddRelationalTriples()
    yield (
        "find_triples in a step, AddRelationalTriples, 32 graphs",
        Work(lambda: [transform(g.clone()) for g in graphs]),
    )
    told = {"level": "graph", "target_kind": "regression", "num_features": 1, "num_targets": 1}
    model = RelationalGNN(layers=ConvolutionLayers(num_layers=0, dim=32, triple_readout=True), **told)
    yield "find_triples in a step, relational_counting.yaml, 32 graphs", training(model, batches, device)
    for share, rows in ((0.1, 256),) if quick else ((0.1, 64), (0.1, 256), (1.0, 256)):
        batches = parts_of_a_large_graph(share, rows)
        told = {"level": "node", "target_kind": "classification", "num_features": 32, "num_classes": 4}
        model = RelationalGNN(layers=ConvolutionLayers(conv="RO3Conv", num_layers=2, dim=32), **told)
        name = f"{rows} rows of a {'small world' if share < 1 else 'random graph'}, {len(batches[0].x)} nodes a batch"
        yield f"find_triples in a step, RO3Conv, {name}", training(model, batches, device)


CASES = {"gated_scan": gated_scan_case, "gibbs": gibbs_case, "find_triples": find_triples_case}


def under_autocast(call: Callable[[], object], device: torch.device, bf16: bool) -> Callable[[], object]:
    def run() -> object:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return call()

    return run


def ring_with_shortcuts(num_nodes: int, share: float) -> Tensor:
    """(2, 8 N) a ring whose nodes have the four next for neighbours, ``share`` of these replaced; nodes shuffled."""
    generator = torch.Generator().manual_seed(0)
    start = torch.arange(num_nodes).repeat(4)
    end = (start + torch.arange(1, 5).repeat_interleave(num_nodes)) % num_nodes
    replaced = torch.rand(len(end), generator=generator) < share
    end[replaced] = torch.randint(num_nodes, (int(replaced.sum()),), generator=generator)
    edges = torch.randperm(num_nodes, generator=generator)[torch.stack([start, end])]
    return torch.cat([edges, edges.flip(0)], dim=1)


def parts_of_a_large_graph(share: float, rows: int) -> list[Data]:
    """Four batches of ``rows`` nodes of 50 000, with ten neighbours of each and ten of each of those."""
    num_nodes = 50_000
    graph = Data(draw((num_nodes, 32), torch.device("cpu")), ring_with_shortcuts(num_nodes, share))
    graph.y = torch.arange(num_nodes) % 4
    data = GraphDataModule(
        dataset=OneGraph(graph), global_batch_size=rows, batches=GraphBatches(num_neighbors=[10, 10])
    )
    data.setup("fit")
    return [batch for batch, _ in zip(data.train_dataloader(), range(4), strict=False)]


class OneGraph(Dataset):  # type: ignore[misc]  # PyG's is untyped
    def __init__(self, graph: Data) -> None:
        super().__init__()
        self.graph = graph

    def len(self) -> int:
        return 1

    def get(self, idx: int) -> Data:
        return self.graph


def training(model: RelationalGNN, batches: list[Data], device: torch.device) -> Work:
    """Steps over the batches, whose edges are new each time, as they are where they come from a loader."""

    def forward(model: nn.Module, batch: Data) -> Tensor:
        size = None if model.level == "node" else batch.num_graphs
        return model(batch.x, batch.edge_index.clone(), None, batch.batch, size)

    on_device = [batch.to(device) for batch in batches]
    return trained(model.to(device), *(lambda model, batch=batch: forward(model, batch) for batch in on_device))


def floats(triples: Triples, dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(dtype) for tensor in triples if tensor.numel()]


def rnn_steps(
    name: str, cell: str, shape: tuple[int, int, int], device: torch.device, quick: bool
) -> Iterator[tuple[str, Work]]:
    """Training steps of one layer, rows half as long as the longest at least: padded, and in lanes."""
    num_rows, num_steps, width = shape
    x = draw((num_rows, num_steps, width), device)
    lengths = torch.linspace(num_steps // 2, num_steps, num_rows).long().flip(0)
    for execution in ("padded", "lanes"):
        for bf16 in (False,) if quick else (False, True):
            torch.manual_seed(0)
            module = DynamicRNN(width, width, cell=cell, execution=execution).to(device)

            def forward(module: nn.Module, bf16: bool = bf16) -> Tensor:
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                    return module(x, lengths).output

            yield f"{name}, {execution}, {size(shape)}{', bf16 autocast' * bf16}", trained(module, forward)


def trained(module: nn.Module, *forwards: Callable[[nn.Module], Tensor]) -> Work:
    """A step of AdamW for each of ``forwards``."""
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4)

    def run() -> None:
        for forward in forwards:
            optimizer.zero_grad()
            forward(module).square().mean().backward()
            optimizer.step()

    return Work(run)


def with_gradients(
    compared: Callable[..., Tensor], timed: Callable[..., Tensor], inputs: tuple[Tensor, ...], probe: Tensor
) -> Work:
    """Forward and backward of ``timed``; results and gradients of ``compared`` are checked."""

    def results(call: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        learned = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = call(*learned)
        return [out.detach(), *torch.autograd.grad(out, learned, probe.to(dtype))]

    return Work(lambda: results(timed, torch.float32), lambda dtype: results(compared, dtype))


def draw(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape))).to(device)


def size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def errors_of(work: Work) -> dict[str, float]:
    """Of the formula and of the kernel, in float32 against the formula in float64."""
    if work.compared is None:
        return {}
    with KERNELS.switched_off():
        exact = work.compared(torch.float64)
    errors = {}
    for name, manager in SUBJECTS.items():
        with manager():
            found = work.compared(torch.float32)
        pairs = zip(found, exact, strict=True)
        errors[name] = max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-30)) for x, y in pairs)
        assert errors[name] <= work.limit, f"{name} is off by {errors[name]}"  # a wrong answer has no speed
    return errors


def measure(name: str, work: Work, seconds: float, device: torch.device) -> list[dict[str, object]]:
    """Rows of times, and of errors where there are any; ``seconds`` are spent on it, 5 rounds at least."""
    errors = errors_of(work)
    times: dict[str, list[float]] = {subject: [] for subject in SUBJECTS}
    began = time.perf_counter()
    for turn in range(1000):
        for subject, manager in SUBJECTS.items():
            with manager():
                elapsed = timed(work.run, device)
            if turn > 1:  # the first warm up
                times[subject].append(elapsed)
        if turn >= 6 and time.perf_counter() - began > seconds:
            break
    base = statistics.median(times["formula"])
    rows = []
    for subject, each in times.items():
        value = statistics.median(each)
        rows.append(row(name, subject, "time", value * 1e3, "ms", value / base))
        if errors:
            rows.append(
                row(name, subject, "error", errors[subject], "1", errors[subject] / max(errors["formula"], 1e-30))
            )
    return rows


def timed(run: Callable[[], object], device: torch.device) -> float:
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter  # other programs' time is not in the process's
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def row(case: str, subject: str, metric: str, value: float, unit: str, ratio: float) -> dict[str, object]:
    return {
        "case": case, "subject": subject, "metric": metric, "value": value, "unit": unit, "baseline": "formula",
        "ratio": ratio,
    }  # fmt: skip


def show(rows: list[dict[str, object]], threads: int) -> None:
    found = {(entry["subject"], entry["metric"]): entry["value"] for entry in rows}
    formula, kernel = (found[subject, "time"] for subject in ("formula", "kernel"))
    errors = [f"{found[s, 'error']:.1e}" if (s, "error") in found else "" for s in ("formula", "kernel")]
    numbers = f"{formula:.2f} | {kernel:.2f} | {formula / kernel:.2f} | {errors[0]} | {errors[1]}"
    print(f"| {rows[0]['case']} | {threads} | {numbers} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, a tenth of a second each, one thread")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="cases whose names hold this text")
    parser.add_argument("--threads", type=int, nargs="+", help="of torch on the CPU; by default 1 and 2")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if not KERNELS.serves(device):
        raise SystemExit(f"there are no native kernels for {device} here: nothing to measure")
    print(f"torch {torch.__version__}, {device}, {torch.backends.cpu.get_cpu_capability()}\n")
    print("| case | threads | formula, ms | kernel, ms | times as fast | error of formula | error of kernel |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    rows = []
    for threads in arguments.threads or ((1,) if arguments.quick else (1, 2)):
        torch.set_num_threads(threads)
        for make in CASES.values():
            for name, work in make(device, arguments.quick):
                if arguments.only not in name:
                    continue
                measured = measure(name, work, 0.1 if arguments.quick else 1.0, device)
                show(measured, threads)
                rows += [{**entry, "case": f"{entry['case']}, {threads} threads"} for entry in measured]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
