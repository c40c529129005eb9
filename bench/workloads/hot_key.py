"""One key fans out bursts of 100 prompts with one prefix, while sessions with other keys go on.

The question is what a burst costs the others, and how much of the shared prefix is computed more
than once. Sessions are as `agentic` has them without a common system prompt, and begin within the
first think time; a burst comes `pause` seconds after the start and after the end of the one before.
"""

from bench.workloads.base import Call, Fork, Script, Send, Source
from bench.workloads.common import (
    CALLS,
    PAGE,
    Count,
    MaybeTokens,
    Params,
    Prompt,
    Seconds,
    Tokens,
    key,
    once,
    rng,
    shared_pages,
)

HOT = 0
"""The session of the hot key; its shared prefix is stream 0."""


class HotKeyParams(Params, frozen=True, kw_only=True):
    """Lengths in tokens, times in seconds (think time: the mean; it is exponential)."""

    burst: Count = 100
    bursts: Count = 3
    pause: Seconds = 10.0
    prefix: MaybeTokens = 8192
    question: Tokens = 256
    sessions: Count = 64
    turns: Count = 12
    new_min: Tokens = 512
    new_max: Tokens = 2048
    output_min: Tokens = 64
    output_max: Tokens = 256
    think: Seconds = 3.0

    def __post_init__(self) -> None:
        if self.new_min > self.new_max:
            raise ValueError("new_min: at most new_max")
        if self.output_min > self.output_max:
            raise ValueError("output_min: at most output_max")
        if self.burst * self.bursts >= CALLS:
            raise ValueError(f"bursts: fewer than {CALLS:,} calls of the hot key")


class HotKey:
    """Bursts beside steady sessions; the seed draws keys, lengths and think times."""

    page_tokens: int = PAGE

    def __init__(self, name: str, params: HotKeyParams) -> None:
        self.name = name
        self.params = p = params
        self.description = (
            f"{p.bursts:,} bursts of {p.burst:,} prompts with one key and a prefix of "
            f"{p.prefix:,} tokens (question {p.question:,}), {p.pause:g} s apart, while "
            f"{p.sessions:,} sessions with other keys make {p.turns:,} turns of "
            f"{p.new_min:,}-{p.new_max:,} new tokens, think time {p.think:g} s (exponential); "
            f"output {p.output_min:,}-{p.output_max:,}."
        )

    def make(self, seed: int) -> Source:
        p = self.params
        random = rng("hot-key", "arrivals", seed)
        starts = [(p.pause, self._hot(seed))]
        starts += [
            (random.uniform(0, p.think), self._session(seed, index))
            for index in range(1, p.sessions + 1)
        ]
        return Source(sorted(starts, key=lambda start: start[0]))

    def _hot(self, seed: int) -> Script:
        p = self.params
        random = rng("hot-key", seed, HOT)
        name = key("hot-key", seed, HOT)
        for burst in range(p.bursts):
            calls = []
            for turn in range(burst * p.burst, (burst + 1) * p.burst):
                prompt = Prompt(1 + p.sessions + turn, shared_pages(HOT, p.prefix), p.prefix)
                prompt.grow(p.question)
                output = random.randint(p.output_min, p.output_max)
                calls.append(_call(HOT, turn, name, prompt, output))
            # The source starts this script one pause late: no delay before the first burst.
            yield Fork([once(call) for call in calls], p.pause if burst else 0.0)

    def _session(self, seed: int, index: int) -> Script:
        p = self.params
        random = rng("hot-key", seed, index)
        name = key("hot-key", seed, index)
        prompt = Prompt(index)
        for turn in range(p.turns):
            prompt.grow(random.randint(p.new_min, p.new_max))
            output = random.randint(p.output_min, p.output_max)
            think = random.expovariate(1 / p.think) if turn and p.think else 0.0
            yield Send(_call(index, turn, name, prompt, output), think)
            prompt.grow(output)


def _call(session: int, turn: int, name: str, prompt: Prompt, output: int) -> Call:
    return Call(
        id=session * CALLS + turn,
        session=session,
        turn=turn,
        key=name,
        pages=prompt.pages(),
        prompt_tokens=prompt.tokens,
        output_tokens=output,
    )
