"""The control socket of a sidecar process, and `policy show` and `policy set`."""

import json
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar import config
from sidecar.cli import main
from sidecar.control import Control
from sidecar.errors import ControlError
from tests.processes import Asker, Sidecar, free_port, short_directory, sidecar_process, wait_for
from tests.support import keyed

ABSENT = 69


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def endpoint(directory: Path) -> str:
    return f"ipc://{directory}/q"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in config.settings():
        monkeypatch.delenv(key.env, raising=False)


def control_of(sidecar: Sidecar) -> Control:
    return Control(f"{sidecar.path}.control", timeout=30)


def serves_without(sidecar: Sidecar, *parts: str) -> bool:
    """Whether it answers queries and has warned, once, that it has no control socket."""
    wait_for(lambda: sidecar.lines("ready:"))
    wait_for(lambda: sidecar.lines("WARNING"))
    with Asker(sidecar.endpoint) as asker:
        assert len(asker.query([keyed("a")]).ranks) == 1
    lines = sidecar.lines("WARNING")
    return len(lines) == 1 and bool(sidecar.lines("no control socket", *parts))


# ---- the process


def test_a_swap_is_seen_and_a_reload_undoes_it(endpoint: str) -> None:
    with sidecar_process(endpoint) as sidecar, Asker(endpoint) as asker:
        client = control_of(sidecar)
        assert client.set_policy("round_robin").version == 2
        assert asker.query([keyed("a")]).policy == "round_robin"
        assert sidecar.metric("policy_info", policy="round_robin") == 1
        assert sidecar.metric("policy_version") == 2
        assert json.loads(sidecar.http("/status")[1])["policy"] == "round_robin"
        assert sidecar.lines("INFO", "policy set: kv_affinity -> round_robin version 2")
        sidecar.signal(signal.SIGHUP)
        wait_for(lambda: sidecar.metric("policy_version") == 3)
        assert client.show().name == "kv_affinity"
        assert sidecar.http("/policy")[0] == 404, "not over TCP"


def test_no_control_over_an_existing_file(endpoint: str, directory: Path) -> None:
    path = directory / "q.control"
    path.write_text("precious")
    with sidecar_process(endpoint) as sidecar:
        assert serves_without(sidecar, str(path), "not a socket", "--control")
        assert sidecar.stop() == 0
    assert path.read_text() == "precious"


def test_a_stale_socket_is_replaced_and_removed_at_the_end(endpoint: str, directory: Path) -> None:
    path = directory / "q.control"
    with sidecar_process(endpoint) as killed:
        killed.kill()
    assert path.is_socket()
    with sidecar_process(endpoint) as sidecar:
        assert control_of(sidecar).show().version == 1
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not sidecar.lines("WARNING")
        assert sidecar.stop() == 0
    assert not path.exists()


