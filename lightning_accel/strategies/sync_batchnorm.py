"""BatchNorm over the batches of all processes. Shapes: B samples, C channels, W processes."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_accel._private.torch import BatchNormBase, check_input_dims
from lightning_accel.ops.float32 import at_least_float32


class SyncBatchNormPlugin(LayerSync):
    """Synchronize BatchNorm layers over processes, on CPU and CUDA: ``Trainer(plugins=[...])``.

    While ``fit`` runs, the model is normalized as by one process with the whole batch: outputs, gradients and running
    statistics, also if processes have unequal numbers of samples, or none. Afterwards its layers are plain BatchNorm
    again. Lightning's ``sync_batchnorm=True`` needs CUDA. Lightning strategies other than DDP and FSDP ignore both;
    with those, call :func:`convert_sync_batchnorm_` in ``configure_model``.

    Raises:
        ValueError: before training, if a layer is a LazyBatchNorm that has seen no batch.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.strategies import SyncBatchNormPlugin
        >>> trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", plugins=[SyncBatchNormPlugin()])
    """

    def apply(self, model: nn.Module) -> nn.Module:
        if not convert_sync_batchnorm_(model):
            rank_zero_warn(f"SyncBatchNormPlugin has no effect: {type(model).__name__} has no BatchNorm to synchronise")
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        revert_sync_batchnorm_(model)
        return model


def convert_sync_batchnorm_(module: nn.Module, group: dist.ProcessGroup | None = None) -> list[str]:
    """Synchronize each BatchNorm1d, 2d and 3d in ``module`` over the processes of ``group``, by default all.

    The layers change only their class: parameters, buffers, hooks, names and modes stay, so an optimizer, a checkpoint
    and a sharding made before or after remain valid. Call it before ``fully_shard`` is applied to a BatchNorm itself; a
    parent module may be sharded already.

    Each training forward pass is one all_gather of (2 C + 1) numbers, each backward pass one all_reduce of (2 C), so
    every process must run the layers in the same order. Statistics are float32 at least. In evaluation nothing is sent.

    Args:
        module: module whose layers are changed in place.
        group: processes that synchronize.

    Returns:
        The names of the layers.

    Raises:
        ValueError: if a layer is a LazyBatchNorm that has seen no batch.
        TypeError: if ``fully_shard`` was applied to a BatchNorm itself.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        >>> convert_sync_batchnorm_(model)
        ['1']
    """
    layers: list[tuple[str, Any]] = [
        (name, layer) for name, layer in module.named_modules() if isinstance(layer, BatchNormBase)
    ]
    for name, layer in layers:
        _require_convertible(name, layer)
    ours = [(name, layer) for name, layer in layers if type(layer) in _SYNCED or isinstance(layer, _Synced)]
    for _, layer in ours:
        layer.__class__ = _SYNCED.get(type(layer), type(layer))
        layer._sync_group = _Group(group)
    left = [
        f"{name} ({type(layer).__name__})"
        for name, layer in layers
        if not isinstance(layer, (_Synced, nn.SyncBatchNorm))
    ]
    if left:
        rank_zero_warn(
            f"not synchronised between processes, since their classes may do more than BatchNorm: {', '.join(left)}"
        )
    return [name for name, _ in ours]


def revert_sync_batchnorm_(module: nn.Module) -> list[str]:
    """Turn the layers that :func:`convert_sync_batchnorm_` changed back into plain BatchNorm; return their names.

    Args:
        module: module whose layers are changed in place.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        >>> convert_sync_batchnorm_(model) == revert_sync_batchnorm_(model)
        True
    """
    reverted = []
    layer: Any
    for name, layer in module.named_modules():
        if isinstance(layer, _Synced):
            reverted.append(name)
            if type(layer) in _PLAIN:
                del layer._sync_group
                layer.__class__ = _PLAIN[type(layer)]  # type: ignore[assignment]
            else:  # fully_shard derived a class of its own from ours
                layer._sync_group = None
    return reverted


def _require_convertible(name: str, layer: nn.Module) -> None:
    if isinstance(layer, LazyModuleMixin):
        raise ValueError(
            f"{name or 'the module'} is a {type(layer).__name__} that does not know its number of channels yet; run a "
            "batch through the model first (in configure_model, for instance), or give the number to BatchNorm"
        )
    if isinstance(layer, FSDPModule) and not isinstance(layer, _Synced):
        raise TypeError(
            f"{name or 'the module'} is a BatchNorm that was given to fully_shard; call convert_sync_batchnorm_ before "
            "fully_shard, or shard the parent of the layer"
        )


class _Group:
    """Hold a process group in copies of a module; a group itself cannot be copied."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Group":
        return self


