import gzip
import struct
import tracemalloc

import lightning as L
import numpy as np
import pytest
import torch

from lightning_accel.data import IdxDataModule, read_idx

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array):
    """Bytes of an IDX file."""
    header = struct.pack(">BBBB", 0, 0, CODES[array.dtype.str[1:]], array.ndim) + struct.pack(
        f">{array.ndim}I", *array.shape
    )
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def put(path, array, pack=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(idx(array)) if pack else idx(array))
    return path


def some_images(num_rows, seed=0, shape=(4, 3)):
    images = np.random.default_rng(seed).integers(0, 256, (num_rows, *shape), dtype=np.uint8)
    images.flat[:2] = 0, 255
    return images


def some_labels(num_rows, num_classes=3):
    return (np.arange(num_rows) % num_classes).astype(np.uint8)


@pytest.fixture
def mnist(tmp_path):
    """A folder like MNIST's, of 40 and 9 images."""
    put(tmp_path / "train-images-idx3-ubyte", some_images(40))
    put(tmp_path / "train-labels-idx1-ubyte", some_labels(40))
    put(tmp_path / "t10k-images-idx3-ubyte.gz", some_images(9, 1), pack=True)
    put(tmp_path / "t10k-labels-idx1-ubyte.gz", some_labels(9), pack=True)
    return tmp_path


def set_up(path, stage=None, **options):
    data = IdxDataModule(path, **options)
    data.setup(stage)
    return data


def whole(loader):
    return [torch.cat(parts) for parts in zip(*loader, strict=True)]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("kind", list(CODES))
@pytest.mark.parametrize("shape", [(5,), (2, 3), (3, 2, 1, 2)])
def test_every_type_and_rank_is_read(tmp_path, kind, shape, pack):
    array = np.random.default_rng(0).normal(scale=99, size=shape).astype(kind)
    found = read_idx(put(tmp_path / "a", array, pack))
    assert found.dtype == array.dtype
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, array)
    found[0] = 0  # torch warns of arrays that are not writable


def test_bytes_of_a_known_file_are_read(tmp_path):
    (tmp_path / "a").write_bytes(bytes.fromhex("00000b02 00000002 00000001 0102 ff00"))
    assert read_idx(tmp_path / "a").tolist() == [[0x0102], [-256]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; an IDX file was needed"),
        (b"\0\0", "is no IDX file: those begin with two bytes of 0, one of 08, 09, 0b, 0c, 0d, 0e for the type, and"),
        (b"1,2,3\n", "it begins with 31 2c 32 2c"),
        (b"\0\0\x0a\1\0\0\0\1\0", "it begins with 00 00 0a 01"),
        (b"\0\0\x08\0", "it begins with 00 00 08 00"),
        (b"\0\0\x08\3\0\0\0\1", "cut short: a header of 3 dimensions takes 16 bytes, and 8 are there"),
        (idx(some_images(5))[:-7], r"cut short: its header says \(5, 4, 3\) of 1 bytes each, 60 bytes, and 53 are the"),
        (idx(np.ones(3, "f8")) + b"\0", r"too long: its header says \(3,\) of 8 bytes each, 24 bytes, and 25"),
        (idx(np.zeros((0, 4, 3), "u1")), r"holds no values: its shape is \(0, 4, 3\)"),
        (b"\0\0\x08\3" + b"\xff" * 12, r"cut short: its header says \(4294967295, 4294967295, 4294967295\)"),
        (
            gzip.compress(idx(some_images(50)), mtime=0)[:-20],
            "is gzipped and cannot be unpacked: .* Fetch or write it again",
        ),
        (gzip.compress(idx(some_images(50)), mtime=0)[:30] + b"spoilt" * 9, "is gzipped and cannot be unpacked"),
    ],
)
def test_files_that_are_not_what_they_seem_are_refused(tmp_path, content, said):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path} .*{said}|{path} {said}"):
        read_idx(path)


