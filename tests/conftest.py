import gc
import logging
import os
import random
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType

import pytest

from tests.ranks import cpu_seconds

collect_ignore = ["emulated_gpu"]
# torch and the package are imported in functions: the process of pytest-xdist that runs no tests starts the others
# seconds earlier without them.
BUILDS: list[logging.LogRecord] = []
logging.getLogger("lightning_accel.ops.native_build").addFilter(lambda record: BUILDS.append(record) is None)

# long tests that share nothing
APART = {"test_configs", "test_foreign", "test_notebooks", "test_readme", "test_recovery", "test_trials"}
# variables of a run of several processes, which its launcher sets in the first
LAUNCHED = "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PL_GLOBAL_SEED"
LIMIT = 3  # seconds of CPU time of a test that is not slow, on a core that has nothing else to do


def pytest_configure(config):
    if config.getoption("numprocesses", None):  # the process that has others run the tests
        return
    gc.disable()  # it would go through all modules again and again while they are imported
    import lightning.pytorch  # noqa: F401  # its log handler keeps the stderr of its import, which capsys would close
    import torch

    # Once for all: the option log_level sets it six times for each test, which empties the caches of all loggers.
    logging.getLogger().setLevel("INFO")
    # One by default: threads that share their cores with another program wait for each other most of the time.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True)
def process_as_it_was():
    """A seed, and no trace of the test before: what launchers set, processes that are started later would obey."""
    import torch

    torch.manual_seed(0)
    before, threads = {name: os.environ.get(name) for name in LAUNCHED}, torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Mark the cases of tests that are ``sampled``, and group tests for pytest-xdist.

    Group the tests that start ranks, which reuse their pools, and of the rest those of a file, for pytest-xdist.

    Slow tests that start ranks are grouped by their files: together they take longer than half of all slow tests, and
    a second start of the pools is short beside them.
    """
    _mark_sampled(items)
    for item in items:
        if not item.get_closest_marker("slow") and _starts_ranks(getattr(item, "function", None), set()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif item.path.stem not in APART:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(item.config.rootpath))))


def _mark_sampled(items: list[pytest.Item]) -> None:
    """Leave as many cases as the mark ``sampled`` says to default and slow runs, drawn by the name of the test."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("weekly"):
            cases.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    for (_, name), found in cases.items():
        counts = found[0].get_closest_marker("sampled").kwargs
        random.Random(name.rpartition("::")[2]).shuffle(found)
        found.sort(key=lambda item: item.get_closest_marker("slow") is not None)  # slow ones to the end
        default = counts.get("default", sum(not item.get_closest_marker("slow") for item in found))
        for place, item in enumerate(found):
            if place >= default:
                item.add_marker("slow")
            if place >= default + counts.get("slow", len(found)):
                item.add_marker("weekly")


def pytest_collection_finish():
    gc.freeze()  # what is imported stays to the end, so no collection need look at it
    gc.enable()


