"""Error messages of the command line, each in one line that suggests the nearest valid name."""

import difflib
import errno
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

import lightning as L
import yaml
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_accel.cli.shipped_configs import shipped_configs
from lightning_accel.ops.options import options_of

_TOP_LEVEL = {"config", "data", "lr_interval", "lr_scheduler", "model", "optimizer", "print_config", "seed_everything"}
_SUBCOMMANDS = ("fit", "validate", "test", "predict")  # methods of every Trainer
_OTHER_SUBCOMMANDS = ("tune", "plan", "doctor", "build-ops")
_NAMES_ELSEWHERE = {"train": "fit", "eval": "validate", "evaluate": "validate", "infer": "predict"}
_EXPORT_OPTIONS = {"compare", "format", "output", "preprocess", "probabilities"}
_CLASSES_OF = {
    "data": L.LightningDataModule,
    "lr_scheduler": LRScheduler,
    "model": L.LightningModule,
    "optimizer": Optimizer,
    "trainer.callbacks": L.Callback,
    "trainer.logger": Logger,
    "trainer.plugins": Precision,
    "trainer.profiler": Profiler,
    "trainer.strategy": Strategy,
}
_BASE_NAMES = {base.__name__ for base in _CLASSES_OF.values()}


class UsageError(Exception):
    """Report a command that cannot work; the message says what was needed, what was found and what to do."""


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return a question that offers the candidate nearest to ``word``, or an empty string.

    >>> nearest("max_epoch", ["max_epochs", "min_steps"])
    "; did you mean 'max_epochs'?"
    """
    found = difflib.get_close_matches(word, list(candidates), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def require_config_files(arguments: Sequence[str]) -> None:
    """Read every ``--config`` once, since the parser's own errors name neither file nor line.

    Raises:
        UsageError: if a file does not exist or is not a YAML mapping.
    """
    for position, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option not in ("--config", "-c"):
            continue
        if not equals:
            value = arguments[position + 1] if position + 1 < len(arguments) else ""
        _require_config_file(Path(value))


def _require_config_file(path: Path) -> None:
    if str(path) == ".":  # --config without a value, which the parser reports
        return
    if not path.is_file():
        beside = path.parent.glob("*.y*ml") if path.parent.is_dir() else []
        is_name = path.parent in (Path(), Path("configs"))
        others = f"; the package has {', '.join(shipped_configs())}" if is_name else ""
        hint = nearest(str(path), [*map(str, beside), *(shipped_configs() if is_name else ())])
        raise UsageError(f"no config file {path}{hint or others}")
    try:
        with path.open() as file:
            content = yaml.load(file, _StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"config {path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        held = "nothing" if content is None else f"{content!r:.60}"
        raise UsageError(f"config {path} must be a mapping such as 'trainer: {{max_epochs: 5}}'; it holds {held}")


class _StrictLoader(yaml.SafeLoader):
    """Load YAML, rejecting duplicate keys, of which the parser's own loader silently keeps the last."""

    def get_single_node(self) -> yaml.Node | None:
        root: yaml.Node | None = super().get_single_node()
        for mapping in _mappings(root):  # before merge keys (<<) add the keys of one mapping to another
            _require_unique_keys(mapping)
        return root


def _mappings(root: yaml.Node | None) -> Iterator[yaml.MappingNode]:
    """Yield every mapping once: the node of an anchor may occur in several places, even within itself."""
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield node
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _require_unique_keys(mapping: yaml.MappingNode) -> None:
    seen = set()
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        if (key.tag, key.value) in seen:
            raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands twice", problem_mark=key.start_mark)
        seen.add((key.tag, key.value))  # the tag distinguishes 1 from '1'


