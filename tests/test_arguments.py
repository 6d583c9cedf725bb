"""Arguments of the callables of the package: how many there are, and which values are refused."""

import importlib
import inspect
import math
import pkgutil
import types
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch

import lightning_accel
from lightning_accel import callbacks
from lightning_accel.compress import load_compressed
from lightning_accel.data import (
    GraphDataModule,
    IdxDataModule,
    SequenceDataModule,
    ShardOptions,
    TabularDataModule,
    TextDataModule,
)
from lightning_accel.nn import TopKGate
from lightning_accel.strategies import BackgroundCheckpointIO

MOST = 12
EXCEPTIONS = {
    "callbacks.deployment.quantization.Quantization",  # one is deprecated
    "callbacks.early_stopping.EarlyStopping",  # deprecated
    "data.tables.datamodule.TabularDataModule",  # what other datamodules call equally, and the columns of a table
    "callbacks.speedups.Speedups",  # settings that stand alone, and are written by tune
}

CHECKED_LATER = "measure.", "planning.", "models.estimators."  # results, and what scikit-learn checks in fit
LATER = {  # checked where sizes are known, when scikit-learn calls fit, or by Lightning
    "models.dbn.DeepBeliefNetwork": {"visible"},
    "models.estimators.DBNClassifier": {"finetune_learning_rate", "learning_rate", "preset", "visible"},
    "models.estimators.RBMTransformer": {"learning_rate", "preset", "visible"},
    "models.relational.RelationalGNN": {"level", "target_kind"},
    "models.rnn.SequenceModel": {"pooling", "target_kind"},
    "strategies.ddp.AccelDDPStrategy": {"start_method"},
    "strategies.pipeline.strategy.PipelineStrategy": {"start_method"},
    "strategies.sharding.strategy.FullyShardedStrategy": {"start_method"},
}


def modules():
    for found in pkgutil.walk_packages(lightning_accel.__path__, "lightning_accel."):
        if "triton" not in found.name and not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def callables(module):
    """Return the public functions, classes with a constructor of their own, and methods of a module, by path."""
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or not callable(value) or getattr(value, "__module__", None) != module.__name__:
            continue
        path = f"{module.__name__}.{name}".removeprefix("lightning_accel.")
        own = vars(value) if isinstance(value, type) else {"__init__": value}
        if "__init__" in own and not is_dataclass(value):  # dataclasses of many fields are results
            found[path] = value
        public = {key: one for key, one in own.items() if inspect.isfunction(one) and not key.startswith("_")}
        found |= {f"{path}.{key}": one for key, one in public.items()}
    return found


def test_no_callable_has_more_than_a_dozen_arguments():
    found = {path: one for module in modules() for path, one in callables(module).items()}
    assert {"models.moe.MoEClassifier", "compress.quantization.quantized.quantize"} < found.keys()
    counts = {path: len(set(inspect.signature(one).parameters) - {"self"}) for path, one in found.items()}
    assert {path: count for path, count in counts.items() if count > MOST}.keys() == EXCEPTIONS


def choices(annotation: Any) -> Iterator[str]:
    """Yield the texts among which an annotation lets choose."""
    if get_origin(annotation) is Literal:
        yield from (one for one in get_args(annotation) if isinstance(one, str))
    else:
        for part in get_args(annotation):
            yield from choices(part)


def needs_arguments(one: Any) -> bool:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(one).parameters.values()
    return any(each.default is each.empty and each.kind not in optional for each in parameters)


def test_a_choice_that_there_is_not_is_refused_at_once():
    """Of classes that need no other arguments."""
    tried, accepted, unnamed = set(), dict[str, set[str]](), set()
    for path, one in ((path, one) for module in modules() for path, one in callables(module).items()):
        if not isinstance(one, type) or needs_arguments(one):
            continue
        hints = get_type_hints(one.__init__)
        for name in hints.keys() & inspect.signature(one).parameters.keys():
            if not (texts := [*choices(hints[name])]):
                continue
            tried.add((path, name))
            try:
                one(**{name: f"{texts[0]}s"})
                accepted.setdefault(path, set()).add(name)
            except ValueError as error:
                unnamed |= set() if name in str(error) else {(path, name)}
    assert ("callbacks.speedups.Speedups", "compile") in tried
    assert accepted == LATER
    assert not unnamed


def parts(annotation: Any) -> set[Any]:
    return set(get_args(annotation)) if get_origin(annotation) in (types.UnionType, Union) else {annotation}


def test_a_value_out_of_range_or_of_another_kind_is_refused_at_once_by_name():
    """Of classes that need no other arguments. -1 infers the width of layers from their first input."""
    tried, accepted, unnamed = set(), set(), set()
    for path, one in ((path, one) for module in modules() for path, one in callables(module).items()):
        if not isinstance(one, type) or needs_arguments(one) or path.startswith(CHECKED_LATER):
            continue
        hints = get_type_hints(one.__init__)
        for name in hints.keys() & inspect.signature(one).parameters.keys():
            kinds = parts(hints[name])
            numbers = {int, float} & kinds
            wrong = [-1] * (int in kinds) + [math.nan] * (float in kinds) + ["two"] * bool(numbers)
            wrong += [2.5] * (numbers == {int}) + ["no"] * (bool in kinds)
            wrong += [True] * bool(numbers and bool not in kinds)
            wrong += [None] * bool((numbers or bool in kinds) and type(None) not in kinds)
            for value in wrong if name != "in_channels" and str not in kinds else ():
                tried.add((path, name))
                try:
                    one(**{name: value})
                    accepted.add((path, name, value))
                except (TypeError, ValueError) as error:
                    unnamed |= set() if name in str(error) else {(path, name, value, str(error))}
    assert ("callbacks.ddp_settings.DDPSettings", "bucket_cap_mb") in tried
    assert not accepted
    assert not unnamed


def test_what_is_no_name_no_folder_and_no_module_is_refused_at_once_by_name():
    for one, options in [
        (callbacks.Export, {"class_names": 3}),
        (callbacks.Export, {"class_names": ["a", None]}),
        (callbacks.Export, {"class_names": {"a", "b"}}),
        (callbacks.Export, {"preprocess": len}),
        (callbacks.Export, {"postprocess": 3}),
        (callbacks.Distillation, {"teacher": torch.nn.Linear(1, 1), "class_dim": "x"}),
        (callbacks.SaveOnSignal, {"stop_signals": None}),
        (callbacks.Quantization, {"exclude": 3}),
        (BackgroundCheckpointIO, {"local_folder": 3}),
        (callbacks.Distillation, {"teacher": True}),
        (callbacks.Distillation, {"teacher": "initial", "cache": ""}),
        (callbacks.Distillation, {"teacher": torch.nn.Linear(1, 1), "checkpoint": 3}),
        (callbacks.LowRankAdapters, {"checkpoint": True}),
        (ShardOptions, {"shuffle_bytes": 0}),
        (ShardOptions, {"cache_dir": ""}),
        (TabularDataModule, {"target": "y", "path": 3}),
        (SequenceDataModule, {"path": "x" * 300}),
        (GraphDataModule, {"path": ""}),
        (TextDataModule, {"path": True}),
        (IdxDataModule, {"path": 1}),
        (load_compressed, {"path": True}),
        (TopKGate, {"dim": 4, "num_experts": 3, "k": 1.5}),
    ]:
        with pytest.raises((TypeError, ValueError), match=[*options][-1]):
            one(**options)
