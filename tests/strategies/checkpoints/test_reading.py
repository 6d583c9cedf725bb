"""Damaged and hostile checkpoints; a hostile one would leave a folder behind."""

import io
import os
import pathlib
import pickle
import shutil
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from lightning_accel import FullyShardedStrategy
from lightning_accel.callbacks.distillation.teacher import load_weights
from lightning_accel.compress import load_pruned
from lightning_accel.strategies import AtomicCheckpointIO, AtomicModelParallelStrategy
from lightning_accel.strategies.checkpoints.io import newest_checkpoint
from lightning_accel.strategies.checkpoints.reading import DamagedCheckpointError, find_damage, read_checkpoint
from lightning_accel.strategies.sharding.metadata import UntrustedCheckpointError
from lightning_accel.strategies.sharding.state import load_model_shards


def test_swapped_arguments_of_load_pruned_are_told():
    with pytest.raises(TypeError, match=r"load_pruned\(module, checkpoint\) takes .*; got str, then Linear"):
        load_pruned("last.ckpt", nn.Linear(2, 1))


def test_newest_of_a_folder_is_found_in_each_version_and_form(tmp_path):
    assert newest_checkpoint(tmp_path / "runs") is None
    io, folder = AtomicCheckpointIO(), tmp_path / "runs"
    places = [
        "lightning_logs/version_0/checkpoints/last.ckpt",
        "lightning_logs/version_1/last.ckpt",
        "signal-step=9.ckpt",
    ]
    for age, place in enumerate(places):
        io.save_checkpoint({"state_dict": {}}, folder / place)
        os.utime(folder / place, (age, age))
        assert newest_checkpoint(str(folder)) == folder / place
    sharded = folder / "lightning_logs/version_1/step=12.ckpt"
    save_shards(sharded, nn.Linear(2, 1))
    torch.save({}, sharded / "meta.pt")
    os.utime(sharded, (10, 10))
    assert newest_checkpoint(folder) == sharded
    (folder / "half.ckpt").write_bytes(b"PK half of one")
    with pytest.warns(UserWarning, match=r"half.ckpt is passed over"):
        assert newest_checkpoint(folder) == sharded


def cut(data, where):
    return data[: len(data) // 2]


def emptied(data, where):
    return b""


def garbage(data, where):
    return os.urandom(3000)


def zeroed(data, where):
    return data[:500] + bytes(len(data) - 1500) + data[-1000:]


def without_a_bit(data, where):
    return flipped(data, where["data/0"], 1)


def with_another_pickle(data, where):
    return flipped(data, where["data.pkl"], 20)


def without_a_bit_of_the_end(data, where):
    """The number of archives that this one is a part of, in front of the 22 bytes at the end."""
    return flipped(data, len(data) - 26 - 8, 1)


def flipped(data, start, length):
    data = bytearray(data)
    for place in range(start + 8, start + 8 + length):
        data[place] ^= 0x40
    return bytes(data)


DAMAGES = [cut, emptied, garbage, zeroed, without_a_bit, with_another_pickle, without_a_bit_of_the_end]


def damage(path, how):
    """Change the bytes of a file of torch.save."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        where = {}
        for entry in archive.infolist():
            name, extra = len(entry.filename.encode()), int.from_bytes(data[entry.header_offset + 28 :][:2], "little")
            where[entry.filename.partition("/")[2]] = entry.header_offset + 30 + name + extra
    path.write_bytes(how(data, where))


@pytest.fixture
def layer():
    return nn.Linear(15, 7)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_refused_and_passed_over(tmp_path, layer, how):
    for age, name in enumerate(["good.ckpt", "last.ckpt"]):
        torch.save({"state_dict": layer.state_dict()}, tmp_path / name)
        os.utime(tmp_path / name, (age, age))
    last = tmp_path / "last.ckpt"
    assert find_damage(last) == ""
    assert newest_checkpoint([tmp_path]) == last
    damage(last, how)
    os.utime(last, (1, 1))
    with pytest.warns(UserWarning, match="last.ckpt is passed over, since it is damaged: ."):
        assert newest_checkpoint([tmp_path]) == tmp_path / "good.ckpt"
    before = [value.clone() for value in layer.parameters()]
    for load in (
        AtomicCheckpointIO().load_checkpoint,
        read_checkpoint,
        lambda path: load_weights(layer, path),
        lambda path: load_pruned(layer, path),
    ):
        with pytest.raises(
            DamagedCheckpointError, match=r"last.ckpt is (damaged|not a whole checkpoint).*Take|Use"
        ) as e:
            load(last)
        assert "weights_only" not in str(e.value)
    assert all(torch.equal(*pair) for pair in zip(before, layer.parameters(), strict=True))


def test_a_file_that_unpacks_to_more_than_its_size_is_refused(tmp_path):
    torch.save({"state_dict": {"weight": torch.zeros(500_000)}}, tmp_path / "whole.ckpt")
    with zipfile.ZipFile(tmp_path / "whole.ckpt") as whole, zipfile.ZipFile(tmp_path / "small.ckpt", "w") as small:
        for entry in whole.infolist():
            small.writestr(entry.filename, whole.read(entry), zipfile.ZIP_DEFLATED)
    assert (tmp_path / "small.ckpt").stat().st_size < 10_000
    assert len(torch.load(tmp_path / "small.ckpt", weights_only=True)["state_dict"]["weight"]) == 500_000
    for read in (read_checkpoint, AtomicCheckpointIO().load_checkpoint):
        with pytest.raises(DamagedCheckpointError, match=r"its part whole/data\.pkl is compressed"):
            read(tmp_path / "small.ckpt")


def test_files_without_checksums_and_of_the_older_format_are_read(tmp_path, layer):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(layer.state_dict(), tmp_path / "bare.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save(layer.state_dict(), tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    for name in ("bare.ckpt", "old.ckpt"):
        assert torch.equal(AtomicCheckpointIO().load_checkpoint(tmp_path / name)["weight"], layer.weight)
    assert find_damage(tmp_path / "bare.ckpt") == ""
    damage(tmp_path / "bare.ckpt", with_another_pickle)  # which no checksum tells from a file of objects
    with pytest.raises((DamagedCheckpointError, pickle.UnpicklingError)):
        read_checkpoint(tmp_path / "bare.ckpt")


class Evil:
    """Makes a folder where a pickle of it is loaded."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def save_shards(folder, layer, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that there is one process alone
        dcp.save({"state_dict": layer.state_dict(), **more}, checkpoint_id=folder)
    torch.save({"epoch": 1}, folder / "meta.pt")
    return folder


def in_the_table(folder, layer, marker):
    save_shards(folder, layer)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))


