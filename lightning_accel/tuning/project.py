"""What is tuned, named so that another process can run it, and the changes that it runs with."""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ProgressBar

from lightning_accel import precision
from lightning_accel.callbacks.batching import Batching
from lightning_accel.callbacks.ddp_settings import DDPSettings
from lightning_accel.callbacks.memory_savings import MemorySavings
from lightning_accel.callbacks.pruning.semi_structured import SemiStructuredSparsity
from lightning_accel.callbacks.speedups import Speedups
from lightning_accel.measure import isolate, make_run
from lightning_accel.tuning.serving import serve_isolated

if TYPE_CHECKING:
    from lightning_accel.planning.simulation import Fit


@dataclass(frozen=True)
class Changes:
    """Hold what a variant of a run does otherwise.

    Attributes:
        trainer: arguments of the Trainer.
        speedups: arguments of :class:`lightning_accel.callbacks.Speedups`.
        savings: arguments of :class:`lightning_accel.callbacks.MemorySavings`.
        ddp: arguments of :class:`lightning_accel.callbacks.DDPSettings`.
        batching: arguments of :class:`lightning_accel.callbacks.Batching`.
        sparsity: arguments of :class:`lightning_accel.callbacks.SemiStructuredSparsity`.
        precision: class of :mod:`lightning_accel.precision` that is the Trainer's plug-in, and its arguments.
    """

    trainer: dict[str, Any] = field(default_factory=dict)
    speedups: dict[str, Any] = field(default_factory=dict)
    savings: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    batching: dict[str, Any] = field(default_factory=dict)
    sparsity: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __or__(self, other: "Changes") -> "Changes":
        return Changes(
            self.trainer | other.trainer,
            self.speedups | other.speedups,
            self.savings | other.savings,
            self.ddp | other.ddp,
            self.batching | other.batching,
            self.sparsity | other.sparsity,
            self.precision | other.precision,
        )

    def trainer_options(self) -> dict[str, Any]:
        """Return arguments of the Trainer, which takes a plug-in in place of ``precision``."""
        plugins = [getattr(precision, name)(**arguments) for name, arguments in self.precision.items()]
        return self.trainer | ({"precision": None, "plugins": plugins} if plugins else {})

    def callbacks(self) -> list[L.Callback]:
        """Return the callbacks that apply what is no argument of the Trainer."""
        return [kind(**arguments) for kind, arguments in self._given()]

    def config(self) -> dict[str, Any]:
        """Return the overlay of a config that makes the changes."""
        callbacks = [
            {"class_path": f"lightning_accel.callbacks.{kind.__name__}", "init_args": arguments}
            for kind, arguments in self._given()
        ]
        plugins = [
            {"class_path": f"lightning_accel.precision.{name}", "init_args": arguments}
            for name, arguments in self.precision.items()
        ]
        appended = {"callbacks+": callbacks} if callbacks else {}
        return {"trainer": self.trainer | ({"precision": None, "plugins+": plugins} if plugins else {}) | appended}

    def _given(self) -> list[tuple[type[L.Callback], dict[str, Any]]]:
        kinds: list[tuple[type[L.Callback], dict[str, Any]]] = [
            (DDPSettings, self.ddp),
            (MemorySavings, self.savings),
            (Speedups, self.speedups),
            (Batching, self.batching),
            (SemiStructuredSparsity, self.sparsity),
        ]
        return [(kind, arguments) for kind, arguments in kinds if arguments]


