"""How near do rows of unequal lengths come to the speed of equal ones, and which execution is fastest?

python benchmarks/bench_rnn.py [--quick] [--device cpu|cuda] [--parts lengths choices bfloat16 streams]
    [--json FILE]

Forward and backward of one recurrent layer, 64 features, 128 hidden, over 5000 sequences with log-normal lengths (sigma
0.8, median 43, 500 at most), valid steps a second. The limit is torch's nn.GRU on batches of 64 sequences of 60 steps,
in the same rounds: ratios are to it. Orders of the sequences: random, batches of 64; bucketed, batches of 64 of like
length by LengthBatchSampler with its default window; budgeted, its batches of at most 8192 tokens. Of each, batches
evenly spaced in their lengths are timed. Subjects are interleaved in one process, one thread, the process's CPU time;
the median round is quoted. ``choices`` sets ``auto`` beside the executions it may choose, over other shapes, and
forward alone. ``bfloat16`` sets training under autocast beside torch's module in float32, on batches of 64 sequences of
60 steps and on batches of random lengths. ``streams`` times one step of one sequence without gradients: the fastest
tenth of 2000 calls, of the best of five turns, in microseconds, with ONNX Runtime's GRU if it is installed.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_accel import DynamicRNN
from lightning_accel.data import LengthBatchSampler
from lightning_accel.nn.recurrent.layer import CELLS

FEATURES, HIDDEN, BATCH, STEPS = 64, 128, 64, 60
SCANS = ("mingru", "minlstm")
PARTS = ("lengths", "choices", "bfloat16", "streams")


def log_normal_lengths(number: int = 5000) -> Tensor:
    draws = torch.randn(number, generator=torch.Generator().manual_seed(0))
    return (draws * 0.8 + torch.tensor(43.0).log()).exp().round().clamp(1, 500).long()


def orders(batch_size: int) -> dict[str, list[Tensor]]:
    """Lengths of the batches of an epoch."""
    lengths = log_normal_lengths()
    bucketed = LengthBatchSampler(lengths, batch_size)
    budgeted = LengthBatchSampler(lengths, max_tokens=batch_size * 128)
    return {
        "random": list(lengths[: len(lengths) // batch_size * batch_size].split(batch_size)),
        "bucketed": [lengths[rows] for rows in bucketed],
        "budgeted": [lengths[rows] for rows in budgeted],
    }


def sample(batches: list[Tensor], number: int) -> list[Tensor]:
    """Batches evenly spaced in their longest length."""
    ordered = sorted(batches, key=lambda lengths: int(lengths.max()))
    places = torch.linspace(0.5 / number, 1 - 0.5 / number, number) * len(ordered)
    return [ordered[int(place)] for place in places]


def of_torch(module: nn.RNNBase, packed: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, lengths: Tensor) -> Tensor:
        if packed:
            _, state = module(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        else:
            out, state = module(x)
            state = out[torch.arange(len(x)), lengths - 1]
        return state[0] if isinstance(state, tuple) else state

    return run


def of_ours(module: DynamicRNN) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, lengths: Tensor) -> Tensor:
        pooled = module(x, lengths).pooled
        assert pooled is not None
        return pooled

    return run


class Subject:
    """A module over some batches; times their forward and, unless told otherwise, backward passes."""

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[Tensor, Tensor], Tensor],
        batches: Iterable[Tensor],
        device: str,
        backward: bool = True,
    ) -> None:
        self.module, self.run, self.device, self.backward = module.to(device), run, device, backward
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            (torch.randn(len(lengths), int(lengths.max()), FEATURES, generator=generator).to(device), lengths)
            for lengths in batches
        ]
        self.tokens = sum(int(lengths.sum()) for _, lengths in self.batches)

    def seconds(self) -> float:
        clock = time.process_time if self.device == "cpu" else time.perf_counter
        self.synchronize()
        start = clock()
        for x, lengths in self.batches:
            self.module.zero_grad()
            with torch.set_grad_enabled(self.backward):
                out = self.run(x, lengths)
            if self.backward:
                out.sum().backward()
        self.synchronize()
        return clock() - start

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(subjects: dict[str, Subject], rounds: int) -> dict[str, list[float]]:
    """Valid steps a second, by subject and round."""
    rates: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds + 1):
        for name, subject in subjects.items():
            gc.collect()
            rate = subject.tokens / subject.seconds()
            if number:
                rates[name].append(rate)
    return rates


def check(cells: Iterable[str], lengths: Tensor) -> None:
    """A wrong answer has no speed: every execution against rows one by one."""
    x = torch.randn(len(lengths), int(lengths.max()), FEATURES)
    for cell in cells:
        module = DynamicRNN(FEATURES, HIDDEN, cell=cell)  # type: ignore[arg-type]
        expected = torch.cat([module(x[i : i + 1, :length]).pooled for i, length in enumerate(lengths.tolist())])
        for execution in executions(cell):
            module.execution = execution
            torch.testing.assert_close(module(x, lengths).pooled, expected, rtol=0, atol=1e-5)


def executions(cell: str) -> tuple[str, ...]:
    return ("padded", "staircase", "lanes") if cell in SCANS else ("padded", "staircase", "packed")


def limit(device: str) -> Subject:
    module = nn.GRU(FEATURES, HIDDEN, batch_first=True)
    return Subject(module, of_torch(module, False), [torch.full((BATCH,), STEPS)] * 4, device)


def throughput(cells: Iterable[str], batches: int, rounds: int, device: str) -> list[dict[str, object]]:
    lengths_of = {name: sample(each, batches) for name, each in orders(BATCH).items()}
    rows = []
    for order, lengths in lengths_of.items():
        for cell in cells:
            subjects = {"limit": limit(device)}
            for execution in executions(cell):
                module = DynamicRNN(FEATURES, HIDDEN, cell=cell, execution=execution)  # type: ignore[arg-type]
                subjects[f"ours, {execution}"] = Subject(module, of_ours(module), lengths, device)
            if cell in ("gru", "lstm"):
                for packed in (False, True):
                    theirs = {"gru": nn.GRU, "lstm": nn.LSTM}[cell](FEATURES, HIDDEN, batch_first=True)
                    name = f"torch, {'packed' if packed else 'padded'}"
                    subjects[name] = Subject(theirs, of_torch(theirs, packed), lengths, device)
            rows += as_rows(f"{order}, {cell}", measure(subjects, rounds), "limit")
    for cell in cells:
        module = DynamicRNN(FEATURES, HIDDEN, cell=cell)  # type: ignore[arg-type]
        equal = Subject(module, of_ours(module), [torch.full((BATCH,), STEPS)] * 4, device)
        rows += as_rows(f"equal, {cell}", measure({"limit": limit(device), "ours, auto": equal}, rounds), "limit")
    return rows


def choices(cells: Iterable[str], batches: int, rounds: int, device: str) -> list[dict[str, object]]:
    """``auto`` beside every execution, the best of which is the baseline."""
    rows = []
    shapes: list[tuple[str, int, int, bool, bool]] = [
        ("random", 64, 128, False, True),
        ("random", 8, 32, True, True),
        ("bucketed", 16, 256, False, True),
        ("random", 64, 128, False, False),
        ("bucketed", 64, 128, False, False),
    ]
    for order, batch_size, hidden, both, backward in shapes:
        lengths = sample(orders(batch_size)[order], batches)
        for cell in cells:
            subjects = {}
            for execution in ("auto", *executions(cell)):
                module = DynamicRNN(
                    FEATURES, hidden, cell=cell, execution=execution, bidirectional=both  # type: ignore[arg-type]
                )  # fmt: skip
                subjects[execution] = Subject(module, of_ours(module), lengths, device, backward)
            rates = measure(subjects, rounds)
            best = max((name for name in rates if name != "auto"), key=lambda name: statistics.median(rates[name]))
            how = f"{', both directions' * both}{', forward alone' * (not backward)}"
            case = f"{order}, {batch_size} rows, hidden {hidden}{how}, {cell}"
            rows += as_rows(case, rates, best)
    return rows


def mixed(batches: int, rounds: int, device: str) -> list[dict[str, object]]:
    """Ours, by ``auto``, and torch's modules on padded batches, in float32 and under autocast in bfloat16."""
    rows = []
    random = sample(orders(BATCH)["random"], batches)
    for cell in ("gru", "lstm"):
        for hidden in (96, 256, 512):
            for case, lengths in (("equal", [torch.full((BATCH,), STEPS)] * 2), ("random", random)):
                ours = DynamicRNN(FEATURES, hidden, cell=cell)  # type: ignore[arg-type]
                theirs = {"gru": nn.GRU, "lstm": nn.LSTM}[cell](FEATURES, hidden, batch_first=True)
                runs = {"ours": (ours, of_ours(ours)), "torch": (theirs, of_torch(theirs, False))}
                subjects = {
                    f"{name}, {dtype}": Subject(module, autocasting(run, dtype, device), lengths, device)
                    for name, (module, run) in runs.items()
                    for dtype in ("float32", "bfloat16")
                }
                rows += as_rows(f"{case}, hidden {hidden}, {cell}", measure(subjects, rounds), "torch, float32")
    return rows


