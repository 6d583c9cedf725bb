import itertools
import os

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_accel import TextDataModule
from lightning_accel.callbacks import ExactResume
from lightning_accel.data.samplers import ResumableLoader, ResumableSampler, RowPosition
from lightning_accel.data.text.tokens import ByteTokenizer, TokenStream, map_file, vocabulary_size

CONTEXT = 4


@pytest.fixture
def folder(tmp_path):
    """Three texts of 1205 bytes, one empty, one in a folder below; and a file that is no text."""
    (tmp_path / "below").mkdir()
    (tmp_path / "a.txt").write_text("äb" * 200)
    (tmp_path / "b.md").write_text("")
    (tmp_path / "below" / "c.TXT").write_text("0123456789" * 60 + "\r\nend")
    (tmp_path / "picture.png").write_bytes(b"\x00" * 5000)
    return tmp_path


class Words:
    """A tokenizer of another package: a number for each word."""

    vocab_size = 70_000

    def __init__(self):
        self.words = ["", *(f"w{i}" for i in range(300)), "\n"]

    def encode(self, text):
        words = [word for word in text.replace("\n", " \n ").split(" ") if word]
        if "unknown" in words:
            raise KeyError("unknown")
        return [self.words.index(word) if word in self.words else 0 for word in words]

    def decode(self, tokens):
        return " ".join(self.words[token] for token in tokens)


def everything(data):
    return torch.cat([windows[i] for windows in splits(data) for i in range(len(windows))])


def splits(data):
    return data.train_windows, data.val_windows, data.test_windows


def test_stream_is_every_text_and_a_separator_after_each(folder):
    data = TextDataModule(folder, CONTEXT)
    data.setup()
    expected = [*("äb" * 200).encode(), 256, 256, *("0123456789" * 60 + "\r\nend").encode(), 256]
    assert data.stream.read(0, len(data.stream)).tolist() == expected
    assert data.bytes_per_token == 1
    assert data.vocab_size == 257


def test_stream_reads_any_stretch():
    whole = [1, 2, 3, 9, 9, 4, 9, 5, 6, 9]
    stream = TokenStream([np.array(d, dtype=np.uint8) for d in ([1, 2, 3], [], [4], [5, 6])], separator=9)
    assert len(stream) == 10
    for start in range(10):
        for stop in range(start + 1, 11):
            assert stream.read(start, stop).tolist() == whole[start:stop]


