"""How near does a plan come to what a step takes?

python benchmarks/bench_plan.py [--parts ranks scale published gpu] [--quick] [--json FILE]

ranks: three networks with four strategies (and a mixture with its experts distributed) on 2 and 4 processes of this
machine. Measured is the peak of a rank's resident memory in the third step, above what it holds after three steps of a
tiny network of the same kind, which libraries take; the largest of all ranks counts. glibc keeps freed blocks of less
than 32 MiB in its heap, where they serve others badly, which is no matter of tensors; so processes map blocks from 128
KiB on (MALLOC_MMAP_THRESHOLD_). Collectives are counted by a dispatch mode of this file, in the fourth step.

scale: seconds and memory of planning a Llama of 8 billion weights for 8, 64 and 1,024 GPUs.

published: torchtitan's tables of Llama 3.1 8B on H100s (FSDP2, bfloat16 weights in computations, float32 masters,
selective activation checkpointing), https://github.com/pytorch/torchtitan/blob/main/benchmarks/
llama3_h100_202412_torchtitan.md, of December 2024: 96 GB of HBM2e at 2.4 TB/s, limited to 500 W. Memory there is what
torch's allocator has reserved. Mixtures of experts: DeepSeek-V3 16B on 8 H100s with its 64 experts distributed over
them, 4 samples of 4,096 tokens each, selective checkpointing, compiled attention and loss
(https://github.com/pytorch/torchtitan/issues/1789, October 2025; the size of the batch follows from seconds and tokens
per second).

gpu: larger networks of the same kinds on one GPU of this machine, where it has one: the allocator's peak in the third
step, and the median seconds of those after it.
"""

import argparse
import ctypes
import gc
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, TensorDataset

import lightning_accel.strategies  # noqa: F401  # registers short names
from lightning_accel import MixtureOfExperts, MoELanguageModel
from lightning_accel.planning import DEVICES, Cluster, Device, simulate_step
from lightning_accel.planning.program import RESERVED
from lightning_accel.strategies import FullyShardedStrategy, PipelineStrategy

STRATEGIES: dict[str, Any] = {
    "ddp": None,
    "fsdp2": {},
    "fsdp2, checkpointing": {"activation_checkpointing": True},
    "experts distributed": {"expert_parallel_size": "all"},
    "pipeline": {"num_micro_batches": 4},
}
CPU = Device("cpu", 2**34, {"fp32": 1e11}, 1e10, 1e9, 1e9, is_gpu=False)


Size = Literal["tiny", "small", "large"]


class OfTransformers(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if len(batch) == 1:
            return self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
        return self.model(pixel_values=batch[0], labels=batch[1]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def llama(size: Size) -> tuple[L.LightningModule, TensorDataset]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 4096}
    heads, length = 12, 256
    if size == "large":  # 1.1 billion weights
        sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "vocab_size": 32000}
        heads, length = 32, 2048
    if size == "tiny":
        sizes |= {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
        heads, length = 4, 16
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=4, max_position_embeddings=length)
    tokens = torch.randint(0, min(4096, sizes["vocab_size"]), (64, length))
    return OfTransformers(LlamaForCausalLM(config)), TensorDataset(tokens)


def resnet(size: Size) -> tuple[L.LightningModule, TensorDataset]:
    from transformers import ResNetConfig, ResNetForImageClassification

    width = {"tiny": 64, "small": 160, "large": 224}[size]
    pictures = torch.randn(512 if size == "large" else 64, 3, width, width)
    narrow = {"embedding_size": 8, "hidden_sizes": [16, 16, 16, 16]} if size == "tiny" else {}
    model = ResNetForImageClassification(ResNetConfig(num_labels=10, **narrow))  # ResNet-50
    return OfTransformers(model), TensorDataset(pictures, torch.randint(0, 10, (len(pictures),)))


