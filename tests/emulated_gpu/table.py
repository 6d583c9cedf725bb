"""Print a table of what passed on emulated GPUs: ``python tests/emulated_gpu/table.py RESULTS.xml ...``."""

import re
import sys
from collections import Counter, defaultdict
from xml.etree import ElementTree

COLUMNS = {
    "test_numbers_are_those_of_the_cpu": "numbers",
    "test_the_host_never_waits": "no wait",
    "test_compiles": "compiles",
}
PRECISIONS = ("float32", "bfloat16", "float16")


def outcome(case: ElementTree.Element) -> str:
    """Return ``passed``, ``failed`` or ``skipped``."""
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def main(files: list[str]) -> None:
    """Print the paths of ``tests/test_gpu_paths.py`` with their precisions, and the other tests by their files."""
    cells: dict[tuple[str, str, str], str] = {}
    files_of: dict[str, Counter[str]] = defaultdict(Counter)
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            found, name = outcome(case), case.get("name", "")
            match = re.fullmatch(r"(\w+)\[(.+)-(\w+)\]", name.partition("@")[0])
            if match and match[1] in COLUMNS and match[3] in PRECISIONS:
                if found != "skipped":
                    cells[match[2], match[1], match[3]] = found
            else:
                files_of[case.get("classname", "")][found] += 1
    print("| path |", " | ".join(f"{title}, {one}" for title in COLUMNS.values() for one in PRECISIONS), "|")
    print("|---" * (1 + len(COLUMNS) * len(PRECISIONS)) + "|")
    for path in dict.fromkeys(path for path, *_ in cells):
        found = [cells.get((path, test, one), "") for test in COLUMNS for one in PRECISIONS]
        print("|", " | ".join([path, *found]), "|")
    print("\n| other tests | passed | failed | skipped |\n|---|---|---|---|")
    for name, counts in sorted(files_of.items()):
        print(f"| {name} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |")


if __name__ == "__main__":
    main(sys.argv[1:])
