import lightning as L
import pytest
import torch
from sklearn.datasets import load_digits

from lightning_accel.data import DigitsDataModule
from lightning_accel.data.in_memory import BatchTensorDataset, in_memory_loader
from lightning_accel.data.pictures.digits import shift_images


def splits(**options):
    data = DigitsDataModule(**options)
    data.setup()
    return [rows.tensors for rows in (data.train_rows, data.val_rows, data.test_rows)]


def test_splits_hold_every_image_once_and_every_class_in_proportion():
    parts = splits()
    assert [len(labels) for _, labels in parts] == [1257, 180, 360]
    pixels, labels = load_digits(return_X_y=True)
    found = sorted(map(tuple, torch.cat([images.flatten(1) for images, _ in parts]).mul(16).long().tolist()))
    assert found == sorted(map(tuple, pixels.astype(int).tolist()))
    for _, part in parts:
        share = torch.bincount(part) / len(part)
        torch.testing.assert_close(share, torch.bincount(torch.from_numpy(labels)) / 1797, rtol=0, atol=0.01)


def test_few_images_keep_their_class():
    (images, all_labels), (_, val_labels), (_, test_labels) = splits()
    (same, labels), (_, val), (_, test) = splits(num_labeled=50)
    known = labels >= 0
    for one, other in ((same, images), (val, val_labels), (test, test_labels)):
        assert one.equal(other)
    assert labels.equal(all_labels.where(known, -100))
    assert torch.bincount(labels[known]).tolist() == [5] * 10
    for number in (9, 1248, 50.0):
        with pytest.raises(ValueError, match=rf"num_labeled must lie in \[10, 1247\].*; got {number}"):
            DigitsDataModule(num_labeled=number)


def test_split_depends_on_the_split_seed_alone():
    (first, _), *_ = splits(seed=3)
    torch.manual_seed(99)
    (second, _), *_ = splits(seed=3)
    (other, _), *_ = splits(seed=4)
    assert first.equal(second)
    assert not first.equal(other)


def test_batches_are_images_in_unit_range():
    data = DigitsDataModule(batch_size=50)
    data.setup()
    batches = list(data.train_dataloader())
    assert [len(labels) for _, labels in batches] == [50] * 25 + [7]
    images, labels = batches[0]
    assert (images.shape, images.dtype, labels.dtype) == ((50, 1, 8, 8), torch.float32, torch.int64)
    assert images.min() == 0
    assert images.max() == 1


@pytest.mark.slow
def test_workers_give_the_same_batches():
    loaders = []
    for num_workers in (0, 2):
        data = DigitsDataModule(num_workers=num_workers)
        data.setup()
        loaders.append(data.test_dataloader())
    torch.testing.assert_close(*map(list, loaders), rtol=0, atol=0)


def test_shift_matches_padding_and_cutting_each_image():
    images = torch.rand(40, 2, 4, 5)
    shifted = shift_images(images, 2)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    seen = set()
    for image, result in zip(padded, shifted, strict=True):
        cuts = {(i, j) for i in range(5) for j in range(5) if image[:, i : i + 4, j : j + 5].equal(result)}
        assert len(cuts) == 1
        seen |= cuts
    assert len(seen) > 12  # of 25


class Recorder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = {"train": [], "val": []}

    def training_step(self, batch, batch_idx):
        self.seen["train"].append(batch[0])
        return self.layer.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.seen["val"].append(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("max_shift", [0, 1])
def test_training_images_alone_are_shifted(max_shift):
    module, data = Recorder(), DigitsDataModule(batch_size=400, max_shift=max_shift)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    L.Trainer(max_epochs=1, accelerator="cpu", num_sanity_val_steps=0, **dict.fromkeys(off, False)).fit(module, data)
    assert torch.cat(module.seen["val"]).equal(data.val_rows.tensors[0])
    total = torch.cat(module.seen["train"]).sum()
    if max_shift == 0:
        torch.testing.assert_close(total, data.train_rows.tensors[0].sum())
    else:
        assert total < data.train_rows.tensors[0].sum() - 1  # strokes at the border leave the image


def test_impossible_shift_is_refused():
    with pytest.raises(ValueError, match=r"max_shift must lie in \[0, 7\].*got 8"):
        DigitsDataModule(max_shift=8)


def test_rows_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match=r"equal lengths; got \[3, 2\]"):
        BatchTensorDataset(torch.zeros(3), torch.zeros(2))


def test_memory_is_not_pinned_without_cuda():
    assert not in_memory_loader(BatchTensorDataset(torch.zeros(3)), DigitsDataModule(), 2, 0).pin_memory


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("seed", -1), ("num_workers", -1)])
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be at least \d; got {value}"):
        DigitsDataModule(**{name: value})


def test_checkpoint_of_another_split_is_refused():
    state = DigitsDataModule(seed=2).state_dict()
    DigitsDataModule(seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="trained with seed=2; with 0, images that it was trained on"):
        DigitsDataModule().load_state_dict(state)


@pytest.mark.parametrize("max_shift", [0, 2])
def test_binarized_images_are_0_or_1_also_when_shifted(max_shift):
    grey = splits()
    for (images, labels), (before, same) in zip(splits(binarize=True), grey, strict=True):
        assert images.equal((before * 16 > 8).float())
        assert labels.equal(same)
    module, data = Recorder(), DigitsDataModule(batch_size=400, max_shift=max_shift, binarize=True)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    L.Trainer(max_epochs=1, accelerator="cpu", num_sanity_val_steps=0, **dict.fromkeys(off, False)).fit(module, data)
    assert torch.cat(module.seen["train"] + module.seen["val"]).unique().tolist() == [0, 1]


def test_checkpoint_of_grey_images_is_refused_where_they_are_binarized():
    state = DigitsDataModule().state_dict()
    with pytest.raises(ValueError, match="trained with binarize=False; with True, the model would read images of a ki"):
        DigitsDataModule(binarize=True).load_state_dict(state)
    del state["binarize"]  # as older checkpoints have it
    DigitsDataModule().load_state_dict(state)
