"""Images in IDX files, the format of MNIST. Shapes: N images of a file, B of a batch, H and W pixels."""

import gzip
import math
import re
import zlib
from dataclasses import dataclass, replace
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_accel.data.bounds import require_allowed
from lightning_accel.data.digest import DIGEST, digest_of, require_same_data
from lightning_accel.data.in_memory import InMemoryDataModule
from lightning_accel.data.quoting import shown
from lightning_accel.data.splits import split_rows
from lightning_accel.data.tables.files import existing_file, regular_file
from lightning_accel.ops.bounds import local_path, require_integers
from lightning_accel.ops.renames import renamed_arguments

IdxPart: TypeAlias = Literal["train-images", "train-labels", "test-images", "test-labels"]
Limits: TypeAlias = tuple[int, int]

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path) -> np.ndarray:
    """Read the array of an IDX file, gzipped or not, whatever its name.

    Returns:
        A writable array of the file's type (uint8, int8, int16, int32, float32 or float64) in the machine's byte order.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no IDX file, is truncated, is longer than its header says, holds no values, is too large
            unpacked, or is a folder or a device.

    Source: Y. LeCun, C. Cortes and C. Burges, The MNIST database of handwritten digits, section on the file format
    """
    path = regular_file(path)
    with path.open("rb") as start:
        is_packed = start.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if is_packed else path.open("rb") as file:
            dtype, shape = _read_header(file, path)
            promised = math.prod(shape) * dtype.itemsize
            if promised == 0:
                raise ValueError(f"{path} holds no values: its shape is {shape}")
            if is_packed:
                require_allowed(promised, path, f"{path}, whose header says {shown(shape, 100)},")
            found = promised if is_packed else path.stat().st_size - file.tell()
            if found == promised:
                values = np.empty(math.prod(shape), dtype)
                found = file.readinto(values.view(np.uint8).data) + len(file.read(1))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is gzipped and cannot be unpacked: {error}. Fetch or write it again") from error
    if found != promised:
        raise ValueError(
            f"{path} is {'cut short' if found < promised else 'too long'}: its header says {shown(shape, 100)} of "
            f"{dtype.itemsize} bytes each, {shown(promised)} bytes, and {found}"
            f"{' or more' if is_packed and found > promised else ''} are there. Fetch or write it again"
        )
    return values.reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _read_header(file: BufferedIOBase, path: Path) -> tuple[np.dtype, tuple[int, ...]]:
    """Read the type and the shape from the start of an open file."""
    magic = file.read(4)
    if not magic:
        raise ValueError(f"{path} is empty; an IDX file was needed")
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES or magic[3] == 0:
        raise ValueError(
            f"{path} is no IDX file: those begin with two bytes of 0, one of "
            f"{', '.join(f'{code:02x}' for code in _DTYPES)} for the type, and the number of dimensions; it begins "
            f"with {magic.hex(' ')}"
        )
    rank, sizes = magic[3], file.read(4 * magic[3])
    if len(sizes) < 4 * rank:
        raise ValueError(
            f"{path} is cut short: a header of {rank} dimensions takes {4 + 4 * rank} bytes, and {4 + len(sizes)} are "
            "there"
        )
    return np.dtype(_DTYPES[magic[2]]), tuple(np.frombuffer(sizes, ">u4").tolist())


def _find_idx(folder: Path, part: IdxPart) -> Path | None:
    """Return the only file of ``part`` in ``folder`` by its usual names, if any; a file goes before its gzipped copy.

    Raises:
        ValueError: if several files match.
    """
    pattern = rf"(.+-)?{part.replace('test-', '(t10k|test)-')}[-.]idx\d+-\w+(\.gz)?"
    found = sorted(path for path in folder.iterdir() if re.fullmatch(pattern, path.name))
    found = [path for path in found if path.suffix != ".gz" or path.with_suffix("") not in found]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(f"{folder} has several files of {part}: {names}. Move all but one elsewhere")
    return found[0] if found else None


def _require_idx(folder: Path, part: IdxPart) -> Path:
    if (found := _find_idx(folder, part)) is not None:
        return found
    names = [f"{start}-{part.partition('-')[2]}-idx{3 if part.endswith('images') else 1}-ubyte"
             for start in (["train"] if part.startswith("train") else ["t10k", "test"])]  # fmt: skip
    remedy = "; for images alone, set labelled to False" if part.endswith("labels") else ""
    raise FileNotFoundError(f"no {' or '.join(names)}, gzipped or not, in the folder {folder}{remedy}")


