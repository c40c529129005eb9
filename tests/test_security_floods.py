"""More than a peer should send: messages without end, connections, nonsense at full speed."""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from sidecar import ceiling, wire
from sidecar.ceiling import Ceiling
from tests.processes import (
    Asker,
    Sidecar,
    clean_env,
    short_directory,
    sidecar_process,
    wait_for,
)
from tests.support import keyed, query, report
from tests.test_server import connected
from tests.zmtp import Pourer, frame, raw_peer

MIB = 1 << 20
GROWTH = 48 * MIB
"""In place of `Ceiling.growth`, so that the tests need not send half a gigabyte."""
PATCH = f"""
from sidecar.ceiling import Ceiling
Ceiling.growth = {GROWTH}
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def sidecar(directory: Path) -> Iterator[Sidecar]:
    """One that lets peers take little."""
    (directory / "sitecustomize.py").write_text(PATCH)
    endpoint, env = (
        f"ipc://{directory}/q",
        clean_env(PYTHONPATH=f"{directory}:{os.environ.get('PYTHONPATH', '')}"),
    )
    with sidecar_process(endpoint, env=env) as process:
        yield process
        assert process.stop() == 0, process.log()


def memory(sidecar: Sidecar) -> int:
    return psutil.Process(sidecar.pid).memory_info().rss


def answers(sidecar: Sidecar) -> bool:
    with Asker(sidecar.endpoint) as asker:
        asker.send(wire.encode(query([keyed("k")])))
        return asker.receive(2.0) is not None


def over(raw: socket.socket) -> bool:
    """Whether the other end ends the connection; AssertionError where it does not."""
    with contextlib.suppress(ConnectionResetError):
        while raw.recv(4096):
            pass
    return True


def poured(sidecar: Sidecar, suffix: str, kind: bytes, piece: bytes) -> int:
    """Send pieces of one message until we are thrown out; bytes that went."""
    sent = 0
    with raw_peer(f"{sidecar.path}{suffix}", kind) as raw, contextlib.suppress(OSError):
        while sent < 40 * GROWTH:
            raw.sendall(piece)
            sent += len(piece)
    return sent


@pytest.mark.parametrize(
    ("suffix", "kind", "size"),
    [("", b"DEALER", 1), (".reports", b"PUSH", 4096)],
    ids=["queries", "reports"],
)
def test_a_message_without_end_is_cut_off(
    sidecar: Sidecar, suffix: str, kind: bytes, size: int
) -> None:
    before = memory(sidecar)
    piece = frame(b"x" * size, more=True) * (MIB // size // 4)
    for _ in range(2):
        assert poured(sidecar, suffix, kind, piece) < 40 * GROWTH
        wait_for(lambda: answers(sidecar), 60)
    assert sidecar.metric("socket_resets_total", cause="memory") >= 2
    assert memory(sidecar) - before < 8 * GROWTH, "what was freed is used again"
    assert len(sidecar.lines("WARNING", "too much memory taken")) == 1, "one line in 10 s"


def test_hooks_connect_again_and_nothing_is_forgotten(sidecar: Sidecar) -> None:
    with Asker(sidecar.endpoint) as asker, Asker(sidecar.endpoint + ".reports", zmq.PUSH) as push:
        push.send(wire.encode(report(2, seq=1, running=7)))
        version = asker.query([keyed("k")]).boot
        poured(sidecar, "", b"DEALER", frame(b"x" * 4096, more=True) * 64)
        wait_for(lambda: sidecar.metric("socket_resets_total", cause="memory"), 60)

        def answered() -> bool:
            asker.send(wire.encode(query([keyed("k")])))
            told = asker.receive(0.5)
            return told is not None and wire.decode_answer(told[-1]).boot == version

        wait_for(answered, 60)
        assert sidecar.metric("running_requests", dp_rank="2") == 7
        push.send(wire.encode(report(2, seq=2, running=8)))
        wait_for(lambda: sidecar.metric("running_requests", dp_rank="2") == 8)


def test_a_load_without_end_is_cut_off_too(directory: Path) -> None:
    """That of a publisher, to which the sidecar connects itself."""
    piece = frame(b"load" + bytes(4000), more=True) * 64
    (directory / "sitecustomize.py").write_text(PATCH)
    config = directory / "sidecar.toml"
    config.write_text(f'[published.endpoints]\n"i" = "ipc://{directory}/p"\n')
    path = f"{directory}:{os.environ.get('PYTHONPATH', '')}"
    with (
        Pourer(directory / "p", b"PUB", piece, 40 * GROWTH) as hostile,
        sidecar_process(
            f"ipc://{directory}/q", config=config, env=clean_env(PYTHONPATH=path)
        ) as sidecar,
    ):
        assert hostile.blocked.wait(60)
        assert hostile.sent < 40 * GROWTH
        assert sidecar.metric("socket_resets_total", cause="memory") >= 1
        wait_for(lambda: answers(sidecar), 60)
        assert sidecar.stop() == 0


def test_connections_without_end_are_dropped(sidecar: Sidecar) -> None:
    resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE, (400, 400))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):  # all are dropped
            for _ in range(300):
                raw = stack.enter_context(socket.socket(socket.AF_UNIX))
                raw.settimeout(0)
                wait_for(lambda raw=raw: connected(raw, str(sidecar.path)), 60)
        wait_for(lambda: sidecar.metric("socket_resets_total", cause="descriptors"), 60)
        wait_for(lambda: answers(sidecar), 60)
        assert psutil.Process(sidecar.pid).num_fds() < 200


def test_nonsense_at_full_speed_is_counted_and_told_in_few_lines(directory: Path) -> None:
    endpoint = f"ipc://{directory}/q"
    with (
        sidecar_process(endpoint) as sidecar,
        Asker(endpoint) as asker,
        socket.socket(socket.AF_UNIX) as silent,
    ):
        silent.connect(str(sidecar.path))
        good = wire.encode(report(1))
        bad = [good[:n] for n in range(1, len(good))] + [b"\xc1" * 100, good + b"x"]
        with Asker(endpoint + ".reports", zmq.PUSH, SNDHWM=0) as push:
            for _ in range(50):
                for payload in bad:
                    push.send(payload)
            refused = 50 * len(bad)
            wait_for(
                lambda: sidecar.metric("rejected_messages_total", socket="report") == refused, 60
            )
        assert asker.query([keyed("k")]).ranks
        assert len(sidecar.lines("WARNING")) < 20
        assert sidecar.metric("load_reports_total") == 0
        silent.settimeout(60)
        assert over(silent), "who never greets is let go"


# ---- the ceiling alone


def test_what_reaches_the_ceiling() -> None:
    used, open_files = [100], [10]
    made = Ceiling(lambda: used[0], lambda: open_files[0])
    made.growth = 50
    assert made.reached() == ""
    used[0] = 150
    assert made.reached() == ""
    used[0] = 151
    assert made.reached() == ceiling.MEMORY
    made.settle()
    assert made.reached() == "", "what is still there is ours"
    used[0] = 202
    assert made.reached() == ceiling.MEMORY
    open_files[0] = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 + 1
    assert made.reached() == ceiling.DESCRIPTORS
    assert Ceiling(lambda: 0, lambda: open_files[0], ours=2).reached() == ""


def test_sockets_that_cannot_be_made_anew_end_the_process(directory: Path) -> None:
    """Who keeps it running starts another, which tells what is in its way."""
    flood = directory / "flood"
    patch = f"""
import os
from sidecar.ceiling import Ceiling
Ceiling.reached = lambda self: "memory" if os.path.exists({str(flood)!r}) else ""
"""
    (directory / "sitecustomize.py").write_text(patch)
    env = clean_env(PYTHONPATH=f"{directory}:{os.environ.get('PYTHONPATH', '')}")
    with sidecar_process(f"ipc://{directory}/q", env=env) as sidecar:
        lock = directory / "q.lock"
        lock.unlink()
        lock.mkdir()
        flood.touch()
        assert sidecar.wait() == 69
        assert sidecar.lines("ERROR", "the sockets cannot be made anew", "Is a directory")
        assert "Traceback" not in sidecar.log()


def test_what_a_process_takes() -> None:
    assert ceiling.resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    before = ceiling.lowest_free()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(open("/dev/null", "rb"))
        assert ceiling.lowest_free() >= 20
        assert ceiling.lowest_free() > before
    assert ceiling.lowest_free() == before


def test_out_of_descriptors_counts_as_all_of_them() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling.lowest_free(), hard))
    try:
        assert Ceiling().reached() == ceiling.DESCRIPTORS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
