"""More of the cases: every policy and every kind of input, where other tests have one."""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.replace import RANKS, Traffic, moved
from sglang_hook import settings
from sglang_hook.controller import Chooser, Dispatch
from sidecar import wire
from sidecar.errors import EndpointError
from sidecar.hashing import key_hash, preferred
from tests.processes import (
    NOBODY,
    running,
    short_directory,
    sidecar_process,
    wait_for,
)
from tests.support import (
    STALE_SECONDS,
    Server,
    key_preferring,
    keyed,
    keyless,
    load_up,
    make_dispatcher,
    query,
)
from tests.test_dispatcher import POLICIES

AFFINE = ["prefix_affinity", "kv_affinity"]
NO_PLACE = (None, None, None)


@pytest.mark.parametrize("name", AFFINE)
@pytest.mark.parametrize("home", range(8))
def test_case_3_a_little_more_load_moves_no_session(name: str, home: int) -> None:
    dispatcher = make_dispatcher(name)
    loads = [3] * 8
    loads[(home + 1) % 8], loads[home] = 4, 6
    load_up(dispatcher, loads)
    facts = keyed(key_preferring(home, range(8)))
    facts.last_rank, facts.last_age_ms = home, 1000
    assert dispatcher.handle(query([facts]), 0.0).ranks == [home]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("tokens", [0, 100, 5000])
@pytest.mark.parametrize(
    ("requests", "reports", "most"),
    [(50, "zero", 7), (16, "before", 3), (64, "none", 9)],
    ids=["4: reports stay at zero", "5: between two reports", "7: before any report"],
)
def test_cases_4_5_7_no_rank_gets_more(
    name: str, tokens: int, requests: int, reports: str, most: int
) -> None:
    dispatcher, server, counts = make_dispatcher(name), Server(), Counter()
    if reports == "before":
        server.finish(dispatcher, 0.0)
    for step in range(requests):
        now = 0.002 * (step + 1)
        counts.update(server.ask(dispatcher, [keyless(tokens)], now).ranks)
        for rank in range(8) if reports == "zero" else ():
            dispatcher.report(server.report(rank), now)
    assert sum(counts.values()) == requests
    assert max(counts.values()) <= most
    if reports == "zero":
        assert min(counts[rank] for rank in range(8)) >= 6


@pytest.mark.parametrize("name", POLICIES)
def test_case_9_aborted_requests_leave_nothing(name: str) -> None:
    """Some before their rank took them in, some while they waited, some while they ran."""
    dispatcher, server = make_dispatcher(name), Server()
    for step in range(1000):
        now = 0.001 * step
        server.ask(dispatcher, [keyed(f"key-{step % 50}") if step % 2 else keyless()], now)
        if step % 3 == 0:
            for rank, scheduler in enumerate(server.schedulers):
                scheduler.take_in()  # SGLang takes in what it then finds aborted
                dispatcher.report(server.report(rank), now)
    server.finish(dispatcher, 1.0)
    [instance] = dispatcher.budget.instances.values()
    assert [state.in_flight() for state in instance.states.values()] == [(0, 0)] * 8
    dispatcher.handle(query(sent=server.sent, sent_tokens=server.sent_tokens), 1.0)
    assert instance.view.requests == instance.view.tokens == [0] * 8


@pytest.mark.parametrize("name", POLICIES)
def test_case_12_all_stale_is_never_a_refusal(name: str) -> None:
    dispatcher, server = make_dispatcher(name), Server()
    load_up(dispatcher, [3] * 8)
    now = 10 * STALE_SECONDS
    keys = [f"key-{number}" for number in range(50)]
    for _ in range(2):
        reply = server.ask(dispatcher, [*map(keyed, keys), *[keyless()] * 160], now)
        assert set(reply.ranks[50:]) == set(range(8))
        now += 0.01
    if name == "prefix_affinity":
        assert reply.ranks[:50] == [preferred(key_hash(key.encode()), range(8)) for key in keys]


@pytest.mark.parametrize("name", POLICIES)
def test_case_17_blank_keys_of_every_kind_spread(name: str) -> None:
    dispatcher, server = make_dispatcher(name), Server()
    blanks = [b"", b"   ", b"\t\r\n", "\u3000".encode(), "\xa0\u2003".encode()]
    counts = Counter()
    for number in range(800):
        reply = server.ask(dispatcher, [keyed(blanks[number % 5])], 0.001 * number)
        counts.update(reply.ranks)
    assert max(counts.values()) <= 110
    assert min(counts[rank] for rank in range(8)) >= 90


ODD = [
    *("\ud800", "\udfff", "a\udc80b", "\ud83d", "\0", "a\0b", "🦊", "👩‍👩‍👧", "\u202eabc"),
    *("e\u0301", "\ufeffk", " k ", "\x7f", "\n", "k" * 1024, "k" * 1025, "k" * 2**20),
    *("🦊" * 2**18, "\ud800" * 2**18, "\0" * 2**20),
]


