"""Configs of which one leaf is wrong, and what the command line makes of them."""

import copy
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from campaign_process import Ended

CONFIGS = Path(__file__).parents[1] / "configs"
Place = tuple[str | int, ...]
HUGE = 2**62


class Mutation(NamedTuple):
    config: str
    place: Place
    kind: str
    value: Any

    def __str__(self) -> str:
        return f"{self.config}: {'.'.join(map(str, self.place))} {self.kind} ({self.value!r:.40})"


def _typo(text: str) -> str:
    middle = max(1, len(text) // 2)
    return text[:middle] + ("x" if text[middle - 1] != "x" else "y") + text[middle:]


KINDS: dict[str, Callable[[Any], Any]] = {
    "type": lambda old: "text" if isinstance(old, int | float | bool) or old is None else 12.5,
    "negative": lambda old: -abs(old) - 1,
    "huge": lambda old: 1e30 if isinstance(old, float) else HUGE,
    "null": lambda old: None,
    "nan": lambda old: float("nan"),
    "inf": lambda old: float("inf"),
    "typo of the key": _typo,
    "typo of the value": _typo,
    "list": lambda old: [old, old],
    "dict": lambda old: {"a": old},
    "empty": lambda old: "",
    "unicode": lambda old: "ü☃\u202e",
    "NUL": lambda old: "a\0b",
    "long": lambda old: "x" * 5000,
    "missing path": lambda old: "/no/such/file",
    "directory": lambda old: "/",
    "device": lambda old: "/dev/null",
    "parent": lambda old: "../..",
}
_OF_NUMBERS = ("negative", "huge", "nan", "inf")
_OF_TEXTS = ("typo of the value", "missing path", "directory", "device", "parent")
_NONSENSE = {"nan", "inf", "huge", "negative", "NUL", "typo of the key", "typo of the value", "device", "dict"}
# What may be accepted though its kind says otherwise, and why.
SENSIBLE = {
    r"(max_epochs|max_steps|patience|every_n|epochs|limit_\w+) (huge|negative)": "a limit that is never met; -1: none",
    r"(log_every_n_steps|check_val_every_n_epoch|val_check_interval|begin|end|start) huge": "later than the run's end",
    r"(gradient_clip_val|max_drop|threshold) (huge|inf)": "a bound that is never met",
    r"(name|save_dir|filename|dirpath)( |\.).*(typo of the value|unicode|long|parent|missing path|text)": "a name",
    r"seed_everything huge": "any number seeds",
    r"(epochs|steps|total_steps|steps_per_epoch) huge": "that the schedule is longer than the run is told",
    r"prompts.* (NUL|typo of the value|device)": "any text may be a prompt",
    r"num_sanity_val_steps (huge|negative)": "all; -1 is how Lightning spells it",
    r"(num_sequences|length|max_shift|(global_)?batch_size|copies) huge": "more than there are: all",
}
SHORT = {
    "max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1, "log_every_n_steps": 1,
    "check_val_every_n_epoch": 1, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu",
    "num_sanity_val_steps": 1,
}  # fmt: skip


def shortened(name: str) -> dict[str, Any]:
    """Return the config ``name`` with a run of two epochs of two batches."""
    config: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    trainer = config["trainer"]
    steps = trainer.pop("max_steps", None)
    trainer.update(SHORT)
    if "val_check_interval" in trainer:
        trainer.update(val_check_interval=2, check_val_every_n_epoch=None)
    if steps is not None:
        trainer.update(max_steps=4, max_epochs=None)
    if "lr_scheduler" in config:
        options = config["lr_scheduler"]["init_args"]
        options.update({"epochs": 2} if "epochs" in options else {"total_steps": 40})
    if name == "dbn_digits":
        config["model"]["init_args"].update(
            stages=[{"epochs": 1}, {"epochs": 1}], fine_tuning={"method": "classifier", "epochs": 1}, hidden_dims=[8, 8]
        )
        trainer["max_epochs"] = 3
    if name == "rbm_bars":
        config["model"]["init_args"]["stages"][0]["epochs"] = 2
        config["model"]["init_args"]["minibatch_size"] = 16
        config["data"]["init_args"].update(copies=20, batch_size=200)
    if name == "rnn_adding":
        config["data"]["init_args"]["generated"] = {"num_sequences": 300, "length": 20}
    skipped = ("Quantization", "Export") if name.startswith("compress") else ()
    trainer["callbacks"] = [one for one in trainer["callbacks"] if one["class_path"].rpartition(".")[2] not in skipped]
    return config


def leaves(value: Any, place: Place = ()) -> Iterator[Place]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*place, key))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from leaves(part, (*place, number))
    else:
        yield place


def mutations() -> list[Mutation]:
    """Return every leaf of every config with every kind of wrong value that its type has."""
    found = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        config = shortened(path.stem)
        for place in leaves(config):
            old = _part(config, place)
            is_number = isinstance(old, int | float) and not isinstance(old, bool)
            for kind, make in KINDS.items():
                fits = (kind not in _OF_NUMBERS or is_number) and (kind not in _OF_TEXTS or isinstance(old, str))
                if kind == "typo of the key":
                    if isinstance(place[-1], str):
                        found.append(Mutation(path.stem, place, kind, make(place[-1])))
                elif fits:
                    found.append(Mutation(path.stem, place, kind, make(old)))
    return found


def _part(config: Any, place: Place) -> Any:
    for key in place:
        config = config[key]
    return config


def mutated(mutation: Mutation) -> str:
    """Return the text of the config with its one wrong leaf."""
    config = shortened(mutation.config)
    parent = _part(config, mutation.place[:-1])
    if mutation.kind == "typo of the key":
        parent[mutation.value] = parent.pop(mutation.place[-1])
    else:
        parent[mutation.place[-1]] = copy.deepcopy(mutation.value)
    return yaml.safe_dump(config, allow_unicode=True)


def sampled(count: int, draw: random.Random) -> list[Mutation]:
    everything = mutations()
    return draw.sample(everything, min(count, len(everything)))


def verdict(mutation: Mutation, ended: Ended) -> str:
    """Say what became of a wrong config: ``refused``, ``accepted``, or what is wrong."""
    if ended.status is None:
        return "hang"
    if ended.status < 0 or ended.status == 139:
        return "crash"
    if ended.has_traceback:
        return "traceback"
    if ended.status:
        return "refused" if "error:" in ended.output else "no message"
    leaf = f"{'.'.join(map(str, mutation.place[-2:]))} {mutation.kind}"
    is_sensible = any(re.search(pattern, leaf) for pattern in SENSIBLE)
    return "nonsense accepted" if mutation.kind in _NONSENSE and not is_sensible else "accepted"
