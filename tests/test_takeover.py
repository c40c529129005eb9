"""A sidecar process takes the place of another: who asks, who lets go, who serves if one dies."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar import __version__, takeover, wire
from sidecar.control import Control
from sidecar.errors import ConfigError, EndpointError
from sidecar.files import Lock
from sidecar.takeover import Handover
from tests.processes import (
    Asker,
    free_port,
    gone,
    running,
    short_directory,
    sidecar_process,
    wait_for,
)
from tests.support import keyed, query

HELD = 69
TAKE = "--take-over"


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def endpoint(directory: Path) -> str:
    return f"ipc://{directory}/q"


def holder(directory: Path) -> int:
    """Process id in the lock file."""
    return int((directory / "q.lock").read_text() or 0)


def answered(endpoint: str) -> bool:
    """Whether a query is answered; one that meets the change of processes is lost, so ask again."""

    def once() -> bool:
        with Asker(endpoint) as asker:
            asker.send(wire.encode(query([keyed("k")])))
            return asker.receive(0.5) is not None

    return bool(wait_for(once))


def end(pid: int) -> None:
    """End a successor, which is no child of ours."""
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: gone(pid))


# ---- by hand


def test_the_newer_serves_and_the_older_ends_with_a_line_that_names_it(
    endpoint: str, directory: Path
) -> None:
    port = f"--admin-port={free_port()}"
    with sidecar_process(endpoint, port) as old, Asker(endpoint) as asker:
        assert len(asker.query([keyed("a")]).ranks) == 1
        with sidecar_process(endpoint, port, TAKE, ready=False) as new:
            assert old.wait() == 0
            (line,) = old.lines("handed over")
            assert f"pid {new.pid} version {__version__}" in line
            assert not old.lines("stopped")
            assert new.lines("took over from", f"pid {old.pid} version {__version__}")
            assert asker.query([keyed("a")]).policy == "kv_affinity", "the client's own socket"
            wait_for(lambda: new.lines("http on"))
            assert new.http("/readyz")[0] == 200
            assert Control(f"{directory}/q.control").show().version == 1
            assert holder(directory) == new.pid
            assert not old.lines("WARNING")
            assert not new.lines("WARNING")
            assert new.stop() == 0
    assert {path.name for path in directory.iterdir()} == {"q.lock", "q.control.lock"}


def test_with_nobody_there_it_serves_as_usual(endpoint: str) -> None:
    with sidecar_process(endpoint, TAKE) as sidecar:
        assert answered(endpoint)
        assert not sidecar.lines("took over")
        assert sidecar.stop() == 0
        assert sidecar.lines("stopped")


def test_after_a_crash_it_serves_as_usual(endpoint: str) -> None:
    with sidecar_process(endpoint) as old:
        old.kill()
        with sidecar_process(endpoint, TAKE) as new:
            assert answered(endpoint)
            assert not new.lines("WARNING")


def test_a_newer_one_that_cannot_be_configured_asks_for_nothing(
    endpoint: str, directory: Path
) -> None:
    bad = directory / "bad.toml"
    bad.write_text('[policy]\nname = "best"\n')
    with sidecar_process(endpoint) as old:
        with sidecar_process(endpoint, TAKE, config=bad, ready=False) as new:
            assert new.wait() == 2
            assert "best" in new.log()
        assert answered(endpoint)
        assert not old.lines("hand")


def test_tcp_by_the_port(directory: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    free_port()  # the next one is for the load reports
    flags = ("--allow-insecure-tcp=true", f"--control={directory}/c")
    with sidecar_process(endpoint, *flags) as old:
        with sidecar_process(endpoint, flags[0], TAKE, ready=False) as none:
            assert none.wait() == HELD
            assert none.lines("cannot serve", "--control")
        with sidecar_process(endpoint, *flags, TAKE) as new:
            assert old.wait() == 0
            assert old.lines(f"handed over to pid {new.pid}")
            assert answered(endpoint)
            assert new.stop() == 0


def test_an_older_one_that_does_not_answer_keeps_its_place(endpoint: str) -> None:
    with sidecar_process(endpoint) as old:
        old.freeze()
        with sidecar_process(endpoint, TAKE, ready=False) as new:
            assert new.wait(30) == HELD
            assert new.lines("cannot serve", "does not hand over", "no answer within", "stop it")
        old.signal(signal.SIGCONT)
        # Whoever asked is gone.
        assert answered(endpoint)
        assert not old.lines("handed over")
        assert old.stop() == 0


def order(**changes: object) -> bytes:
    return json.dumps({"pid": os.getpid(), "version": "9", "patience": 0.2, **changes}).encode()


def test_a_successor_that_never_comes(endpoint: str, directory: Path) -> None:
    """It lives, and takes nothing: after its patience the older one serves on, as before."""
    with sidecar_process(endpoint, "--policy=round_robin") as old, Asker(endpoint) as asker:
        assert asker.query([keyed("a")]).ranks == [0]
        control = Control(f"{directory}/q.control")
        assert json.loads(control.hand_over(order()))["pid"] == old.pid
        wait_for(lambda: old.lines("did not take over; this process serves on"))
        wait_for(lambda: len(old.lines("control on")) == 2)
        assert asker.query([keyed("a")]).ranks == [1], "its memory is what it was"
        assert control.show().version == 1
        assert old.stop() == 0
        assert old.lines("stopped")


ASKS_AND_DIES = """
import sys
from sidecar.control import Control
Control(sys.argv[1]).hand_over(sys.argv[2].encode())
"""


def test_a_successor_that_dies_before_it_serves(endpoint: str, directory: Path) -> None:
    """Nobody waits for its patience to end: its death is seen."""
    path = f"{directory}/q.control"
    with sidecar_process(endpoint) as old:
        asks = [sys.executable, "-c", ASKS_AND_DIES, path, order(patience=300).decode()]
        with running(asks) as successor:
            assert successor.wait() == 0, successor.log()
            wait_for(lambda: old.lines(f"pid {successor.pid} version 9 did not take over"))
        assert answered(endpoint)
        wait_for(lambda: len(old.lines("http on")) == 2)
        assert old.http("/readyz")[0] == 200
        with sidecar_process(endpoint, TAKE, ready=False) as next_one:
            assert old.wait() == 0
            assert old.lines(f"handed over to pid {next_one.pid}")
            assert answered(endpoint)


def test_sigterm_while_waiting_for_the_successor(endpoint: str, directory: Path) -> None:
    with sidecar_process(endpoint) as old:
        Control(f"{directory}/q.control").hand_over(order(patience=300))
        wait_for(lambda: Lock(str(directory / "q")).free())
        assert old.stop() == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", ["handover"]),
        (b"nonsense", ["handover"]),
        (order(pid=0), ["pid", "1"]),
        (order(patience=0), ["patience", "0"]),
        (order(patience=301), ["patience", "300"]),
        (order(version=9), ["version", "str"]),
        (b"[" * 5000, ["handover"]),
    ],
)
def test_a_bad_order_is_refused(
    endpoint: str, directory: Path, body: bytes, words: list[str]
) -> None:
    stops: list[None] = []
    handover = Handover(endpoint, lambda: stops.append(None))
    with pytest.raises(ConfigError) as caught:
        handover.accept(body, (os.getpid(), os.geteuid()))
    assert not [word for word in words if word not in str(caught.value)]
    assert (stops, handover.successor) == ([], None)


def test_a_field_of_a_newer_version_is_no_reason_to_refuse(endpoint: str) -> None:
    stops: list[None] = []
    handover = Handover(endpoint, lambda: stops.append(None))
    answer = json.loads(handover.accept(order(unheard_of=1), (4711, os.geteuid())))
    assert answer == {"pid": os.getpid(), "version": __version__}
    assert (len(stops), handover.main_pid) == (1, 4711)
    with pytest.raises(ConfigError, match="pid 4711 version 9 is taking over already"):
        handover.accept(order(), (1, os.geteuid()))


def test_another_user_may_not_ask(endpoint: str) -> None:
    handover = Handover(endpoint, lambda: None)
    with pytest.raises(ConfigError, match="user 65534 may not ask"):
        handover.accept(order(), (os.getpid(), 65534))
    assert handover.successor is None


def test_two_at_a_time(endpoint: str) -> None:
    """One of two successors takes over; the other one is told, or takes over from that one."""
    with (
        sidecar_process(endpoint) as old,
        sidecar_process(endpoint, TAKE, ready=False) as one,
        sidecar_process(endpoint, TAKE, ready=False) as two,
    ):
        assert old.wait() == 0
        assert answered(endpoint)
        # Who comes second waits for the lock as long as a hand-over may take.
        for new in (one, two):
            wait_for(lambda new=new: new.lines("ready:") or new.process.poll() is not None, 60)
        codes = [one.process.poll(), two.process.poll()]
        if None in codes and codes != [None, None]:
            codes.remove(None)
            assert codes[0] in (0, HELD)
        else:  # the first of them is handing over right now
            wait_for(lambda: 0 in (one.process.poll(), two.process.poll()), 60)


def test_a_sidecar_that_knows_no_hand_over(
    endpoint: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Lock(str(directory / "q"))
    lock.acquire()
    try:
        with sidecar_process(endpoint, TAKE, ready=False) as new:
            assert new.wait() == HELD
            assert new.lines("cannot serve", "no sidecar listens there", "without --take-over")
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("endpoint", "listens"),
    [("tcp://*:{}", True), ("tcp://0.0.0.0:{}", True), ("tcp://127.0.0.1:{}", True)],
)
def test_who_listens_at_a_tcp_address(endpoint: str, listens: bool) -> None:
    port = free_port()
    assert not takeover.listening(endpoint.format(port))
    with socket.create_server(("127.0.0.1", port)):
        assert takeover.listening(endpoint.format(port)) == listens


def test_a_claim_without_a_control_socket() -> None:
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(EndpointError, match="--control"),
    ):
        asyncio.run(takeover.claim(f"tcp://127.0.0.1:{port}", "", 1.0, lambda: False))


def test_one_that_is_still_starting_is_waited_for(endpoint: str, directory: Path) -> None:
    """It holds the lock and does not listen yet; here it ends instead, which is as good."""
    lock = Lock(str(directory / "q"))

    async def claim() -> None:
        lock.acquire()
        claiming = asyncio.create_task(takeover.claim(endpoint, "", 1.0, lambda: False))
        await asyncio.sleep(0)  # it has asked, and nobody listened
        assert not claiming.done()
        lock.release()
        await claiming

    try:
        asyncio.run(claim())
    finally:
        lock.release()
