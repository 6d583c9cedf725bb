"""Kinds of units of the layers of a deep belief network. Shapes: V visible units, H hidden units, C classes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from lightning_accel.models.dbn_stages import Stage
from lightning_accel.nn.dbn import RBMStack
from lightning_accel.nn.rbm import RBM, Hidden, Visible


class Units(NamedTuple):
    """Hold the kinds of units, from the lowest visible to the top hidden ones."""

    visible: Visible
    num_categories: int | None
    learn_variance: bool
    hidden: list[Hidden]  # one for each RBM

    def require_densities(self, stages: Sequence[Stage]) -> None:
        """Reject kinds of units that ``stages`` cannot train.

        Raises:
            ValueError: if numbers of kinds and stages differ, or chains of units without a density would diverge.
        """
        if len(self.hidden) != len(stages):
            raise ValueError(f"hidden must be one kind, or {len(stages)}, one for each RBM; got {self.hidden}")
        for number, (hidden, stage) in enumerate(zip(self.hidden, stages, strict=True)):
            sampler = stage.start_sampling(0).sampler
            if (self._visible_kind(number), hidden) == ("gaussian", "relu") and sampler != "cd":
                raise ValueError(
                    f"RBM {number + 1} has Gaussian visible and relu hidden units, which have no density where weights "
                    f"are large, so that chains of sampler={sampler!r} run away; take sampler='cd' for its stage, or "
                    "hidden='bernoulli' for it"
                )

    def make_stack(
        self, num_visible: int, layers: Sequence[int], num_labels: int, stages: Sequence[Stage], untied: bool
    ) -> RBMStack:
        """Create the RBMs, the top one with ``num_labels``, and initialize them as ``stages`` say."""
        rbms = []
        for number, (below, size) in enumerate(pairwise([num_visible, *layers])):
            labels = num_labels if number == len(layers) - 1 else 0
            all_bernoulli = (self._visible_kind(number), self.hidden[number]) == ("bernoulli", "bernoulli")
            options: dict[str, Any] = {"visible": self._visible_kind(number), "hidden": self.hidden[number]}
            if number == 0:
                options |= {"num_categories": self.num_categories, "learn_variance": self.learn_variance}
            std = stages[number].std_for(below + labels, size, all_bernoulli)
            rbms.append(RBM(below, size, num_labels=labels, initial_std=std, **options))
        return RBMStack(rbms, untied=untied)

    def _visible_kind(self, number: int) -> Visible:
        """Return the kind of the visible units of RBM ``number``."""
        if number == 0:
            return self.visible
        return "gaussian" if self.hidden[number - 1] == "relu" else "bernoulli"


def require_options(
    layers: Sequence[int],
    stages: Sequence[Stage],
    finetune: str,
    labels: bool,
    likelihood: str,
    minibatch_size: int | None,
) -> None:
    """Raise a ValueError for options of a deep belief network that are out of range or contradict each other."""
    if not layers or len(stages) not in (1, len(layers)):
        raise ValueError(
            "layers must name the hidden units of at least one RBM, and stages one for each of them or one for all; "
            f"got {len(layers)} layers and {len(stages)} stages"
        )
    if finetune not in ("none", "classifier", "updown"):
        raise ValueError(f"finetune must be 'none', 'classifier' or 'updown'; got {finetune!r}")
    if likelihood not in ("none", "exact", "ais"):
        raise ValueError(f"likelihood must be 'none', 'exact' or 'ais'; got {likelihood!r}")
    if labels and finetune == "classifier":
        raise ValueError("labels=True models classes in the top RBM, finetune='classifier' puts a head on it: take one")
    if minibatch_size is not None and minibatch_size < 1:
        raise ValueError(f"minibatch_size must be at least 1; got {minibatch_size}")
