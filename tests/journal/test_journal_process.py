"""The decision log of a real sidecar process, read by the command line."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psutil
import pytest

from sidecar import config
from sidecar.cli import main
from sidecar.control import Control
from tests.journal.test_writer import files, prompts, raw
from tests.processes import Asker, Sidecar, short_directory, sidecar_process, wait_for
from tests.support import keyed

LIMIT = 150_000
"""Bytes: room for two chunks."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with short_directory() as path:
        yield f"ipc://{path}/q"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in config.settings():
        monkeypatch.delenv(key.env, raising=False)


def flag(directory: Path) -> str:
    return f"--decision-log-directory={directory}"


def dropped(sidecar: Sidecar, cause: str) -> float:
    return sidecar.metric("decision_log_dropped_total", cause=cause) or 0.0


def test_what_a_sidecar_decided_is_decided_again(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, drawn = tmp_path / "log", Random(1)
    with sidecar_process(endpoint, flag(log)) as sidecar, Asker(endpoint) as asker:
        control = Control(f"{sidecar.path}.control", timeout=30)
        asker.query()
        for name in ("kv_affinity", "prefix_affinity", "round_robin"):
            control.set_policy(name)
            for _ in range(20):
                asker.query([keyed("a secret session"), *prompts(drawn, 2)])
        control.set_canary("kv_affinity", 0.5)
        for _ in range(20):
            asker.query([keyed(f"session-{n}") for n in range(5)])
        # A second sidecar finds the log taken, says so, and serves.
        other = endpoint + "2"
        with sidecar_process(other, flag(log)) as second, Asker(other) as another:
            assert len(another.query([keyed("b")]).ranks) == 1
            wait_for(lambda: second.lines("WARNING", f"process {sidecar.pid} writes there"))
            assert second.stop() == 0
        wait_for(lambda: sidecar.metric("decision_log_records_total") == 280)
        assert sidecar.metric("decision_log_bytes_total") == sum(
            file.stat().st_size for file in files(log)
        )
        assert sidecar.metric("decision_log_dropped_total") == 0
        assert sidecar.stop() == 0
        assert not sidecar.lines("WARNING")
    assert main(["replay", str(log), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["compared"], told["differ"], told["notes"]) == (280, 0, [])
    assert main(["explain", str(log), "--key", "a secret session", "--json"]) == 0
    session = json.loads(capsys.readouterr().out)
    assert len(session["requests"]) == 60
    assert main(["replay", str(log), "--policy", "total_tokens", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["compared"] == 280 and told["replayed"]["reasons"] == {"least_tokens": 280}
    assert b"a secret session" not in b"".join(map(raw, files(log)))


def test_whoever_takes_over_goes_on_with_the_log(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    with sidecar_process(endpoint, flag(log)) as old, Asker(endpoint) as asker:
        asker.query([keyed("a")])
        with sidecar_process(endpoint, flag(log), "--take-over") as new:
            assert old.wait() == 0
            asker.query([keyed("a"), keyed("b")])
            assert new.stop() == 0
            assert dropped_in(new) == []
    assert main(["replay", str(log), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["log"]["starts"], told["compared"], told["differ"]) == (2, 3, 0)
    assert told["log"]["missing"] == {}


def dropped_in(sidecar: Sidecar) -> list[str]:
    return sidecar.lines("decision log")


def test_a_full_disk_holds_nobody_up(endpoint: str, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: it fails as late and as suddenly."""
    log, drawn = tmp_path / "log", Random(1)
    with sidecar_process(endpoint, flag(log)) as sidecar, Asker(endpoint) as asker:
        psutil.Process(sidecar.pid).rlimit(psutil.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
        for _ in range(250):
            assert len(asker.query(prompts(drawn, 2)).ranks) == 2
        wait_for(lambda: dropped(sidecar, "disk") > 0)
        assert len(sidecar.lines("WARNING", "decision log", "File too large")) == 1
        assert len(asker.query([keyed("a")]).ranks) == 1
        assert sidecar.stop() == 0
    assert all(file.stat().st_size <= LIMIT for file in files(log))
    assert main(["replay", str(log)]) == 0


def test_a_directory_that_cannot_be_had_is_an_error_at_the_start(
    endpoint: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    with sidecar_process(endpoint, flag(tmp_path), ready=False) as sidecar:
        assert sidecar.wait() == 2
        assert sidecar.lines("decision_log.directory", "chmod 700")


def test_it_is_off_unless_asked_for(endpoint: str) -> None:
    with sidecar_process(endpoint) as sidecar, Asker(endpoint) as asker:
        asker.query([keyed("a")])
        assert sidecar.metric("decision_log_records_total") == 0
        assert sidecar.stop() == 0