def explain(message: str) -> str:
    """Explain a message of the argument parser.

    A recognized message is reduced to one line with the nearest valid name; any other keeps its text, without listings.
    """
    problem, message = _broken_module(message), _until_first_problem(message)
    where = ".".join(re.findall(r'Parser key "([^"]+)"', message.partition("Unable to load config")[0]))
    classes = re.findall(r"Problem with given class_path '([^']+)'", message)
    if found := re.search(r"Unable to load config '(.*)'", message):
        return not_options(where, found[1], import_class(classes[-1]) if classes else None)
    if grouped := _rejected_option(message):
        return _unknown_parameter(where, *grouped)
    if found := re.search(r"sub-config file (\S+\.py)\b", message):
        return _no_such_class(where, found[1])
    if found := re.search(r"[Uu]nrecognized arguments: (.+)", message):
        words = [word for word in found[1].split() if word.startswith("-")]
        return "; ".join(map(_unknown_word, words)) or f"unexpected {found[1]}"
    if found := re.search(r"does not accept (?:option|nested key) '([^']+)'", message):
        return _unknown_option(found[1])
    if found := re.search(r"invalid choice: '([^']+)' \(choose from (.+)\)", message):
        choices = [*re.findall(r"\w+", found[2]), *_OTHER_SUBCOMMANDS]
        meant = _NAMES_ELSEWHERE.get(found[1])
        hint = nearest(found[1], choices) if meant is None else f"; did you mean {meant!r}?"
        return f"no subcommand {found[1]!r}{hint}\nThere are: {', '.join(choices)}"
    if problem:
        return f"{where}: {problem}"
    if refused := _rejected_parameter(message):
        return _given_by_caller(where, *refused, classes) or _unknown_parameter(where, *refused)
    if _base_class(where) and not classes and (name := _nested_key(message)):
        return _no_class(where, name)
    if found := re.search(r"No module named '([^']+)'", message):
        files = [path.stem for path in Path.cwd().glob("*.py")]
        return f"{where}: no module {found[1]!r}{nearest(found[1], files)}\nYour own are looked for in {Path.cwd()}"
    if found := re.search(r"module '([^']+)' has no attribute '([^']+)'", message):
        hint = nearest(found[2], dir(sys.modules.get(found[1])))
        if found[2] == "py":
            hint = f"; leave out .py, as in {found[1]}.MyClass"
        return f"{where}: module {found[1]} has no {found[2]!r}{hint}"
    if classes and (found := re.search(r"arguments are required: (.+)", message)):
        missing = [f"{where}.{name.strip()}" for name in found[1].split(",")]
        options = " ".join(f"--{name} ..." for name in missing)
        return (
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing for {classes[-1]}\n"
            f"Add {options}; lightning-accel fit --{where}.help {classes[-1].rpartition('.')[2]} lists all options"
        )
    if found := re.search(r"does not correspond to a subclass of (\S+)", message):
        return f"{where}: expected a {found[1]}, got {_given_value(message)}"
    looked_up = re.search(r"(?:Expected a dot import path string|Unexpected import path format): (\S+)", message)
    if looked_up and (_base_class(where) or not _expected_types(message)):
        name = looked_up[1]
        return _no_such_class(where, name)
    if kinds := _expected_types(message):
        value, words = _given_value(message), re.findall(r"'([^']+)'", kinds)
        return f"{where}: expected {kinds}; got {value}{nearest(value, words)}"
    return without_listings(message)


def _until_first_problem(message: str) -> str:
    """Cut ``message`` after its first problem with a class that a user named, which is then tried as other types."""
    lines = message.splitlines()
    for number, line in enumerate(lines):
        found = re.match(r"( *)- Problem with given class_path '([^']+)'", line)
        if found and found[2].rpartition(".")[2] not in _BASE_NAMES:
            after = range(number + 1, len(lines))
            end = next((n for n in after if lines[n] and not lines[n].startswith(f"{found[1]}  ")), len(lines))
            return "\n".join(lines[:end])
    return message


def _no_such_class(where: str, name: str) -> str:
    """Return the message for a name of no class, which may be a file of the user's own that has some."""
    file, _, named = name.partition(".py")
    path = Path(f"{file}.py")
    text = path.read_text(errors="ignore") if path.parent == Path() and path.is_file() else ""
    classes = re.findall(r"^class (\w+)", text, re.MULTILINE)
    wanted = [one for one in classes if one == named.strip(":./")] or classes
    if wanted:
        return f"{where}: no class {name!r}\nName one of {path}: {' or '.join(f'{path.stem}.{one}' for one in wanted)}"
    return f"{where}: no class {name!r}{_nearest_class(where, name)}\nName your own as in my_file.MyClass"


def not_options(where: str, value: object, cls: type | None) -> str:
    """Return the message for one value in place of a group of options, which is an argument of ``cls``, if given."""
    name = where.rpartition(".")[2]
    of_group = [] if cls is None else [one for one in _parameters(cls) if one.startswith(f"{name}.")]
    known = f"\nIt has: {', '.join(one.removeprefix(f'{name}.') for one in of_group)}" if of_group else ""
    return f"{where}: expected options, --{where}.OPTION VALUE or a mapping in a config; got {value}{known}"


def _broken_module(message: str) -> str:
    """Return why the module of the class in ``message`` cannot be imported; empty if it can."""
    for class_path in re.findall(r"Given value: ([\w.]+)$|'class_path': '([\w.]+)'", message, re.MULTILINE):
        module = "".join(class_path).rpartition(".")[0]
        try:
            import_module(module or "builtins")
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                return f"{module} needs the module {error.name!r}, which is not installed ({where_raised(error)})"
        except Exception as error:
            return f"{module} cannot be imported: {error}\n({where_raised(error)})"
    return ""


