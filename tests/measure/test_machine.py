import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_accel.measure.machine import (
    describe_machine,
    free_memory_bytes,
    last_cache_bytes,
    memory_bytes,
    usable_cores,
)
from lightning_accel.ops.native import KERNELS


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.fixture
def many_cores(monkeypatch):
    """An affinity of 64 cores, so that only quotas bind."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)


CGROUPS = {
    "version 2, limited by a parent": (
        {
            "proc/self/cgroup": "0::/jobs/one",
            "sys/fs/cgroup/jobs/one/cpu.max": "max 100000",
            "sys/fs/cgroup/jobs/cpu.max": "350000 100000",
            "sys/fs/cgroup/jobs/one/memory.max": "max",
            "sys/fs/cgroup/jobs/memory.max": "1048576",
        },
        (3.5, 1048576),
    ),
    "version 2 in a container, whose path is that of the host": (
        {
            "proc/self/cgroup": "0::/kubepods/pod1",
            "sys/fs/cgroup/cpu.max": "50000 100000",
            "sys/fs/cgroup/memory.max": "4096",
        },
        (0.5, 4096),
    ),
    "version 1, controllers mounted together": (
        {
            "proc/self/cgroup": "3:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n0::/",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "8192",
        },
        (2.0, 8192),
    ),
    "version 1 without limits": (
        {
            "proc/self/cgroup": "2:cpu:/\n3:memory:/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
        (64.0, None),
    ),
    "none": ({}, (64.0, None)),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_limits_are_the_least_of_all_cgroups(case, tmp_path, many_cores):
    files, (cores, limit) = CGROUPS[case]
    root = write(tmp_path, {**files, "proc/meminfo": "MemTotal:       16 kB\nMemFree:  1 kB"})
    assert usable_cores(root) == cores
    assert memory_bytes(root) == (16384, limit)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_free_as_far_as_the_machine_and_each_group_have_some(tmp_path, version):
    """A parent's limit of 5000 bytes of which 4000 are used, 700 by files; the group's own limit is wider."""
    if version == 2:
        top, limit, usage, name = "sys/fs/cgroup/jobs", "memory.max", "memory.current", "inactive_file"
        group = "0::/jobs/one"
    else:
        top, name = "sys/fs/cgroup/memory/jobs", "total_inactive_file"
        limit, usage, group = "memory.limit_in_bytes", "memory.usage_in_bytes", "4:memory:/jobs/one"
    files = {
        "proc/self/cgroup": group,
        "proc/meminfo": "MemTotal: 16 kB\nMemAvailable: 8 kB",
        f"{top}/{limit}": "5000",
        f"{top}/{usage}": "4000",
        f"{top}/memory.stat": f"anon 3300\n{name} 700\nactive_file 9",
        f"{top}/one/{limit}": "7000",
        f"{top}/one/{usage}": "3000",
        f"{top}/one/memory.stat": f"{name} 0",
    }
    root = write(tmp_path, files)
    assert free_memory_bytes(root) == 1700
    write(root, {f"{top}/{limit}": "max" if version == 2 else str(2**63 - 4096)})
    assert free_memory_bytes(root) == 4000
    write(root, {f"{top}/one/{usage}": "7100"})
    assert free_memory_bytes(root) == 0
    write(root, {f"{top}/one/{usage}": "0", f"{top}/one/{limit}": "9000"})
    assert free_memory_bytes(root) == 8192
    write(root, {"proc/meminfo": "MemTotal: 16 kB"})
    assert free_memory_bytes(root) is None


def test_affinity_limits_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    root = write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "400000 100000"})
    assert usable_cores(root) == 2


def test_the_last_cache_is_the_largest(tmp_path):
    sizes = {"index0": "32K", "index2": "1024K", "index3": "32M"}
    folder = "sys/devices/system/cpu/cpu0/cache"
    assert last_cache_bytes(write(tmp_path, {f"{folder}/{name}/size": size for name, size in sizes.items()})) == 2**25
    assert last_cache_bytes(tmp_path / "nothing") == 0


def test_this_machine_is_described_in_json():
    machine = describe_machine()
    told = json.loads(json.dumps(machine.to_dict()))
    assert told["digest"] == machine.digest
    assert 0 < machine.cores <= machine.logical_cores
    assert machine.memory_bytes > 2**28
    assert machine.versions["torch"] == torch.__version__
    assert replace(machine, cores=machine.cores + 1).digest != machine.digest
    assert replace(machine, threads=machine.threads + 1, versions={}).digest == machine.digest


def test_flags_of_the_processor_name_instruction_sets(tmp_path, monkeypatch):
    info = (
        "processor : 0\nmodel name\t: Some CPU\nphysical id : 0\ncore id : 0\nflags\t\t: fpu avx2 amx_tile amx_bf16\n"
    )
    info += (
        "\nprocessor : 1\nmodel name\t: Some CPU\nphysical id : 0\ncore id : 0\nflags\t\t: fpu avx2 amx_tile amx_bf16\n"
    )
    monkeypatch.setattr("lightning_accel.measure.machine._ROOT", write(tmp_path, {"proc/cpuinfo": info}))
    machine = describe_machine()
    assert machine.cpu == "Some CPU"
    assert machine.instruction_sets == ("AVX2", "AMX", "AMX-BF16")
    assert machine.physical_cores == 1  # two threads of one core


def test_the_state_of_kernels_builds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(KERNELS, "build", lambda target: pytest.fail("built"))
    monkeypatch.setattr(KERNELS, "_available", {})
    monkeypatch.setenv("LIGHTNING_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("LIGHTNING_ACCEL_NATIVE", raising=False)
    assert describe_machine().kernels["cpu"] == "not built yet"
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("LIGHTNING_ACCEL_NATIVE", "0")
    assert describe_machine().kernels["cpu"] == "switched off"