def test_splits_hold_every_image_once_and_every_class_in_proportion(mnist):
    images, labels = some_images(40), some_labels(40)
    data = set_up(mnist, val_share=0.3, batch_size=7)
    found, targets = (torch.cat(parts) for parts in zip(*map(whole, (data.train_dataloader(), data.val_dataloader()))))  # noqa: B905
    assert (found.shape, found.dtype, targets.dtype) == ((40, 1, 4, 3), torch.float32, torch.int64)
    seen = sorted(zip(found.mul(255).round().long().flatten(1).tolist(), targets.tolist(), strict=True))
    assert seen == sorted(zip(images.reshape(40, -1).tolist(), labels.tolist(), strict=True))
    assert len(data.val_rows) == 12
    assert whole(data.val_dataloader())[1].bincount().tolist() == [4, 4, 4]
    assert (data.num_features, data.image_shape, data.num_classes) == (12, (1, 4, 3), 3)
    assert data.class_names == ["0", "1", "2"]
    (first, *_), (second, *_) = data.train_dataloader(), data.train_dataloader()
    assert not first[0].equal(second[0])  # shuffled


def test_test_and_prediction_run_over_the_test_file(mnist):
    data = set_up(mnist, batch_size=4)
    images, labels = whole(data.test_dataloader())
    np.testing.assert_allclose(images[:, 0].numpy(), some_images(9, 1) / 255, rtol=1e-6)
    assert labels.tolist() == some_labels(9).tolist()
    (predicted,) = whole(data.predict_dataloader())
    assert predicted.equal(images)


def test_split_depends_on_the_split_seed_alone(mnist):
    first = whole(set_up(mnist, seed=3).val_dataloader())
    torch.manual_seed(99)
    assert first[0].equal(whole(set_up(mnist, seed=3).val_dataloader())[0])
    assert not first[0].equal(whole(set_up(mnist, seed=4).val_dataloader())[0])


@pytest.mark.parametrize(
    "names",
    [
        ("train-images.idx3-ubyte", "train-labels.idx1-ubyte", "t10k-images.idx3-ubyte", "t10k-labels.idx1-ubyte"),
        ("emnist-letters-train-images-idx3-ubyte.gz", "emnist-letters-train-labels-idx1-ubyte.gz",
         "emnist-letters-test-images-idx3-ubyte.gz", "emnist-letters-test-labels-idx1-ubyte.gz"),
    ],
)  # fmt: skip
def test_names_in_use_are_found(tmp_path, names):
    arrays = some_images(40), some_labels(40), some_images(9, 1), some_labels(9)
    for name, array in zip(names, arrays, strict=True):
        put(tmp_path / name, array, pack=name.endswith(".gz"))
    data = set_up(tmp_path)
    assert len(whole(data.test_dataloader())[0]) == 9


def test_an_unpacked_file_counts_before_the_packed_one(mnist):
    (mnist / "train-images-idx3-ubyte.gz").write_bytes(b"not read")
    assert len(set_up(mnist).train_rows) == 36


def test_several_files_that_fit_are_told(mnist):
    put(mnist / "fashion-train-images-idx3-ubyte", some_images(3))
    with pytest.raises(ValueError, match=r"several files of train-images: fashion-train.*, train-images-idx3-ubyte. "):
        set_up(mnist)


