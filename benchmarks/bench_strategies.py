"""What does a strategy add to a training step, over the same step written by hand in torch? And what does it save?

python benchmarks/bench_strategies.py [--quick] [--processes 2] [--rounds 4] [--device cpu|cuda] [--json FILE]

Every subject trains the same model on the same rows, in processes that talk through gloo (nccl on GPUs). Subjects take
turns in the same processes; a step is the median over all rounds, forward, backward, optimizer, of the first process.
Memory is that of one process: what parameters and optimizer states take between steps, and the most they take, gathered
parameters included, while a block runs. The answer is checked first: all subjects on the same rows end with equal
weights. A pipeline's processes all train on the rows of the first.
"""

import argparse
import gc
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from lightning_accel import AccelDDPStrategy, FullyShardedStrategy, MixtureOfExperts, PipelineStrategy
from lightning_accel.strategies.sharding.blocks import Sharding, shard_module

ROWS = 64  # a process
MICRO_BATCHES = 4


class Residual(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Mixture(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mixture = MixtureOfExperts(dim, dim // 2, num_experts=8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(x).features


class Stack(L.LightningModule):
    """Blocks of which ``dim`` and ``depth`` make about 50 million parameters."""

    def __init__(self, block: type[nn.Module], dim: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(block(dim) for _ in range(depth)))
        self.head = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return F.cross_entropy(self(x), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def pipeline_layers(self) -> list[nn.Module]:
        return [*self.blocks, self.head]


class Rows(Dataset):
    """Batches, drawn once: what is timed is no loading."""

    def __init__(self, number: int, dim: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.batches = [
            (torch.randn(ROWS, dim, generator=generator), torch.randint(10, (ROWS,), generator=generator))
            for _ in range(number)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> Any:
        return self.batches[i]


class Clock(L.Callback):
    """Seconds of each step but the first, and bytes of parameters and optimizer states; if asked, of gathered ones."""

    def __init__(self, watch: bool) -> None:
        self.seconds: list[float] = []
        self.watch = watch
        self.resting = self.gathered = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = {id(parameter) for parameter in pl_module.parameters()}
        if self.watch:
            for block in pl_module.blocks:
                block.register_forward_pre_hook(lambda *_: self.look(pl_module))
                block.register_full_backward_pre_hook(lambda *_: self.look(pl_module))

    def look(self, module: nn.Module) -> None:
        gathered = [one for one in module.parameters() if id(one) not in self.kept]
        self.gathered = max(self.gathered, sum(map(nbytes, gathered)))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.start = now(pl_module.device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            self.seconds.append(now(pl_module.device) - self.start)
        self.resting = held(pl_module, trainer.optimizers[0])


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def nbytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def held(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(nbytes(one) for one in [*module.parameters(), *states] if not one.is_meta)


class Bench:
    """Runs subjects in one process of several."""

    def __init__(self, block: type[nn.Module], dim: int, depth: int, steps: int, device: str) -> None:
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self.world_size = dist.get_world_size()
        self.make = lambda: Stack(block, dim, depth)
        self.data = Rows(steps, dim, dist.get_rank())
        self.same_data = Rows(steps, dim, 0)

    def by_hand(self, wrap: Callable[[Stack], nn.Module]) -> tuple[list[float], Stack]:
        """Seconds of each step of a loop in plain torch but the first, and what it trained."""
        module = self.make().to(self.device)
        wrapped = wrap(module)

        def step(x: Tensor, target: Tensor) -> None:
            F.cross_entropy(wrapped(x), target).backward()

        return self._loop(step, module.configure_optimizers(), self.data), module

    def pipeline_by_hand(self) -> tuple[list[float], nn.Module]:
        """A stage of torch's own pipeline."""
        module, rank = self.make().to(self.device), dist.get_rank()
        layers = module.pipeline_layers()
        cuts = [number * len(layers) // self.world_size for number in range(self.world_size + 1)]
        mine = nn.Sequential(*layers[cuts[rank] : cuts[rank + 1]])
        stage = PipelineStage(mine, rank, self.world_size, self.device)
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=F.cross_entropy)

        def step(x: Tensor, target: Tensor) -> None:
            inputs = (x,) if rank == 0 else ()
            schedule.step(*inputs, target=target if rank == self.world_size - 1 else None)

        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-4)
        return self._loop(step, optimizer, self.same_data), module

    def _loop(
        self, step: Callable[[Tensor, Tensor], None], optimizer: torch.optim.Optimizer, data: Rows
    ) -> list[float]:
        seconds = []
        for number, (x, target) in enumerate(data.batches):
            start = now(self.device)
            optimizer.zero_grad()
            step(x.to(self.device), target.to(self.device))
            optimizer.step()
            if number:
                seconds.append(now(self.device) - start)
        return seconds

    def fit(
        self, strategy: Strategy, watch: bool, same_data: bool = False
    ) -> tuple[list[float], Stack, dict[str, int]]:
        """The same under the Trainer, and bytes."""
        clock, module = Clock(watch), self.make()
        quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        trainer = L.Trainer(
            accelerator=self.device.type,
            devices=self.world_size,
            strategy=strategy,
            max_epochs=1,
            use_distributed_sampler=False,
            enable_model_summary=False,
            callbacks=[clock],
            **quiet,
        )
        trainer.fit(module, DataLoader(self.same_data if same_data else self.data, batch_size=None))
        return clock.seconds, module, {"between steps": clock.resting, "at most": clock.resting + clock.gathered}

    def fsdp2(self, module: Stack) -> nn.Module:
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    def experts(self, module: Stack) -> nn.Module:
        """As the strategy does it: torch has no expert parallelism of its own."""
        grid = init_device_mesh(self.device.type, (1, self.world_size), mesh_dim_names=("same", "experts"))
        plan = Sharding(init_device_mesh(self.device.type, (self.world_size,)), grid)
        return shard_module(module, list(module.blocks), plan)


def whole(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in module.named_parameters()
        if not value.is_meta  # a layer on another stage of a pipeline
    }


def subjects(bench: Bench, mixture: bool) -> dict[str, tuple[str, Callable[[bool], Any]]]:
    """What each is compared with, and how to run it."""

    def hand(wrap: Callable[[Stack], nn.Module]) -> Callable[[bool], Any]:
        return lambda watch: bench.by_hand(wrap)

    def ours(strategy: Callable[[], Strategy], same_data: bool = False) -> Callable[[bool], Any]:
        return lambda watch: bench.fit(strategy(), watch, same_data)

    if mixture:
        all_ranks = partial(FullyShardedStrategy, expert_parallel_size="all")
        return {
            "ddp, by hand": ("", hand(DistributedDataParallel)),
            "ddp, Lightning's": ("ddp, by hand", ours(DDPStrategy)),
            "accel_expert_parallel, by hand": ("", hand(bench.experts)),
            "accel_expert_parallel": ("accel_expert_parallel, by hand", ours(all_ranks)),
        }
    return {
        "ddp, by hand": ("", hand(DistributedDataParallel)),
        "ddp, Lightning's": ("ddp, by hand", ours(DDPStrategy)),
        "accel_ddp": ("ddp, by hand", ours(AccelDDPStrategy)),
        "fsdp2, by hand": ("", hand(bench.fsdp2)),
        "accel_fsdp2": ("fsdp2, by hand", ours(FullyShardedStrategy)),
        "pipeline, by hand": ("", lambda watch: bench.pipeline_by_hand()),
        "accel_pipeline": ("pipeline, by hand", ours(partial(PipelineStrategy, MICRO_BATCHES), same_data=True)),
    }


def measure(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.processes), "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(arguments.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "bench",
    }  # fmt: skip
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if arguments.device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", arguments.processes)
    dist.init_process_group(
        "nccl" if arguments.device == "cuda" else "gloo", store=store, rank=rank, world_size=arguments.processes
    )
    rows = []
    for mixture, (dim, depth) in ((False, arguments.perceptrons), (True, arguments.mixtures)):
        bench = Bench(Mixture if mixture else Residual, dim, depth, arguments.steps, arguments.device)
        rows += compare(bench, mixture, arguments.rounds)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def compare(bench: Bench, mixture: bool, rounds: int) -> list[dict[str, Any]]:
    run = subjects(bench, mixture)
    size = sum(one.numel() for one in bench.make().parameters()) / 1e6
    case = f"{'mixtures' if mixture else 'perceptrons'}, {size:.0f}M, {bench.world_size} processes"
    seconds: dict[str, list[float]] = {name: [] for name in run}
    memory: dict[str, dict[str, int]] = {}
    expected: dict[str, dict[str, Tensor]] = {}
    for number in range(rounds):
        for name, (_, start) in run.items():
            module = None
            gc.collect()  # models and Trainers know each other
            times, module, *rest = start(number == 0)
            if number:  # the first round warms up, and looks at memory and weights
                seconds[name] += times
            else:
                memory[name] = rest[0] if rest else {}
                data = "same" if "pipeline" in name else "each its own"
                actual = whole(module)
                known = expected.setdefault(data, {})
                for key in actual.keys() & known.keys():
                    torch.testing.assert_close(actual[key], known[key], rtol=1e-4, atol=1e-4)
                expected[data] = actual | known
    rows = []
    for name, (baseline, _) in run.items():
        median = statistics.median(seconds[name])
        ratio = median / statistics.median(seconds[baseline]) if baseline else 1.0
        rows.append(
            {
                "case": case,
                "subject": name,
                "metric": "step",
                "value": median * 1e3,
                "unit": "ms",
                "baseline": baseline,
                "ratio": ratio,
            }
        )
        most = max(one.get("between steps", 0) for one in memory.values())
        for when, value in memory[name].items():
            rows.append(
                {
                    "case": case,
                    "subject": name,
                    "metric": f"memory {when}",
                    "value": value / 2**20,
                    "unit": "MiB",
                    "baseline": "the largest",
                    "ratio": value / most,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, few steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=4, help="the first warms up")
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    arguments.rounds, arguments.steps = (2, 4) if arguments.quick else (arguments.rounds, 7)
    arguments.perceptrons = (128, 3) if arguments.quick else (1024, 12)
    arguments.mixtures = (64, 2) if arguments.quick else (512, 22)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (arguments, folder), nprocs=arguments.processes)
        rows = json.loads(Path(folder, "rows.json").read_text())
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    print(f"torch {torch.__version__}, lightning {L.__version__}, {arguments.device}, one thread a process\n")
    print("| case | subject | metric | value | compared with | ratio |\n| --- | --- | --- | ---: | --- | ---: |")
    for row in rows:
        value = f"{row['value']:.0f} {row['unit']}"
        print(
            f"| {row['case']} | {row['subject']} | {row['metric']} | {value} | {row['baseline']} | {row['ratio']:.2f} |"
        )


if __name__ == "__main__":
    main()
