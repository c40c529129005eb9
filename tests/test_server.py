"""The sidecar as a process: start, stop, reload, bad input. Cases 26, 27, 30, 31, 33-35."""

import contextlib
import json
import os
import pickle
import random
import re
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from sidecar import wire
from sidecar.wire import Refusal, Reply
from tests.processes import (
    NOBODY,
    PATIENCE,
    Asker,
    Sidecar,
    clean_env,
    gone,
    running,
    short_directory,
    sidecar_process,
    wait_for,
)
from tests.support import INSTANCE, keyed, keyless, query, report

SECRET = "SECRET-routing-key"
UNAVAILABLE = 69


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def endpoint(directory: Path) -> str:
    return f"ipc://{directory}/q"


@pytest.fixture(scope="module")
def served() -> Iterator[Sidecar]:
    """One sidecar for all the tests that must not be able to harm it."""
    with short_directory() as path, sidecar_process(f"ipc://{path}/q") as sidecar:
        yield sidecar
        assert sidecar.stop() == 0


def refused_to_start(endpoint: str, *flags: str, **popen: object) -> str:
    """Log of a sidecar that must not start."""
    with sidecar_process(endpoint, *flags, ready=False, **popen) as sidecar:
        assert sidecar.wait() == UNAVAILABLE, sidecar.log()
        log = sidecar.log()
    assert "Traceback" not in log
    assert "cannot serve" in log
    return log


def answers(sidecar: Sidecar, **changes: object) -> bool:
    with Asker(sidecar.endpoint) as asker:
        return isinstance(asker.query([keyed("k")], **changes), Reply)


# ---- start and watch


def test_a_query_is_answered_and_shown(endpoint: str) -> None:
    with sidecar_process(endpoint, "--policy=prefix_affinity") as sidecar:
        with Asker(endpoint) as asker, Asker(endpoint + ".reports", zmq.PUSH) as push:
            push.send(wire.encode(report(3, running=2, waiting=1)))
            wait_for(lambda: sidecar.metric("load_reports_total") == 1)
            reply = asker.query([keyed("a"), keyed("a"), keyless()], seq=7, about={"hook": "9"})
        assert isinstance(reply, Reply)
        assert (reply.seq, reply.policy, reply.policy_version) == (7, "prefix_affinity", 1)
        assert reply.ranks[0] == reply.ranks[1]
        assert reply.reasons == ["affinity_hit", "affinity_hit", "fallback"]
        assert sidecar.metric("decisions_total", instance=INSTANCE, reason="affinity_hit") == 2
        assert sidecar.metric("affinity_hits_total", instance=INSTANCE, key="routing_key") == 2
        assert sidecar.metric("load_requests", instance=INSTANCE, dp_rank="3") >= 3
        assert sidecar.metric("instance_info", hook_version="9") == 1
        assert sidecar.metric("query_seconds_count") == 1
        assert sidecar.http("/healthz") == (200, "ok\n")
        assert sidecar.http("/readyz") == (200, "ready\n")
        assert sidecar.http("/no-such-page")[0] == 404
        code, text = sidecar.http("/status")
        status = json.loads(text)
        assert (code, status["policy"], status["policy_version"]) == (200, "prefix_affinity", 1)
        (instance,) = status["instances"]
        assert (instance["instance"], instance["queries"]) == (INSTANCE, 1)
        assert [r["rank"] for r in instance["ranks"]] == list(range(8))
        assert instance["ranks"][3]["running"] == 2
        assert sidecar.lines("ready:", f"pid {sidecar.pid}", endpoint)
        assert not sidecar.lines("WARNING")


def test_flags_environment_and_file(endpoint: str, directory: Path) -> None:
    config = directory / "c.toml"
    config.write_text('[policy]\nname = "round_robin"\n[log]\nformat = "json"\n')
    env = clean_env(DP_SIDECAR_POLICY="total_requests", DP_SIDECAR_LOG_FORMAT="text")
    with sidecar_process(endpoint, "--log-format=json", config=config, env=env) as sidecar:
        with Asker(endpoint) as asker:
            assert asker.query([keyed("a")]).policy == "total_requests"
        assert sidecar.stop() == 0
        events = [json.loads(line) for line in sidecar.log().splitlines()]
    assert [event["event"].split(":")[0] for event in events] == [
        "ready",
        f"control on {directory}/q.control",
        "http on 127.0.0.1",
        "stopped",
    ]
    assert {event["level"] for event in events} == {"info"}


