"""The script for Slurm: a job that is told to stop, and one of whose processes is killed, comes back from the queue."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.test_launch import (
    ROOT,
    assert_equal_ends,
    end_of,
    environment,
    folder,  # noqa: F401  # fixtures
    wait_for_step,
    whole,  # noqa: F401
)

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "configs/launch/slurm.sh"

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
trap 'true' TERM # which each member of the job's process group gets
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NODEID=0 "$@" &
done
for ((i = 0; i < SLURM_NTASKS; i++)); do
    wait -n
    status=$?
    if ((status != 0)); then
        sleep 0.3
        kill $(jobs -p) 2> /dev/null
        wait
        exit $status
    fi
done
"""
SCONTROL = """#!/bin/bash
[[ $1 == requeue && $2 == "$SLURM_JOB_ID" ]] || exit 1
touch requeued
setsid bash -c "sleep 0.3; kill -TERM -- -$JOB_GROUP" &
"""


class SimulatedSlurm:
    """Start the script as slurmd does, with ``srun`` and ``scontrol`` of our own."""

    def __init__(self, place):
        self.folder = place
        (place / "bin").mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (place / "bin" / name).write_text(text)
            (place / "bin" / name).chmod(0o755)
        self.variables = environment() | {
            "SLURM_JOB_ID": "12007", "SLURM_JOB_NAME": "fit", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "localhost", "SLURM_NODELIST": "localhost",
            "PATH": f"{place / 'bin'}:{environment()['PATH']}",
        }  # fmt: skip
        self.restarts, self.job_id = 0, 12007

    def submit(self, *arguments):
        self.arguments = arguments
        command = f'export JOB_GROUP=$$; exec bash {SCRIPT} "$@"'
        with open(self.folder / "log.txt", "a") as log:
            self.job = subprocess.Popen(
                ["bash", "-c", command, "job", *arguments], cwd=self.folder, stdout=log, stderr=log,
                env=self.variables | {"SLURM_RESTART_COUNT": str(self.restarts)}, start_new_session=True,
            )  # fmt: skip

    def signal(self, number):
        for rank in range(2):
            os.kill(wait_for_step(self.folder, 0, rank), number)

    def start_again(self):
        self.job.wait(120)
        (self.folder / "requeued").unlink()
        self.restarts += 1
        self.submit(*self.arguments)

    def wait(self):
        return self.job.wait(300)

    def close(self):
        if self.job.poll() is None:
            os.killpg(self.job.pid, signal.SIGKILL)


CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/slurmd.pid
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class RealSlurm:
    """Slurm's own daemons, on this machine, as Debian packages them (slurmctld, slurmd, slurm-client, munge)."""

    def __init__(self, place):
        self.folder, self.state, self.started = place, place / "slurm", 0
        self.state.mkdir(mode=0o755)
        (self.state / "munge.key").write_bytes(os.urandom(128))
        (self.state / "munge.key").chmod(0o600)
        (self.state / "slurm.conf").write_text(CONF.format(host=socket.gethostname(), folder=self.state))
        self.variables = environment() | {"SLURM_CONF": str(self.state / "slurm.conf")}
        munge = [f"--{name}-file={self.state}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self.daemons = []
        for command in (
            ["munged", "--foreground", "--force", f"--socket={self.state}/munge.socket", *munge],
            ["slurmctld", "-D", "-f", self.state / "slurm.conf"],
            ["slurmd", "-D", "-f", self.state / "slurm.conf"],
        ):
            with open(self.state / "daemons.txt", "a") as log:
                self.daemons.append(subprocess.Popen(command, env=self.variables, stdout=log, stderr=log))
            time.sleep(1)
        self._until(lambda: "idle" in self._ask("sinfo", "-h"))

    def _ask(self, *command):
        asked = subprocess.run(
            command, env=self.variables, capture_output=True, text=True, cwd=self.folder, check=False
        )
        return asked.stdout

    def _until(self, holds):
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline, self._ask("scontrol", "show", "job") + self.log()
            time.sleep(0.2)

    def log(self):
        return "".join(path.read_text()[-2000:] for path in (*self.state.glob("*.log"), *self.folder.glob("log.txt")))

    def submit(self, *arguments):
        options = ("--parsable", "--ntasks-per-node=2", f"--output={self.folder / 'log.txt'}")
        self.job = self._ask("sbatch", *options, SCRIPT, *arguments).strip()
        assert self.job, self.log()
        self.job_id = self.job

    def signal(self, number):
        self._ask("scancel", f"--signal={signal.Signals(number).name.removeprefix('SIG')}", self.job)

    def _is(self, state):
        return f"JobState={state}" in self._ask("scontrol", "show", "job", self.job)

    def start_again(self):
        def begins():  # the queue would hold it for two minutes, and refuses while processes end
            self._ask("scontrol", "update", f"jobid={self.job}", "StartTime=now")
            return self.restarts == expected and self._is("RUNNING")

        expected = self.started = self.started + 1
        self._until(begins)

    def wait(self):
        self._until(lambda: any(map(self._is, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"))))
        return 0 if self._is("COMPLETED") else 1

    @property
    def restarts(self):
        return int(self._ask("scontrol", "show", "job", self.job).partition("Restarts=")[2].split()[0])

    def close(self):
        self._ask("scancel", self.job)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(60)


HAS_SLURM = os.geteuid() == 0 and all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch")))
NEEDS_SLURM = pytest.mark.skipif(not HAS_SLURM, reason="needs Slurm's daemons, and root to start them")


@pytest.mark.weekly
@pytest.mark.parametrize("slurm", [SimulatedSlurm, pytest.param(RealSlurm, marks=NEEDS_SLURM)])
def test_a_job_that_is_told_to_stop_and_one_that_is_killed_come_back(folder, whole, slurm):  # noqa: F811
    cluster = slurm(folder)
    try:
        cluster.submit("--config=fit.yaml", "--model.pause=0.1")
        wait_for_step(folder, 6)
        cluster.signal(signal.SIGUSR1)
        cluster.start_again()
        os.kill(wait_for_step(folder, 20), signal.SIGKILL)
        cluster.start_again()
        assert cluster.wait() == 0, (folder / "log.txt").read_text()[-3000:]
        assert cluster.restarts == 2
    finally:
        cluster.close()
    log = (folder / "log.txt").read_text()
    assert "--ckpt_path auto: no checkpoint yet, a new run begins" in log
    assert log.count("--ckpt_path auto: going on from ") == 2
    assert "Handling auto-requeue signal" in log
    assert "a process ended with status 137\nthe job goes back into the queue" in log
    assert len((folder / f"slurm-{cluster.job_id}.failures").read_text().splitlines()) == 1  # no requeue by signal
    assert not list(Path(folder).glob("hpc_ckpt*"))
    assert_equal_ends(end_of(folder), whole)