def deep_in_the_table(folder, layer, marker):
    save_shards(folder, layer)
    table = pickle.loads((folder / ".metadata").read_bytes())
    table.planner_data["state_dict.weight"] = Evil(marker)
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def in_a_plain_value(folder, layer, marker):
    save_shards(folder, layer, optimizer_0={"lr": Evil(marker)})


def beside_the_parts(folder, layer, marker):
    save_shards(folder, layer)
    torch.save({"epoch": Evil(marker)}, folder / "meta.pt")


LOADERS = [FullyShardedStrategy, AtomicModelParallelStrategy]


@pytest.mark.parametrize("hostile", [in_the_table, deep_in_the_table, in_a_plain_value])
@pytest.mark.parametrize("strategy", LOADERS)
def test_a_sharded_folder_runs_no_code(tmp_path, layer, hostile, strategy):
    folder, marker = tmp_path / "parts.ckpt", tmp_path / "MARKER"
    hostile(folder, layer, marker)
    for weights_only in (None, True):
        with pytest.raises(UntrustedCheckpointError, match=r"parts.ckpt holds objects other .*mkdir.*weights_only"):
            strategy().load_checkpoint(folder, weights_only)
    assert not marker.exists()
    with warnings.catch_warnings():  # the file is as hostile as it looks
        warnings.simplefilter("ignore")
        state = {"state_dict": layer.state_dict(), "optimizer_0": {"lr": 0}} if hostile is in_a_plain_value else {}
        (dcp.load if state else lambda *_, **__: pickle.loads((folder / ".metadata").read_bytes()))(
            state, checkpoint_id=folder
        )
    assert marker.exists()


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_table_of_one_rank_runs_no_code(tmp_path, layer, is_alone):
    """Another table is unpickled by torch where the common table is missing, or cannot be made on this system."""
    folder, marker = save_shards(tmp_path / "parts.ckpt", layer), tmp_path / "MARKER"
    (folder / "__0.metadata").write_bytes(pickle.dumps(Evil(marker)))
    if is_alone:
        (folder / ".metadata").unlink()
    else:
        table = pickle.loads((folder / ".metadata").read_bytes())
        table.planner_data["state_dict.weight"] = ElsewherePath()
        (folder / ".metadata").write_bytes(pickle.dumps(table))
    said = "is damaged: it has no .metadata" if is_alone else "holds objects .*__0.metadata, a second table"
    for strategy in LOADERS:
        for weights_only in (None, True):
            with pytest.raises((DamagedCheckpointError, UntrustedCheckpointError), match=said):
                strategy().load_checkpoint(folder, weights_only)
    assert not marker.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointException):  # the folder is as hostile as it looks
            load_model_shards(folder, layer, strict=True)
    assert marker.exists()