@dataclass(frozen=True)
class Project:
    """Name a function that fits something, or uses it, and its arguments.

    Attributes:
        runner: ``package.module:function``; called as ``function(changes, callbacks, folder, seed, **arguments)``, it
            fits with the changes and callbacks, and writes only into the folder. Given ``fit=``, it calls that with the
            Trainer, the module and the data in place of a fit.
        arguments: further arguments, of plain values; with ``serves``, samples go through the model one by one in place
            of a fit.
    """

    runner: str
    arguments: dict[str, Any]

    def fit(
        self, changes: Changes, callbacks: Sequence[L.Callback], folder: Path, seed: int, fit: "Fit | None" = None
    ) -> None:
        """Fit, or call ``fit`` with the Trainer, the module and the data in place of it."""
        in_its_place = {} if fit is None else {"fit": fit}
        find_function(self.runner)(changes, callbacks, folder, seed, **self.arguments, **in_its_place)

    @property
    def serves(self) -> bool:
        return bool(self.arguments.get("serves"))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def project_of(make: Callable[..., Any]) -> Project:
    """Return the project of a function ``make(**trainer_options)`` that returns (trainer, module, data).

    Raises:
        ValueError: if other processes cannot import the function, or if it takes no options for the Trainer.
    """
    file = None if "<locals>" in make.__qualname__ or make.__name__ == "<lambda>" else inspect.getsourcefile(make)
    if file is None or not Path(file).is_file():
        raise ValueError(
            f"tune runs {make.__qualname__} in processes of their own, which import it from its file: define it at the "
            "top level of a .py file (in a notebook, write one by %%writefile), and give tune the function from there"
        )
    if not any(one.kind is one.VAR_KEYWORD for one in inspect.signature(make).parameters.values()):
        raise ValueError(
            f"{make.__qualname__} takes no further options, and so no trial could change the run: define it as "
            f"{make.__name__}(**options), and pass them on, Trainer(**options)"
        )
    return Project("lightning_accel.tuning.project:fit_made", {"make": f"{Path(file).resolve()}:{make.__qualname__}"})


def require_run(make: Callable[..., Any]) -> None:
    """Call a function once as trials do, with an option of the Trainer, before time is spent on it.

    Raises:
        TypeError: if it does not return a run, or does not pass the option on.
    """
    option = {"precision": "32-true"}
    call = f"{make.__name__}(precision='32-true')"
    mend = f"trials change the run by options, as {call}; let these come last, Trainer(**{{'max_epochs': 1}} | options)"
    trainer = None
    try:
        trainer, _, _ = make_run(make, option)
    except TypeError as error:
        if re.search("keyword argument '?precision", str(error)):
            raise TypeError(f"{error}: {mend}") from error
        raise
    except Exception:  # a plug-in of its own may exclude the option
        pass
    if trainer is None:
        make_run(make, {})  # raises what it raises itself
    elif trainer.precision != option["precision"]:
        raise TypeError(f"the Trainer of {make.__qualname__} has the precision {trainer.precision}: {mend}")


def fit_made(
    changes: Changes,
    callbacks: Sequence[L.Callback],
    folder: Path,
    seed: int,
    make: str,
    serves: bool = False,
    fit: "Fit | None" = None,
) -> None:
    """Fit what a function of the user returns, use it on single samples, or call ``fit`` with it.

    Raises:
        TypeError: if it does not return a Trainer, a LightningModule and data.
    """
    L.seed_everything(seed, workers=True, verbose=False)
    trainer, module, data = make_run(find_function(make), changes.trainer_options())
    trainer.callbacks = [*trainer.callbacks, *changes.callbacks(), *callbacks]  # type: ignore[attr-defined]
    (fit or partial(serve_isolated if serves else fit_isolated, folder=folder))(trainer, module, data)


def fit_isolated(trainer: L.Trainer, module: L.LightningModule, data: Any, folder: Path) -> None:
    """Fit without progress bars, early stopping and files outside of a folder, validating on one batch.

    Args:
        trainer: the user's.
        module: the module.
        data: a datamodule or DataLoader, None if the module has its own.
        folder: where loggers of files and callbacks write.
    """
    isolate(trainer, folder, max_val_batches=1)
    kept = [one for one in trainer.callbacks if not isinstance(one, EarlyStopping | ProgressBar)]  # type: ignore[attr-defined]
    trainer.callbacks = kept  # type: ignore[attr-defined]
    trainer.num_sanity_val_steps = 0
    loaders = {"datamodule": data} if isinstance(data, L.LightningDataModule) else {"train_dataloaders": data}
    trainer.fit(module, **loaders)


def find_function(path: str) -> Callable[..., Any]:
    """Return the function of ``package.module:name`` or ``/folder/file.py:name``."""
    place, _, name = path.rpartition(":")
    module: Any = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    return getattr(module, name)


def _module_of_file(file: Path) -> ModuleType:
    """Import a file by its own name, as a script beside it would, whose ``__main__`` part does not run."""
    if (folder := str(file.parent)) not in sys.path:
        sys.path.insert(0, folder)
    if file.stem in sys.modules and getattr(sys.modules[file.stem], "__file__", None) == str(file):
        return sys.modules[file.stem]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # workers of DataLoaders find its classes by this name
    spec.loader.exec_module(module)
    return module
