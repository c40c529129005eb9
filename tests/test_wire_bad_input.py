"""Whatever a peer sends, decoding it gives a message or a PeerError with a cause, nothing else."""

import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar import wire
from sidecar.errors import PeerError
from sidecar.wire import Past, RequestFacts
from tests.support import query, report
from tests.test_wire import FULL, GOLDEN, raw_of

DECODERS = [wire.decode_query, wire.decode_report, wire.decode_answer]
pack = msgspec.msgpack.encode


def rejected(decode, data: bytes, cause: str = "") -> PeerError:
    with pytest.raises(PeerError) as caught:
        decode(data)
    assert caught.value.cause in wire.REFUSALS
    assert caught.value.cause == (cause or caught.value.cause)
    assert str(caught.value)
    return caught.value


BIG, MORE = 2**62 + 1, [0] * 1025
COUNT = (-1, BIG, 1.5, "1", None)
CAUSES = ({"x" * 65: 1}, {"x": -1}, {"x": BIG}, {str(i): 1 for i in range(33)}, [], 1)
QUERY = {
    "version": ("1", None, 1.5),
    "seq": COUNT,
    "instance": ("", "x" * 129, b"x", None),
    "epoch": COUNT,
    "ranks": ([-1], [65536], MORE, ["0"], None, {}),
    "sent": ([-1], [BIG], MORE, [0.5], None),
    "sent_tokens": ([-1], [BIG], MORE, [None], None),
    "requests": ([[]] * 4097, None, [None], [{}]),
    "bypassed": CAUSES,
    "abstained": CAUSES,
    "about": ({"x" * 65: ""}, {"x": "x" * 257}, {str(i): "" for i in range(33)}, {"x": 1}, []),
    "history": ([[[], 0, 0]] * 4097, None, [None], [[]], [[[]]], [[[], 0]], {}, 1),
    "telemetry": ([], {}, 1, "text", [[0] * 14, 0, 0], [[0] * 14, 0, 0, 1]),
}
TELEMETRY = {
    "round_trips": ([0] * 13, [0] * 15, [], [-1] * 14, [BIG] * 14, [0.5] * 14, None, {}, 1),
    **dict.fromkeys(("round_trip_ns", "breaker_opened"), COUNT),
    "breaker_open": (0, 1, "true", None),
}
PAST = {
    "facts": (None, {}, 1, "text"),
    "rank": (-1, 65536, "0", None),
    "age_ms": COUNT,
}
FACTS = {
    "routing_key": (b"x" * 1025, "text", None, 1),
    "namespace": (-1, None, "1"),
    "tokens": COUNT,
    "prefix_hash": (-1, "1", 1.5),
    "block_hashes": ([-1], [0] * 4097, None, ["1"]),
    "last_rank": (-2, 65536, None),
    "last_age_ms": (-2, BIG, None),
}
REPORT = {
    "version": ("1", None),
    "instance": ("", "x" * 129, None),
    "rank": (-1, 65536, None, "0"),
    **dict.fromkeys(("epoch", "seq", "received", "received_tokens", "running", "waiting"), COUNT),
    **dict.fromkeys(("tokens", "capacity_tokens", "max_running"), COUNT),
    **dict.fromkeys(("waiting_uncached_tokens", "prefilling_tokens", "admitted_tokens"), COUNT),
    **dict.fromkeys(("cached_tokens", "flushes", "recent_uncached_tokens"), COUNT),
}
REPLY = {
    **dict.fromkeys(("version", "seq", "boot", "policy_version"), ("1", None)),
    "policy": (1, None),
    "ranks": (None, ["1"], [None], 1),
    "reasons": (None, [1], "text"),
    "want": (None, 1, "text"),
}
WANT = {
    **dict.fromkeys(("prefix_tokens", "block_tokens"), (-1, 2**20 + 1, "1")),
    **dict.fromkeys(("block_growth", "history"), (-1, 2**20 + 1, "1", None, 1.5)),
    "prefix_with_key": (1, "true"),
    "max_blocks": (-1, 4097),
}
REFUSAL = {"version": ("1",), "seq": ("1",), "cause": (1, None), "detail": (1, None)}


