"""Subcommands ``lightning-accel {fit,validate,test,predict,export}``."""

import logging
import os
import re
import sys
import warnings
from argparse import SUPPRESS, ArgumentError
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerTypeTuple,
    ReduceLROnPlateau,
    instantiate_class,
)
from lightning.pytorch.utilities import rank_zero_info
from torch import optim
from torch.optim import Optimizer

import lightning_accel.precision
import lightning_accel.strategies  # noqa: F401  # registers their short names
from lightning_accel import data, models
from lightning_accel._private.lightning import leave_subcommand_empty, omit_unknown_epochs
from lightning_accel.callbacks import LowRankAdapters, PredictionWriter, Pruning, RunReport, Watchdog
from lightning_accel.callbacks.resume.schedule_length import planned_steps
from lightning_accel.callbacks.trainer_callbacks import callbacks_of
from lightning_accel.cli.checkpoints import (
    Checkpoint,
    find_checkpoint,
    folder_of_configs,
    resume_run,
    write_checkpoints_atomically,
)
from lightning_accel.cli.checks import (
    MonitorCheck,
    report_unused_schedule,
    require_data,
    require_even_processes,
    require_groups,
    require_seed,
    require_valid_values,
)
from lightning_accel.cli.errors import (
    UsageError,
    advice,
    explain,
    is_monitor_error,
    require_config_files,
    unwrap,
    where_raised,
)
from lightning_accel.cli.export import ExportingTrainer, rebuild_shapes, rebuilt_skeleton, require_output
from lightning_accel.cli.help_text import HelpText, arrange_help
from lightning_accel.cli.next_commands import next_commands
from lightning_accel.cli.run_folder import (
    ConfigSaver,
    RunLocks,
    remove_empty,
    remove_without_run,
    require_names,
    require_writable,
    reserve_run_folder,
    warn_of_other_folders,
)
from lightning_accel.compress import ExportError
from lightning_accel.ops.renames import new_names_of, rename, warn_of_old_name
from lightning_accel.strategies.checkpoints.atomic import NotWrittenError
from lightning_accel.strategies.rendezvous import leave_group_at_exit


class _Parser(LightningArgumentParser):
    """Parse renamed arguments by their old names, too; each class of a config has a parser of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpText, **kwargs})
        self._owner = ""
        self._new_names: dict[str, str] = {}
        self._may_be_null: set[str] = set()

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, **kwargs: Any) -> list[str]:
        if nested_key is None:
            self._owner, self._new_names = theclass.__name__, new_names_of(theclass)
            self._new_names |= {f"{old}+": f"{new}+" for old, new in self._new_names.items()}  # appends to a list
            self._may_be_null = set(_nullable_options(theclass))
        return super().add_class_arguments(theclass, nested_key, **kwargs)

    def format_help(self, *args: Any) -> str:
        self.usage = self.usage or SUPPRESS  # all options of a class are below it
        return super().format_help(*args)

    def parse_object(self, obj: Namespace | dict[str, Any], *args: Any, **kwargs: Any) -> Namespace:
        values = obj.as_dict() if isinstance(obj, Namespace) else obj  # vars() marks names of methods, as "values"
        if not self._new_names.keys().isdisjoint(values):
            obj = rename(values, self._new_names, self._owner)
        return super().parse_object(obj, *args, **kwargs)

    def parse_args(self, args: Iterable[str] | None = None, *more: Any, **kwargs: Any) -> Any:
        renamed = None if args is None else [self._renamed(argument) for argument in args]
        return super().parse_args(renamed and _name_optimizers(renamed), *more, **kwargs)

    def _renamed(self, argument: str) -> str:
        if argument.endswith("=None") and argument[2:-5] in self._may_be_null:
            return f"{argument[:-4]}null"  # the parser reads null, and passes it on as Python writes it
        name = re.match(r"--(\w+)", argument)
        if name is None or name[1] not in self._new_names:
            return argument
        new = self._new_names[name[1]]
        warn_of_old_name(name[1], new, self._owner)
        return f"--{new}{argument[name.end() :]}"


def _nullable_options(cls: type) -> Iterator[str]:
    """Yield the options of a class, as ``layout.step_column``, that are fields of a dataclass and may be None."""
    for name, parameter in signature(cls).parameters.items():
        if is_dataclass(parameter.default):
            yield from (f"{name}.{field.name}" for field in fields(parameter.default) if "None" in str(field.type))


def _name_optimizers(words: list[str]) -> list[str]:
    """Name torch's optimizers in full, since other packages, as bitsandbytes by peft, have some of the same names."""
    full = list(words)
    for place, word in enumerate(words):
        option, equals, name = word.rpartition("=") if word.startswith("--") else (words[max(0, place - 1)], "", word)
        if re.fullmatch(r"--(\w+\.)*optimizer", option) and name in optim.__all__:
            full[place] = f"{option}=torch.optim.{name}" if equals else f"torch.optim.{name}"
    return full