def test_admin_port_0_is_no_http(endpoint: str) -> None:
    with sidecar_process(endpoint, "--admin-port=0") as sidecar:
        listening = [
            c
            for c in psutil.Process(sidecar.pid).net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        ]
        assert not listening
        assert answers(sidecar)
        assert not sidecar.lines("WARNING", "HTTP")


def test_case_33_the_metrics_port_is_taken(endpoint: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with sidecar_process(endpoint, f"--admin-port={port}", ready=False) as sidecar:
            wait_for(lambda: sidecar.lines("ready:"))
            assert answers(sidecar)
            wait_for(lambda: sidecar.lines("WARNING"))
            assert len(sidecar.lines("WARNING")) == 1
            assert sidecar.lines("WARNING", f"127.0.0.1:{port}", "in use")
            assert sidecar.stop() == 0


@pytest.mark.parametrize("host", ["198.51.100.7", "x" * 70], ids=["not ours", "no name"])
def test_case_33_the_metrics_address_cannot_be_had(endpoint: str, host: str) -> None:
    flags = (f"--admin-host={host}", "--admin-port=19477")
    with sidecar_process(endpoint, *flags, ready=False) as sidecar:
        wait_for(lambda: sidecar.lines("ready:") or sidecar.process.poll() is not None)
        assert sidecar.process.poll() is None, sidecar.log()
        assert answers(sidecar)
        wait_for(lambda: sidecar.lines("WARNING"))
        assert len(sidecar.lines("WARNING")) == 1
        assert sidecar.lines("WARNING", host)


# ---- the address


def test_the_files_are_private(endpoint: str, directory: Path) -> None:
    endpoint = f"ipc://{directory}/new/deeper/q"
    with sidecar_process(endpoint) as sidecar:
        modes = {
            path.name: stat.S_IMODE(path.stat().st_mode) for path in sidecar.path.parent.iterdir()
        }
        names = ("q", "q.reports", "q.lock", "q.control", "q.control.lock")
        assert modes == dict.fromkeys(names, 0o600)
        assert stat.S_IMODE(sidecar.path.parent.stat().st_mode) == 0o700


def test_case_26_a_second_sidecar_refuses(endpoint: str) -> None:
    with sidecar_process(endpoint) as first, Asker(endpoint) as asker:
        asker.query([keyed("a")])
        log = refused_to_start(endpoint)
        assert f"pid {first.pid}" in log
        assert isinstance(asker.query([keyed("a")]), Reply)
        assert answers(first)
        assert first.metric("queries_total", instance=INSTANCE) == 3


def test_case_26_one_that_is_stopped_still_holds_the_address(endpoint: str) -> None:
    with sidecar_process(endpoint) as first:
        first.freeze()
        assert f"pid {first.pid}" in refused_to_start(endpoint)
        first.signal(signal.SIGCONT)
        assert answers(first)


def test_case_26_a_successor_takes_over_after_kill_9(endpoint: str) -> None:
    with Asker(endpoint, IMMEDIATE=1) as asker:
        for _ in range(3):
            with sidecar_process(endpoint) as sidecar:
                reply = wait_for(lambda: asker.query([keyed("a")]))
                assert isinstance(reply, Reply)
                sidecar.kill()
            assert sidecar.path.is_socket()


@pytest.mark.parametrize("name", ["q", "q.reports"])
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_case_26_what_is_not_a_socket_is_kept(directory: Path, name: str, kind: str) -> None:
    path, target = directory / name, directory / "target"
    target.write_text("precious")
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(target)
    before = path.lstat()
    log = refused_to_start(f"ipc://{directory}/q")
    assert str(path) in log
    assert "not a socket" in log
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert target.read_text() == "precious"
    assert kind != "file" or path.read_text() == "precious"


@pytest.mark.parametrize("size", [100, 108, 500])
def test_case_27_a_path_that_is_too_long(directory: Path, size: int) -> None:
    path = f"{directory}/".ljust(size, "x")
    log = refused_to_start(f"ipc://{path}")
    assert f"{size} bytes" in log
    assert "99" in log
    assert not list(directory.iterdir())


def test_the_longest_path_serves(directory: Path) -> None:
    with sidecar_process("ipc://" + f"{directory}/".ljust(99, "x")) as sidecar:
        assert answers(sidecar)


def test_a_tcp_address_needs_consent() -> None:
    assert "allow_insecure_tcp" in refused_to_start("tcp://127.0.0.1:19999")


AS_NOBODY = f"""
import os, shutil, sys
from sidecar import cli  # what is imported late must not need a Python that only root can read
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("below", [False, True])
def test_a_directory_of_somebody_else(directory: Path, below: bool) -> None:
    foreign = directory / "foreign"
    foreign.mkdir(mode=0o700)
    directory.chmod(0o755)
    endpoint = f"ipc://{foreign}/new/q" if below else f"ipc://{foreign}/q"
    with running([sys.executable, "-c", AS_NOBODY, "serve", f"--endpoint={endpoint}"]) as process:
        assert process.wait() == UNAVAILABLE, process.log()
        log = process.log()
    assert "Traceback" not in log
    assert "Permission denied" in log
    assert str(foreign) in log
    assert not list(foreign.iterdir())


def test_a_directory_that_is_a_file(directory: Path) -> None:
    (directory / "file").write_text("")
    assert f"{directory}/file" in refused_to_start(f"ipc://{directory}/file/q")


# ---- stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop(endpoint: str, directory: Path, number: int) -> None:
    with sidecar_process(endpoint) as sidecar:
        assert answers(sidecar)
        sidecar.signal(number)
        assert sidecar.wait() == 0
        assert sidecar.lines("stopped")
        assert not sidecar.lines("Traceback")


def test_stop_removes_the_socket_files(endpoint: str, directory: Path) -> None:
    with sidecar_process(endpoint) as sidecar:
        assert sidecar.stop() == 0
    assert {path.name for path in directory.iterdir()} <= {"q.lock", "q.control.lock"}


def test_a_failed_start_removes_the_socket_file(endpoint: str, directory: Path) -> None:
    (directory / "q.reports").write_text("precious")
    refused_to_start(endpoint)
    assert {path.name for path in directory.iterdir()} <= {"q.lock", "q.reports"}


def test_case_30_stop_with_unsent_answers_and_idle_connections(endpoint: str) -> None:
    with sidecar_process(endpoint) as sidecar, contextlib.ExitStack() as stack:
        asker = stack.enter_context(Asker(endpoint, zmq.DEALER, RCVHWM=1, SNDHWM=0, RCVBUF=4096))
        payload = wire.encode(query([keyless()] * 1000))
        for _ in range(200):
            asker.send(payload)
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", sidecar.port)))
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert idle.recv(100)
        assert sidecar.stop() == 0


def test_case_30_stop_is_bounded_however_large_the_batches(endpoint: str) -> None:
    flags = ("--drain-seconds=0",)
    with sidecar_process(endpoint, *flags) as sidecar, Asker(endpoint, zmq.DEALER) as asker:
        payload = wire.encode(query([keyless()] * wire.MAX_BATCH))
        for _ in range(600):
            asker.send(payload)
        assert asker.receive()
        sidecar.signal(signal.SIGTERM)
        assert sidecar.wait(5) == 0


def test_stop_while_queries_keep_coming(endpoint: str) -> None:
    done = threading.Event()

    def flood() -> None:
        with Asker(endpoint, zmq.DEALER, SNDHWM=100) as asker:
            payload = wire.encode(query([keyless()] * 10))
            while not done.is_set():
                with contextlib.suppress(zmq.Again):
                    asker.socket.send(payload, zmq.NOBLOCK)
                while asker.receive(0):
                    pass

    with sidecar_process(endpoint) as sidecar:
        thread = threading.Thread(target=flood)
        thread.start()
        try:
            wait_for(lambda: (sidecar.metric("queries_total") or 0) > 100)
            assert sidecar.stop() == 0
        finally:
            done.set()
            thread.join()


def test_case_35_sigterm_while_the_configuration_is_read(endpoint: str, directory: Path) -> None:
    config = directory / "c.toml"
    os.mkfifo(config)
    with sidecar_process(endpoint, config=config, ready=False) as sidecar:
        # A writer can open the FIFO only once the sidecar is reading it.
        def being_read() -> int:
            with contextlib.suppress(OSError):
                return os.open(config, os.O_WRONLY | os.O_NONBLOCK)
            return 0

        writer = wait_for(being_read)
        try:
            assert sidecar.stop() in (0, -signal.SIGTERM)
        finally:
            os.close(writer)


def test_case_35_sigterm_right_after_the_lock(endpoint: str, directory: Path) -> None:
    with sidecar_process(endpoint, ready=False) as sidecar:
        wait_for((directory / "q.lock").exists, pause=0.0005)
        assert sidecar.stop() == 0
        assert not sidecar.lines("Traceback")


HANGING = """
import asyncio, sys
from sidecar import admin, cli
async def start(self, *arguments):
    await asyncio.Event().wait()
admin.Admin.start = start
sys.exit(cli.main(sys.argv[1:]))
"""


def test_case_35_sigterm_while_http_does_not_come_up(endpoint: str, directory: Path) -> None:
    """As when a name server does not answer for admin.host."""
    command = [sys.executable, "-c", HANGING, "serve", f"--endpoint={endpoint}"]
    with running(command) as process:
        wait_for((directory / "q.reports").exists)
        with Asker(endpoint) as asker:
            asker.query([keyed("a")])
        assert process.lines("ready:"), "dispatch does not wait for HTTP"
        process.signal(signal.SIGTERM)
        assert process.wait(5) == 0


BROKEN = """
import sys
from sidecar import cli, dispatcher

def broken(self, query, now, handle=dispatcher.Dispatcher.handle):
    if query.requests and query.requests[0].routing_key == b"breaks":
        raise ZeroDivisionError("a bug")
    return handle(self, query, now)

dispatcher.Dispatcher.handle = broken
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_bug_of_ours_is_one_refusal_and_the_queries_behind_it_are_served(endpoint: str) -> None:
    command = [sys.executable, "-c", BROKEN, "serve", f"--endpoint={endpoint}", "--admin-port=0"]
    with running(command) as process:
        wait_for(lambda: process.lines("ready:"))
        with Asker(endpoint) as asker:
            for _ in range(3):
                assert asker.query([keyed("breaks")]).cause == "internal"
                assert len(asker.query([keyed("a")]).ranks) == 1
        assert len(process.lines("ZeroDivisionError")) == 1, "rate-limited"


# ---- reload


def write_policy(file: Path, name: str, **params: object) -> None:
    lines = [f"[policy]\nname = {json.dumps(name)}\n[policy.prefix_affinity]"]
    file.write_text("\n".join(lines + [f"{key} = {value}" for key, value in params.items()]))


class Reloading:
    """A sidecar and its file."""

    def __init__(self, sidecar: Sidecar, file: Path) -> None:
        self.sidecar, self.file = sidecar, file

    def hup(self) -> None:
        self.sidecar.signal(signal.SIGHUP)

    def version(self) -> float | None:
        return self.sidecar.metric("policy_version")

    def failures(self) -> float:
        return self.sidecar.metric("reload_failures_total") or 0


@pytest.fixture(scope="module")
def reloading() -> Iterator[Reloading]:
    with short_directory() as path:
        file = path / "c.toml"
        write_policy(file, "prefix_affinity")
        with sidecar_process(f"ipc://{path}/q", config=file) as sidecar:
            yield Reloading(sidecar, file)


def test_case_34_a_reload_swaps_the_policy(reloading: Reloading) -> None:
    sidecar, before = reloading.sidecar, reloading.version()
    write_policy(reloading.file, "round_robin")
    reloading.hup()
    wait_for(lambda: reloading.version() == before + 1)
    assert sidecar.metric("policy_info", policy="round_robin") == 1
    assert sidecar.metric("last_reload_successful") == 1
    with Asker(sidecar.endpoint) as asker:
        reply = asker.query([keyed("a")])
        assert (reply.policy, reply.policy_version) == ("round_robin", before + 1)
        write_policy(reloading.file, "prefix_affinity", hash_tokens=77)
        reloading.hup()
        wait_for(lambda: reloading.version() == before + 2)
        assert asker.query([keyless()]).want.prefix_tokens == 77


@pytest.mark.parametrize(
    "text",
    [
        b'[policy]\nname = "round_ro',
        b'[policy]\nname = "no_such_policy"\n',
        b'[policy]\nnmae = "round_robin"\n',
        b"[policy.prefix_affinity]\nmax_load_skew = 0.5\n",
        b"[policy.prefix_affinity]\nmax_load_skew = nan\n",
        b'[policy.prefix_affinity]\nhash_tokens = "many"\n',
        b'[log]\nlevel = "\xff\xfe"\n',
        b"\0" * 4096,
        None,
        b"a = " + b"[" * 5000,
        b"a = " + b"1" * 5000,
    ],
    ids=[
        "half-written",
        "unknown policy",
        "unknown key",
        "bound",
        "nan",
        "type",
        "utf8",
        "zeros",
        "missing",
        "nested",
        "digits",
    ],
)
def test_case_34_an_invalid_file_changes_nothing(reloading: Reloading, text: bytes | None) -> None:
    sidecar = reloading.sidecar
    version, failures = reloading.version(), reloading.failures()
    logged = len(sidecar.lines("ERROR", "reload refused", "prefix_affinity stays"))
    write_policy(reloading.file, "prefix_affinity")
    if text is None:
        reloading.file.unlink()
    else:
        reloading.file.write_bytes(text)
    reloading.hup()
    wait_for(lambda: reloading.failures() == failures + 1, 5)
    assert reloading.version() == version
    assert sidecar.metric("last_reload_successful") == 0
    assert json.loads(sidecar.http("/status")[1])["last_reload_ok"] is False
    wait_for(lambda: len(sidecar.lines("ERROR", "reload refused")) == logged + 1)
    assert answers(sidecar)
    write_policy(reloading.file, "prefix_affinity")
    reloading.hup()
    wait_for(lambda: sidecar.metric("last_reload_successful") == 1)
    assert reloading.version() == version + 1


def test_a_new_address_needs_a_restart(reloading: Reloading) -> None:
    version = reloading.version()
    reloading.file.write_text("[serve]\nmax_instances = 3\n")
    reloading.hup()
    wait_for(lambda: reloading.version() == version + 1)
    assert reloading.sidecar.lines("WARNING", "restart")
    assert answers(reloading.sidecar)


def test_case_34_swaps_lose_no_query(reloading: Reloading) -> None:
    done = threading.Event()
    seen: dict[str, list[tuple[str, int]]] = {"one": [], "two": []}

    def keep_asking(name: str) -> None:
        with Asker(reloading.sidecar.endpoint) as asker:
            while not done.is_set():
                reply = asker.query([keyed(name), keyless()], seq=len(seen[name]), instance=name)
                assert reply.seq == len(seen[name])
                assert len(reply.ranks) == 2
                seen[name].append((reply.policy, reply.policy_version))

    failed: list[BaseException] = []

    def guarded(name: str) -> None:
        try:
            keep_asking(name)
        except BaseException as error:  # noqa: BLE001 - asserted below
            failed.append(error)

    first = reloading.version()
    threads = [threading.Thread(target=guarded, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    policies = ["round_robin", "total_tokens", "total_requests", "prefix_affinity"] * 5
    try:
        for number, name in enumerate(policies, 1):
            write_policy(reloading.file, name)
            reloading.hup()
            # Each client meets each policy: the swap lies between two of its queries.
            wait_for(
                lambda expected=(name, first + number): (
                    failed or all(replies[-1:] == [expected] for replies in seen.values())
                )
            )
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failed
    for name, replies in seen.items():
        versions = [version for _, version in replies]
        assert versions == sorted(versions)
        assert len(set(versions)) >= len(policies)
        count = reloading.sidecar.metric("queries_total", instance=name)
        assert count == len(replies)


# ---- bad input

GOOD = wire.encode(query([keyed(SECRET)]))
GOOD_REPORT = wire.encode(report())


def altered(payload: bytes, place: int, value: object) -> bytes:
    """The message with another value at one place."""
    message = msgspec.msgpack.decode(payload)
    message[place] = value
    return msgspec.msgpack.encode(message)


BAD = {
    "pickle": (pickle.dumps({"key": SECRET, "n": [1] * 50}), "malformed"),
    "utf8": (GOOD.replace(b"host", b"\xff\xfe\xfd\xfc"), "utf8"),
    "trailing": (GOOD + SECRET.encode(), "malformed"),
    "truncated": (GOOD[:-3], "malformed"),
    "older version": (altered(GOOD, 1, 0), "version"),
    "newer version": (altered(GOOD, 1, 2), "version"),
    "newer version, other shape": (msgspec.msgpack.encode(["query", 9, SECRET, {}]), "version"),
    "unknown kind": (altered(GOOD, 0, "qwery"), "field"),
    "a report": (GOOD_REPORT, "field"),
    "a refusal": (wire.encode(Refusal(1, 1, "x", SECRET)), "field"),
    "empty": (b"", "malformed"),
    "nothing": (b"\xc0", "field"),
    "missing fields": (msgspec.msgpack.encode(["query", 1, 2]), "field"),
    "a wrong type": (altered(GOOD, 4, SECRET), "field"),
    "a negative count": (altered(GOOD, 6, [-1] * 8), "field"),
    "a short count": (altered(GOOD, 6, [0] * 7), "field"),
    "descending ranks": (altered(GOOD, 5, [7, 6, 5, 4, 3, 2, 1, 0]), "field"),
    "a rank twice": (altered(GOOD, 5, [0, 1, 2, 3, 4, 5, 6, 6]), "field"),
    "too many ranks": (wire.encode(query(ranks=range(1025))), "field"),
    "too large a batch": (wire.encode(query([keyless()] * 4097)), "field"),
    "too long a key": (wire.encode(query([keyed(SECRET.encode() * 100)])), "field"),
    "deep": (b"\x91" * 200_000, "malformed"),
    "no rank": (wire.encode(query([keyed(SECRET)], ranks=[])), "no_live_rank"),
    "noise": (b"\xc1" + random.Random(1).randbytes(1 << 20), "malformed"),
    "the largest message": (b"\xc1" * wire.MAX_MESSAGE_BYTES, "malformed"),
}
SHAPES = {"no delimiter": [], "delimiter": [b""], "many": [b"a", b"b", b""] + [b"x"] * 500}


@pytest.mark.parametrize("name", BAD)
def test_case_31_a_bad_query_is_refused_and_counted(served: Sidecar, name: str) -> None:
    payload, cause = BAD[name]
    labels = {"socket": "query", "cause": cause}
    before = served.metric("rejected_messages_total", **labels) or 0
    with Asker(served.endpoint) as asker:
        refusal = asker.ask(payload)
        assert isinstance(refusal, Refusal)
        assert refusal.cause == cause
        assert refusal.detail
        assert SECRET not in refusal.detail
        assert served.metric("rejected_messages_total", **labels) == before + 1
        assert isinstance(asker.query([keyed("k")]), Reply)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["good", "empty", "noise"])
def test_case_31_any_envelope(served: Sidecar, shape: str, name: str) -> None:
    payload = GOOD if name == "good" else BAD[name][0]
    with Asker(served.endpoint, zmq.DEALER) as asker:
        asker.send(*SHAPES[shape], payload)
        answer = asker.receive()
    assert answer is not None
    assert answer[:-1] == SHAPES[shape]
    kind = Reply if name == "good" else Refusal
    assert isinstance(wire.decode_answer(answer[-1]), kind)


BAD_REPORTS = {
    "pickle": (BAD["pickle"][0], "malformed"),
    "utf8": (GOOD_REPORT.replace(b"host", b"\xff\xfe\xfd\xfc"), "utf8"),
    "trailing": (GOOD_REPORT + SECRET.encode(), "malformed"),
    "truncated": (GOOD_REPORT[:-1], "malformed"),
    "version": (altered(GOOD_REPORT, 1, 2), "version"),
    "a query": (GOOD, "field"),
    "empty": (b"", "malformed"),
    "a negative count": (altered(GOOD_REPORT, 8, -1), "field"),
    "a wrong rank": (altered(GOOD_REPORT, 3, 1 << 16), "field"),
    "noise": BAD["noise"],
}


@pytest.mark.parametrize("name", BAD_REPORTS)
def test_case_31_a_bad_report_is_dropped_and_counted(served: Sidecar, name: str) -> None:
    payload, cause = BAD_REPORTS[name]
    labels = {"socket": "report", "cause": cause}
    before = served.metric("rejected_messages_total", **labels) or 0
    taken = served.metric("load_reports_total")
    with Asker(served.endpoint + ".reports", zmq.PUSH) as push:
        push.send(payload)
        push.send(wire.encode(report(instance=f"report {name}")))
        wait_for(lambda: served.metric("load_reports_total") == taken + 1)
    assert served.metric("rejected_messages_total", **labels) == before + 1


def test_an_old_report_is_dropped_and_counted(served: Sidecar) -> None:
    labels = {"socket": "report", "cause": "stale_report"}
    before = served.metric("rejected_messages_total", **labels) or 0
    with Asker(served.endpoint + ".reports", zmq.PUSH) as push:
        for seq in (5, 5, 4):
            push.send(wire.encode(report(seq=seq, instance="old reports")))
        wait_for(lambda: served.metric("rejected_messages_total", **labels) == before + 2)


@pytest.mark.parametrize("suffix", ["", ".reports"])
def test_a_message_over_the_bound_is_dropped(served: Sidecar, suffix: str) -> None:
    kind = zmq.PUSH if suffix else zmq.REQ
    with Asker(served.endpoint + suffix, kind) as asker:
        monitor = asker.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            asker.send(b"\x01" * (wire.MAX_MESSAGE_BYTES + 1))
            assert monitor.poll(PATIENCE * 1000), "neither answered nor dropped"
        finally:
            asker.socket.disable_monitor()
            monitor.close(0)
    assert answers(served)


@pytest.mark.parametrize("suffix", ["", ".reports"])
def test_bytes_that_are_not_zeromq(served: Sidecar, suffix: str) -> None:
    rng = random.Random(2)
    for size in (1, 10, 64, 4096):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(served.path) + suffix)
            with contextlib.suppress(OSError):
                raw.sendall(rng.randbytes(size))
    assert answers(served)


def connected(raw: socket.socket, path: str) -> bool:
    """Whether the listener had room for one more."""
    with contextlib.suppress(BlockingIOError):
        raw.connect(path)
        return True
    return False


def test_a_thousand_idle_connections(endpoint: str) -> None:
    with sidecar_process(endpoint) as sidecar, contextlib.ExitStack() as stack:
        for number in range(1000):
            raw = stack.enter_context(socket.socket(socket.AF_UNIX))
            raw.settimeout(0)
            path = str(sidecar.path) + ("" if number % 2 else ".reports")
            wait_for(lambda raw=raw, path=path: connected(raw, path))
        assert answers(sidecar)
        assert sidecar.http("/readyz")[0] == 200
        assert sidecar.stop() == 0


def test_no_routing_key_is_shown(endpoint: str) -> None:
    with sidecar_process(endpoint, "--log-level=debug") as sidecar:
        details = []
        with Asker(endpoint) as asker, Asker(endpoint + ".reports", zmq.PUSH) as push:
            asker.query([keyed(SECRET), keyed(SECRET + "2")])
            message = msgspec.msgpack.decode(GOOD)
            facts = message[8][0]
            for key in (SECRET, SECRET.encode(), [SECRET], {SECRET: SECRET}):
                # Names of instances, causes and versions are for everybody to see.
                places = set(range(len(message))) - {3, 9, 10, 11}
                details += [asker.ask(altered(GOOD, place, key)) for place in places]
                for place in range(len(facts)):
                    changed = [*facts[:place], key, *facts[place + 1 :]]
                    details.append(asker.ask(altered(GOOD, 8, [changed])))
                for place in range(13):
                    if place != 2:
                        push.send(altered(wire.encode(report(1)), place, key))
            details += [asker.ask(payload) for payload, _ in BAD.values()]
            push.send(wire.encode(report(2)))
            wait_for(lambda: sidecar.metric("running_requests", dp_rank="2") is not None)
        refusals = [d for d in details if isinstance(d, Refusal)]
        assert len(refusals) > 50
        shown = {
            "refusals": " ".join(refusal.detail for refusal in refusals),
            "metrics": sidecar.http("/metrics")[1],
            "status": sidecar.http("/status")[1],
            "log": sidecar.log(),
        }
        assert [place for place, text in shown.items() if SECRET in text] == []


def test_a_peer_cannot_write_log_lines_of_its_own(endpoint: str) -> None:
    forged = "x\n2026-01-01 00:00:00,000 ERROR sglang-dp-sidecar: forged"
    with sidecar_process(endpoint) as sidecar, Asker(endpoint) as asker:
        asker.query(instance=forged, epoch=2)
        assert asker.query(instance=forged, epoch=1).cause == "older_controller"
        asker.ask(altered(GOOD, 0, forged))
        wait_for(lambda: len(sidecar.lines("WARNING")) >= 2)
        sidecar.http("/metrics")
        log = sidecar.log()
    assert not [line for line in log.splitlines() if re.match(r"\S+ \S+ ERROR", line)]


# ---- several servers


def test_instances_keep_apart(served: Sidecar) -> None:
    names = [f"apart-{i}" for i in range(5)]
    with Asker(served.endpoint) as asker, Asker(served.endpoint + ".reports", zmq.PUSH) as push:
        for i, name in enumerate(names):
            push.send(wire.encode(report(0, instance=name, running=10 * i)))
            ranks = range(i + 1)
            reply = asker.query([keyed("k")] * (i + 1), instance=name, ranks=ranks, epoch=i)
            assert set(reply.ranks) <= set(ranks)
        for i, name in enumerate(names):
            wait_for(
                lambda name=name, i=i: (
                    served.metric("running_requests", instance=name, dp_rank="0") == 10 * i
                )
            )
            assert served.metric("queries_total", instance=name) == 1
            assert served.metric("decisions_total", instance=name) == i + 1
            assert served.metric("rank_live", instance=name) == i + 1


def test_more_instances_than_allowed_are_refused(endpoint: str) -> None:
    with sidecar_process(endpoint, "--max-instances=2") as sidecar, Asker(endpoint) as asker:
        assert isinstance(asker.query([keyed("a")], instance="one"), Reply)
        assert isinstance(asker.query([keyed("a")], instance="two"), Reply)
        refusal = asker.query([keyed("a")], instance="three", seq=9)
        assert isinstance(refusal, Refusal)
        assert (refusal.cause, refusal.seq) == ("too_many_instances", 9)
        assert "max_instances" in refusal.detail
        assert isinstance(asker.query([keyed("a")], instance="one"), Reply)
        rejected = sidecar.metric(
            "rejected_messages_total", socket="query", cause="too_many_instances"
        )
        assert rejected == 1
        assert sidecar.metric("queries_total", instance="three") is None


def test_an_older_controller_of_the_same_name_is_refused(served: Sidecar) -> None:
    with Asker(served.endpoint) as old, Asker(served.endpoint) as new:
        assert isinstance(old.query([keyed("a")], instance="twice", epoch=1), Reply)
        assert isinstance(new.query([keyed("a")], instance="twice", epoch=2), Reply)
        refusal = old.query([keyed("a")], instance="twice", epoch=1, seq=4)
        assert (refusal.cause, refusal.seq) == ("older_controller", 4)
        assert "DP_SIDECAR_INSTANCE" in refusal.detail
        assert isinstance(new.query([keyed("a")], instance="twice", epoch=2), Reply)


# ---- memory


def test_memory_does_not_grow_with_the_keys(endpoint: str) -> None:
    with sidecar_process(endpoint) as sidecar, Asker(endpoint) as asker:
        process = psutil.Process(sidecar.pid)

        def ask_for(first: int, last: int) -> int:
            """Resident bytes after the keys of that range, 1000 a query."""
            for start in range(first, last, 1000):
                keys = [keyed(f"session-{i}-{i * 7919}") for i in range(start, start + 1000)]
                assert len(asker.query(keys).ranks) == 1000
            return process.memory_info().rss

        before = ask_for(0, 20_000)
        after = ask_for(20_000, 200_000)
        assert after - before <= 8 << 20
        assert sidecar.metric("decisions_total", instance=INSTANCE) == 200_000
        assert not gone(sidecar.pid)
