"""docs/cases.md names a test for every case, and each of them exists."""

import ast
import re
from functools import cache

import pytest

from tests.processes import ROOT

CASES = 35
PAGE = (ROOT / "docs/cases.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)

SHOWN = {number: shown for number, _, shown in ROWS}


@cache
def names_in(file: str) -> set[str]:
    """Names of the tests in a file of tests/."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {name for name in found if name.startswith("test_")}


def test_every_case_has_a_row_in_order() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, CASES + 1))


@pytest.mark.parametrize("number", SHOWN)
def test_its_tests_exist(number: str) -> None:
    shown = SHOWN[number]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", shown)
    assert named
    assert len(named) == shown.count("`") / 2, "something is named that is not file::test"
    missing = [f"{file}::{test}" for file, test in named if test not in names_in(file)]
    assert not missing


def test_every_test_that_is_called_after_a_case_is_named() -> None:
    """So a new one cannot be forgotten here."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = str(path.relative_to(ROOT / "tests"))
        for test in sorted(names_in(file)):
            numbers = re.match(r"test_(?:case_(\d+)|cases_((?:\d+_)+))", test)
            for case in re.findall(r"\d+", numbers.group() if numbers else ""):
                assert f"`{file}::{test}`" in SHOWN[case]
