"""The hook's REQ socket against real and scripted sidecars. Cases 2, 24, 25, 28."""

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser, Dispatch
from sidecar import wire
from sidecar.wire import Query, Refusal, Reply, Want
from tests.processes import (
    FOREIGN_GREETING,
    FOREIGN_TEXT,
    NOBODY,
    PATIENCE,
    Clock,
    Spy,
    in_fork,
    running,
    short_directory,
    sidecar_process,
    wait_for,
)
from tests.support import keyed, query

ALONE = {"unreachable", "deadline", "breaker_open"}
LONG_MS = 3000  # for answers that do come
SHORT_MS = 20  # for those that do not
INTERVAL = 5.0


def encoded(seq: int) -> bytes:
    return wire.encode(query([keyed("k")], seq=seq))


def reply(seq: int, **changes: object) -> Reply:
    fields = {"boot": 1, "policy": "scripted", "policy_version": 1, "ranks": [2]}
    fields |= {"reasons": ["affinity_hit"], "want": Want(prefix_tokens=9)}
    return Reply(wire.VERSION, seq, **(fields | changes))


class Hook:
    """A SidecarClient, its clock and what it heard; every query has a number of its own."""

    def __init__(self, endpoint: str, deadline_ms: int = LONG_MS, misses: int = 1) -> None:
        self.clock = Clock()
        self.heard: list[Reply] = []
        self.seq = 0
        self.client = SidecarClient(
            endpoint, deadline_ms, misses, INTERVAL, self.probe, clock=self.clock
        )
        self.client.heard = self.heard.append

    def probe(self) -> bytes:
        self.seq += 1
        return wire.encode(query(seq=self.seq))

    def ask(self) -> Reply | str:
        """Ask; a reply must be that of this very query."""
        self.seq += 1
        seq = self.seq
        answer = self.client.ask(encoded(seq), seq)
        if isinstance(answer, Reply):
            assert answer.seq == seq
            assert len(answer.ranks) == 1
        else:
            assert isinstance(answer, str)
        return answer

    def meet(self, timeout: float = PATIENCE) -> None:
        """Ask until the sidecar answers."""
        wait_for(self.answered, timeout)

    def answered(self) -> bool:
        self.clock.now += INTERVAL
        return isinstance(self.ask(), Reply)

    def spy(self) -> Spy:
        """Watch the socket from now on."""
        spy = Spy(self.client._peer.socket())
        self.client._peer._socket = spy
        return spy


@contextlib.contextmanager
def hooked(endpoint: str, **settings: int) -> Iterator[Hook]:
    hook = Hook(endpoint, **settings)
    try:
        yield hook
    finally:
        hook.client.close()


Script = Callable[[Query], "list[bytes] | None"]


def well_behaved(asked: Query) -> list[bytes]:
    return [wire.encode(reply(asked.seq))]


class Scripted:
    """A ROUTER in a thread: answers each query with what `script` makes of it, None: not at all."""

    def __init__(self, endpoint: str) -> None:
        self.script: Script = well_behaved
        self.queries: list[Query] = []
        self.envelopes: list[list[bytes]] = []
        self._late: queue.Queue[list[bytes]] = queue.Queue()
        self._done = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(endpoint,))

    def __enter__(self) -> "Scripted":
        self._thread.start()
        assert self._bound.wait(PATIENCE)
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def answer_late(self, number: int) -> None:
        """Answer the query of that number now."""
        self._late.put([*self.envelopes[number], *well_behaved(self.queries[number])])

    def _run(self, endpoint: str) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(endpoint)
            self._bound.set()
            while not self._done.is_set():
                with contextlib.suppress(queue.Empty):
                    router.send_multipart(self._late.get_nowait())
                if router.poll(2):
                    *envelope, payload = router.recv_multipart()
                    asked = wire.decode_query(payload)
                    answer = self.script(asked)
                    self.envelopes.append(envelope)
                    self.queries.append(asked)
                    if answer is not None:
                        router.send_multipart([*envelope, *answer])


def silent(asked: Query) -> None:
    return None


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def endpoint(directory: Path) -> str:
    return f"ipc://{directory}/q"


# ---- answers


def test_a_real_sidecar_answers(endpoint: str) -> None:
    with sidecar_process(endpoint, "--policy=prefix_affinity"), hooked(endpoint) as hook:
        hook.meet()
        answers = [hook.ask() for _ in range(50)]
        assert all(isinstance(answer, Reply) for answer in answers)
        assert {answer.policy for answer in answers} == {"prefix_affinity"}
        assert hook.heard[-1] == answers[-1]
        assert not hook.client.open


