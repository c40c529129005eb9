"""Arrays grow at the tail: older peers send shorter ones, newer peers longer ones."""

from typing import Any

import msgspec
import pytest

from sidecar import wire
from sidecar.wire import RequestFacts, Want
from tests.support import report
from tests.test_wire import FULL, GOLDEN, raw_of


@pytest.mark.parametrize("name", GOLDEN)
def test_elements_of_a_newer_peer_are_ignored(name: str) -> None:
    message, decode, golden = GOLDEN[name]
    raw = msgspec.msgpack.decode(bytes.fromhex(golden))
    newer = [*raw, None, {"new": [1, 2]}, b"\xff", "text"]
    assert decode(msgspec.msgpack.encode(newer)) == message


def grown(struct: Any) -> list[Any]:
    """An array of a newer peer, with elements that nobody knows at its end."""
    return [*struct, "new", {"newer": 1}]


def test_nested_elements_of_a_newer_peer_are_ignored() -> None:
    raw = raw_of(FULL)
    raw[8] = [grown(facts) for facts in raw[8]]
    raw[12] = [grown([grown(facts), *rest]) for facts, *rest in raw[12]]
    raw[13] = grown(raw[13])
    assert wire.decode_query(msgspec.msgpack.encode(raw)) == FULL
    reply = GOLDEN["reply"][0]
    raw = raw_of(reply)
    raw[8] = grown(raw[8])
    assert wire.decode_answer(msgspec.msgpack.encode(raw)) == reply


def test_missing_tail_elements_take_defaults() -> None:
    raw = raw_of(FULL)
    old = [*raw[:8], [[b"key"], []]]
    decoded = wire.decode_query(msgspec.msgpack.encode(old))
    assert decoded.requests == [RequestFacts(b"key"), RequestFacts()]
    assert (decoded.bypassed, decoded.abstained, decoded.about) == (None, None, None)
    assert (decoded.history, decoded.telemetry) == ([], None)
    assert wire.decode_report(msgspec.msgpack.encode(raw_of(report())[:10])) == report()
    reply = raw_of(GOLDEN["reply"][0])
    assert wire.decode_answer(msgspec.msgpack.encode([*reply[:8], []])).want == Want()


# The bytes that hooks and sidecars without history, growing blocks and prefill figures send.
OLDER = {
    "query": "9ca571756572790101a1690090909090c0c0c0",
    "reply": "99a57265706c790107cf17979cfe362a0000af7072656669785f616666696e6974790292070092ac6166"
    "66696e6974795f686974a866616c6c6261636b94cd1000c240cc80",
    "load report": "9ea46c6f616401aa686f73743a333030303007cf17979cfe362a00012acd03e8ce001e84800304"
    "cd1388ce000186a0cd0100cd0258",
}


def test_an_older_peer_is_read() -> None:
    old = {kind: bytes.fromhex(text) for kind, text in OLDER.items()}
    assert wire.decode_query(old["query"]) == GOLDEN["minimal query"][0]
    assert wire.decode_answer(old["reply"]).want == Want(4096, False, 64, 128, 0, 0)
    load = wire.decode_report(old["load report"])
    assert load.waiting_uncached_tokens == 600
    figures = (load.prefilling_tokens, load.admitted_tokens, load.cached_tokens, load.flushes)
    assert figures == (0, 0, 0, 0)


@pytest.mark.parametrize("name", ["query", "reply", "load report"])
def test_an_older_peer_reads_the_same_from_what_it_knows(name: str) -> None:
    """The elements that it knows stand where they stood, before those that were added."""
    known = {"query": 12, "reply": 9, "load report": 14}[name]
    old, new = (msgspec.msgpack.decode(bytes.fromhex(x)) for x in (OLDER[name], GOLDEN[name][2]))
    assert len(old) == known <= len(new)
    if name == "reply":
        assert (new[:8], new[8][:4]) == (old[:8], old[8])
    elif name == "load report":
        assert new[:known] == old
