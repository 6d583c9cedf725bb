"""Preprocessing of datamodules as torch modules, to be exported with a model. Shapes: B rows, D features, K columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from sklearn.compose import ColumnTransformer


class ScaledPixels(nn.Module):
    """Scale pixels in [0, ``largest``], of any shape and floating dtype, to [0, 1], or to exactly 0 and 1 (above 0.5).

    >>> ScaledPixels(16)(torch.tensor([0.0, 4.0]))
    tensor([0.0000, 0.2500])
    """

    def __init__(self, largest: float, binarize: bool = False) -> None:
        super().__init__()
        self.largest = largest
        self.binarize = binarize

    def forward(self, pixels: Tensor) -> Tensor:
        scaled = pixels / self.largest
        return scaled.gt(0.5).to(scaled.dtype) if self.binarize else scaled

    def inverse(self, images: Tensor) -> Tensor:
        return images * self.largest


class RawColumns(nn.Module):
    """Encode rows of a table (B, K) float64 as the features (B, D) float32 that a model was trained on.

    A numeric column holds numbers, NaN where one is missing. A categorical column holds the index of the category in
    its list in ``columns``, and any other number for a category that was not in the training rows.

    Args:
        columns: name of each column and its list of ``categories``, None for the numeric ones, which come first.
        median: (M,) what is put for a missing value, for the M numeric columns.
        indicated: numeric columns with a feature that is 1 where the value is missing.
        mean: (M + I,) subtracted from the numbers and the I indicators.
        scale: (M + I,) divides them.
        missing: texts that mean a missing value in the table's file, for readers of an exported model.
        decimal: decimal mark of the table's file, for the same readers.
    """

    median: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        columns: Sequence[dict[str, Any]],
        median: Any,
        indicated: Sequence[int],
        mean: Any,
        scale: Any,
        missing: Sequence[str] = (),
        decimal: str = ".",
    ) -> None:
        super().__init__()
        self.missing = list(missing)
        self.decimal = decimal
        self.columns = list(columns)
        self.num_numbers = sum(column["categories"] is None for column in columns)
        self.indicated = list(indicated)
        for name, values in (("median", median), ("mean", mean), ("scale", scale)):
            self.register_buffer(name, _float64(values))

    @classmethod
    def of_encoder(cls, encoder: "ColumnTransformer", missing: Sequence[str] = (), decimal: str = ".") -> "RawColumns":
        """Return the module that encodes as a fitted ColumnTransformer does.

        Args:
            encoder: has a pipeline ``number`` (median imputation with missing indicators, then standardization) and a
                one-hot ``category``.
            missing: texts that mean a missing value in the file.
            decimal: decimal mark of the file.
        """
        chosen = {name: list(columns) for name, _, columns in encoder.transformers_}
        numbers, texts = chosen.get("number", []), chosen.get("category", [])
        categories = encoder.named_transformers_["category"].categories_ if texts else []
        columns: list[dict[str, Any]] = [{"name": name, "categories": None} for name in numbers]
        columns += [
            {"name": name, "categories": [str(one) for one in known]}
            for name, known in zip(texts, categories, strict=True)
        ]
        if not numbers:
            return cls(columns, [], [], [], [], missing, decimal)
        imputer, scaler = encoder.named_transformers_["number"]
        indicated = [] if imputer.indicator_ is None else imputer.indicator_.features_.tolist()
        return cls(columns, imputer.statistics_, indicated, scaler.mean_, scaler.scale_, missing, decimal)

    @property
    def feature_names(self) -> list[str]:
        numbers = [column["name"] for column in self.columns[: self.num_numbers]]
        return [
            *numbers,
            *(f"missingindicator_{numbers[place]}" for place in self.indicated),
            *(f"{one['name']}={value}" for one in self.columns[self.num_numbers :] for value in one["categories"]),
        ]

    def forward(self, rows: Tensor) -> Tensor:
        numbers = rows[:, : self.num_numbers]
        missing = numbers.isnan()
        values = torch.cat([torch.where(missing, self.median, numbers), missing[:, self.indicated].double()], dim=1)
        parts = [(values - self.mean) / self.scale]
        for place, column in enumerate(self.columns[self.num_numbers :], self.num_numbers):
            known = torch.arange(len(column["categories"]), device=rows.device)
            parts.append((rows[:, place : place + 1] == known).double())
        return torch.cat(parts, dim=1).float()

    def inverse(self, features: Tensor) -> Tensor:
        """Return rows (B, K) whose encoding is ``features``, up to rounding."""
        width = len(self.mean)
        values = features[:, :width].double() * self.scale + self.mean
        rows = values[:, : self.num_numbers].clone()
        for place, number in enumerate(self.indicated, self.num_numbers):
            rows[:, number] = torch.where(values[:, place] > 0.5, torch.nan, rows[:, number])
        columns = [rows]
        for column in self.columns[self.num_numbers :]:
            block = features[:, width : width + len(column["categories"])]
            largest, place_of = block.max(dim=1)
            columns.append(torch.where(largest > 0.5, place_of, -1).double().unsqueeze(1))
            width += len(column["categories"])
        return torch.cat(columns, dim=1)


def _float64(values: Any) -> Tensor:
    return torch.from_numpy(np.nan_to_num(np.asarray(values, dtype=np.float64)))  # NaN in a column without values
