"""Workloads made from traces: mostly small ones written here, some figures of the real ones."""

import gzip
import json
import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.workloads import MissingTraces, WorkloadError, make_workload
from tests.bench.workload_driver import (
    Sent,
    by_session,
    check_lengths,
    most_active,
    play,
    shared,
)

ROOT = Path(__file__).parent.parent.parent
TRACES = ROOT / os.environ.get("TRACES", "../shared/traces")
MOONCAKE = "conversation_trace.jsonl"
SESSIONS = "agentic_coding_sessions.jsonl"


@pytest.fixture
def traces() -> Path:
    if not TRACES.is_dir():
        pytest.skip(f"the public traces are not in {TRACES}; TRACES names their folder")
    return TRACES


def write(path: Path, records: Iterable[object]) -> Path:
    text = "".join(line if isinstance(line, str) else json.dumps(line) for line in lines(records))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path.parent


def lines(records: Iterable[object]) -> Iterable[object]:
    for record in records:
        yield record
        yield "\n"


def mooncake(count: int = 10) -> list[dict[str, Any]]:
    return [
        {
            "timestamp": index * 500,
            "input_length": 512 + 100 + index,
            "output_length": index,
            "hash_ids": [0, index + 1],
        }
        for index in range(count)
    ]


def turn(
    at: float, tokens: int, keep: int, *runs: list[int], think: float | None = 1.0, **more: Any
) -> dict[str, Any]:
    request = {"type": "n", "t": at, "in": tokens, "out": 5, "api_time": 2.0, "keep": keep}
    thinks = {} if think is None else {"think_time": think}
    return {**request, "runs": list(runs), **thinks, **more}


def sub_agent(at: float, *requests: dict[str, Any]) -> dict[str, Any]:
    head = {"type": "subagent", "t": at, "tool_tokens": 64, "system_tokens": 0}
    return {**head, "requests": list(requests)}


def session(name: str, *requests: dict[str, Any], tool: int = 100, system: int = 60) -> dict:
    head = {"id": name, "block_size": 64, "tool_tokens": tool, "system_tokens": system}
    return {**head, "requests": list(requests), "totals": {"passed": "over"}}


def two_sessions() -> list[dict[str, Any]]:
    """They share 160 // 64 = 2 blocks; the first has two sub-agents side by side."""
    return [
        session(
            "a",
            turn(0, 260, 0, [1, 4], think=0.0),
            turn(100, 330, 3, [5, 2], think=98.0),
            sub_agent(105, turn(0, 128, 0, [50, 2]), turn(4, 192, 2, [52, 1])),
            sub_agent(106, turn(0, 192, 0, [60, 3])),
            turn(109, 400, 5, [7, 1], think=7.0),
            # Falls back behind the shared beginning, to block 1 and then 90.
            turn(112, 130, 1, [90, 1]),
        ),
        session("b", turn(0, 200, 0, [1, 3]), turn(9, 256, 3, [4, 1], think=None, out=0)),
    ]


def calls_of(sent: list[Sent]) -> dict[str, list[Sent]]:
    return {each[0].call.key.partition("-")[0]: each for each in by_session(sent).values()}


def original(record: dict[str, Any]) -> dict[str, Any]:
    """As the public original has it: every id of every request."""
    before: list[int] = []
    requests = []
    for each in record["requests"]:
        if each["type"] == "subagent":
            requests.append(original(each))
            continue
        ids = before[: each["keep"]] + [
            block for first, count in each["runs"] for block in range(first, first + count)
        ]
        before = ids
        rest = {name: value for name, value in each.items() if name not in ("keep", "runs")}
        requests.append({**rest, "hash_ids": ids})
    return {**record, "requests": requests}


# Mooncake


