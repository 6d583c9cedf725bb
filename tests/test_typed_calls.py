"""What a type checker sees when a module is called: the result of its ``forward``, where torch declares Any."""

import ast
import importlib
from pathlib import Path

import pytest

from tests.test_package import PACKAGE

SNIPPET = """
import torch
import lightning_accel as la
from lightning_accel.models import Experts
from lightning_accel.nn import ExpertChoiceGate, TreeRNN

x = torch.randn(5, 4)
reveal_type(la.MixtureOfExperts(4, 8, 3)(x))  # lightning_accel.nn.moe.layer.MixtureOutput
reveal_type(la.MixtureOfExperts(4, 8, 3)(x).features)  # torch._tensor.Tensor
reveal_type(la.TopKGate(4, 3)(x))  # lightning_accel.nn.moe.gating.Routing
reveal_type(ExpertChoiceGate(4, 3)(x).report)  # lightning_accel.nn.moe.gating.GateReport
reveal_type(la.DynamicRNN(4, 8)(torch.randn(2, 3, 4)))  # lightning_accel.nn.recurrent.dynamic.RecurrentOutput
reveal_type(TreeRNN(4, 8)(x, torch.tensor([-1])))  # tuple[torch._tensor.Tensor, torch._tensor.Tensor
reveal_type(la.RO3Conv(4, 8)(x, torch.zeros(2, 0).long()))  # torch._tensor.Tensor
reveal_type(la.RBM(4, 8)(x))  # torch._tensor.Tensor
reveal_type(la.MoEClassifier(4, 3, experts=Experts(k=1))(x))  # lightning_accel.models.moe.ClassifierOutput
reveal_type(la.MoERegressor(4)(x))  # lightning_accel.models.moe.RegressorOutput
reveal_type(la.SequenceModel(4, 3)(x))  # lightning_accel.models.rnn.SequenceOutput
"""


def typed_calls() -> dict[str, tuple[ast.FunctionDef, ast.FunctionDef]]:
    """Return the declared ``__call__`` and the ``forward`` of each class that has both, by file and name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            inner = [one for part in node.body if isinstance(part, ast.If) for one in part.body]
            call = [one for one in inner if isinstance(one, ast.FunctionDef) and one.name == "__call__"]
            forward = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "forward"]
            if call and forward:
                found[f"{path.relative_to(PACKAGE)}: {node.name}"] = call[0], forward[0]
    return found


@pytest.mark.slow
def test_calls_are_declared_as_forward_is():
    found = typed_calls()
    for call, forward in found.values():
        assert ast.unparse(call.args) == ast.unparse(forward.args)
        assert ast.unparse(call.returns) == ast.unparse(forward.returns)
    names = {place.rpartition(" ")[2] for place in found}
    for package in ("nn", "models"):
        module = importlib.import_module(f"lightning_accel.{package}")
        own = {value.__name__ for name in module.__all__ if "forward" in vars(value := getattr(module, name))}
        assert own <= names


@pytest.mark.slow
@pytest.mark.weekly
def test_mypy_sees_results_of_calls(tmp_path):
    api = pytest.importorskip("mypy.api")
    path = tmp_path / "snippet.py"
    path.write_text(SNIPPET)
    root = Path(__file__).parents[1]  # with the cache of other runs of mypy there: all of torch takes minutes
    cache = ["--cache-dir", str(root / ".mypy_cache")]
    shown, errors, status = api.run([str(path), "--config-file", str(root / "pyproject.toml"), *cache])
    assert status == 0, shown + errors
    notes = dict(line.split(": note: Revealed type is ") for line in shown.splitlines() if "Revealed" in line)
    types = {int(place.rpartition(":")[2]): text.strip('"') for place, text in notes.items()}
    expected = {n: line.partition("# ")[2] for n, line in enumerate(SNIPPET.splitlines(), 1) if "# " in line}
    assert types.keys() == expected.keys()
    for line, name in expected.items():
        assert types[line].startswith(name) or types[line].endswith(f"fallback={name}]"), types[line]
