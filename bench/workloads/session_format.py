"""Recorded sessions of an agentic coding tool: the traces of callanjfox/kv-cache-tester.

Two formats are read. The public original is a file `trace_*.json` a session; a request has
`hash_ids`, the ids of all the 64-token blocks that its prompt fills. Since prompts grow, that is
mostly repetition, so `agentic_coding_sessions.jsonl.gz` was re-encoded from it, a session a line:
`keep` is how many ids a request has in common with the one before of the same agent, from the
first on, and `runs` the ids after those as `[[first_id, count], ...]`.

Either way a session has `tool_tokens` and `system_tokens`, the length of the tools and the system
prompt it begins with, and so has a request of type `subagent`, which holds its own `requests`. The
others (`n`, `s`) have `t` (seconds since the session began), `in` and `out` (tokens), and mostly
`api_time` and `think_time` (seconds). Ids are taken as local to the session.
Other fields are passed over.
"""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from bench.workloads.common import STREAM, WorkloadError
from bench.workloads.trace_files import at_line, missing, read_file, read_lines

NAMES = ("agentic_coding_sessions.jsonl.gz", "agentic_coding_sessions.jsonl")
ORIGINALS = "trace_*.json"
ORIGIN = "the files traces/trace_*.json of callanjfox/kv-cache-tester on GitHub"
BLOCK = 64

Natural = Annotated[int, Meta(ge=0)]
LocalId = Annotated[int, Meta(ge=0, lt=STREAM // 4)]
Length = Annotated[int, Meta(ge=1, lt=STREAM)]
Time = Annotated[float, Meta(ge=0)]


class Turn(msgspec.Struct, kw_only=True):
    """A request; keep and runs are always there once it is read."""

    t: Time
    prompt: Length = msgspec.field(name="in")
    out: Natural
    api_time: Time = 0.0
    think_time: Time | None = None
    keep: Natural | None = None
    runs: list[tuple[LocalId, Length]] | None = None
    hash_ids: list[LocalId] | None = None


class Plain(Turn, kw_only=True, tag_field="type", tag="n"):
    """Answered at once."""


class Streamed(Turn, kw_only=True, tag_field="type", tag="s"):
    """Answered as a stream; some tools send a prompt both ways, one after the other."""


class SubAgent(msgspec.Struct, kw_only=True, tag_field="type", tag="subagent"):
    """Requests of a sub-agent; the session goes on when they are done."""

    t: Time
    tool_tokens: Natural
    system_tokens: Natural
    requests: list[Plain | Streamed]


class Session(msgspec.Struct, kw_only=True):
    """A session with its sub-agents in recorded order."""

    id: str
    block_size: Natural
    tool_tokens: Natural
    system_tokens: Natural
    requests: list[Plain | Streamed | SubAgent]


def read(traces: Path) -> list[Session]:
    """The sessions in that folder, checked and re-encoded if they are originals."""
    for name in NAMES:
        path = traces / name
        if path.is_file():
            return [_checked(each, path, number) for number, each in read_lines(path, Session)]
    originals = sorted(traces.glob(ORIGINALS))
    if not originals:
        raise missing(traces, (*NAMES, ORIGINALS), ORIGIN)
    return [_checked(read_file(path, Session), path, 1) for path in originals]


def _checked(session: Session, path: Path, line: int) -> Session:
    try:
        if session.block_size != BLOCK:
            raise WorkloadError(f"block_size: {session.block_size}, must be {BLOCK}")
        _check_agent(session.requests, "requests")
    except WorkloadError as error:
        raise at_line(path, line, error) from error
    return session


def _check_agent(requests: Iterable[Plain | Streamed | SubAgent], where: str) -> None:
    """Every request continues the one before; originals are re-encoded."""
    before: list[int] = []
    length = 0
    for index, each in enumerate(requests):
        here = f"{where}[{index}]"
        if isinstance(each, SubAgent):
            _check_agent(each.requests, f"{here}.requests")
            continue
        if each.hash_ids is not None:
            ids, each.hash_ids = each.hash_ids, None
            each.keep, each.runs = _encoded(before, ids)
            before = ids
        if each.keep is None or each.runs is None:
            raise WorkloadError(f"{here}: neither `hash_ids` nor `keep` and `runs`")
        if each.keep > length:
            raise WorkloadError(
                f"{here}.keep: {each.keep}, but the request before has {length} blocks"
            )
        length = each.keep + sum(count for _, count in each.runs)
        if length < each.prompt // BLOCK:
            raise WorkloadError(
                f"{here}: {length} blocks, but `in` fills {each.prompt // BLOCK} of {BLOCK} tokens"
            )


def _encoded(before: list[int], ids: list[int]) -> tuple[int, list[tuple[int, int]]]:
    keep = 0
    for old, new in zip(before, ids, strict=False):
        if old != new:
            break
        keep += 1
    # Consecutive ids have one difference to their place.
    groups = groupby(enumerate(ids[keep:]), key=lambda pair: pair[1] - pair[0])
    runs = []
    for _, group in groups:
        members = [block for _, block in group]
        runs.append((members[0], len(members)))
    return keep, runs
