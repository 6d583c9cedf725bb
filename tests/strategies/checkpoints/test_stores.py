"""Checkpoints in stores: what is complete, what a killed upload leaves, and when a local copy is taken."""

import os
import re
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_accel.strategies import AtomicCheckpointIO, BackgroundCheckpointIO
from lightning_accel.strategies.checkpoints.atomic import NotWrittenError
from lightning_accel.strategies.checkpoints.io import newest_checkpoint
from lightning_accel.strategies.checkpoints.reading import DamagedCheckpointError, find_damage
from lightning_accel.strategies.checkpoints.stores import LocalCopies, complete_checkpoints
from lightning_accel.strategies.sharding.metadata import REST
from tests.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Alone:
    """The agreement of one process."""

    group = None

    def part(self):
        return nullcontext()


def write_folder(path: Path, number: int) -> None:
    path.mkdir(parents=True)
    save({"weight": torch.full((5,), float(number))}, checkpoint_id=path)
    torch.save({"global_step": number}, path / REST)


def number_in(path: Path) -> int:
    assert find_damage(path) == ""
    return torch.load(path / REST if path.is_dir() else path, weights_only=True)["global_step"]


@pytest.fixture
def url(tmp_path):
    return f"store://{tmp_path}/bucket/run"


def io_of(tmp_path, machine="here", keep=2):
    return AtomicCheckpointIO(tmp_path / machine, keep)


def test_a_copy_is_taken_unless_the_store_has_another_version(tmp_path, url, monkeypatch):
    here, there = io_of(tmp_path), io_of(tmp_path, "there")
    here.save_checkpoint({"global_step": 1}, f"{url}/last.ckpt")
    with monkeypatch.context() as context:
        context.setattr(Store, "get_file", None)
        assert here.load_checkpoint(f"{url}/last.ckpt") == {"global_step": 1}
    assert there.load_checkpoint(f"{url}/last.ckpt") == {"global_step": 1}
    there.save_checkpoint({"global_step": 2}, f"{url}/last.ckpt")
    assert here.load_checkpoint(f"{url}/last.ckpt") == {"global_step": 2}
    here.remove_checkpoint(f"{url}/last.ckpt")
    here.remove_checkpoint(f"{url}/last.ckpt")
    assert not [*(tmp_path / "bucket/run").iterdir()]
    for machine in (here, there):
        with pytest.raises(FileNotFoundError, match=re.escape(f"no checkpoint {url}/last.ckpt")):
            machine.load_checkpoint(f"{url}/last.ckpt")


def test_the_newest_copies_stay(tmp_path, url):
    io = io_of(tmp_path, keep=2)
    for step in range(1, 5):
        io.save_checkpoint({"global_step": step}, f"{url}/step={step}.ckpt")
    assert {path.name for path in (tmp_path / "here").glob("*/[!.]*")} == {"step=3.ckpt", "step=4.ckpt"}
    assert len([*(tmp_path / "here").glob("*/.*")]) == 2  # their versions
    assert io.load_checkpoint(f"{url}/step=1.ckpt") == {"global_step": 1}
    names = {path.relative_to(tmp_path / "here").parts[1:] for path in (tmp_path / "here").rglob("[!.]*.ckpt")}
    assert names == {("step=3.ckpt",), ("step=4.ckpt",), ("stored", "step=1.ckpt")}
    for step in (2, 1, 2):
        io.load_checkpoint(f"{url}/step={step}.ckpt")
    with io_of(tmp_path).copies.path_of(f"{url}/a").parent.joinpath("step=5.ckpt").open("wb") as file:
        torch.save({"global_step": 5}, file)  # which is being uploaded
    for step in (1, 2, 3):
        io.load_checkpoint(f"{url}/step={step}.ckpt")
    assert [path.name for path in io.copies.not_uploaded(url)] == ["step=5.ckpt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_folder": "s3://bucket/run"}, "local_folder must be a folder on a disk of the machine; got 's3:"),
        ({"local_folder": ""}, "local_folder must be a folder on a disk of the machine; got ''"),
        ({"local_folder": "x", "keep_local": 0}, "keep_local must be at least 1; got 0"),
    ],
)
def test_wrong_options_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        BackgroundCheckpointIO(**options)


