"""Networks that nobody here wrote: they train as they are, and with callbacks that change weights."""

import lightning as L
import pytest
import torch

from lightning_accel.callbacks import Distillation, Pruning
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that the networks are from
QUIET = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
ONCE = {"schedule": "one_shot", "begin": 0, "end": 1, "scope": "layer"}


def fit(name, *callbacks):
    """Train for three steps, and validate on four samples."""
    model = ZOO[name]
    pytest.importorskip(model.requires)
    L.seed_everything(0, verbose=False)
    module = model.make()
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=list(callbacks), **QUIET)
    trainer.fit(module, model.loader(), model.loader(4))
    return module


def test_the_zoo_is_large():
    assert len(ZOO) >= 24


@pytest.mark.parametrize("name", ZOO)
def test_models_train(name):
    module = fit(name)
    assert torch.isfinite(module.trainer.callback_metrics["val_loss"])
    assert module.trainer.global_step == 3


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["unstructured", "2:4"])
@pytest.mark.parametrize("name", ZOO)
def test_weights_of_matrices_are_pruned(name, structure):
    """Half of each parameter that the callback does not name with a reason."""
    pruning = Pruning(0.5 if structure == "unstructured" else None, structure=structure, **ONCE)
    module = fit(name, pruning)
    pruned = {key: one for key, one in module.named_parameters() if key not in pruning.left_out}
    assert sum(one.numel() for one in pruned.values()) > 0.3 * sum(one.numel() for one in module.parameters())
    for key, one in pruned.items():
        assert (one == 0).double().mean() == pytest.approx(0.5, abs=0.5 / min(one.shape) if one.ndim > 1 else 1), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_a_teacher_teaches(name):
    """Itself, as it was at the beginning, from which two steps have led away."""
    distance = fit(name, Distillation("initial")).trainer.callback_metrics["train/distillation_loss"]
    assert 0 < distance < 100