@pytest.mark.parametrize("name", [MOONCAKE, MOONCAKE + ".gz", "mooncake_" + MOONCAKE + ".gz"])
def test_mooncake_is_sent_at_the_recorded_times(tmp_path: Path, name: str) -> None:
    workload = make_workload("mooncake", write(tmp_path / name, mooncake()))
    sent = play(workload, 0, lambda _: 1e6)
    check_lengths(sent, 512)
    assert workload.page_tokens == 512
    assert [each.at for each in sent] == [index / 2 for index in range(10)]
    assert [each.call.prompt_tokens for each in sent] == [612 + index for index in range(10)]
    assert [each.call.output_tokens for each in sent] == [1, *range(1, 10)]
    assert sent[3].call.pages == (0, 4)
    assert {each.call.key for each in sent} == {""}


def test_mooncake_windows_and_loops(tmp_path: Path) -> None:
    folder = write(tmp_path / MOONCAKE, mooncake(100))
    windows = {
        tuple(each.call.session for each in play(make_workload("mooncake:requests=10", folder), s))
        for s in range(5)
    }
    assert len(windows) > 1
    assert all(after == before + 1 for each in windows for before, after in pairwise(each))
    fast = play(make_workload("mooncake:speed=5:requests=100", folder), 0)
    assert [each.at for each in fast] == pytest.approx([index / 10 for index in range(100)])
    closed = play(make_workload("mooncake:concurrency=7", folder))
    assert (len(closed), most_active(closed)) == (100, 7)
    poisson = play(make_workload("mooncake:rate=2", folder), 0, lambda _: 1e6)
    assert len({each.at for each in poisson}) == 100
    with pytest.raises(WorkloadError, match="at most one"):
        make_workload("mooncake:rate=2:speed=3", folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"timestamp": None}, "Expected `float`, got `null` - at `$.timestamp`"),
        ({"timestamp": 1}, "timestamp: less than that of the line before"),
        ({"input_length": 0}, "Expected `int` >= 1 - at `$.input_length`"),
        ({"input_length": 2000}, "hash_ids: 2 ids, but input_length 2000 fills 4 blocks of 512"),
        ({"output_length": -1}, "Expected `int` >= 0 - at `$.output_length`"),
        ({"hash_ids": "x"}, "Expected `array`, got `str` - at `$.hash_ids`"),
    ],
)
def test_mooncake_names_line_and_field(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    records = mooncake(5)
    records[3].update(change)
    with pytest.raises(WorkloadError) as error:
        make_workload("mooncake", write(tmp_path / MOONCAKE, records))
    assert f"{MOONCAKE}: line 4: " in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_mooncake_names_a_missing_column(tmp_path: Path, field: str) -> None:
    records = mooncake(3)
    del records[1][field]
    with pytest.raises(WorkloadError, match=f"line 2: .*missing required field `{field}`"):
        make_workload("mooncake", write(tmp_path / MOONCAKE, records))


@pytest.mark.parametrize(("name", "spec"), [(MOONCAKE, "mooncake"), (SESSIONS, "agentic-trace-32")])
def test_broken_files(tmp_path: Path, name: str, spec: str) -> None:
    with pytest.raises(WorkloadError, match=f"{name}: the trace is empty"):
        make_workload(spec, write(tmp_path / name, []))
    with pytest.raises(WorkloadError, match=f"{name}: the trace is empty"):
        make_workload(spec, write(tmp_path / name, ["", " "]))
    with pytest.raises(WorkloadError, match=f"{name}: line 2: JSON is malformed"):
        make_workload(spec, write(tmp_path / name, ["", "{'}"]))
    (tmp_path / name).write_bytes(b'"\xff"\n')
    with pytest.raises(WorkloadError, match=f"{name}: line 1: "):
        make_workload(spec, tmp_path)
    (tmp_path / name).unlink()
    good = mooncake(50) if spec == "mooncake" else two_sessions() * 20
    write(tmp_path / f"{name}.gz", good)
    data = (tmp_path / f"{name}.gz").read_bytes()
    for broken in (data[:-20], b"no gzip", data[:40] + b"\0" * 40 + data[80:]):
        (tmp_path / f"{name}.gz").write_bytes(broken)
        with pytest.raises(WorkloadError, match=f"{name}.gz: "):
            make_workload(spec, tmp_path)


@pytest.mark.parametrize(
    ("spec", "origin"),
    [
        ("mooncake", "kvcache-ai/Mooncake on GitHub, FAST25-release/traces"),
        ("agentic-trace-64", "traces/trace_*.json of callanjfox/kv-cache-tester"),
    ],
)
def test_missing_traces_say_where_the_originals_are(tmp_path: Path, spec, origin) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(MissingTraces) as error:
            make_workload(spec, folder)
        assert origin in str(error.value)
        assert str(folder) in str(error.value)


# Sessions of an agentic coding tool


def test_sessions_in_recorded_order_with_think_times(tmp_path: Path) -> None:
    workload = make_workload("agentic-trace-32", write(tmp_path / SESSIONS, two_sessions()))
    sent = play(workload)
    check_lengths(sent, 64)
    sessions = calls_of(sent)
    # a: think time capped at 60; sub-agents 105 - 102 s after that; the next 109 - 106 s after
    # the last of them, as its think time counts from before them.
    assert [(s.call.turn, s.at) for s in sessions["a"]] == [
        (0, 0.0),
        (1, 61.0),
        (2, 65.0),
        (4, 65.0),
        (3, 67.0),
        (5, 71.0),
        (6, 73.0),
    ]
    # b: no think time, so what was recorded: 9 - (0 + 2).
    assert [(s.call.turn, s.at) for s in sessions["b"]] == [(0, 0.0), (1, 8.0)]
    assert [s.call.output_tokens for s in sessions["b"]] == [5, 1]


def test_sessions_share_what_they_are_assumed_to(tmp_path: Path) -> None:
    records = [*two_sessions(), session("c", turn(0, 640, 0, [1, 10]), tool=101)]
    sessions = calls_of(
        play(make_workload("agentic-trace-32", write(tmp_path / SESSIONS, records)))
    )
    a = {s.call.turn: s.call for s in sessions["a"]}
    b, c = sessions["b"][0].call, sessions["c"][0].call
    assert shared(a[0], a[1]) == 3
    assert shared(a[1], a[5]) == 5
    assert shared(a[0], b) == 2
    assert shared(b, sessions["b"][1].call) == 3
    assert {shared(each, c) for each in (*a.values(), b)} == {0}
    # Sub-agents have another beginning: one block.
    assert {shared(a[0], a[2]), shared(a[0], a[4])} == {0}
    assert (shared(a[2], a[3]), shared(a[2], a[4])) == (2, 1)
    # Where a session leaves the shared beginning, it leaves it.
    assert shared(a[6], b) == 1


@pytest.mark.parametrize(("option", "keys"), [("", 1), (":subagent_keys=own", 3)])
def test_session_keys(tmp_path: Path, option: str, keys: int) -> None:
    folder = write(tmp_path / SESSIONS, two_sessions())
    workload = make_workload("agentic-trace-32" + option, folder)
    found = {s.call.key for s in play(workload) if s.call.key.startswith("a-")}
    assert len(found) == keys
    assert found == {s.call.key for s in play(workload) if s.call.key.startswith("a-")}
    assert not found & {s.call.key for s in play(workload, 1)}


def test_originals_give_the_same_calls(tmp_path: Path) -> None:
    encoded = make_workload("agentic-trace-32", write(tmp_path / SESSIONS, two_sessions()))
    folder = tmp_path / "originals"
    folder.mkdir()
    for each in two_sessions():
        write(folder / f"trace_{each['id']}.json", [original(each)])
    decoded = make_workload("agentic-trace-32", folder)
    assert msgspec.json.encode(play(decoded)) == msgspec.json.encode(play(encoded))


def test_slots_caps_and_order(tmp_path: Path) -> None:
    many = [
        session(
            f"s{n}",
            *(
                turn(t, 64 * (t + 3), t + 2 if t else 0, [t + 3 if t else 1, 1 if t else 3])
                for t in range(20)
            ),
        )
        for n in range(40)
    ]
    folder = write(tmp_path / (SESSIONS + ".gz"), many)
    sent = play(make_workload("agentic-trace-32", folder), 0, lambda c: 1.0 + c.id % 3)
    assert len(sent) == 40 * 16
    assert most_active(sent) == 32
    order = [s.call.session for s in sent if s.call.turn == 0]
    assert sorted(order) == list(range(40)) != order
    assert order != [
        s.call.session
        for s in play(make_workload("agentic-trace-32", folder), 1)
        if s.call.turn == 0
    ]
    with pytest.raises(WorkloadError, match="max_context: every session"):
        make_workload("agentic-trace-32:max_context=100", folder)
    few = play(make_workload("agentic-trace-32:turns=20:sessions=5:max_context=640", folder))
    assert len(few) == 5 * 8
    assert max(s.call.prompt_tokens for s in few) == 640
    opened = play(make_workload("agentic-trace-32:rate=50", folder), 0, lambda _: 1e6)
    assert len({s.at for s in opened if s.at < 1e6}) == 40


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"keep": 9}, "requests[1].keep: 9, but the request before has 4 blocks"),
        ({"in": 900}, "requests[1]: 5 blocks, but `in` fills 14 of 64 tokens"),
        ({"runs": None}, "requests[1]: neither `hash_ids` nor `keep` and `runs`"),
        ({"in": 0}, "Expected `int` >= 1 - at `$.requests[1].in`"),
        ({"type": "x"}, "Invalid value 'x' - at `$.requests[1].type`"),
        ({"think_time": "long"}, "Expected `float | null`, got `str`"),
        ({"t": -1}, "Expected `float` >= 0.0 - at `$.requests[1].t`"),
        ({"runs": [[-1, 2]]}, "Expected `int` >= 0 - at `$.requests[1].runs[0][0]`"),
    ],
)
def test_sessions_name_line_and_field(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    records = two_sessions()
    records[0]["requests"][1].update(change)
    with pytest.raises(WorkloadError) as error:
        make_workload("agentic-trace-32", write(tmp_path / SESSIONS, [*records[::-1]]))
    assert f"{SESSIONS}: line 2: " in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize("field", ["id", "block_size", "tool_tokens", "requests"])
def test_sessions_name_a_missing_column(tmp_path: Path, field: str) -> None:
    records = two_sessions()
    del records[1][field]
    with pytest.raises(WorkloadError, match=f"line 2: .*missing required field `{field}`"):
        make_workload("agentic-trace-32", write(tmp_path / SESSIONS, records))


def test_other_block_sizes_are_refused(tmp_path: Path) -> None:
    records = two_sessions()
    records[0]["block_size"] = 16
    with pytest.raises(WorkloadError, match="line 1: block_size: 16, must be 64"):
        make_workload("agentic-trace-32", write(tmp_path / SESSIONS, records))


# The public traces


def test_mooncake_figures(traces: Path) -> None:
    sent = play(make_workload("mooncake:requests=20000", traces))
    assert len(sent) == 12_031
    assert {each.call.pages[0] for each in sent} == {0}
    assert sum(each.call.prompt_tokens for each in sent) / 12_031 == pytest.approx(12_035, abs=1)
    assert sent[-1].at == pytest.approx(3_536.999)
    assert len(play(make_workload("mooncake", traces), 4)) == 4000


def test_agentic_session_figures(traces: Path) -> None:
    workload = make_workload("agentic-trace-256", traces)
    sent = play(workload)
    check_lengths(sent, 64)
    # 29 of the 355 sessions begin with more than 262,144 tokens.
    assert len(by_session(sent)) == 326
    assert len(sent) == 4783
    assert most_active(sent) == 256
    assert max(each.call.prompt_tokens for each in sent) <= 262_144
    everything = make_workload("agentic-trace-64:turns=1000:max_context=1000000", traces)
    assert "355 recorded" in everything.description
