"""Safe loading of archives of ``torch.export.save``.

torch 2.13 unpickles sample inputs, weights and constants that an archive marks so, evaluates its symbolic sizes as
Python, imports the modules that its trees name, and turns names and targets into source code, so that a malicious
archive can run code. Here each entry is checked against what :func:`lightning_accel.compress.export` writes, and torch
reads a new archive of the checked entries, so that it cannot see another content than the check.
"""

import ast
import io
import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

METADATA = "lightning_accel.json"  # entry with the metadata of a file

_MODEL, _INPUTS = "models/model.json", "data/sample_inputs/model.pt"
_PAYLOADS = {"weights": "weight_", "constants": "tensor_"}
_ENTRIES = re.compile(
    rf"models/model\.json|data/sample_inputs/model\.pt|extra/{re.escape(METADATA)}|archive_format|archive_version|"
    r"byteorder|\.data/(version|serialization_id)|data/weights/(weight_\d+|model_weights_config\.json)|"
    r"data/constants/(tensor_\d+|model_constants_config\.json)"
)
_IDENTIFIER = re.compile(r"[^\W\d]\w*|")
_DOTTED = re.compile(r"[\w.:/ +-]*")  # names of weights, which torch writes into source code, at most between quotes
_SYMBOL = re.compile(r"[a-z]+\d{1,6}")
_FREE_TEXT = {"as_string", "as_strings"}  # always quoted in the source code that torch writes

# Operators have no effect beyond tensors, except these.
_REFUSED_OPERATORS = re.compile(
    r"(aten\.(from_file|save|_print|warn|wait)|image\.(read|write)_file"
    r"|(c10d|_c10d_functional\w*|symm_mem|profiler|debugprims|inductor|static_runtime|export|prim|_test)\.\w+)\.\w+"
)
_HIGHER_ORDER = re.compile(
    r"(cond|while_loop|scan|associative_scan|map_impl|invoke_subgraph|flex_attention|"
    r"wrap_with_set_grad_enabled|wrap_with_autocast)"
)
_TARGETS = re.compile(
    r"torch\.ops\.higher_order\.(?P<higher>\w+)|torch\.ops\.(?P<operator>\w+\.\w+\.\w+)|torch\._?sym_\w+|"
    r"math\.(trunc|floor|ceil|sqrt)|_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|"
    r"lshift|rshift|getitem)|torch\._functorch\.predispatch\._(add_batch_dim|remove_batch_dim|vmap_(in|de)crement_nesting)"
)
_TREES = {None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}
_EXPRESSIONS = re.compile(
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Abs|floor|ceiling|Equality|Unequality|Eq|Ne|StrictLessThan|"
    "LessThan|StrictGreaterThan|GreaterThan|And|Or|Not|FloorDiv|ModularIndexing|Where|PythonMod|Mod|CleanDiv|"
    "CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv|TruncToFloat|TruncToInt|"
    "RoundToInt|RoundDecimal|ToFloat|Identity|IsNonOverlappingAndDenseIndicator"
)
_POWERS = {"Pow", "PowByNatural", "FloatPow", "LShift", "RShift"}
_MAX_EXPRESSION = 20_000  # characters


def checked_archive(path: Path) -> io.BytesIO:
    """Copy the program in ``path`` to memory, without anything that torch would unpickle, evaluate or import.

    Raises:
        ValueError: if it contains anything that :func:`lightning_accel.compress.export` does not write, or is damaged.
    """
    try:
        entries = _read_entries(path)
        model = json.loads(entries[_MODEL])
        _require_program(model)
        entries[_MODEL] = json.dumps(model).encode()
        for kind, prefix in _PAYLOADS.items():
            config = f"data/{kind}/model_{kind}_config.json"
            payload = json.loads(entries[config])
            _require_payload(payload, prefix, {name: len(entries[name]) for name in entries}, f"data/{kind}/")
            entries[config] = json.dumps(payload).encode()
    except (
        _InvalidArchiveError,
        zipfile.BadZipFile,
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        RecursionError,
    ) as error:
        raise _invalid_file(path, error) from error
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(f"model/{name}", content)
    copy.seek(0)
    return copy