class Wired:
    """A chooser and a dispatcher, with the wire between them."""

    def __init__(self, policy: str) -> None:
        self.dispatcher = make_dispatcher(policy)
        self.chooser = Chooser("i", 1, {}, lambda: list(range(8)), 1000)
        self.silent = False
        self.chooser.ask = self._ask

    def _ask(self, payload: bytes, seq: int) -> wire.Reply | str:
        if self.silent:
            return "deadline"
        answer = self.dispatcher.handle(wire.decode_query(payload), 0.0)
        reply = wire.decode_answer(wire.encode(answer))
        assert isinstance(reply, wire.Reply)
        self.chooser.heard(reply)
        return reply

    def rank(self, key: str) -> int | None:
        return self.chooser.choose_one(Dispatch(key, [1, 2, 3], NO_PLACE))


def is_stable(policy: str, key: str) -> None:
    """One rank for a key, with the sidecar, without it, and with another one; none if blank."""
    wired = Wired(policy)
    first = wired.rank(key)
    assert first in range(8)
    if key.strip():
        wired.silent = True
        assert wired.rank(key) == first
        wired.silent, wired.dispatcher = False, make_dispatcher(policy)
        assert wired.rank(key) == first
        if policy == "prefix_affinity":
            other = Wired(policy)
            other.silent = True  # decided alone from the start
            assert other.rank(key) == first
    assert not set(wired.chooser.bypassed) - {"deadline"}


@pytest.mark.parametrize("policy", AFFINE)
@pytest.mark.parametrize("key", ODD, ids=ascii)
def test_case_19_an_odd_key_has_one_rank(policy: str, key: str) -> None:
    is_stable(policy, key)


@given(st.sampled_from(AFFINE), st.text(st.characters(codec=None), max_size=30))
@example("kv_affinity", "\ud800\udc00")
def test_case_19_any_key_has_one_rank(policy: str, key: str) -> None:
    is_stable(policy, key)


@pytest.mark.parametrize("policy", AFFINE)
def test_case_25_killed_in_mid_query_no_session_moves(policy: str) -> None:
    with short_directory() as path:
        endpoint = f"ipc://{path}/q"
        flags = (f"--policy={policy}", "--admin-port=0")
        traffic = Traffic(endpoint)
        try:

            def serve(requests: int) -> None:
                for _ in range(requests):
                    traffic.request()
                    traffic.report()

            def remote() -> bool:
                serve(1)
                return traffic.decisions[-1].boot is not None

            boots = set()
            for _ in range(2):
                with sidecar_process(endpoint, *flags) as sidecar:
                    wait_for(remote)
                    serve(200)
                    boots.add(traffic.boot)
                    sidecar.freeze()
                    wait_for(lambda: not remote())  # this query is under way when it is killed
                    sidecar.kill()
                serve(200)
            assert len(boots) == 2
            assert moved(traffic.decisions) == 0
            assert {decision.rank for decision in traffic.decisions} == set(range(RANKS))
        finally:
            traffic.close()


LONGEST = wire.MAX_IPC_PATH_BYTES - len(".reports")


@pytest.mark.parametrize("letter", ["x", "ü", "🦊"])
@pytest.mark.parametrize("over", [1, 9, 400])
def test_case_27_the_hook_counts_bytes(letter: str, over: int) -> None:
    size = len(letter.encode())
    fits = "/" + letter * ((LONGEST - 1) // size)
    assert settings.load({"DP_SIDECAR_ENDPOINT": f"ipc://{fits}"}).endpoint == f"ipc://{fits}"
    path = "/" + letter * ((LONGEST - 1 + over + size - 1) // size)
    with pytest.raises(EndpointError) as caught:
        settings.load({"DP_SIDECAR_ENDPOINT": f"ipc://{path}"})
    assert f"{len(path.encode())} bytes" in str(caught.value)
    assert str(LONGEST) in str(caught.value)


AS_NOBODY = f"""
import os, sys
from sglang_hook.client import SidecarClient
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
client = SidecarClient(sys.argv[1], 100, 1, 0.001, lambda: b"probe")
client.greet(10)
print(client.standing())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_case_28_the_log_line_says_why(tmp_path: Path) -> None:
    with short_directory() as directory:
        directory.chmod(0o700)
        with sidecar_process(f"ipc://{directory}/q", "--admin-port=0") as sidecar:
            command = [sys.executable, "-c", AS_NOBODY, sidecar.endpoint]
            with running(command) as process:
                assert process.wait(60) == 0, process.log()
                assert process.log() == " (out of reach: Permission denied)\n"
