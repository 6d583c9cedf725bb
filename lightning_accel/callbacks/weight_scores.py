"""Importance scores of weights, from the weights, their gradients or the inputs of their layers."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_accel.callbacks.pruning_structure import StructureOptions
from lightning_accel.callbacks.weight_part import WeightPart, num_processes
from lightning_accel.compress.masks import score

_SHOWS_INPUT = nn.Linear, nn.modules.conv._ConvNd


class WeightScores:
    """Compute the scores of weights; the lowest are pruned.

    ``movement`` sums -weight * gradient over steps (Sanh et al. 2020, https://arxiv.org/abs/2005.07683, eq. 4, without
    the learning rate); ``taylor`` sums (weight * gradient)**2 over the steps since weights were last pruned (Molchanov
    et al. 2019, https://arxiv.org/abs/1906.10771, eq. 8); ``wanda`` is |weight| times the root mean square of its input
    since weights were last pruned (Sun et al. 2023, https://arxiv.org/abs/2306.11695, eq. 1).
    """

    def __init__(self, options: StructureOptions) -> None:
        self.options = options
        self.criterion = options.criterion
        self._sums: dict[str, Tensor] = {}  # of gradient terms, for the local shard
        self._inputs: dict[str, InputSum] = {}
        self._parts: list[WeightPart] = []
        self._device = torch.device("cpu")
        self._handles: list[RemovableHandle] = []
        self._group: dist.ProcessGroup | None = None
        self._has_ranks = False
        self._is_sharded = False

    def unsupported_reason(self, part: WeightPart) -> str | None:
        if self.criterion != "wanda":
            return None
        if not isinstance(part.module, _SHOWS_INPUT) or isinstance(part.module, _IN_ATTENTION):
            return f"wanda needs the inputs of a layer, which {type(part.module).__name__} does not show"
        if part.is_sharded_along_input:
            return "wanda needs the inputs of a layer, which are split over processes"
        return None

    def attach(self, trainer: L.Trainer, parts: Sequence[WeightPart], is_sharded: bool) -> None:
        self.detach()
        self._parts = [*parts]
        self._device = trainer.strategy.root_device
        self._is_sharded = is_sharded
        self._has_ranks = num_processes(trainer) > 1
        mesh = getattr(trainer.strategy, "device_mesh", None)
        names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
        if "pipeline" in names and mesh is not None:  # each stage has other layers
            self._group = mesh["data_parallel"].get_group()
        held = [part for part in parts if part.is_held]
        if self.criterion in ("movement", "taylor"):
            kept, self._sums = self._sums, {}
            for part in held:
                before = kept.get(part.name)
                zeros = torch.zeros_like(part.value, dtype=torch.float32)
                self._sums[part.name] = zeros if before is None or before.shape != zeros.shape else before.to(zeros)
        if self.criterion == "wanda":
            self._inputs = {part.name: InputSum(self._device) for part in held}
            self._handles = [
                part.module.register_forward_pre_hook(self._inputs[part.name], with_kwargs=True) for part in held
            ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def reset(self) -> None:
        """Reset what is measured since weights were last pruned."""
        if self.criterion == "taylor":
            for value in self._sums.values():
                value.zero_()
        for one in self._inputs.values():
            one.sums = None

    def add_gradients(self, trainer: L.Trainer, parts: Sequence[WeightPart], optimizer: Optimizer) -> None:
        """Add the gradients of a step; one with gradients that are not finite, which AMP skips, adds nothing."""
        if not self._sums:
            return
        products = {}
        for part in parts:
            gradient = part.gradient()
            if gradient is not None:
                product = part.value.float() * gradient.float()
                products[part.name] = -product if self.criterion == "movement" else product.square()
        finite = torch.tensor(1.0, device=trainer.strategy.root_device)
        for product in products.values():
            finite = finite * product.isfinite().all().to(finite)
        if self._is_sharded:
            dist.all_reduce(finite, dist.ReduceOp.MIN)
        scale = _scale_of(trainer, optimizer)
        scale = scale if self.criterion == "movement" else scale**2
        for name, product in products.items():
            sums = self._sums[name]
            sums += torch.where(finite.to(sums.device) > 0, product / scale, 0)

    def compute(self, part: WeightPart, number: int) -> Tensor:
        """Return the scores of the local shard of a weight, float32."""
        if self.criterion in ("movement", "taylor"):
            return self._sums[part.name]
        value = part.value
        if self.criterion == "wanda":
            return value.abs().float() * self._inputs[part.name].root_mean_square(part, self._sum_over_processes)
        positions = part.positions() if self.criterion == "random" else None
        return score(self.criterion, part.name, value, number, self.options.seed, positions)

    def _sum_over_processes(self, value: Tensor) -> Tensor:
        if self._has_ranks:
            dist.all_reduce(value, group=self._group)
        return value

    def state_dict(self, whole: Callable[[int, Tensor | None], Tensor]) -> dict[str, Any]:
        """Return sums of gradients, gathered, and sums of inputs of each process; all processes must call it."""
        names = [part.name for part in self._parts]
        gradients = {}
        if self.criterion in ("movement", "taylor"):
            gradients = {name: whole(number, self._sums.get(name)) for number, name in enumerate(names)}
        inputs = {part.name: self._gather_inputs(part) for part in self._parts if self.criterion == "wanda"}
        return {"gradients": gradients, "inputs": inputs}

    def _gather_inputs(self, part: WeightPart) -> Tensor:
        mine = torch.zeros(num_inputs(part) + 1, dtype=torch.float64, device=self._device)
        sums = self._inputs[part.name].sums if part.name in self._inputs else None
        if sums is not None:
            mine.copy_(sums)
        if not self._has_ranks:
            return mine.cpu()[None]
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        return torch.stack(gathered).cpu()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; call it after :meth:`attach`."""
        for part in self._parts:
            if part.name in self._sums and part.name in state["gradients"]:
                self._sums[part.name] = part.shard(state["gradients"][part.name])
            if part.name in self._inputs and part.name in state["inputs"]:
                rows = state["inputs"][part.name]
                num = dist.get_world_size() if self._has_ranks else 1
                mine = rows[dist.get_rank()] if num > 1 and num == len(rows) else rows.sum(0) / num
                self._inputs[part.name].sums = mine.to(self._device)


class InputSum:
    """Sum the squares of a layer's inputs, per input, in a forward pre-hook."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums: Tensor | None = None  # (inputs + 1,) float64: sums of squares, then the number of rows

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training:
            return
        x = (args[0] if args else kwargs["input"]).detach()
        if isinstance(module, nn.modules.conv._ConvNd):
            x = x.movedim(-1 - len(module.kernel_size), -1)
        rows = x.reshape(-1, x.shape[-1]).double()
        squares = torch.cat([rows.square().sum(0), rows.new_full((1,), len(rows))]).to(self.device)
        self.sums = squares if self.sums is None else self.sums + squares

    def root_mean_square(self, part: WeightPart, total: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the root mean square of each weight's input, in a shape that multiplies with the local shard."""
        size = num_inputs(part)
        sums = (
            torch.zeros(size + 1, dtype=torch.float64, device=self.device) if self.sums is None else self.sums.clone()
        )
        sums = total(sums)
        if bool(sums[-1] > 0):
            root = (sums[:-1] / sums[-1]).sqrt().float()
        else:  # the layer was not called, or was compiled without hooks in an earlier run of this process
            rank_zero_warn(
                f"wanda saw no input of {part.name}, and takes its inputs for equal; another criterion sees it"
            )
            root = torch.ones(size, device=sums.device)
        module, shape = part.module, part.shape
        if part.input_dim == 0:
            root = root[:, None].expand(shape[:2])
        elif isinstance(module, nn.modules.conv._ConvNd):
            root = root.view(module.groups, -1).repeat_interleave(shape[0] // module.groups, 0)
        else:
            root = root.expand(shape)
        value = part.value
        root = root[part.offsets[0] :][: value.shape[0], part.offsets[1] :][:, : value.shape[1]]
        return root.reshape(*root.shape, *[1] * (value.ndim - 2)).to(value.device)


def num_inputs(part: WeightPart) -> int:
    """Return the number of inputs of a linear layer or a convolution."""
    return part.shape[part.input_dim] * (getattr(part.module, "groups", 1) if part.input_dim else 1)


_IN_ATTENTION = (nn.modules.linear.NonDynamicallyQuantizableLinear,)  # attention does not call its forward


def _scale_of(trainer: L.Trainer, optimizer: Optimizer) -> float:
    """Return the scale still in the gradients: fused optimizers unscale them in their step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return 1.0
    return float(scaler.get_scale())