def _invalid_file(path: Path, error: Exception) -> ValueError:
    reason = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return ValueError(
        f"{path} is not a whole file of lightning_accel's export, or was changed: {reason[:300]}. It was not loaded, "
        "since torch would run code that such a file may hold. Export the model again"
    )


class _InvalidArchiveError(Exception):
    """Report content that an archive must not have."""


def _read_entries(path: Path) -> dict[str, bytes]:
    entries: dict[str, bytes] = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.partition("/")[2]  # without the top folder, which has the archive's name
            if not _ENTRIES.fullmatch(name):
                raise _InvalidArchiveError(f"it holds {info.filename!r}")
            if name in entries:
                raise _InvalidArchiveError(f"it holds {name!r} twice")
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
                raise _InvalidArchiveError(
                    f"{name!r} is compressed or encrypted"
                )  # a small file could unpack to a large one
            entries[name] = archive.read(info)  # verifies its checksum
    if entries[_INPUTS]:
        raise _InvalidArchiveError("it holds sample inputs, which torch would unpickle")
    return entries


def _require_program(model: Any) -> None:
    model["guards_code"] = []  # Python code of guards, which are not needed
    graph_module = model["graph_module"]
    graph_module["metadata"] = {}
    graph_module["treespec_namedtuple_fields"] = {}
    if model["verifiers"] not in (["TRAINING"], ["ATEN"], ["EDGE"]):
        raise _InvalidArchiveError(f"its verifiers are {model['verifiers']}")
    for name in model["range_constraints"]:
        if not _SYMBOL.fullmatch(name):  # torch counts up to the number of a symbol
            raise _InvalidArchiveError(f"{name!r} is no symbol")
    _require_values(model, "")


def _require_values(value: Any, key: str) -> None:
    """Check every text in a program by the rule for its key."""
    if isinstance(value, dict):
        if isinstance(value.get("target"), str) and "metadata" in value:  # a node
            value["metadata"] = {}  # its origin in the source code; torch looks up the names in it
        for name, part in value.items():
            if not _DOTTED.fullmatch(name):
                raise _InvalidArchiveError(f"{name!r} is no name")
            _require_values(part, name)
    elif isinstance(value, list):
        for part in value:
            _require_values(part, key)
    elif isinstance(value, str):
        _require_text(value, key)


def _require_text(text: str, key: str) -> None:
    if key in _FREE_TEXT:
        return
    if key == "expr_str":
        _require_expression(text)
    elif key == "target":
        _require_target(text)
    elif key in ("in_spec", "out_spec"):
        _require_tree(json.loads(text)[1])
    elif key in ("as_operator", "as_custom_obj", "class_fqn"):
        raise _InvalidArchiveError(f"it holds the object {text!r}")
    elif not (_IDENTIFIER if key in ("name", "as_name") else _DOTTED).fullmatch(text):
        raise _InvalidArchiveError(f"{text!r} is no name")


def _require_target(target: str) -> None:
    found = _TARGETS.fullmatch(target)
    higher, operator = (found["higher"], found["operator"]) if found else (None, None)
    if (
        not found
        or (higher and not _HIGHER_ORDER.fullmatch(higher))
        or (operator and _REFUSED_OPERATORS.fullmatch(operator))
    ):
        raise _InvalidArchiveError(f"it calls {target!r}")


def _require_tree(tree: Any) -> None:
    if tree["type"] not in _TREES or "__enum__" in json.dumps(tree["context"]):
        raise _InvalidArchiveError(f"its arguments hold a {tree['type']}")
    for child in tree["children_spec"]:
        _require_tree(child)