def _checkpoint_last(words: Sequence[str]) -> list[str]:
    """Move ``--ckpt_path`` to the end: a config of an earlier run has ``ckpt_path: null``, which overrides it there."""
    kept: list[str] = []
    moved: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word == "--ckpt_path":
            moved += [word, *(value for value in [next(remaining, None)] if value is not None)]
        else:
            (moved if word.startswith("--ckpt_path=") else kept).append(word)
    return kept + moved


class AccelCLI(LightningCLI):
    """Run any model and data class from configs, like LightningCLI with the following differences.

    The optimizer of ``--optimizer`` is created in ``configure_optimizers``, after the strategy has sharded the
    parameters, not before; ``--lr_interval step`` steps the scheduler every step. The model may be omitted if
    ``--ckpt_path`` names a checkpoint that records it; if both are given they must fit, and the config overrides the
    checkpoint's hyperparameters. ``--ckpt_path best`` and ``last`` are those of the run in whose folder the config
    lies, or else of the newest run under its log folder; ``fit --ckpt_path auto`` resumes the newest run of the log
    folder, in its folder, or starts the first. ``predict`` writes ``predictions.csv``, and ``export`` a file that runs
    without the model's class. Each subcommand saves its config under a separate name.

    Args:
        args: command line, by default the program's own.
        callbacks: callbacks to add to those of the config.

    Raises:
        argparse.ArgumentError: if the command line or a config does not fit the signatures it names.
        UsageError: if it fits, but cannot work.
    """

    def __init__(self, args: ArgsType = None, callbacks: Sequence[L.Callback] = ()) -> None:
        self._locks = RunLocks()
        self._created_folders: list[Path] = []
        words = sys.argv[1:] if args is None else args
        first = words[0] if isinstance(words, list) and words else None
        self._asked = first if first in self.subcommands() else None
        strict = {"prog": "lightning-accel", "allow_abbrev": False, "exit_on_error": False}
        try:
            super().__init__(
                save_config_callback=ConfigSaver,
                trainer_class=ExportingTrainer,
                trainer_defaults={"callbacks": list(callbacks)},
                seed_everything_default=0,
                parser_kwargs={**strict, **{name: dict(strict) for name in self.subcommands()}},
                parser_class=_Parser,
                auto_configure_optimizers=False,
                args=args,
            )
        except Exception:
            if self._created_folders and self.trainer.global_step == 0:
                remove_without_run(self._created_folders)
            raise
        finally:
            self._locks.release()
            remove_empty(self._created_folders)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "export": {"model", "datamodule"}}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Give options to the parser of the subcommand that the command line begins with; the others stay empty.

        After an option such as ``--config`` or in a dict, any subcommand may follow, and all parsers get theirs.
        """
        if self._asked in (None, subcommand):
            parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
            arrange_help(parser, subcommand)
            return parser
        leave_subcommand_empty(self, subcommand)
        return self.init_parser(**kwargs)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        for base, key, what, example, name in (
            (L.LightningModule, "model", "model", "my_file.MyModule", "RelationalGNN"),
            (L.LightningDataModule, "data", "datamodule", "my_file.MyData", "GraphDataModule"),
        ):
            parser.add_subclass_arguments(
                base,
                key,
                fail_untyped=False,
                required=False,
                help=f"class of the {what}: {name} (imported only when it is named) or one of those below by its name, "
                f"yours by its path, as {example}; --{key}.OPTION VALUE sets an argument of its constructor, which "
                f"--{key}.help CLASS lists.",
            )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_optimizer_args((Optimizer,))
        parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        parser.add_argument(
            "--lr_interval",
            type=Literal["epoch", "step"],
            default="epoch",
            help="when --lr_scheduler steps: after each epoch or after each optimizer step.",
        )
        parser.add_argument(
            "--run_report",
            type=bool,
            default=True,
            help="whether fit ends with a table of the run, a picture and run_report.json.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse; the parser finds a class of this package by its bare name only once that is imported."""

        def parse() -> Namespace:
            return parser.parse_object(args) if isinstance(args, dict | Namespace) else parser.parse_args(arguments)

        given = sys.argv[1:] if args is None else args if isinstance(args, list) else [str(args)]
        arguments = _checkpoint_last(given)
        _import_classes(arguments)
        try:
            self.config = parse()
        except ArgumentError:  # a name that a file names, or that is misspelt, of which the message tells the nearest
            _import_classes(arguments, all_of_them=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of old names, which the first parse gave
                self.config = parse()
        if "subcommand" in self.config:
            require_seed(self.config[self.config.subcommand].get("seed_everything"))

    def _parse_ckpt_path(self) -> None:
        """Read the checkpoint from ``--ckpt_path``; take the model from it if the config has none.

        This replaces LightningCLI's method, which lets the checkpoint's hyperparameters silently override the command
        line.
        """
        subcommand = self.config.subcommand
        config = self.config[subcommand]
        self.checkpoint = Checkpoint.read(config.ckpt_path, config.get("weights_only")) if config.ckpt_path else None
        if config.model is not None:
            return
        model = None if self.checkpoint is None else self.checkpoint.model_config()
        if model is None:
            raise UsageError(
                f"{subcommand} needs a model: --model MoEClassifier, --model my_file.MyModule, or a model: in a config"
                + (f"; {config.ckpt_path} does not say which model it holds" if self.checkpoint else "")
            )
        if subcommand == "fit":
            raise UsageError(
                f"to go on from {config.ckpt_path}, fit needs the model and the optimizer of its run: give --config "
                "with the config_fit.yaml of its folder"
            )
        self.config = self.parser.parse_object({subcommand: {"model": model}}, self.config)

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        require_groups(config)
        require_valid_values(config)
        if self.subcommand == "fit" and config.ckpt_path in ("best", "last"):
            raise UsageError(
                f"to resume, name the file, or give --ckpt_path auto, which goes on with the newest run of the log "
                f"folder; --ckpt_path {config.ckpt_path} is not for fit"
            )
        if self.subcommand != "fit" and config.ckpt_path == "auto":
            raise UsageError(f"--ckpt_path auto is for fit; give {self.subcommand} a file, best or last")
        if self.subcommand == "export":
            require_output(config.format or "auto", config.output)
        if config.lr_scheduler is not None and config.optimizer is None:
            raise UsageError("--lr_scheduler needs --optimizer, whose learning rate it changes; add the optimizer")
        if config.lr_interval == "step" and config.lr_scheduler is None:
            raise UsageError("--lr_interval step has no effect without --lr_scheduler; add the scheduler")

    def after_instantiate_classes(self) -> None:
        leave_group_at_exit()  # Lightning's own strategies do not
        require_data(self.subcommand, self.model, self.datamodule)
        require_names(self.trainer)
        require_even_processes(self.trainer)
        require_writable(self.trainer)
        config = self.config_init[self.subcommand]
        if self.subcommand == "fit":
            write_checkpoints_atomically(self.trainer)
            if config.ckpt_path == "auto":
                config.ckpt_path = resume_run(self.trainer, self._locks)
                if config.ckpt_path is not None:
                    self.checkpoint = Checkpoint.read(config.ckpt_path, config.get("weights_only"))
        warn_of_other_folders(self.trainer, self.config[self.subcommand].trainer.default_root_dir)
        self._created_folders = reserve_run_folder(self.trainer, self._locks)
        self._use_optimizer_of_config()
        if self.subcommand != "fit" and config.ckpt_path in ("best", "last"):
            wanted, weights_only = config.ckpt_path, config.get("weights_only")
            folder = folder_of_configs([str(each) for each in config.get("config") or []], self.trainer)
            config.ckpt_path, which = find_checkpoint(self.trainer, self.model, wanted, weights_only, folder)
            self.checkpoint = Checkpoint.read(config.ckpt_path, weights_only)
            reason = ", which monitored nothing" if which != wanted else ""
            run = "newest run" if folder is None else "config's run"
            rank_zero_info(f"{which} checkpoint of the {run}{reason}: {config.ckpt_path}")
        if self.subcommand != "fit" and config.ckpt_path is None:
            rank_zero_info(f"{self.subcommand} runs the weights that the model starts with: no --ckpt_path is given")
        if self.checkpoint is not None:
            model, content = self.model, self.checkpoint.content
            if self.subcommand == "fit":
                model = rebuilt_skeleton(self.trainer, model, content)
            else:
                rebuild_shapes(self.trainer, model, content)
            if not callbacks_of(self.trainer, LowRankAdapters):  # which changes the model in setup, and checks it
                self.checkpoint.require_fits(model, callbacks_of(self.trainer, Pruning))
            self.checkpoint = None  # the Trainer reads it again; this frees the memory

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if self.subcommand == "predict" and not any(
            isinstance(callback, BasePredictionWriter) for callback in callbacks
        ):
            callbacks.append(PredictionWriter())
        if self.subcommand == "fit":
            callbacks.append(MonitorCheck())
            omit_unknown_epochs(trainer)
            self._add_run_report(trainer)
        if not any(isinstance(callback, Watchdog) for callback in callbacks):
            callbacks.append(Watchdog())
        return trainer

    def _add_run_report(self, trainer: L.Trainer) -> None:
        reports = callbacks_of(trainer, RunReport)
        if not reports and self.config_init[self.subcommand].run_report:
            reports = [RunReport()]
            trainer.callbacks += reports  # type: ignore[attr-defined]  # set by a connector
        for report in reports:
            report.commands = next_commands

    def _use_optimizer_of_config(self) -> None:
        config = self.config_init[self.subcommand]
        if config.optimizer is None:
            return
        saved_length = None if self.checkpoint is None else self.checkpoint.schedule_length()

        def configure_optimizers(module: L.LightningModule) -> Any:
            optimizer = instantiate_class(module.parameters(), config.optimizer)
            if config.lr_scheduler is None:
                return optimizer
            scheduler = instantiate_class(optimizer, config.lr_scheduler)
            _require_long_enough(scheduler, module.trainer, config.lr_interval, saved_length)
            if saved_length is None:
                report_unused_schedule(scheduler, planned_steps(module.trainer, config.lr_interval), config.lr_interval)
            monitor = {"monitor": scheduler.monitor} if isinstance(scheduler, ReduceLROnPlateau) else {}
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": config.lr_interval, **monitor},
            }

        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)

    def after_fit(self) -> None:
        for keeper in self.trainer.checkpoint_callbacks:
            if isinstance(keeper, ModelCheckpoint) and keeper.best_model_path:
                score = keeper.best_model_score
                if score is not None and not score.isfinite():
                    rank_zero_info(
                        f"{keeper.monitor} was nan or infinite in every checkpoint, so that none is the best; "
                        f"{keeper.best_model_path} is one of them. Check the data, or lower the learning rate"
                    )
                    continue
                figure = "" if score is None else f" ({keeper.monitor} {score.item():.4g})"
                which = "last" if keeper.monitor is None else "best"
                rank_zero_info(f"{which} checkpoint: {keeper.best_model_path}{figure}")