class IdxDataModule(InMemoryDataModule):
    """Load MNIST, or other images in its format, as batches of images float32 in [0, 1] and labels (B,) int64.

    The folder holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
    ``t10k-labels-idx1-ubyte``, each gzipped or not, also with a dot before ``idx``, with ``test`` for ``t10k``, or with
    a dataset's name in front; nothing is downloaded. The test files may be missing where there is no test.

    Files of shape (N, H, W) give images (B, 1, H, W), files of (N, D) give vectors (B, D), and other shapes stay as
    they are. In memory, images stay bytes, and become float32 one batch at a time. The smallest value of the training
    file becomes 0 and the largest 1 (for MNIST: 0 and 255); test images are clamped to that range.

    Labels are any whole numbers; the classes are the sorted labels of the training file. A share ``val_share`` of the
    training images validates, stratified by class; the same files and ``seed`` give the same split on every
    machine.

    After ``setup``: ``num_features`` (values of an image), ``image_shape``, and with labels ``num_classes`` and
    ``class_names``.

    Args:
        path: folder of the files.
        labelled: False to read no labels; batches are then ``(images,)``.
        binarize: make every value exactly 0 or 1, 1 above 0.5.
        val_share: share of the training images that validate.
        seed: seed of the split into training and validation images.
        batch_size: samples per process and step.
        num_workers: workers that load batches; 0 is fastest, since the images are in memory.
        predict_path: IDX file of images to predict; by default the test images.

    Raises:
        TypeError: if an option has another type.
        FileNotFoundError: if the folder does not exist; in ``setup``, if a file does not, naming the expected names.
        ValueError: if a number is out of range; in ``setup``, if a file is no IDX file, is damaged or empty, holds
            constant images or images of another shape, or labels that are not one whole number per image; in
            ``load_state_dict``, if the model was trained on other images.

    Example:
        >>> from lightning_accel.data import IdxDataModule
        >>> data = IdxDataModule("MNIST/raw", val_share=0.1)  # doctest: +SKIP
    """

    train_rows: "ImageDataset"
    test_rows: "ImageDataset | None"
    num_features: int
    image_shape: tuple[int, ...]
    num_classes: int
    class_names: list[str]

    @renamed_arguments(split_seed="seed")
    def __init__(
        self,
        path: str | Path,
        *,
        labelled: bool = True,
        binarize: bool = False,
        val_share: float = 0.1,
        seed: int = 0,
        batch_size: int = 64,
        num_workers: int = 0,
        predict_path: str | Path | None = None,
    ) -> None:
        super().__init__()
        require_integers(1, batch_size=batch_size)
        require_integers(0, seed=seed, num_workers=num_workers)
        if not 0 < val_share < 1:
            raise ValueError(f"val_share must lie between 0 and 1; got {val_share}")
        self.path = local_path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"no folder {path}; path is the folder of the IDX files")
        self.predict_path = None if predict_path is None else existing_file(predict_path)
        self.labelled = labelled
        self.binarize = binarize
        self.val_share = val_share
        self.seed = seed
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str | None = None) -> None:
        if not hasattr(self, "train_rows"):  # the Trainer calls setup once per stage
            self._set_up_training()
            self._set_up_held_out()
        needed = {"test": self.test_rows, "predict": self.predict_rows}
        if stage in needed and needed[stage] is None:
            _require_idx(self.path, "test-images")  # raises

    def _set_up_training(self) -> None:
        path = _require_idx(self.path, "train-images")
        images = self._read_images(path)
        labels = self._read_labels("train-labels", images, path)
        if labels is not None:
            classes, labels = np.unique(labels, return_inverse=True)
            self.class_names, self.num_classes = [str(label) for label in classes], len(classes)
        self._limits = int(images.min()), int(images.max())
        if self._limits[0] == self._limits[1]:
            raise ValueError(f"images must vary to be scaled to [0, 1]; every value of {path} is {self._limits[0]}")
        self.image_shape = (1, *images.shape[1:]) if images.ndim == 3 else images.shape[1:]
        self.num_features = int(np.prod(self.image_shape))
        split_by = path if labels is None else _require_idx(self.path, "train-labels")
        train, val = split_rows(np.arange(len(images)), labels, self.val_share, self.seed, split_by)
        self._digest = digest_of(images, *([] if labels is None else [labels]))
        every = self._rows(images, labels)
        self.train_rows, self.val_rows = (replace(every, chosen=torch.from_numpy(part)) for part in (train, val))

    def _set_up_held_out(self) -> None:
        self.test_rows = None
        if (path := _find_idx(self.path, "test-images")) is not None:
            images = self._read_like_training(path)
            labels = self._read_labels("test-labels", images, path)
            self.test_rows = self._rows(images, None if labels is None else self._encode_labels(labels, path))
        if self.predict_path is not None:
            self.predict_rows = self._rows(self._read_like_training(self.predict_path), None)
        else:
            self.predict_rows = None if self.test_rows is None else replace(self.test_rows, labels=None)

    def _read_labels(self, part: IdxPart, images: np.ndarray, of: Path) -> np.ndarray | None:
        if not self.labelled:
            return None
        path = _require_idx(self.path, part)
        labels = read_idx(path)
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError(
                f"labels must be one whole number for each image, (N,); {path} holds {labels.shape} {labels.dtype}"
            )
        if len(labels) != len(images):
            raise ValueError(f"{of} holds {len(images)} images and {path} {len(labels)} labels; give files that belong")
        return labels

    def _read_images(self, path: Path) -> np.ndarray:
        images = read_idx(path)
        if images.ndim < 2 or images.dtype != np.uint8:
            raise ValueError(
                f"images must be bytes, (N, H, W) or rows (N, D); {path} holds {images.shape} {images.dtype}"
            )
        return images

    def _read_like_training(self, path: Path) -> np.ndarray:
        images = self._read_images(path)
        trained = self.train_rows.images.numpy()
        if images.shape[1:] != trained.shape[1:]:
            raise ValueError(
                f"{path} holds images of {images.shape[1:]}, and the training images are of {trained.shape[1:]}; give "
                "files that belong together"
            )
        return images

    def _encode_labels(self, labels: np.ndarray, of: Path) -> np.ndarray:
        known = np.asarray([int(name) for name in self.class_names])
        if len(strange := np.setdiff1d(labels, known)):
            raise ValueError(
                f"the labels of {of} hold {strange[0]}, which those of the training images do not; they hold "
                f"{', '.join(self.class_names[:20])}{' ...' if len(known) > 20 else ''}"
            )
        return np.searchsorted(known, labels)

    def _rows(self, images: np.ndarray, labels: np.ndarray | None) -> "ImageDataset":
        targets = None if labels is None else torch.from_numpy(labels.astype(np.int64))
        values = torch.from_numpy(images)
        return ImageDataset(values, targets, self.image_shape, self._limits, self.binarize, torch.arange(len(values)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "classes": self.class_names if self.labelled else None,
            "split": [self.seed, self.val_share],
            "binarize": self.binarize,
            DIGEST: self._digest,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        remedy = "Give the files and options of its run; new images go in predict_path"
        require_same_data(state_dict, self.state_dict(), f"images than those of {self.path}", remedy)


@dataclass(eq=False)
class ImageDataset(Dataset[tuple[Tensor, ...]]):
    """Hold images as bytes, optionally with labels, and scale one batch at a time to float32 in [0, 1].

    Args:
        images: (N, ...) as in the file.
        labels: (N,) int64, or None.
        shape: shape of one image in a batch.
        limits: the values that become 0 and 1.
        binarize: make every value 0 or 1.
        chosen: indices of the images to use.
    """

    images: Tensor
    labels: Tensor | None
    shape: tuple[int, ...]
    limits: Limits
    binarize: bool
    chosen: Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[0] for tensor in self.__getitems__([index]))

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Return the batch of items ``indices``; the DataLoader's fetcher prefers it to ``__getitem__``."""
        rows = self.chosen[torch.tensor(indices)]
        images = self._scale(self.images[rows]).view(-1, *self.shape)
        return (images,) if self.labels is None else (images, self.labels[rows])

    def _scale(self, images: Tensor) -> Tensor:
        least, greatest = self.limits
        images = images.float().sub_(least).div_(greatest - least).clamp_(0, 1)
        return images.gt(0.5).float() if self.binarize else images
