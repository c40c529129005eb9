"""docs/security.md names a test for what it claims: each of them is there."""

import ast
import re

from tests.processes import ROOT

PAGE = ROOT / "docs" / "security.md"
LONGEST = 150
SPANS = re.compile(r"`(tests/[\w/]+\.py)?::(test_\w+)`")


def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_is_there() -> None:
    """`tests/FILE.py::NAME`, or `::NAME` of the file named before it."""
    file, found = "", 0
    for named, function in SPANS.findall(PAGE.read_text()):
        file = named or file
        assert function in functions(file), f"{file}::{function}"
        found += 1
    assert found == PAGE.read_text().count("::test_")
    assert found > 60


def test_every_door_and_bound_has_one() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.endswith("| test |")]
    assert len(rows) > 20
    assert not [row for row in rows if "::test_" not in row]


def test_it_is_short() -> None:
    assert len(PAGE.read_text().splitlines()) < LONGEST
