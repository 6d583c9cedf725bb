"""What a user reads of a class: an example, a sentence for each argument, and the errors; doctests run the examples."""

import importlib
import inspect
from dataclasses import is_dataclass

import docstring_parser
import pytest

PACKAGES = ("callbacks", "data", "models", "precision", "strategies")
CLASSES = [
    pytest.param(value, id=f"{package}.{name}")
    for package in PACKAGES
    for module in [importlib.import_module(f"lightning_accel.{package}")]
    for name in module.__all__
    if inspect.isclass(value := getattr(module, name))
]


def parsed(kind: type) -> docstring_parser.Docstring:
    return docstring_parser.parse(inspect.getdoc(kind) or "", style=docstring_parser.DocstringStyle.GOOGLE)


@pytest.mark.parametrize("kind", CLASSES)
def test_each_class_has_an_example(kind):
    assert kind.__doc__ is not None  # not one of a base
    text = inspect.getdoc(kind)
    assert ">>> " in text
    if kind.__module__.startswith(tuple(f"lightning_accel.{one}" for one in ("callbacks", "precision", "strategies"))):
        example = text.partition("\nExample:\n")[2]
        assert kind.__name__ in example
        assert "L.Trainer(" in example
        assert len(example.strip().splitlines()) <= 6


@pytest.mark.parametrize("kind", CLASSES)
def test_each_argument_has_a_sentence(kind):
    if not is_dataclass(kind) and "__init__" not in vars(kind):
        arguments = []  # those of a base, which the help of the command line shows from there
    else:
        arguments = [name for name in inspect.signature(kind).parameters if not name.startswith("_")]
    texts = {one.arg_name: one.description or "" for one in parsed(kind).params}
    assert not [name for name in arguments if len(texts.get(name, "")) < 12]