def _rejected_parameter(message: str) -> tuple[str, str] | None:
    """Return the class and the parameter that it does not accept; the base class only if no other was tried."""
    pairs = re.findall(
        r"class_path '([^']+)':(?:(?!class_path ').)*?Option '([^']+)' is not accepted(?:[^\n]+class_path='([^']+)')?",
        message,
        re.DOTALL,
    )
    named = [(inner or outer, name) for outer, name, inner in pairs]
    return next((pair for pair in named if pair[0].rpartition(".")[2] not in _BASE_NAMES), named[0] if named else None)


def _rejected_option(message: str) -> tuple[str, str] | None:
    """Return the class and the option, ``group.option``, that the group's dataclass lacks."""
    found = re.search(
        r"class_path '([^']+)':\s+(?:unrecognized arguments: --([\w.]+)"
        r"|Group '([\w.]+)' does not accept option '(\w+)')",
        message,
    )
    return None if found is None else (found[1], found[2] or f"{found[3]}.{found[4]}")


def _given_value(message: str) -> str:
    found = re.search(r"(?:Given|Got) value: (.+?)(?:\. Got value: .+)?$", message, re.MULTILINE)
    return "" if found is None else found[1]


def _nested_key(message: str) -> str:
    """Return the argument given to an option for which no class was named."""
    found = re.search(r"Given value: (?:NestedArg\(key=|\{)'(?!class_path'|init_args')([^']+)'", message)
    return "" if found is None else found[1]


def _expected_types(message: str) -> str:
    """Return the types that a value was checked against, joined by 'or'; empty if a class was expected."""
    found = re.findall(r"Expected an? (.+?)(?:\. Got value: .+)?$", message, re.MULTILINE)
    types = [name for name in found if not re.search(r"NoneType|path but|dot import path", name)]
    return " or ".join(dict.fromkeys(_plain_type(name) for name in types))


def _plain_type(name: str) -> str:
    """Return a type as a user writes it.

    >>> _plain_type("<class 'int'>"), _plain_type("typing.Literal['min', 'max']")
    ('int', "'min' or 'max'")
    """
    if found := re.fullmatch(r"<class '(.+)'>", name):
        return "list" if found[1].startswith("collections.abc.") else found[1]
    if found := re.fullmatch(r"typing\.Literal\[(.+)\]", name):
        return found[1].replace(", ", " or ")
    return name


def without_listings(message: str) -> str:
    """Return a parser's ``message`` without the types that were tried and the full values."""
    noise = ("Given value", "Does not validate", "Subtypes:", "Errors:", "Expected a <class 'NoneType'>")
    lines = [line.strip(" -") for line in message.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith(noise))


def _unknown_word(word: str) -> str:
    if not word.startswith("--"):
        return f"no option {word!r}; did you mean '-{word}'?"
    return _unknown_option(word[2:].split("=")[0])


def _unknown_option(option: str) -> str:
    """Name the first part of a dotted ``option`` that does not exist, and suggest an existing one."""
    known = _known_options()
    if option in _EXPORT_OPTIONS:
        return f"option {option!r} comes after the subcommand export, and belongs to no other"
    if owners := [name for name in _SUBCOMMANDS if option in inspect.signature(getattr(L.Trainer, name)).parameters]:
        return f"option {option!r} comes after a subcommand, and belongs to {', '.join(owners)}"
    if option in known:
        return f"option {option!r} comes after the subcommand: lightning-accel fit --{option} ..."
    parts = option.split(".")
    wrong = next((prefix for n in range(1, len(parts) + 1) if (prefix := ".".join(parts[:n])) not in known), option)
    parent = wrong.rpartition(".")[0]
    siblings = [name for name in known if name.rpartition(".")[0] == parent]
    elsewhere = [name for name in known if name.rpartition(".")[2] == parts[-1]]
    hint = nearest(wrong, siblings) or (f"; did you mean {elsewhere[0]!r}?" if elsewhere else "")
    return f"no option {wrong!r}{hint}"


def _known_options() -> set[str]:
    of_methods = {name for each in _SUBCOMMANDS for name in inspect.signature(getattr(L.Trainer, each)).parameters}
    of_trainer = {f"trainer.{name}" for name in inspect.signature(L.Trainer).parameters}
    return _TOP_LEVEL | _EXPORT_OPTIONS | {"trainer"} | of_trainer | (of_methods - {"self", "datamodule"})


