import lightning as L
import pytest
import torch

from lightning_accel.measure import make_run
from tests.planted import Sleeping, rows


@pytest.mark.parametrize("change", [lambda module: module, torch.compile])
def test_a_run_is_returned_as_it_is_made(change):
    made = L.Trainer(logger=False, enable_checkpointing=False), change(Sleeping()), rows()
    assert make_run(lambda **options: (*made[:2], options), {"precision": 64}) == (*made[:2], {"precision": 64})


def test_anything_else_is_named():
    trainer, module, data = L.Trainer(logger=False, enable_checkpointing=False), Sleeping(), rows()
    for made, name in [
        ((module, data, trainer), r"\(Sleeping, DataLoader, Trainer\)"),
        ((trainer, data, module), r"\(Trainer, DataLoader, Sleeping\)"),
        ((trainer, module), r"\(Trainer, Sleeping\)"),
        (trainer, "Trainer"),
        ([trainer, module, data], "list"),
    ]:
        with pytest.raises(TypeError, match=rf"must return \(trainer, module, data\), in this order; got {name}$"):
            make_run(lambda made=made: made, {})
