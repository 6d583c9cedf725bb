"""No callable of the package has more than a dozen arguments."""

import importlib
import inspect
import pkgutil
from dataclasses import is_dataclass

import lightning_accel

MOST = 12
EXCEPTIONS = {
    "callbacks.deployment.quantization.Quantization",  # one is deprecated
    "callbacks.early_stopping.EarlyStopping",  # deprecated
    "data.tables.datamodule.TabularDataModule",  # what other datamodules call equally, and the columns of a table
    "callbacks.speedups.Speedups",  # settings that stand alone, and are written by tune
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
