import math

import lightning as L
import pytest
import torch

from lightning_accel.data import BarsAndStripesDataModule
from lightning_accel.data.pictures.bars import bars_and_stripes


def pictures_by_hand(size):
    found = []
    for code in range(2**size):
        bits = [code >> at & 1 for at in range(size)]
        bars = [[bit] * size for bit in bits]
        found += [(0, bars), (1, [list(column) for column in zip(*bars, strict=True)])]
    return sorted(found)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_pictures_are_all_bars_and_all_stripes(size):
    images, labels = bars_and_stripes(size)
    assert images.shape == (2 * 2**size, 1, size, size)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    found = sorted(zip(labels.tolist(), images[:, 0].long().tolist(), strict=True))
    assert found == pictures_by_hand(size)
    assert len({str(picture) for _, picture in found}) == 2 * 2**size - 2  # all 0 and all 1 are there twice


@pytest.mark.parametrize(("size", "published"), [(2, None), (3, -41.59), (4, -108.13)])
def test_the_bound_is_the_likelihood_under_the_pictures_own_frequencies(size, published):
    data = BarsAndStripesDataModule(size)
    data.setup()
    rows = data.val_rows.tensors[0].flatten(1)
    _, which, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    bound = float((counts[which].double() / len(rows)).log().sum())
    assert data.max_log_likelihood == pytest.approx(bound, abs=1e-12)
    assert published is None or data.max_log_likelihood == pytest.approx(published, abs=0.005)
    assert data.max_log_likelihood > -len(rows) * math.log(len(rows))


def test_an_epoch_of_training_takes_each_picture_as_often_as_asked():
    data = BarsAndStripesDataModule(3, batch_size=5, copies=4)
    data.setup()
    images, labels = bars_and_stripes(3)
    batches = list(data.train_dataloader())
    assert [len(rows) for rows, _ in batches] == [5] * 12 + [4]
    seen = torch.cat([torch.cat([rows.flatten(1), label[:, None]], dim=1) for rows, label in batches])
    once = torch.cat([images.flatten(1), labels[:, None]], dim=1)
    rows, counts = seen.unique(dim=0, return_counts=True)
    assert rows.equal(once.unique(dim=0))
    assert counts.tolist() == [4] * 16
    assert not seen[:16].equal(once)  # shuffled
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        torch.testing.assert_close(torch.cat([rows for rows, _ in loader]), images, rtol=0, atol=0)


class Reader(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(9, 2)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def validation_step(self, batch, batch_idx): ...

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_fits_tests_predicts_and_refuses_another_size(tmp_path):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **dict.fromkeys(off, False))
    data = BarsAndStripesDataModule()
    assert (data.num_features, data.num_classes) == (9, 2)
    trainer.fit(Reader(), data)
    trainer.test(Reader(), data, verbose=False)
    assert torch.cat(trainer.predict(Reader(), data)).tolist() == [0] * 8 + [1] * 8
    trainer.fit(Reader(), data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="was trained with size=3, and size is 4 here; give the size of its run"):
        trainer.fit(Reader(), BarsAndStripesDataModule(4), ckpt_path=tmp_path / "a.ckpt", weights_only=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 1}, r"size must lie in \[2, 12\], there being 2 \* 2\*\*size pictures; got 1"),
        ({"size": 13}, "got 13"),
        ({"copies": 0}, "copies must be at least 1; got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        BarsAndStripesDataModule(**options)
