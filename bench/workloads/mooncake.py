"""The Mooncake conversation trace: no keys, recorded times, prompts as ids of 512-token blocks.

Format, as published: a JSON object a line with `timestamp` (ms, ascending), `input_length`,
`output_length` (tokens) and `hash_ids` (an id a block; the last may be partly filled). Requests do
not name their session, so each is a session of its own here. Times are recorded in steps of 3 s:
some ten requests come at once, which `rate` (3.4 a second as recorded) spreads. The seed draws the
window of requests, and the times with `rate`; nothing else.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from bench.workloads.base import Call, Source
from bench.workloads.common import CALLS, Count, Half, Params, Rate, once, poisson, rng
from bench.workloads.trace_files import at_line, find, read_lines

BLOCK = 512
NAMES = (
    "mooncake_conversation_trace.jsonl.gz",
    "mooncake_conversation_trace.jsonl",
    "conversation_trace.jsonl.gz",
    "conversation_trace.jsonl",
)
ORIGIN = "conversation_trace.jsonl of kvcache-ai/Mooncake on GitHub, FAST25-release/traces"

Natural = Annotated[int, Meta(ge=0)]


class Record(msgspec.Struct):
    """One request as published."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Natural
    hash_ids: list[Natural]


class MooncakeParams(Params, frozen=True, kw_only=True):
    """Recorded times divided by `speed`, else Poisson at `rate`, else `concurrency` at a time."""

    requests: Count = 4000
    """As many in a row; the seed draws where they begin. More than there are: all."""
    speed: Rate = 1.0
    rate: Rate | None = None
    concurrency: Count | None = None
    half: Half = "all"
    """Windows in the first half of the trace (even), or in the second (odd)."""

    def __post_init__(self) -> None:
        chosen = (self.speed != 1.0) + (self.rate is not None) + (self.concurrency is not None)
        if chosen > 1:
            raise ValueError("speed, rate, concurrency: at most one of them")


def read(traces: Path) -> list[Record]:
    """The trace in that folder, checked."""
    path = find(traces, NAMES, ORIGIN)
    records: list[Record] = []
    for number, record in read_lines(path, Record):
        blocks = -(-record.input_length // BLOCK)
        if len(record.hash_ids) != blocks:
            problem = (
                f"hash_ids: {len(record.hash_ids)} ids, but input_length {record.input_length} "
                f"fills {blocks} blocks of {BLOCK}"
            )
            raise at_line(path, number, problem)
        if records and record.timestamp < records[-1].timestamp:
            raise at_line(path, number, "timestamp: less than that of the line before")
        records.append(record)
    return records


class Mooncake:
    """A window of the trace."""

    page_tokens: int = BLOCK

    def __init__(self, name: str, params: MooncakeParams, records: Sequence[Record]) -> None:
        self.name = name
        self.params = params
        middle = len(records) // 2
        part = {"all": slice(None), "even": slice(middle), "odd": slice(middle, None)}[params.half]
        self._records = records[part]
        self._count = min(params.requests, len(self._records))
        if params.rate is not None:
            how = f"open loop, Poisson, {params.rate:g} requests a second"
        elif params.concurrency is not None:
            how = f"closed loop, {params.concurrency:,} requests at a time"
        else:
            how = f"open loop at the recorded times, {params.speed:g} times as fast"
        self.description = (
            f"{self._count:,} consecutive requests of {len(self._records):,} of Mooncake's "
            f"conversation trace, without keys, blocks of {BLOCK} tokens; {how}."
        )

    def make(self, seed: int) -> Source:
        p = self.params
        first = rng("mooncake", "window", seed).randint(0, len(self._records) - self._count)
        window = self._records[first : first + self._count]
        scripts = (once(_call(index, record)) for index, record in enumerate(window, first))
        if p.concurrency is not None:
            return Source(((0.0, script) for script in scripts), p.concurrency)
        return Source(zip(self._times(seed, window), scripts, strict=False))

    def _times(self, seed: int, window: Sequence[Record]) -> Iterator[float]:
        if self.params.rate is not None:
            return poisson(self.params.rate, rng("mooncake", "arrivals", seed))
        begin = window[0].timestamp
        return ((record.timestamp - begin) / 1000 / self.params.speed for record in window)


def _call(index: int, record: Record) -> Call:
    return Call(
        id=index * CALLS,
        session=index,
        turn=0,
        key="",
        pages=tuple(record.hash_ids),
        prompt_tokens=record.input_length,
        output_tokens=max(record.output_length, 1),
    )
