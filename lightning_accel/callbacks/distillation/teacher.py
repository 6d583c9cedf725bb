"""Loading and running of the teacher in distillation."""

import copy
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_accel._private.torch import tree_leaves
from lightning_accel.callbacks.recorded_calls import Call
from lightning_accel.compress.calls import first_line
from lightning_accel.strategies.checkpoints.named_code import code_named_in
from lightning_accel.strategies.checkpoints.reading import read_checkpoint


class Teacher:
    """Run a frozen module in evaluation mode, on any device.

    Args:
        module: the teacher, which gets frozen.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before = (
            [(one, one.training) for one in module.modules()],
            [(one, one.requires_grad) for one in module.parameters()],
        )
        self.module = module.requires_grad_(False).eval()
        self._copies: dict[torch.device, nn.Module] = {}

    def place(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Move the teacher to the student's device, and to its ``dtype`` if all parameters of the student share one."""
        self.module.to(device, dtype) if dtype is not None else self.module.to(device)
        self._copies = {}

    def run(self, call: Call, name: str, device: torch.device) -> Any:
        """Return the teacher's output for a call of the student's submodule ``name``.

        Raises:
            ValueError: if the teacher cannot take the inputs of that call.
        """
        if device not in self._copies:
            self._copies[device] = self.module if not self._copies else copy.deepcopy(self.module).to(device)
        part = self._submodule(self._copies[device], name)
        with torch.no_grad():
            try:
                return part(*call.args, **call.kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise ValueError(
                    f"the teacher {type(part).__name__} must take what the student's "
                    f"{f'submodule {name!r}' if name else 'forward'} is called with, {_describe(call)}, and fails with "
                    f"{first_line(error)}; give a teacher of the same inputs, or name by module the submodule of the "
                    "student whose inputs it takes"
                ) from error

    def _submodule(self, module: nn.Module, name: str) -> nn.Module:
        if not isinstance(module, L.LightningModule):
            return module
        if name in dict(module.named_modules()):
            module = module.get_submodule(name)
        if type(module).forward is L.LightningModule.forward:
            raise TypeError(
                f"the teacher {type(module).__name__} has no forward, and no submodule {name!r}, which the student's "
                "step calls; give the part of it that takes the same inputs"
            )
        return module

    def release(self) -> None:
        """Restore modes and ``requires_grad`` of the module."""
        self._copies = {}
        modes, trainable = self._before
        for module, mode in modes:
            module.training = mode
        for parameter, requires_grad in trainable:
            parameter.requires_grad_(requires_grad)


def _describe(call: Call) -> str:
    tensors = [value for value in tree_leaves((call.args, call.kwargs)) if isinstance(value, torch.Tensor)]
    return ", ".join(f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}" for value in tensors)


def load_teacher(path: str | PathLike[str]) -> L.LightningModule:
    """Load the LightningModule of a checkpoint that names its class, as the command line writes it; without pickle.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it names no class, or one that is not imported.
    """
    settings = _read(path).get("hyper_parameters", {})
    class_path = settings.get("_class_path")
    if class_path is None:
        raise ValueError(
            f"{path} does not say which class it holds the weights of; give a module, teacher=MyModule(...), or "
            f"class_path and init_args in a config, and checkpoint={str(path)!r}"
        )
    if named := code_named_in({key: value for key, value in settings.items() if key != "_instantiator"}):
        raise ValueError(
            f"the teacher {path} names {', '.join(named[:5])}, which is not imported, or no class of a module; import "
            "it first if you trust its author, or give a module, teacher=MyModule(...)"
        )
    if class_path.startswith("lightning_accel."):
        package, _, name = class_path.rpartition(".")
        getattr(import_module(package), name)
    return L.LightningModule.load_from_checkpoint(Path(path), map_location="cpu", weights_only=True)


def load_weights(module: nn.Module, path: str | PathLike[str]) -> None:
    """Load a checkpoint of a Trainer, or a file of weights alone, into ``module``; without pickle.

    Raises:
        FileNotFoundError: if there is no such file.
        RuntimeError: if names or shapes differ; the message lists them.
    """
    content = _read(path)
    module.load_state_dict(content.get("state_dict", content))


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no checkpoint {path} of a teacher; name a .ckpt file, or write teacher='initial' for the student itself "
            "as it is when training starts, or 'dense' for it before it is pruned or quantized"
        )
    return read_checkpoint(Path(path))
