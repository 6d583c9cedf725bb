"""Files that are damaged or made to do harm: those of benchmarks/malformed_data.py that once did."""

import importlib.util
import multiprocessing as mp
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest

from lightning_accel.data import IdxDataModule, SequenceDataModule, TabularDataModule, TextDataModule, read_idx
from lightning_accel.data.bounds import allowed_bytes
from lightning_accel.data.quoting import cut, listed, shown

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BOMBS = [
    "table: gz of 3 GB",
    "sequences: gzip of a line of 3 GB", "sequences: token 2 to 31",
    "sequences: token 2 to 40", "sequences: token 2 to 63", "graphs: node 10 to 8",
    "graphs: node 10 to 10", "graphs: num nodes 10 to 30", "graphs: a million nodes in each",
    "graphs: graph6 of 2 to 36 nodes",
    "graphs: graph6 of a lone lead", "images: gzip of 960 bytes and 3 GB", "images: gzip that promises 64 GB",
    "images: 255 dimensions of 2**32 - 1",
]  # fmt: skip
UNCLEAR = [
    "table: class of 3 MB", "table: value of 3 MB", "table: name of 3 MB", "table: a folder", "table: a FIFO",
    "table: an endless device", "table: zip", "table: parquet of bytes", "table: parquet of byte classes",
    "table: formulas as classes",
    "sequences: deep lists", "sequences: deep objects", "sequences: number of 5000 digits", "sequences: field twice",
    "sequences: field of 3 MB", "sequences: boolean among numbers", "sequences: one class as number and text",
    "sequences: surrogate in a target", "sequences: surrogate in an id", "sequences: surrogate in a text",
    "sequences: pairs of surrogates", "sequences: huge target",
    "graphs: deep lists", "graphs: number of 5000 digits", "graphs: boolean as node", "graphs: x boolean among numbers",
    "graphs: class of 3 MB", "graphs: field twice", "graphs: a FIFO", "images: a FIFO", "text: empty", "text: a FIFO",
]  # fmt: skip


def read_hostile_files(said):
    """Read ``BOMBS`` with room for 1 GiB of address space beyond what is taken, then ``UNCLEAR`` with 4 GiB."""
    import resource  # there is none on Windows

    warnings.simplefilter("ignore")
    spec = importlib.util.spec_from_file_location("malformed_data", BENCHMARKS / "malformed_data.py")
    malformed_data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(malformed_data)
    cases = {case.name: case for case in malformed_data.cases()}
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for room, names in ((1 << 30, BOMBS), (4 << 30, UNCLEAR)):
        resource.setrlimit(resource.RLIMIT_AS, (resource.getpagesize() * pages + room, resource.RLIM_INFINITY))
        said.send({name: malformed_data.outcome(cases[name]) for name in names})


@cache
def outcomes():
    """Return what is made of each file, in a fork: a fresh process would take longer for imports than for files."""
    answers, said = mp.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads is forked
        reader = mp.get_context("fork").Process(target=read_hostile_files, args=(said,))
        reader.start()
    said.close()
    try:
        assert answers.poll(120), "took more than two minutes"
        found = answers.recv()
        assert answers.poll(120), "took more than two minutes"
        return found | answers.recv()
    finally:
        reader.kill()
        reader.join()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_takes_more_memory_than_it_may_ask_for():
    """Each asks for gigabytes; the process has room for one."""
    assert {name: outcomes()[name] for name in BOMBS if outcomes()[name]} == {}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="makes pipes")
def test_bad_files_are_refused_by_name_in_few_words():
    assert {name: outcomes()[name] for name in UNCLEAR if outcomes()[name]} == {}


def test_the_bound_grows_with_the_file_and_can_be_raised(tmp_path, monkeypatch):
    def tokens(largest, note=""):
        lines = [
            f'{{"tokens": [1, {largest if i == 5 else 2}], "target": {i % 2}, "note": "{note}"}}' for i in range(40)
        ]
        (tmp_path / "t.jsonl").write_text("\n".join(lines))
        data = SequenceDataModule(tmp_path / "t.jsonl")
        data.setup()
        return data

    assert tokens(500_000).vocab_size == 500_001
    with pytest.raises(
        ValueError,
        match=r"token 3000000 in line 6 of .*t.jsonl.*7.68e\+08 bytes.*134217728 are allowed.*number the tokens from 0",
    ):
        tokens(3_000_000)
    monkeypatch.setenv("LIGHTNING_ACCEL_MAX_BYTES", str(10**9))
    assert tokens(3_000_000).vocab_size == 3_000_001
    monkeypatch.delenv("LIGHTNING_ACCEL_MAX_BYTES")
    assert tokens(3_000_000, note="z" * 700_000).vocab_size == 3_000_001
    assert allowed_bytes(tmp_path / "t.jsonl") == 32 * (tmp_path / "t.jsonl").stat().st_size


def test_a_text_is_one_name_not_a_name_for_each_letter(tmp_path):
    (tmp_path / "t.csv").write_text("key,a,y\n" + "".join(f"k{i},{i % 3},{'pq'[i % 2]}\n" for i in range(40)))
    data = TabularDataModule(tmp_path / "t.csv", "y", exclude="key", categorical="a", csv={"missing": "7"})
    data.setup()
    assert data.feature_names == ["a=0", "a=1", "a=2"]
    (tmp_path / "s.csv").write_text("id,step,key,v,target\n" + "".join(f"{i},0,x{i},{i},{i % 2}\n" for i in range(40)))
    sequences = SequenceDataModule(tmp_path / "s.csv", layout={"values": "v"})
    sequences.setup()
    assert sequences.feature_names == ["v"]
    assert TextDataModule(prompts="once", suffixes="txt").prompts == ["once"]


def test_what_messages_show_is_bounded():
    assert len(shown(["z" * 10**6] * 10**4)) <= 60
    assert len(listed(["z" * 10**6] * 10**4)) < 20 * 62 + 20
    assert cut("z" * 100, 10) == "zzzzzzz..."
    assert shown("ab") == "'ab'"


def test_a_folder_is_said_to_be_one(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder; the path of a file was needed"):
        read_idx(tmp_path)
    with pytest.raises(ValueError, match="is a folder"):
        IdxDataModule(tmp_path, predict_path=tmp_path)
