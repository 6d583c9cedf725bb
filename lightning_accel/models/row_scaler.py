"""Scaling of data for the visible units of an RBM. Shapes: N samples, V columns."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


class RowScaler:
    """Scale samples for visible units: unchanged for Bernoulli units, standardized for Gaussian ones."""

    mean: Array | None = None
    scale: Array | None = None

    def __init__(self, rows: Array, visible: str) -> None:
        if visible not in ("auto", "bernoulli", "gaussian"):
            raise ValueError(f"visible must be 'auto', 'bernoulli' or 'gaussian'; got {visible!r}")
        if visible == "auto":
            visible = "bernoulli" if rows.min() >= 0 and rows.max() <= 1 else "gaussian"
        self.visible: Any = visible
        self.varies = np.ones(rows.shape[1], dtype=bool)
        if visible == "gaussian":
            if len(rows) < 2:
                raise ValueError("standardising needs at least 2 rows; got n_samples = 1")
            self.mean, scale = rows.mean(axis=0, dtype=np.float64), rows.std(axis=0, dtype=np.float64)
            self.varies = (rows != rows[0]).any(axis=0) & (scale > 0)
            self.scale = np.where(self.varies, scale, 0)
        if not self.varies.any():
            raise ValueError(f"all {len(self.varies)} columns are constant: there is nothing to learn from")

    @property
    def num_varying(self) -> int:
        return int(self.varies.sum())

    @property
    def log_volume(self) -> float:
        """Return what standardization adds to the logarithm of a density."""
        return 0.0 if self.scale is None else float(np.log(self.scale[self.varies]).sum())

    def scaled(self, rows: Array) -> Tensor:
        """Scale samples (N, V) to the values of units, in the same dtype."""
        if self.mean is None or self.scale is None:
            return torch.from_numpy(np.ascontiguousarray(rows))
        kept = (rows[:, self.varies] - self.mean[self.varies]) / self.scale[self.varies]
        return torch.from_numpy(kept.astype(rows.dtype))

    def unscaled(self, states: Tensor) -> Array:
        """Scale values of units back to samples (N, V)."""
        if self.mean is None or self.scale is None:
            return states.numpy()
        rows = states.numpy() * self.scale[self.varies] + self.mean[self.varies]
        return self.with_constants(rows, self.mean).astype(states.numpy().dtype)

    def with_constants(self, values: Array, constant: Array | float) -> Array:
        """Insert ``constant`` for constant columns into ``values`` of the other columns; return (..., V)."""
        whole = np.empty((*values.shape[:-1], len(self.varies)), dtype=values.dtype)
        whole[...] = constant
        whole[..., self.varies] = values
        return whole
