"""Prune, distil, train for int8, stop, export: all in one fit, whatever the order of the callbacks."""

from functools import partial

import lightning as L
import pytest
import torch

from lightning_accel import Classifier, DigitsDataModule
from lightning_accel.callbacks import Distillation, Export, Pruning, Quantization, RestoringEarlyStopping
from lightning_accel.compress import load_compressed


def fit(folder, order):
    L.seed_everything(0, verbose=False)
    module = Classifier(64, 10, hidden_dims=[64, 64], optimizer=partial(torch.optim.AdamW, lr=3e-3))
    initial = [one.detach().clone() for one in module.parameters()]
    callbacks = [
        Pruning(0.8, end=0.4),
        distillation := Distillation("initial", weight=0.1),
        quantization := Quantization(mode="qat", begin=0.5, backend="pt2e", seconds=0.05),
        stopping := RestoringEarlyStopping("val/accuracy", mode="max", patience=2),
        Export("pt2", compare=False),
    ]
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=10, callbacks=callbacks[::order], default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, DigitsDataModule())
    teacher = distillation._teacher.module
    assert all(one.equal(other) for one, other in zip(teacher.parameters(), initial, strict=True)), "dense, untrained"
    return module, trainer, quantization, stopping


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", [1, pytest.param(-1, marks=pytest.mark.weekly)])
def test_one_fit_does_all(tmp_path, order, uncompiled):
    module, trainer, quantization, stopping = fit(tmp_path, order)
    half = trainer.max_epochs * trainer.num_training_batches // 2
    assert stopping.best_step > half, "the best weights are of the last phase"
    weights = [one.detach() for one in module.parameters() if one.ndim == 2]
    zeros = sum(one.eq(0).sum() for one in weights)
    assert zeros >= 0.8 * sum(one.numel() for one in weights) - 1
    assert "training_step" not in vars(module)
    assert not any(part._forward_hooks for part in module.modules())

    program = quantization.result.program
    held = [*program.state_dict.values(), *program.constants.values()]
    integers = [one for one in held if isinstance(one, torch.Tensor) and one.dtype == torch.int8 and one.ndim == 2]
    if quantization.result.name.startswith("int8"):
        assert sum(one.eq(0).sum() for one in integers) >= zeros, "zeros survive"

    (path,) = tmp_path.rglob("*.pt2")
    data = DigitsDataModule(batch_size=180)
    data.setup()
    x, target = next(iter(data.val_dataloader()))
    scores = load_compressed(path)(x)
    scores = scores if isinstance(scores, torch.Tensor) else next(iter(scores.values()))
    accuracy = scores.argmax(1).eq(target).float().mean().item()
    assert accuracy == pytest.approx(stopping.best_value, abs=0.02)
