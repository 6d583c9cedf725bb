"""Preprocessing of datamodules as torch modules, to be exported with a model. Shapes: B rows, D features, K columns."""

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
        encoder: a fitted ColumnTransformer of a pipeline ``number`` (median imputation with missing indicators, then
            standardization) and a one-hot ``category``.
    """

    median: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(self, encoder: "ColumnTransformer") -> None:
        super().__init__()
        chosen = {name: list(columns) for name, _, columns in encoder.transformers_}
        numbers, texts = chosen.get("number", []), chosen.get("category", [])
        imputer, scaler = encoder.named_transformers_["number"] if numbers else (None, None)
        categories = encoder.named_transformers_["category"].categories_ if texts else []
        self.columns: list[dict[str, Any]] = [{"name": name, "categories": None} for name in numbers]
        self.columns += [
            {"name": name, "categories": [str(one) for one in known]}
            for name, known in zip(texts, categories, strict=True)
        ]
        self.num_numbers = len(numbers)
        self.indicated = [] if imputer is None or imputer.indicator_ is None else imputer.indicator_.features_.tolist()
        self.register_buffer("median", _float64([] if imputer is None else imputer.statistics_))
        self.register_buffer("mean", _float64([] if scaler is None else scaler.mean_))
        self.register_buffer("scale", _float64([] if scaler is None else scaler.scale_))

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
