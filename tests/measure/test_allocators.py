import subprocess
import sys

import pytest

from lightning_accel.measure import allocators
from lightning_accel.measure.allocators import ALLOCATORS, allocator_in_use, variables_for, why_no_allocator

MADVISE = "always [madvise] never\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Linux with glibc 2.36, whose libraries and files are given."""

    def set_up(libraries=(), glibc="2.36", huge_pages=MADVISE, maps="", system="Linux"):
        monkeypatch.setattr(allocators.platform, "system", lambda: system)
        monkeypatch.setattr(allocators.platform, "libc_ver", lambda: ("glibc" if glibc else "", glibc))
        monkeypatch.setattr(allocators, "find_library", lambda name: f"lib{name}.so.4" if name in libraries else None)
        monkeypatch.setattr(allocators, "_ROOT", tmp_path)
        for path, text in (("sys/kernel/mm/transparent_hugepage/enabled", huge_pages), ("proc/self/maps", maps)):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)

    for name in ("LD_PRELOAD", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    return set_up


def test_reasons_and_variables_are_those_of_the_machine(machine, monkeypatch):
    machine(libraries=["tcmalloc", "tcmalloc_minimal"])
    assert not why_no_allocator("tcmalloc")
    assert variables_for("tcmalloc")["LD_PRELOAD"] == "libtcmalloc_minimal.so.4"
    assert why_no_allocator("jemalloc") == "the library jemalloc is not installed"
    with pytest.raises(RuntimeError, match="allocator='jemalloc': the library jemalloc is not installed"):
        variables_for("jemalloc")
    assert not why_no_allocator("huge_pages")
    monkeypatch.setenv("LD_PRELOAD", "libmine.so")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    assert variables_for("tcmalloc")["LD_PRELOAD"] == "libtcmalloc_minimal.so.4:libmine.so"
    assert variables_for("huge_pages")["GLIBC_TUNABLES"].endswith(":glibc.malloc.check=3")
    for other in ({"glibc": "2.31"}, {"glibc": ""}, {"huge_pages": "[always] madvise never\n"}, {"system": "Darwin"}):
        machine(**other)
        assert why_no_allocator("huge_pages")


def test_the_allocator_is_told_by_what_is_loaded(machine, monkeypatch):
    machine(maps="7f0 r-xp 0 /lib/libc.so.6\n")
    assert not allocator_in_use()
    machine(maps="7f0 r-xp 0 /lib/libc.so.6\n7f1 r-xp 0 /usr/lib/libtcmalloc_minimal.so.4.5.10\n")
    assert allocator_in_use() == "tcmalloc"
    machine(maps="7f1 r-xp 0 /usr/lib/libjemalloc.so.2\n")
    assert allocator_in_use() == "jemalloc"
    machine()
    monkeypatch.setenv("GLIBC_TUNABLES", variables_for("huge_pages")["GLIBC_TUNABLES"])
    assert allocator_in_use() == "huge_pages"


@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_program_starts_again_with_the_allocator_of_its_config(tmp_path, name):
    """Once, with all its arguments, as the command line does."""
    if reason := why_no_allocator(name):
        pytest.skip(reason)
    config = tmp_path / "tuned.yaml"
    entry = f"{{class_path: lightning_accel.callbacks.Speedups, init_args: {{threads: 1, allocator: {name}}}}}"
    config.write_text(f"trainer:\n  callbacks+:\n  - {entry}\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from lightning_accel.__main__ import main\n"
        "from lightning_accel.measure.allocators import allocator_in_use\n"
        "print(os.getpid(), allocator_in_use() or 'none', flush=True)\n"
        "sys.exit(main())\n"
    )
    arguments = ["tune", f"--config={config}", "--help"]
    done = subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, check=True)
    (first, before), (second, after), usage = (line.split() for line in done.stdout.splitlines()[:3])
    assert (before, after) == ("none", name)
    assert first == second
    assert usage[:3] == ["usage:", "lightning-accel", "tune"]
    assert not done.stderr
