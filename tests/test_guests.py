"""HTTP and who should not be there: too many, by another name, with what is no request."""

import asyncio
import gzip
import logging
import resource
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from aiohttp.http_exceptions import LineTooLong

from sidecar import admin, guests
from sidecar.logs import RateLimit
from tests.processes import PATIENCE, short_directory, sidecar_process, wait_for
from tests.sites import TOKEN, Sites


@pytest.fixture
def sites() -> Iterator[Sites]:
    with short_directory() as directory:
        yield Sites(directory)


@pytest.mark.parametrize("way", ["tcp", "socket"])
def test_connections_that_never_speak_keep_nobody_out(sites: Sites, way: str) -> None:
    """Without a bound they take every file, and libzmq aborts the process when a hook connects."""
    silent: list[socket.socket] = []

    def connect() -> None:
        one = socket.socket(socket.AF_UNIX if way == "socket" else socket.AF_INET)
        silent.append(one)
        one.settimeout(PATIENCE)
        one.connect(sites.path if way == "socket" else ("127.0.0.1", sites.port))

    def call() -> None:
        try:
            for _ in range(guests.MAX_CONNECTIONS + 20):
                connect()
                assert sites.control("socket").show().version == 1
            for one in silent[:20]:
                assert one.recv(1) == b"", "the oldest is closed"
            silent[-1].sendall(b"GET /policy HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert silent[-1].recv(9) == b"HTTP/1.1 "
        finally:
            for one in silent:
                one.close()

    sites.run(call)


def test_a_sidecar_takes_the_files_that_the_hard_limit_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with short_directory() as path, sidecar_process(f"ipc://{path}/q") as sidecar:
            given = psutil.Process(sidecar.pid).rlimit(psutil.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert given == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536), hard)


ANSWERS = ("/metrics", "/status", "/paths")
OURS = ("localhost", "localhost:9477", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:9477", "[::1]:9477")
OTHERS = ("evil.example", "evil.example:9477", "localhost.evil.example", "127.0.0.1.evil", "a:b")


def test_a_body_is_not_unpacked(sites: Sites) -> None:
    """50 kB can become 50 MB, before any handler: queries would wait for it."""
    order = gzip.compress(b'{"name": "round_robin"}')
    packed = {"Content-Encoding": "gzip", "Authorization": f"Bearer {TOKEN}"}

    def call() -> None:
        assert sites.http("POST", "/control/policy", order, **packed)[0] == 400
        assert sites.http("GET", "/status", order, **packed)[0] == 200

    sites.run(call)
    assert sites.dispatcher.policy_version == 1


def test_one_answer_is_made_at_a_time(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives way to queries now and then; many at once would give way once for all of them."""
    making, most, joined = 0, 0, admin.joined

    async def counted(parts: Iterable[bytes]) -> bytes:
        nonlocal making, most
        making += 1
        most = max(most, making)
        await asyncio.sleep(0)
        making -= 1
        return await joined(parts)

    monkeypatch.setattr(admin, "joined", counted)

    def call() -> None:
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(sites.http, "GET", path) for path in ANSWERS * 8]
            assert [one.result()[0] for one in asked] == [200] * len(asked)

    sites.run(call)
    assert most == 1


@pytest.mark.parametrize("path", ["/", "/status", "/paths", "/metrics", "/control/policy"])
def test_another_name_for_this_machine_is_not_answered(sites: Sites, path: str) -> None:
    """A page of a name that its owner lets point here (DNS rebinding) reads nothing."""

    def call() -> None:
        token = {"Authorization": f"Bearer {TOKEN}"}
        for host in OURS:
            assert sites.http("GET", path, Host=host, **token)[0] == 200, host
        for host in OTHERS:
            status, told = sites.http("GET", path, Host=host, **token)
            assert (status, "localhost" in str(told)) == (403, True), host

    sites.run(call)


@pytest.mark.parametrize(
    ("listens", "asked", "answered"),
    [
        ("127.0.0.1", "gpu-1", False),
        ("::1", "gpu-1", False),
        ("localhost", "gpu-1", False),
        ("0.0.0.0", "gpu-1", True),
        ("10.0.0.1", "gpu-1:9477", True),
        ("gpu-1", "gpu-1", True),
        ("::", "gpu-1", True),
    ],
)
def test_elsewhere_any_name_will_do(listens: str, asked: str, answered: bool) -> None:
    assert guests.means_us(asked, listens) is answered


def test_what_is_no_request_is_one_line_that_repeats_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told: list[tuple[str, str]] = []

    class Limit(RateLimit):
        def warning(self, kind: str, text: str) -> None:
            told.append((kind, text))

    log = guests.log_of(Limit())
    for error in (LineTooLong(b"Bearer SECRET", 8190), ZeroDivisionError("SECRET")):
        try:
            raise error
        except Exception:  # noqa: PERF203 - as the server does
            log.exception("Error handling request from %s", "127.0.0.1")
    log.log(logging.WARNING, "no error at all")
    assert [kind for kind, _ in told] == ["http", "http bug"]
    assert "LineTooLong" in told[0][1] and "ZeroDivisionError at test_guests.py" in told[1][1]
    assert "SECRET" not in str(told)
    assert capfd.readouterr() == ("", "")


def test_a_process_tells_of_nonsense_in_one_line(tmp_path: Path) -> None:
    with short_directory() as path, sidecar_process(f"ipc://{path}/q") as sidecar:
        assert sidecar.port
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", sidecar.port), PATIENCE) as one:
                one.sendall(b"GET / HTTP/1.1\r\nAuthorization: " + b"SECRET" * 2000 + b"\r\n\r\n")
                while one.recv(1 << 16):
                    pass
        wait_for(lambda: sidecar.lines("http: not a request"))
        assert len(sidecar.lines("http: not a request")) == 1
        assert not sidecar.lines("Traceback")
        assert not sidecar.lines("SECRET")
