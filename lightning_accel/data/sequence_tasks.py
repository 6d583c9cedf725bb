"""Generated tasks that tell cells apart. Shapes: R sequences, N steps of all, T steps of one.

Each is a function of its arguments and ``seed`` alone, the same on every machine. ``lengths`` is the least and the most
steps of a sequence, both included, each length as likely as any other.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from lightning_accel.data.sequence_batch import IGNORED
from lightning_accel.data.sequence_rows import SequenceRows

_ROWS_AT_ONCE = 512  # whose random numbers are in memory together


def adding_problem(num_sequences: int, lengths: tuple[int, int], seed: int) -> SequenceRows:
    """Add the two numbers that are marked: features are a number in [0, 1) and a mark, 1 at two steps and else 0.

    The target is the sum; whoever answers 1 always has a mean squared error of 1/6.

    Source: Hochreiter & Schmidhuber 1997, https://doi.org/10.1162/neco.1997.9.8.1735, task 5.4; the marks as in Bai et
    al. 2018, https://arxiv.org/abs/1803.01271, anywhere, where the former have one in either half.

    Raises:
        ValueError: if a sequence would have fewer than two steps.
    """
    _require(num_sequences, lengths, least=2)
    generator = torch.Generator().manual_seed(seed)
    steps = _draw_lengths(num_sequences, lengths, generator)
    starts = steps.cumsum(0) - steps
    first = _below(steps, generator)
    second = _below(steps - 1, generator)
    second += second >= first  # any step but the first one's
    values = torch.zeros(int(steps.sum()), 2)
    values[:, 0] = torch.rand(len(values), generator=generator)
    values[starts + first, 1] = values[starts + second, 1] = 1
    total = values[starts + first, 0] + values[starts + second, 0]
    return SequenceRows(values, steps, target=total)


def copy_memory(num_sequences: int, blanks: int, seed: int, *, symbols: int = 8, remembered: int = 10) -> SequenceRows:
    """Recall the first ten symbols in order, after ``blanks`` steps without any.

    A sequence has ``blanks + 20`` steps: symbols 1 to 8, ``blanks - 1`` zeros, and eleven marks 9, the last ten of
    which ask for the symbols. The labels, 0 to 7 for the symbols 1 to 8, stand there alone.

    Source: Arjovsky et al. 2016, https://arxiv.org/abs/1511.06464, sec. 5.1, in the form of Bai et al. 2018; there the
    blanks are labelled too, as a ninth class.

    Raises:
        ValueError: if a number is below 1.
    """
    _require_positive(num_sequences=num_sequences, blanks=blanks, symbols=symbols, remembered=remembered)
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(1, symbols + 1, (num_sequences, remembered), generator=generator)
    tokens = torch.zeros(num_sequences, blanks + 2 * remembered, dtype=torch.uint8)
    tokens[:, :remembered] = data
    tokens[:, -remembered - 1 :] = symbols + 1
    labels = torch.full(tokens.shape, IGNORED, dtype=torch.int16)
    labels[:, -remembered:] = data - 1
    return _equal_lengths(tokens, labels)


def parity(num_sequences: int, lengths: tuple[int, int], seed: int, *, each_step: bool = False) -> SequenceRows:
    """Tell whether a sequence of bits holds an odd number of ones, at its end or after ``each_step``.

    The label of each step makes the task learnable by far fewer sequences.

    Raises:
        ValueError: if a sequence would have no step.
    """
    _require(num_sequences, lengths, least=1)
    generator = torch.Generator().manual_seed(seed)
    steps = _draw_lengths(num_sequences, lengths, generator)
    ends = steps.cumsum(0)
    bits = torch.randint(2, (int(ends[-1]),), generator=generator)
    ones = bits.cumsum(0)
    before = torch.cat([ones.new_zeros(1), ones[ends - 1]])[:-1]  # ones in all sequences before
    if each_step:
        return SequenceRows(bits.byte(), steps, labels=((ones - before.repeat_interleave(steps)) % 2).to(torch.int16))
    return SequenceRows(bits.byte(), steps, target=(ones[ends - 1] - before) % 2)


def selective_copying(
    num_sequences: int, context: int, seed: int, *, vocab_size: int = 16, remembered: int = 16
) -> SequenceRows:
    """Recall in order the sixteen symbols that stand at random among the blanks of a context.

    A sequence has ``context + 16`` steps: blanks 0 with symbols 1 to 14 among them, then sixteen marks 15, which ask
    for the symbols. The labels, 0 to 13 for the symbols 1 to 14, stand at the marks alone.

    Source: Gu & Dao 2023, https://arxiv.org/abs/2312.00752, sec. 4.1.1, with a context of 4096; also Feng et al. 2024,
    https://arxiv.org/abs/2410.01201, sec. 4.1.

    Raises:
        ValueError: if the context cannot hold the symbols, or the vocabulary has no symbol.
    """
    _require_positive(num_sequences=num_sequences, remembered=remembered)
    if vocab_size < 3:
        raise ValueError(f"vocab_size must be at least 3, for a blank, a symbol and a mark; got {vocab_size}")
    if context < remembered:
        raise ValueError(f"the context must hold {remembered} symbols to recall; got a length of {context}")
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(1, vocab_size - 1, (num_sequences, remembered), generator=generator)
    tokens = torch.zeros(num_sequences, context + remembered, dtype=torch.int16)
    for rows in torch.arange(num_sequences).split(_ROWS_AT_ONCE):
        places = torch.rand(len(rows), context, generator=generator).topk(remembered, dim=1).indices
        tokens[rows[:, None], places.sort(dim=1).values] = data[rows].to(torch.int16)
    tokens[:, context:] = vocab_size - 1
    labels = torch.full(tokens.shape, IGNORED, dtype=torch.int16)
    labels[:, context:] = data - 1
    return _equal_lengths(tokens, labels)


def counting(counts: Tensor) -> SequenceRows:
    """Sequences a^n b^n, 0 for a and 1 for b, with n of ``counts`` (R,); labels say what may follow each prefix.

    0: a or b; 1: b alone; 2: the end, the prefix being of the language. A network accepts a sequence whose every
    label it predicts.

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
    return SequenceRows(letters.byte(), 2 * counts, labels=labels)


