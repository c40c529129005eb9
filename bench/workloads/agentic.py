"""Agentic sessions: one long system prompt for all, a key each, turns that grow, sub-agents.

A turn's prompt is the one before, its recorded answer, and new tokens (a tool's result). After some
turns a session starts sub-agents side by side and waits for them. Like those of a coding tool they
begin with a system prompt of their own, the same for all sub-agents, and see nothing of the
session. They send the session's key by default, as a client does that knows one id; with
`subagent_keys=own` each has a key of its own.
"""

from random import Random
from typing import Literal

import msgspec

from bench.workloads.base import Call, Fork, Script, Send, Source
from bench.workloads.common import (
    CALLS,
    PAGE,
    Count,
    MaybeTokens,
    Params,
    Prompt,
    Rate,
    Seconds,
    Share,
    Tokens,
    key,
    loop,
    pace,
    rng,
    shared_pages,
)

SUB_AGENTS = 3
"""At most so many side by side."""


class AgenticParams(Params, frozen=True, kw_only=True):
    """Lengths in tokens, think time in seconds (the mean; it is exponential)."""

    sessions: Count = 64
    turns: Count = 10
    system: MaybeTokens = 8192
    new_min: Tokens = 512
    new_max: Tokens = 2048
    output_min: Tokens = 64
    output_max: Tokens = 256
    think: Seconds = 3.0
    subagents: Share = 0.05
    """Chance of sub-agents after a turn: 1 to SUB_AGENTS."""
    subagent_turns: Count = 3
    subagent_system: MaybeTokens = 4096
    subagent_keys: Literal["session", "own"] = "session"
    concurrency: Count = 64
    rate: Rate | None = None

    def __post_init__(self) -> None:
        if self.new_min > self.new_max:
            raise ValueError("new_min: at most new_max")
        if self.output_min > self.output_max:
            raise ValueError("output_min: at most output_max")
        if self.turns * (1 + SUB_AGENTS * self.subagent_turns) >= CALLS:
            raise ValueError(f"turns: fewer than {CALLS:,} calls a session, sub-agents included")


class _Agent(msgspec.Struct):
    """Who makes calls: a session or one of its sub-agents."""

    session: int
    key: str
    prompt: Prompt
    random: Random
    turns: range
    """Turn numbers within the session, given out when the agent starts: whoever ends first."""


class Agentic:
    """Sessions with sub-agents; the seed draws keys, lengths, think times and sub-agents."""

    page_tokens: int = PAGE

    def __init__(self, name: str, params: AgenticParams) -> None:
        self.name = name
        self.params = p = params
        self.description = (
            f"{p.sessions:,} sessions of {p.turns:,} turns with one system prompt of "
            f"{p.system:,} tokens, {p.new_min:,}-{p.new_max:,} new tokens a turn, output "
            f"{p.output_min:,}-{p.output_max:,}, think time {p.think:g} s (exponential), 1 to "
            f"{SUB_AGENTS} sub-agents of {p.subagent_turns:,} turns after {p.subagents:.0%} of the "
            f"turns, key: the session's, sub-agents: {p.subagent_keys}; "
            f"{pace(p.concurrency, p.rate, 'sessions', p.sessions)}."
        )

    def make(self, seed: int) -> Source:
        p = self.params
        return loop(
            (self._session(seed, index) for index in range(p.sessions)),
            concurrency=p.concurrency,
            rate=p.rate,
            random=rng("agentic", "arrivals", seed),
        )

    def _session(self, seed: int, index: int) -> Script:
        p = self.params
        random = rng("agentic", seed, index)
        prompt = Prompt(2 + index, shared_pages(0, p.system), p.system)
        name = key("agentic", seed, index)
        if p.rate is None:
            # Sessions that begin together would send their first prompts in one burst.
            yield Fork([], self._think(random))
        turn = agents = 0
        for step in range(p.turns):
            me = _Agent(index, name, prompt, random, range(turn, turn + 1))
            yield from self._turns(me, thinks=step > 0)
            turn += 1
            if step + 1 < p.turns and random.random() < p.subagents:
                count = random.randint(1, SUB_AGENTS)
                team = [
                    self._sub_agent(seed, me, agents + i, turn + i * p.subagent_turns)
                    for i in range(count)
                ]
                yield Fork([self._turns(each, thinks=False) for each in team])
                turn += count * p.subagent_turns
                agents += count

    def _sub_agent(self, seed: int, session: _Agent, number: int, turn: int) -> _Agent:
        p = self.params
        # Streams after those of the sessions: no session has as many sub-agents as this leaves.
        stream = 2 + p.sessions + session.session * SUB_AGENTS * p.turns + number
        own = f"{session.key}/{number}"
        return _Agent(
            session.session,
            own if p.subagent_keys == "own" else session.key,
            Prompt(stream, shared_pages(1, p.subagent_system), p.subagent_system),
            rng("agentic", seed, session.session, "sub-agent", number),
            range(turn, turn + p.subagent_turns),
        )

    def _turns(self, agent: _Agent, *, thinks: bool) -> Script:
        p = self.params
        for turn in agent.turns:
            agent.prompt.grow(agent.random.randint(p.new_min, p.new_max))
            output = agent.random.randint(p.output_min, p.output_max)
            delay = self._think(agent.random) if thinks or turn > agent.turns.start else 0.0
            yield Send(self._call(agent, turn, output), delay)
            agent.prompt.grow(output)

    def _call(self, agent: _Agent, turn: int, output: int) -> Call:
        return Call(
            id=agent.session * CALLS + turn,
            session=agent.session,
            turn=turn,
            key=agent.key,
            pages=agent.prompt.pages(),
            prompt_tokens=agent.prompt.tokens,
            output_tokens=output,
        )

    def _think(self, random: Random) -> float:
        return random.expovariate(1 / self.params.think) if self.params.think else 0.0