def spoiled() -> list[Any]:
    """(decoder, message, field), each message with one field of one struct out of bounds."""
    told = wire.Telemetry([0] * 14, 0, 0, False)
    asked = query([RequestFacts()], history=[Past(RequestFacts(), 0, 0)], telemetry=told)
    reply, refusal = GOLDEN["reply"][0], GOLDEN["refusal"][0]
    cases: list[Any] = []
    for decode, message, struct, path, table in (
        (wire.decode_query, asked, wire.Query, (), QUERY),
        (wire.decode_query, asked, RequestFacts, (8, 0), FACTS),
        (wire.decode_query, asked, Past, (12, 0), PAST),
        (wire.decode_query, asked, RequestFacts, (12, 0, 0), FACTS),
        (wire.decode_query, asked, wire.Telemetry, (13,), TELEMETRY),
        (wire.decode_report, report(), wire.LoadReport, (), REPORT),
        (wire.decode_answer, reply, wire.Reply, (), REPLY),
        (wire.decode_answer, reply, wire.Want, (8,), WANT),
        (wire.decode_answer, refusal, wire.Refusal, (), REFUSAL),
    ):
        # The kind of a message stands before its fields.
        places = {name: i + (not path) for i, name in enumerate(struct.__struct_fields__)}
        for name, values in table.items():
            for value in values:
                raw = raw_of(message)
                node = raw
                for step in path:
                    node = node[step]
                node[places[name]] = value
                label = f"{struct.__name__}{list(path)}.{name}={str(value)[:8]}"
                cases.append(pytest.param(decode, pack(raw), name, id=label))
    return cases


SPOILED = spoiled()


@pytest.mark.parametrize(("decode", "data", "name"), SPOILED)
def test_bound_of_every_field(decode, data: bytes, name: str) -> None:
    rejected(decode, data, "field")


def test_text_names_the_field() -> None:
    """`$[8][0][0]` tells the author of a client nothing: the docstrings promise the name."""
    unnamed = {}
    for case in SPOILED:
        decode, data, name = case.values
        text = str(rejected(decode, data))
        if name not in text:
            unnamed[case.id] = text
    assert not unnamed


@pytest.mark.parametrize(
    ("history", "named"),
    [
        ([[[b"", -1], 0, 0]], "`history[0].facts.namespace`"),
        ([[[], 0, 0], [[b"", 0, 0, None, [1, -1]], 0, 0]], "`history[1].facts.block_hashes[1]`"),
        ([[[], 65536, 0]], "`history[0].rank`"),
        ([[[], 0, -1]], "`history[0].age_ms`"),
        ([[1, 0, 0]], "`history[0].facts`"),
        ([[[], 0, 0]] * 4097, "length <= 4096 - at `history`"),
    ],
)
def test_text_names_the_nested_field(history: object, named: str) -> None:
    raw = raw_of(query())
    raw[12] = history
    assert named in str(rejected(wire.decode_query, pack(raw), "field"))


def test_every_field_has_bad_values() -> None:
    for struct, table in (
        (wire.Query, QUERY),
        (wire.RequestFacts, FACTS),
        (wire.Past, PAST),
        (wire.LoadReport, REPORT),
        (wire.Reply, REPLY),
        (wire.Want, WANT),
        (wire.Refusal, REFUSAL),
    ):
        assert set(struct.__struct_fields__) == set(table)


@pytest.mark.parametrize("name", ["sent", "sent_tokens"])
@pytest.mark.parametrize("size", [0, 7, 9])
def test_counters_need_one_element_a_rank(name: str, size: int) -> None:
    data = wire.encode(query(**{name: [0] * size}))
    assert "sent_tokens" in str(rejected(wire.decode_query, data, "field"))