def random_counts(num_sequences: int, counts: tuple[int, int], seed: int) -> Tensor:
    """Numbers for :func:`counting`, (R,) int64, from the least to the most of ``counts``."""
    _require(num_sequences, counts, least=1)
    return _draw_lengths(num_sequences, counts, torch.Generator().manual_seed(seed))


def digit_pixels(rows_at_once: bool, permuted: bool = False) -> SequenceRows:
    """The 1,797 digits of scikit-learn in [0, 1]: 8 rows of 8 pixels, or 64 pixels one by one, ``permuted`` alike.

    Source: Le et al. 2015, https://arxiv.org/abs/1504.00941, sec. 4.2, where the digits are 28 x 28.
    """
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().div(16)
    if permuted:
        images = images[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    steps, features = (8, 8) if rows_at_once else (64, 1)
    lengths = torch.full((len(images),), steps)
    return SequenceRows(images.reshape(-1, features), lengths, target=torch.from_numpy(labels).long())


def _equal_lengths(tokens: Tensor, labels: Tensor) -> SequenceRows:
    lengths = torch.full((len(tokens),), tokens.shape[1])
    return SequenceRows(tokens.flatten(), lengths, labels=labels.flatten())


def _draw_lengths(num_sequences: int, lengths: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(lengths[0], lengths[1] + 1, (num_sequences,), generator=generator)


def _below(limits: Tensor, generator: torch.Generator) -> Tensor:
    """A whole number in [0, limit) for each of ``limits``."""
    # float64: a float32 just below 1 times the limit rounds up to the limit
    return (torch.rand(len(limits), generator=generator, dtype=torch.float64) * limits).long()


def _require(num_sequences: int, lengths: tuple[int, int], least: int) -> None:
    _require_positive(num_sequences=num_sequences)
    if not least <= lengths[0] <= lengths[1]:
        raise ValueError(f"lengths must be a pair (least, most) from {least} up; got {lengths}")


def _require_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1; got {number}")
