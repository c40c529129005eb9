"""The same targets, driven by hypothesis with inputs that have a shape."""

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar import wire
from sidecar.config import settings as keys
from sidecar.journal import record
from sidecar.policies import REASONS
from tests.fuzz.control_side import SETTERS
from tests.fuzz.targets import TARGETS
from tests.test_wire import COUNT, queries

ANY_INT = st.integers(-(2**63), 2**64 - 1)
ATOMS = (
    st.none() | st.booleans() | ANY_INT | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
WANTS = st.builds(
    wire.Want,
    st.integers(0, 1 << 20),
    st.booleans(),
    st.integers(0, 1 << 20),
    st.integers(0, wire.MAX_BLOCKS),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
)
REPLIES = st.builds(
    wire.Reply,
    st.just(wire.VERSION),
    st.integers(0, 4),
    ANY_INT,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    ANY_INT,
    st.lists(st.integers(-1, 5), max_size=3),
    st.lists(st.sampled_from(sorted(REASONS)), max_size=3),
    WANTS,
)
REPORTS = st.builds(
    wire.LoadReport, st.just(wire.VERSION), st.just("i"), st.integers(0, 65535), *[COUNT] * 15
)


def run(name: str, data: bytes) -> None:
    TARGETS[name].run(data)


@settings(max_examples=30)
@given(queries())
def test_queries(message: wire.Query) -> None:
    run("query", wire.encode(message))


@settings(max_examples=60)
@given(REPORTS)
def test_reports(message: wire.LoadReport) -> None:
    run("report", wire.encode(message))


@settings(max_examples=100)
@given(REPLIES)
def test_replies(message: wire.Reply) -> None:
    run("answer", wire.encode(message))


@settings(max_examples=40)
@given(st.sampled_from(["query", "report", "answer"]), st.lists(VALUES, max_size=10))
def test_arrays_of_anything(name: str, values: list[Any]) -> None:
    kind = {"query": "query", "report": "load", "answer": "reply"}[name]
    run(name, msgspec.msgpack.encode([kind, 1, *values]))


@settings(max_examples=40)
@given(st.sampled_from(["dispatch", "log", "chooser"]), st.binary(max_size=400))
def test_lives(name: str, data: bytes) -> None:
    run(name, data)


@settings(max_examples=60)
@given(
    st.sampled_from(["prompt", "telemetry", "http", "environment", "keys"]), st.binary(max_size=200)
)
def test_single_inputs(name: str, data: bytes) -> None:
    run(name, data)


@settings(max_examples=60)
@given(
    st.sampled_from(range(len(SETTERS))), st.sampled_from(["name", "key", "share"]), VALUES, VALUES
)
def test_orders(verb: int, field: str, value: Any, params: Any) -> None:
    try:
        body = json.dumps({"name": "kv_affinity", field: value, "params": params}).encode()
    except TypeError:  # of bytes
        return
    # The bytes before it choose the verb, and that the rest is the body.
    run("verbs", bytes([1, verb, 3]) + body)
    run("client", bytes([0]) + body)


@settings(max_examples=40)
@given(st.sampled_from([".".join(key.path) for key in keys()]), VALUES)
def test_files_of_settings(key: str, value: Any) -> None:
    try:
        text = f"{key} = {json.dumps(value)}\n"
    except TypeError:
        return
    run("settings", bytes([0, 0, 0, 3]) + text.encode())


@settings(max_examples=40)
@given(st.binary(max_size=200), st.booleans())
def test_files_of_a_log(data: bytes, begun: bool) -> None:
    run("journal", record.MAGIC + data if begun else data)
    run("records", data)
