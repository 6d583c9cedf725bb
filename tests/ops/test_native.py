import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_accel.ops import NativeLibrary, native_build
from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.native_build import BuildError, cpu_target

CPU = torch.device("cpu")
SOURCE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include "factor.h"

using torch::stable::Tensor;

Tensor scale(const Tensor& x) {
  const Tensor in = torch::stable::contiguous(x);
  Tensor out = torch::stable::empty_like(in);
  const float* from = in.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, in.numel(), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = FACTOR * from[i];
  });
  return out;
}

STABLE_TORCH_LIBRARY(NAMESPACE, m) { m.def("scale(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) { m.impl("scale", TORCH_BOX(&scale)); }
"""
CUDA_SOURCE = """
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include "factor.h"

using torch::stable::Tensor;

__global__ void scale_kernel(const float* from, float* to, int64_t size) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < size) to[i] = FACTOR * from[i];
}

Tensor scale(const Tensor& x) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor in = torch::stable::contiguous(x);
  Tensor out = torch::stable::empty_like(in);
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream);
  scale_kernel<<<(in.numel() + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      in.const_data_ptr<float>(), out.mutable_data_ptr<float>(), in.numel());
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, CUDA, m) { m.impl("scale", TORCH_BOX(&scale)); }
"""
HANGS = """case "$*" in *scale.o*) echo $$ > {pid}; exec sleep 600;; esac
exec c++ "$@"
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The only folder that libraries are kept in."""
    monkeypatch.setenv("LIGHTNING_ACCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_build.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("LIGHTNING_ACCEL_NATIVE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return tmp_path / "cache"


def sources(folder: Path, name: str, factor: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "scale.cpp").write_text(SOURCE.replace("NAMESPACE", name))
    (folder / "factor.h").write_text(f"#define FACTOR {factor}\n")
    return folder


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def reason_of(library: NativeLibrary) -> str:
    with pytest.warns(UserWarning, match=f"{library.name}: no native ops for cpu: ") as caught:
        assert not library.serves(CPU)
    assert not library.serves(CPU)  # and nothing more is said
    (warning,) = caught
    return str(warning.message)


@pytest.mark.slow
def test_ops_are_built_once_and_registered(cache, tmp_path, monkeypatch, compiler):
    library = NativeLibrary("native_once", sources(tmp_path / "src", "native_once"))

    @library.on_load
    def register():
        torch.library.register_fake("native_once::scale", lambda x: torch.empty_like(x.contiguous()))
        torch.library.register_autograd("native_once::scale", lambda _, grad: 3 * grad)

    assert library.serves(CPU)
    assert not library.serves(torch.device("meta"))
    x = torch.randn(5, 3).t().requires_grad_()
    op = torch.ops.native_once.scale
    torch.testing.assert_close(op(x), 3 * x)
    torch.library.opcheck(op, (x,))
    with library.switched_off():
        assert not library.serves(CPU)
    assert library.serves(CPU)

    monkeypatch.setattr(native_build, "_build", lambda *_: pytest.fail("built again"))
    same = NativeLibrary("native_once", tmp_path / "src")
    assert same.build(cpu_target()) == library.build(cpu_target())
    same.on_load(register)
    assert same.serves(CPU)
    assert [path.suffix for path in cache.iterdir() if "build-" in path.name] == []


@pytest.mark.slow
@pytest.mark.weekly
def test_a_changed_header_means_another_library(cache, tmp_path, compiler):
    first = NativeLibrary("native_changed", sources(tmp_path / "src", "native_changed")).build("DEFAULT")
    library = NativeLibrary("native_changed", sources(tmp_path / "src", "native_changed", factor=5))
    second = library.build("DEFAULT")
    assert first != second
    assert library.serves(CPU)
    torch.testing.assert_close(torch.ops.native_changed.scale(torch.ones(2)), torch.full((2,), 5.0))
    again = NativeLibrary("native_changed", sources(tmp_path / "src", "native_changed", factor=3))
    with pytest.raises(RuntimeError, match=r"native_changed is loaded already, from other sources .*; restart Python"):
        again.serves(CPU)


@pytest.mark.gpu(kernels=True)
def test_kernels_for_gpus_are_built_beside_those_for_the_cpu(cache, tmp_path, compiler):
    folder = sources(tmp_path / "src", "native_cuda")
    (folder / "scale.cu").write_text(CUDA_SOURCE.replace("NAMESPACE", "native_cuda"))
    library = NativeLibrary("native_cuda", folder, timeout=600)
    x = torch.randn(1000, device="cuda")
    assert library.serves(x.device)
    torch.testing.assert_close(torch.ops.native_cuda.scale(x), 3 * x)
    assert len(list(cache.glob("*-sm_*.so"))) == 1


def test_a_folder_without_cuda_sources_serves_no_gpu_and_says_nothing(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    library = NativeLibrary("native_cpu_alone", sources(tmp_path / "src", "native_cpu_alone"))
    assert not library.serves(torch.device("cuda", 0))


def test_without_a_compiler_the_formula_is_used(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    library = NativeLibrary("native_none", sources(tmp_path / "src", "native_none"))
    said = reason_of(library)
    assert "no C++ compiler: no-such-compiler is not on the PATH" in said
    assert "LIGHTNING_ACCEL_NATIVE=0 silences this" in said


def test_a_rank_beside_the_first_does_not_warn_again(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not NativeLibrary("native_rank", sources(tmp_path / "src", "native_rank")).serves(CPU)


def test_the_environment_forces_one_or_the_other(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    folder = sources(tmp_path / "src", "native_forced")
    monkeypatch.setenv("LIGHTNING_ACCEL_NATIVE", "0")
    assert not NativeLibrary("native_forced", folder).serves(CPU)
    monkeypatch.setenv("LIGHTNING_ACCEL_NATIVE", "1")
    with pytest.raises(RuntimeError, match=r"not on the PATH.* LIGHTNING_ACCEL_NATIVE=1 asks for them; unset it"):
        NativeLibrary("native_forced", folder).serves(CPU)


@pytest.mark.slow
def test_the_compilers_first_error_is_told(cache, tmp_path, compiler):
    folder = sources(tmp_path / "src", "native_wrong")
    (folder / "scale.cpp").write_text("int f() { return 1 }\nint g() { return x; }\n")
    assert "scale.cpp:1:19: error: expected" in reason_of(NativeLibrary("native_wrong", folder))
    assert not list(cache.glob("*.so"))


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "[1/2] c++ -c a.cpp\na.cpp:1:10: fatal error: no.h: No such file\nRuntimeError: Error building\n",
            "a.cpp:1:10",
        ),
        (
            "/usr/bin/ld: cannot find -lfoo\ncollect2: error: ld returned 1 exit status",
            "/usr/bin/ld: cannot find -lfoo",
        ),
        ("k.cu(3): error: expected a ';'\n1 error detected", "k.cu(3): error"),
        ("Traceback\nOSError: CUDA_HOME environment variable is not set. Set it\n", "OSError: CUDA_HOME environment"),
        (
            "/bin/sh: 1: no-compiler: not found\nninja: build stopped: subcommand failed.\n",
            "/bin/sh: 1: no-compiler: not",
        ),
        ("", "the builder ended with status 9"),
    ],
)
def test_reasons(output, reason):
    assert native_build._first_error(output, 9).startswith(reason)


@pytest.mark.slow
def test_a_compiler_that_hangs_is_ended(cache, tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("CXX", program(tmp_path / "hangs", HANGS.format(pid=tmp_path / "pid")))
    library = NativeLibrary("native_hangs", sources(tmp_path / "src", "native_hangs"), timeout=5)
    assert "the compiler took more than 5 s" in reason_of(library)
    running = Path("/proc", (tmp_path / "pid").read_text().strip(), "cmdline")
    wait_until(lambda: not running.exists() or b"sleep" not in running.read_bytes())
    assert not list(cache.glob("build-*"))


@pytest.mark.slow
def test_compilers_end_with_the_process_that_waits_for_them(cache, tmp_path, compiler):
    hangs = program(tmp_path / "hangs", HANGS.format(pid=tmp_path / "pid"))
    folder = sources(tmp_path / "src", "native_orphan")
    code = (
        "import torch; from pathlib import Path; from lightning_accel.ops import NativeLibrary;"
        f"NativeLibrary('native_orphan', Path({str(folder)!r})).serves(torch.device('cpu'))"
    )
    killed = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "CXX": hangs})
    wait_until((tmp_path / "pid").exists)
    running = Path("/proc", (tmp_path / "pid").read_text().strip(), "cmdline")
    killed.kill()
    killed.wait()
    wait_until(lambda: not running.exists() or b"sleep" not in running.read_bytes())


def test_sigterm_ends_a_build_after_its_handler(cache, tmp_path, monkeypatch):
    folder = sources(tmp_path / "src", "native_stopped")
    waiting = "import time; print('begins', flush=True); time.sleep(60)"
    monkeypatch.setattr(native_build, "_BUILD", f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM); {waiting}")
    monkeypatch.setenv("CXX", sys.executable)
    received, ended = [], []
    terminate = native_build._terminate
    monkeypatch.setattr(native_build, "_terminate", lambda process: ended.append(terminate(process)))
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        assert "SIGTERM arrived during the build" in reason_of(NativeLibrary("native_stopped", folder))
        os.kill(os.getpid(), signal.SIGTERM)  # the handler is back
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM] * 2
    assert len(ended) == 1
    assert [path.suffix for path in cache.iterdir()] == [".lock"]  # neither a part of a library nor a failure


def test_a_cache_that_cannot_be_written_is_left_for_the_temporary_folder(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_ACCEL_CACHE", "/proc/lightning_accel")  # read-only for root, too
    assert native_build._writable_cache() == tmp_path / f"lightning_accel-{os.getuid()}"
    monkeypatch.setattr(native_build.tempfile, "tempdir", "/proc")
    with pytest.raises(BuildError, match=r"no folder to build in \(/proc/lightning_accel: .*; /proc/.*\); set LIGHT"):
        native_build._writable_cache()


def test_a_relative_cache_is_found_by_compilers_which_run_in_another_folder(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_ACCEL_CACHE", "cache")
    assert native_build._writable_cache() == cache


@pytest.mark.parametrize("chosen_by", ["LIGHTNING_ACCEL_CACHE", "XDG_CACHE_HOME", "HOME", "TMPDIR"])
def test_a_library_that_others_can_have_planted_is_not_loaded(cache, tmp_path, monkeypatch, caplog, chosen_by):
    """Whoever may write the library, its folder or a folder above can put code into the process."""
    shared, folder = tmp_path / "shared", sources(tmp_path / "src", "native_planted")
    inner = {"XDG_CACHE_HOME": "lightning_accel", "HOME": ".cache/lightning_accel"}.get(chosen_by, "")
    if chosen_by == "TMPDIR":
        monkeypatch.setenv("LIGHTNING_ACCEL_CACHE", "/proc/lightning_accel")
        inner = f"lightning_accel-{os.getuid()}"
        monkeypatch.setattr(native_build.tempfile, "tempdir", str(shared))
    else:
        monkeypatch.delenv("LIGHTNING_ACCEL_CACHE")
        monkeypatch.setenv(chosen_by, str(shared))
    if chosen_by == "HOME":
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    target = cpu_target()
    library = shared / inner / f"native_planted-{target}-{native_build._source_digest(folder, target)}.so"
    library.parent.mkdir(parents=True, mode=0o700)
    library.write_text("planted")
    monkeypatch.setattr(native_build, "_build", lambda *arguments: arguments[3].write_text("own"))

    def read() -> str:
        found = native_build.library_path("native_planted", folder, target, 5)
        content = found.read_text()
        if found != library:
            found.unlink()  # of the folder for temporary files
        library.write_text("planted")
        return content

    library.chmod(0o644)
    assert read() == "planted"  # nobody but this user can have put it there
    library.chmod(0o666)
    assert read() == "own"
    library.chmod(0o644)
    for writable in {library.parent, shared}:
        mode = writable.stat().st_mode
        writable.chmod(0o777)
        if chosen_by == "TMPDIR":
            with pytest.raises(BuildError, match=f"others can write to {writable}"):
                read()
        else:
            assert read() == "own"
            assert f"others can write to {writable}" in caplog.text
        writable.chmod(mode)
        caplog.clear()
    if os.getuid() == 0:  # who alone may give files away
        os.chown(library, 65533, -1)
        assert read() == "own"


def test_a_folder_that_a_link_of_others_leads_to_is_not_trusted(cache, tmp_path, monkeypatch):
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir(mode=0o700)
    shared.mkdir()
    (shared / "link").symlink_to(own)
    assert native_build._untrusted_reason(shared / "link") == ""
    (own / "within").mkdir(mode=0o700)
    (own / "link").symlink_to(shared / "link")
    for link in ("shared/link", "shared/link/within", "own/link", "own/link/within"):
        assert native_build._untrusted_reason(tmp_path / link) == ""
        shared.chmod(0o1777)  # as /tmp
        assert native_build._untrusted_reason(tmp_path / link) == f"others can write to {shared}"
        shared.chmod(0o755)


def test_a_library_that_does_not_load_is_done_without(cache, tmp_path, monkeypatch):
    folder = sources(tmp_path / "src", "native_broken")
    monkeypatch.setattr(native_build, "_build", lambda *arguments: arguments[3].write_text("not a library"))
    said = reason_of(NativeLibrary("native_broken", folder))
    assert "native_broken-" in said
    assert "file too short); delete it to have it built anew" in said


def test_waiting_for_another_process_is_told_once_and_has_an_end(cache, tmp_path, caplog):
    folder = sources(tmp_path / "src", "native_waits")
    cache.mkdir()
    target = cpu_target()
    file = cache / f"native_waits-{target}-{native_build._source_digest(folder, target)}.so.lock"
    with open(file, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another process builds it for more than 0.2 s" in reason_of(NativeLibrary("native_waits", folder, 0.2))
    assert caplog.text.count("waiting for another process, which builds native_waits-") == 1


def test_those_who_waited_take_the_reason_from_the_one_that_failed(cache, tmp_path, monkeypatch):
    folder = sources(tmp_path / "src", "native_failed")

    def fail(name, folder, target, library, limit):
        Path(f"{library}.failed").write_text("the reason of another")
        os.utime(f"{library}.failed", (time.time() + 1, time.time() + 1))  # while we waited
        raise BuildError("mine")

    monkeypatch.setattr(native_build, "_build", fail)
    with pytest.raises(BuildError, match="mine"):
        NativeLibrary("native_failed", folder).build(cpu_target())
    (failure,) = cache.glob("*.failed")
    assert failure.read_text() == "mine"
    os.utime(failure, (time.time() + 9, time.time() + 9))
    monkeypatch.setattr(native_build, "_build", lambda *_: pytest.fail("tried again"))
    with pytest.raises(BuildError, match="mine"):
        NativeLibrary("native_failed", folder).build(cpu_target())
    os.utime(failure, (time.time() - 9, time.time() - 9))  # of an earlier run: the compiler may have been mended
    monkeypatch.setattr(native_build, "_build", lambda *arguments: arguments[3].touch())
    NativeLibrary("native_failed", folder).build(cpu_target())
    assert not failure.exists()


def test_wrong_names_and_folders(cache, tmp_path):
    with pytest.raises(ValueError, match="name must be a Python identifier, such as 'my_ops'; got 'my-ops'"):
        NativeLibrary("my-ops", tmp_path)
    assert f"no *.cpp in {tmp_path}/src" in reason_of(NativeLibrary("native_empty", tmp_path / "src"))


def test_flags_and_targets_are_part_of_the_name(tmp_path):
    folder = sources(tmp_path / "src", "any")
    prints = {native_build._source_digest(folder, target) for target in ("AVX512", "AVX2", "DEFAULT")}
    assert len(prints) == 3
    for target, architecture in (("sm_90", "9.0"), ("sm_120", "12.0")):
        assert native_build._build_environment(target, ["c++"], tmp_path)["TORCH_CUDA_ARCH_LIST"] == architecture


def test_headers_in_any_folder_of_the_sources_count(tmp_path):
    folder = sources(tmp_path / "src", "any")
    (folder / "inner").mkdir()
    seen = {native_build._source_digest(folder, "DEFAULT")}
    for header in ("factor.hpp", "inner/factor.inl"):
        (folder / header).write_text("#define FACTOR 5")
        seen.add(native_build._source_digest(folder, "DEFAULT"))
    assert len(seen) == 3


@pytest.mark.slow
@pytest.mark.weekly
def test_a_compiler_with_arguments_of_its_own(cache, tmp_path, monkeypatch, compiler):
    """In a folder with a module that is named as one of Python's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "queue.py").write_text("raise ImportError")
    monkeypatch.setenv("CXX", "c++ '-DADDED=a b'")
    folder = sources(tmp_path / "src", "native_arguments")
    with (folder / "factor.h").open("a") as header:
        header.write("#ifndef ADDED\n#error arguments of CXX are lost\n#endif\n")
    assert NativeLibrary("native_arguments", folder).serves(CPU)


