"""Real processes in one gloo group, started once per world size and reused by every test.

``run_ranks(check, ...)`` calls a module-level ``check(rank, ...)`` in each of them and returns what each returned, in
order of rank. A Trainer inside with ``strategy="ddp", devices=world_size`` finds itself launched as by torchrun.
"""

import atexit
import faulthandler
import gc
import itertools
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_START_S = 600  # bounds the start of a process and the imports of its check, however busy the machine is
_pools: dict[int, "_Pool"] = {}
_cpu_seconds = 0.0


def cpu_seconds() -> float:
    """Return the CPU time of all checks so far, summed over their processes."""
    return _cpu_seconds


def run_ranks(check: Callable[..., Any], *args: Any, world_size: int = 2, timeout_s: float = 300) -> list[Any]:
    """Run ``check(rank, *args)`` in ``world_size`` processes.

    ``timeout_s`` begins once every process has started and imported ``check``. It ends hangs, so it is far longer than
    any check takes.

    Raises:
        AssertionError: with the traceback of each rank that failed, or naming those that did not answer in time. The
            processes are then killed; the next call starts new ones.
    """
    failures, results = _run(check, args, world_size, timeout_s)
    if any("connectFullMesh failed" in failure for failure in failures.values()):  # gloo's, on a busy machine, rarely
        failures, results = _run(check, args, world_size, timeout_s)
    if failures:
        raise AssertionError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
    return [results[rank] for rank in range(world_size)]


def _run(
    check: Callable[..., Any], args: tuple, world_size: int, timeout_s: float
) -> tuple[dict[int, str], dict[int, Any]]:
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    failures, results = pool.run(check, args, timeout_s)
    if failures:
        _pools.pop(world_size).kill()
    return failures, results


class _Pool:
    def __init__(self, world_size: int) -> None:
        context = mp.get_context("forkserver")  # one import for all processes, of this pool and the next
        context.set_forkserver_preload(["lightning.pytorch", "lightning_accel.models", "lightning_accel.callbacks"])
        self.pipes, self.processes = [], []
        self.folder = tempfile.TemporaryDirectory()
        self.runs = itertools.count()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, theirs, self._stderr(rank)))
            process.start()
            theirs.close()  # so that the death of the process ends the pipe
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, check: Callable[..., Any], args: tuple, timeout_s: float) -> tuple[dict[int, str], dict[int, Any]]:
        # The store stays as long as the processes: one that still opens it while its folder goes is aborted.
        store = f"{self.folder.name}/store_{next(self.runs)}"
        for pipe in self.pipes:
            pipe.send((check, args, store, timeout_s))
        failures, results = self._answers(_START_S, "not ready after")
        if not failures:
            for pipe in self.pipes:
                pipe.send("go")
            failures, results = self._answers(timeout_s, "no answer in")
        return failures, results

    def _answers(self, timeout_s: float, late: str) -> tuple[dict[int, str], dict[int, Any]]:
        """Wait for one answer of each process; return failures and results by rank."""
        global _cpu_seconds
        failures: dict[int, str] = {}
        results: dict[int, Any] = {}
        waiting = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0, deadline - time.monotonic()))
            if not ready:
                return failures | dict.fromkeys(waiting.values(), f"{late} {timeout_s} s"), results
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    succeeded, answer, seconds = pipe.recv()
                except (EOFError, ConnectionResetError):
                    succeeded, answer, seconds = False, self._death(rank), 0.0
                _cpu_seconds += seconds
                (results if succeeded else failures)[rank] = answer
            if failures:  # the others may wait for the one that failed
                deadline = min(deadline, time.monotonic() + 2)
        return failures, results

    def _stderr(self, rank: int) -> str:
        return f"{self.folder.name}/stderr_{rank}"

    def _death(self, rank: int) -> str:
        """Return the exit code of a process and the end of what it printed since its last check began."""
        self.processes[rank].join(timeout=60)
        with open(self._stderr(rank), errors="replace") as printed:
            return f"the process died, exit code {self.processes[rank].exitcode}\n{printed.read()[-4000:]}"

    def kill(self) -> None:
        global _cpu_seconds
        before = sum(os.times()[2:4])
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()
        _cpu_seconds -= sum(os.times()[2:4]) - before  # their lives are no cost of whoever ends them


@atexit.register
def _kill_all() -> None:
    for pool in _pools.values():
        pool.kill()


def _serve(rank: int, world_size: int, pipe: Connection, stderr: str) -> None:
    os.dup2(os.open(stderr, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)  # where C++ says why it aborts
    faulthandler.enable()
    os.environ |= {  # what torchrun sets and Lightning reads
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # nobody connects: the group meets in a file
        "TORCHELASTIC_RUN_ID": "tests",
    }
    import lightning.pytorch  # noqa: F401  # here, so that no check pays for it
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    while True:
        try:
            check, args, store, timeout_s = pipe.recv()  # which imports the module of the check
            pipe.send((True, "ready", 0.0))
            pipe.recv()
        except EOFError:
            return
        os.truncate(stderr, 0)
        started = time.process_time()
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            torch.manual_seed(0)
            os.environ.pop("PL_GLOBAL_SEED", None)  # an earlier check leaves it, and samplers obey it
            answer = True, check(rank, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send((*answer, time.process_time() - started))
        if not answer[0]:
            return
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear torch's caches of meshes, which keep ended groups and their threads, each awake 100 times a second."""
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _clear_sharding_prop_cache()
    gc.collect()
    gc.freeze()  # what stays is no garbage: the next collection need not look at it
