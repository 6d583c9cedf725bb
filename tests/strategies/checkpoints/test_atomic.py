"""Whole or not there. Each test of a kill stops the process at one system call, the point that matters."""

import contextlib
import errno
import multiprocessing as mp
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_accel.strategies import AtomicCheckpointIO
from lightning_accel.strategies.checkpoints.atomic import (
    NotWrittenError,
    find_written,
    partial_path,
    replace_atomically,
    write_atomically,
)


def write(path: Path, text: str, folder: bool) -> None:
    if folder:
        path.mkdir()
        (path / "part").write_text(text)
        (path / "deep").mkdir()
        (path / "deep" / "part").write_text(text)
    else:
        path.write_text(text)


def read(path: Path) -> str:
    if not path.is_dir():
        return path.read_text()
    assert (path / "part").read_text() == (path / "deep" / "part").read_text()
    return (path / "part").read_text()


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("old", [None, False, True])
def test_replaces_what_was_there(tmp_path, old, folder):
    path = tmp_path / "new" / "last.ckpt"
    if old is not None:
        path.parent.mkdir()
        write(path, "old", old)
    with write_atomically(path) as partial:
        write(partial, "new", folder)
        assert old is None or read(path) == "old"
    assert read(find_written(path)) == "new"
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_a_link_is_replaced_and_not_what_it_points_to(tmp_path):
    write(tmp_path / "step=3.ckpt", "old", folder=True)
    (tmp_path / "last.ckpt").symlink_to("step=3.ckpt")
    with write_atomically(tmp_path / "last.ckpt") as partial:
        write(partial, "new", folder=True)
    assert (read(tmp_path / "last.ckpt"), read(tmp_path / "step=3.ckpt")) == ("new", "old")


def write_half(path: Path, folder: bool) -> None:
    with write_atomically(path) as partial:
        write(partial, "half", folder)
        raise OSError("disk full")


@pytest.mark.parametrize("folder", [False, True])
def test_an_exception_leaves_the_old_one_alone(tmp_path, folder):
    path = tmp_path / "last.ckpt"
    write(path, "old", folder)
    with pytest.raises(OSError, match="disk full"):
        write_half(path, folder)
    assert read(path) == "old"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def save_shards(state, path):
    with write_atomically(path) as folder:
        dcp.save(state, checkpoint_id=folder)


@pytest.fixture
def little_room():
    """Let files of this process be no longer than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_disk_without_room_is_named_and_keeps_the_old_one(tmp_path, little_room, sharded):
    path = tmp_path / "last.ckpt"
    write(path, "old", sharded)
    with pytest.raises(NotWrittenError) as error:
        (save_shards if sharded else AtomicCheckpointIO().save_checkpoint)({"weight": torch.ones(30_000)}, path)
    assert str(error.value).startswith(f"{path} could not be written: the disk of {path.parent} is full, or")
    assert " bytes are free)" in str(error.value)
    assert read(path) == "old"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_disk_that_is_full_at_the_last_moment_leaves_no_part(tmp_path, monkeypatch):
    """As a network disk is, which tells it where the file is flushed."""

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    write(tmp_path / "last.ckpt", "old", folder=False)
    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(NotWrittenError, match=r"last\.ckpt could not be written"),
        write_atomically(tmp_path / "last.ckpt") as partial,
    ):
        write(partial, "new", folder=False)
    assert (os.listdir(tmp_path), read(tmp_path / "last.ckpt")) == (["last.ckpt"], "old")


def test_processes_meet_before_and_after_and_one_renames(tmp_path):
    calls = []
    path = tmp_path / "last.ckpt"
    with write_atomically(path, owner=False, barrier=lambda: calls.append(path.exists())) as partial:
        write(partial, "new", folder=True)
        assert calls == [False]
    assert calls == [False] * 3  # the owner, another process, renames between the last two
    replace_atomically(partial, path)
    assert read(path) == "new"


def test_a_path_that_was_never_written_is_told(tmp_path):
    partial_path(tmp_path / "last.ckpt").mkdir()
    with pytest.raises(FileNotFoundError, match=r"nothing was written to .*last\.ckpt, or not to its end"):
        find_written(tmp_path / "last.ckpt")


def killed_at(calls: int, path: Path, folder: bool) -> None:
    """Write to ``path`` and die at the ``calls``-th rename, removal or flush."""
    left = calls

    def counted(function):
        def wrapper(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapper

    for name in ("rename", "replace", "unlink", "rmdir", "fsync", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    with write_atomically(path) as partial:
        write(partial, "new", folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "folder"),
    [
        (False, False),
        (True, True),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((False, True), (True, False))),
    ],
)
def test_killed_at_any_moment_leaves_the_old_one_or_the_new_one(tmp_path, old, folder):
    seen = []
    for calls in range(1, 40):
        path = tmp_path / str(calls) / "last.ckpt"
        path.parent.mkdir()
        write(path, "old", old)
        process = mp.get_context("fork").Process(target=killed_at, args=(calls, path, folder))
        process.start()
        process.join()
        seen.append(read(find_written(path)))
        left: list[Path] = []
        if path.exists():  # what else is left is whole, too, or is not found
            os.rename(path, tmp_path / f"aside{calls}")
            with contextlib.suppress(FileNotFoundError):
                left.append(find_written(path))
            assert all(read(each) == "old" for each in left)
            os.rename(tmp_path / f"aside{calls}", path)
        with write_atomically(path) as partial:  # the next run is not hindered by what was left
            write(partial, "next", folder)
        assert read(path) == "next"
        assert os.listdir(path.parent) == ["last.ckpt"]
        if process.exitcode == 0:
            break
    assert process.exitcode == 0, "no call was the last"
    assert seen == sorted(seen, reverse=True), "the old one came back after the new one was in place"
    assert {"old", "new"} == set(seen)