@pytest.mark.parametrize(("said", "compiler"), [("", ["c++"]), (" ", ["c++"]), ("sh -c", ["sh", "-c"])])
def test_what_cxx_may_say(said, compiler, monkeypatch):
    monkeypatch.setenv("CXX", said)
    monkeypatch.setattr(native_build.shutil, "which", lambda name: name)
    assert native_build._compiler() == compiler
    monkeypatch.setenv("CXX", "c++ '")
    with pytest.raises(BuildError, match="CXX=c\\+\\+ ' is no command: No closing quotation"):
        native_build._compiler()


def test_the_environment_takes_no_other_word(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_ACCEL_NATIVE", "false")
    with pytest.raises(ValueError, match="LIGHTNING_ACCEL_NATIVE must be 0, 1 or not set; it is 'false'"):
        NativeLibrary("native_word", sources(tmp_path / "src", "native_word")).serves(CPU)


@pytest.mark.weekly
@pytest.mark.slow
def test_a_namespace_is_registered_by_one_library(cache, tmp_path, compiler):
    folder = sources(tmp_path / "src", "native_owned")
    assert NativeLibrary("native_owned", folder).serves(CPU)
    with pytest.raises(RuntimeError, match="native_other registers native_owned, as native_owned did; restart Python"):
        NativeLibrary("native_other", folder).serves(CPU)


def test_nothing_is_built_in_traced_code(cache, tmp_path, monkeypatch):
    library = NativeLibrary("native_traced", sources(tmp_path / "src", "native_traced"))
    monkeypatch.setattr(native_build, "_build", lambda *_: pytest.fail("built"))
    scale = torch.compile(lambda x: 2 * x if library.serves(x.device) else 3 * x, fullgraph=True, backend="eager")
    assert scale(torch.ones(2)).tolist() == [3, 3]


def test_caches_of_users_whom_the_system_does_not_know(cache, tmp_path, monkeypatch):
    temporary = tmp_path / f"lightning_accel-{os.getuid()}"
    monkeypatch.delenv("LIGHTNING_ACCEL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(native_build.os.path, "expanduser", lambda path: path)
    assert native_build._cache_folders() == [temporary]
    monkeypatch.setenv("LIGHTNING_ACCEL_CACHE", str(cache))
    assert native_build._cache_folders() == [cache, temporary]
    monkeypatch.setattr(native_build.tempfile, "gettempdir", lambda: (_ for _ in ()).throw(FileNotFoundError()))
    assert native_build._cache_folders() == [cache]


def test_leftovers_of_builds_that_were_killed_go(tmp_path):
    old, new = tmp_path / "build-old", tmp_path / "build-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "a.o").touch()
    os.utime(old, (time.time() - 100_000, time.time() - 100_000))
    native_build._delete_stale_builds(tmp_path)
    assert not old.exists()
    assert new.exists()


@pytest.mark.slow
@pytest.mark.weekly
def test_processes_that_build_at_once_share_one_build(cache, tmp_path, compiler):
    """One is killed in the middle; of two that come then, one builds, and the other waits."""
    counting = program(
        tmp_path / "counts", f'case "$*" in *scale.o*) echo x >> {tmp_path}/count; sleep 2;; esac; exec c++ "$@"'
    )
    sources(tmp_path / "src", "native_race")
    code = (
        "import torch; from pathlib import Path; from lightning_accel.ops import NativeLibrary;"
        f"library = NativeLibrary('native_race', Path({str(tmp_path / 'src')!r}));"
        "assert library.serves(torch.device('cpu'));"
        "assert torch.ops.native_race.scale(torch.ones(2)).tolist() == [3, 3]"
    )
    environment = {**os.environ, "CXX": counting, "PYTHONWARNINGS": "error"}
    start = lambda: subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)  # noqa: E731
    count = tmp_path / "count"
    killed = start()
    wait_until(count.exists)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    time.sleep(4)
    assert count.read_text().count("x") == 1  # its compiler has ended with it, and nothing is linked
    assert not list(cache.glob("*.so"))
    count.unlink()
    started = [start(), start()]
    assert [process.wait(timeout=600) for process in started] == [0, 0]
    assert count.read_text().count("x") == 2  # compiled and linked once


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize("source", sorted(KERNELS.folder.glob("*.cu")), ids=lambda path: path.name)
def test_cuda_sources_compile(source, tmp_path):
    """Without a GPU, too, where there is CUDA's compiler."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    from torch.utils.cpp_extension import include_paths  # which brings setuptools along

    includes = [f"-isystem={path}" for path in include_paths()]
    flags = ["-std=c++20", "-O3", "-DUSE_CUDA", "-arch=sm_90", "-Xcompiler=-fPIC,-Wall", "-Werror=all-warnings"]
    subprocess.run(["nvcc", "-c", *flags, *includes, source, "-o", tmp_path / "kernel.o"], check=True)


def test_no_kernel_loops_in_threads_of_openmp_which_its_build_has_not():
    """Sources are compiled without OpenMP, where ``at::parallel_for`` is a loop of one thread, without a warning."""
    for path in KERNELS.folder.glob("*.cpp"):
        assert not re.search(r"(?<!unlike )(?<!not )at::parallel_for", path.read_text()), path