def _import_classes(arguments: Sequence[str], all_of_them: bool = False) -> None:
    """Import the models and datamodules that arguments, or configs among them, mention."""
    files = [Path(argument.rpartition("=")[2]) for argument in arguments]
    texts = [file.read_text(errors="replace") for file in files if file.suffix in (".yaml", ".yml") and file.is_file()]
    words = set(re.findall(r"\w+", " ".join([*arguments, *texts])))
    for package in (data, models):
        for name in package.__all__:
            if all_of_them or name in words:
                with suppress(ModuleNotFoundError) if all_of_them else nullcontext():  # of an extra
                    getattr(package, name)


def _require_long_enough(scheduler: Any, trainer: L.Trainer, interval: str, saved_length: int | None) -> None:
    """Reject a schedule of fixed length (OneCycleLR) that would end, with an error from torch, in mid-run.

    A resumed run continues with the length that its checkpoint holds, ``saved_length``.
    """
    total = getattr(scheduler, "total_steps", None)
    if total is None:
        return
    name, steps = type(scheduler).__name__, planned_steps(trainer, interval)
    needed = f"but the run takes {steps:.0f} of its lr_interval, {interval!r}"
    if total < steps < float("inf"):
        raise UsageError(f"{name} ends after {total} steps, {needed}; give the scheduler the length of the run")
    if saved_length is not None and saved_length < steps < float("inf"):
        limit = "max_steps" if interval == "step" else "max_epochs"
        raise UsageError(
            f"a resumed run goes on with the {name} of its checkpoint, which ends after {saved_length} steps, "
            f"{needed}; end it there with --trainer.{limit} {saved_length}, or train anew, without --ckpt_path"
        )


