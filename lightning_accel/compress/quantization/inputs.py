"""Dynamic sizes of calls, and differences of outputs."""

from collections.abc import Sequence
from typing import Any

from torch.export import Dim

from lightning_accel.compress.calls import Inputs, num_samples
from lightning_accel.compress.export.structure import tensors_of


def dynamic_shapes(inputs: Sequence[Inputs], named: bool = True) -> tuple[dict[int, Any], ...]:
    """Return the dynamic dimensions of each tensor of a call for ``torch.export``.

    They are the batch dimension, and those that differ among ``inputs``.

    Args:
        inputs: calls, of which the first is traced.
        named: specify which dimensions are equal; else the tracer infers it, and may specialize some.
    """
    calls = [tensors_of(one) for one in inputs]
    rows = tuple(num_samples(one) for one in inputs)
    dims: dict[tuple[int, ...], Any] = {}
    shapes = []
    for same in zip(*calls, strict=True):
        sizes = {dim: tuple(tensor.shape[dim] for tensor in same) for dim in range(same[0].ndim)}
        shapes.append(
            {
                dim: dims.setdefault(seen, Dim(f"size{len(dims)}", min=1)) if named else Dim.AUTO
                for dim, seen in sizes.items()
                if (dim == 0 and seen == rows) or len(set(seen)) > 1
            }
        )
    return tuple(shapes)


def noise_share(wanted: Any, found: Any) -> float:
    """Return the squared error of floating outputs relative to their squared deviations from the mean."""
    error = power = 0.0
    for one, other in zip(tensors_of(wanted), tensors_of(found), strict=True):
        if one.is_floating_point():
            one, other = one.double(), other.double()
            error += float((one - other).square().sum())
            power += float((one - one.mean()).square().sum())
    return error / power if power else float(error > 0)