def test_a_local_folder_that_cannot_be_written_is_told(tmp_path, url):
    (tmp_path / "file").touch()
    with pytest.raises(NotWrittenError, match=r"the local_folder .*/file cannot be written \(.*\), by which .* go to"):
        AtomicCheckpointIO(tmp_path / "file").save_checkpoint({}, f"{url}/a.ckpt")


class Cut(Exception):
    pass


def cut_after(number, monkeypatch):
    """Let the store do ``number`` operations that change it, and none after those, as if the process was killed."""
    left = [number]

    def limited(done):
        def operation(self, *arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Cut
            return done(self, *arguments, **options)

        return operation

    for name in ("put_file", "cp_file", "rm_file", "rm"):
        monkeypatch.setattr(Store, name, limited(getattr(Store, name)))


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("old", [None, 1])
def test_an_upload_cut_anywhere_leaves_the_old_folder_or_the_new_one(tmp_path, url, monkeypatch, old):
    found = []
    for operations in range(40):
        shutil.rmtree(tmp_path)
        copies, name = LocalCopies(tmp_path / "here", 2), f"{url}/last.ckpt"
        for number in (old, 2) if old else (2,):
            shutil.rmtree(copies.path_of(name), ignore_errors=True)
            write_folder(copies.path_of(name), number)
            if number == 2:
                with monkeypatch.context() as context, suppress(Cut):
                    cut_after(operations, context)
                    copies.upload_folder(name, 0, 0, Alone())
                    found.append("end")
            else:
                copies.upload_folder(name, 0, 0, Alone())
        newest = newest_checkpoint([url])
        if newest is None:
            assert old is None
            assert "end" not in found
        else:
            assert newest == name
            elsewhere = LocalCopies(tmp_path / "there", 2)
            found.append(number_in(elsewhere.fetch(newest)))
            assert {path.name for path in elsewhere.fetch(newest).iterdir()} == {".metadata", "__0_0.distcp", REST}
        copies.upload_folder(name, 0, 0, Alone())  # the next run ends what was begun
        assert number_in(LocalCopies(tmp_path / "third", 2).fetch(name)) == 2
        assert [path.name for path in (tmp_path / "bucket/run").iterdir()] == ["last.ckpt"]
        if "end" in found:
            break
    numbers = [each for each in found if each != "end"]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 2
    assert operations >= (3 if old is None else 8)


@pytest.mark.slow
def test_two_uploads_cut_leave_a_whole_version(tmp_path, url, monkeypatch):
    """The first between the removal of the old version and the copy of the new one, the second at any moment."""
    found = []
    for operations in range(30):
        shutil.rmtree(tmp_path)
        copies, name = LocalCopies(tmp_path / "here", 2), f"{url}/last.ckpt"
        for number, limit in ((1, 99), (2, 7), (3, operations)):
            shutil.rmtree(copies.path_of(name), ignore_errors=True)
            write_folder(copies.path_of(name), number)
            with monkeypatch.context() as context, suppress(Cut):
                cut_after(limit, context)
                copies.upload_folder(name, 0, 0, Alone())
            if number == 2:
                names = {path.name for path in (tmp_path / "bucket/run").iterdir()}
                assert ".last.ckpt.partial" in names
                assert not (tmp_path / "bucket/run/last.ckpt" / REST).exists()
        found.append(number_in(LocalCopies(tmp_path / "there", 2).fetch(newest_checkpoint([url]))))
    assert set(found) == {2, 3}


def test_a_newer_version_whose_upload_was_cut_off_is_found_on_the_machine(tmp_path, url, monkeypatch):
    io = io_of(tmp_path)
    io.save_checkpoint({"global_step": 1}, f"{url}/last.ckpt")
    assert newest_checkpoint([url], io.copies) == f"{url}/last.ckpt"
    with monkeypatch.context() as context:
        cut_after(0, context)
        with pytest.raises(Cut):
            io.save_checkpoint({"global_step": 2}, f"{url}/last.ckpt")
    assert newest_checkpoint([url]) == f"{url}/last.ckpt"
    found = newest_checkpoint([url], io.copies)
    assert found == io.copies.path_of(f"{url}/last.ckpt")
    assert io.load_checkpoint(found) == {"global_step": 2}
    assert io.load_checkpoint(f"{url}/last.ckpt") == {"global_step": 1}  # what the store has, and other machines load
    assert newest_checkpoint([url], io.copies) == found  # it stays
    io.save_checkpoint({"global_step": 3}, f"{url}/last.ckpt")
    assert io.load_checkpoint(f"{url}/last.ckpt") == {"global_step": 3}


def test_the_newest_of_disks_and_stores_is_found(tmp_path, url):
    io = io_of(tmp_path)
    assert newest_checkpoint([url, tmp_path / "kept"], io.copies) is None
    io.save_checkpoint({"global_step": 1}, f"{url}/deep/step=1.ckpt")
    assert newest_checkpoint([tmp_path / "kept", url]) == f"{url}/deep/step=1.ckpt"
    io.save_checkpoint({"global_step": 2}, tmp_path / "kept/step=2.ckpt")
    assert newest_checkpoint([tmp_path / "kept", url]) == tmp_path / "kept/step=2.ckpt"
    write_folder(tmp_path / "bucket/run/step=3.ckpt", 3)
    assert newest_checkpoint([tmp_path / "kept", url]) == f"{url}/step=3.ckpt"
    for name in ("last", "step=20"):  # in the same second, S3's finest
        shutil.copytree(tmp_path / "bucket/run/step=3.ckpt", tmp_path / f"bucket/run/{name}.ckpt")
    for file in (tmp_path / "bucket/run").glob("*.ckpt/*"):
        os.utime(file, (2e9, 2e9))
    assert newest_checkpoint([url]) == f"{url}/step=20.ckpt"
    for name in ("last", "step=20"):
        shutil.rmtree(tmp_path / f"bucket/run/{name}.ckpt")
    (tmp_path / "bucket/run/step=3.ckpt" / REST).unlink()
    assert len([*complete_checkpoints(url)]) == 1
    assert newest_checkpoint([tmp_path / "kept", url]) == tmp_path / "kept/step=2.ckpt"


def test_parts_of_other_machines_are_downloaded(tmp_path, url, monkeypatch):
    here = LocalCopies(tmp_path / "here", 2)
    write_folder(here.path_of(f"{url}/a.ckpt"), 1)
    here.upload_folder(f"{url}/a.ckpt", 0, 0, Alone())
    (here.path_of(f"{url}/a.ckpt") / "__0_0.distcp").unlink()  # as where another machine wrote it
    got = []
    monkeypatch.setattr(Store, "get_file", lambda self, path, file, **_: got.append(path) or shutil.copy(path, file))
    assert number_in(here.fetch(f"{url}/a.ckpt")) == 1
    assert [Path(path).name for path in got] == ["__0_0.distcp"]


def test_damage_and_short_uploads_are_told(tmp_path, url, monkeypatch):
    io = io_of(tmp_path)
    io.save_checkpoint({"weight": torch.ones(999)}, f"{url}/a.ckpt")
    stored = tmp_path / "bucket/run/a.ckpt"
    good = stored.read_bytes()
    for content in (good.replace(b"\0\0\x80\x3f", b"\0\0\x80\x3e", 1), good):
        stored.write_bytes(content)
        os.utime(stored, (2e9, 2e9))
        if content != good:
            with pytest.raises(DamagedCheckpointError, match="another checksum"):
                io.load_checkpoint(f"{url}/a.ckpt")
    assert io.load_checkpoint(f"{url}/a.ckpt")["weight"].sum() == 999  # the damaged copy is not taken again
    monkeypatch.setattr(Store, "put_file", lambda self, file, path, **_: Path(path).write_bytes(b"cut"))
    with pytest.raises(NotWrittenError, match=r"run/b.ckpt has 3 bytes after \d+ of .* were uploaded"):
        io.save_checkpoint({"weight": torch.ones(999)}, f"{url}/b.ckpt")
    with pytest.raises(ValueError, match=r"nostore://x/y.ckpt cannot be opened: Protocol not known: nostore"):
        io.save_checkpoint({}, "nostore://x/y.ckpt")