class _Progress(L.Callback):
    """Track whether the user's data and model are running, in which case errors keep their traceback."""

    started = False

    def _start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.started = True

    def _pause(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.started = False  # errors that callbacks raise at the start of training concern the config

    def _resume(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.started = True

    on_sanity_check_start = _start
    on_sanity_check_end = _pause
    on_train_batch_start = _resume
    on_validation_start = _start
    on_test_start = _start
    on_predict_start = _start


def run(arguments: Sequence[str], cli: Callable[[list[str], list[L.Callback]], object] = AccelCLI) -> int:
    """Run a command line; reduce an error before the first batch to one message on stderr and a nonzero status.

    An error in mid-run keeps its traceback, which the author of a module needs. With ``--debug`` all errors do.

    Args:
        arguments: the command line.
        cli: what parses and runs it, with callbacks for its Trainer.
    """
    if (folder := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)  # as under python -m: finds the user's modules beside the config
    _filter_messages()
    progress = _Progress()
    command = [argument for argument in arguments if argument != "--debug"]
    if len(command) < len(arguments):
        cli(command, [progress])
        return 0
    try:
        require_config_files(command)
        cli(command, [progress])
    except SystemExit as stop:  # --help and --print_config have printed their output
        if isinstance(stop.code, str):
            return _fail(stop.code, status=1)
        return stop.code or 0
    except ArgumentError as error:
        return _fail(explain(error.message), status=2)
    except UsageError as error:
        return _fail(str(error), status=2)
    except (ExportError, NotWrittenError) as error:
        return _fail(str(error), status=1)
    except Exception as error:
        if progress.started and not (is_monitor_error(error) or advice(str(error))):
            raise
        cause = unwrap(error)
        message = str(cause) or type(cause).__name__
        where = f"({where_raised(cause)}; --debug shows the traceback)"
        return _fail(f"{message}{advice(message)}\n{where}", status=1)
    return 0


def _filter_messages() -> None:
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_tip)
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec", category=FutureWarning)  # from Lightning's code
    # validate, test and predict restore the callbacks of fit, in another run folder
    warnings.filterwarnings("ignore", message="The dirpath has changed from", category=UserWarning)
    if not isinstance(warnings.formatwarning, _WithoutPlace):
        warnings.formatwarning = _WithoutPlace(warnings.formatwarning)


class _WithoutPlace:
    """Format warnings of this package without their place in its code, which tells a user nothing."""

    def __init__(self, others: Callable[..., str]) -> None:
        self.others = others

    def __call__(self, message: Warning | str, category: type, filename: str, *args: Any, **kwargs: Any) -> str:
        if Path(filename).is_relative_to(Path(__file__).parents[1]):
            return f"warning: {message}\n"
        return self.others(message, category, filename, *args, **kwargs)


def _is_no_tip(record: logging.LogRecord) -> bool:
    return "💡 Tip" not in record.getMessage()


def _fail(message: str, status: int) -> int:
    print(f"lightning-accel: error: {message}", file=sys.stderr)
    return status
