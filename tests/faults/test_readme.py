"""README.md says which test shows which case: each case of the catalogue has a line, each test is there.
found.md says so of faults that were found by reading and by use.
"""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
FOUND = Path(__file__).with_name("found.md").read_text(encoding="utf-8")
CASES = {"A": 10, "B": 14, "C": 14, "D": 13, "E": 8, "H": 14}
YET_TO_COME = {"E3", "E4", "H4", "H10", "H11", "H12", "H13"}


def rows() -> dict[str, str]:
    """The lines of the tables by the cases that they speak of."""
    found: dict[str, str] = {}
    for line in README.splitlines():
        names = re.match(r"\| ((?:[A-EH]\d+(?:, )?)+) ", line)
        found |= dict.fromkeys(names[1].split(", "), line) if names else {}
    return found


def functions_of(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def test_every_case_has_its_line() -> None:
    wanted = {f"{letter}{number}" for letter, count in CASES.items() for number in range(1, count + 1)}
    assert rows().keys() == wanted
    lines = {case for case, line in rows().items() if "::test_" in line or "the same two" in line}
    assert wanted - lines == YET_TO_COME


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", README + FOUND)
    assert len(named) > 140
    assert not [(file, test) for file, test in named if test not in functions_of(TESTS / file)]


def test_every_test_of_this_folder_is_named() -> None:
    there = {
        f"faults/{path.name}::{test}"
        for path in Path(__file__).parent.glob("test_[a-e]_*.py")
        for test in functions_of(path)
        if test.startswith("test_")
    }
    assert len(there) > 30
    assert not [test for test in there if f"`{test}`" not in README]
