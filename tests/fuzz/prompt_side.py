"""What clients of SGLang send: routing keys, prompts, salts; and what the hook measures."""

from array import array
from typing import Any

from sglang_hook.facts import Dispatch, look_at
from sglang_hook.memory import LastRanks
from sglang_hook.telemetry import Meter
from sidecar import hashing, wire
from tests.fuzz import messages
from tests.fuzz.source import Source
from tests.fuzz.world import hold

LONG = 1 << 20


def prompt(data: bytes) -> None:
    """Any text as a routing key, any tokens: a bounded message and a stable rank."""
    source = Source(data)
    want = messages.want(source)
    tokens = _tokens(source)
    parts = tuple(source.text() if source.flag(3) else None for _ in range(3))
    session = source.text() if source.flag(8) else None
    key = source.text(255)
    if key and source.flag(64):
        key = (key * (LONG // len(key) + 1))[:LONG]
    last = LastRanks(2)
    known = look_at(Dispatch(key, tokens, parts, session), want, last, 1.0)
    last.put(known.affinity or 0, 3, 0.5)
    again = look_at(Dispatch(key, tokens, parts, session), want, last, 2.0)
    facts = known.facts
    hold((facts.routing_key == b"") == (not key.strip()), "a key that is none, or none that is one")
    hold(len(facts.routing_key) <= wire.MAX_KEY_BYTES, "a key that is too long")
    hold(hashing.normalize_key(facts.routing_key) == facts.routing_key, "a key that changes again")
    hold(len(facts.block_hashes) <= want.max_blocks, "more hashes than are wanted")
    hold(facts.block_hashes == again.facts.block_hashes, "hashes that change")
    if known.affinity is not None:
        hold(again.facts.last_rank == 3, "a key that is not known again")
        hold(hashing.preferred(known.affinity, [5, 1, 3]) in (1, 3, 5), "a rank of nobody's")
    asked = wire.Query(wire.VERSION, 1, "i", 1, [0], [0], [0], [facts, again.facts])
    hold(wire.decode_query(wire.encode(asked)) == asked, "a query that cannot be read")


def _tokens(source: Source) -> Any:
    ids = [source.count() for _ in range(source.below(80))]
    if source.flag(8):
        return None
    return array("q", ids) if source.flag() else ids


def telemetry(data: bytes) -> None:
    """Any clock: what is told of round trips is a valid message."""
    source = Source(data)
    meter = Meter()
    now = source.count()
    for _ in range(16):
        if not source.left:
            break
        begun, now = now, now + source.count() % (1 << 40)
        meter.waited(begun, now)
        meter.breaker(is_open=source.flag())
        told = meter.tell(everything=source.flag())
        asked = wire.Query(wire.VERSION, 1, "i", 1, [], [], [], [], telemetry=told)
        hold(wire.decode_query(wire.encode(asked)) == asked, "a measurement that cannot be read")