class ElsewherePath:
    """Is a path of another system once it is loaded."""

    def __reduce__(self):
        return (pathlib.PosixPath if os.name == "nt" else pathlib.WindowsPath), ("x",)


def test_the_rest_of_a_sharded_folder_runs_no_code(tmp_path, layer):
    beside_the_parts(tmp_path / "parts.ckpt", layer, tmp_path / "MARKER")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        FullyShardedStrategy().load_checkpoint(tmp_path / "parts.ckpt")
    assert not (tmp_path / "MARKER").exists()


def test_a_damaged_sharded_folder_is_refused_and_passed_over(tmp_path, layer):
    good = save_shards(tmp_path / "good.ckpt", layer, optimizer_0={"lr": 0.5, "betas": (0.9, 0.99)})
    assert find_damage(good) == ""
    assert FullyShardedStrategy().load_checkpoint(good)["epoch"] == 1
    os.utime(good, (1, 1))
    table = pickle.loads((good / ".metadata").read_bytes())
    weight = next(place for index, place in table.storage_data.items() if index.fqn == "state_dict.weight")

    def with_another_weight(folder):
        part = folder / weight.relative_path
        data = bytearray(part.read_bytes())
        content = bytes(data[weight.offset : weight.offset + weight.length])
        start = weight.offset + content.index(layer.weight.detach().numpy().tobytes())
        data[start + 9] ^= 1
        part.write_bytes(data)

    for ruin, said in (
        (with_another_weight, r"state_dict.weight in __0_0.distcp: its part .*data/0 has another checksum"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "its part __0_0.distcp is not there"),
        (lambda folder: os.truncate(folder / "__0_0.distcp", 900), "its part __0_0.distcp is cut short"),
        (lambda folder: os.truncate(folder / ".metadata", 90), "is not the table of a sharded checkpoint"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps([1])), "is not the table"),
        (lambda folder: damage(folder / "meta.pt", with_another_pickle), "meta.pt: its part .*data.pkl"),
        (lambda folder: (folder / "meta.pt").unlink(), "it has no meta.pt"),
    ):
        bad = shutil.copytree(good, tmp_path / "bad.ckpt")
        ruin(bad)
        os.utime(bad, (2, 2))
        with pytest.warns(UserWarning, match=f"bad.ckpt is passed over, since it is damaged: .*{said}"):
            assert newest_checkpoint([tmp_path]) == good
        if (bad / "meta.pt").exists():
            with pytest.raises(DamagedCheckpointError, match=said):
                FullyShardedStrategy().load_checkpoint(bad)
        shutil.rmtree(bad)


def test_a_part_elsewhere_on_the_disk_is_no_part_of_a_folder(tmp_path, layer):
    folder = save_shards(tmp_path / "parts.ckpt", layer)
    shutil.copy(folder / "__0_0.distcp", tmp_path / "elsewhere")
    table = pickle.loads((folder / ".metadata").read_bytes())
    for place in table.storage_data.values():
        place.relative_path = "../elsewhere"
    buffer = io.BytesIO()
    pickle.dump(table, buffer)
    (folder / ".metadata").write_bytes(buffer.getvalue())
    assert "its part ../elsewhere is not there" in find_damage(folder)


def test_places_that_cannot_hold_checkpoints_are_refused(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("step 3")
    for place, error, message in [
        ("\0", ValueError, "each of places must be the path of a file or folder, with names of 1 to 255 bytes; got"),
        ("x" * 300, ValueError, "each of places must be .*; got 'x{80}'$"),
        ("~nosuchuser/runs", ValueError, "~nosuchuser/runs is in the home folder of a user whom this machine does not"),
        (b"runs", TypeError, "each of places must be the path of a file or folder; got b'runs'"),
        (tmp_path / "notes.txt", ValueError, r"needs a folder, or a \.ckpt file; .*notes\.txt is another file"),
        (None, TypeError, "places must be a name, or a list of names; got None"),
        ([3], TypeError, "each of places must be the path of a file or folder; got 3"),
    ]:
        with pytest.raises(error, match=message):
            newest_checkpoint(place)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs").mkdir()
    torch.save({"state_dict": {}}, tmp_path / "runs/last.ckpt")
    assert newest_checkpoint("~/runs") == tmp_path / "runs/last.ckpt"
