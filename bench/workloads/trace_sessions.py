"""The real agentic sessions, N at a time: recorded order, lengths, think times and sub-agents.

- Prompts are recorded as 64-token blocks with ids local to the session; they become global here.
  Sessions (and sub-agents) with equal (tool_tokens, system_tokens) are assumed to begin with the
  same (tool_tokens + system_tokens) // 64 blocks. Every result on this workload depends on that.
- A partly filled last block has no id in the trace and is taken as never shared.
- Think times are capped at 60 s: people leave for hours.
- Sub-agents that follow each other directly run side by side, and the session waits for them.
  They send the session's key unless `subagent_keys=own`.
- A session ends after `turns` requests (16 by default: about 4,700 in all instead of 25,004), and
  before its first prompt over `max_context` tokens: single prompts reach 894,371, which no rank
  holds. Both hold for each sub-agent too.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from bench.workloads.base import Call, Fork, Script, Send, Source
from bench.workloads.common import (
    CALLS,
    STREAM,
    Count,
    Half,
    Params,
    Rate,
    Seconds,
    Tokens,
    WorkloadError,
    key,
    loop,
    pace,
    rng,
)
from bench.workloads.session_format import BLOCK, Plain, Session, Streamed, SubAgent

Item = Plain | Streamed | SubAgent


class TraceSessionsParams(Params, frozen=True, kw_only=True):
    """How much of the trace, and how fast."""

    concurrency: Count = 64
    rate: Rate | None = None
    sessions: Count = 1000
    """As many of the shuffled sessions; more than there are: all."""
    turns: Count = 16
    max_context: Tokens = 262_144
    max_think: Seconds = 60.0
    subagent_keys: Literal["session", "own"] = "session"
    half: Half = "all"
    """Sessions whose place in the trace is even, or odd."""


class _Agent(msgspec.Struct):
    """Who makes calls: a session or one of its sub-agents."""

    session: int
    key: str
    items: list[Item]
    prefix: tuple[int, int]
    """(tool_tokens, system_tokens)"""
    turn: int = 0
    """Turn number of its first call within the session, given out before it starts."""


class TraceSessions:
    """Sessions of the trace; the seed draws their order and keys."""

    page_tokens: int = BLOCK

    def __init__(self, name: str, params: TraceSessionsParams, sessions: Sequence[Session]) -> None:
        self.name = name
        self.params = p = params
        self._streams = len(sessions)
        # Shared beginnings, numbered as they appear; their streams follow those of sessions.
        distinct = dict.fromkeys(_prefixes(sessions))
        self._prefixes = {prefix: number for number, prefix in enumerate(distinct)}
        kept = ((index, each, self._kept(each.requests)) for index, each in enumerate(sessions))
        parts = {"all": (0, 1), "even": (0,), "odd": (1,)}[p.half]
        self._sessions = [
            (index, each, items) for index, each, items in kept if items and index % 2 in parts
        ]
        if not self._sessions:
            raise WorkloadError(f"{name}: max_context: every session begins with more tokens")
        self._count = min(p.sessions, len(self._sessions))
        self.description = (
            f"{self._count:,} recorded agentic sessions of at most {p.turns:,} requests and "
            f"{p.max_context:,} tokens of context, think times up to {p.max_think:g} s, "
            f"sessions with equal tool and system prompt lengths assumed to share them, "
            f"key: the session's, sub-agents: {p.subagent_keys}; "
            f"{pace(p.concurrency, p.rate, 'sessions', self._count)}."
        )

    def make(self, seed: int) -> Source:
        p = self.params
        order = list(self._sessions)
        rng("agentic-trace", "order", seed).shuffle(order)
        agents = (
            _Agent(
                index,
                f"{each.id}-{key('agentic-trace', seed, index)}",
                items,
                (each.tool_tokens, each.system_tokens),
            )
            for index, each, items in order[: self._count]
        )
        return loop(
            map(self._play, agents),
            concurrency=p.concurrency,
            rate=p.rate,
            random=rng("agentic-trace", "arrivals", seed),
        )

    def _kept(self, items: Sequence[Item]) -> list[Item]:
        """What is left of an agent's requests; sub-agents count as one."""
        kept: list[Item] = []
        for each in items[: self.params.turns]:
            if not isinstance(each, SubAgent) and each.prompt > self.params.max_context:
                break
            kept.append(each)
        return kept

    def _play(self, agent: _Agent) -> Script:
        blocks = _Blocks(agent, (self._streams + self._prefixes[agent.prefix]) * STREAM)
        # Recorded times count from the agent's first request, and nobody thinks before that.
        turn, ended, waited = agent.turn, agent.items[0].t if agent.items else 0.0, True
        for together, group in groupby(agent.items, lambda each: isinstance(each, SubAgent)):
            if together:
                subs = [each for each in group if isinstance(each, SubAgent)]
                team = self._team(agent, turn, subs)
                yield Fork([self._play(each) for each in team], self._pause(subs[0].t - ended))
                turn += sum(len(each.items) for each in team)
                ended, waited = subs[-1].t, True
                continue
            for each in (each for each in group if not isinstance(each, SubAgent)):
                # After sub-agents the recorded think time counts from the request before them.
                think = None if waited else each.think_time
                pause = self._pause(each.t - ended if think is None else think)
                yield Send(_call(agent, blocks, each, turn), pause)
                turn += 1
                ended, waited = each.t + each.api_time, False

    def _team(self, agent: _Agent, turn: int, subs: Sequence[SubAgent]) -> list[_Agent]:
        """Sub-agents that run side by side; turn: of the first call of the first of them."""
        own = self.params.subagent_keys == "own"
        team = []
        for each in subs:
            items, prefix = self._kept(each.requests), (each.tool_tokens, each.system_tokens)
            name = f"{agent.key}/{turn}" if own else agent.key
            team.append(_Agent(agent.session, name, items, prefix, turn))
            turn += len(items)
        return team

    def _pause(self, seconds: float) -> float:
        return min(max(seconds, 0.0), self.params.max_think)


