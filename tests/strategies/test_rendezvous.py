import atexit
import importlib
import os
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_accel import strategies
from lightning_accel.strategies.rendezvous import joining_process_group


class Second(LightningEnvironment):
    """That of rank 1 of 2."""

    def __init__(self, address, port):
        super().__init__()
        self.address, self.port = address, port

    def global_rank(self):
        return 1

    def world_size(self):
        return 2

    main_address = property(lambda self: self.address)
    main_port = property(lambda self: self.port)


@pytest.mark.parametrize(
    ("address", "listens", "said"),
    [
        ("127.0.0.1", False, "Nobody answers there .*start rank 0, or set MASTER_ADDR and MASTER_PORT"),
        ("127.0.0.1", True, "rank 0 seems to have come; another process is missing"),
        ("no.such.host.invalid", False, "No host of that name is known here: set MASTER_ADDR to the machine of rank 0"),
    ],
)
def test_says_who_is_missing(caplog, address, listens, said):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if listens:
            listener.listen()
        port = listener.getsockname()[1]
        deadline = time.monotonic() + 300
        with joining_process_group(Second(address, port), timedelta(seconds=1)):
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.01)
    record = caplog.records[0]
    waited = rf"rank 1 of 2 has waited \d+ s for the other processes at {re.escape(address)}:{port}\. "
    assert re.match(waited, record.getMessage())
    assert re.search(rf"{said}.*The run fails after 0:00:01, the timeout of its strategy", record.getMessage())


def test_says_nothing_where_all_come_soon(caplog):
    with joining_process_group(Second("127.0.0.1", 1), timedelta(minutes=30)):
        pass
    assert not caplog.records


@pytest.mark.parametrize("environment", [None, Second("127.0.0.1", 1)])
def test_a_process_leaves_its_group_at_exit_once_a_run_began(monkeypatch, environment):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    importlib.reload(strategies)
    assert not at_exit
    with joining_process_group(environment, None):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (leave,) = at_exit
    assert dist.is_initialized()
    leave()
    assert not dist.is_initialized()


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "AccelDDPStrategy",
        *(pytest.param(name, marks=pytest.mark.weekly) for name in ("PipelineStrategy", "FullyShardedStrategy")),
    ],
)
def test_a_run_without_its_first_process_ends(name, tmp_path):
    script = (
        "import lightning as L, torch\n"
        "from datetime import timedelta\n"
        f"from lightning_accel.strategies import {name}\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        f"strategy = {name}(timeout=timedelta(seconds=4))\n"
        "L.Trainer(accelerator='cpu', devices=2, strategy=strategy, logger=False).fit(BoringModel())\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "x"}
    environment = os.environ | launched | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, timeout=600, capture_output=True, text=True
    )
    assert run.returncode == 1
    waited = rf"rank 1 of 2 has waited \d s for the other processes at 127\.0\.0\.1:{port}\. Nobody answers there"
    assert re.search(waited, run.stderr)
    assert f"timed out after 4000ms while trying to connect to (127.0.0.1, {port})" in run.stderr