def mixture(size: Size) -> tuple[L.LightningModule, list[Tensor]]:
    dim, num_layers, length = {"tiny": (32, 6, 16), "small": (512, 6, 256), "large": (1024, 12, 1024)}[size]
    model = MoELanguageModel(
        vocab_size=4096, dim=dim, num_layers=num_layers, attention={"num_heads": 8}, experts={"num_experts": 8}
    )
    return model, list(torch.randint(0, 4096, (128, length + 1)))


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
NETWORKS = {"llama": llama, "resnet": resnet, "mixture": mixture}


def make(
    network: str, strategy: str, size: Size = "small", **options: Any
) -> tuple[L.Trainer, L.LightningModule, DataLoader]:
    torch.manual_seed(0)
    arguments = STRATEGIES[strategy]
    kind = PipelineStrategy if strategy == "pipeline" else FullyShardedStrategy
    chosen = "ddp" if arguments is None else kind(**arguments)
    module, data = NETWORKS[network](size)
    return L.Trainer(**{**QUIET, "strategy": chosen, **options}), module, DataLoader(data, batch_size=4)


class Collectives(TorchDispatchMode):
    """Count the bytes of collectives."""

    NAMES = {  # noqa: RUF012
        "c10d::allreduce_": ("all_reduce", 0),
        "c10d::_allgather_base_": ("all_gather", 0),
        "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
        "c10d::alltoall_base_": ("all_to_all", 1),
        "c10d::broadcast_": ("broadcast", 0),
        "_c10d_functional::all_to_all_single": ("all_to_all", 0),
        "c10d::send": ("send", 0),
        "c10d::recv_": ("receive", 0),
    }

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one.__torch_dispatch__ is not Tensor.__torch_dispatch__ for one in types) and func.name() in self.NAMES:
            return NotImplemented
        if func.name() in self.NAMES:
            name, position = self.NAMES[func.name()]
            self.bytes[name] += sum(one.nbytes for one in tree_leaves(args[position]) if isinstance(one, Tensor))
        return func(*args, **(kwargs or {}))


class ThirdStep(L.Callback):
    def __init__(self, base: float) -> None:
        self.base, self.peak, self.mode = base, 0.0, Collectives()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        if trainer.global_step == 3:  # in another step than the memory, which the mode would hold longer
            self.mode.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            self.peak = kilobytes("VmHWM") * 1024 - self.base
        if trainer.global_step == 4:
            self.mode.__exit__(None, None, None)
            file = Path(os.environ["MEASURED"]) / f"{trainer.global_rank}.json"
            file.write_text(json.dumps([self.peak, dict(self.mode.bytes)]))
            trainer.should_stop = True


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def train_rank(network: str, strategy: str, processes: int) -> None:
    for name in ("llama.modeling_llama", "resnet.modeling_resnet"):
        importlib.import_module(f"transformers.models.{name}")
    options: dict[str, Any] = {"accelerator": "cpu", "devices": processes}
    trainer, module, loader = make(network, strategy, "tiny", max_steps=3, **options)
    trainer.fit(module, loader)
    del trainer, module, loader
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    base = kilobytes("VmRSS") * 1024
    trainer, module, loader = make(network, strategy, callbacks=[ThirdStep(base)], **options)
    trainer.fit(module, loader)


def ranks(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for processes in (2,) if quick else (2, 4):
        for network in NETWORKS:
            for strategy in STRATEGIES:
                if strategy == "experts distributed" and network != "mixture":
                    continue
                command = [sys.executable, __file__, "--train", network, strategy, str(processes)]
                with tempfile.TemporaryDirectory() as folder:
                    own = {"MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1", "MEASURED": folder}
                    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=500)
                    found = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
                if len(found) != processes:
                    raise RuntimeError(done.stderr[-2000:])
                planned = simulate(network, strategy, processes)
                measured, collectives = max(found)
                counted = dict(planned.trace.bytes_by_name())
                if strategy == "pipeline":  # which broadcasts objects, too
                    del collectives["broadcast"], counted["broadcast"]
                rows.append(
                    {
                        "network": network,
                        "strategy": strategy,
                        "processes": processes,
                        "measured": measured,
                        "planned": planned.peak,
                        "collectives": collectives,
                        "planned_collectives": counted,
                    }
                )
                row = rows[-1]
                same = {name: size for name, size in row["planned_collectives"].items() if size} == row["collectives"]
                print(
                    f"{network:8} {strategy:22} {processes}: measured {row['measured'] / 2**20:7.0f} MiB, planned "
                    f"{row['planned'] / 2**20:7.0f}, {row['planned'] / row['measured']:.3f}; collectives "
                    f"{'equal' if same else row['collectives']}{'' if same else row['planned_collectives']}",
                    flush=True,
                )
    return rows


