import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import lightning.pytorch  # noqa: F401  # its log handler keeps the stderr of its import, which capsys would close
import pytest
import torch

from lightning_accel.__main__ import main
from lightning_accel.ops.native import KERNELS
from tests.ranks import cpu_seconds

# One by default: threads that share their cores with another program wait for each other most of the time.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


BUILDS: list[logging.LogRecord] = []
logging.getLogger("lightning_accel.ops.native_build").addFilter(lambda record: BUILDS.append(record) is None)

APART = {"test_configs", "test_notebooks", "test_recovery"}  # long tests that share nothing


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    os.environ.pop("PL_GLOBAL_SEED", None)  # a command line leaves it, and processes that are started then obey it


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Group the tests that start ranks, which reuse their pools, and of the rest those of a file, for pytest-xdist."""
    for item in items:
        if _starts_ranks(getattr(item, "function", None), set()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif item.path.stem not in APART:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(item.config.rootpath))))


def _starts_ranks(function: object, seen: set[object]) -> bool:
    """Return whether ``function`` names ``run_ranks``, or a function of its module that does."""
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    names = function.__code__.co_names
    return "run_ranks" in names or any(_starts_ranks(function.__globals__.get(name), seen) for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    modules, builds, before = len(sys.modules), len(BUILDS), _cpu_seconds()
    result = yield
    seconds = _cpu_seconds() - before
    has_imported = len(sys.modules) - modules > 100  # such as transformers, which whoever comes first pays for all
    is_measured = torch.get_num_threads() == 1  # several spin while they wait for each other
    has_built = len(BUILDS) > builds  # a native library, once on a machine
    is_measured = is_measured and not (has_imported or has_built or item.get_closest_marker("slow"))
    if is_measured and seconds > 3 and seconds > 3 * _slowness():
        pytest.fail(f"took {seconds:.1f} s of CPU time: at most 3, or mark it slow", pytrace=False)
    return result


def _cpu_seconds() -> float:
    """Return the CPU time of this process, of those that it has waited for, and of the checks of ranks."""
    times = os.times()
    return sum(times[:4]) + cpu_seconds()


def _slowness() -> float:
    """Return how many times as long a core takes now as one that is idle, of a server of the year 2023; at least 1."""
    before = time.process_time()
    sum(number * number for number in range(3_000_000))
    return max(1.0, (time.process_time() - before) / 0.16)


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
