"""SGLang's gateway before two servers with a sidecar each: who decides what, and nothing fails.

The gateway is the wheel `sglang-router`. It tries nothing twice here, so that a request that failed
would show. In the order of the file.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("sglang")
pytest.importorskip("sglang_router", reason="`make venv` installs sglang-router")

from bench.client import read_journal
from bench.demo import Sidecar
from bench.simulated.launch import SimulatedServer, free_port
from sidecar.hashing import key_hash, preferred
from tests.processes import Running, running

from .conftest import OLD, READY_SECONDS, eventually

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(OLD, reason="the gateway does not depend on SGLang's release"),
]

RANKS, TURNS, SESSIONS_EACH = 2, 3, 3
LONG = "the of and to " * 100
HEADER = "x-smg-routing-key"


def home(key: str) -> int:
    """The rank that the sidecar's prefix_affinity gives the key on an idle server."""
    return preferred(key_hash(key.encode()), range(RANKS))


class Node:
    """A server with simulated ranks and its sidecar."""

    def __init__(self, folder: Path) -> None:
        self.journal = folder / "journal"
        # Its ranks follow from the keys alone, so a test can tell whether the key arrived.
        self.sidecar = Sidecar(folder, "prefix_affinity")
        env = {
            "DP_SIDECAR_ENDPOINT": self.sidecar.endpoint,
            # A busy test machine must not look like a slow sidecar.
            "DP_SIDECAR_DEADLINE_MS": "500",
            "SIMULATED_JOURNAL": str(self.journal),
        }
        self.server = SimulatedServer(RANKS, env=env, log_path=folder / "server.log")

    def ranks(self) -> dict[str, int]:
        """Rank by request id."""
        return read_journal(self.journal)

    def hits(self) -> dict[str, float]:
        """Affinity hits by the kind of key, from /metrics."""
        response = requests.get(f"http://127.0.0.1:{self.sidecar.port}/metrics", timeout=10)
        return {
            sample.labels["key"]: sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
            if sample.name == "sglang_dp_sidecar_affinity_hits_total" and sample.value
        }

    def status(self) -> dict[str, Any]:
        return self.sidecar.status() or {}


class Gateway:
    """A gateway process before the nodes, and how to ask it."""

    def __init__(self, nodes: Sequence[Node], url: str) -> None:
        self.nodes, self.url = nodes, url

    def chat(self, key: str | None, text: str, **more: Any) -> requests.Response:
        body = {
            "model": "simulated",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 2,
        }
        return requests.post(
            f"{self.url}/v1/chat/completions",
            json=body | more,
            headers={HEADER: key} if key is not None else {},
            timeout=60,
            stream=bool(more.get("stream")),
        )

    def seat(self, request_id: str) -> tuple[int, int]:
        """Which node answered a request, and which of its ranks."""
        [seat] = [
            (number, ranks[request_id])
            for number, ranks in enumerate(node.ranks() for node in self.nodes)
            if request_id in ranks
        ]
        return seat

    def turn(self, key: str | None, text: str) -> tuple[int, int]:
        """One request that must not fail: its node and rank."""
        response = self.chat(key, text)
        assert response.status_code == 200, response.text
        return self.seat(response.json()["id"])


@contextlib.contextmanager
def gateway(nodes: Sequence[Node], *flags: str) -> Iterator[Gateway]:
    """A gateway that knows every node."""
    port, prometheus = free_port(), free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(prometheus), "--log-level", "warn"]
    command += ["--disable-retries", "--disable-circuit-breaker", "--policy", "manual", *flags]
    command += ["--worker-urls", *(node.server.base_url for node in nodes)]
    with running(command) as process:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: _workers(process, url) == len(nodes), READY_SECONDS)
        yield Gateway(nodes, url)


def _workers(process: Running, url: str) -> int:
    assert process.process.poll() is None, process.log()
    with contextlib.suppress(requests.ConnectionError):
        response = requests.get(f"{url}/workers", timeout=10)
        return sum(each["is_healthy"] for each in response.json()["workers"])
    return 0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    with contextlib.ExitStack() as stack:
        found = [Node(tmp_path_factory.mktemp(f"node{number}")) for number in range(2)]
        for node in found:
            stack.callback(node.sidecar.stop)
            node.sidecar.start()
            stack.enter_context(node.server)
        for node in found:
            node.server.wait_ready(READY_SECONDS)
        yield found


