"""Rules and dashboard without a server: promtool, their documentation, the names that they use."""

import re

import pytest
import yaml

from sidecar.metrics import PREFIX
from tests.observe import rules
from tests.observe.families import exported

OPERATIONS = (rules.ROOT / "docs" / "operations.md").read_text()


def anchors() -> dict[str, str]:
    """Anchors of the headings of docs/operations.md -> their sections."""
    parts = re.split(r"^#+ (.+)$", OPERATIONS, flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-"): text
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_the_configuration_is_valid() -> None:
    ran = rules.promtool("check", "config", "--lint=all", "--lint-fatal", "prometheus.yml")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_fires_and_does_not_fire() -> None:
    ran = rules.promtool("test", "rules", "rules_test.yml")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_no_rule_is_untested() -> None:
    tests = yaml.safe_load((rules.PROMETHEUS / "rules_test.yml").read_text())["tests"]
    alerts = [case for test in tests for case in test.get("alert_rule_test", ())]
    fires = {case["alertname"] for case in alerts if case["exp_alerts"]}
    silent = {case["alertname"] for case in alerts if not case["exp_alerts"]}
    assert fires == silent == set(rules.alerts())
    expressions = [case["expr"] for test in tests for case in test.get("promql_expr_test", ())]
    tested = {name for expr in expressions for name in rules.selectors(expr)}
    assert tested == set(rules.recorded())


@pytest.mark.parametrize("name", rules.alerts())
def test_every_alert_says_what_to_do(name: str) -> None:
    alert = rules.alerts()[name]
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["labels"]["severity"] in ("warning", "critical")
    file, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert (file, anchor) == ("docs/operations.md", name.lower())
    section = anchors()[anchor]
    assert "**Means**" in section
    assert "**Do**" in section


def test_no_runbook_without_an_alert() -> None:
    sections = {anchor for anchor in anchors() if anchor.startswith("sglangdp")}
    assert sections == {name.lower() for name in rules.alerts()}


def used() -> set[str]:
    """Names of series in rules, dashboard, and the PromQL of docs/operations.md."""
    documented = re.findall(r"^```promql\n(.*?)```", OPERATIONS, re.MULTILINE | re.DOTALL)
    expressions = [rule["expr"] for rule in rules.rules()]
    expressions += [rules.filled_in(query) for query in rules.queries().values()]
    found = {one for text in [*expressions, *documented] for one in rules.selectors(text)}
    return {selector.partition("{")[0] for selector in found}


def test_every_series_that_is_used_exists() -> None:
    ours = {name for name in used() if name.startswith(PREFIX)}
    assert len(ours) > 20
    histograms = {f"{name}_bucket" for name, kind in exported().items() if kind == "histogram"}
    assert ours <= exported().keys() | histograms
    named = {name for name in used() if name.startswith("instance")}
    assert named <= rules.recorded().keys()


def test_the_dashboard_is_laid_out() -> None:
    panels = rules.dashboard()["panels"]
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == [
        "Is it on?",
        "Do sessions hit their cache?",
        "Are ranks balanced?",
        "Is it fast enough?",
        "What did the policy change do?",
    ]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == "${datasource}"
    names = [variable["name"] for variable in rules.dashboard()["templating"]["list"]]
    assert names == ["datasource", "instance", "dp_rank"]


def test_shares_are_shown_as_percentages_and_times_as_seconds() -> None:
    for panel in rules.dashboard()["panels"]:
        for target in panel.get("targets", ()):
            unit = panel["fieldConfig"]["defaults"]["unit"]
            if ":ratio_rate5m" in target["expr"]:
                assert unit == "percentunit", panel["title"]
            if "_seconds_bucket" in target["expr"] or "_seconds:" in target["expr"]:
                assert unit == "s", panel["title"]


@pytest.mark.parametrize("path", sorted((rules.GRAFANA / "provisioning").rglob("*.yml")))
def test_provisioning_is_yaml(path) -> None:
    assert yaml.safe_load(path.read_text())["apiVersion"] == 1


def test_selectors_are_found() -> None:
    expr = 'sum by (instance, le) (rate(sglang_a_bucket{x="y"}[5m])) / on (instance) up > sglang:b'
    assert rules.selectors(expr) == {'sglang_a_bucket{x="y"}', "up", "sglang:b"}
