"""Linear layers in float8 by torchao, with bf16 autocast for the rest."""

from collections.abc import Sequence
from importlib.util import find_spec

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_accel.ops.names import find_linear_layers, list_of_names

_CAPABILITY = (8, 9)  # Ada and Hopper are the first with float8 tensor cores
_NO_TORCHAO = "Float8Precision needs torchao, which is not installed: pip install torchao"
_MULTIPLE = 16  # float8 matrix products need both sizes of a weight to be multiples of this


class Float8Precision(MixedPrecision):
    """Train the ``nn.Linear`` layers of any module in float8, with ``Trainer(plugins=[Float8Precision()])``.

    It needs torchao, and a CUDA device of compute capability 8.9 or higher. Each layer with sizes that are multiples of
    16 is replaced by torchao's layer, with tensorwise dynamic scales; its weight stays float32, under the same name.
    Everything else runs under bf16 autocast, including experts that are stacked in one parameter. Float8 is faster for
    layers that are several thousand wide, and compiled (https://github.com/pytorch/ao/tree/main/torchao/float8).

    Args:
        exclude: layers to exclude, or modules around them: names or patterns of them (``"head"``, ``"blocks.*.out"``),
            or classes by name. By default those named head, lm_head, gate or router.

    Raises:
        ModuleNotFoundError: if torchao is not installed.
        ValueError: before training, if the device does not support float8, if no layer has suitable sizes, if an entry
            of ``exclude`` matches nothing, or if the module is already sharded.

    Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.precision import Float8Precision
        >>> trainer = L.Trainer(plugins=[Float8Precision(exclude="head")])  # doctest: +SKIP
    """

    def __init__(self, exclude: Sequence[str | type[nn.Module]] | None = None) -> None:
        if find_spec("torchao") is None:
            raise ModuleNotFoundError(f"{_NO_TORCHAO}, or use AmpPrecision()")
        super().__init__("bf16-mixed", "cuda")
        self.exclude = None if exclude is None else tuple(list_of_names(exclude, "exclude"))

    def convert_module(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, pl.LightningModule)
        if reason := why_not_float8(module.trainer.strategy.root_device):
            raise ValueError(f"{reason}. Use AmpPrecision(), which takes what the device computes in")
        return self._convert(module)

    def _convert(self, module: nn.Module) -> nn.Module:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        if any(isinstance(layer, Float8Linear) for layer in module.modules()):  # by an earlier fit
            return module
        layers = find_linear_layers(module, _MULTIPLE, self.exclude)
        if not layers:
            raise ValueError(
                f"Float8Precision found no nn.Linear whose sides are multiples of {_MULTIPLE}, apart from those that "
                f"exclude={self.exclude} leaves out, so it would have no effect; use AmpPrecision()"
            )
        if any(isinstance(layer.weight, DTensor) for layer in layers.values()):
            raise ValueError(
                "Float8Precision has to replace layers before they are sharded; got a module whose configure_model "
                "sharded them. Call torchao.float8.convert_to_float8_training there, before fully_shard, and use "
                'AmpPrecision("bf16")'
            )
        # pads batches with a size that is not a multiple of 16, such as the last of an epoch
        config = Float8LinearConfig(pad_inner_dim=True)
        convert_to_float8_training(module, module_filter_fn=lambda layer, name: name in layers, config=config)
        rank_zero_info(f"Float8Precision: {len(layers)} linear layers multiply in float8, all else is bf16-mixed")
        return module


def why_not_float8(device: torch.device) -> str:
    """Return why a device does not train in float8, or nothing if it does."""
    if find_spec("torchao") is None:
        return _NO_TORCHAO
    if device.type != "cuda":
        found = f"a {device.type} device"
    elif (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        found = f"{torch.cuda.get_device_name(device)}, which has {capability[0]}.{capability[1]}"
    else:
        return ""
    needed = f"{_CAPABILITY[0]}.{_CAPABILITY[1]}"
    return f"Float8Precision needs a CUDA device of compute capability {needed} or more; got {found}"
