"""A real SGLang server with simulated ranks, hooked to a real sidecar process.

The installed release has DP attention and loads plugins in the controller; the old one, put before
it with PYTHONPATH, has plain DP and loads none there. LIVE_SHAPE=plain or attention changes that.
"""

import contextlib
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import requests

pytest.importorskip("sglang")

from bench.client import read_journal
from bench.demo import Sidecar
from bench.simulated.launch import SimulatedServer

OLD = tuple(map(int, version("sglang").split(".")[:3])) < (0, 5, 22)
PLAIN = os.environ.get("LIVE_SHAPE", "plain" if OLD else "attention") == "plain"
PLAIN_DP = ["--plain-dp"] if PLAIN else []
RANKS = 2 if OLD or PLAIN else 4
READY_SECONDS = 900
"""On a machine with two cores that much else runs on; 30 otherwise."""


def eventually(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Poll until the condition is truthy; return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never: {condition}"
        time.sleep(0.02)
    return value


class Live:
    """The server, its sidecar, and how to ask them."""

    size = RANKS

    def __init__(self, server: SimulatedServer, sidecar: Sidecar, journal: Path) -> None:
        self.server, self.sidecar, self.journal = server, sidecar, journal

    def chat(self, key: str | None, text: str, **more: Any) -> requests.Response:
        headers = {"x-smg-routing-key": key} if key is not None else {}
        body = {
            "model": "simulated",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 2,
            "return_meta_info": True,
        }
        return requests.post(
            f"{self.server.base_url}/v1/chat/completions",
            json=body | more,
            headers=headers,
            timeout=60,
            stream=bool(more.get("stream")),
        )

    def rank_of(self, response: requests.Response) -> int:
        """The rank that answered a chat completion."""
        assert response.status_code == 200, response.text
        return self.ranks()[response.json()["id"]]

    def ranks(self) -> dict[str, int]:
        return read_journal(self.journal)

    def generate(self, **body: Any) -> requests.Response:
        body = {"sampling_params": {"max_new_tokens": 2}} | body
        return requests.post(f"{self.server.base_url}/generate", json=body, timeout=60)

    def status(self) -> dict[str, Any]:
        return self.sidecar.status() or {}

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.sidecar.port}/metrics") as body:
            return str(body.read().decode())

    def settle(self) -> bool:
        """Wait until every rank has received all it was sent and holds nothing."""
        # `sent` travels with queries: one more tells what explicit ranks and the like added.
        self.rank_of(self.chat("settle", "x"))
        return bool(eventually(self._idle, 60))

    def _idle(self) -> bool:
        ranks = self.status().get("ranks", [])
        return len(ranks) == self.size and all(
            rank["sent"] == rank["received"]
            and rank["in_flight"] == rank["running"] == rank["waiting"] == 0
            for rank in ranks
        )


@contextlib.contextmanager
def serving(folder: Path, ranks: int, *args: str, **env: str) -> Iterator[Live]:
    """A sidecar and a server that is ready; without the hook: DP_SIDECAR_ENDPOINT=""."""
    journal = folder / "journal"
    # Its ranks follow from the keys alone, so tests can tell them beforehand.
    sidecar = Sidecar(folder, "prefix_affinity")
    sidecar.start()
    env = {
        "DP_SIDECAR_ENDPOINT": sidecar.endpoint,
        # A busy test machine must not look like a slow sidecar.
        "DP_SIDECAR_DEADLINE_MS": "1000",
        "SIMULATED_JOURNAL": str(journal),
    } | env
    args = ("--log-level", "info", *args)
    log = folder / "server.log"
    try:
        with SimulatedServer(dp_size=ranks, env=env, args=args, log_path=log) as server:
            server.wait_ready(READY_SECONDS)
            yield Live(server, sidecar, journal)
    finally:
        sidecar.stop()


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("live"), RANKS, *PLAIN_DP) as found:
        yield found
