"""The wire: golden bytes and endpoints. Older and newer peers: test_wire_growth.py; bad messages:
test_wire_bad_input.py."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar import wire
from sidecar.errors import EndpointError
from sidecar.wire import LoadReport, Past, Query, Refusal, Reply, RequestFacts, Telemetry, Want
from tests.support import query

FULL = Query(
    version=1,
    seq=7,
    instance="host:30000",
    epoch=1_700_000_000_000_000_000,
    ranks=[0, 1, 7],
    sent=[10, 20, 2**40],
    sent_tokens=[100, 200, 300],
    requests=[
        RequestFacts(
            routing_key=b"session-1",
            namespace=2**64 - 1,
            tokens=4096,
            prefix_hash=0x1122334455667788,
            block_hashes=[1, 2**64 - 1],
            last_rank=7,
            last_age_ms=1500,
        ),
        RequestFacts(),
    ],
    bypassed={"deadline": 3},
    abstained={"pinned": 2},
    about={"sglang": "0.5.23"},
    history=[
        Past(RequestFacts(b"session-2", 5, 900, block_hashes=[3, 2**64 - 1]), rank=1, age_ms=2500),
        Past(RequestFacts(), rank=0, age_ms=0),
    ],
    telemetry=Telemetry(
        round_trips=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 2**40, 0, 1],
        round_trip_ns=1_234_567_890,
        breaker_opened=3,
        breaker_open=True,
    ),
)
GOLDEN = {
    "query": (
        FULL,
        wire.decode_query,
        "9ea571756572790107aa686f73743a3330303030cf17979cfe362a000093000107930a14cf00000100000000"
        "009364ccc8cd012c9297c40973657373696f6e2d31cfffffffffffffffffcd1000cf11223344556677889201"
        "cfffffffffffffffff07cd05dc97c4000000c090ffff81a8646561646c696e650381a670696e6e65640281a6"
        "73676c616e67a6302e352e3233929397c40973657373696f6e2d3205cd0384c09203cfffffffffffffffffff"
        "ff01cd09c49397c4000000c090ffff0000949e0908070605040302010000cf00000100000000000001ce4996"
        "02d203c3",
    ),
    "minimal query": (
        Query(1, 1, "i", 0, [], [], [], []),
        wire.decode_query,
        "9ea571756572790101a1690090909090c0c0c090c0",
    ),
    "reply": (
        Reply(
            version=1,
            seq=7,
            boot=1_700_000_000_000_000_000,
            policy="prefix_affinity",
            policy_version=2,
            ranks=[7, 0],
            reasons=["affinity_hit", "fallback"],
            want=Want(4096, False, 64, 128, 14, 8192),
        ),
        wire.decode_answer,
        "99a57265706c790107cf17979cfe362a0000af7072656669785f616666696e6974790292070092ac61666669"
        "6e6974795f686974a866616c6c6261636b96cd1000c240cc800ecd2000",
    ),
    "refusal": (
        Refusal(1, 7, "no_live_rank", "the query names no live rank"),
        wire.decode_answer,
        "95a77265667573616c0107ac6e6f5f6c6976655f72616e6bbc746865207175657279206e616d6573206e6f20"
        "6c6976652072616e6b",
    ),
    "load report": (
        LoadReport(
            version=1,
            instance="host:30000",
            rank=7,
            epoch=1_700_000_000_000_000_001,
            seq=42,
            received=1000,
            received_tokens=2_000_000,
            running=3,
            waiting=4,
            tokens=5000,
            capacity_tokens=100_000,
            max_running=256,
            waiting_uncached_tokens=600,
            prefilling_tokens=8192,
            admitted_tokens=1_900_000,
            cached_tokens=1_200_000,
            flushes=2,
            recent_uncached_tokens=70_000,
        ),
        wire.decode_report,
        "dc0013a46c6f616401aa686f73743a333030303007cf17979cfe362a00012acd03e8ce001e84800304cd1388"
        "ce000186a0cd0100cd0258cd2000ce001cfde0ce00124f8002ce00011170",
    ),
}


def raw_of(message: Any) -> list[Any]:
    """A message as the plain lists that another language sees."""
    return msgspec.msgpack.decode(wire.encode(message))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name: str) -> None:
    message, decode, golden = GOLDEN[name]
    assert wire.encode(message).hex() == golden
    assert decode(bytes.fromhex(golden)) == message


def test_defaults_are_not_shared() -> None:
    RequestFacts().block_hashes.append(1)
    assert RequestFacts().block_hashes == []
    query().history.append(Past(RequestFacts(), 0, 0))
    assert query().history == []


U64 = st.integers(0, 2**64 - 1)
COUNT = st.integers(0, 2**62)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=64)
FACTS = st.builds(
    RequestFacts,
    st.binary(max_size=wire.MAX_KEY_BYTES),
    U64,
    COUNT,
    st.none() | U64,
    st.lists(U64, max_size=8),
    st.integers(-1, 65535),
    st.integers(-1, 2**62),
)
BUCKETS = st.lists(
    COUNT, min_size=len(wire.ROUND_TRIP_US) + 1, max_size=len(wire.ROUND_TRIP_US) + 1
)
CAUSES = st.none() | st.dictionaries(TEXT, COUNT, max_size=4)


@st.composite
def queries(draw: st.DrawFn) -> Query:
    ranks = draw(st.lists(st.integers(0, 65535), max_size=8))
    counts = st.lists(COUNT, min_size=len(ranks), max_size=len(ranks))
    return query(
        draw(st.lists(FACTS, max_size=4)),
        ranks=ranks,
        sent=draw(counts),
        sent_tokens=draw(counts),
        seq=draw(COUNT),
        instance=draw(TEXT.filter(bool)),
        epoch=draw(COUNT),
        bypassed=draw(CAUSES),
        abstained=draw(CAUSES),
        about=draw(st.none() | st.dictionaries(TEXT, TEXT, max_size=4)),
        history=draw(st.lists(st.builds(Past, FACTS, st.integers(0, 65535), COUNT), max_size=4)),
        telemetry=draw(st.none() | st.builds(Telemetry, BUCKETS, COUNT, COUNT, st.booleans())),
    )


@given(queries())
def test_round_trip(message: Query) -> None:
    assert wire.decode_query(wire.encode(message)) == message


def test_every_bound_is_reached() -> None:
    facts = RequestFacts(b"k" * 1024, 2**64 - 1, 2**62, 2**64 - 1, [2**64 - 1] * 4096, 65535, 2**62)
    message = query(
        [facts],
        ranks=range(65536 - 1024, 65536),
        sent=[2**62] * 1024,
        sent_tokens=[2**62] * 1024,
        seq=2**62,
        instance="é" * 128,
        bypassed={f"{i:064}": 2**62 for i in range(32)},
        about={f"{i:064}": "é" * 256 for i in range(32)},
    )
    assert wire.decode_query(wire.encode(message)) == message
    batch = query(
        [RequestFacts()] * wire.MAX_BATCH,
        history=[Past(RequestFacts(), 65535, 2**62)] * wire.MAX_BATCH,
        telemetry=Telemetry([2**62] * (len(wire.ROUND_TRIP_US) + 1), 2**62, 2**62, True),
    )
    assert wire.decode_query(wire.encode(batch)) == batch
    want = Want(1 << 20, True, 1 << 20, 4096, 1 << 20, 1 << 20)
    reply = Reply(1, 1, 1, "p", 1, [], [], want)
    assert wire.decode_answer(wire.encode(reply)).want == want


def test_reports_have_their_own_socket() -> None:
    assert wire.report_endpoint("ipc:///run/x.sock") == "ipc:///run/x.sock.reports"
    assert wire.report_endpoint("tcp://127.0.0.1:5555") == "tcp://127.0.0.1:5556"
    assert wire.report_endpoint("tcp://[::1]:65534") == "tcp://[::1]:65535"


SPARE = wire.MAX_IPC_PATH_BYTES - len(".reports")


@pytest.mark.parametrize("letter", ["a", "é"])
def test_ipc_path_at_the_limit(letter: str) -> None:
    size = len(letter.encode())
    path = "/" + letter * ((SPARE - 1) // size)
    path += "x" * (SPARE - len(path.encode()))
    assert wire.check_endpoint(f"ipc://{path}", allow_tcp=False) == f"ipc://{path}"
    assert (
        len(wire.report_endpoint(path and f"ipc://{path}").removeprefix("ipc://").encode()) == 107
    )
    with pytest.raises(EndpointError, match=f"{SPARE + 1} bytes, at most {SPARE}"):
        wire.check_endpoint(f"ipc://{path}x", allow_tcp=False)


@pytest.mark.parametrize("port", ["1", "5555", "65534"])
def test_tcp_needs_leave(port: str) -> None:
    endpoint = f"tcp://127.0.0.1:{port}"
    assert wire.check_endpoint(endpoint, allow_tcp=True) == endpoint
    with pytest.raises(EndpointError, match="allow_insecure_tcp"):
        wire.check_endpoint(endpoint, allow_tcp=False)


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("ipc://run/x.sock", "absolute path"),
        ("ipc://", "absolute path"),
        ("ipc://./x", "absolute path"),
        *[(f"tcp://h:{port}", "1 to 65534") for port in ("0", "65535", "99999", "-1", "x", "")],
        *[(f"tcp://h:{port}", "1 to 65534") for port in ("1.5", " 5", "²", "*")],
        ("tcp://h", "1 to 65534"),
        ("tcp://", "1 to 65534"),
        ("http://h:80", "ipc:// or tcp://"),
        ("IPC:///x", "ipc:// or tcp://"),
        ("/run/x.sock", "ipc:// or tcp://"),
        ("inproc://x", "ipc:// or tcp://"),
        ("", "ipc:// or tcp://"),
    ],
)
def test_bad_endpoints(endpoint: str, text: str) -> None:
    with pytest.raises(EndpointError, match=text):
        wire.check_endpoint(endpoint, allow_tcp=True)


@pytest.mark.parametrize("endpoint", ["ipc:///a\0b", "tcp://:5555", "tcp://h:\u0663"])
def test_endpoints_that_no_socket_takes(endpoint: str) -> None:
    """A NUL ends a path early, an empty host and foreign digits reach libzmq as they are."""
    with pytest.raises(EndpointError):
        wire.check_endpoint(endpoint, allow_tcp=True)