def _unknown_parameter(where: str, class_path: str, name: str) -> str:
    cls = import_class(class_path)
    if cls in _CLASSES_OF.values():  # a base class: the user named no class
        return _no_class(where, name)
    options = _parameters(cls)
    in_groups = {option.rpartition(".")[2]: option for option in options}
    hint = nearest(name, options) if name not in in_groups else f"; did you mean {in_groups[name]!r}?"
    return f"{where}: {class_path} has no option {name!r}{hint}\nIt has: {', '.join(options)}"


def _given_by_caller(where: str, class_path: str, name: str, classes: Sequence[str]) -> str:
    """Return the message for an argument that the maker of a part gives it; empty if it is none."""
    if not classes or classes[-1] == class_path or name not in _parameters(import_class(class_path)):
        return ""
    ends = [option for option in _parameters(import_class(classes[-1])) if option.rpartition(".")[2] == name]
    hint = f"; did you mean '{where.rpartition('.')[0]}.{ends[0]}'?" if ends else ""
    return f"{where}: {classes[-1]} gives {class_path} its {name!r}{hint}"


def import_class(class_path: str) -> type:
    module, _, name = class_path.rpartition(".")
    cls: type = getattr(import_module(module), name)
    return cls


def _no_class(where: str, name: str) -> str:
    hint = nearest(name.split(".")[0], ["class_path", "init_args"])
    return f"{where}: {name!r} belongs to no class{hint}\nName the class: --{where} CLASS, or class_path in a config"


def _parameters(cls: type) -> list[str]:
    """Return the parameters of the constructor and of base classes it passes them to, and options of dataclasses."""
    names: dict[str, None] = {}
    for base in cls.__mro__[:-1]:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names |= dict.fromkeys(name for p in named for name in _option_names(p))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(names)


def _option_names(parameter: inspect.Parameter) -> list[str]:
    options = options_of(parameter.default) if is_dataclass(parameter.default) else {}
    return [f"{parameter.name}.{option}" for option in options] or [parameter.name]


def _base_class(where: str) -> type | None:
    return next((cls for key, cls in _CLASSES_OF.items() if where.endswith(key)), None)


def _nearest_class(where: str, name: str) -> str:
    base = _base_class(where)
    return "" if base is None else nearest(name, {cls.__name__ for cls in _subclasses(base)})


def _subclasses(cls: type) -> set[type]:
    children: list[type] = cls.__subclasses__()
    return {found for child in children for found in {child, *_subclasses(child)}}


def unwrap(error: BaseException) -> BaseException:
    """Return the error that a constructor raised, from within the errors that the parser wraps it in."""
    wrappers = ("Does not validate against any", "Problem with given class_path")
    whole = str(error)
    while error.__cause__ is not None and str(error).startswith(wrappers):
        error = error.__cause__
    if str(error).startswith("Not a valid subclass"):  # a list was tried as one class first
        found = re.search(r"Problem with given class_path ('[^']+':\n.+?)(?=\n  - |\nGiven value|$)", whole, re.DOTALL)
        return error if found is None else ValueError(" ".join(found[1].split()))
    return error


def is_monitor_error(error: BaseException) -> bool:
    """Return whether ``error`` is about a monitored metric that is not logged, which only shows in mid-run."""
    return bool(re.search(r"monitored key|conditioned on metric|is not logged|which .* does not log", str(error)))


def advice(message: str) -> str:
    """Return what to do about an error that does not say it, on a line of its own, or an empty string."""
    if os.strerror(errno.ENOSPC) in message:
        return (
            "\nMake room on the disk of the run folder, or give another by --trainer.default_root_dir; temporary files "
            "are in the folder that TMPDIR names"
        )
    if re.search(r"monitored key|conditioned on metric", message):
        return "\nLog it with self.log(..., on_epoch=True), which is not the default of training_step"
    if found := re.search(r"more than one stateful callback of type `(\w+)`", message):
        return f"\nThe Trainer takes one {found[1]}: leave out one of those in configs and on the command line"
    if "primitive descriptor for the LSTM" not in message:
        return ""
    return (
        "\nThis CPU runs no nn.LSTM on float32 inputs in the lower precision of trainer.precision. Give 32-true, which "
        "is faster without units for that precision, or the callback Speedups with fused_rnn: true"
    )


def where_raised(error: BaseException) -> str:
    """Return the error's type and the innermost line of the user's code that raised it."""
    libraries = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    place = f" in {own[-1].filename}, line {own[-1].lineno}" if own else ""
    return f"{type(error).__name__}{place}"