def simulate(network: str, strategy: str, processes: int) -> Any:
    def run(options: dict[str, Any], fit: Any) -> None:
        fit(*make(network, strategy, **options))

    with tempfile.TemporaryDirectory() as folder:
        return simulate_step(run, Cluster(CPU, processes), {}, Path(folder))


# ---- torchtitan's Llama


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[None, : x.shape[1], None]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, width = heads, groups, dim // heads
        self.query, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.key, self.value = (nn.Linear(dim, groups * width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        query, key, value = (
            one(x).unflatten(-1, (-1, len(turns[0]) * 2)) for one in (self.query, self.key, self.value)
        )
        query, key = (rotated(one, turns) for one in (query, key))
        key, value = (
            one.unsqueeze(3).expand(-1, -1, -1, self.heads // self.groups, -1).flatten(2, 3) for one in (key, value)
        )
        heads = (one.transpose(1, 2) for one in (query, key, value))
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, groups: int, hidden_dim: int) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, groups)
        self.before_attention, self.before_mlp = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.gate, self.up = (nn.Linear(dim, hidden_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), turns)
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def selective() -> Any:
    """Keep attention, reductions and every second matrix product, as torchtitan does."""
    kept = {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_to_all_single.default,
    }
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation == torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = operation in kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama8B(L.LightningModule):
    def __init__(self, length: int) -> None:
        super().__init__()
        dim, vocabulary = 4096, 128256
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, 32, 8, 14336) for _ in range(32))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.register_buffer("turns", torch.zeros(length, 64, dtype=torch.complex64), persistent=False)
        self.is_sharded = False

    def configure_model(self) -> None:
        if self.is_sharded:
            return
        self.is_sharded = True
        options: Any = {"mesh": self.device_mesh["data_parallel"]}
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for number, block in enumerate(self.blocks):
            self.blocks[number] = checkpoint_wrapper(block, preserve_rng_state=False, context_fn=selective)
        for block in self.blocks:
            fully_shard(block, **options)
        fully_shard(self.embedding, **options)
        fully_shard([self.norm, self.head], reshard_after_forward=False, **options)
        fully_shard(self, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        return self.head(self.norm(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1).float(), batch[0].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


# ---- torchtitan's DeepSeek


class LatentAttention(nn.Module):
    """Attend with keys and values from a narrow vector, and positions in a part of each head (DeepSeek-V2, 2.1)."""

    def __init__(self, dim: int, heads: int, rank: int = 512, width: int = 128, turned: int = 64) -> None:
        super().__init__()
        self.heads, self.rank, self.width, self.turned = heads, rank, width, turned
        self.query = nn.Linear(dim, heads * (width + turned), bias=False)
        self.narrow, self.norm = nn.Linear(dim, rank + turned, bias=False), nn.RMSNorm(rank)
        self.wide, self.out = nn.Linear(rank, 2 * heads * width, bias=False), nn.Linear(heads * width, dim, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        query, turned = self.query(x).unflatten(-1, (self.heads, -1)).split([self.width, self.turned], -1)
        query = torch.cat([query, rotated(turned, turns)], -1)
        narrow, turned = self.narrow(x).split([self.rank, self.turned], -1)
        key, value = self.wide(self.norm(narrow)).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        key = torch.cat([key, rotated(turned.unsqueeze(2), turns).expand(-1, -1, self.heads, -1)], -1)
        out = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (query, key, value)), is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DeepSeekBlock(nn.Module):
    def __init__(self, dim: int, number: int) -> None:
        super().__init__()
        self.attention = LatentAttention(dim, heads=16)
        self.before_attention, self.before_experts = nn.RMSNorm(dim), nn.RMSNorm(dim)
        options: Any = {"activation": "silu", "gated": True, "bias": False}
        self.feed_forward = (
            MixtureOfExperts(dim, 1408, num_experts=64, k=6, shared_dim=2 * 1408, **options)
            if number
            else SwiGLU(dim, 10944)
        )

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), turns)
        y = self.feed_forward(self.before_experts(x))
        return x + (y if isinstance(y, Tensor) else y.features)