def _prefixes(items: Sequence[Session | Item]) -> Iterator[tuple[int, int]]:
    """(tool_tokens, system_tokens) of all sessions and sub-agents."""
    for each in items:
        if isinstance(each, Session | SubAgent):
            yield each.tool_tokens, each.system_tokens
            yield from _prefixes(each.requests)


class _Blocks:
    """The prompt of an agent in global ids, extended when a request is due."""

    def __init__(self, agent: _Agent, prefix_page: int) -> None:
        self._own = agent.session * STREAM
        self._prefix_page = prefix_page
        self._prefix_blocks = sum(agent.prefix) // BLOCK
        self._shared: dict[int, int] | None = None
        """Local ids of the shared beginning -> global ids; None before the first request."""
        self._ids: list[int] = []

    def follow(self, request: Plain | Streamed, turn: int) -> tuple[int, ...]:
        runs = request.runs or []
        new = [block for first, count in runs for block in range(first, first + count)]
        if self._shared is None:
            shared = enumerate(new[: self._prefix_blocks], self._prefix_page)
            self._shared = {local: page for page, local in shared}
        translated, own = self._shared, self._own
        self._ids[request.keep or 0 :] = [
            translated[each] if each in translated else own + each for each in new
        ]
        whole, rest = divmod(request.prompt, BLOCK)
        # Local ids end before the first half of a stream does.
        tail = (own + STREAM // 2 + turn,) if rest else ()
        return (*self._ids[:whole], *tail)


def _call(agent: _Agent, blocks: _Blocks, request: Plain | Streamed, turn: int) -> Call:
    return Call(
        id=agent.session * CALLS + turn,
        session=agent.session,
        turn=turn,
        key=agent.key,
        pages=blocks.follow(request, turn),
        prompt_tokens=request.prompt,
        output_tokens=max(request.out, 1),
    )
