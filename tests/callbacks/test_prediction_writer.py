import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_accel.callbacks import PredictionWriter
from lightning_accel.data import LengthBatchSampler, length_batch_loader
from tests.ranks import run_ranks


class Stranger(L.LightningModule):
    """A module that knows nothing of us; ``answer`` makes its predictions from the rows."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.answer(batch[0] if isinstance(batch, list) else batch)


def predict(answer, loaders, folder, **kwargs):
    off = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(accelerator="cpu", default_root_dir=folder, callbacks=[PredictionWriter()], **off, **kwargs)
    trainer.predict(Stranger(answer), loaders)
    return pd.read_csv(folder / "predictions.csv")


def loader(num_rows=7, **kwargs):
    return DataLoader(TensorDataset(torch.arange(num_rows)), **{"batch_size": 3, **kwargs})


def both(x):
    return {"double": 2 * x, "name": [f"n{i}" for i in x.tolist()], "score": torch.stack([x, -x], dim=1) / 2}


def test_dicts_become_columns_in_the_order_of_the_rows(tmp_path):
    table = predict(both, loader(), tmp_path)
    assert list(table.columns) == ["row", "double", "name", "score_0", "score_1"]
    assert table["row"].tolist() == list(range(7))
    assert table["double"].tolist() == list(range(0, 14, 2))
    assert table["name"].tolist() == [f"n{i}" for i in range(7)]
    assert table["score_1"].tolist() == [-i / 2 for i in range(7)]


class TwoColumns(L.LightningDataModule):
    predict_columns = pd.DataFrame({"key": ["a", "b", "c", "d"], "class": ["x", "y", None, "x"]}, index=[7, 3, 5, 1])

    def predict_dataloader(self):
        return loader(4)


def test_columns_of_the_file_and_probabilities_of_all_classes(tmp_path):
    off = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(accelerator="cpu", default_root_dir=tmp_path, callbacks=[PredictionWriter()], **off)
    module = Stranger(lambda x: {"class": ["y"] * len(x), "probabilities": torch.stack([x / 8, 1 - x / 8], dim=1)})
    module.class_names = ["x", "y"]
    trainer.predict(module, datamodule=TwoColumns())
    table = pd.read_csv(tmp_path / "predictions.csv")
    assert list(table) == ["row", "key", "file_class", "class", "probabilities_x", "probabilities_y"]
    assert table["key"].tolist() == ["a", "b", "c", "d"]
    assert table["file_class"].fillna("").tolist() == ["x", "y", "", "x"]
    assert table["probabilities_x"].tolist() == [0, 1 / 8, 1 / 4, 3 / 8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int32])
def test_plain_tensors_of_any_dtype(tmp_path, dtype):
    table = predict(lambda x: x.to(dtype), loader(), tmp_path)
    assert table["prediction"].astype(float).tolist() == torch.arange(7).to(dtype).float().tolist()


def test_several_loaders(tmp_path):
    table = predict(lambda x: x, [loader(2), loader(4)], tmp_path)
    assert table["loader"].tolist() == [0, 0, 1, 1, 1, 1]
    assert table["row"].tolist() == table["prediction"].tolist() == [0, 1, 0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:Total length of `DataLoader` across ranks is zero")
def test_loader_without_rows_costs_the_others_nothing(tmp_path):
    table = predict(lambda x: x, [loader(2), loader(0), loader(1)], tmp_path)
    assert table["loader"].tolist() == [0, 0, 2]
    assert table["row"].tolist() == table["prediction"].tolist() == [0, 1, 0]


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
def test_loaders_all_without_rows_are_refused(tmp_path):
    empty = DataLoader(Stream(0))
    with pytest.raises(TypeError, match="nothing to write: no loader gave a batch"):
        predict(lambda x: x, [empty, empty], tmp_path)


def test_loaders_may_differ_in_their_columns(tmp_path):
    table = predict(lambda x: {"a": x} if len(x) == 2 else {"b": x}, [loader(2), loader(1)], tmp_path)
    assert table["a"].tolist()[:2] == [0, 1]
    assert table["b"].isna().tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: {"a": x, "b": x} if len(x) == 3 else {"a": x}, r"same columns for every batch; some lack \['b'\]"),
        (lambda x: {"a": x} if len(x) == 3 else {"a": x, 7: x}, r"same columns for every batch; some lack \['7'\]"),
        (lambda x: torch.zeros(len(x), len(x)), r"some lack \['prediction_1', 'prediction_2'\]"),
    ],
)
def test_batches_of_other_columns_are_refused(tmp_path, answer, said):
    with pytest.raises(ValueError, match=said):
        predict(answer, loader(), tmp_path)
    assert not (tmp_path / "predictions.csv").exists()


class Stream(IterableDataset):
    def __init__(self, num_rows=5):
        self.num_rows = num_rows

    def __iter__(self):
        return iter(torch.arange(self.num_rows))


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
def test_stream_is_numbered_as_it_came(tmp_path):
    table = predict(lambda x: 10 * x, DataLoader(Stream(), batch_size=2), tmp_path)
    assert table["row"].tolist() == list(range(5))
    assert table["prediction"].tolist() == [0, 10, 20, 30, 40]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: x.view(1, 1, -1), r"returned Tensor of shape \(1, 1, 3\) for 'prediction'"),
        (lambda x: {"a": 3}, r"returned int for 'a'"),
        (lambda x: [row.expand(2) for row in x], r"list of Tensor of shape \(2,\) for 'prediction'.*torch.stack"),
        (lambda x: {"a": [np.ones((2, 2)) for _ in x]}, r"list of ndarray of shape \(2, 2\) for 'a'"),
        (lambda x: x[:2], r"each of the 3 rows of a batch; got \{'prediction': 2\}"),
        (lambda x: {"a": x, "b": x[:1]}, r"each of the 3 rows of a batch; got \{'a': 3, 'b': 1\}"),
        (lambda x: {"s": torch.zeros(len(x), 2), "s_0": x}, r"two columns named 's_0'"),
        (lambda x: {"row": x}, r"two columns named 'row'"),
    ],
)
def test_what_does_not_fit_a_table_is_refused_at_the_first_batch(tmp_path, answer, said):
    seen = []

    def watched(x):
        seen.append(x)
        return answer(x)

    with pytest.raises((TypeError, ValueError), match=said):
        predict(watched, loader(), tmp_path)
    assert len(seen) == 1
    assert not (tmp_path / "predictions.csv").exists()


def test_arrays_and_lists_of_tensors(tmp_path):
    def answer(x):
        return {"a": x.numpy(), "b": list(x), "c": x.numpy().astype(str), "d": [row.view(1) for row in x]}

    table = predict(answer, loader(), tmp_path)
    for name in "abcd":
        assert table[name].tolist() == list(range(7))


def test_fast_dev_run_writes_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        predict(both, loader(), tmp_path, fast_dev_run=True)


def test_rows_drawn_twice_by_the_users_own_sampler_stay(tmp_path):
    assert predict(both, loader(sampler=[0, 2, 2]), tmp_path)["row"].tolist() == [0, 2, 2]


def check_predict(rank, folder, own_sampler):
    data = TensorDataset(torch.arange(7))
    kwargs = {"sampler": DistributedSampler(data, 2, rank, shuffle=False)} if own_sampler else {}
    predict(both, DataLoader(data, batch_size=3, **kwargs), folder, devices=2, strategy="ddp")


class OfOneRank(Stream):
    """Rows on the first rank alone."""

    def __iter__(self):
        return iter(torch.arange(self.num_rows if torch.distributed.get_rank() == 0 else 0))


def check_empty(rank, folder, num_rows):
    data = DataLoader(OfOneRank(num_rows), batch_size=2)
    if num_rows:
        predict(both, data, folder, devices=2, strategy="ddp")
        return
    with pytest.raises(TypeError, match="nothing to write"):  # on both: neither waits for the other
        predict(both, data, folder, devices=2, strategy="ddp")


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
@pytest.mark.parametrize("num_rows", [0, 3])
def test_rank_without_rows(tmp_path, num_rows):
    run_ranks(check_empty, tmp_path, num_rows)
    if num_rows:
        assert pd.read_csv(tmp_path / "predictions.csv")["double"].tolist() == [0, 2, 4]


@pytest.mark.parametrize("own_sampler", [False, True])
def test_ranks_write_each_row_once(tmp_path, own_sampler):
    """Seven rows on two ranks: torch's own sampler repeats one of them."""
    run_ranks(check_predict, tmp_path, own_sampler)
    table = pd.read_csv(tmp_path / "predictions.csv")
    assert table["row"].tolist() == list(range(7))
    assert table["double"].tolist() == list(range(0, 14, 2))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Couldn't infer")  # Lightning's
def test_an_order_that_is_not_known_is_told(tmp_path):
    lengths = [1, 9, 2, 8]
    loader = length_batch_loader([(torch.ones(n, 1), None) for n in lengths], LengthBatchSampler(lengths, 2))
    with pytest.warns(UserWarning, match="order of LengthBatchSampler, which does not tell which rows"):
        predict(lambda batch: batch.lengths, loader, tmp_path)
