"""Every block of code in the README and in the documentation runs.

Words behind the language of a block say how: ``file=NAME`` writes it to a file before the others run, ``continues``
joins it to the block of Python above, ``slow`` and ``weekly`` mark its test, ``quoted`` marks a text that the package
says, with ``…`` for what differs, and ``tested_by=PATH`` names a test that runs it.
"""

import contextlib
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
import yaml
from sklearn.datasets import load_iris

import lightning_accel

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    page: str
    line: int
    language: str
    words: list[str]
    text: str

    def word(self, key: str) -> str | None:
        """``NAME`` of ``key=NAME``."""
        return next((word.removeprefix(f"{key}=") for word in self.words if word.startswith(f"{key}=")), None)


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text()
    page = str(path.relative_to(ROOT))
    return [
        Block(page, text[: found.start()].count("\n") + 2, found[1], found[2].split(), found[3])
        for found in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


# whose commands start processes, or train each config, as tests of those do
LONG_PAGES = {
    f"docs/{name}.md"
    for name in (
        "configs", "guides/devices", "guides/faster", "guides/plan", "systems/belief_networks",
        "systems/mixture_of_experts",
    )
}  # fmt: skip
BLOCKS = {str(path.relative_to(ROOT)): blocks_of(path) for path in PAGES}
ALL = [block for blocks in BLOCKS.values() for block in blocks]


def scripts_of(blocks: list[Block]) -> list[Block]:
    """Blocks of Python, those that continue others joined to them."""
    scripts: list[Block] = []
    for block in blocks:
        if block.language == "python" and not block.word("file") and not block.word("tested_by"):
            if "continues" in block.words:
                before = scripts.pop()
                block = before._replace(text=before.text + "\n" + block.text, words=before.words + block.words)
            scripts.append(block)
    return scripts


def commands_of(page: str) -> list[str]:
    return [
        line
        for block in BLOCKS[page]
        if block.language == "bash" and not block.word("tested_by")
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.startswith("lightning-accel")
    ]


def params(blocks: list[Block]):
    return [
        pytest.param(
            block,
            id=f"{block.page}:{block.line}",
            marks=[getattr(pytest.mark, word) for word in ("slow", "weekly") if word in block.words],
        )
        for block in blocks
    ]


@pytest.fixture
def folder(run_folder, monkeypatch):
    """A folder as the pages suppose it: the configs, and a reader's own tables, sequences, graphs and texts."""
    shutil.copytree(ROOT / "configs", run_folder / "configs")
    iris = load_iris(as_frame=True)
    species = iris.frame.pop("target").map(dict(enumerate(iris.target_names)))
    flowers = iris.frame.assign(species=species).sample(frac=1, random_state=0)
    flowers.to_csv(run_folder / "flowers.csv", index=False)
    flowers.drop(columns="species").head(7).to_csv(run_folder / "new_flowers.csv", index=False)
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
    sizes = [{**molecule, "y": 1.5 * len(molecule["edges"])} for molecule in molecules]
    (run_folder / "sizes.jsonl").write_text("\n".join(map(json.dumps, sizes)))
    (run_folder / "texts").mkdir()
    tales = "".join(f"Once upon a time there were {i} kings and {i % 7} queens. " for i in range(1000))
    (run_folder / "texts" / "tales.txt").write_text(tales)
    monkeypatch.setattr(sys, "path", [str(run_folder), *sys.path])
    modules = set(sys.modules)
    yield run_folder
    if dist.is_initialized():  # a strategy of one process leaves its group to the end of the process
        dist.destroy_process_group()
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(run_folder)):
            del sys.modules[name]