def test_a_socket_that_somebody_listens_on_is_kept(endpoint: str, directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{directory}/other")
        other.listen()
        with sidecar_process(endpoint, f"--control={directory}/other") as sidecar:
            assert serves_without(sidecar, "another process listens")
            assert sidecar.stop() == 0
    assert (directory / "other").is_socket()


@pytest.mark.parametrize("name", ["q", "q.reports", "q.lock"])
def test_its_own_files_are_kept(endpoint: str, directory: Path, name: str) -> None:
    with sidecar_process(endpoint, f"--control={directory}/{name}") as sidecar:
        assert serves_without(sidecar, f"{directory}/{name}")


def test_two_sidecars(endpoint: str, directory: Path) -> None:
    second = f"ipc://{directory}/other/q"
    with sidecar_process(endpoint) as one, sidecar_process(second) as two:
        control_of(one).set_policy("round_robin")
        assert control_of(two).show().name == "kv_affinity"
    shared = f"--control={directory}/shared"
    with sidecar_process(endpoint, shared) as one, sidecar_process(second, shared) as two:
        assert serves_without(two, "held by another sidecar", f"pid {one.pid}")
        assert two.stop() == 0
        assert Control(f"{directory}/shared").show().version == 1


@pytest.mark.parametrize("path", ["relative", "/tmp/" + "x" * 103])
def test_a_path_that_cannot_be(endpoint: str, path: str) -> None:
    with sidecar_process(endpoint, f"--control={path}") as sidecar:
        assert serves_without(sidecar, path)


def test_tcp_has_a_control_socket_only_where_one_is_named(directory: Path) -> None:
    port = free_port()
    free_port()  # the next one is for the load reports
    endpoint = f"tcp://127.0.0.1:{port}"
    flags = ("--allow-insecure-tcp=true", f"--control={directory}/deeper/c")
    with sidecar_process(endpoint, *flags[:1]) as sidecar:
        assert not sidecar.lines("control")
    with sidecar_process(endpoint, *flags) as sidecar:
        assert Control(f"{directory}/deeper/c").show().version == 1
        assert sidecar.stop() == 0
    assert not (directory / "deeper" / "c").exists()


def test_stop_with_a_connection_that_says_nothing(endpoint: str, directory: Path) -> None:
    with sidecar_process(endpoint) as sidecar, socket.socket(socket.AF_UNIX) as idle:
        idle.connect(f"{directory}/q.control")
        idle.sendall(b"POST /policy HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
        assert sidecar.stop() == 0
        assert not sidecar.lines("Traceback")
        with pytest.raises(ControlError, match="no sidecar listens"):
            control_of(sidecar).show()


PREFIX = "--policy=prefix_affinity"

# ---- the command


@pytest.fixture(scope="module")
def served() -> Iterator[Sidecar]:
    with short_directory() as path, sidecar_process(f"ipc://{path}/q", PREFIX) as sidecar:
        yield sidecar


def test_the_command_shows_and_sets(
    served: Sidecar, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(*arguments: str) -> dict[str, object]:
        assert main(["policy", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    flag = f"--endpoint={served.endpoint}"
    first = printed("show", flag)
    assert first["name"] == "prefix_affinity"
    params = ["max_load_skew=2", "fallback=round_robin", "token_fallback=false"]
    second = printed("set", flag, "prefix_affinity", *params, "min_load_gap=1e1")
    assert second["params"] == first["params"] | {
        "max_load_skew": 2.0,
        "fallback": "round_robin",
        "token_fallback": False,
        "min_load_gap": 10.0,
    }
    assert printed("set", "round_robin", f"--control={served.path}.control")["params"] == {}
    monkeypatch.setenv("DP_SIDECAR_ENDPOINT", served.endpoint)
    assert printed("set", "prefix_affinity", 'fallback="total_requests"')["version"] == 4
    assert printed("show")["params"]["fallback"] == "total_requests"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["best"], ["policy.name", "round_robin"]),
        (["prefix_affinity", "max_load_skew=0.5"], ["max_load_skew", "1.0"]),
        (["prefix_affinity", "hash_tokens=many"], ["hash_tokens", "int"]),
        (["prefix_affinity", "hash_tokens=[1]"], ["hash_tokens", "str"]),
        (["prefix_affinity", "hash_tokens=" + "[" * 5000], ["hash_tokens", "str"]),
        (["prefix_affinity", "hash_tokens=" + "1" * 5000], ["hash_tokens"]),
        (["prefix_affinity", "max_load_skew=nan"], ["max_load_skew", "float"]),
        (["prefix_affinity", "fallback=\udcff"], []),
        (["round_robin", "x=1"], ["x", "round_robin"]),
        (["prefix_affinity", "skew"], ["skew", "PARAM=VALUE"]),
        (["prefix_affinity", "=1"], ["PARAM=VALUE"]),
        (["prefix_affinity", "a=1", "a=2"], ["a", "twice"]),
    ],
)
def test_a_bad_order_is_exit_2(
    served: Sidecar, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    version = control_of(served).show().version
    assert main(["policy", "set", f"--endpoint={served.endpoint}", *arguments]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith("sglang-dp-sidecar: ")
    assert len(printed.err.splitlines()) == 1
    assert not [word for word in words if word not in printed.err], printed.err
    assert control_of(served).show().version == version


@pytest.mark.parametrize("arguments", [["show"], ["set", "round_robin"]])
def test_an_absent_sidecar_is_exit_69(
    endpoint: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", *arguments, f"--endpoint={endpoint}"]) == ABSENT
    assert "q.control: no sidecar listens there" in capsys.readouterr().err
    assert main(["policy", *arguments, "--endpoint=tcp://127.0.0.1:9"]) == 2
    assert "--control" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["lists"], ["set"], ["show", "x"], ["show", "--policy=x"]]
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["policy", *arguments])
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err
