import pytest

from lightning_accel.cli import allocator
from lightning_accel.cli.allocator import restart_with_allocator

TUNED = (
    "trainer:\n  callbacks+:\n  - class_path: lightning_accel.callbacks.Speedups\n    init_args: {{allocator: {}}}\n"
)


@pytest.fixture
def started(monkeypatch):
    """Return what takes the place of this process: the environment of each."""
    found = []
    monkeypatch.setattr(allocator.os, "execve", lambda program, arguments, environment: found.append(environment))
    monkeypatch.setattr(allocator, "allocator_in_use", lambda: "")
    monkeypatch.setattr(allocator, "why_no_allocator", lambda name: "" if name != "jemalloc" else "not installed")
    monkeypatch.setattr(allocator, "variables_for", lambda name: {"ALLOCATOR": name})
    return found


def test_the_last_config_decides(started, tmp_path):
    for name in ("tcmalloc", "huge_pages", "jemalloc", "null", "dlmalloc"):
        (tmp_path / f"{name}.yaml").write_text(TUNED.format(name))
    (tmp_path / "other.yaml").write_text("model: {class_path: mine.Net, init_args: {allocator: tcmalloc}}\n")
    (tmp_path / "broken.yaml").write_text("trainer: [1\n")

    def ask(*names):
        started.clear()
        restart_with_allocator(["fit", *[f"--config={tmp_path / name}.yaml" for name in names]])
        return [environment["ALLOCATOR"] for environment in started]

    assert ask("tcmalloc") == ["tcmalloc"]
    assert ask("tcmalloc", "huge_pages", "other", "broken", "missing") == ["huge_pages"]
    assert not ask("other", "broken", "missing")
    for taken_back in ("null", "jemalloc", "dlmalloc"):
        assert not ask("tcmalloc", taken_back)
    restart_with_allocator(["fit", "--config", str(tmp_path / "tcmalloc.yaml"), "--trainer.max_epochs", "3"])
    assert started[0]["ALLOCATOR"] == "tcmalloc"
    assert "PATH" in started[0]


def test_a_library_that_the_loader_does_not_take_is_tried_once(started, tmp_path, monkeypatch):
    (tmp_path / "tuned.yaml").write_text(TUNED.format("tcmalloc"))
    for _ in range(2):  # in what takes the place of this process, too, no other allocator is in use
        restart_with_allocator(["fit", "--config", str(tmp_path / "tuned.yaml")])
        for name, value in started[-1].items():
            monkeypatch.setenv(name, value)
    assert len(started) == 1


def test_a_process_that_runs_with_another_one_goes_on(started, tmp_path, monkeypatch):
    monkeypatch.setattr(allocator, "allocator_in_use", lambda: "jemalloc")
    (tmp_path / "tuned.yaml").write_text(TUNED.format("tcmalloc"))
    restart_with_allocator(["fit", "--config", str(tmp_path / "tuned.yaml")])
    assert not started