def test_each_window_is_in_one_split_and_in_order(folder):
    data = TextDataModule(folder, CONTEXT, val_share=0.2, test_share=0.1)
    data.setup()
    parts = [part.numbers.tolist() for part in splits(data)]
    assert sorted(itertools.chain(*parts)) == list(range(len(data.stream) // (CONTEXT + 1)))
    assert len(parts[1]) > len(parts[2]) > 0
    again = TextDataModule(folder, CONTEXT, val_share=0.2, test_share=0.1)
    again.setup()
    assert everything(again).equal(everything(data))
    other = TextDataModule(folder, CONTEXT, val_share=0.2, test_share=0.1, seed=1)
    other.setup()
    assert not everything(other).equal(everything(data))


def test_batches_are_windows_of_the_text(folder):
    data = TextDataModule(folder, CONTEXT, batch_size=3)
    data.setup()
    text = data.stream.read(0, len(data.stream))
    windows = {tuple(text[i : i + CONTEXT + 1]) for i in range(0, len(text), CONTEXT + 1)}
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for batch in loader:
            assert batch.dtype == torch.int64
            assert batch.shape[1] == CONTEXT + 1
            assert all(tuple(row.tolist()) in windows for row in batch)


def test_files_are_mapped_not_loaded(folder):
    data = TextDataModule(folder, CONTEXT)
    data.setup()
    assert isinstance(data.stream.documents[0], np.memmap)
    assert data.stream.documents[0].dtype == np.uint8


def test_tokens_of_a_tokenizer_are_cached(folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    path = folder / "words.txt"
    path.write_text("\n".join(f"w{i % 300} w{7 * i % 300}" for i in range(4000)))
    data = TextDataModule(path, CONTEXT, tokenizer=Words(), cache_dir=cache)
    data.prepare_data()
    data.setup()
    (cached,) = cache.iterdir()
    assert data.stream.documents[0].dtype == np.uint32
    assert data.vocab_size == 70_001
    tokens = data.stream.read(0, len(data.stream)).tolist()
    assert tokens == [*Words().encode(path.read_text()), 70_000]
    assert data.bytes_per_token == pytest.approx((path.stat().st_size + 1) / len(tokens))
    before = cached.stat().st_mtime_ns
    TextDataModule(path, CONTEXT, tokenizer=Words(), cache_dir=cache).prepare_data()
    assert cached.stat().st_mtime_ns == before
    os.utime(path, ns=(1, 1))  # a text that was changed
    TextDataModule(path, CONTEXT, tokenizer=Words(), cache_dir=cache).prepare_data()
    assert len(list(cache.iterdir())) == 2


class Characters(Words):
    """Of as large a vocabulary, with other numbers."""

    def encode(self, text):
        return [ord(letter) for letter in text]


def test_another_tokenizer_has_another_cache(folder, tmp_path_factory):
    cache, path = tmp_path_factory.mktemp("cache"), folder / "below" / "c.TXT"
    for tokenizer in (Words(), Characters()):
        TextDataModule(path, CONTEXT, tokenizer=tokenizer, cache_dir=cache).prepare_data()
    assert len(list(cache.iterdir())) == 2
    data = TextDataModule(path, CONTEXT, tokenizer=Characters(), cache_dir=cache)
    data.setup()
    assert bytes(data.stream.read(0, 605).tolist()[-5:]) == b"\r\nend"  # as in the file


class Closed(Words):
    """Words that the text's start alone shows in another order."""

    def __init__(self, words):
        self.words, self.vocab_size = ["", *words], len(words) + 1


def test_a_tokenizer_retrained_at_the_same_size_has_another_cache(folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    (folder / "words.txt").write_text("w1 w2 w3 " * 100)
    for words in (["w1", "w2", "w3"], ["w3", "w2", "w1"]):
        tokenizer = Closed(words)
        data = TextDataModule(folder / "words.txt", CONTEXT, tokenizer=tokenizer, cache_dir=cache)
        data.setup()
        assert tokenizer.decode(data.stream.read(0, 3).tolist()) == "w1 w2 w3"


def test_numbers_beyond_the_vocabulary_are_refused(folder, tmp_path_factory):
    tokenizer = Characters()
    tokenizer.vocab_size = 100
    data = TextDataModule(folder / "a.txt", CONTEXT, tokenizer=tokenizer, cache_dir=tmp_path_factory.mktemp("cache"))
    with pytest.raises(ValueError, match=r"Characters gives token numbers from 98 to 228, but says .* holds 100"):
        data.prepare_data()


@pytest.mark.parametrize("suffixes", [".txt", "txt", ["TXT"], [".Txt"]])
def test_suffixes_are_read_as_they_are_meant(folder, suffixes):
    (folder / "LICENSE").write_text("no suffix")
    names = [path.name for path in TextDataModule(folder, CONTEXT, suffixes=suffixes).paths]
    assert names == ["a.txt", "c.TXT"]


def test_one_prompt_is_one_prompt(folder):
    assert TextDataModule(folder, CONTEXT, prompts="Hello").prompts == ["Hello"]


def test_numbers_beyond_fifteen_bits_are_kept(folder, tmp_path_factory):
    tokenizer = Characters()
    tokenizer.vocab_size = 60_000
    (folder / "wide.txt").write_text("\u9fa5" * 400)
    data = TextDataModule(folder / "wide.txt", CONTEXT, tokenizer=tokenizer, cache_dir=tmp_path_factory.mktemp("cache"))
    data.setup()
    assert data.stream.documents[0].dtype == np.uint16
    assert set(data.stream.read(0, 400).tolist()) == {0x9FA5}


def test_long_texts_are_encoded_in_whole_lines(folder, tmp_path_factory, monkeypatch):
    monkeypatch.setattr("lightning_accel.data.text.tokens._CHUNK", 10)
    (folder / "words.txt").write_text("w1 w22 w3\n" * 100)
    tokens = map_file(folder / "words.txt", Words(), tmp_path_factory.mktemp("cache"))
    assert tokens.tolist() == Words().encode("w1 w22 w3\n" * 100)


def test_an_interrupted_cache_leaves_nothing(folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    (folder / "words.txt").write_text("w1 w2 unknown")
    with pytest.raises(KeyError, match="unknown"):
        TextDataModule(folder / "words.txt", tokenizer=Words(), cache_dir=cache).prepare_data()
    assert not list(cache.iterdir())


def test_tokenizers_of_other_packages_fit():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    data = TextDataModule(tokenizer=tokenizer, prompts=["a b c"])
    assert data.vocab_size == 4
    assert next(iter(data.predict_dataloader())).tolist() == [[0, 1, 2]]
    with pytest.raises(TypeError, match="does not tell the size of its vocabulary"):
        vocabulary_size(object())
    with pytest.raises(TypeError, match="a tokenizer has methods encode and decode; got 3"):
        TextDataModule(tokenizer=3)


OWN_TOKENIZER = """
class Lengths:
    def __init__(self, size: int = 50):
        self.vocab_size = size

    def encode(self, text):
        return [min(len(word), self.vocab_size - 1) for word in text.split()]

    def decode(self, numbers):
        return " ".join(map(str, numbers))
"""


@pytest.mark.slow
def test_a_tokenizer_of_ones_own_is_named_in_a_config(command, run_folder):
    (run_folder / "own_tokenizer.py").write_text(OWN_TOKENIZER)
    (run_folder / "text.txt").write_text("a bb ccc " * 300)
    result = command(
        "fit", "--model=MoELanguageModel", "--model.dim=8", "--model.attention.num_heads=2",
        "--model.experts.hidden_dim=4",
        "--data=TextDataModule", "--data.path=text.txt", "--data.context_length=8", "--data.cache_dir=cache",
        "--data.tokenizer=own_tokenizer.Lengths", "--data.tokenizer.size=7", "--trainer.accelerator=cpu",
        "--trainer.max_steps=2", "--trainer.logger=false", "--trainer.enable_checkpointing=false",
    )  # fmt: skip
    assert result.status == 0, result.err
    assert (run_folder / "cache").is_dir()


def test_bytes_come_back():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve €")) == "naïve €"


def test_the_text_of_python_is_there():
    data = TextDataModule()
    data.setup()
    assert len(data.stream) > 1_000_000
    assert len(data.train_windows) > 8 * len(data.val_windows) > 1000
    assert data.bytes_per_token == 1


def consumed(batch_size, replicas, epoch, start=0, num_rows=50):
    rows = range(num_rows)
    order = []
    for rank in range(replicas):
        sampler = ResumableSampler(rows, batch_size, replicas, rank, seed=3)
        sampler.set_epoch(epoch)
        sampler.resume_at(epoch, start)
        order.append(list(sampler))
    steps = len(order[0]) // batch_size
    return [set().union(*(o[s * batch_size : (s + 1) * batch_size] for o in order)) for s in range(steps)]


def test_steps_take_the_same_rows_on_any_number_of_processes():
    whole = consumed(12, 1, epoch=2)
    assert len(whole) == 4
    assert sum(map(len, whole)) == len(set().union(*whole)) == 48
    assert consumed(4, 3, epoch=2) == whole
    assert consumed(12, 1, epoch=1) != whole


def test_a_resumed_epoch_neither_repeats_nor_skips():
    whole = consumed(12, 1, epoch=2)
    assert consumed(12, 1, epoch=2, start=24) == whole[2:]
    assert set().union(*consumed(3, 2, epoch=2, start=24)) >= whole[2] | whole[3]


def test_the_order_is_that_of_the_seed(folder):
    first = []
    for seed in (0, 0, 1):
        data = TextDataModule(folder, CONTEXT, seed=seed)
        data.setup()
        first.append(list(data.train_dataloader().sampler))
    assert first[0] == first[1] != first[2]
    assert first[2] == list(ResumableSampler(data.train_windows, 16, 1, 0, seed=1))


def test_a_position_is_that_of_its_epoch_alone():
    sampler = ResumableSampler(range(50), 12, 1, 0, seed=3)
    whole = list(sampler)
    sampler.resume_at(5, 24)
    assert list(sampler) == whole


def test_the_last_step_of_a_resumed_epoch_has_the_number_that_it_has_in_a_whole_one():
    position = RowPosition(268, size=20)
    position.load({"epoch": 1, "rows": 30, "batches": 3, "size": 10})
    assert position.first_batch(1) == 13 - 238 // 20 == 2
    assert position.state_after(1, 5) == {"epoch": 1, "rows": 90, "batches": 5, "size": 20}
    assert position.state_after(1, 13) == {"epoch": 2, "rows": 0, "batches": 0, "size": 20}


def test_a_loader_tells_the_rows_of_all_processes():
    loader = ResumableLoader(range(50), batch_size=4, sampler=ResumableSampler(range(50), 4, 3, 1, seed=3))
    assert loader.state_dict() == {}
    loader.progress = lambda: (2, 3)
    assert loader.state_dict() == {"epoch": 2, "rows": 36, "batches": 3, "size": 12}


class Recorder(L.LightningModule):
    def __init__(self, stop_after=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches, self.stop_after = [], stop_after

    def training_step(self, batch, batch_idx):
        if self.stop_after == len(self.batches):
            raise KeyError("killed")
        self.batches.append(batch.tolist())
        return self.weight * batch.float().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def run(folder, module, ckpt_path=None, kept="kept", callbacks=(), **kwargs):
    keeper = ModelCheckpoint(dirpath=folder / kept, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        callbacks=[keeper, *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    data = TextDataModule(folder, **{"batch_size": 20, "context_length": CONTEXT, **kwargs})
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("step", [3, 9, 12])
def test_a_killed_run_goes_on_with_the_next_batch(folder, step):
    """An epoch has ten steps: the checkpoints stand in the middle of the first, near its end, and in the second."""
    whole = run(folder, Recorder())
    assert len(whole.batches) == 20
    with pytest.raises(KeyError, match="killed"):
        run(folder, Recorder(stop_after=step + 1), kept="killed")
    resumed = run(folder, Recorder(), folder / "killed" / f"step={step}.ckpt", kept="resumed")
    assert resumed.batches == whole.batches[step:]
    assert resumed.weight.equal(whole.weight)


@pytest.mark.sampled(default=1)
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("sizes", [(20, 8, 12), (8, 20, 7)], ids=str)
def test_an_epoch_that_is_resumed_twice_takes_each_window_once(tmp_path, sizes):
    """Batches of another size change the rows of a step as another number of processes does."""
    (tmp_path / "numbers.txt").write_text("".join(f"{number:07d} " for number in range(300)))
    taken, ckpt_path, left = [], None, 0
    for stop, size in zip((3, 6, None), sizes, strict=True):
        module = run(tmp_path, Recorder(), ckpt_path, f"until{stop}", batch_size=size, context_length=7)
        done = len(taken)
        batches = module.batches[: 3 if stop else left // size]
        taken += [tuple(window) for batch in batches for window in batch]
        left = 268 - len(taken)
        ckpt_path = tmp_path / f"until{stop}" / f"step={stop}.ckpt"
    assert len({*taken}) == len(taken) == done + (268 - done) // sizes[2] * sizes[2]
    assert len(module.batches) == (268 - done) // sizes[2] + 268 // sizes[2]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(("step", "size"), [(12, 22), (12, 10), (12, 40), (9, 100)], ids=str)
def test_after_the_last_step_of_an_epoch_the_next_one_is_whole(tmp_path, step, size):
    """Of twelve steps of 22 of 268 windows; after nine, 70 windows are left, which do not fill a step of 100."""
    (tmp_path / "numbers.txt").write_text("".join(f"{number:07d} " for number in range(300)))
    resume = [ExactResume()] if step == 9 else []
    run(tmp_path, Recorder(), kept="first", callbacks=resume, batch_size=22, context_length=7)
    ckpt_path = tmp_path / "first" / f"step={step}.ckpt"
    resume = [ExactResume()] if step == 9 else []
    module = run(tmp_path, Recorder(), ckpt_path, "then", resume, batch_size=size, context_length=7)
    windows = [tuple(window) for batch in module.batches for window in batch]
    assert len(windows) == len({*windows}) == 268 // size * size


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_other_text_or_another_split_is_refused_on_resuming(folder):
    run(folder, Recorder())
    ckpt_path = folder / "kept" / "step=3.ckpt"
    with pytest.raises(ValueError, match=r"split \[4, 0.05, 0.05, 0\] there, \[4, 0.05, 0.05, 1\] here"):
        run(folder, Recorder(), ckpt_path, "other", seed=1)
    (folder / "more.txt").write_text("more")
    with pytest.raises(
        ValueError, match=r"tokens and vocabulary \[1208, 257\] there, \[1213, 257\] here. .split. is context_length"
    ):
        run(folder, Recorder(), ckpt_path, "other")
    (folder / "more.txt").unlink()
    (folder / "a.txt").write_text("bä" * 200)  # as long as before
    with pytest.raises(ValueError, match=r"digest of the data .* there, .* here"):
        run(folder, Recorder(), ckpt_path, "other")


@pytest.mark.filterwarnings("ignore:Be aware that when using")
def test_a_checkpoint_is_tested_on_other_text_but_not_on_what_it_was_trained_on(folder, tmp_path_factory):
    run(folder, module := Recorder())
    other = tmp_path_factory.mktemp("other") / "other.txt"
    other.write_text("another text " * 100)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    ckpt_path = folder / "kept" / "step=3.ckpt"
    module.test_step = lambda batch, batch_idx: None
    trainer.test(module, TextDataModule(other, CONTEXT), ckpt_path=ckpt_path, verbose=False)
    trainer.test(module, TextDataModule(folder, CONTEXT), ckpt_path=ckpt_path, verbose=False)
    with pytest.raises(ValueError, match=r"split \[4, 0.05, 0.05, 0\] there, \[4, 0.05, 0.05, 1\] here"):
        trainer.test(module, TextDataModule(folder, CONTEXT, seed=1), ckpt_path=ckpt_path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"path": "missing.txt"}, FileNotFoundError, "no file missing.txt"),
        ({"path": ".", "suffixes": [".tex"]}, FileNotFoundError, "no file in . ends in .tex; set suffixes"),
        ({"context_length": 0}, ValueError, "context_length must be at least 1; got 0"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1; got 0"),
        ({"val_share": 0.0}, ValueError, "val_share must be above 0; got 0.0"),
        ({"val_share": 0.5, "test_share": 0.5}, ValueError, "val_share and test_share must leave items"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(run_folder, options, error, message):
    with pytest.raises(error, match=message):
        TextDataModule(**options)


def test_what_cannot_be_trained_on_is_refused(folder):
    with pytest.raises(ValueError, match=r"1208 tokens, 24 windows of context_length=48; 48 or more are needed"):
        TextDataModule(folder, 48).setup()
    data = TextDataModule(folder, CONTEXT, batch_size=500)
    data.setup()
    with pytest.raises(ValueError, match="windows train, fewer than batch_size=500 on each of 1 processes"):
        data.train_dataloader()
    with pytest.raises(ValueError, match="predict goes on from prompts; give some"):
        data.predict_dataloader()
    with pytest.raises(ValueError, match="a prompt must hold a token; got ''"):
        TextDataModule(folder, CONTEXT, prompts=["a", ""]).predict_dataloader()
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 text.*leave tokenizer out to train on bytes"):
        TextDataModule(folder / "latin.txt", tokenizer=Words(), cache_dir=folder / "cache").prepare_data()
