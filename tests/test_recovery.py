"""Runs that are killed for good, at random moments and in the middle of writing, and go on from what is on the disk.

Each run is a set of real processes, forked from a server that has imported what they need.
"""

import multiprocessing as mp
import os
import random
import shutil
import sys
import time
import warnings
from pathlib import Path

import pytest

from lightning_accel.strategies.checkpoints.io import newest_checkpoint
from lightning_accel.strategies.checkpoints.reading import find_damage

KILLS = 8  # of each; benchmarks/campaign.py kills more
STEPS = 24

# To add a strategy: its short name, options of FullyShardedStrategy, how many processes, and the module. That needs a
# configure_model only where the strategy does not split it by itself.
STRATEGIES = {
    "single": ("auto", {}, 1, "Job"),
    "ddp": ("ddp", {}, 2, "Job"),
    "accel_ddp": ("accel_ddp", {}, 2, "Job"),
    "accel_dp": ("accel_dp", {}, 1, "Job"),
    "accel_model_parallel": ("accel_model_parallel", {}, 2, "ShardedJob"),
    "accel_fsdp2, whole": ("accel_fsdp2", {}, 2, "Job"),
    "accel_fsdp2, sharded": ("accel_fsdp2", {"checkpoints": "sharded"}, 2, "Job"),
    "accel_expert_parallel": ("accel_expert_parallel", {}, 2, "ExpertJob"),
    "accel_pipeline": ("accel_pipeline", {}, 2, "Job"),
    "sequences in chunks": ("ddp", {}, 2, "SequenceJob"),
    "stages of a belief network": ("ddp", {}, 2, "BeliefJob"),
    "adapters over 4 bits": ("accel_ddp", {}, 2, "AdaptedJob"),
    "adapters over 4 bits, accel_fsdp2": ("accel_fsdp2", {"checkpoints": "sharded"}, 2, "AdaptedJob"),
}
OFTEN = {
    "single",
    "ddp",
    "accel_fsdp2, sharded",
    "stages of a belief network",
}


def run(rank: int, folder: Path, name: str, resume: Path | None) -> None:
    """One process of a run; leaves ``end-RANK.pt`` when it comes to its end."""
    strategy, options, world_size, module = STRATEGIES[name]
    sys.stderr = open(folder / f"stderr-{rank}.txt", "w", buffering=1)  # noqa: SIM115
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import lightning as L
    import torch
    import torch.distributed as dist
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_accel import ExactResume, FullyShardedStrategy
    from lightning_accel.strategies import AtomicCheckpointIO
    from lightning_accel.strategies.checkpoints.atomic import write_atomically
    from tests import recovery_job

    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(folder / "store"), world_size), rank=rank, world_size=world_size
        )
    torch.manual_seed(5 if resume is None else os.getpid())
    job = getattr(recovery_job, module)(folder)
    keeper = ModelCheckpoint(folder / "kept", "{step}", every_n_train_steps=1, save_last=True, save_top_k=1)
    trainer = L.Trainer(
        accelerator="cpu", devices=2 if strategy == "accel_dp" else world_size,
        strategy=FullyShardedStrategy(**options) if options else strategy, max_steps=STEPS, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[keeper, ExactResume()], plugins=[AtomicCheckpointIO()],
    )  # fmt: skip
    trainer.fit(job, job.loader(world_size), ckpt_path=resume)
    with write_atomically(folder / f"end-{rank}.pt") as end:  # a kill may come now, too
        torch.save(recovery_job.local_state(job), end)
    sys.stderr.close()
    os._exit(0)


@pytest.fixture(scope="module")
def server():
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch", "lightning_accel.callbacks", "tests.recovery_job"])
    return context


def start(server, folder: Path, name: str) -> list:
    (folder / "store").unlink(missing_ok=True)
    (folder / "started").unlink(missing_ok=True)
    world_size = STRATEGIES[name][2]
    resume = newest_checkpoint([folder / "kept"])
    processes = [server.Process(target=run, args=(rank, folder, name, resume)) for rank in range(world_size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 300
    while not (folder / "started").exists():
        assert time.monotonic() < deadline, (folder / "stderr-0.txt").read_text()
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        assert not failed, (folder / f"stderr-{failed[0]}.txt").read_text()
        if not any(process.is_alive() for process in processes):
            break  # killed between its last checkpoint and its end: nothing was left to train
        time.sleep(0.002)
    return processes


def kill(processes: list, draw: random.Random) -> bool:
    """Kill one, then the others, as a launcher does; False if one had come to its end."""
    for process in draw.sample(processes, len(processes)):
        process.kill()
        process.join()
    return all(process.exitcode != 0 for process in processes)


def finish(processes: list, folder: Path) -> None:
    for process in processes:
        process.join(600)
        assert process.exitcode == 0, (folder / "stderr-0.txt").read_text()


def last_saved(folder: Path) -> int:
    """The step of the newest checkpoint that a run was told to be saved."""
    path = folder / "saved"
    return int(path.read_text().split()[-1]) if path.exists() and path.read_text() else 0


def step_of(checkpoint: Path | None) -> int:
    import torch

    if checkpoint is None:
        return 0
    state = torch.load(checkpoint / "meta.pt" if checkpoint.is_dir() else checkpoint, weights_only=True)
    return state["global_step"]


def assert_equal_ends(folder: Path, whole: Path, world_size: int) -> None:
    import torch

    for rank in range(world_size):
        ours, theirs = (torch.load(each / f"end-{rank}.pt") for each in (folder, whole))
        assert ours.keys() == theirs.keys()
        assert len(theirs) >= 8
        for name, value in theirs.items():
            assert value.equal(ours[name]), f"{name} on rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.weekly) for name in STRATEGIES]
)
def test_bits_are_equal_after_being_killed(tmp_path, server, name):
    world_size = STRATEGIES[name][2]
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    folder.mkdir()
    processes = start(server, whole, name)
    began = time.monotonic()
    finish(processes, whole)
    duration = time.monotonic() - began

    seed = random.randrange(10**6)
    print(f"{name}: an undisturbed run takes {duration:.1f} s; kills drawn with seed {seed}")
    draw, kills, ends, during = random.Random(seed), 0, 0, 0
    while kills < KILLS:
        processes = start(server, folder, name)
        time.sleep(draw.uniform(0, 0.5 * duration))
        if kill(processes, draw):
            kills += 1
            during += bool(list((folder / "kept").glob(".*")))
            assert not any(find_damage(path) for path in (folder / "kept").glob("*.ckpt")), f"seed {seed}"
            assert step_of(newest_checkpoint([folder / "kept"])) >= last_saved(folder), f"seed {seed}: one was lost"
        if all((folder / f"end-{rank}.pt").exists() for rank in range(world_size)):
            assert_equal_ends(folder, whole, world_size)
            ends += 1
            shutil.rmtree(folder)
            folder.mkdir()
    finish(start(server, folder, name), folder)
    assert_equal_ends(folder, whole, world_size)
    print(f"{name}: {kills} kills, {during} of them in the middle of writing; {ends + 1} runs came to their end")