def autocasting(run: Callable[[Tensor, Tensor], Tensor], dtype: str, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    def cast(x: Tensor, lengths: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            return run(x, lengths).float()

    return cast


@torch.no_grad()
def streams(turns: int) -> list[dict[str, object]]:
    """One step of one sequence on the CPU, in microseconds."""
    rows = []
    for hidden in (64, 256):
        x = torch.randn(1, hidden)
        gru, cell, lstm_cell = nn.GRU(hidden, hidden), nn.GRUCell(hidden, hidden), nn.LSTMCell(hidden, hidden)
        calls = {
            "nn.GRUCell": of_cell(cell, x),
            "nn.LSTMCell": of_cell(lstm_cell, x),
            "nn.GRU": of_stream(gru, x[None]),
        }
        for name in ("gru", "lstm", "mingru"):
            calls[f"DynamicRNN.step, {name}"] = of_step(DynamicRNN(hidden, hidden, cell=name), x)
        if find_spec("onnxruntime"):
            calls["ONNX Runtime, GRU"] = of_onnx(gru, x)
        best = {name: min(times) for name, times in in_turns(calls, turns).items()}
        rows += [
            {"case": f"one step, hidden {hidden}", "subject": name, "metric": "time", "unit": "us",
             "value": round(value, 1), "baseline": "nn.GRUCell", "ratio": round(best["nn.GRUCell"] / value, 3)}
            for name, value in best.items()
        ]  # fmt: skip
    return rows


def in_turns(calls: dict[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            each = []
            for _ in range(2000):
                start = time.perf_counter_ns()
                call()
                each.append((time.perf_counter_ns() - start) / 1e3)
            times[name].append(statistics.quantiles(each, n=10)[0])
    return times


def of_step(module: DynamicRNN, x: Tensor) -> Callable[[], None]:
    state = module.eval().step(x)[1]

    def call() -> None:
        nonlocal state
        state = module.step(x, state)[1]

    return call


def of_cell(module: nn.RNNCellBase, x: Tensor) -> Callable[[], None]:
    state = module(x)

    def call() -> None:
        nonlocal state
        state = module(x, state)

    return call


def of_stream(module: nn.GRU, x: Tensor) -> Callable[[], None]:
    state = module(x)[1]

    def call() -> None:
        nonlocal state
        state = module(x, state)[1]

    return call


def of_onnx(module: nn.GRU, x: Tensor) -> Callable[[], None]:
    """ONNX Runtime's session of a program with one GRU operation, checked against ``module``."""
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    def reordered(weight: Tensor) -> "np.ndarray":
        reset, update, new = weight.detach().numpy().reshape(3, module.hidden_size, -1)
        return np.concatenate([update, reset, new])[None]

    size = module.hidden_size
    biases = [reordered(getattr(module, f"bias_{kind}_l0"))[..., 0] for kind in ("ih", "hh")]
    arrays = {
        "W": reordered(module.weight_ih_l0), "R": reordered(module.weight_hh_l0), "B": np.concatenate(biases, axis=1)
    }  # fmt: skip
    node = helper.make_node("GRU", ["x", *arrays, "", "h"], ["", "new"], hidden_size=size, linear_before_reset=1)
    shapes = {"x": [1, 1, x.shape[1]], "h": [1, 1, size], "new": [1, 1, size]}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    graph = helper.make_graph(
        [node], "gru", [values["x"], values["h"]], [values["new"]],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in arrays.items()],
    )  # fmt: skip
    program = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(program.SerializeToString(), options, ["CPUExecutionProvider"])
    inputs = {"x": x[None].numpy(), "h": np.zeros((1, 1, size), np.float32)}
    torch.testing.assert_close(torch.from_numpy(session.run(None, inputs)[0]), module(x[None])[1], rtol=0, atol=1e-5)

    def call() -> None:
        inputs["h"] = session.run(None, inputs)[0]

    return call


def as_rows(case: str, rates: dict[str, list[float]], baseline: str) -> list[dict[str, object]]:
    return [
        {
            "case": case, "subject": name, "metric": "valid steps", "unit": "1/s",
            "value": round(statistics.median(each)), "baseline": baseline,
            "ratio": round(statistics.median(a / b for a, b in zip(each, rates[baseline], strict=True)), 3),
        }
        for name, each in rates.items()
    ]  # fmt: skip


def print_table(title: str, rows: list[dict[str, object]]) -> None:
    what = f"{rows[0]['metric']}, {rows[0]['unit']}"
    print(f"\n{title}\n\n| case | subject | {what} | ratio | to |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['case']} | {row['subject']} | {row['value']} | {row['ratio']:.2f} | {row['baseline']} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cells, few batches: under a minute")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    check(CELLS, torch.tensor([5, 1, 17, 60]))
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "cpu"
    print(f"torch {torch.__version__}, {device}, 1 thread")
    cells, batches, rounds = (("gru", "mingru"), 4, 2) if arguments.quick else (tuple(CELLS), 12, 5)
    chosen = ("gru", "lstm", "mingru") if not arguments.quick else cells
    tables = {
        "lengths": lambda: throughput(cells, batches, rounds, arguments.device),
        "choices": lambda: choices(chosen, batches // 2, rounds, arguments.device),
        "bfloat16": lambda: mixed(batches // 3, rounds, arguments.device),
        "streams": lambda: streams(rounds),
    }
    titles = {
        "lengths": "Unequal lengths against equal ones, forward and backward",
        "choices": "auto against each execution",
        "bfloat16": "bfloat16 against float32, forward and backward",
        "streams": "One step of a stream",
    }
    rows = []
    for part in arguments.parts:
        found = tables[part]()
        print_table(titles[part], found)
        rows += found
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
