"""The restart bench: what it compares, and that it can tell agreement from none."""

import json
import sys
from pathlib import Path

import pytest

from bench import restart
from bench.model.server import ServerSpec
from bench.restart import Tally, conversation_of, measure
from sidecar.wire import RequestFacts

TINY = "short-chats:chats=64:turns=6:concurrency=64"


def test_history_makes_a_restarted_sidecar_decide_alike() -> None:
    told = measure(TINY, "kv_affinity", 1, 10.0, ServerSpec(), Path("/nowhere"))
    assert told["with history"].requests(settled=True) > 100
    with_history = told["with history"].share(settled=True)
    without = told["without history"].share(settled=True)
    assert with_history is not None
    assert without is not None
    assert with_history >= 0.99
    assert without < with_history - 0.05


def test_a_policy_without_memory_needs_no_history() -> None:
    told = measure(TINY, "prefix_affinity", 1, 10.0, ServerSpec(), Path("/nowhere"))
    for tally in told.values():
        assert tally.share(settled=True) == 1.0


def test_shares_are_of_what_was_asked() -> None:
    tally = Tally()
    tally.asked.update({(True, "placed"): 3, (True, "spill"): 1, (False, "placed"): 5})
    tally.equal.update({(True, "placed"): 3, (False, "placed"): 1})
    assert tally.share(settled=True) == 0.75
    assert tally.share(settled=True, reason="spill") == 0.0
    assert tally.share(settled=False) == 0.2
    assert tally.share(settled=False, reason="spill") is None


def test_a_conversation_is_known_by_its_key_or_its_last_block() -> None:
    keyed = conversation_of(RequestFacts(b"key", 0, 100, None, [1, 2]))
    assert keyed == conversation_of(RequestFacts(b"key", 0, 100, None, [3]))
    assert conversation_of(RequestFacts(b"", 0, 100, 7, [1, 2])) == 2
    assert conversation_of(RequestFacts(b"", 0, 100, 7)) == 7
    assert conversation_of(RequestFacts(b"", 0, 100)) is None


def test_the_table_names_every_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--workload", "random:requests=200", "--seeds", "1", "--every", "2", "--json"]
    monkeypatch.setattr(sys, "argv", ["bench.restart", *arguments])
    assert restart.main() == 0
    table = json.loads(capsys.readouterr().out)["table"]
    assert len(table) == 4
    for told in table.values():
        assert told["later"]["requests"] > 0
        assert sum(told["unequal"].values()) <= told["later"]["requests"]
