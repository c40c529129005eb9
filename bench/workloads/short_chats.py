"""Short chats without a key, from 300 to 2,000 tokens: shorter than the tokens a policy hashes.

Every chat begins with the same short system prompt, as the chats of one assistant do. A turn's
prompt is the one before, its recorded answer and the next message; people think in between.
"""

from itertools import accumulate

from bench.workloads.base import Call, Script, Send, Source
from bench.workloads.common import (
    CALLS,
    PAGE,
    Count,
    MaybeTokens,
    Params,
    Prompt,
    Rate,
    Seconds,
    Tokens,
    loop,
    pace,
    rng,
    shared_pages,
)


class ShortChatsParams(Params, frozen=True, kw_only=True):
    """Lengths in tokens, think time in seconds (the mean; it is exponential)."""

    chats: Count = 256
    turns: Count = 8
    system: MaybeTokens = 128
    first: Tokens = 300
    last: Tokens = 2000
    output_min: Tokens = 64
    output_max: Tokens = 192
    think: Seconds = 3.0
    concurrency: Count = 64
    rate: Rate | None = None

    def __post_init__(self) -> None:
        if self.system >= self.first:
            raise ValueError("system: less than first")
        if self.output_min > self.output_max:
            raise ValueError("output_min: at most output_max")
        # A turn grows by a third of the mean at least, and that holds the shortest answer.
        if self.last - self.first < 3 * (self.turns - 1) * (self.output_min + 2):
            raise ValueError("last: too little over first for the answers of all turns")


class ShortChats:
    """Keyless conversations; the seed draws lengths and think times."""

    page_tokens: int = PAGE

    def __init__(self, name: str, params: ShortChatsParams) -> None:
        self.name = name
        self.params = p = params
        self.description = (
            f"{p.chats:,} chats of {p.turns:,} turns without keys, prompts growing from "
            f"{p.first:,} to {p.last:,} tokens (system prompt {p.system:,}), output "
            f"{p.output_min:,}-{p.output_max:,}, think time {p.think:g} s (exponential); "
            f"{pace(p.concurrency, p.rate, 'chats', p.chats)}."
        )

    def make(self, seed: int) -> Source:
        p = self.params
        return loop(
            (self._chat(seed, index) for index in range(p.chats)),
            concurrency=p.concurrency,
            rate=p.rate,
            random=rng("short-chats", "arrivals", seed),
        )

    def _chat(self, seed: int, index: int) -> Script:
        p = self.params
        random = rng("short-chats", seed, index)
        # Turns grow by 1/2 to 3/2 of the mean before they are scaled to end at `last`.
        weights = [random.uniform(0.5, 1.5) for _ in range(p.turns - 1)]
        scale = (p.last - p.first) / sum(weights) if weights else 0.0
        lengths = [round(p.first + scale * grown) for grown in accumulate(weights, initial=0.0)]
        prompt = Prompt(1 + index, shared_pages(0, p.system), p.system)
        for turn, length in enumerate(lengths):
            prompt.grow(length - prompt.tokens)
            # The next prompt holds this answer and a token of the next message at least.
            room = lengths[turn + 1] - length - 1 if turn + 1 < p.turns else p.output_max
            output = min(random.randint(p.output_min, p.output_max), room)
            think = random.expovariate(1 / p.think) if turn and p.think else 0.0
            call = Call(
                id=index * CALLS + turn,
                session=index,
                turn=turn,
                key="",
                pages=prompt.pages(),
                prompt_tokens=prompt.tokens,
                output_tokens=output,
            )
            yield Send(call, think)
