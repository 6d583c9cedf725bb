"""Texts of ``lightning-accel fit --help`` and ``fit --model.help CLASS``."""

import re
from argparse import Action
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry

from lightning_accel._private.others import arrange_options, set_help

_SECTIONS: Mapping[str, Sequence[str]] = {
    "run": (
        *("help", "config", "print_config", "ckpt_path", "weights_only", "seed_everything", "run_report"),
        *("verbose", "return_predictions"),
    ),
    "export": ("format", "output", "preprocess", "probabilities", "compare"),
    "model and data": ("model", "data"),
    "optimizer": ("optimizer", "lr_scheduler", "lr_interval"),
    "trainer: length of the run": (
        *("trainer.max_epochs", "trainer.max_steps", "trainer.min_epochs", "trainer.min_steps", "trainer.max_time"),
        *(f"trainer.limit_{part}_batches" for part in ("train", "val", "test", "predict")),
        *("trainer.overfit_batches", "trainer.fast_dev_run"),
    ),
    "trainer: devices, processes and precision": (
        *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.precision"),
        *("trainer.plugins", "trainer.sync_batchnorm", "trainer.use_distributed_sampler"),
    ),
    "trainer: gradients": (
        *("trainer.accumulate_grad_batches", "trainer.gradient_clip_val", "trainer.gradient_clip_algorithm"),
    ),
    "trainer: validation": (
        *("trainer.val_check_interval", "trainer.check_val_every_n_epoch", "trainer.num_sanity_val_steps"),
    ),
    "trainer: callbacks, logs and checkpoints": (
        *("trainer.callbacks", "trainer.logger", "trainer.log_every_n_steps", "trainer.default_root_dir"),
        *(f"trainer.enable_{part}" for part in ("checkpointing", "progress_bar", "model_summary", "autolog_hparams")),
    ),
    "trainer: repetition and debugging": (
        *("trainer.deterministic", "trainer.benchmark", "trainer.detect_anomaly", "trainer.profiler"),
    ),
}
_TO_RESUME = (
    "checkpoint file to resume from; auto continues the newest run of the log folder, in its folder, or begins the "
    "first one"
)
_TO_RUN = (
    "checkpoint file whose weights to run; best or last takes that checkpoint of the run in whose folder the config "
    "lies, or else of the newest run of its log folder. Without it the model runs with the weights that it starts with"
)
_WEIGHTS_ONLY = (
    "true reads tensors and plain values alone from the checkpoint; false reads objects of any class, too, which can "
    "run code: for files that you trust"
)
_STRATEGY = (
    "how the model and the batches are distributed over processes and devices: auto, a name of Lightning's such as ddp "
    "or fsdp, or {names}; a class and its arguments are given by class_path and init_args in a config"
)
_BASES = {"LightningModule", "LightningDataModule", "Callback", "Optimizer", "LRScheduler", "Module"}
_MOST_CLASSES = 100  # a list that is longer, as that of torch.nn.Module, has nothing to choose from


class HelpText(DefaultHelpFormatter):
    """Format help without the markup of docstrings, and with classes that can be chosen, by their short names."""

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and _without_markup(heading))

    def add_text(self, text: str | None) -> None:
        super().add_text(text and _without_markup(text))

    def _expand_help(self, action: Action) -> str:
        text, _, classes = super()._expand_help(action).partition(", known subclasses: ")
        classes = classes and _choices(
            classes.rstrip(")").split(", "), " by class_path" if "Union[str, " in text else ""
        )
        return _without_markup(text) + classes


def arrange_help(parser: LightningArgumentParser, subcommand: str) -> None:
    """Arrange the options of a subcommand by subject, the most used first, below a usage of one line."""
    parser.usage = f"lightning-accel {subcommand} [--config FILE] [--model CLASS] [--data CLASS] [--OPTION VALUE ...]"
    set_help(parser, "ckpt_path", _TO_RESUME if subcommand == "fit" else _TO_RUN)
    set_help(parser, "weights_only", _WEIGHTS_ONLY)
    names = [name for name in StrategyRegistry.available_strategies() if name.startswith("accel_")]
    set_help(parser, "trainer.strategy", _STRATEGY.format(names=", ".join(names)))
    arrange_options(parser, _SECTIONS, "trainer: other options")


def _without_markup(text: str) -> str:
    """Replace reST in a docstring by the words that it marks."""
    text = re.sub(r":[a-z]+:`~(?:[\w.]+\.)?(\w+)`", r"\1", text)
    text = re.sub(r":[a-z]+:`([^`]*)`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<(https?://[^>]+)>`_+", r"\1 (\2)", text)
    return text.replace("``", "`")


def _choices(paths: Sequence[str], where: str) -> str:
    """Return the end of the text of an option that takes an object: the classes that are public, if they are few."""
    public = [path for path in paths if path.rpartition(".")[2] not in _BASES and _is_public(path)]
    if not 0 < len(public) <= _MOST_CLASSES:
        return ")"
    names = [path.rpartition(".")[2] for path in public]
    counts = Counter(names)
    shown = [name if counts[name] == 1 else path for name, path in zip(names, public, strict=True)]
    return f"; classes{where}: {', '.join(shown)})"


def _is_public(path: str) -> bool:
    """Return whether the module that ``path`` names a class of exports it; other packages may export as they like."""
    module, _, name = path.rpartition(".")
    return not module.startswith("lightning_accel") or name in getattr(import_module(module), "__all__", ())
