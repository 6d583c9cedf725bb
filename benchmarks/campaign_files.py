"""Hostile files of every format that is read: each would leave a marker if its code ran."""

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from campaign_configs import shortened
from campaign_process import Ended, command_line, run

MARKER = "MARKER"
SECONDS = 300
Write = Callable[[Path, Path, Path], Path]  # from a sound checkpoint, into a folder; another holds the marker
_SUBCOMMANDS = ("fit", "validate", "test", "predict", "export")


class Attack(NamedTuple):
    name: str
    run: Callable[[Path], Ended]


class Evil:
    """Make the marker when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.marker = str(folder / MARKER)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def attacks(context: Any, folder: Path) -> Iterator[Attack]:
    """Yield attacks on the command line and on what loads files in Python, made from the sound files of a run."""
    folder.mkdir(parents=True)
    config = shortened("moe_digits")
    config["trainer"]["callbacks"].append({"class_path": "lightning_accel.ExactResume"})
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    ended = run(context, folder, command_line, ["fit", "--config", "config.yaml"], seconds=SECONDS)
    sound = next(folder.rglob("*.ckpt"), None)
    if sound is None:
        raise RuntimeError(f"no checkpoint to attack with: {ended.output}")
    for kind, write in _CHECKPOINTS.items():
        for subcommand in (*_SUBCOMMANDS, "auto"):
            yield Attack(f"{kind}, {subcommand}", partial(_command, context, folder, sound, subcommand, write))
        yield Attack(f"{kind}, load in Python", partial(_in_python, context, sound, write))


def _command(context: Any, folder: Path, sound: Path, subcommand: str, write: Write, place: Path) -> Ended:
    shutil.copy(folder / "config.yaml", place)
    (place / "planted.py").write_text(f"import os\nos.mkdir({str(place / MARKER)!r})\n")
    kept = place / "runs/moe_digits/version_0/checkpoints"
    kept.mkdir(parents=True)
    path = write(sound, kept, place)
    named = ["--ckpt_path", "auto" if subcommand == "auto" else str(path)]
    more = ["--output", "m.pt2", "--format", "pt2"] if subcommand == "export" else []
    config = [] if subcommand == "test" and "names" in write.__name__ else ["--config", "config.yaml"]
    data = [] if config else ["--data", "DigitsDataModule"]
    name = "fit" if subcommand == "auto" else subcommand
    return run(context, place, command_line, [name, *config, *data, *named, *more], seconds=SECONDS)


def _in_python(context: Any, sound: Path, write: Write, place: Path) -> Ended:
    return run(context, place, _load_everywhere, write(sound, place, place), seconds=SECONDS)


def _load_everywhere(path: Path) -> int:
    from lightning_accel import MoEClassifier
    from lightning_accel.compress import load_compressed, load_pruned

    model = MoEClassifier(64, 10)
    loads: list[Callable[[], Any]] = [
        lambda: MoEClassifier.load_from_checkpoint(path),
        lambda: load_pruned(model, path),
        lambda: load_compressed(path),
    ]
    refused = 0
    for load in loads:
        try:
            load()
        except Exception as error:
            print(type(error).__name__, str(error)[:300])
            refused += 1
    return int(refused == len(loads))


def pickled_hyperparameters(sound: Path, kept: Path, folder: Path) -> Path:
    content = torch.load(sound, weights_only=True)
    content["hyper_parameters"] = {"evil": Evil(folder)}
    torch.save(content, kept / "last.ckpt")
    return kept / "last.ckpt"


def pickled_state(sound: Path, kept: Path, folder: Path) -> Path:
    content = torch.load(sound, weights_only=True)
    content["callbacks"]["ExactResume"] = Evil(folder)
    torch.save(content, kept / "last.ckpt")
    return kept / "last.ckpt"


def legacy_format(sound: Path, kept: Path, folder: Path) -> Path:
    torch.save({"state_dict": Evil(folder)}, kept / "last.ckpt", _use_new_zipfile_serialization=False)
    return kept / "last.ckpt"


def bare_pickle(sound: Path, kept: Path, folder: Path) -> Path:
    (kept / "last.ckpt").write_bytes(pickle.dumps(Evil(folder)))
    return kept / "last.ckpt"


def names_a_class(sound: Path, kept: Path, folder: Path) -> Path:
    content = torch.load(sound, weights_only=True)
    content["hyper_parameters"] = {"_class_path": "planted.Model"}
    torch.save(content, kept / "last.ckpt")
    return kept / "last.ckpt"


def names_a_nested_class(sound: Path, kept: Path, folder: Path) -> Path:
    content = torch.load(sound, weights_only=True)
    hyperparameters = {"num_features": 64, "num_classes": 10, "gate": {"class_path": "planted.Gate", "init_args": {}}}
    content["hyper_parameters"] = {**hyperparameters, "_class_path": "lightning_accel.MoEClassifier"}
    torch.save(content, kept / "last.ckpt")
    return kept / "last.ckpt"


def names_an_instantiator(sound: Path, kept: Path, folder: Path) -> Path:
    content = torch.load(sound, weights_only=True)
    content["hyper_parameters"] = {"_instantiator": "planted.make", "num_features": 64, "num_classes": 10}
    content["hparams_type"] = "planted.Type"
    torch.save(content, kept / "last.ckpt")
    return kept / "last.ckpt"


def sharded_metadata(sound: Path, kept: Path, folder: Path) -> Path:
    path = kept / "last.ckpt"
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Evil(folder)))
    content = torch.load(sound, weights_only=True)
    del content["state_dict"]
    torch.save(content, path / "meta.pt")
    return path


def sharded_meta(sound: Path, kept: Path, folder: Path) -> Path:
    from torch.distributed.checkpoint.metadata import Metadata

    path = kept / "last.ckpt"
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={})))
    torch.save({"state_dict": Evil(folder)}, path / "meta.pt")
    return path


def program_of_pickles(sound: Path, kept: Path, folder: Path) -> Path:
    buffer = io.BytesIO()
    torch.save(Evil(folder), buffer)
    path = kept / "last.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/models/model.json", "{}")
        archive.writestr("m/extra/lightning_accel.json", "{}")
        archive.writestr("m/data/sample_inputs/model.pt", buffer.getvalue())
    return path


_CHECKPOINTS: dict[str, Write] = {
    each.__name__.replace("_", " "): each
    for each in (
        pickled_hyperparameters, pickled_state, legacy_format, bare_pickle, names_a_class, names_a_nested_class,
        names_an_instantiator, sharded_metadata, sharded_meta, program_of_pickles,
    )
}  # fmt: skip
