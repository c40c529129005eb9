"""What a release of SGLang must do at least, for `make test-matrix`: one server of each shape."""

import signal
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import requests

from .conftest import RANKS, eventually
from .test_live import LONG, home

SALTS = 16
"""A deal of as many prompts among ranks leaves one of two out once in 30,000 times."""


def test_plugin_loads(live):
    """In the controller, once; in every scheduler: their reports come; in no other process."""
    assert live.rank_of(live.chat("first", "hello")) == home("first")
    log = live.server.log_path.read_text()
    assert log.count("attached to the controller") == 1
    assert "dp_sidecar: not attached" not in log
    assert live.status()["about"]["sglang"] == version("sglang")
    pids = live.server.pids()
    assert (len(pids["controller"]), len(pids["schedulers"])) == (1, RANKS)
    ages = [rank["report_age_seconds"] for rank in live.status()["ranks"]]
    assert len(ages) == RANKS
    assert None not in ages


def test_dispatch(live):
    bypassed = live.status()["bypassed"]
    assert live.rank_of(live.chat("one", "hello", priority=1)) == home("one")
    before = set(live.ranks())
    assert live.generate(text=["a b", "c d", "e f"], routing_key="batch").status_code == 200
    assert {rank for rid, rank in live.ranks().items() if rid not in before} == {home("batch")}
    before = set(live.ranks())
    assert len(live.chat("samples", LONG, n=3).json()["choices"]) == 3
    assert {rank for rid, rank in live.ranks().items() if rid not in before} == {home("samples")}
    for rank in range(RANKS):
        assert live.rank_of(live.chat("pinned", "hello", routed_dp_rank=rank)) == rank
    assert requests.get(f"{live.server.base_url}/health_generate", timeout=60).status_code == 200
    assert live.status()["bypassed"] == bypassed  # the server may have been through other tests


def test_prompts_without_a_key(live):
    """One goes where it was; a salt that separates caches separates them here too."""

    def place(salt):
        return live.rank_of(live.chat(None, LONG, cache_salt=salt))

    def bypassed():
        live.chat("tells of the request before", "x")
        return sum(live.status()["bypassed"].values())

    before = bypassed()
    first = [place(f"salt-{number}") for number in range(SALTS)]
    again = [place(f"salt-{number}") for number in range(SALTS)]
    # One that the sidecar was too slow for is SGLang's to place.
    moved = sum(one != two for one, two in zip(first, again, strict=True))
    assert moved <= bypassed() - before
    assert len(set(first)) > 1


def test_a_session_stays(live):
    """Its state lives in one scheduler."""
    before = set(live.ranks())
    for turn in range(4):
        answer = live.generate(text=f"turn {turn}", session_params={"id": "abc"})
        assert answer.status_code == 200
    placed = [rank for rid, rank in live.ranks().items() if rid not in before]
    assert len(placed) == 4
    assert len(set(placed)) == 1


def test_reports(live):
    assert live.settle(), "all that was sent was received, and nothing is left"
    assert eventually(lambda: all(rank["capacity_tokens"] for rank in live.status()["ranks"]))


def test_faults(live):
    """Under requests all the time the sidecar is killed, started again, stopped and continued."""
    keys = [f"fault-{number}" for number in range(4)]
    answered, stop = [], []

    def chat_on(key):
        while not stop:
            assert live.rank_of(live.chat(key, LONG)) == home(key)
            answered.append(key)

    def more():
        """Wait until every session has had two more answers or so, or one has failed."""
        wanted = len(answered) + 2 * len(keys)
        assert eventually(lambda: len(answered) >= wanted or any(c.done() for c in chats), 60)

    with ThreadPoolExecutor(len(keys)) as pool:
        chats = [pool.submit(chat_on, key) for key in keys]
        try:
            more()
            live.sidecar.kill()
            more()
            live.sidecar.start()
            assert eventually(lambda: live.status().get("decisions"), 60)
            live.sidecar.process.send_signal(signal.SIGSTOP)
            more()
            live.sidecar.process.send_signal(signal.SIGCONT)
            more()
        finally:
            stop.append(True)
            live.sidecar.process.send_signal(signal.SIGCONT)
        for chat in chats:
            chat.result(60)
    assert set(live.status()["bypassed"]) <= {"unreachable", "deadline", "breaker_open", "session"}
    assert live.settle()
    assert requests.get(f"{live.server.base_url}/health", timeout=60).status_code == 200
