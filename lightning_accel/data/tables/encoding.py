"""The encoding of a table's columns as features, fitted on its training rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_accel.data.quoting import shown
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    from sklearn.compose import ColumnTransformer

compose = import_on_use("sklearn.compose")
impute = import_on_use("sklearn.impute")
pipeline = import_on_use("sklearn.pipeline")
preprocessing = import_on_use("sklearn.preprocessing")


def make_encoder(is_number: dict[str, bool]) -> ColumnTransformer:
    numbers = pipeline.make_pipeline(
        impute.SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True),
        preprocessing.StandardScaler(),
    )
    categories = preprocessing.OneHotEncoder(
        handle_unknown="ignore", sparse_output=False, feature_name_combiner=lambda column, value: f"{column}={value}"
    )
    return compose.ColumnTransformer(
        [
            ("number", numbers, [name for name, number in is_number.items() if number]),
            ("category", categories, [name for name, number in is_number.items() if not number]),
        ]
    )


def names_of_features(encoder: ColumnTransformer, path: Path) -> list[str]:
    names = [name.partition("__")[2] for name in encoder.get_feature_names_out()]  # without number__ and category__
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(
            f"{path} gives two features the name {shown(twice[0])}: a column and what is made of another, or two "
            "categories; rename a column, or list it under exclude"
        )
    return names


def to_tensor(features: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32))
