"""`replay --policy`: figures of cases that are small enough to count by hand."""

from pathlib import Path
from typing import Any

import pytest

from sidecar.cli import main
from sidecar.errors import ConfigError
from sidecar.journal.compare import Contest, Side, imbalance
from sidecar.journal.reader import Reader
from sidecar.journal.record import LogError
from sidecar.journal.verify import Verification
from sidecar.policies.base import NoParams
from sidecar.wire import RequestFacts
from tests.journal.mine import Mine
from tests.journal.support import Noted, write
from tests.kv.server import Server, prompt
from tests.support import key_preferring, keyed


def contest(log: Path, policy: str, **params: Any) -> dict[str, Any]:
    return Contest(Reader([str(log)]), policy, params).run()


def alternating(tmp_path: Path) -> Path:
    """round_robin sends two sessions to both ranks in turn; the second has longer prompts."""
    noted = Noted("round_robin")
    server = Server(noted, [0, 1])
    for rank, tokens in ((0, 100), (1, 300)):
        key = key_preferring(rank, [0, 1])
        for _ in range(2):
            server.ask(keyed(key, tokens))
            server.finish()
            server.now += 1
    write(tmp_path / "log", noted)
    return tmp_path / "log"


def test_a_case_counted_by_hand(tmp_path: Path) -> None:
    told = contest(alternating(tmp_path), "prefix_affinity")
    # Logged 0 1 0 1; by their keys they belong to 0 0 1 1.
    assert told["compared"] == 4 and told["agreement"] == 0.5
    assert told["policies"] == {"round_robin": 4}
    logged, replayed = told["logged"], told["replayed"]
    assert logged["reasons"] == {"round_robin": 4}
    assert replayed["reasons"] == {"affinity_hit": 4}
    assert (logged["sessions_moved"], replayed["sessions_moved"]) == (2, 0)
    assert logged["imbalance"] == 1.0  # 400 and 400 tokens
    assert replayed["imbalance"] == 1.5  # 200 and 600, whose mean is 400
    assert logged["prompt_tokens"] == replayed["prompt_tokens"] == 800
    assert logged["expected_cached_tokens"] is None
    assert "no block hashes" in told["notes"][0]
    assert told["log"]["whole"] is True and told["policy_errors"] == 0


def test_what_would_be_cached(tmp_path: Path) -> None:
    noted = Noted("kv_affinity")
    server = Server(noted, [0, 1])
    for _ in range(2):
        server.ask(prompt("a", 640, "session"))
        server.finish()
        server.now += 1
    write(tmp_path / "log", noted)
    told = contest(tmp_path / "log", "round_robin")
    assert told["logged"]["expected_cached_tokens"] == 640
    assert told["logged"]["avoidable_prefill_tokens"] == 0
    assert told["replayed"]["expected_cached_tokens"] == 0
    assert told["replayed"]["avoidable_prefill_tokens"] == 640
    assert told["agreement"] == 0.5
    assert "not measurements" in told["notes"][0]


def test_itself_it_agrees_with(tmp_path: Path) -> None:
    assert contest(alternating(tmp_path), "round_robin")["agreement"] == 1.0


def test_without_the_secret_ranks_by_key_say_nothing(tmp_path: Path) -> None:
    log = alternating(tmp_path)
    (log / "secret").unlink()
    told = contest(log, "prefix_affinity")
    assert told["agreement"] is None and told["compared"] == 4
    assert any("secret" in note for note in told["notes"])
    assert contest(log, "total_tokens")["agreement"] is not None
    assert Verification(Reader([str(log)])).run()["differ"] == 0, "round_robin looks at no key"


def test_prefix_affinity_is_checked_with_the_secret_only(tmp_path: Path) -> None:
    noted = Noted("prefix_affinity")
    Server(noted, [0, 1]).ask(keyed("a"))
    write(tmp_path / "log", noted)
    assert Verification(Reader([str(tmp_path / "log")])).run()["compared"] == 1
    (tmp_path / "log" / "secret").rename(tmp_path / "elsewhere")
    with pytest.raises(LogError, match="--secret FILE"):
        Verification(Reader([str(tmp_path / "log")])).run()
    there = Reader([str(tmp_path / "log")], str(tmp_path / "elsewhere"))
    assert Verification(there).run()["differ"] == 0


def test_hashes_of_another_length_are_refused(tmp_path: Path) -> None:
    noted = Noted("kv_affinity")
    Server(noted).ask(prompt("a", 640, "session"))
    write(tmp_path / "log", noted)
    with pytest.raises(ConfigError, match="block_tokens=64"):
        contest(tmp_path / "log", "kv_affinity", block_tokens=32)
    with pytest.raises(LogError, match="no policy 'magic'"):
        contest(tmp_path / "log", "magic")
    with pytest.raises(LogError, match=r"at least|>="):
        contest(tmp_path / "log", "prefix_affinity", max_load_skew=0.5)


def test_imbalance_takes_every_instance_for_itself() -> None:
    ranks = [("a", 0), ("a", 1), ("b", 0)]
    assert imbalance({}, ranks) == 1.0
    assert imbalance({("a", 0): 10.0, ("b", 0): 5.0}, ranks) == 15 / 10
    side = Side()
    for rank in (0, 1, 1, 0):
        side.add("a", RequestFacts(b"k", tokens=10), rank, "spill", (4.0, 6.0))
    told = side.told({("a", 0), ("a", 1)}, predicts=True)
    assert told["sessions_moved"] == 2 and told["spills"] == 4
    assert told["expected_cached_tokens"] == 16 and told["avoidable_prefill_tokens"] == 8


def test_a_policy_that_is_not_ours_is_named_on_the_command_line_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = Noted("round_robin")
    noted.swap_policy(Mine(NoParams()))
    noted.note("set")
    assert Server(noted, [0, 1]).put(keyed("a")) == [1]
    write(tmp_path / "log", noted)
    log = str(tmp_path / "log")
    assert main(["replay", log]) == 2
    assert "no policy 'mine'" in (said := capsys.readouterr().err)
    assert "--load module:Class names its class" in said
    load = ["--load", "tests.journal.mine:Mine"]
    assert main(["replay", log, *load]) == 0
    assert "each is made again" in capsys.readouterr().out
    assert main(["replay", log, *load, "--policy", "round_robin"]) == 0
    assert "same rank: 0.00% of 1 requests" in capsys.readouterr().out
    assert main(["replay", log, "move_tokens=5"]) == 2
    assert "--policy NAME" in capsys.readouterr().err
