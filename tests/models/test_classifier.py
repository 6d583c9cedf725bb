import lightning as L
import pytest
import torch
from torch import nn

from lightning_accel import Classifier, DigitsDataModule


@pytest.mark.parametrize(("options", "num_parameters"), [
    ({"num_features": 64, "hidden_dims": [5, 4]}, 64 * 5 + 5 + 5 * 4 + 4 + 4 * 10 + 10),
    ({"num_features": 1, "channels": [3, 5], "hidden_dims": [4]}, 9 * 3 + 6 + 9 * 15 + 10 + 5 * 4 + 4 + 4 * 10 + 10),
])  # fmt: skip
def test_learns_and_loads(options, num_parameters, tmp_path):
    model = Classifier(**options)
    assert sum(value.numel() for value in model.parameters()) == num_parameters
    trainer = L.Trainer(max_steps=2, logger=False, accelerator="cpu", enable_progress_bar=False,
                        default_root_dir=tmp_path, enable_model_summary=False)  # fmt: skip
    datamodule = DigitsDataModule(batch_size=128)
    trainer.fit(model, datamodule)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = Classifier.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True).eval()
    images, labels = datamodule.test_rows[:]
    torch.testing.assert_close(again(images), model.eval()(images))
    figures, *_ = trainer.test(model, datamodule, verbose=False)
    scores = model(images)
    assert figures["test/accuracy"] == pytest.approx(scores.argmax(1).eq(labels).float().mean().item())
    assert figures["test/loss"] == pytest.approx(nn.functional.cross_entropy(scores, labels).item(), rel=1e-5)
    torch.testing.assert_close(model.predict_step((images, labels), 0)["probability"], scores.softmax(1).amax(1))


def test_one_batch_can_be_overfitted():
    torch.manual_seed(0)
    x, target = torch.randn(12, 1, 8, 8), torch.arange(12) % 10
    model = Classifier(1, channels=[8, 16], optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01))
    optimizer = model.configure_optimizers()
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match=r"channels must be at least 1; got 0"):
        Classifier(1, channels=[4, 0])
