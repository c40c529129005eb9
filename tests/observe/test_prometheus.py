"""A real Prometheus scrapes a real SGLang server (simulated ranks) and its sidecar: every query of
the dashboard, every recording rule and every input of an alert returns data."""

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest
import requests

pytest.importorskip("sglang")

from bench.demo import Sidecar
from bench.simulated.launch import SimulatedServer
from sidecar.control import Control
from sidecar.listener import control_path
from tests.integration.conftest import OLD, READY_SECONDS
from tests.observe import rules
from tests.processes import short_directory, wait_for

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(OLD, reason="the series of the installed release are meant"),
]
RANKS, INSTANCE = 4, "demo:30000"
# Windows of a minute need some samples, a p99 some requests; the machine may be busy.
SECONDS = 120.0
PROMPT = "the of and to in is that it was for on are as be " * 40


class Traffic:
    """Requests of some sessions, with enough at once that one rank spills to others."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.turn = 0

    def ask(self, key: str | None, words: str) -> None:
        answer = requests.post(
            f"{self.url}/v1/chat/completions",
            json={
                "model": "simulated",
                "messages": [{"role": "user", "content": words}],
                "max_tokens": 8,
            },
            headers={"x-smg-routing-key": key} if key else {},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text

    def round(self) -> None:
        """48 requests at once: 8 sessions, and one key that asks for more than its share."""
        self.turn += 1
        keys = [f"session-{i % 8}" for i in range(24)] + ["crowd"] * 20 + [None] * 4
        with concurrent.futures.ThreadPoolExecutor(len(keys)) as pool:
            list(pool.map(lambda key: self.ask(key, f"{key} {PROMPT} {self.turn}"), keys))


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[rules.Server, Traffic]]:
    """Prometheus, and the traffic of the server that it watches."""
    rules.binary("prometheus")
    with short_directory() as folder:
        sidecar = Sidecar(folder, "prefix_affinity")
        sidecar.start()
        env = {
            "DP_SIDECAR_ENDPOINT": sidecar.endpoint,
            "DP_SIDECAR_INSTANCE": INSTANCE,
            "DP_SIDECAR_DEADLINE_MS": "500",
        }
        try:
            with SimulatedServer(
                dp_size=RANKS, env=env, args=["--enable-metrics"], log_path=folder / "log"
            ) as server:
                server.wait_ready(READY_SECONDS)
                targets = {
                    "sglang-dp-sidecar": f"127.0.0.1:{sidecar.port}",
                    "sglang": f"127.0.0.1:{server.port}",
                }
                with rules.Server(folder, targets, INSTANCE) as prometheus:
                    # A change of policy that it has not seen before is no change to it.
                    wait_for(lambda: len(prometheus.evaluate("up == 1")) == 2, SECONDS, 0.2)
                    steer(sidecar)
                    yield prometheus, Traffic(server.base_url)
        finally:
            sidecar.stop()


def steer(sidecar: Sidecar) -> None:
    """A policy that spills soon, a canary and a shadow: each role has series then."""
    control = Control(control_path(sidecar.endpoint))
    hasty = {"min_load_gap": 0, "max_load_skew": 1}
    control.set_policy("prefix_affinity", hasty)
    control.set_shadow("kv_affinity")
    control.set_canary("prefix_affinity", 0.3, hasty)


def unanswered(prometheus: rules.Server, expressions: dict[str, str]) -> dict[str, str]:
    return {name: expr for name, expr in expressions.items() if not prometheus.evaluate(expr)}


def all_answered(watched: tuple[rules.Server, Traffic], expressions: dict[str, str]) -> None:
    """Drive traffic until each expression has had data; AssertionError with those that have not.

    One that had data once is done: what it shows may be over (a change of policy is an event).
    """
    prometheus, traffic = watched
    left = dict(expressions)

    def none_left() -> bool:
        nonlocal left
        traffic.round()
        left = unanswered(prometheus, left)
        return not left

    try:
        wait_for(none_left, SECONDS, 0.5)
    except AssertionError:
        raise AssertionError(f"no data: {left}; scrapes: {prometheus.scrapes()}") from None


def test_both_targets_are_up(watched: Any) -> None:
    prometheus, _ = watched
    assert len(prometheus.evaluate("up == 1")) == 2
    found = {labels["instance"] for labels, _ in prometheus.evaluate('up{job="sglang"}')}
    assert found == {INSTANCE}


def test_every_query_of_the_dashboard_returns_data(watched: Any) -> None:
    queries = {name: rules.filled_in(query) for name, query in rules.queries().items()}
    assert len(queries) > 30
    all_answered(watched, queries)


def test_every_recording_rule_has_data_and_none_fails(watched: Any) -> None:
    all_answered(watched, {name: name for name in rules.recorded()})
    prometheus, _ = watched
    for group in prometheus.get("rules")["groups"]:
        for rule in group["rules"]:
            assert not rule.get("lastError"), rule


@pytest.mark.parametrize("name", rules.alerts())
def test_every_input_of_an_alert_exists(watched: Any, name: str) -> None:
    """An alert that is quiet for want of its series would never speak: each selector has data."""
    inputs = rules.selectors(rules.alerts()[name]["expr"])
    assert inputs
    all_answered(watched, {selector: selector for selector in inputs})


def test_nothing_is_alarmed_on_a_healthy_server(watched: Any) -> None:
    prometheus, _ = watched
    firing = [alert for alert in prometheus.get("alerts")["alerts"] if alert["state"] == "firing"]
    assert not firing


def test_ours_joins_with_sglangs_by_instance_and_rank(watched: Any) -> None:
    joined = {
        "rank": "sglang_dp_sidecar_load_requests + on (instance, dp_rank)"
        " max by (instance, dp_rank) (sglang:num_queue_reqs)",
        "server": "sum by (instance) (sglang_dp_sidecar_role_requests_total)"
        " + on (instance) sum by (instance) (sglang:num_requests_total)",
    }
    all_answered(watched, joined)
    prometheus, _ = watched
    assert len(prometheus.evaluate(joined["rank"])) == RANKS


def test_labels_stay_few(watched: Any) -> None:
    """Any number of sessions: a few hundred series, none of which holds a key."""
    prometheus, traffic = watched
    count = 'count({__name__=~"sglang_dp_sidecar_.+"})'
    traffic.round()
    before = prometheus.evaluate("sum(sglang_dp_sidecar_role_requests_total)")[0][1]
    for i in range(100):
        traffic.ask(f"new-{i}", "hello")
    wait_for(
        lambda: (
            prometheus.evaluate("sum(sglang_dp_sidecar_role_requests_total)")[0][1] >= before + 100
        ),
        SECONDS,
        0.2,
    )
    ((_, series),) = prometheus.evaluate(count)
    assert series < 600