def test_images_do_without_labels(mnist):
    for path in mnist.glob("*labels*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"no train-labels-idx1-ubyte, .*; for images alone, set labelled to"):
        set_up(mnist)
    data = set_up(mnist, labelled=False, val_share=0.25)
    assert [len(batch) for batch in data.train_dataloader()] == [1]
    assert [len(data.train_rows), len(data.val_rows), len(data.test_rows)] == [30, 10, 9]
    assert not hasattr(data, "num_classes")


def test_classes_are_those_of_the_training_file(mnist):
    put(mnist / "train-labels-idx1-ubyte", some_labels(40) * 5 + 1)
    (mnist / "t10k-labels-idx1-ubyte.gz").unlink()
    put(mnist / "t10k-labels-idx1-ubyte", np.array([11, 6, 1, 1, 6, 11, 1, 1, 1], "i4"))
    data = set_up(mnist)
    assert data.class_names == ["1", "6", "11"]
    assert whole(data.test_dataloader())[1].tolist() == [2, 1, 0, 0, 1, 2, 0, 0, 0]
    assert whole(data.train_dataloader())[1].unique().tolist() == [0, 1, 2]
    put(mnist / "t10k-labels-idx1-ubyte", np.arange(9, dtype="u1"))
    with pytest.raises(
        ValueError, match=r"labels of .*t10k-images.* hold 0, which those of the training images do not"
    ):
        set_up(mnist)


def test_the_training_files_least_and_greatest_become_0_and_1(mnist):
    images = np.linspace(20, 240, 480).reshape(40, 4, 3).astype("u1")
    put(mnist / "train-images-idx3-ubyte", images)
    (mnist / "t10k-images-idx3-ubyte.gz").unlink()
    put(mnist / "t10k-images-idx3-ubyte", np.full((9, 4, 3), 250, "u1"))
    data = set_up(mnist)
    rows = torch.cat([whole(loader)[0] for loader in (data.train_dataloader(), data.val_dataloader())]).flatten(1)
    expected = (images.astype("f8") - 20) / 220
    np.testing.assert_allclose(sorted(rows.tolist()), sorted(expected.reshape(40, -1).tolist()), rtol=1e-6, atol=1e-7)
    assert whole(data.test_dataloader())[0].unique().tolist() == [1]  # cut


def test_bytes_of_0_and_1_stay_0_and_1(mnist):
    for path in mnist.glob("*images*"):
        put(path, (some_images(40 if "train" in path.name else 9) > 99).astype("u1"))
    assert whole(set_up(mnist).train_dataloader())[0].unique().tolist() == [0, 1]


def test_binarized_images_are_0_or_1(mnist):
    data = set_up(mnist, binarize=True)
    assert whole(data.test_dataloader())[0].equal(torch.from_numpy(some_images(9, 1) > 127).float()[:, None])


@pytest.mark.parametrize(("shape", "batch"), [((4,), (4,)), ((2, 3, 4), (2, 3, 4))])
def test_other_ranks_keep_their_shape(tmp_path, shape, batch):
    put(tmp_path / "train-images-idx3-ubyte", some_images(20, shape=shape))
    put(tmp_path / "train-labels-idx1-ubyte", some_labels(20))
    data = set_up(tmp_path, val_share=0.2)
    assert next(iter(data.val_dataloader()))[0].shape == (4, *batch)
    assert data.train_rows[3][0].shape == batch


def test_predict_path_gives_images_alone(mnist):
    data = set_up(mnist, predict_path=put(mnist / "new", some_images(6, 5)))
    (images,) = whole(data.predict_dataloader())
    np.testing.assert_allclose(images[:, 0].numpy(), some_images(6, 5) / 255, rtol=1e-6)


def spoil(name, array):
    def change(folder):
        for path in folder.glob(f"{name}*"):
            path.unlink()
        if array is not None:
            put(folder / f"{name}-idx3-ubyte", array)

    return change


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (spoil("train-images", None), FileNotFoundError, "no train-images-idx3-ubyte, gz"),
        (spoil("t10k-labels", None), FileNotFoundError,
         "no t10k-labels-idx1-ubyte or test-labels-idx1-ubyte, .*; for images"),
        (spoil("train-labels", some_labels(39)), ValueError, "holds 40 images and .*train-labels.* 39 labels;"),
        (spoil("train-labels", some_images(40)), ValueError, r"one whole number for each image, \(N,\); .* holds \(40"),
        (spoil("train-labels", np.ones(40, "f4")), ValueError, r"holds \(40,\) float32"),
        (spoil("train-images", some_labels(40)), ValueError, r"images must be bytes, \(N, H, W\) or .*\(40"),
        (spoil("train-images", np.ones((40, 4, 3), "f4")), ValueError, r"must be bytes.* holds \(40, 4, 3\) float32"),
        (spoil("train-images", np.full((40, 4, 3), 9, "u1")), ValueError, r"images must vary .*; every value .* 9"),
        (spoil("t10k-images", some_images(9, shape=(3, 4))), ValueError,
         r"holds images of \(3, 4\), and the training images are of \(4, 3\); give files that belong"),
        (spoil("train-labels", np.arange(40, dtype="u1")), ValueError, "train-labels.* has too few rows to split"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused(mnist, change, error, said):
    change(mnist)
    with pytest.raises(error, match=said):
        set_up(mnist)


def test_missing_test_files_matter_to_a_test_alone(mnist):
    for path in mnist.glob("t10k*"):
        path.unlink()
    set_up(mnist, "fit")
    set_up(mnist, "predict", predict_path=mnist / "train-images-idx3-ubyte")
    for stage in ("test", "predict"):
        with pytest.raises(FileNotFoundError, match=r"no t10k-images-idx3-ubyte or .*, gzipped or not, in the folder"):
            set_up(mnist, stage)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"val_share": 0}, "val_share must lie between 0 and 1; got 0"), ({"batch_size": 0}, "batch_size must be at le")],
)
def test_numbers_out_of_range_are_refused(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        IdxDataModule(tmp_path, **options)
    with pytest.raises(FileNotFoundError, match=f"no folder {tmp_path}/no; path is the folder of the IDX files"):
        IdxDataModule(tmp_path / "no")


@pytest.mark.parametrize("change", [{"seed": 1}, {"binarize": True}, {"labelled": False}, {"val_share": 0.2}])
def test_checkpoint_of_other_options_is_refused(mnist, change):
    state = set_up(mnist).state_dict()
    set_up(mnist, batch_size=3).load_state_dict(state)
    with pytest.raises(ValueError, match=r"trained on other images than those of .* as configured: .* there, .* here"):
        set_up(mnist, **change).load_state_dict(state)


def test_checkpoint_of_other_files_is_refused(mnist):
    state = set_up(mnist).state_dict()
    put(mnist / "train-images-idx3-ubyte", some_images(40, 3))
    with pytest.raises(ValueError, match=r"digest of the data .* there, .* here"):
        set_up(mnist).load_state_dict(state)


class Reader(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(12, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def validation_step(self, batch, batch_idx): ...

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0].flatten(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_fits_tests_predicts_and_resumes(mnist):
    options = {
        "accelerator": "cpu", "default_root_dir": mnist, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    trainer, data = L.Trainer(max_epochs=1, **options), IdxDataModule(mnist, batch_size=8)
    trainer.fit(Reader(), data)
    trainer.save_checkpoint(mnist / "a.ckpt")
    trainer.test(Reader(), data, verbose=False)
    assert len(torch.cat(trainer.predict(Reader(), data))) == 9
    again = L.Trainer(max_epochs=2, **options)
    again.fit(Reader(), IdxDataModule(mnist, batch_size=8), ckpt_path=mnist / "a.ckpt", weights_only=True)
    assert again.global_step == 10


def test_workers_give_the_same_batches(mnist):
    torch.testing.assert_close(*[whole(set_up(mnist, num_workers=n).test_dataloader()) for n in (0, 2)])


@pytest.mark.slow
def test_sixty_thousand_images_stay_bytes(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (60000, 28, 28), dtype=np.uint8)
    put(tmp_path / "train-images-idx3-ubyte", images)
    put(tmp_path / "train-labels-idx1-ubyte", some_labels(60000, 10))
    tracemalloc.start()
    data = set_up(tmp_path, batch_size=256)
    (first, _), *_ = data.train_dataloader()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert first.shape == (256, 1, 28, 28)
    assert kept < 1.2 * images.nbytes
    assert peak < 2.2 * images.nbytes  # the file and the array made of it
    assert data.train_rows.images.dtype == torch.uint8
    assert data.train_rows.images.data_ptr() == data.val_rows.images.data_ptr()
