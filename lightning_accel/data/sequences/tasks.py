"""Generated tasks that distinguish recurrent cells. Shapes: R sequences, N steps of all, T steps of one.

Each depends on its arguments and ``seed`` alone and is the same on every machine. ``lengths`` is the minimum and the
maximum number of steps of a sequence, both inclusive; lengths are uniformly distributed.
"""

import torch
from torch import Tensor

from lightning_accel.data.bounds import require_at_least
from lightning_accel.data.sequences.batch import IGNORED
from lightning_accel.data.sequences.dataset import SequenceDataset
from lightning_accel.ops.extras import import_on_use

datasets = import_on_use("sklearn.datasets")

_MARK = 15  # token of selective copying that asks for a symbol
_REMEMBERED = 16  # symbols of a sequence of selective copying
_ROWS_AT_ONCE = 512  # sequences whose random numbers are in memory at a time


def adding_problem(num_sequences: int, lengths: tuple[int, int], seed: int) -> SequenceDataset:
    """Generate the adding problem: features are a number in [0, 1) and a mark, 1 at two steps; the target is their sum.

    Predicting 1 always has a mean squared error of 1/6.

    Source: Hochreiter & Schmidhuber 1997, https://doi.org/10.1162/neco.1997.9.8.1735, task 5.4; the marks are anywhere,
    as in Bai et al. 2018, https://arxiv.org/abs/1803.01271, while the former have one in either half.

    Raises:
        ValueError: if a sequence would have fewer than two steps.
    """
    _require_lengths(num_sequences, lengths, least=2)
    generator = torch.Generator().manual_seed(seed)
    steps = _draw_lengths(num_sequences, lengths, generator)
    starts = steps.cumsum(0) - steps
    first = _random_below(steps, generator)
    second = _random_below(steps - 1, generator)
    second += second >= first  # any step but that of the first mark
    values = torch.zeros(int(steps.sum()), 2)
    values[:, 0] = torch.rand(len(values), generator=generator)
    values[starts + first, 1] = values[starts + second, 1] = 1
    total = values[starts + first, 0] + values[starts + second, 0]
    return SequenceDataset(values, steps, target=total)


def parity(num_sequences: int, lengths: tuple[int, int], seed: int, *, each_step: bool = False) -> SequenceDataset:
    """Generate sequences of bits labelled by the parity of their ones, at the end or after ``each_step``.

    With a label for each step, the task can be learned from far fewer sequences.

    Raises:
        ValueError: if a sequence would have no step.
    """
    _require_lengths(num_sequences, lengths, least=1)
    generator = torch.Generator().manual_seed(seed)
    steps = _draw_lengths(num_sequences, lengths, generator)
    ends = steps.cumsum(0)
    bits = torch.randint(2, (int(ends[-1]),), generator=generator)
    ones = bits.cumsum(0)
    before = torch.cat([ones.new_zeros(1), ones[ends - 1]])[:-1]  # ones in all previous sequences
    if each_step:
        return SequenceDataset(
            bits.byte(), steps, labels=((ones - before.repeat_interleave(steps)) % 2).to(torch.int16)
        )
    return SequenceDataset(bits.byte(), steps, target=(ones[ends - 1] - before) % 2)


