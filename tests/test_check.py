"""`sglang-dp-sidecar check`: each finding of a configuration and an environment."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar import __version__, check, config
from sidecar.check import Finding, running, variables
from sidecar.check import sockets as checked_sockets
from sidecar.cli import main
from tests.processes import (
    NOBODY,
    ROOT,
    Asker,
    clean_env,
    free_port,
    short_directory,
    sidecar_process,
)
from tests.support import keyed

NO_HTTP = "--admin-port=0"


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_settings(monkeypatch)


def forget_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without any setting of ours or of SGLang's that matters here."""
    for name in [*os.environ]:
        if name.startswith("DP_SIDECAR_") or name == "SGLANG_RUST_SERVER":
            monkeypatch.delenv(name)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook is asked in this process: an interpreter of its own takes half a second."""
    from sglang_hook.check import look

    monkeypatch.setattr(variables, "ask_hook", look)


def found(*flags: str, file: Path | None = None, at: Path | None = None) -> list[Finding]:
    given = dict(flag.split("=", 1) for flag in flags)
    if at is not None:
        given["--endpoint"] = f"ipc://{at}"
    return list(check.everything(lambda: config.load(file, os.environ, given)))


def of(findings: list[Finding], level: str, *words: str) -> Finding:
    """The one finding of that level that holds the words; it says what to do if it matters."""
    (one,) = [f for f in findings if f.level == level and not [w for w in words if w not in str(f)]]
    assert one.fix or level in ("ok", "note")
    assert len(str(one).splitlines()) == 1
    return one


def bad(findings: list[Finding]) -> list[str]:
    return [str(f) for f in findings if f.level in ("problem", "warning")]


# ---- the command


def test_a_sound_environment(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = [f"--endpoint=ipc://{directory}/q", f"--admin-port={free_port()}"]
    assert main(["check", *flags]) == 0
    *lines, last = capfd.readouterr().out.splitlines()
    assert last == "0 problems, 0 warnings"
    assert {line.split()[0] for line in lines} <= {"ok", "note"}
    assert [line for line in lines if "no sidecar serves there" in line]
    assert [line for line in lines if "import sglang_hook" in line]
    assert not list(directory.iterdir()), "it leaves nothing behind"


def test_as_json(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (directory / "q").write_text("precious")
    assert main(["check", "--json", f"--endpoint=ipc://{directory}/q", NO_HTTP]) == 1
    told = json.loads(capfd.readouterr().out)
    assert told["problems"] == 1
    (finding,) = [f for f in told["findings"] if f["level"] == "problem"]
    assert f"{directory}/q: is not a socket" in finding["what"]
    assert "--endpoint" in finding["fix"]
    assert (directory / "q").read_text() == "precious"


def test_a_configuration_that_cannot_be_read(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = directory / "c.toml"
    file.write_text("[serve]\nstale_seconds = 0\n")
    assert main(["check", f"--config={file}"]) == 1
    printed = capfd.readouterr().out
    assert "problem  configuration:" in printed
    assert "stale_seconds" in printed
    assert "Python" in printed, "the rest is checked all the same"
    assert main(["check", "--config=/nowhere", "--json"]) == 1


# ---- settings


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--endpoint=ipc:///tmp/" + "x" * 120], ["107"]),
        (["--endpoint=udp://x"], ["ipc://", "tcp://"]),
        (["--endpoint=ipc://relative"], ["absolute"]),
        (["--endpoint=tcp://127.0.0.1:5"], ["allow_insecure_tcp"]),
        (["--policy=no.such.module:Policy"], ["no.such.module"]),
        (["--admin-token-file=/nowhere"], ["admin.token_file", "/nowhere"]),
        (["--curve-secret-key-file=/nowhere"], ["curve_client_keys_file"]),
    ],
)
def test_what_serve_would_refuse(directory: Path, flags: list[str], words: list[str]) -> None:
    named = flags[0].startswith("--endpoint")
    findings = found(*flags, NO_HTTP, at=None if named else directory / "q")
    of(findings, "problem", *words)


@pytest.mark.usefixtures("quick")
def test_a_control_path_that_is_too_long(directory: Path) -> None:
    path = f"{directory}/" + "x" * 100
    of(found(NO_HTTP, f"--control={path}", at=directory / "q"), "problem", "107", "--control")


@pytest.mark.usefixtures("quick")
def test_tcp_in_the_open_and_a_port_for_everybody(directory: Path) -> None:
    flags = (f"--endpoint=tcp://127.0.0.1:{free_port()}", "--allow-insecure-tcp=true")
    findings = found(*flags, "--admin-host=0.0.0.0", f"--admin-port={free_port()}")
    of(findings, "warning", "TCP without CURVE keys", "keygen")
    of(findings, "warning", "admin.host 0.0.0.0", "127.0.0.1")
    of(findings, "note", "no control socket")
    assert len(bad(findings)) == 2
    for host in ("127.0.0.1", "localhost", "::1"):
        assert not bad(
            found(f"--admin-host={host}", f"--admin-port={free_port()}", at=directory / "q")
        )


# ---- files


@pytest.mark.usefixtures("quick")
def test_directories(directory: Path) -> None:
    of(found(NO_HTTP, at=directory / "new" / "er" / "q"), "ok", "is made at the start")
    (directory / "file").write_text("")
    of(found(NO_HTTP, at=directory / "file" / "q"), "problem", "not a directory")
    open_to_all = directory / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    of(found(NO_HTTP, at=open_to_all / "q"), "problem", "0777", "chmod 700")
    open_to_all.chmod(0o770)
    of(found(NO_HTTP, at=open_to_all / "q"), "warning", "0770", "chmod 700")
    open_to_all.chmod(0o1777)
    assert not bad(found(NO_HTTP, at=open_to_all / "q")), "sticky, as /tmp"


AS_NOBODY = """
import os, shutil, sys
from sidecar import check, sites  # what is imported late must not need a Python only root can read
import sidecar.admin, sidecar.check.running
from sidecar.cli import main
os.setgroups([])
os.setgid({0})
os.setuid({0})
sys.exit(main(["check", "--endpoint=ipc://" + sys.argv[1], "--admin-port=0"]))
"""


def as_nobody(path: Path) -> tuple[int, str]:
    command = [sys.executable, "-c", AS_NOBODY.format(NOBODY), str(path)]
    ran = subprocess.run(
        command, cwd=ROOT, env=clean_env(), capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_somebody_else(directory: Path) -> None:
    directory.chmod(0o755)
    code, text = as_nobody(directory / "q")
    assert code == 1
    assert "may not write" in text
    assert "install -d -m 0700" in text
    directory.chmod(0o1777)
    with sidecar_process(f"ipc://{directory}/q", NO_HTTP):
        (directory / "q.lock").chmod(0o666)
        code, text = as_nobody(directory / "q")
        assert code == 1
        assert "as user root" in text
        assert "run both as root" in text


@pytest.mark.usefixtures("quick")
def test_a_dead_sidecar(directory: Path) -> None:
    with sidecar_process(f"ipc://{directory}/q", NO_HTTP) as sidecar:
        sidecar.kill()
    findings = found(NO_HTTP, at=directory / "q")
    of(findings, "note", f"{directory}/q: left by a sidecar that is gone")
    of(findings, "ok", "no sidecar serves there")
    assert not bad(findings)


# ---- a running sidecar


@pytest.mark.usefixtures("quick")
def test_a_running_sidecar(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = directory / "q"
    with sidecar_process(f"ipc://{at}") as sidecar, Asker(sidecar.endpoint) as asker:
        port = f"--admin-port={sidecar.port}"
        findings = found(port, at=at)
        of(findings, "ok", f"pid {sidecar.pid}")
        of(findings, "ok", "HTTP of the running sidecar")
        of(findings, "note", "no SGLang has asked yet")
        assert not [line for line in bad(findings) if "control: answers" not in line]
        asker.query([keyed("k")], about={"hook": "0.0.9"})
        of(found(port, at=at), "warning", "hook 0.0.9", __version__)
        asker.query([keyed("k")], about={"hook": __version__})
        of(found(port, at=at), "ok", f"hook {__version__}")
        before = sidecar.metric("queries_total")
        found(port, at=at)
        assert sidecar.metric("queries_total") == before, "it asks for no decision"
        of(found(port, at=directory / "other"), "problem", "serves another endpoint")
        of(found(f"--admin-port={free_port()}", at=at), "warning", "has no HTTP there")
        monkeypatch.setattr(running, "__version__", "9.9")
        of(found(port, at=at), "warning", "9.9", f"kill -USR2 {sidecar.pid}")


@pytest.mark.usefixtures("quick")
def test_a_running_sidecar_that_hangs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_TIMEOUT", 0.2)
    with sidecar_process(f"ipc://{directory}/q", NO_HTTP) as sidecar:
        sidecar.freeze()
        of(found(NO_HTTP, at=directory / "q"), "problem", "no answer within", "kill -9")
        sidecar.signal(signal.SIGCONT)


@pytest.mark.usefixtures("quick")
def test_a_slow_answer(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sidecar_process(f"ipc://{directory}/q", NO_HTTP):
        monkeypatch.setattr(running, "DEADLINE_MS", 0.0)
        of(found(NO_HTTP, at=directory / "q"), "warning", "answers in", "waits 0 ms")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", b"\xff"])
def test_a_stranger_has_the_port(
    directory: Path, says: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    monkeypatch.setattr(running, "_TIMEOUT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(says)

        thread = threading.Thread(target=answer)
        thread.start()
        port = server.getsockname()[1]
        of(found(f"--admin-port={port}", at=directory / "q"), "problem", "another program")
        thread.join()


def test_what_is_found_cannot_begin_a_line() -> None:
    finding = Finding("problem", "a\nok       b\x1b[2J", "c\r")
    assert str(finding) == "problem  a\\nok       b\\x1b[2J -> c\\r"


def test_an_unknown_user() -> None:
    assert checked_sockets.owner(4_000_000_000) == "4000000000"
