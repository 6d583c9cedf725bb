"""What CONTRIBUTING.md says, as far as a program can tell: words of docstrings, and where things are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "lightning_accel"
NO_VERBS = re.compile(
    r"(A|All|An|And|Any|As|At|Because|Before|Both|But|By|Each|Every|For|From|How|If|In|Is|Its|No|None|Not|Of|On|One|Only|"
    r"Or|Such|That|The|These|This|Those|To|Two|What|When|Where|Whether|Which|Who|Whose|With|Without)\b"
)
NO_SENTENCE = re.compile(r"(?:^|[.!?]\s+|\n\s*\n\s*)((?:Of|That|Those|Whose)\b.*)")


def docstrings() -> Iterator[tuple[str, ast.AST, str]]:
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(FOLDER)}, {getattr(node, 'name', 'its head')}", node, text


@pytest.mark.slow
def test_docstrings_begin_with_a_verb():
    first = [(place, text.splitlines()[0]) for place, node, text in docstrings() if not isinstance(node, ast.Module)]
    assert len(first) > 500
    assert not [(place, line) for place, line in first if NO_VERBS.match(line)]


@pytest.mark.slow
def test_sentences_stand_alone():
    assert not [(place, found) for place, _, text in docstrings() for found in NO_SENTENCE.findall(text)]


def test_the_map_of_the_house_is_true():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    places = re.findall(r"\| `([\w/]+\.py)` \| `(\w+)` \|", text)
    assert len(places) > 20
    for file, name in places:
        definition = rf"^ *(?:(?:def|class) {name}\b|{name} = )"
        assert re.search(definition, (FOLDER / file).read_text(), re.MULTILINE), (file, name)