def _require_expression(text: str) -> None:
    """Raise unless a text, which torch evaluates, has only SymPy functions of numbers and symbols, as of ``srepr``."""
    if len(text) > _MAX_EXPRESSION:
        raise _InvalidArchiveError(f"a size of {len(text)} characters")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise _InvalidArchiveError(f"{text[:80]!r} is no size") from error
    if not all(map(_is_harmless, _parts(tree))):
        raise _InvalidArchiveError(f"{text[:80]!r} is no size")


def _parts(tree: ast.expr) -> Iterator[ast.expr]:
    """Yield the calls, names and constants of an expression, and any other part as a whole."""
    yield tree
    if isinstance(tree, ast.Call):
        for part in [*tree.args, *(keyword.value for keyword in tree.keywords)]:
            yield from _parts(part)


def _is_harmless(part: ast.expr) -> bool:
    if isinstance(part, ast.Constant):
        is_text = isinstance(part.value, str) and bool(re.fullmatch(r"\w*|-?[\d.]+(e[+-]?\d{1,3})?", part.value))
        return is_text or (isinstance(part.value, int | float) and abs(part.value) < 2**63)
    if isinstance(part, ast.UnaryOp):
        return isinstance(part.op, ast.USub) and isinstance(part.operand, ast.Constant) and _is_harmless(part.operand)
    if isinstance(part, ast.Name):
        return part.id in ("true", "false", "oo", "int_oo")
    if not (isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and _EXPRESSIONS.fullmatch(part.func.id)):
        return False
    return part.func.id not in _POWERS or _is_small_power(part.args)


def _is_small_power(arguments: list[ast.expr]) -> bool:
    """Return whether SymPy computes a power quickly; 9**9**9 would never end."""
    if len(arguments) != 2:
        return False
    base, exponent = map(ast.unparse, arguments)
    small = re.fullmatch(r"(Integer|Rational)\((-?\d)(, \d)?\)|-?\d", exponent)
    return "Symbol" in base and bool(small)


def _require_payload(payload: Any, prefix: str, sizes: Mapping[str, int], folder: str) -> None:
    for name, entry in payload["config"].items():
        if not _DOTTED.fullmatch(name):
            raise _InvalidArchiveError(f"{name!r} is no name")
        if entry["use_pickle"] is not False:
            raise _InvalidArchiveError(f"{name!r} is a pickle")
        file = f"{folder}{entry['path_name']}"
        if not re.fullmatch(rf"{re.escape(prefix)}\d+", entry["path_name"]) or file not in sizes:
            raise _InvalidArchiveError(f"{name!r} is in {entry['path_name']!r}")
        meta = entry["tensor_meta"]
        count = math.prod(size["as_int"] for size in meta["sizes"])
        if count and not sizes[file]:  # torch would allocate that many zeros
            raise _InvalidArchiveError(f"{name!r} has {count} values in an entry of 0 bytes")
        strides = [stride["as_int"] for stride in meta["strides"]]
        last = sum((size["as_int"] - 1) * stride for size, stride in zip(meta["sizes"], strides, strict=True))
        if count and min(strides, default=0) >= 0 and last + meta["storage_offset"]["as_int"] >= sizes[file]:
            raise _InvalidArchiveError(f"{name!r} has more values than its entry of {sizes[file]} bytes")
        _require_values(meta, "")


def read_graph(archive: io.BytesIO) -> bytes:
    """Read the JSON of the graph from the result of :func:`checked_archive`."""
    with zipfile.ZipFile(archive) as entries:
        graph = entries.read(f"model/{_MODEL}")
    archive.seek(0)
    return graph


def load_program(archive: io.BytesIO, path: Path) -> tuple[torch.export.ExportedProgram, str]:
    """Load the program and its metadata from the result of :func:`checked_archive` for ``path``."""
    extra = {METADATA: ""}
    try:
        return torch.export.load(archive, extra_files=extra), extra[METADATA]
    except Exception as error:  # torch raises all kinds of exceptions for inconsistent graphs
        raise _invalid_file(path, error) from error
