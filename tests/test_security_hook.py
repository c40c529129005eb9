"""A hostile process where the sidecar should be: what it can make SGLang's processes do."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_hook.client import MAX_ANSWER_BYTES, SEND_QUEUE, SidecarClient
from sglang_hook.controller import Chooser, Dispatch
from sglang_hook.memory import HISTORY_ENTRIES, HISTORY_HASHES
from sglang_hook.reporter import Reporter, Sample
from sidecar import wire
from sidecar.wire import MAX_BATCH, Reply, Want
from tests.processes import short_directory, wait_for
from tests.test_client import Scripted, hooked, reply
from tests.zmtp import Pourer, frame

MIB = 1 << 20
LIVE = [0, 1, 2, 3]
GREEDY = Want(1 << 20, True, 1, wire.MAX_BLOCKS, 0, 1 << 20)
"""All that can be wanted."""


@pytest.fixture
def path() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory / "q"


def test_answers_that_nobody_asked_for_are_not_taken(path: Path) -> None:
    """As many as queries may wait: the rest stays with whoever sends it."""
    answer = frame(bytes(4), more=True) + frame(b"", more=True) + frame(bytes(MAX_ANSWER_BYTES))
    client = SidecarClient(f"ipc://{path}", 20, 1, 0.001, lambda: b"probe")
    with contextlib.closing(client), Pourer(path, b"ROUTER", answer, 400 * MIB) as hostile:
        client.greet(0)
        assert hostile.blocked.wait(60)
        assert MIB < hostile.sent < (SEND_QUEUE + 4) * MAX_ANSWER_BYTES
        assert client.ask(b"query", 1) in ("malformed", "deadline", "breaker_open", "unreachable")


def test_a_report_socket_takes_nothing(path: Path) -> None:
    reporter = Reporter(f"ipc://{path}", "i", 0, 0.005, 0.25)
    with contextlib.closing(reporter), Pourer(path, b"PULL", frame(bytes(4000)), 64 * MIB) as pull:
        wait_for(lambda: reporter.push(1, Sample(1, 1, 1)))
        assert pull.blocked.wait(60)
        assert pull.sent < 2 * MIB, "what is under way between two processes"


def test_the_largest_sound_answer_fits() -> None:
    largest = Reply(1, 1 << 62, 1 << 62, "p" * 64, 1 << 62, [65535] * MAX_BATCH, [], GREEDY)
    largest.reasons = ["r" * 64] * MAX_BATCH
    assert len(wire.encode(largest)) < MAX_ANSWER_BYTES


def test_a_sidecar_that_wants_everything_gets_a_bounded_memory(path: Path) -> None:
    tokens = list(range(5000))
    with Scripted(f"ipc://{path}") as router, hooked(f"ipc://{path}") as hook:
        chooser = Chooser("i", 1, {}, lambda: LIVE, 100)
        chooser.ask, hook.client.probe = hook.client.ask, chooser.probe
        hook.client.heard = chooser.heard
        router.script = lambda asked: [
            wire.encode(reply(asked.seq, ranks=[3] * len(asked.requests), want=GREEDY))
        ]
        hook.meet()
        for number in range(300):
            chooser.choose_one(Dispatch(f"key-{number}", [number, *tokens], (None, None, None)))
    assert len(chooser.last_ranks) <= 100
    assert len(chooser.history) <= HISTORY_ENTRIES
    assert chooser.history.hashes <= HISTORY_HASHES
    assert max(len(q.requests[0].block_hashes) for q in router.queries if q.requests) == (
        wire.MAX_BLOCKS
    )


def test_its_ranks_are_live_ones_or_nobodys(path: Path) -> None:
    """It can choose among live ranks: that is all that an answer decides."""
    with Scripted(f"ipc://{path}") as router, hooked(f"ipc://{path}") as hook:
        chooser = Chooser("i", 1, {}, lambda: LIVE, 100)
        chooser.ask, hook.client.heard = hook.client.ask, chooser.heard
        hook.client.probe = chooser.probe
        hook.meet()
        for rank in (-1, 4, 1 << 62, -(1 << 62), 3):
            router.script = lambda asked, rank=rank: [wire.encode(reply(asked.seq, ranks=[rank]))]
            hook.clock.now += 5.0
            chosen = chooser.choose_one(Dispatch(None, [1], (None, None, None)))
            assert chosen == (3 if rank == 3 else None)