class _Synced(nn.Module):
    _sync_group: _Group | None  # None: not synchronized

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` (B, C, ...), of any floating dtype."""
        if not self.training or self._sync_group is None or not (dist.is_available() and dist.is_initialized()):
            return super().forward(x)
        group = self._sync_group.group
        if dist.get_world_size(group) == 1:
            return super().forward(x)
        layer: Any = self
        check_input_dims(layer, x)
        y, mean, variance, count = _SyncBatchNorm.apply(x, layer.weight, layer.bias, layer.eps, group)
        if layer.track_running_stats and layer.running_mean is not None:
            _update_running_statistics(layer, mean, variance, count)
        return y


class SyncedBatchNorm1d(_Synced, nn.BatchNorm1d):
    """Normalize over the batches of all processes like BatchNorm1d; made by :func:`convert_sync_batchnorm_`."""


class SyncedBatchNorm2d(_Synced, nn.BatchNorm2d):
    """Normalize over the batches of all processes like BatchNorm2d; made by :func:`convert_sync_batchnorm_`."""


class SyncedBatchNorm3d(_Synced, nn.BatchNorm3d):
    """Normalize over the batches of all processes like BatchNorm3d; made by :func:`convert_sync_batchnorm_`."""


_SYNCED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SyncedBatchNorm1d,
    nn.BatchNorm2d: SyncedBatchNorm2d,
    nn.BatchNorm3d: SyncedBatchNorm3d,
}
_PLAIN = {synced: plain for plain, synced in _SYNCED.items()}


@torch.no_grad()
def _update_running_statistics(layer: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    layer.num_batches_tracked.add_(1)
    share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    unbiased = variance * (count / (count - 1).clamp(min=1))
    for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        running.copy_(running * (1 - share) + share * new)


class _SyncBatchNorm(torch.autograd.Function):
    """Normalize over all processes, saving x, the weight, and the mean and inverse deviation of each channel.

    Backward: dx = weight / deviation * (dy - mean of dy - x_hat * mean of dy * x_hat), the means over all processes;
    the gradients of weight and bias are those of this process, which DDP and FSDP average as any other.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _combine(_gather(_local_statistics(x), group), x)
        inverse = (variance + eps).rsqrt()
        scale = inverse if weight is None else inverse * weight
        y = (at_least_float32(x) - _broadcast_channels(mean, x)) * _broadcast_channels(scale, x)
        y = y if bias is None else y.add_(_broadcast_channels(bias.to(y.dtype), x))
        ctx.group = group
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        dims = _all_but_channels(x)
        x_hat = (at_least_float32(x) - _broadcast_channels(mean, x)) * _broadcast_channels(inverse, x)
        wide_dy = at_least_float32(dy)
        sums = torch.stack([wide_dy.sum(dims), (wide_dy * x_hat).sum(dims)])  # (2, C)
        d_weight = None if weight is None else sums[1].to(weight.dtype)
        d_bias = None if ctx.bias_dtype is None else sums[0].to(ctx.bias_dtype)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, d_bias, None, None
        total = sums.clone()  # gradients of the parameters may be views of sums
        dist.all_reduce(total, group=ctx.group)
        mean_dy, mean_dy_x_hat = total / count.clamp(min=1)
        scale = inverse if weight is None else inverse * weight
        dx = wide_dy - _broadcast_channels(mean_dy, x) - x_hat.mul_(_broadcast_channels(mean_dy_x_hat, x))
        return dx.mul_(_broadcast_channels(scale, x)).to(x.dtype), d_weight, d_bias, None, None


def _local_statistics(x: Tensor) -> Tensor:
    """Return mean and sum of squared deviations of each channel, and the number of values in a channel, (2 C + 1,)."""
    channels = x.shape[1]
    count = x.numel() // channels
    if count == 0:
        return torch.zeros(2 * channels + 1, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    variance, mean = torch.var_mean(at_least_float32(x), _all_but_channels(x), correction=0)
    return torch.cat([mean, variance * count, mean.new_full((1,), count)])


def _gather(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    gathered = statistics.new_empty(dist.get_world_size(group) * len(statistics))
    dist.all_gather_into_tensor(gathered, statistics, group=group)
    return gathered.view(-1, len(statistics))  # (W, 2 C + 1)


def _combine(gathered: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (C,), biased variance (C,) and count () over all processes.

    Means and deviations from them are merged (Chan et al. 1979,
    http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf, eq. 2.1), so that a deviation small beside the
    mean keeps its digits, as it would not in E[x^2] - E[x]^2.
    """
    channels = x.shape[1]
    means, squares, counts = gathered.split([channels, channels, 1], dim=1)
    count = counts.sum()
    if count.device.type == "cpu" and count <= 1:  # on other devices, reading it would wait
        raise ValueError(
            f"BatchNorm needs more than 1 value a channel in training over all processes; got {int(count)}, this "
            f"process having {tuple(x.shape)}"
        )
    # sum differences from one of the means, since sums of numbers far from zero lose digits
    origin = means[counts.flatten().argmax()]
    mean = origin + ((means - origin) * counts).sum(0) / count.clamp(min=1)
    variance = (squares + counts * (means - mean).square()).sum(0) / count.clamp(min=1)
    return mean, variance, count


def _broadcast_channels(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (x.ndim - 2))


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]
