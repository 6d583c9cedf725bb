"""Batches of graphs of any sizes within a budget. Shapes: R graphs, G batches of an epoch, for all processes."""

import numpy as np

from lightning_accel.data.planned_sampler import Plan


class BudgetPlan:
    """Assign R items to random batches, none of which costs more than 1.

    Items are sorted by cost and split into strata with as many items as there are batches; each batch gets one random
    item of each stratum. Therefore every batch mixes large and small items, an item is equally likely to be batched
    with any item of similar size, and every epoch has the same number of batches. At most the room of one largest item
    of a batch is wasted. Where few items are so large that this wastes much, they get batches of their own.

    Args:
        cost: (R,) cost of each item, from 0 to 1, as a share of the budget of a batch.
        batch_size: largest number of items of a batch.
    """

    def __init__(self, cost: np.ndarray, batch_size: int) -> None:
        self._cost = cost
        costs = np.sort(cost)[::-1]
        whole = _fewest_batches(costs, batch_size)
        cuts = {int((costs > share).sum()) for share in (1 / 2, 1 / 4, 1 / 8, 1 / 16)} - {0, len(costs)}
        parts = [(_fewest_batches(costs[:cut], batch_size), _fewest_batches(costs[cut:], batch_size)) for cut in cuts]
        self._sizes, self._batches = [len(costs)], [whole]
        for cut, (large, small) in zip(cuts, parts, strict=True):
            if large + small < min(sum(self._batches), 0.6 * whole):  # mixing is worth two thirds more batches
                self._sizes, self._batches = [cut, len(costs) - cut], [large, small]
        self.smallest_batch = min(n // g for n, g in zip(self._sizes, self._batches, strict=True))

    def __len__(self) -> int:
        return sum(self._batches)

    def draw(self, seed: int, epoch: int, shuffle: bool) -> Plan:
        """Draw the batches of ``epoch``, each sorted by descending cost; the same for all if not ``shuffle``."""
        generator = np.random.default_rng([seed, epoch])
        mixed = generator.permutation(len(self._cost)) if shuffle else np.arange(len(self._cost))
        dearest_first = mixed[np.argsort(-self._cost[mixed], kind="stable")]
        batch, first_row, first_batch = [], 0, 0
        for rows, batches in zip(self._sizes, self._batches, strict=True):
            strata = -(-rows // batches)
            turn = np.tile(np.arange(batches), (strata, 1))
            turn = generator.permuted(turn, axis=1) if shuffle else turn
            batch.append(first_batch + turn.ravel()[:rows])
            first_row, first_batch = first_row + rows, first_batch + batches
        of = np.concatenate(batch)
        stops = np.bincount(of).cumsum()
        starts = np.r_[0, stops[:-1]]
        order = generator.permutation(len(stops)) if shuffle else np.arange(len(stops))
        return Plan(dearest_first[np.argsort(of, kind="stable")], starts[order], stops[order])


def _fewest_batches(costs: np.ndarray, batch_size: int) -> int:
    """Return the smallest number of batches that never cost more than 1; ``costs`` are in descending order."""
    least, most = -(-len(costs) // batch_size), len(costs)
    while least < most:
        middle = (least + most) // 2
        if costs[::middle].sum() <= 1 + 1e-9:  # the most expensive item of each stratum
            most = middle
        else:
            least = middle + 1
    return most
