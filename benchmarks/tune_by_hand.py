"""How fast is what ``tune`` hands back, beside the best settings that were found by hand?

python benchmarks/tune_by_hand.py [--only vae tabular forecast] [--output tuned_foreign]

For each of three projects of benchmarks/foreign, the settings are those that guides of torch's name for a CPU, other
allocators among them, and kernels of this package, with some that ``tune`` does not try: max-autotune, numbers too
small to be normal as 0. Each trains some seconds in turn, the slower ones are left out, and so on until one is left,
which then takes turns with the variant of ``tune``. Searches are those of benchmarks/tune_foreign.py: one that has
ended is not repeated. Nothing else may run. No losses are compared, which favours the hand.
"""

import argparse
import itertools
import math
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lightning_accel import tune
from lightning_accel.callbacks import Speedups
from lightning_accel.callbacks.speedups import called_children, machine_name
from lightning_accel.measure.allocators import ALLOCATORS, why_no_allocator
from lightning_accel.precision import Bfloat16Precision
from lightning_accel.tuning.comparison import compare, steps_per_second
from lightning_accel.tuning.project import Changes, Project, find_function, fit_isolated, project_of
from lightning_accel.tuning.variant import TrialError, Variant, fork_server

FOLDER = Path(__file__).parent / "foreign"
PROJECTS = "vae", "tabular", "forecast"
PRECISIONS = "bf16-mixed", "weights", None
SPEEDUPS = {
    "vae": {"keep_freed_memory": True, "fused_optimizer": True, "batched_fetch": True, "channels_last": True},
    "tabular": {"keep_freed_memory": True, "fused_optimizer": True, "batched_fetch": True, "native_dropout": True},
    "forecast": {
        "keep_freed_memory": True,
        "fused_optimizer": True,
        "native_dropout": True,
        "attention": "native",
        "defer_attention_weights": True,
    },
}


def settings_of(name: str) -> Iterator[dict[str, Any]]:
    """Yield each precision, compiled or not, on one or two threads; and each with others, and bf16-mixed with less."""
    for precision, mode, threads in itertools.product(PRECISIONS, ("default", None), (1, 2)):
        yield {"precision": precision, "compile": mode, "speedups": SPEEDUPS[name] | {"threads": threads}}
    mixed = {"precision": "bf16-mixed", "compile": None}
    yield mixed | {"compile": "max-autotune-no-cudagraphs", "speedups": SPEEDUPS[name]}
    yield mixed | {"speedups": {"keep_freed_memory": True}}
    without = {key: value for key, value in SPEEDUPS[name].items() if key != "keep_freed_memory"}
    for allocator in (one for one in ALLOCATORS if not why_no_allocator(one)):
        yield mixed | {"speedups": without | {"allocator": allocator}}
    for precision in PRECISIONS if "attention" in without else ():
        of_torch = {key: value for key, value in SPEEDUPS[name].items() if "attention" not in key}
        yield {"precision": precision, "compile": None, "speedups": of_torch}
    for workers in (1, 2):
        yield mixed | {"speedups": SPEEDUPS[name] | {"num_workers": workers}}


def fit_by_hand(
    changes: Changes, callbacks: list[Any], folder: Path, seed: int, name: str, setting: dict[str, Any]
) -> None:
    """Fit a project with settings, as a trial of ``tune`` does with changes."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {}
    if setting["precision"] == "weights":
        options["plugins"] = [Bfloat16Precision()]
    elif setting["precision"]:
        options["precision"] = setting["precision"]
    trainer, module, data = find_function(f"{FOLDER / name}.py:make")(**options)
    torch.set_flush_denormal(True)
    if setting["compile"] is not None:
        for child in called_children(module):
            child.compile(mode=None if setting["compile"] == "default" else setting["compile"])
    trainer.callbacks = [*trainer.callbacks, Speedups(**setting["speedups"]), *callbacks]
    fit_isolated(trainer, module, data, folder)


def best_by_hand(name: str, folder: Path, servers: Mapping[str | None, Any]) -> tuple[Variant, int]:
    """Return the fastest of the settings, warm and frozen, and how many there were."""
    running = []
    for number, setting in enumerate(settings_of(name)):
        project = Project(f"{Path(__file__).resolve()}:fit_by_hand", {"name": name, "setting": setting})
        server = servers[setting["speedups"].get("allocator")]
        variant = Variant(project, Changes(), folder / str(number), server)
        variant.start()
        try:
            variant.warm_up(math.inf)
            running.append(variant)
        except TrialError as error:
            variant.stop()
            print(f"{name} {setting}: {error}", file=sys.stderr, flush=True)
    ran = len(running)
    while len(running) > 1:
        rates: dict[int, list[float]] = {}
        for _ in range(3):
            for variant in running:
                rates.setdefault(id(variant), []).append(steps_per_second(variant.run_for(1.5, math.inf)))
        running.sort(key=lambda one: -median(rates[id(one)]))
        for variant in running[math.ceil(len(running) / 4) :]:
            variant.stop()
        running = running[: math.ceil(len(running) / 4)]
    return running[0], ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PROJECTS, default=PROJECTS)
    parser.add_argument("--output", type=Path, default=Path("tuned_foreign"))
    args = parser.parse_args()
    sys.path.insert(0, str(FOLDER))
    print(f"torch {torch.__version__}, {machine_name()}\n")
    header = "project", "tune, times as fast as the hand (95 %)", "tune", "the best of so many by hand"
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for name in args.only:
        make = find_function(f"{FOLDER / name}.py:make")
        outcome = tune(make, "10m", args.output / name)
        servers = {one: fork_server(one) for one in (None, *ALLOCATORS) if one is None or not why_no_allocator(one)}
        folder = args.output / "by_hand" / name
        shutil.rmtree(folder, ignore_errors=True)
        by_hand, ran = best_by_hand(name, folder, servers)
        server = servers[outcome.changes.speedups.get("allocator")]
        tuned = Variant(project_of(make), outcome.changes, folder / "tuned", server)
        tuned.start()
        tuned.warm_up(math.inf)
        ratio = compare(by_hand, tuned, width=0.03, least=8, most=30, seconds=2.0, deadline=math.inf)
        for variant in (by_hand, tuned):
            variant.stop()
        for one in filter(None, servers.values()):
            one.stop()
        chosen = ", ".join(factor.name for factor in outcome.chosen)
        print(f"| {name} | {ratio} | {chosen} | {by_hand.project.arguments['setting']}, of {ran} |", flush=True)


if __name__ == "__main__":
    main()
