"""Every snippet of the README runs."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sklearn.datasets import load_iris

import lightning_accel

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(
    r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
)
SCRIPTS = [text for language, file, text in BLOCKS if language == "python" and not file]
COMMANDS = [
    line
    for language, _, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
    if line.startswith("lightning-accel")
]


@pytest.fixture
def folder(run_folder, monkeypatch):
    """A folder as the README supposes it: the configs, a table and the reader's own module."""
    shutil.copytree(ROOT / "configs", run_folder / "configs")
    iris = load_iris(as_frame=True)
    species = iris.frame.pop("target").map(dict(enumerate(iris.target_names)))
    flowers = iris.frame.assign(species=species).sample(frac=1, random_state=0)
    flowers.to_csv(run_folder / "flowers.csv", index=False)
    (run_folder / "flowers").mkdir()
    for part in range(3):
        flowers[50 * part : 50 * part + 50].to_parquet(run_folder / "flowers" / f"{part}.parquet", row_group_size=5)
    gestures = [
        {"values": [[0.1 * step, float(kind)] for step in range(5 + i % 9)], "target": ("rest", "wave")[kind]}
        for i in range(120)
        for kind in (0, 1)
    ]
    (run_folder / "gestures.jsonl").write_text("\n".join(map(json.dumps, gestures)))
    molecules = [
        {"edges": [[i, i + 1] for i in range(3 + size)] + [[0, 2]] * ring, "y": ("chain", "ring")[ring]}
        for size in range(20)
        for ring in (0, 1)
    ]
    (run_folder / "molecules.jsonl").write_text("\n".join(map(json.dumps, molecules)))
    (run_folder / "texts").mkdir()
    tales = "".join(f"Once upon a time there were {i} kings and {i % 7} queens. " for i in range(1000))
    (run_folder / "texts" / "tales.txt").write_text(tales)
    for _, file, text in BLOCKS:
        if file:
            (run_folder / file).parent.mkdir(exist_ok=True)
            (run_folder / file).write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield run_folder
    sys.modules.pop("my_module", None)


def test_snippets_were_found():
    assert (len(SCRIPTS), len(COMMANDS)) == (17, 23)
    assert [file for _, file, _ in BLOCKS if file] == ["my_module.py", "project.py", "my_ops/add.cpp"]


def takes_long(script):
    """It starts processes, or trains for long."""
    return any(
        part in script
        for part in (
            "__main__",
            "DBNClassifier",
            "class Yours",
            "class Density",
            "class Averager",
            "CachedDecoder",
            "class LanguageModel",
        )
    )


@pytest.mark.parametrize(
    "script",
    [pytest.param(one, marks=[pytest.mark.slow] if takes_long(one) else []) for one in SCRIPTS],
    ids=lambda text: re.search(r"class (\w+)|$", text)[1] or re.findall(r"import (\w+)", text)[-1],
)
def test_script_runs(folder, script):
    if "__main__" in script:  # it starts processes, which run the file again
        (folder / "script.py").write_text(script)
        subprocess.run([sys.executable, "script.py"], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        return
    exec(compile(script, "README.md", "exec"), {"__name__": "readme"})
    if "classes.csv" in script:
        (written,) = folder.rglob("classes.csv")
        assert len(written.read_text().splitlines()) == 101


@pytest.mark.slow
def test_commands_run_one_after_the_other(command, folder):
    for line in COMMANDS:
        if "tune" in line:  # it takes minutes: tests/tuning/test_whole.py runs it
            continue
        if "devices 2" in line:
            program = [sys.executable, "-m", "lightning_accel", *shlex.split(line)[1:]]
            subprocess.run(program, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
            continue
        with contextlib.redirect_stdout(sys.stderr):  # progress bars
            result = command(*shlex.split(line)[1:])
        cannot_build = line == "lightning-accel build-ops AVX2" and "no C++ compiler" in result.out
        assert result.status == 0 or cannot_build, f"{line}\n{result.err}"
    assert len(list(folder.glob("runs/*/*/predictions.csv"))) == 3


def test_message_of_the_readme_is_the_message(command):
    text = next(text for language, _, text in BLOCKS if language == "text")
    line, said = text.splitlines()
    assert said in command(*shlex.split(line)[2:]).err


def test_public_names_are_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert [name for name in lightning_accel.__all__ if name not in text and not name.startswith("_")] == []


@pytest.mark.parametrize("name", ["CHANGELOG.md", "constraints.txt", "configs", "benchmarks/results", ".ci/run"])
def test_files_that_the_readme_names_exist(name):
    assert name in (ROOT / "README.md").read_text()
    assert os.path.exists(ROOT / name)
