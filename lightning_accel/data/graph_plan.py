"""Batches of graphs of any sizes. Shapes: R graphs, G batches of an epoch, all processes together."""

import numpy as np

from lightning_accel.data.length_plan import Plan


class BudgetPlan:
    """Puts R rows into batches, none of which costs more than 1, whatever is drawn.

    Rows are sorted by cost and cut into strata of as many rows as there are batches, and of each stratum one row goes
    to each batch, by lot. So every batch holds large and small rows alike, no row is more likely to come with one than
    with another of like size, and every epoch has as many batches. The price is at most one largest row of room in a
    batch. Where few rows are so large that this room is dear, they come in batches of their own.

    Args:
        cost: (R,) from 0 to 1, of the budget.
        batch_size: most rows of a batch.
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
        self.fewest_rows = min(n // g for n, g in zip(self._sizes, self._batches, strict=True))

    def __len__(self) -> int:
        return sum(self._batches)

    def draw(self, seed: int, epoch: int, shuffle: bool) -> Plan:
        """The batches of ``epoch``, rows of a batch by cost, the dearest first; without ``shuffle`` those of any."""
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
    """Least number of batches whose strata never cost more than 1 together; ``costs`` fall."""
    least, most = -(-len(costs) // batch_size), len(costs)
    while least < most:
        middle = (least + most) // 2
        if costs[::middle].sum() <= 1 + 1e-9:  # the dearest of each stratum
            most = middle
        else:
            least = middle + 1
    return most
