"""Checks of which RBMs can be stacked."""

from lightning_accel.nn.rbm import RBM
from lightning_accel.nn.rbm_units import (
    BernoulliHidden,
    BernoulliVisible,
    CategoricalVisible,
    GaussianVisible,
    HiddenUnits,
    JoinedVisible,
    RectifiedHidden,
    VisibleUnits,
)


def units_without_labels(rbm: RBM) -> VisibleUnits:
    """Return the visible units without those of the label."""
    units = rbm.visible_units
    return units.parts[0] if isinstance(units, JoinedVisible) else units  # type: ignore[return-value]


def option_of(units: VisibleUnits | HiddenUnits) -> str:
    """Return the constructor argument that creates ``units``."""
    kinds: dict[type, str] = {
        BernoulliVisible: "visible='bernoulli'",
        GaussianVisible: "visible='gaussian'",
        CategoricalVisible: "visible='categorical'",
        BernoulliHidden: "hidden='bernoulli'",
        RectifiedHidden: "hidden='relu'",
    }
    return kinds.get(type(units), type(units).__name__)


def require_compatible(layer: int, below: RBM, above: RBM) -> None:
    """Require that RBM ``layer`` and the one above it fit together."""
    here = f"RBM {layer + 1} of the stack"
    if below.num_labels:
        raise ValueError(f"only the top RBM may have labels; RBM {layer} has num_labels={below.num_labels}")
    size = above.num_visible - above.num_labels
    if size != below.num_hidden:
        raise ValueError(
            f"{here} has {size} visible units and stands on {below.num_hidden} hidden ones: make its "
            f"num_visible={below.num_hidden}"
        )
    units = units_without_labels(above)
    fitting = GaussianVisible if isinstance(below.hidden_units, RectifiedHidden) else BernoulliVisible
    if not isinstance(units, fitting):
        needed = "gaussian" if fitting is GaussianVisible else "bernoulli"
        raise ValueError(
            f"{here} has {option_of(units)} and stands on {option_of(below.hidden_units)}, whose states it cannot "
            f"hold: take visible='{needed}'"
        )
