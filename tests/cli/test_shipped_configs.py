"""Configs of the package are found by their names, and files of the user's before them."""

from pathlib import Path

import pytest

from lightning_accel.cli.shipped_configs import find_shipped_configs, shipped_configs

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_config_of_the_repository_is_there():
    assert sorted(shipped_configs().values()) == sorted(CONFIGS.glob("*.yaml"))


def test_names_become_paths_of_the_package(folder, capsys):
    path = str(CONFIGS / "moe_digits.yaml")
    given = ["fit", "--config", "moe_digits.yaml", "-c", "configs/moe_digits.yaml", "--config=moe_digits.yaml", "--x"]
    assert find_shipped_configs(given) == ["fit", "--config", path, "-c", path, f"--config={path}", "--x"]
    assert capsys.readouterr().err.count(path) == 3


@pytest.mark.parametrize(
    "given",
    [
        ["--config", "mine/moe_digits.yaml"],
        ["--config", "other.yaml"],
        ["--config"],
        ["--config", ""],
        ["--data.path", "moe_digits.yaml"],
    ],
)
def test_other_values_stay(folder, given):
    assert find_shipped_configs(given) in (given, given[:1])


def test_a_file_of_that_name_in_the_folder_is_taken(folder):
    (folder / "moe_digits.yaml").write_text("trainer: {}")
    assert find_shipped_configs(["--config=moe_digits.yaml"]) == ["--config=moe_digits.yaml"]