def write_files(page: str, folder: Path) -> None:
    for block in BLOCKS[page]:
        if name := block.word("file"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(block.text)


@pytest.mark.sampled(default=30)
@pytest.mark.parametrize("script", params([script for blocks in BLOCKS.values() for script in scripts_of(blocks)]))
def test_script_runs(folder, script, monkeypatch):
    write_files(script.page, folder)
    shorter = {
        'budget="10m"': 'budget="30s"',
        '"max_epochs": 200': '"max_epochs": 20',
        "max_epochs=15, callbacks": "max_epochs=2, callbacks",
        "channels=[64, 128, 256]": "channels=[8, 16, 32]",
    }
    for told, short in shorter.items():
        script = script._replace(text=script.text.replace(told, short))
    if "__main__" in script.text:  # it starts processes, which run the file again
        (folder / "script.py").write_text(script.text)
        subprocess.run([sys.executable, "script.py"], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        return
    page = ModuleType("documentation")
    monkeypatch.setitem(sys.modules, page.__name__, page)  # where torch.export looks for what its classes name
    exec(compile(script.text, f"{script.page}, line {script.line}", "exec"), vars(page))
    if "classes.csv" in script.text:
        (written,) = folder.rglob("classes.csv")
        assert len(written.read_text().splitlines()) == 101


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_script_that_is_started_again_ends_as_if_never_stopped(folder, monkeypatch):
    (script,) = [one.text for one in scripts_of(BLOCKS["docs/guides/survive.md"]) if "newest_checkpoint" in one.text]

    def trained(place, *lengths):
        (folder / place).mkdir()
        monkeypatch.chdir(folder / place)
        for seed, length in enumerate(lengths):
            L.seed_everything(seed)  # another one, so that a run that began anew would end otherwise
            names = {"__name__": "documentation"}
            exec(script.replace("max_epochs=3", f"max_epochs={length}"), names)
        return names["trainer"].model.state_dict()

    whole, resumed = trained("whole", 3), trained("resumed", 1, 3)
    assert (folder / "resumed/runs/digits/lightning_logs/version_1").is_dir()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.weekly] if page in LONG_PAGES else [])
        for page in BLOCKS
        if commands_of(page)
    ],
)
def test_commands_run_one_after_the_other(command, folder, page):
    write_files(page, folder)
    for line in commands_of(page):
        line = line.replace("'[64, 128, 256]'", "'[8, 16, 32]'")
        if "devices 2" in line or "processes" in line:
            program = [sys.executable, "-m", "lightning_accel", *shlex.split(line)[1:]]
            subprocess.run(program, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
            continue
        with contextlib.redirect_stdout(sys.stderr):  # progress bars
            result = command(*shlex.split(line, comments=True)[1:])
        cannot_build = line == "lightning-accel build-ops AVX2" and "no C++ compiler" in result.out
        assert result.status == 0 or cannot_build, f"{line}\n{result.err}"
    for block in BLOCKS[page]:
        if block.language == "python" and block.word("tested_by") == "tests/test_docs.py":  # it reads what they wrote
            exec(compile(block.text, f"{page}, line {block.line}", "exec"), {})


@pytest.mark.sampled(default=20)
@pytest.mark.parametrize("block", params([b for b in ALL if b.language == "text" and b.text.startswith("$ ")]))
def test_message_is_the_message(command, folder, block):
    line, *said = block.text.splitlines()
    result = command(*shlex.split(line.removeprefix("$ "))[1:])
    assert [part for part in said if part not in result.err + result.out] == []


@pytest.mark.parametrize("block", params([b for b in ALL if b.language == "text" and "quoted" in b.words]))
def test_message_is_in_the_package(block):
    """What a block marked ``quoted`` says between its ellipses is said somewhere by the package."""
    sources = "\n".join(path.read_text() for path in (ROOT / "lightning_accel").rglob("*.py"))
    said = re.sub(r"\{[^{}]*\}|%s", "…", re.sub(r"""["']\s*\n\s*f?["']""", "", sources))
    assert [part for part in re.split("…", block.text.strip()) if part not in said] == []


@pytest.mark.parametrize("block", params([block for block in ALL if block.language == "yaml"]))
def test_classes_and_options_of_a_config_exist(block):
    def check(value):
        if isinstance(value, dict) and "class_path" in value:
            module, _, name = value["class_path"].rpartition(".")
            options = inspect.signature(getattr(importlib.import_module(module), name)).parameters
            unknown = [option for option in value.get("init_args", {}) if option not in options]
            assert unknown == [] or any(option.kind is option.VAR_KEYWORD for option in options.values())
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
            check(one)

    check(yaml.safe_load(block.text))


@pytest.mark.parametrize(
    "name", [pytest.param(b.word("tested_by"), id=f"{b.page}:{b.line}") for b in ALL if b.word("tested_by")]
)
def test_test_that_runs_a_block_exists(name):
    assert (ROOT / name).exists()


def test_each_block_has_a_language_that_is_checked():
    known = {"python", "bash", "text", "yaml", "cpp", "json"}
    assert [f"{block.page}:{block.line}" for block in ALL if block.language not in known] == []


def test_files_that_the_pages_name_exist():
    pattern = r"[(`]((?:configs|benchmarks|tests|notebooks|\.ci)/[\w./-]*\w)"
    named = {(path.name, name) for path in PAGES for name in re.findall(pattern, path.read_text())}
    assert named
    assert [one for one in sorted(named) if not (ROOT / one[1]).exists()] == []


def test_the_page_of_the_configs_names_each_with_what_its_first_line_promises():
    rows = [line for line in (ROOT / "docs" / "configs.md").read_text().splitlines() if line.startswith("| `configs/")]
    of_config = dict(re.fullmatch(r"\| `configs/(\w+\.yaml)` (\|.*)", row).groups() for row in rows)
    assert sorted(of_config) == sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
    for name, row in of_config.items():
        promise = (ROOT / "configs" / name).read_text().splitlines()[0].partition(" With ")[0]
        figures = re.findall(r"(?:above|below|at|byte of) (-?\d[\d.e-]*\d|\d)(?![\d\w])", promise)
        times = re.findall(r"[\w ]+ minutes? on 2 cores|half an hour on one core at most", promise)
        assert [said for said in [*figures, *map(str.strip, times)] if said not in row] == [], name
        assert ("GPU" in promise) == ("GPU" in row), name


def test_public_names_have_a_docstring_and_a_place_in_the_reference():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        packages = importlib.import_module("api_pages").PACKAGES
    finally:
        sys.path.remove(str(ROOT / "docs"))
    folders = {path.parent.name for path in (ROOT / "lightning_accel").glob("*/__init__.py")}
    assert set(packages) == folders - {"_private"}
    shown = {name for package in packages for name in importlib.import_module(f"lightning_accel.{package}").__all__}
    assert set(lightning_accel.__all__) - shown == {"__version__"}
    undocumented = [
        f"{package}.{name}"
        for package in packages
        for name in importlib.import_module(f"lightning_accel.{package}").__all__
        if callable(value := getattr(importlib.import_module(f"lightning_accel.{package}"), name))
        and not (value.__doc__ or "").strip()
    ]
    assert undocumented == []


def test_badges_say_what_is_required():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (python,) = re.findall(r">=(.*)", project["requires-python"])
    torch, lightning = project["dependencies"][:2]
    ranges = [re.search(r">=(\d+)\.(\d+).*<(\d+)\.(\d+)", one) for one in (torch, lightning)]
    said = [f"{a}.{b} to {c}.{int(d) - 1}" for a, b, c, d in (found.groups() for found in ranges)]
    text = (ROOT / "README.md").read_text()
    for badge in (f"Python {python} or newer", f"PyTorch {said[0]}", f"Lightning {said[1]}", "License MIT"):
        assert f"![{badge}]" in text


def test_the_readme_fits_on_three_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
