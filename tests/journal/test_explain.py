"""`explain`: what is printed of a small case, and how a request is found."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.cli import main
from sidecar.journal import writer
from sidecar.journal.disk import prepare
from tests.journal.support import Noted, write
from tests.support import Server, key_preferring, keyed, load_up, query

KEY = key_preferring(0, [0, 1, 2, 3]).decode()
EXPECTED = """\
1700000000-1  1970-01-01 00:16:41.000 UTC  host:30000, query 7, request 1 of 2
key 2e4044d39f72bcec, 250 prompt tokens, 0 block hashes, last on rank 3, 1.5 s ago
went to rank 1: spill (it belongs to rank 0)
decided by prefix_affinity (active, version 1) max_load_skew=1.5 min_load_gap=4.0 \
hash_tokens=4096 token_fallback=True fallback=total_tokens
candidates, in order:
  rank  admitted  load_requests  load_tokens
  0           no             20            0
  1          yes              0            0  <- chosen
  2          yes              2          100
  3          yes              2            0
limits: load_requests 10
loads then (average 6 requests):
  rank  requests  running  waiting  in_flight  tokens  report_age_seconds  usable
  0           20       20        0          0       0                 0.5     yes
  1            0        0        0          0       0                 0.5     yes
  2            2        1        0          1     100                 0.5     yes
  3            2        2        0          0       0                 0.5     yes
played back: rank 1, spill
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two requests in one query; the home of the second is overloaded."""
    clock = SimpleNamespace(time=lambda: 1001.0, monotonic=lambda: 1.0)
    monkeypatch.setattr(writer, "time", clock)
    directory = tmp_path / "log"
    prepare(str(directory))
    (directory / "secret").write_bytes(bytes(32))
    noted = Noted("prefix_affinity")
    load_up(noted, [20, 0, 1, 2], now=0.5)
    first, second = keyed("a-session", 100), keyed(KEY, 250)
    second.last_rank, second.last_age_ms = 3, 1500
    noted.handle(query([first, second], ranks=[0, 1, 2, 3], seq=7), 1.0)
    write(directory, noted)
    return directory


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_a_decision_is_told_with_all_that_it_was_made_from(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "explain", log, "--at", "1700000000-1")
    assert text == EXPECTED
    assert printed(capsys, "explain", log, "--seq", 7, "--index", 1) == text
    assert printed(capsys, "explain", log, "--at", 1) == text


def test_a_session_is_told_request_by_request(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "explain", log, "--key", KEY)
    assert re.search(r"key [0-9a-f]{16}: 1 requests", text)
    assert "1700000000-1" in text and " spill " in text and KEY not in text
    assert main(["explain", str(log), "--key", "another"]) == 1
    assert "no request in the log" in capsys.readouterr().out


def test_as_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(printed(capsys, "explain", log, "--at", 1, "--json"))
    assert told["preferred_rank"] == 0 and told["reason"] == "spill"
    assert [one["rank"] for one in told["loads"]] == [0, 1, 2, 3]
    assert told["loads"][0]["running"] == 20 and told["loads"][0]["report_age_seconds"] == 0.5
    assert told["candidates"][0] == {
        "rank": 0,
        "admitted": False,
        "load_requests": 20.0,
        "load_tokens": 0.0,
    }
    assert told["replayed"] == {"rank": told["rank"], "reason": "spill"}
    assert told["notes"] == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--at", "1700000000-9"], "is not in the log"),
        (["--at", "first"], "is not NUMBER or START-NUMBER"),
        (["--seq", "8"], "is not in the log"),
        (["--seq", "7", "--index", "2"], "is not in the log"),
        (["--seq", "7", "--index", "-1"], "at least 0"),
        (["--key", " "], "is empty"),
        (["--key", "a", "--secret", "/nowhere"], "there is no such file"),
        (["--at", "1", "more"], "unrecognized"),
    ],
)
def test_what_cannot_be_told(
    log: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    if "more" in arguments:
        with pytest.raises(SystemExit):
            main(["explain", str(log), *arguments])
    else:
        assert main(["explain", str(log), *arguments]) == 2
    assert error in capsys.readouterr().err


def test_a_key_needs_the_secret(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (log / "secret").write_bytes(bytes(31) + b"x")
    assert main(["explain", str(log), "--key", KEY]) == 2
    assert "another secret" in capsys.readouterr().err
    (log / "secret").unlink()
    assert main(["explain", str(log), "--key", KEY]) == 2
    assert "--secret FILE" in capsys.readouterr().err


def test_one_number_at_two_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for boot in (5 * 10**9, 7 * 10**9):
        noted = Noted("total_requests", boot=boot)
        Server().ask(noted, [keyed("a")], 1.0)
        write(tmp_path / "log", noted, boot=boot)
    assert main(["explain", str(tmp_path / "log"), "--at", "0"]) == 2
    assert "one of 5-0 (host:30000), 7-0 (host:30000)" in capsys.readouterr().err
    text = printed(capsys, "explain", tmp_path / "log", "--at", "7-0")
    assert text.startswith("7-0 ") and "does not say how it ranks" in text
    told = printed(capsys, "replay", tmp_path / "log")
    assert "2 starts" in told and "2 decisions compared: each is made again" in told
