"""State of the global random number generators, in a form that checkpoints can hold."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state(cuda: bool = True) -> dict[str, Any]:
    """Return the states of torch's, NumPy's and Python's global generators in this process."""
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002  # user code draws from the global one
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda and torch.cuda.is_available() else [],
        "numpy": {
            "key": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore ``state``, a :func:`random_state`; for CUDA, only the devices that both machines have."""
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available():
        for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator.cpu(), device)
    saved = state["numpy"]
    np.random.set_state(  # noqa: NPY002
        ("MT19937", saved["key"].numpy().astype(np.uint32), saved["pos"], saved["has_gauss"], saved["gauss"])
    )
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def seed_random_state(seed: int) -> None:
    """Seed all global generators with ``seed`` in [0, 2**63)."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def derived_seed(*parts: int) -> int:
    """Compute a seed in [0, 2**63) that differs for different ``parts``.

    >>> derived_seed(1, 2) == derived_seed(1, 2) != derived_seed(2, 1)
    True
    """
    return random.Random(" ".join(map(str, parts))).getrandbits(63)


class RandomStream:
    """Draw from the global CPU generators with a separate state, which continues at each :meth:`drawing`."""

    def __init__(self, seed: int) -> None:
        with restored_random_state(cuda=False):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed CUDA's, too
            np.random.seed(seed % 2**32)  # noqa: NPY002
            random.seed(seed)
            self.state = random_state(cuda=False)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        with restored_random_state(cuda=False):
            set_random_state(self.state)
            try:
                yield
            finally:
                self.state = random_state(cuda=False)


@contextmanager
def restored_random_state(cuda: bool = True) -> Iterator[None]:
    """Restore the state of the global generators on exit, also after an exception."""
    before = random_state(cuda)
    try:
        yield
    finally:
        set_random_state(before)