def test_what_the_policy_wants_is_heard_from_the_probe(endpoint: str) -> None:
    with sidecar_process(endpoint, "--policy=prefix_affinity"), hooked(endpoint) as hook:
        wait_for(lambda: hook.client.greet(50) or not hook.client.open)
        (heard,) = hook.heard
        assert heard.want == Want(prefix_tokens=4096)
        assert heard.ranks == []


def test_greeting_nobody(endpoint: str) -> None:
    with hooked(endpoint) as hook:
        hook.client.greet(10)
        assert hook.client.open
        assert hook.ask() == "unreachable"


def test_no_sidecar_at_all(endpoint: str, directory: Path) -> None:
    for address in (endpoint, f"ipc://{directory}/missing/q"):
        with hooked(address) as hook:
            spy = hook.spy()
            answers = set()
            for _ in range(50):
                hook.clock.now += INTERVAL / 3
                answers.add(hook.ask())
            assert answers == {"unreachable"}
            assert (spy.waits, spy.sends) == (0, 0)


AS_NOBODY = f"""
import os, sys, time
from sglang_hook.client import SidecarClient
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
client = SidecarClient(sys.argv[1], 100, 1, 0.001, lambda: b"probe")
for seq in range(20):
    print("answer:", client.ask(b"query", seq), flush=True)
    client.greet(10)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_case_28_a_directory_of_somebody_else(endpoint: str, directory: Path) -> None:
    directory.chmod(0o700)
    command = [sys.executable, "-c", AS_NOBODY, endpoint]
    with Scripted(endpoint), running(command) as process:
        assert process.wait() == 0, process.log()
        assert process.log().splitlines() == ["answer: unreachable"] * 20


def wrong(answer: "Reply | Refusal | bytes") -> Script:
    payload = answer if isinstance(answer, bytes) else wire.encode(answer)
    return lambda asked: [payload]


WRONG: dict[str, tuple[Script, str]] = {
    "empty": (wrong(b""), "malformed"),
    "garbage": (wrong(b"\xc1\xff garbage" * 100), "malformed"),
    "not msgpack": (wrong(b"HTTP/1.1 200 OK\r\n\r\n"), "malformed"),
    "nil": (wrong(b"\xc0"), "malformed"),
    "a query": (wrong(encoded(1)), "malformed"),
    "truncated": (lambda asked: [wire.encode(reply(asked.seq))[:-2]], "malformed"),
    "trailing": (lambda asked: [wire.encode(reply(asked.seq)) + b"\0"], "malformed"),
    "utf8": (
        lambda asked: [wire.encode(reply(asked.seq)).replace(b"scripted", b"\xff" * 8)],
        "malformed",
    ),
    "a rank as text": (lambda asked: [wire.encode(reply(asked.seq, ranks=["2"]))], "malformed"),
    "unknown version": (
        lambda asked: [wire.encode(Reply(2, *reply_fields(asked.seq)))],
        "version",
    ),
    "an older seq": (lambda asked: [wire.encode(reply(asked.seq - 1))], "mismatched"),
    "a later seq": (lambda asked: [wire.encode(reply(asked.seq + 1))], "mismatched"),
    "a refusal": (
        lambda asked: [wire.encode(Refusal(1, asked.seq, "older_controller", "no"))],
        "refused",
    ),
    "a refusal of nothing": (wrong(Refusal(1, 0, "malformed", "what?")), "refused"),
}


def reply_fields(seq: int) -> list[object]:
    whole = reply(seq)
    return [getattr(whole, name) for name in whole.__struct_fields__[1:]]


@pytest.mark.parametrize("name", WRONG)
def test_case_2_a_wrong_answer_is_a_cause(endpoint: str, name: str) -> None:
    script, cause = WRONG[name]
    with Scripted(endpoint) as router, hooked(endpoint) as hook:
        hook.meet()
        heard = len(hook.heard)
        router.script = script
        assert [hook.ask() for _ in range(3)] == [cause] * 3
        assert len(hook.heard) == heard
        router.script = well_behaved
        assert isinstance(hook.ask(), Reply)


@pytest.mark.parametrize("name", WRONG)
def test_case_2_a_wrong_answer_to_a_probe(endpoint: str, name: str) -> None:
    script, cause = WRONG[name]
    with Scripted(endpoint) as router, hooked(endpoint) as hook:
        router.script = script
        wait_for(lambda: hook.client.greet(50) or router.queries)

        def answer() -> str | Reply:
            hook.clock.now += INTERVAL
            return hook.ask()

        wait_for(lambda: answer() == cause)
        router.script = well_behaved
        hook.meet()


def test_case_2_an_answer_in_two_frames(endpoint: str) -> None:
    with Scripted(endpoint) as router, hooked(endpoint) as hook:
        hook.meet()
        router.script = lambda asked: [wire.encode(reply(asked.seq)), b"more", b""]
        for _ in range(3):
            assert isinstance(hook.ask(), Reply | str)
        router.script = well_behaved
        assert isinstance(hook.ask(), Reply)


def test_case_2_an_answer_over_the_bound(endpoint: str) -> None:
    with Scripted(endpoint) as router, hooked(endpoint, deadline_ms=500) as hook:
        hook.meet()
        router.script = wrong(b"\x01" * (wire.MAX_MESSAGE_BYTES + 1))
        assert hook.ask() in ALONE
        router.script = well_behaved
        hook.meet(5)


@pytest.mark.parametrize("said", [FOREIGN_TEXT, FOREIGN_GREETING], ids=["text", "greeting"])
def test_case_2_a_stranger_at_the_address(endpoint: str, directory: Path, said: bytes) -> None:
    """It goes, the sidecar comes, and the hook, which cannot be restarted, meets it."""
    with hooked(endpoint, deadline_ms=500) as hook:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.bind(str(directory / "q"))
            stranger.listen()
            stranger.settimeout(PATIENCE)
            assert hook.ask() == "unreachable"
            with stranger.accept()[0] as connection:
                connection.settimeout(PATIENCE)
                connection.sendall(said)
                while connection.recv(4096):
                    pass
            hook.clock.now += INTERVAL
            assert hook.ask() in ALONE
        (directory / "q").unlink()
        with sidecar_process(endpoint):
            hook.meet(5)


# ---- silence


def test_case_24_a_stopped_sidecar(endpoint: str) -> None:
    with sidecar_process(endpoint) as sidecar, hooked(endpoint, deadline_ms=500) as hook:
        hook.meet()
        sidecar.freeze()
        spy = hook.spy()
        assert hook.ask() == "deadline"
        assert (spy.sends, spy.waits) == (1, 1)
        # From here on nobody waits, and nothing is sent before it is time to probe.
        assert {hook.ask() for _ in range(50)} == {"breaker_open"}
        assert (spy.sends, spy.waits) == (1, 1)
        for probes in range(1, 6):
            hook.clock.now += INTERVAL
            assert {hook.ask() for _ in range(10)} == {"breaker_open"}
            assert (spy.sends, spy.waits) == (1 + probes, 1)
        sidecar.signal(signal.SIGCONT)
        hook.meet()
        assert all(isinstance(hook.ask(), Reply) for _ in range(50))


def test_case_24_the_late_answer_closes_the_breaker(endpoint: str) -> None:
    with sidecar_process(endpoint) as sidecar, hooked(endpoint, deadline_ms=500) as hook:
        hook.meet()
        sidecar.freeze()
        assert hook.ask() == "deadline"
        late = hook.seq
        sidecar.signal(signal.SIGCONT)
        # The clock stands still: no probe can have been sent.
        answer = wait_for(lambda: isinstance(hook.ask(), Reply))
        assert answer
        assert [heard.seq for heard in hook.heard][-2:] == [late, hook.seq]


def test_case_24_late_answers_are_never_taken_for_another(endpoint: str) -> None:
    with Scripted(endpoint) as router, hooked(endpoint, deadline_ms=SHORT_MS) as hook:
        hook.meet()
        router.script = silent
        first = len(router.queries)
        assert hook.ask() == "deadline"
        for _ in range(3):
            hook.clock.now += INTERVAL
            assert hook.ask() == "breaker_open"
        wait_for(lambda: len(router.queries) == first + 4)
        connected, heard = hook.client._peer.socket(), len(hook.heard)
        for number in (first + 1, first, first + 2):
            router.answer_late(number)
            wait_for(lambda: connected.poll(1))
            # Answers to what was given up are no news; the last probe's is.
            assert hook.ask() in {"breaker_open", "unreachable"}
            assert hook.client.open
            assert len(hook.heard) == heard
        router.script = well_behaved
        router.answer_late(first + 3)
        wait_for(lambda: isinstance(hook.ask(), Reply))


def test_an_answer_to_what_was_given_up_is_not_nobody(endpoint: str) -> None:
    """Somebody answers, if late: the cause is not `unreachable`."""
    with Scripted(endpoint) as router, hooked(endpoint, deadline_ms=SHORT_MS) as hook:
        hook.meet()
        router.script = silent
        number = len(router.queries)
        assert hook.ask() == "deadline"
        hook.clock.now += INTERVAL
        assert hook.ask() == "breaker_open"
        wait_for(lambda: len(router.queries) == number + 2)
        router.answer_late(number)
        connected = hook.client._peer.socket()
        for _ in range(200):
            connected.poll(1)
            assert hook.ask() == "breaker_open"


@pytest.mark.parametrize("misses", [1, 3])
def test_misses_in_a_row_open_the_breaker(endpoint: str, misses: int) -> None:
    with Scripted(endpoint) as router:
        hook_settings = {"deadline_ms": 200, "misses": misses}
        with hooked(endpoint, **hook_settings) as hook:
            hook.meet()
            for _ in range(2):
                router.script = silent
                answers = [hook.ask() for _ in range(misses - 1)]
                assert answers == ["deadline"] * (misses - 1)
                assert not hook.client.open
                router.script = well_behaved
                assert isinstance(hook.ask(), Reply)
            router.script = silent
            assert [hook.ask() for _ in range(misses)] == ["deadline"] * misses
            assert hook.client.open
            assert {hook.ask() for _ in range(10)} == {"breaker_open"}


def test_probes_carry_everything_at_most_one_an_interval(endpoint: str) -> None:
    with Scripted(endpoint) as router, hooked(endpoint, deadline_ms=200) as hook:
        chooser = Chooser("i", 5, {"hook": "1"}, lambda: [0, 1, 2], 100, clock=hook.clock)
        chooser.ask = hook.client.ask
        hook.client.probe, hook.client.heard = chooser.probe, chooser.heard
        nothing = Dispatch("k", [1, 2], (None, None, None))

        def met() -> bool:
            before = sum(chooser.bypassed.values())
            hook.clock.now += INTERVAL
            chooser.choose([nothing])
            return sum(chooser.bypassed.values()) == before

        wait_for(met)
        assert chooser.want == Want(prefix_tokens=9)
        chooser.abstain("pinned")
        router.script = silent
        chooser.sent.count(1, 2)
        chooser.choose([nothing])
        assert chooser.bypassed["deadline"] == 1
        wait_for(lambda: router.queries[-1].requests)
        known = len(router.queries)
        waited = chooser.bypassed["breaker_open"]
        steps = 4 * int(INTERVAL)
        for _ in range(steps):
            hook.clock.now += 1.0
            chooser.choose([nothing] * 3)
        wait_for(lambda: len(router.queries) == known + 4)
        probes = router.queries[known:]
        assert chooser.bypassed["breaker_open"] == waited + 3 * steps
        for asked in probes:
            assert asked.requests == []
            assert asked.about == {"hook": "1"}
            assert asked.abstained == {"pinned": 1}
            assert asked.sent == [0, 1, 0]
            assert asked.bypassed["deadline"] == 1
        told = [asked.bypassed["breaker_open"] for asked in probes]
        # Three requests a step; a probe tells what was counted before it.
        assert [later - told[0] for later in told] == [0, 15, 30, 45]


# ---- kill and restart


def test_case_25_kill_9_and_restart(endpoint: str) -> None:
    with hooked(endpoint, deadline_ms=500) as hook:
        for _ in range(3):
            seen: set[str] = set()

            def silence(seen: set[str] = seen) -> bool:
                hook.clock.now += INTERVAL
                answer = hook.ask()
                assert isinstance(answer, str)
                seen.add(answer)
                return answer == "unreachable"

            wait_for(silence)
            assert seen <= ALONE
            with sidecar_process(endpoint) as sidecar:
                hook.meet()
                assert all(isinstance(hook.ask(), Reply) for _ in range(10))
                boot = hook.heard[-1].boot
                sidecar.kill()
            # What it had said before it died may still be under way, but nothing is new.
            assert {heard.boot for heard in hook.heard[-10:]} == {boot}


def test_a_query_under_way_when_the_sidecar_dies(endpoint: str) -> None:
    with sidecar_process(endpoint) as sidecar, hooked(endpoint, deadline_ms=500) as hook:
        hook.meet()
        sidecar.freeze()
        assert hook.ask() == "deadline"
        sidecar.kill()
        with sidecar_process(endpoint):
            hook.meet()
            assert all(isinstance(hook.ask(), Reply) for _ in range(20))


def test_close_and_ask_again(endpoint: str) -> None:
    with sidecar_process(endpoint), hooked(endpoint) as hook:
        hook.meet()
        context = hook.client._peer.socket().context
        hook.client.close()
        hook.client.close()
        assert context.closed
        hook.meet()


# ---- fork


def test_a_forked_child_has_a_socket_of_its_own(endpoint: str) -> None:
    with sidecar_process(endpoint), hooked(endpoint) as hook:
        hook.meet()
        inherited = hook.client._peer._socket

        def child() -> str:
            wait_for(hook.answered)
            assert all(isinstance(hook.ask(), Reply) for _ in range(20))
            assert hook.client._peer._socket is not inherited
            hook.client.close()
            return "answered"

        assert in_fork(child) == "answered"
        assert hook.client._peer._socket is inherited
        assert all(isinstance(hook.ask(), Reply) for _ in range(20))
        assert in_fork(lambda: hook.client.close() or "closed") == "closed"
        assert all(isinstance(hook.ask(), Reply) for _ in range(20))
