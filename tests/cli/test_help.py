"""What ``--help`` of a subcommand and of a class shows."""

import importlib
import inspect
import re

import lightning as L
import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy

from lightning_accel.cli.help_text import HelpText

FEWEST_CHARACTERS = 12
CLASSES = [
    pytest.param(value, id=f"{package}.{name}")
    for package in ("callbacks", "data", "models", "precision", "strategies")
    for module in [importlib.import_module(f"lightning_accel.{package}")]
    for name in module.__all__
    if inspect.isclass(value := getattr(module, name))
    and issubclass(value, L.Callback | L.LightningDataModule | L.LightningModule | Precision | Strategy)
]


def test_help_of_a_class_shows_its_own_options_alone(command):
    for name in ("MoEClassifier", "MoELanguageModel"):
        result = command("fit", "--model.help", name)
        assert len(result.out.splitlines()) < 130
        assert "torch.nn" not in result.out
        assert not re.search(r"``|:\w+:`", result.out)
        assert "classes: Adafactor" in " ".join(result.out.split())  # of --model.optimizer


def test_options_stand_by_subject(command):
    text = command("fit", "--help").out
    assert text.startswith("usage: lightning-accel fit [--config FILE]")
    titles = ["run", "model and data", "optimizer", "trainer: length of the run", "trainer: other options"]
    places = [text.index(f"\n{title}:\n") for title in titles]
    assert places == sorted(places)
    assert places[1] < text.index("  --model CONFIG") < places[2] < text.index("  --optimizer CONFIG") < places[3]
    assert "registry:" not in text  # Lightning's text of --ckpt_path, of which fit takes but a part
    words = " ".join(text.split())
    assert "auto continues the newest run" in words
    assert "accel_fsdp2," in words  # among the names of strategies
    assert "ConfigSaver" not in words  # a callback of the command line's own
    assert not re.search(r"<class|``|:\w+:`", text)


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict", "export"])
def test_other_subcommands_name_their_checkpoints(command, subcommand):
    text = " ".join(command(subcommand, "--help").out.split())
    assert "best or last takes that checkpoint of the run in whose folder the config lies" in text


def texts_of(kind: type) -> dict[str, str]:
    """Return the text of each option of a class, without its type and default, as its help shows it."""
    parser = ArgumentParser(formatter_class=HelpText)
    parser.add_class_arguments(kind, "one", fail_untyped=False)
    shown = " ".join(parser.format_help().split())
    options = re.split(r"(?<!\S)--(one\.[\w.]+)", shown)[1:]
    found = {}
    for name, text in zip(options[::2], options[1::2], strict=True):
        found[name] = re.sub(r"^ \S+ ", "", text).partition("(type:")[0].partition("(required")[0].strip()
    return found


@pytest.mark.parametrize("kind", CLASSES)
def test_each_option_says_what_it_is(kind):
    found = {name: text for name, text in texts_of(kind).items() if not name.endswith(".help")}
    assert not {name: text for name, text in found.items() if len(text) < FEWEST_CHARACTERS}