def _starts_ranks(function: object, seen: set[object]) -> bool:
    """Return whether ``function`` names ``run_ranks``, or a function of its module that does."""
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    names = function.__code__.co_names
    return "run_ranks" in names or any(_starts_ranks(function.__globals__.get(name), seen) for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    import torch

    modules, builds, before = len(sys.modules), len(BUILDS), _cpu_seconds()
    result = yield
    seconds = _cpu_seconds() - before
    has_imported = len(sys.modules) - modules > 100  # such as transformers, which whoever comes first pays for all
    is_measured = torch.get_num_threads() == 1  # several spin while they wait for each other
    has_built = len(BUILDS) > builds  # a native library, once on a machine
    # the first test on a GPU pays for CUDA's start
    is_measured = is_measured and not (has_imported or has_built or any(map(item.get_closest_marker, ("slow", "gpu"))))
    if is_measured and seconds > LIMIT:
        seconds /= _slowness()
        # Other programs empty the caches of a test, but not those of the small loop of _slowness: on busy machines a
        # test of 2.6 s took 3.8. So what is above the limit is reported, and fails where noise cannot explain it.
        if seconds > 2 * LIMIT:
            pytest.fail(f"took {seconds:.1f} s of CPU time: at most {LIMIT}, or mark it slow", pytrace=False)
        if seconds > LIMIT:
            item.user_properties.append(("cpu_seconds", seconds))
    return result


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.getreports("passed"):
        for name, seconds in report.user_properties:
            if name == "cpu_seconds":
                terminalreporter.write_line(
                    f"{report.nodeid} took {seconds:.1f} s of CPU time: make it {LIMIT} or less, or mark it slow",
                    yellow=True,
                )


def _cpu_seconds() -> float:
    """Return the CPU time of this process, of those that it has waited for, and of the checks of ranks."""
    times = os.times()
    return sum(times[:4]) + cpu_seconds()


def _slowness() -> float:
    """Return how many times as long a core takes now as one that is idle, of a server of the year 2023; at least 1."""
    before = time.process_time()
    sum(number * number for number in range(3_000_000))
    return max(1.0, (time.process_time() - before) / 0.16)


def _keep_onnx_operators() -> None:
    """Let all exports to ONNX share the list of operators, of which each makes its own in half a second."""
    for minor in range(5, 20):
        module = sys.modules.get(f"onnxscript._framework_apis.torch_2_{minor}")
        if module is not None and not hasattr(module.get_torchlib_ops, "cache_clear"):
            module.get_torchlib_ops = cache(module.get_torchlib_ops)


def pytest_runtest_setup(item):
    import torch

    _keep_onnx_operators()
    markers = list(item.iter_markers("gpu"))
    needed = max((marker.args[0] if marker.args else 1 for marker in markers), default=0)
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA devices")
    if any(marker.kwargs.get("kernels") for marker in markers) and "EMULATED_GPUS" in os.environ:
        pytest.skip("needs compiled kernels, which compute nothing on an emulated GPU")


@pytest.fixture
def compiler() -> None:
    """Skips where nothing can be compiled."""
    if shutil.which(shlex.split(os.environ.get("CXX", "c++"))[0]) is None:
        pytest.skip("needs a C++ compiler")


@pytest.fixture
def eager(request):
    """Leave functions that others compile at import eager, but in slow tests: bitsandbytes' 4 bits take 12 s else."""
    import torch

    with torch.compiler.set_stance("default" if request.node.get_closest_marker("slow") else "force_eager"):
        yield


@pytest.fixture
def uncompiled(request, monkeypatch) -> None:
    """Leave the compiled forms of a model eager, but in weekly tests, where a test is of other forms."""
    if not request.node.get_closest_marker("weekly"):
        monkeypatch.setattr("lightning_accel.compress.quantization.form.compile_flat", lambda flat, tensors: flat)


@pytest.fixture
def small_rates(monkeypatch) -> None:
    """Rates of the machine are measured on small matrices, buffers and files."""
    from lightning_accel.measure import rates

    monkeypatch.setattr(rates, "_SIZES", (64, 128))
    monkeypatch.setattr(rates, "_MIN_BYTES", 2**20)
    monkeypatch.setattr(rates, "_MAX_BYTES", 2**20)
    monkeypatch.setattr(rates, "_DISK_BYTES", 2**22)


@pytest.fixture
def native(compiler, monkeypatch) -> None:
    """Native kernels are used, where anything can be compiled: that they cannot be built is an error then."""
    if os.environ.get("LIGHTNING_ACCEL_NATIVE") == "0":
        pytest.skip("LIGHTNING_ACCEL_NATIVE=0")
    import torch

    from lightning_accel.ops.native import KERNELS

    monkeypatch.setenv("LIGHTNING_ACCEL_NATIVE", "1")
    assert KERNELS.serves(torch.device("cpu"))


@pytest.fixture
def vectors(native) -> None:
    """Native kernels draw random numbers, too."""
    from lightning_accel.ops.native import missing_kernel

    if reason := missing_kernel():
        pytest.skip(reason)


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
    from lightning_accel.__main__ import main

    def run(*arguments: object) -> Finished:
        capsys.readouterr()
        caplog.clear()
        with caplog.at_level("INFO"):
            status = main([str(argument) for argument in arguments])
        return Finished(status, *capsys.readouterr(), caplog.text)

    return run