@pytest.mark.parametrize("version", [0, 2, 99, -1, 2**63 + 5])
@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("fault", ["none", "short", "types"])
def test_wrong_version_is_named_before_anything_else(name: str, version: int, fault: str) -> None:
    message, decode, _ = GOLDEN[name]
    raw = raw_of(message)
    raw[1] = version
    if fault == "short":
        raw = raw[:2]
    if fault == "types":
        raw[2:] = [{"another": "shape"}] * 3
    error = rejected(decode, pack(raw), "version")
    assert str(version) in str(error)
    assert f"speaks {wire.VERSION}" in str(error)


@pytest.mark.parametrize("name", GOLDEN)
def test_trailing_bytes(name: str) -> None:
    message, decode, _ = GOLDEN[name]
    for tail in (b"\0", b"\xc0", b"\xc1", wire.encode(message)):
        rejected(decode, wire.encode(message) + tail, "malformed")


@pytest.mark.parametrize("name", GOLDEN)
def test_truncated_at_every_length(name: str) -> None:
    message, decode, _ = GOLDEN[name]
    data = wire.encode(message)
    for size in range(len(data)):
        rejected(decode, data[:size], "malformed")


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(decode, protocol: int) -> None:
    for value in ({"rank": 0}, [1, 2], ("query", 1), None):
        rejected(decode, pickle.dumps(value, protocol))


@pytest.mark.parametrize("bad", [b"\xff", b"\xed\xa0\x80", b"\xc3", b"\xf8\x88\x80\x80\x80"])
def test_invalid_utf8(bad: bytes) -> None:
    for message in (FULL, report(instance="host:30000")):
        decode = wire.decode_query if message is FULL else wire.decode_report
        data = wire.encode(message).replace(b"host:30000", bad.rjust(10, b"x"))
        rejected(decode, data, "utf8")
    about = wire.encode(FULL).replace(b"0.5.23", bad.rjust(6, b"x"))
    rejected(wire.decode_query, about, "utf8")


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (b"GET / HTTP/1.1\r\n\r\n", "malformed"),
        (pack("query"), "field"),
        (pack(None), "field"),
        (pack([]), "field"),
        (pack(["query"]), "field"),
        (pack([None, 1]), "field"),
        (pack(["question", 1, 2, 3]), "field"),
        (pack({"kind": "query", "version": 1}), "field"),
        (b"\xdd\xff\xff\xff\xff", "malformed"),
        (b"\xdf\xff\xff\xff\xff", "malformed"),
        (b"\xc6\xff\xff\xff\xff", "malformed"),
    ],
)
def test_not_a_message(decode, data: bytes, cause: str) -> None:
    rejected(decode, data, cause)


def test_kinds_do_not_mix() -> None:
    own = {wire.decode_query: {"query", "minimal query"}, wire.decode_report: {"load report"}}
    for decode in DECODERS:
        for name, (message, right, _) in GOLDEN.items():
            if name not in own.get(decode, ()) and right is not decode:
                rejected(decode, wire.encode(message), "field")


@pytest.mark.parametrize("depth", [10, 1000, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x"], ids=["array", "map"])
def test_deep_nesting(opening: bytes, depth: int) -> None:
    deep = opening * depth + b"\xc0"
    for decode in DECODERS:
        rejected(decode, deep)
    # In an element that nobody knows, and in a field of another type.
    for name, decode in (("query", wire.decode_query), ("load report", wire.decode_report)):
        data = wire.encode(GOLDEN[name][0])
        grown = bytes([data[0] + 1]) + data[1:] + deep
        try:
            assert decode(grown) == GOLDEN[name][0]
        except PeerError as error:
            assert error.cause in wire.REFUSALS
        raw = pack([name.split()[0], 1])
        rejected(decode, bytes([raw[0] + 1]) + raw[1:] + deep)


@given(st.binary(max_size=200))
@example(b"\x9c\xa5query\x01")
def test_random_bytes(data: bytes) -> None:
    for decode in DECODERS:
        rejected(decode, data)


@given(st.sampled_from(sorted(GOLDEN)), st.data())
def test_damaged_messages(name: str, draw) -> None:
    message, decode, _ = GOLDEN[name]
    data = bytearray(wire.encode(message))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    try:
        decode(bytes(data))
    except PeerError as error:
        assert error.cause in wire.REFUSALS