@pytest.fixture(scope="module")
def fleet(nodes: list[Node]) -> Iterator[Gateway]:
    """The gateway keeps a session on one server; the rank is for the sidecar to say."""
    with gateway(nodes) as before:
        yield before


@pytest.fixture(scope="module")
def sessions(fleet: Gateway) -> dict[str, tuple[int, int]]:
    """Sessions on every node, each with the node and rank of its first turn."""
    seats: dict[str, tuple[int, int]] = {}
    # The gateway draws the server of a new key.
    for key in (f"session-{number}" for number in range(64)):
        seats[key] = fleet.turn(key, LONG)
        nodes = [node for node, _ in seats.values()]
        if all(nodes.count(node) >= SESSIONS_EACH for node in (0, 1)):
            return seats
    raise AssertionError(f"the gateway leaves a server out: {seats}")


def test_the_key_passes_and_each_sidecar_decides_with_it(fleet, sessions):
    for turn in range(1, TURNS):
        for key, seat in sessions.items():
            assert fleet.turn(key, LONG * (turn + 1)) == seat, "a session moved"
    assert {key: rank for key, (_, rank) in sessions.items()} == {
        key: home(key) for key in sessions
    }
    for number, node in enumerate(fleet.nodes):
        mine = sum(seat[0] == number for seat in sessions.values())
        assert node.hits() == {"routing_key": mine * TURNS}
        assert node.status()["decisions"] == {"prefix_affinity": {"affinity_hit": mine * TURNS}}
        assert not node.status()["bypassed"]


def test_a_streamed_answer_too(fleet, sessions):
    key, seat = next(iter(sessions.items()))
    with fleet.chat(key, LONG, stream=True) as response:
        lines = [line for line in response.iter_lines() if line.startswith(b"data: {")]
    assert len(lines) >= 2
    assert fleet.seat(requests.models.complexjson.loads(lines[0][6:])["id"]) == seat


def test_on_generate_the_key_gets_lost_and_the_prompt_decides(fleet):
    """The gateway drops the JSON field, and there SGLang does not read the header."""
    before = [node.hits().get("routing_key", 0) for node in fleet.nodes]
    body = {"text": LONG, "routing_key": "k", "sampling_params": {"max_new_tokens": 2}}
    response = requests.post(f"{fleet.url}/generate", json=body, headers={HEADER: "k"}, timeout=60)
    assert response.status_code == 200, response.text
    assert [node.hits().get("routing_key", 0) for node in fleet.nodes] == before
    assert sum(node.hits().get("token_prefix", 0) for node in fleet.nodes) == 1


def test_dp_aware_decides_the_rank_itself_and_the_hook_stands_back(nodes):
    """It asks how many ranks there are, and SGLang 0.5.23 says 1 under DP attention."""
    before = [node.hits() for node in nodes]
    with gateway(nodes, "--dp-aware") as aware:
        seats = [aware.turn(f"aware-{number}", LONG) for number in range(8)]
    assert {rank for _, rank in seats} == {0}
    assert [node.hits() for node in nodes] == before, "a sidecar was asked"
    for number, node in enumerate(nodes):
        # What the hook left alone travels with the next query.
        body = {"text": LONG, "routing_key": "k", "sampling_params": {"max_new_tokens": 1}}
        requests.post(f"{node.server.base_url}/generate", json=body, timeout=60).raise_for_status()
        assert node.status()["abstained"].get("pinned", 0) == [at for at, _ in seats].count(number)


def test_a_killed_sidecar_fails_nothing_and_moves_no_session(fleet, sessions):
    gone, alive = fleet.nodes
    gone.sidecar.kill()
    answered = alive.status()["queries"]
    for turn, (key, seat) in itertools.product(range(TURNS), sessions.items()):
        assert fleet.turn(key, LONG * (turn + 2)) == seat
    for number in range(8):
        fleet.turn(f"new-{number}", LONG)
        fleet.turn(None, f"{number} {LONG}")
    mine = sum(node == 1 for node, _ in sessions.values())
    assert alive.status()["queries"] >= answered + mine * TURNS
    assert not alive.status()["bypassed"]
