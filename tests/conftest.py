import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch  # noqa: F401  # its log handler keeps the stderr of its import, which capsys would close
import pytest
import torch

from lightning_accel.__main__ import main
from lightning_accel.ops.native import KERNELS

torch.set_num_threads(1)  # threads that share their cores with another program wait for each other most of the time


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    os.environ.pop("PL_GLOBAL_SEED", None)  # a command line leaves it, and processes that are started then obey it


def pytest_runtest_setup(item):
    marker = item.get_closest_marker("gpu")
    if marker and torch.cuda.device_count() < (needed := marker.args[0] if marker.args else 1):
        pytest.skip(f"needs {needed} CUDA devices")


@pytest.fixture
def compiler() -> None:
    """Skips where nothing can be compiled."""
    if shutil.which(shlex.split(os.environ.get("CXX", "c++"))[0]) is None:
        pytest.skip("needs a C++ compiler")


@pytest.fixture
def native(compiler, monkeypatch) -> None:
    """Native kernels are used, where anything can be compiled: that they cannot be built is an error then."""
    if os.environ.get("LIGHTNING_ACCEL_NATIVE") == "0":
        pytest.skip("LIGHTNING_ACCEL_NATIVE=0")
    monkeypatch.setenv("LIGHTNING_ACCEL_NATIVE", "1")
    assert KERNELS.serves(torch.device("cpu"))


@pytest.fixture
def run_folder(tmp_path, monkeypatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass
class Finished:
    status: int
    out: str
    err: str
    log: str


@pytest.fixture
def command(run_folder, capsys, caplog) -> Callable[..., Finished]:
    """Runs a command line in this process, in an empty folder."""

    def run(*arguments: object) -> Finished:
        capsys.readouterr()
        caplog.clear()
        with caplog.at_level("INFO"):
            status = main([str(argument) for argument in arguments])
        return Finished(status, *capsys.readouterr(), caplog.text)

    return run