def selective_copying(num_sequences: int, context: int, seed: int) -> SequenceDataset:
    """Generate the selective copying task: recall, in order, sixteen symbols at random positions among blanks.

    A sequence has ``context + 16`` steps: blanks 0 with sixteen symbols 1 to 14 among them, then sixteen marks 15. The
    marks have labels, 0 to 13 for the symbols 1 to 14; other steps have none.

    Source: Gu & Dao 2023, https://arxiv.org/abs/2312.00752, sec. 4.1.1, with a context of 4096; also Feng et al. 2024,
    https://arxiv.org/abs/2410.01201, sec. 4.1.

    Raises:
        ValueError: if the context cannot hold the symbols.
    """
    require_at_least(1, num_sequences=num_sequences)
    if context < _REMEMBERED:
        raise ValueError(f"the context must hold {_REMEMBERED} symbols to recall; got a length of {context}")
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(1, _MARK, (num_sequences, _REMEMBERED), generator=generator)
    tokens = torch.zeros(num_sequences, context + _REMEMBERED, dtype=torch.int16)
    for rows in torch.arange(num_sequences).split(_ROWS_AT_ONCE):
        places = torch.rand(len(rows), context, generator=generator).topk(_REMEMBERED, dim=1).indices
        tokens[rows[:, None], places.sort(dim=1).values] = data[rows].to(torch.int16)
    tokens[:, context:] = _MARK
    labels = torch.full(tokens.shape, IGNORED, dtype=torch.int16)
    labels[:, context:] = data - 1
    return _equal_lengths(tokens, labels)


def counting(counts: Tensor) -> SequenceDataset:
    """Generate sequences a^n b^n, 0 for a and 1 for b, n from ``counts`` (R,), labelled by what may follow each prefix.

    The labels are 0 for a or b, 1 for b only, 2 for the end, where the prefix is in the language. A network accepts a
    sequence if it predicts all labels.

    Source: Gers & Schmidhuber 2001, https://doi.org/10.1109/72.963769, sec. III; Weiss et al. 2018,
    https://arxiv.org/abs/1805.04908, compare cells by it.

    Raises:
        ValueError: if a count is below 1.

    >>> counting(torch.tensor([2]))[0].target
    tensor([[0, 0, 1, 2]])
    """
    if len(counts) == 0 or int(counts.min()) < 1:
        raise ValueError(f"counts must hold numbers of at least 1; got {counts.tolist()[:8]}")
    halves = torch.stack([counts, counts], dim=1).flatten()
    letters = torch.tensor([0, 1]).repeat(len(counts)).repeat_interleave(halves)
    labels = letters.to(torch.int16)
    labels[halves.cumsum(0)[1::2] - 1] = 2
    return SequenceDataset(letters.byte(), 2 * counts, labels=labels)


def random_counts(num_sequences: int, counts: tuple[int, int], seed: int) -> Tensor:
    """Draw n for :func:`counting`, (R,) int64, uniformly between the two numbers ``counts``, both inclusive."""
    _require_lengths(num_sequences, counts, least=1)
    return _draw_lengths(num_sequences, counts, torch.Generator().manual_seed(seed))


def digit_pixels(rows_at_once: bool, permuted: bool = False) -> SequenceDataset:
    """Return the 1,797 digits of scikit-learn in [0, 1] as 8 rows of 8 pixels, or as 64 pixels, equally ``permuted``.

    Source: Le et al. 2015, https://arxiv.org/abs/1504.00941, sec. 4.2, where the digits are 28 x 28.
    """
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().div(16)
    if permuted:
        images = images[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    steps, features = (8, 8) if rows_at_once else (64, 1)
    lengths = torch.full((len(images),), steps)
    return SequenceDataset(images.reshape(-1, features), lengths, target=torch.from_numpy(labels).long())


def _equal_lengths(tokens: Tensor, labels: Tensor) -> SequenceDataset:
    lengths = torch.full((len(tokens),), tokens.shape[1])
    return SequenceDataset(tokens.flatten(), lengths, labels=labels.flatten())


def _draw_lengths(num_sequences: int, lengths: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(lengths[0], lengths[1] + 1, (num_sequences,), generator=generator)


def _random_below(limits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an integer in [0, limit) for each of ``limits``."""
    # float64, as a float32 just below 1 times the limit may be rounded up to the limit
    return (torch.rand(len(limits), generator=generator, dtype=torch.float64) * limits).long()


def _require_lengths(num_sequences: int, lengths: tuple[int, int], least: int) -> None:
    require_at_least(1, num_sequences=num_sequences)
    if not least <= lengths[0] <= lengths[1]:
        raise ValueError(f"lengths must be a pair (least, most) from {least} up; got {lengths}")
