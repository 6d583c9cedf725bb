"""Reading of the table of a sharded checkpoint folder without running code from it.

torch reads the table, and saved objects that are no tensors, such as a learning rate, with ``pickle`` (torch 2.13).
"""

import io
import pickle
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as table

from lightning_accel._private.torch import checkpoint_encodings, storage_info

METADATA = ".metadata"
REST = "meta.pt"  # all but weights and optimizer states; Lightning's own tools expect this name

_CLASSES: dict[tuple[str, str], Any] = {
    (each.__module__, each.__name__): each
    for each in (
        table.Metadata,
        table.MetadataIndex,
        table.StorageMeta,
        table.TensorStorageMetadata,
        table.BytesStorageMetadata,
        table.ChunkStorageMetadata,
        table.TensorProperties,
        storage_info(),
        *checkpoint_encodings(),
    )
}
_CLASSES |= {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): dict}
_CLASSES |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_CLASSES |= {
    (module, name): pure
    for module in ("pathlib", "pathlib._local")  # the second since Python 3.13
    for name, pure in (("PosixPath", PurePosixPath), ("WindowsPath", PureWindowsPath))
}


class UntrustedCheckpointError(pickle.UnpicklingError):
    """Report a checkpoint with objects that could run code; ``held`` names them, and where they are."""

    def __init__(self, held: str, folder: str | Path = "") -> None:
        super().__init__(
            f"the checkpoint {folder} holds objects other than tensors and plain values ({held}), which could run "
            "code. Nothing of it was loaded; if you trust its author, load it with weights_only=False"
        )
        self.held = held


class _MetadataUnpickler(pickle.Unpickler):
    """Load only the classes that tables consist of, each of which merely holds values."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES:
            raise UntrustedCheckpointError(f"{module}.{name}")
        return _CLASSES[module, name]


def read_metadata(folder: str | Path) -> table.Metadata:
    """Read the table of a sharded checkpoint.

    Raises:
        UntrustedCheckpointError: naming what it holds besides the classes of such a table.
        ValueError: if it is damaged.
    """
    try:
        found = _MetadataUnpickler(io.BytesIO(Path(folder, METADATA).read_bytes())).load()
    except (UntrustedCheckpointError, OSError):
        raise
    except Exception as error:  # damaged pickles raise anything
        raise ValueError(f"{METADATA} is not the table of a sharded checkpoint") from error
    if not isinstance(found, table.Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError(f"{METADATA} is not the table of a sharded checkpoint")
    return found


def items_by_file(folder: str | Path, metadata: table.Metadata) -> dict[str, list[tuple[str, int, int]]]:
    """Return name, start and length of each saved item, by the file of the folder that contains it.

    Raises:
        ValueError: if an item does not lie in a file of the folder.
    """
    parts: dict[str, list[tuple[str, int, int]]] = {}
    for index, place in metadata.storage_data.items():
        if not isinstance(place, storage_info()) or not isinstance(index, table.MetadataIndex):
            raise ValueError(f"{METADATA} is not the table of a sharded checkpoint")
        name = str(place.relative_path)
        file = Path(folder, name)
        if Path(name).name != name or not file.is_file():
            raise ValueError(f"its part {name} is not there")
        if not 0 <= place.offset <= place.offset + place.length <= file.stat().st_size:
            raise ValueError(f"its part {name} is cut short")
        parts.setdefault(name, []).append((index.fqn, place.offset, place.length))
    return parts


def require_no_code(folder: str | Path) -> None:
    """Reject a sharded checkpoint that would run code when torch reads it.

    Raises:
        UntrustedCheckpointError: naming what it holds that is neither a tensor nor a plain value.
        ValueError: if it is damaged.
    """
    for path in Path(folder).iterdir():  # torch unpickles such a table of one rank where it cannot read the common one
        if path.name != METADATA and path.name.lower().endswith(METADATA):
            raise UntrustedCheckpointError(f"{path.name}, a second table", folder)
    try:
        metadata = read_metadata(folder)
    except UntrustedCheckpointError as error:
        raise UntrustedCheckpointError(f"{error.held} in {METADATA}", folder) from None
    are_bytes = {
        name for name, kind in metadata.state_dict_metadata.items() if not isinstance(kind, table.TensorStorageMetadata)
    }
    for part, items in items_by_file(folder, metadata).items():
        with open(Path(folder, part), "rb") as file:
            for name, start, length in items:
                if name in are_bytes:
                    file.seek(start)
                    _require_plain(folder, f"{name} in {part}", file.read(length))


def _require_plain(folder: str | Path, name: str, content: bytes) -> None:
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UntrustedCheckpointError(f"{rejected_object(error)} in {name}", folder) from None
    except Exception as error:
        raise ValueError(f"{name} of the checkpoint {folder} is damaged: {error}") from error


def rejected_object(error: pickle.UnpicklingError) -> str:
    """Return the name of the object in a checkpoint that torch, or this module, refused to load."""
    if isinstance(error, UntrustedCheckpointError):
        return error.held
    found = re.search(r"GLOBAL (\S+)", str(error)) or re.search(r"WeightsUnpickler error: *(.+)", str(error))
    return found[1] if found else str(error).splitlines()[0]
