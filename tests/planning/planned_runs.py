"""Runs whose step is planned and trained: a dense network, a mixture of experts and a recurrent network."""

import gc
import weakref
from collections import Counter
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import DynamicRNN, MixtureOfExperts
from lightning_accel.strategies import PipelineStrategy

_NAMES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::send": "send",
    "c10d::recv_": "receive",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
}


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.widen, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.widen(self.norm(x)).relu())


class Experts(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mixture = MixtureOfExperts(dim, 2 * dim, num_experts=4, k=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(self.norm(x)).features


class Recurrent(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.recurrent = DynamicRNN(dim, dim, cell="gru")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.recurrent(x, torch.full((len(x),), x.shape[1])).output


BLOCKS = {"dense": Block, "experts": Experts, "recurrent": Recurrent, "split": Block}


class TokenModel(L.LightningModule):
    def __init__(self, block: type[nn.Module], dim: int, depth: int, lr: float = 1e-3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 50)
        self.lr = lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.embedding(batch[0])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[0].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class SplitModel(TokenModel):
    """Split the weights of its blocks as Megatron does, and shard them over replicas where there are several."""

    def __init__(self, block: type[nn.Module], dim: int, depth: int) -> None:
        super().__init__(block, dim, depth)
        self.is_split = False

    def tensor_parallel_plan(self, num_devices: int) -> dict[str, ParallelStyle]:
        styles = {"widen": ColwiseParallel(), "narrow": RowwiseParallel()}
        return {f"blocks.{number}.{name}": styles[name] for number in range(len(self.blocks)) for name in styles}

    def configure_model(self) -> None:
        if self.device_mesh is None or self.is_split:
            return
        self.is_split = True
        parallelize_module(self, self.device_mesh["tensor_parallel"], self.tensor_parallel_plan(2))
        replicas = self.device_mesh["data_parallel"]
        for part in [self.embedding, *self.blocks, self.head] if replicas.size() > 1 else []:
            fully_shard(part, mesh=replicas)


def make(kind: str, dim: int = 24, depth: int = 3, length: int = 12, **options: Any) -> tuple:
    """Return (trainer, module, loader) of a run with four samples a process."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (64, length), generator=torch.Generator().manual_seed(1))
    defaults = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 3}
    trainer = L.Trainer(**{**defaults, "enable_model_summary": False, **options})
    kind_of_model = SplitModel if kind == "split" else TokenModel
    return trainer, kind_of_model(BLOCKS[kind], dim, depth), DataLoader(TensorDataset(tokens), batch_size=4)


class Seen(TorchDispatchMode):
    """Count collectives and bytes of live storages of a run that computes, by other code than the package's."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.peak = 0
        self._live: dict[int, int] = {}
        self._references: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, FakeTensor) for one in types):
            return func(*args, **(kwargs or {}))
        if any(one.__torch_dispatch__ is not Tensor.__torch_dispatch__ for one in types):
            return NotImplemented
        if func.name() in _NAMES:
            is_second = func.name() in ("c10d::_reduce_scatter_base_", "c10d::alltoall_base_")
            whole = args[1] if is_second else args[0]
            size = sum(one.numel() * one.element_size() for one in tree_leaves(whole) if isinstance(one, Tensor))
            self.collectives[_NAMES[func.name()]] += size
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and not one.is_meta:
                storage = one.untyped_storage()
                key = storage._cdata
                if key not in self._live:
                    self._references[key] = weakref.ref(storage, lambda _, key=key: self._live.pop(key))
                    self._live[key] = storage.nbytes()
        self.peak = max(self.peak, sum(self._live.values()))
        return result


class SeenStep(L.Callback):
    """Hold what was seen in one step, by default the second."""

    def __init__(self, seen: Seen, step: int = 2) -> None:
        self.seen, self.step = seen, step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1:
            gc.collect()  # cycles of the first step hold tensors for as long as nobody looks for them
            self.seen.collectives.clear()
            self.seen.peak = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True
            self.collectives, self.peak = dict(self.seen.collectives), self.seen.peak


def train_seen(rank: int, kind: str, strategy: Any, world_size: int) -> tuple[dict[str, int], int]:
    """Train for real on one of several processes; return the collectives and the peak of the step that is planned."""
    import warnings

    warnings.simplefilter("ignore")
    seen = Seen()
    step = SeenStep(seen, 3 if isinstance(strategy, PipelineStrategy) else 2)
    resize = torch.UntypedStorage.resize_

    def counted(storage: torch.UntypedStorage, size: int) -> Any:
        if storage._cdata in seen._live:
            seen._live[storage._cdata] = size
        return resize(storage, size)

    torch.UntypedStorage.resize_ = counted
    try:
        with seen:
            trainer, module, loader = make(
                kind, accelerator="cpu", devices=world_size, strategy=strategy, callbacks=[step]
            )
            trainer.fit(module, loader)
    finally:
        torch.UntypedStorage.resize_ = resize
    return step.collectives, step.peak
