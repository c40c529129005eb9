"""What fuzzing found, each as a test of its own; the inputs are in corpus/ as `finding-*`."""

import asyncio
import itertools
from pathlib import Path

import pytest

from sglang_hook import memory
from sglang_hook import settings as hook
from sidecar import config, control, hashing, takeover, wire
from sidecar.errors import ConfigError, EndpointError
from sidecar.journal import record
from sidecar.journal.reader import Reader
from sidecar.journal.verify import Verification
from sidecar.policies.kv_affinity import BLOCK_GROWTH, MAX_BLOCKS
from sidecar.wire import RequestFacts, Want
from tests.fuzz.control_side import Asked, somebody_there
from tests.fuzz.journal_side import DEEP, NESTED, chunk, framed
from tests.fuzz.log_side import Log
from tests.fuzz.source import Source
from tests.journal.support import Noted
from tests.support import query

NOT_UTF8 = b"\xff1".decode(errors="surrogateescape")
MOST = 1 << 62


@pytest.mark.parametrize("growth", [1, 2, 14, 1 << 20])
def test_a_schedule_of_blocks_ends_where_no_prompt_does(growth: int) -> None:
    """A hostile sidecar could let each schedule take 1.2 MB, and milliseconds of the controller."""
    ends = hashing.block_ends(1 << 20, wire.MAX_BLOCKS, growth)
    assert ends[-1] <= MOST
    assert all(a < b for a, b in itertools.pairwise(ends))


def test_the_schedule_in_force_is_whole() -> None:
    assert len(hashing.block_ends(64, MAX_BLOCKS, BLOCK_GROWTH)) == MAX_BLOCKS


def test_a_hook_keeps_a_bounded_number_of_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile sidecar could make it keep 4,096 for each of 8,192 conversations: 256 MiB."""
    assert memory.HISTORY_HASHES * 8 <= 8 << 20
    monkeypatch.setattr(memory, "HISTORY_HASHES", 100)
    history = memory.History()
    want = Want(0, False, 1, wire.MAX_BLOCKS, 0, 8192)
    for conversation in range(50):
        facts = RequestFacts(block_hashes=list(range(conversation % 40)))
        history.put(conversation % 30, facts, want, 0, 1.0, decided=bool(conversation % 2))
        kept = [len(entry.blocks or ()) for entry in history._table.values()]
        assert sum(kept) == history.hashes <= 100
        assert set(history._untold) <= set(history._table)
    assert len(history) > 2


@pytest.mark.parametrize("name", ["DEADLINE_MS", "ALLOW_INSECURE_TCP", "HEARTBEAT_MS"])
def test_a_variable_of_the_hook_that_is_no_text(name: str) -> None:
    """UnicodeEncodeError came instead: the plugin contains it, `check` ended with a traceback."""
    env = {"DP_SIDECAR_ENDPOINT": "ipc:///run/x.sock", f"DP_SIDECAR_{name}": NOT_UTF8}
    with pytest.raises(ConfigError, match=f"DP_SIDECAR_{name}: is not UTF-8"):
        hook.load(env)


@pytest.mark.parametrize("name", ["STALE_SECONDS", "LOG_LEVEL", "ADMIN_PORT", "POLICY_PARAMS"])
def test_a_variable_of_the_sidecar_that_is_no_text(name: str) -> None:
    """UnicodeEncodeError came instead: `serve` ended with a traceback."""
    with pytest.raises(ConfigError, match=f"DP_SIDECAR_{name}: is not UTF-8"):
        config.load(None, {f"DP_SIDECAR_{name}": NOT_UTF8}, {})


def test_a_path_may_have_any_bytes() -> None:
    env = {"DP_SIDECAR_ENDPOINT": f"ipc:///run/{NOT_UTF8}"}
    assert config.load(None, env, {}).serve.endpoint.endswith(NOT_UTF8)
    assert hook.load(env).endpoint.endswith(NOT_UTF8)


def read(tmp_path: Path, *records: bytes) -> tuple[Reader, list[str]]:
    """A log of whole chunks, and what its reader warns of."""
    raw = b"".join(framed(one) for one in records)
    file = tmp_path / "log.dplog"
    file.write_bytes(record.MAGIC + chunk(raw, Source(b"")))
    warned: list[str] = []
    return Reader([str(file)], warn=warned.append), warned


def head() -> record.Head:
    state = record.State("total_tokens", {}, 1, Want(), "round_robin", {}, 0.5)
    return record.Head("1", 1, 5.0, 4, "x", 0.0, 0.0, 0, True, state, [])


def test_parameters_nested_without_end(tmp_path: Path) -> None:
    """RecursionError came of a log: `replay` and `explain` ended with a traceback."""
    state = record.State("total_tokens", {"x": DEEP}, 1, Want())
    raw = record.encode(record.Changed(1, "set", state)).replace(record.encode(DEEP), NESTED)
    reader, warned = read(tmp_path, record.encode(head()), raw)
    assert Verification(reader).run()["compared"] == 0
    assert "makes no sense" in warned[0]


def test_a_canary_that_decided_what_is_not_there(tmp_path: Path) -> None:
    """IndexError came of a log, with the same end."""
    decided = record.Decided(1, "i", 1, 1, 1, [0], [0], [0], [], [], [], [], [3])
    reader, warned = read(tmp_path, record.encode(head()), record.encode(decided))
    assert Verification(reader).run()["compared"] == 0
    assert "the canary decided a request that is not there" in warned[0]


def test_an_agreement_nested_without_end() -> None:
    """RecursionError came of an answer: `serve --take-over` ended with a traceback."""
    asked = Asked("/nowhere")
    asked.answer = 200, b'{"pid": 1, "version": "1", "z": ' + b"[" * 100_000
    with pytest.raises(EndpointError, match="does not hand over"), somebody_there(asked):
        asyncio.run(takeover._ask("ipc:///x", "/x", takeover.Order(1, "1", 1.0)))
    assert control.Control is not asked


def test_counts_that_differ_by_more_than_msgpack_holds() -> None:
    """OverflowError came of a hook's nonsense: the decision log went on with a wrong memory, so
    that all later queries of that instance were read with wrong counters."""
    log, noted = Log(), Noted("total_tokens")
    asked = query([RequestFacts(b"k", 0, MOST)] * 4, ranks=[0], sent=[0], sent_tokens=[MOST])
    for tokens in (MOST, 0, 5):
        asked.sent_tokens = [tokens]
        reply = noted.handle(asked, 1.0)
        list(log.follow(asked, reply, 1.0))


def test_what_is_expected_is_still_said_shortly() -> None:
    log, noted = Log(), Noted("total_tokens")
    asked = query([RequestFacts(b"k", 0, 7)], ranks=[0], sent=[0], sent_tokens=[0])
    list(log.follow(asked, noted.handle(asked, 1.0), 1.0))
    asked.sent, asked.sent_tokens = [2], [7]
    written = log.encoder.decided(asked, noted.handle(asked, 1.0), 1.0, [])
    assert (written.epoch, written.sent, written.sent_tokens) == (None, [1], [0])