class CompiledLoss(torch.autograd.Function):
    """Compute a cross-entropy as compiled code does, which makes no copies of the scores in float32."""

    @staticmethod
    def forward(context: Any, scores: Tensor, targets: Tensor) -> Tensor:
        sums = torch.cat([part.float().logsumexp(-1) for part in scores.split(1024)])
        context.save_for_backward(scores, targets, sums)
        return (sums - scores.gather(1, targets[:, None]).squeeze(1).float()).mean()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        scores, targets, sums = context.saved_tensors
        found = torch.empty_like(scores)
        for part, out, top in zip(scores.split(1024), found.split(1024), sums.split(1024), strict=True):
            out.copy_((part.float() - top[:, None]).exp() * (grad / len(scores)))
        return found.scatter_add_(1, targets[:, None], -(grad / len(scores)).to(found).expand(len(scores), 1)), None


class DeepSeek16B(L.LightningModule):
    def __init__(self, length: int) -> None:
        super().__init__()
        dim, vocabulary = 2048, 102400
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(
            checkpoint_wrapper(DeepSeekBlock(dim, number), context_fn=selective) for number in range(27)
        )
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.register_buffer("turns", torch.zeros(length, 32, dtype=torch.complex64), persistent=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.embedding(batch[0])
        for block in self.blocks:
            x = block(x, self.turns)
        return CompiledLoss.apply(self.head(self.norm(x)).flatten(0, 1), batch[0].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


def plan_mixture(cluster: Cluster, batch_size: int, length: int, expert_parallel_size: int) -> Any:
    def run(options: dict[str, Any], fit: Any) -> None:
        data = TensorDataset(torch.zeros(2 * batch_size * cluster.size, length, dtype=torch.int32).long())
        fit(L.Trainer(logger=False, **options), DeepSeek16B(length), DataLoader(data, batch_size))

    strategy = FullyShardedStrategy(expert_parallel_size=expert_parallel_size)
    with tempfile.TemporaryDirectory() as folder:
        return simulate_step(run, cluster, {"strategy": strategy, "precision": "bf16-mixed"}, Path(folder))


def plan_llama(cluster: Cluster, batch_size: int, length: int) -> Any:
    def run(options: dict[str, Any], fit: Any) -> None:
        data = TensorDataset(torch.zeros(2 * batch_size * cluster.size, length, dtype=torch.int32).long())
        fit(L.Trainer(logger=False, **options), Llama8B(length), DataLoader(data, batch_size))

    strategy = ModelParallelStrategy(data_parallel_size=cluster.size, tensor_parallel_size=1)
    with tempfile.TemporaryDirectory() as folder:
        return simulate_step(run, cluster, {"strategy": strategy}, Path(folder))


def scale(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for size in (8, 64) if quick else (8, 64, 1024):
        began = time.perf_counter()
        found = plan_llama(Cluster(DEVICES["H100-80GB"], 8, size // 8), 1, 4096)
        seconds = time.perf_counter() - began
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        rows.append({"gpus": size, "seconds": seconds, "resident": held, "peak": found.peak})
        print(
            f"{size} GPUs: {seconds:.1f} s, {held / 2**30:.2f} GiB resident at most, plan {found.peak / 2**30:.1f} GiB"
        )
    return rows


def published(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for size, memory, speed, compiled in ((8, 82.4, 5762, 6667), (128, 67.0, 5605, 6514)):
        cluster = Cluster(DEVICES["H100-96GB"], 8, size // 8)
        found = plan_llama(cluster, 2, 8192)
        seconds = found.trace.time_on(cluster).total
        planned, tokens = found.peak * RESERVED / 2**30, found.samples * 8192 / seconds
        rows.append(
            {"gpus": size, "memory": memory, "planned_memory": planned, "tokens": speed, "planned_tokens": tokens}
        )
        print(
            f"{size} GPUs: memory {planned:.1f} GiB of {memory} ({planned / memory:.2f}); tokens/s {tokens:.0f} of "
            f"{speed} ({tokens / speed:.2f}), compiled {compiled} ({tokens / compiled:.2f})",
            flush=True,
        )
    # 79.1 GiB, of which torchtitan gives shares; where experts are not distributed, no speed is told
    for batch_size, distributed, memory, speed in ((4, 8, 73.32, 11_636), (8, 1, 0.96 * 79.1, None)):
        cluster = Cluster(DEVICES["H100-80GB"], 8)
        found = plan_mixture(cluster, batch_size, 4096, distributed)
        planned = found.peak * RESERVED / 2**30
        tokens = found.samples * 4096 / found.trace.time_on(cluster).total
        row = {"gpus": 8, "experts on": distributed, "memory": memory, "planned_memory": planned}
        rows.append(row | {"tokens": speed, "planned_tokens": tokens})
        of_speed = f" of {speed} ({tokens / speed:.2f})" if speed else ""
        print(
            f"mixture on 8 GPUs, experts on {distributed}: memory {planned:.1f} GiB of {memory:.1f} "
            f"({planned / memory:.2f}); tokens/s {tokens:.0f}{of_speed}",
            flush=True,
        )
    return rows


# ---- one GPU


class OnGPU(L.Callback):
    def __init__(self) -> None:
        self.peak, self.seconds, self.began = 0, [], 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        if trainer.global_step == 3:
            self.peak = torch.cuda.max_memory_allocated()


def gpu(quick: bool) -> list[dict[str, Any]]:
    name = torch.cuda.get_device_name()
    device = next(one for kind, one in DEVICES.items() if kind.split("-")[0] in name)
    rows = []
    for network, batch_size in (("llama", 4), ("resnet", 64), ("mixture", 16)):
        for precision in ("32-true", "bf16-mixed", "bf16-true"):

            def train(options: dict[str, Any], fit: Any) -> None:
                torch.manual_seed(0)
                module, data = NETWORKS[network]("large")  # noqa: B023
                trainer = L.Trainer(**{**QUIET, "precision": precision, **options})  # noqa: B023
                fit(trainer, module, DataLoader(data, batch_size))  # noqa: B023

            measured = OnGPU()
            options = {"accelerator": "gpu", "devices": 1, "max_steps": 8 if quick else 15, "callbacks": [measured]}
            train(options, lambda trainer, *of: trainer.fit(*of))
            gc.collect()
            torch.cuda.empty_cache()
            cluster = Cluster(device, 1)
            with tempfile.TemporaryDirectory() as folder:
                planned = simulate_step(train, cluster, {}, Path(folder))
            seconds, expected = statistics.median(measured.seconds[4:]), planned.trace.time_on(cluster).total
            row = {"network": network, "precision": precision, "measured": measured.peak, "planned": planned.peak}
            rows.append(row | {"seconds": seconds, "planned_seconds": expected, "device": name})
            print(
                f"{name} {network:8} {precision:10}: measured {measured.peak / 2**30:6.2f} GiB, planned "
                f"{planned.peak / 2**30:6.2f}, {planned.peak / measured.peak:.3f}; step {1e3 * seconds:.1f} ms, "
                f"planned {1e3 * expected:.1f}, {expected / seconds:.2f}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("ranks", "scale", "published", "gpu"))
    parser.add_argument("--quick", action="store_true", help="two processes, and fewer than 1,024 GPUs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.train:
        train_rank(arguments.train[0], arguments.train[1], int(arguments.train[2]))
        return
    parts = {"ranks": ranks, "scale": scale, "published": published, "gpu": gpu}
    chosen = arguments.parts or [name for name in parts if name != "gpu" or torch.cuda.is_available()]
    found = {name: parts[name](arguments.quick) for name in chosen}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
