"""Prompts that share nothing and come once: no cache helps, so no policy should win.

Each has a key of its own by default. A client that sends its request id as key is the worst case
for affinity: it places by hash what would better be placed by load. `keyed=false` sends none.
"""

from bench.workloads.base import Call, Script, Send, Source
from bench.workloads.common import (
    CALLS,
    PAGE,
    Count,
    Params,
    Prompt,
    Rate,
    Tokens,
    key,
    loop,
    pace,
    rng,
)


class RandomParams(Params, frozen=True, kw_only=True):
    """Lengths in tokens, uniform between their bounds."""

    requests: Count = 1024
    prompt_min: Tokens = 512
    prompt_max: Tokens = 4096
    output_min: Tokens = 64
    output_max: Tokens = 256
    keyed: bool = True
    concurrency: Count = 64
    rate: Rate | None = None

    def __post_init__(self) -> None:
        if self.prompt_min > self.prompt_max:
            raise ValueError("prompt_min: at most prompt_max")
        if self.output_min > self.output_max:
            raise ValueError("output_min: at most output_max")


class RandomPrompts:
    """One request a session; the seed draws keys and lengths."""

    page_tokens: int = PAGE

    def __init__(self, name: str, params: RandomParams) -> None:
        self.name = name
        self.params = p = params
        keys = "a key each" if p.keyed else "no keys"
        self.description = (
            f"{p.requests:,} prompts that share nothing, {p.prompt_min:,}-{p.prompt_max:,} tokens, "
            f"output {p.output_min:,}-{p.output_max:,}; {keys}; "
            f"{pace(p.concurrency, p.rate, 'requests', p.requests)}."
        )

    def make(self, seed: int) -> Source:
        p = self.params
        return loop(
            (self._request(seed, index) for index in range(p.requests)),
            concurrency=p.concurrency,
            rate=p.rate,
            random=rng("random", "arrivals", seed),
        )

    def _request(self, seed: int, index: int) -> Script:
        p = self.params
        random = rng("random", seed, index)
        prompt = Prompt(index)
        prompt.grow(random.randint(p.prompt_min, p.prompt_max))
        call = Call(
            id=index * CALLS,
            session=index,
            turn=0,
            key=key("random", seed, index) if p.keyed else "",
            pages=prompt.pages(),
            prompt_tokens=prompt.tokens,
            output_tokens=random.randint(p.output_min, p.output_max),
        )
        yield Send(call)
