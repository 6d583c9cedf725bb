"""Training goes on whatever becomes of the build of native kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The weights that formulas in torch lead to."""
    result = finish(start(Path("unused"), LIGHTNING_ACCEL_NATIVE="0"))
    assert not result["native"]
    assert result["said"] == []
    return result["weights"]


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    environment = {"LIGHTNING_ACCEL_CACHE": str(cache), "PYTHONPATH": str(ROOT), **environment}
    inherited = {name: value for name, value in os.environ.items() if name != "LIGHTNING_ACCEL_NATIVE"}
    return subprocess.Popen(
        [sys.executable, ROOT / "tests" / "native_job.py"],
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.weekly
def test_two_processes_that_build_at_the_same_time(expected, tmp_path, compiler):
    results = [finish(process) for process in [start(tmp_path / "cache"), start(tmp_path / "cache")]]
    for result in results:
        assert result["native"]
        assert result["said"] == []
        assert result["weights"] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1


@pytest.mark.weekly
def test_a_cache_that_cannot_be_written(expected, tmp_path, compiler):
    result = finish(start(Path("/proc/lightning_accel"), TMPDIR=str(tmp_path)))  # read-only for root, too
    assert result["native"]
    assert result["said"] == []
    assert result["weights"] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert list(tmp_path.glob("lightning_accel-*/*.so"))


@pytest.mark.weekly
def test_no_compiler_on_the_path(expected, tmp_path):
    result = finish(start(tmp_path / "cache", PATH=str(tmp_path)))
    assert not result["native"]
    (said,) = result["said"]
    assert (
        "no C++ compiler: c++ is not on the PATH. Install one (g++), or name it in CXX. Formulas in torch take" in said
    )
    assert result["weights"] == expected


@pytest.mark.weekly
def test_a_compiler_that_fails(expected, tmp_path, compiler):
    failing = tmp_path / "fails"
    failing.write_text(
        "#!/bin/sh\n"
        """case "$*" in *.cpp*) echo 'c++: fatal error: Killed signal terminated program' >&2; exit 1;; esac\n"""
        'exec c++ "$@"\n'
    )
    failing.chmod(0o755)
    result = finish(start(tmp_path / "cache", CXX=str(failing)))
    assert not result["native"]
    (said,) = result["said"]
    assert "no native ops for cpu: c++: fatal error: Killed signal terminated program" in said
    assert result["weights"] == expected
    assert not list((tmp_path / "cache").glob("*.so"))


@pytest.mark.slow
@pytest.mark.weekly
def test_imports_build_nothing(tmp_path):
    packages = ("ops", "nn", "compress", "models", "callbacks", "strategies", "cli")
    code = ";".join(f"import lightning_accel.{package}" for package in packages)
    environment = {**os.environ, "LIGHTNING_ACCEL_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env={**environment, "PYTHONPATH": str(ROOT)}, check=True)
    assert not (tmp_path / "cache").exists()
    assert not list(tmp_path.glob("lightning_accel-*"))
