"""Files that run nothing of their own: each hostile one would leave a marker if torch read it as it is."""

import io
import json
import os
import pickle
import tracemalloc
import zipfile

import pytest
import torch
from torch import nn

from lightning_accel.compress import export, load_compressed
from lightning_accel.compress.export.archive import _REFUSED_OPERATORS, checked_archive

MODEL, WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("offset", torch.arange(3.0))
        self.constant = torch.ones(2)

    def forward(self, x):
        scaled = self.layer(x) * self.constant + self.offset.sum()
        return scaled * x.shape[0] ** 2, nn.functional.avg_pool1d(x.transpose(1, 2), 2), torch.cat([scaled, scaled])


class Evil:
    def __init__(self, marker) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "m.pt2"
    export(Net().eval(), [((torch.rand(4, 6, 4),), {}), ((torch.rand(3, 9, 4),), {})], path)
    with zipfile.ZipFile(path) as archive:
        return path, {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write(path, entries, twice=(), compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in [*entries.items(), *twice]:
            archive.writestr(f"m/{name}", content)
    return path


def pickled(marker):
    buffer = io.BytesIO()
    torch.save(Evil(marker), buffer)
    return buffer.getvalue()


def change(entries, name, edit):
    content = json.loads(entries[name])
    edit(content)
    return entries | {name: json.dumps(content).encode()}


def first_size(model, text):
    for value in model["graph_module"]["graph"]["tensor_values"].values():
        for size in value["sizes"]:
            if "as_expr" in size:
                size["as_expr"]["expr_str"] = text


def first_node(model, **given):
    model["graph_module"]["graph"]["nodes"][0].update(given)


def call(target, *arguments):
    inputs = [{"name": "", "arg": argument, "kind": 1} for argument in arguments]
    rest = {"outputs": [], "metadata": {}, "is_hop_single_tensor_return": None, "name": "x"}
    return {"target": target, "inputs": inputs, **rest}


def insert_call(model, *call_of):
    model["verifiers"] = []
    model["graph_module"]["graph"]["nodes"].insert(0, call(*call_of))


def pickle_weight(config):
    next(iter(config["config"].values()))["use_pickle"] = True


def opaque(config):
    config["config"]["object"] = {
        "path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None,
    }  # fmt: skip


def empty_bomb(config):
    entry = next(iter(config["config"].values()))
    entry["tensor_meta"]["sizes"] = [{"as_int": 10**9}, {"as_int": 10**4}]


def import_planted(model):
    signature = model["graph_module"]["module_call_graph"][0]["signature"]
    protocol, tree = json.loads(signature["in_spec"])
    tree["context"] = json.dumps({"__enum__": True, "fqn": "planted:Enum", "name": "A"})
    signature["in_spec"] = json.dumps([protocol, tree])


def rename(model, name):
    old = model["graph_module"]["graph"]["inputs"][-1]["as_tensor"]["name"]
    text = json.dumps(model).replace(f'"{old}"', json.dumps(name))
    model.clear()
    model.update(json.loads(text))


def shell(marker):
    return f"__import__('os').mkdir({str(marker)!r})"


HOSTILE = {
    "sample inputs": lambda e, m: e | {"data/sample_inputs/model.pt": pickled(m)},
    "pickled weight": lambda e, m: change(e, WEIGHTS, pickle_weight) | {"data/weights/weight_0": pickled(m)},
    "legacy weights": lambda e, m: e | {"data/weights/model.pt": pickled(m)},
    "opaque constant": lambda e, m: (
        change(e, "data/constants/model_constants_config.json", opaque)
        | {"data/constants/opaque_obj_0": pickle.dumps(Evil(m))}
    ),
    "size": lambda e, m: change(e, MODEL, lambda model: first_size(model, shell(m))),
    "size within a call": lambda e, m: change(e, MODEL, lambda model: first_size(model, f"Integer({shell(m)})")),
    "attribute of a size": lambda e, m: change(e, MODEL, lambda model: first_size(model, "Symbol.__class__")),
    "size that takes for ever": lambda e, m: change(
        e, MODEL, lambda model: first_size(model, "Pow(Integer(9), Pow(Integer(9), Integer(9)))")
    ),
    "argument name": lambda e, m: change(e, MODEL, lambda model: rename(model, f"x={shell(m)}")),
    "target": lambda e, m: change(e, MODEL, lambda model: insert_call(model, "torch.os.mkdir", {"as_string": str(m)})),
    "operator that writes": lambda e, m: change(
        e,
        MODEL,
        lambda model: insert_call(
            model, "torch.ops.aten.from_file.default", {"as_string": str(m)}, {"as_bool": True}, {"as_int": 1}
        ),
    ),
    "delegate": lambda e, m: change(
        e, MODEL, lambda model: insert_call(model, "torch.ops.higher_order.aoti_call_delegate")
    ),
    "operator as value": lambda e, m: change(
        e, MODEL, lambda model: insert_call(model, "torch.ops.aten.sin.default", {"as_operator": "torch.os.mkdir"})
    ),
    "imported enum": lambda e, m: change(e, MODEL, import_planted),
    "no verifier": lambda e, m: change(e, MODEL, lambda model: model.update(verifiers=[])),
    "symbols to count up to": lambda e, m: change(
        e, MODEL, lambda model: model["range_constraints"].update(u1000000000={"min_val": 0, "max_val": 1})
    ),
    "zeros": lambda e, m: change(e, WEIGHTS, empty_bomb) | {"data/weights/weight_0": b""},
    "weight elsewhere": lambda e, m: change(
        e, WEIGHTS, lambda c: next(iter(c["config"].values())).update(path_name="../../models/model.json")
    ),
    "entry of another name": lambda e, m: e | {"data/aotinductor_/model/m.so": b"x"},
    "larger than its entry": lambda e, m: change(e, WEIGHTS, empty_bomb),
    "node that takes nothing": lambda e, m: change(e, MODEL, lambda model: first_node(model, inputs=[])),
    "deep metadata": lambda e, m: e | {"extra/lightning_accel.json": b"[" * 100_000},
    "no metadata": lambda e, m: e | {"extra/lightning_accel.json": b"{}"},
    "metadata of nothing": lambda e, m: (
        e
        | {
            "extra/lightning_accel.json": json.dumps(
                dict.fromkeys(json.loads(e["extra/lightning_accel.json"]))
            ).encode()
        }
    ),
    "deep": lambda e, m: e | {MODEL: b"[" * 200_000},
    "no model": lambda e, m: {name: content for name, content in e.items() if name != MODEL},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_is_refused_before_torch_reads_it(tmp_path, monkeypatch, sound, name):
    marker = tmp_path / "marker"
    (tmp_path / "planted.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = HOSTILE[name](sound[1], marker)
    assert entries != sound[1]
    path = write(tmp_path / "m.pt2", entries)
    with pytest.raises(ValueError, match=r"m\.pt2"):
        load_compressed(path)(torch.rand(2, 5, 4))
    assert not marker.exists()


def test_two_readers_of_one_archive_see_the_same(tmp_path, sound):
    hostile = [(MODEL.upper(), b"{}"), (MODEL, b"{}"), (MODEL, sound[1][MODEL])]
    for entry in hostile:
        with pytest.warns(UserWarning, match="Duplicate") if entry[0] == MODEL else _nothing():
            path = write(tmp_path / "m.pt2", sound[1], twice=[entry])
        with pytest.raises(ValueError, match="it holds"):
            load_compressed(path)
    packed = write(tmp_path / "packed.pt2", sound[1], compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="compressed"):
        load_compressed(packed)


def test_nothing_large_is_unpacked_before_it_is_refused(tmp_path, sound):
    size = 1 << 26
    program = write(tmp_path / "program.pt2", sound[1] | {MODEL: b" " * size}, compression=zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    with pytest.raises(ValueError, match="compressed"):
        load_compressed(program)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 16


def _nothing():
    return io.BytesIO()  # a context that does nothing


def test_flipped_bit_is_told(tmp_path, sound):
    content = bytearray(sound[0].read_bytes())
    weight = sound[1]["data/weights/weight_0"]
    content[content.index(weight)] ^= 1
    path = tmp_path / "m.pt2"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="CRC"):
        load_compressed(path)


def test_machine_code_is_not_loaded(tmp_path, sound):
    path = write(tmp_path / "m.pt2", sound[1] | {"data/aotinductor/model/m.so": b"code"})
    with pytest.raises(ValueError, match=r"holds machine code.*aoti_load_package"):
        load_compressed(path)


def test_what_is_checked_is_what_the_module_gives(sound):
    x = torch.rand(5, 7, 4)
    program = torch.export.load(checked_archive(sound[0])).module(check_guards=False)
    for found, expected in zip(program(x), torch.export.load(sound[0]).module()(x), strict=True):
        assert found.equal(expected)


def test_operators_that_reach_outside_of_tensors_are_known():
    """Operators that take text: those that take a path must be refused."""
    paths = {
        f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
        for schema in torch._C._jit_get_all_schemas()
        if any(str(argument.type) == "str" and "file" in argument.name for argument in schema.arguments)
    }
    assert "aten.from_file.default" in paths
    assert [name for name in paths if not _REFUSED_OPERATORS.fullmatch(name)] == []


@pytest.mark.parametrize("inputs", [torch.rand(2, 4), (torch.rand(2, 4),), [torch.rand(2, 4)], [(torch.rand(2, 4),)]])
def test_inputs_that_are_no_calls_are_named(tmp_path, inputs):
    with pytest.raises(TypeError, match=r"inputs is a list of calls .* such as \[\(\(x,\), \{\}\)\]"):
        export(nn.Linear(4, 2), inputs, tmp_path / "m.pt2")
