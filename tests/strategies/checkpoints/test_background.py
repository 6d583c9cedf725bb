"""Checkpoints that a thread writes: their moment, their order, failures, and all strategies that write some."""

import inspect
import os
import pickle
import re
import signal
import socket
import threading
import time
import warnings
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint import FileSystemWriter

import tests.store
from lightning_accel import ExactResume, FullyShardedStrategy, SaveOnSignal
from lightning_accel.strategies import AtomicCheckpointIO, BackgroundCheckpointIO
from lightning_accel.strategies.checkpoints.atomic import NotWrittenError
from lightning_accel.strategies.checkpoints.io import newest_checkpoint
from tests.ranks import run_ranks
from tests.recovery_job import Job, ShardedJob
from tests.recovery_job import local_state as parts_of


class Gated(BackgroundCheckpointIO):
    """Write when told to, and only then."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Semaphore(0)

    def _write_file(self, path, checkpoint):
        assert self.gate.acquire(timeout=60)
        super()._write_file(path, checkpoint)


@pytest.fixture
def gated():
    io = Gated()
    yield io
    for _ in range(9):
        io.gate.release()
    io.teardown()


def test_a_checkpoint_is_of_the_moment_it_was_saved_at(tmp_path, gated):
    weight = torch.arange(4.0)
    state = {"weight": weight, "tied": weight[1:], "loops": {"steps": [1]}, "half": weight.bfloat16()}
    gated.save_checkpoint(state, tmp_path / "a.ckpt")
    weight.zero_()
    state["loops"]["steps"].append(2)
    assert not (tmp_path / "a.ckpt").exists()
    gated.gate.release()
    found = gated.load_checkpoint(tmp_path / "a.ckpt")  # waits for it
    assert found["weight"].tolist() == [0, 1, 2, 3]
    assert found["half"].tolist() == [0, 1, 2, 3]
    assert found["loops"] == {"steps": [1]}
    found["weight"][3] = 7
    assert found["tied"].tolist() == [1, 2, 7]
    weight.fill_(5)
    gated.gate.release()
    gated.save_checkpoint(state, tmp_path / "a.ckpt")  # into the memory of the first copy
    assert gated.load_checkpoint(tmp_path / "a.ckpt")["tied"].tolist() == [5, 5, 5]


def test_an_old_checkpoint_stays_until_the_new_one_is_there(tmp_path, gated):
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    gated.gate.release()
    gated.save_checkpoint({"step": 1}, old)
    gated.wait()
    gated.save_checkpoint({"step": 2}, new)
    gated.remove_checkpoint(old)
    assert (gated.will_exist(new), gated.will_exist(old)) == (True, False)
    time.sleep(0.05)
    assert old.exists()
    gated.gate.release()
    gated.wait()
    assert not old.exists()
    assert new.exists()


def test_two_copies_are_held_and_no_third(tmp_path, gated):
    for step in range(2):
        gated.save_checkpoint({"step": step}, tmp_path / f"{step}.ckpt")
    third = threading.Thread(target=gated.save_checkpoint, args=({"step": 2}, tmp_path / "2.ckpt"))
    third.start()
    third.join(0.1)
    assert third.is_alive()
    gated.gate.release()
    third.join(60)
    assert not third.is_alive()
    assert [*tmp_path.iterdir()] == [tmp_path / "0.ckpt"]


@pytest.mark.filterwarnings("ignore:.*Older ones stay:UserWarning")
def test_a_failure_is_told_removes_nothing_and_ends_the_run(tmp_path, monkeypatch, recwarn):
    io, old = BackgroundCheckpointIO(), tmp_path / "old.ckpt"
    io.save_checkpoint({"step": 1}, old)
    io.wait()
    with monkeypatch.context() as context:
        context.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        io.save_checkpoint({"step": 2}, tmp_path / "new.ckpt")
        io.remove_checkpoint(old)
        with pytest.raises(NotWrittenError, match=r"new.ckpt could not be written: the disk of .* is full"):
            io.wait()
        assert [*tmp_path.iterdir()] == [old]
        assert f"the checkpoint {tmp_path / 'new.ckpt'} could not be written" in str(recwarn.list[0].message)
        io.save_checkpoint({"step": 3}, tmp_path / "new.ckpt")
        while io.will_exist(tmp_path / "new.ckpt"):
            time.sleep(0.01)
        with pytest.raises(NotWrittenError):
            io.save_checkpoint({"step": 4}, tmp_path / "newer.ckpt")
        io.remove_checkpoint(old)
        io.save_checkpoint({"step": 5}, tmp_path / "newer.ckpt")
        with pytest.raises(NotWrittenError):
            io.teardown()
    assert [*tmp_path.iterdir()] == [old]
    io.remove_checkpoint(old)  # of another run
    io.teardown()
    assert not [*tmp_path.iterdir()]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning", "ignore:TypedStorage:UserWarning")
def test_what_cannot_be_copied_is_written_at_once(tmp_path):
    io = BackgroundCheckpointIO()
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for number, tensor in enumerate((torch.eye(3).to_sparse(), quantized, quantized)):  # more than are held
        with pytest.warns(UserWarning, match=r"a\.ckpt is written while training waits.*cannot be copied"):
            io.save_checkpoint({"tensor": tensor, "number": number}, tmp_path / "a.ckpt")
        assert torch.load(tmp_path / "a.ckpt", weights_only=False)["number"] == number
    io.save_checkpoint({"dense": torch.eye(3)}, tmp_path / "b.ckpt")
    io.teardown()
    assert torch.load(tmp_path / "b.ckpt")["dense"].equal(torch.eye(3))


def test_the_checkpoint_before_a_requeue_is_there_when_it_returns(tmp_path, gated):
    gated.gate.release()
    gated.save_checkpoint({"step": 1}, tmp_path / "hpc_ckpt_1.ckpt")
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()
    assert pickle.loads(pickle.dumps(BackgroundCheckpointIO()))  # as when processes are spawned


def test_without_a_local_folder_lightning_writes_to_stores_in_the_background(tmp_path, monkeypatch):
    gate, write = threading.Event(), TorchCheckpointIO.save_checkpoint
    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", lambda *a, **o: gate.wait(60) and write(*a, **o))
    io, path = BackgroundCheckpointIO(), f"store://{tmp_path}/a.ckpt"
    io.save_checkpoint({"step": 1}, path)
    threading.Timer(0.1, gate.set).start()
    assert io.load_checkpoint(path) == {"step": 1}
    io.remove_checkpoint(path)
    io.teardown()
    assert not (tmp_path / "a.ckpt").exists()


class Slow(BackgroundCheckpointIO):
    def _write_file(self, path, checkpoint):
        time.sleep(0.1)
        if "no room" in str(path):
            raise OSError("no room")
        super()._write_file(path, checkpoint)


class Stopping(L.Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 3:
            raise self.error


def boring(tmp_path, io, *callbacks, **options):
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_last=True, save_top_k=1)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=5, callbacks=[keeper, *callbacks], plugins=[io], logger=False, limit_val_batches=0,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    return trainer, BoringModel()


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("error", [SystemExit(143), ValueError("a mistake")])
def test_a_run_that_ends_early_leaves_what_was_saved(tmp_path, error):
    trainer, module = boring(tmp_path, Slow(), Stopping(error), SaveOnSignal())
    with pytest.raises(type(error)):
        trainer.fit(module)
    assert {path.name for path in tmp_path.iterdir()} == {"step=3.ckpt", "last.ckpt"}
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3
    weights = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["state_dict"]
    assert weights["layer.weight"].equal(module.layer.weight)


class SavesByHand(L.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            assert not (self.folder / "step=1.ckpt").exists()  # the keeper's
            for _ in range(99):
                trainer.strategy.checkpoint_io.gate.release()
            trainer.save_checkpoint(self.folder / "mine")
            assert torch.load(self.folder / "mine", weights_only=True)["global_step"] == 1


def test_what_others_than_model_checkpoint_save_is_there_at_once(tmp_path, gated):
    trainer, module = boring(tmp_path, gated, SavesByHand(tmp_path))
    trainer.fit(module)
    assert (tmp_path / "mine").exists()


def check_by_hand(rank, folder):
    class Saves(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1:
                trainer.save_checkpoint(folder / "mine")
                assert (folder / "mine").exists()
            if batch_idx == 2:
                reason = "no room" if rank == 0 else "by another process, which says why"
                with pytest.raises(OSError, match=reason), warnings.catch_warnings(action="ignore"):
                    trainer.save_checkpoint(folder / "no room")

    trainer, module = boring(folder / "kept", Slow(), Saves(), devices=2, strategy="accel_ddp")
    trainer.fit(module)
    return trainer.global_step


@pytest.mark.slow
def test_what_is_saved_by_hand_is_there_on_all_processes(tmp_path):
    assert run_ranks(check_by_hand, tmp_path, timeout_s=60) == [5, 5]


class Scores(BoringModel):
    """Log two measures, of which one rises and the other is best in the middle."""

    def training_step(self, batch, batch_idx):
        self.log_dict({"rises": float(batch_idx), "peaks": -abs(batch_idx - 2.0)})
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keepers",
    [
        [{"monitor": "rises"}, {"monitor": "peaks"}],
        [{"monitor": "peaks", "filename": "best", "save_top_k": 3}],
        [{"filename": "{epoch}", "save_top_k": -1}, {"monitor": "peaks", "filename": "fixed", "save_last": "link"}],
    ],
)
def test_names_that_are_queued_are_taken(tmp_path, keepers, monkeypatch):
    monkeypatch.setattr(ModelCheckpoint, "file_exists", inspect.unwrap(ModelCheckpoint.file_exists))
    ends = []
    for io in (AtomicCheckpointIO(), Slow()):
        folder = tmp_path / type(io).__name__
        kept = [ModelCheckpoint(folder, mode="max", every_n_train_steps=1, **each) for each in keepers]
        trainer, _ = boring(folder, io)
        trainer.callbacks[:] = kept
        trainer.fit(Scores())
        ends.append(
            (
                {path.name: torch.load(path, weights_only=True)["global_step"] for path in folder.iterdir()},
                [str(each.best_model_path).rpartition("/")[2] for each in kept],
            )
        )
    assert ends[0] == ends[1]


class Signalled(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_saves_to_the_store(tmp_path):
    io = BackgroundCheckpointIO(tmp_path / "copies")
    trainer, module = boring(f"store://{tmp_path}/run", io, Signalled(), SaveOnSignal())
    with pytest.raises(SystemExit, match="143"):
        trainer.fit(module)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"signal-step=3.ckpt", "step=3.ckpt", "last.ckpt"}


@pytest.mark.slow
def test_a_foreign_run_is_equal_with_and_without_a_thread(tmp_path):
    ends = []
    for io in (AtomicCheckpointIO(), Slow()):
        torch.manual_seed(1)
        folder = tmp_path / type(io).__name__
        trainer, module = boring(folder, io)
        trainer.fit(module)
        trainer.test(module, ckpt_path="best", verbose=False)
        assert {path.name for path in folder.iterdir()} == {"step=5.ckpt", "last.ckpt"}
        ends.append(torch.load(folder / "step=5.ckpt", weights_only=True))
    assert ends[0]["state_dict"]["layer.weight"].equal(ends[1]["state_dict"]["layer.weight"])
    assert ends[0]["loops"] == ends[1]["loops"]


STRATEGIES = {
    "ddp": ("ddp", Job),
    "accel_fsdp2": ("accel_fsdp2", Job),
    "accel_fsdp2, sharded": (partial(FullyShardedStrategy, checkpoints="sharded"), Job),
    "accel_model_parallel": ("accel_model_parallel", ShardedJob),
    "accel_pipeline": ("accel_pipeline", Job),
}


def check_resumed(rank, folder, name, place):
    """Train, save in the background at each step, and end; then go on from the newest checkpoint."""
    strategy, job = STRATEGIES[name]
    ends = []
    for io, kept, steps in (
        (AtomicCheckpointIO(), [folder / "at once"], (6,)),
        (BackgroundCheckpointIO(folder / "copies"), place, (3, 6)),
    ):
        [kept] = kept
        for number in steps:
            torch.manual_seed(5)
            module = job(folder)
            keeper = ModelCheckpoint(kept, "{step}", every_n_train_steps=1, save_last=True, save_top_k=1)
            trainer = L.Trainer(
                accelerator="cpu", devices=2, strategy=strategy() if callable(strategy) else strategy, logger=False,
                max_steps=number, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
                callbacks=[keeper, ExactResume()], plugins=[io],
            )  # fmt: skip
            if dist.is_initialized():
                dist.barrier()  # the first process alone writes, and waits for, whole checkpoints
            newest = None if number == steps[0] else newest_checkpoint([kept])
            trainer.fit(module, module.loader(2), ckpt_path=newest)
        ends.append(parts_of(module))
    assert ends[0].keys() == ends[1].keys()
    for part, value in ends[0].items():
        assert value.equal(ends[1][part]), part
    return str(newest)


@pytest.mark.sampled(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "in_store"),
    [
        ("accel_fsdp2, sharded", True),
        ("accel_fsdp2, sharded", False),
        ("ddp", True),
        ("accel_model_parallel", True),
        pytest.param("accel_fsdp2", False, marks=pytest.mark.slow),
        pytest.param("accel_pipeline", True, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_from_what_was_written_in_the_background(tmp_path, name, in_store):
    place = f"store://{tmp_path}/bucket/run" if in_store else tmp_path / "kept"
    for newest in run_ranks(check_resumed, tmp_path, name, [place], timeout_s=40):
        assert newest.startswith(str(place))
        assert "step=3.ckpt" in newest or "last.ckpt" in newest
    names = {path.name for path in (tmp_path / ("bucket/run" if in_store else "kept")).iterdir()}
    assert names == {"step=6.ckpt", "last.ckpt"}


def check_failure(rank, folder, at):
    """Let the second process fail, or the first, which alone removes, and return what each process raises."""
    failing = {
        "upload": (1, tests.store.Store, "put_file"), "write": (1, FileSystemWriter, "write_data"),
        "remove": (0, AtomicCheckpointIO, "remove_checkpoint"), "folder": (-1, None, ""),
    }  # fmt: skip

    class Failing(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            where, target, name = failing[at]
            if batch_idx == 2 and rank == where:
                trainer.strategy.checkpoint_io.wait()
                stack.callback(setattr, target, name, getattr(target, name))
                setattr(target, name, lambda *_, **__: (_ for _ in ()).throw(PermissionError("not allowed")))

    class Late(BackgroundCheckpointIO):
        def _save(self, *arguments):
            if rank == 0:  # it hears of the failure where all processes have agreed to go on
                wait([each[0] for each in self._pending], timeout=10)
            super()._save(*arguments)

        def _note_error(self, error, what):
            time.sleep(rank)  # the second process would have gone on to its next step
            super()._note_error(error, what)

    (folder / "file").touch()
    copies = folder / ("file" if at == "folder" and rank == 1 else "copies")
    trainer, module = boring(
        f"store://{folder}/bucket", Late(copies), Failing(), devices=2,
        strategy=FullyShardedStrategy(checkpoints="sharded"),
    )  # fmt: skip
    told = pytest.raises(OSError, match=r"process 1|local_folder|not allowed|by another process")
    with ExitStack() as stack, warnings.catch_warnings(action="ignore"), told as failed:
        trainer.fit(module)
    return f"{type(failed.value).__name__}: {failed.value}"


@pytest.mark.sampled(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "at", ["upload", *(pytest.param(at, marks=pytest.mark.slow) for at in ("write", "remove", "folder"))]
)
def test_where_one_process_fails_all_are_told(tmp_path, at):
    first, second = run_ranks(check_failure, tmp_path, at, timeout_s=60)
    reason = "cannot be written" if at == "folder" else "not allowed"
    assert reason in first
    if at == "remove":
        assert second == "NotWrittenError: a checkpoint could not be written by another process, which says why"
        return
    assert reason in second
    if at == "write":
        assert ".ckpt: process 1 could not write its shard: PermissionError: not allowed" in first
    if at == "folder":
        assert newest_checkpoint([f"store://{tmp_path}/bucket"]) is None
        return
    if at == "upload":
        assert re.fullmatch(
            "NotWrittenError: process 1 could not write its part .*: PermissionError: not allowed", first
        )
    complete = newest_checkpoint([f"store://{tmp_path}/bucket"])
    assert "step=2.ckpt" in complete or "last.ckpt" in complete  # the last that both have written


def check_needs_folder(rank, folder):
    keeper = ModelCheckpoint(f"store://{folder}/bucket", every_n_train_steps=1)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=FullyShardedStrategy(checkpoints="sharded"), max_steps=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[keeper],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"goes to store://.* from a disk of each machine.*local_folder="):
        trainer.fit(Job(folder), Job(folder).loader(2))
    assert trainer.global_step == 0


def test_sharded_checkpoints_for_a_store_need_a_local_folder(tmp_path):
    run_ranks(check_needs_folder, tmp_path)


def check_places(rank, folder):
    """Save to a folder of each process, as Ray's callback does, on one machine and on two."""
    trainer, module = boring(folder / "kept", AtomicCheckpointIO(), devices=2, strategy="accel_fsdp2")
    trainer.strategy.checkpoints = "sharded"
    trainer.fit(module)
    trainer.save_checkpoint(folder / f"of-{rank}/a.ckpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"machine{rank}")
        with pytest.raises(ValueError, match=r"processes of 2 machines .* to 2 folders, such as .*of-0\. Save it"):
            trainer.save_checkpoint(folder / f"of-{rank}/a.ckpt")
        trainer.save_checkpoint(folder / "of-all/a.ckpt")


@pytest.mark.slow
def test_machines_that_save_shards_to_different_places_are_told(tmp_path):
    run_ranks(check_places, tmp_path, timeout_s=60)
    for name in ("of-0", "of-all"):
        assert {path.name for path in (tmp_path / name / "a.ckpt").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert not (tmp_path / "of-1").exists()
