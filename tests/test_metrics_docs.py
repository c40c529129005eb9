"""docs/operations.md: its table of metrics is the code's, label for label."""

import re
from pathlib import Path

import pytest

from sidecar import metrics
from sidecar.metrics import PREFIX
from sidecar.metrics.process import CHANGES, LOG_CAUSES
from tests.observe.families import exported, labels

OPERATIONS = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()
METRICS = OPERATIONS.partition("\n## Metrics\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (`.+?) \|(.*?)\|(.*)\|$", METRICS, re.MULTILINE)


def documented() -> dict[str, tuple[set[str], str]]:
    """Name -> labels and meaning."""
    table: dict[str, tuple[set[str], str]] = {}
    for names, told, meaning in ROWS:
        plain = re.sub(r"\(.*?\)", "", told)
        for name in re.findall(r"`(\w+)`", names):
            assert name not in table, name
            table[name] = ({one for one in re.split(r"[,\s]+", plain) if one}, meaning.strip())
    return table


def test_every_family_is_in_the_table_and_no_other() -> None:
    assert documented().keys() == {name.removeprefix(PREFIX) for name in exported()}


@pytest.mark.parametrize("name", sorted(labels()))
def test_its_labels_are_the_documented_ones(name: str) -> None:
    assert documented()[name.removeprefix(PREFIX)][0] == set(labels()[name])


def test_histograms_are_called_so() -> None:
    said = {name for name, (_, meaning) in documented().items() if meaning.startswith("histogram")}
    real = {name.removeprefix(PREFIX) for name, kind in exported().items() if kind == "histogram"}
    assert said == real


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("abstained_total", metrics.ABSTAIN_CAUSES),
        ("policy_changes_total", CHANGES),
        ("decision_log_dropped_total", set(LOG_CAUSES)),
        ("load_source", {"hook", "published"}),
    ],
)
def test_values_of_labels_are_listed(name: str, values: set[str]) -> None:
    assert set(re.findall(r"`(\w+)`", documented()[name][1])) == values


def test_every_bypass_cause_has_its_line() -> None:
    wrong = OPERATIONS.partition("\n## When something is wrong\n")[2].partition("\n## ")[0]
    assert set(re.findall(r'"(\w+)"', wrong)) >= metrics.BYPASS_CAUSES
