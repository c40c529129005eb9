"""Load-aware methods: the rank with the fewest requests or tokens, what is in flight included."""

from typing import ClassVar

import msgspec

from sidecar.loads import LoadView
from sidecar.policies.base import Choice, LoadMethod, NoParams, Reason, next_of
from sidecar.wire import RequestFacts, Want


def _least(loads: list[int], view: LoadView) -> list[int]:
    """Ascending positions of the usable ranks with the smallest load."""
    usable = view.usable
    if all(usable):
        least = min(loads)
        return [i for i, load in enumerate(loads) if load == least]
    least = min(load for load, ok in zip(loads, usable, strict=True) if ok)
    return [i for i, load in enumerate(loads) if load == least and usable[i]]


def fewest_requests(view: LoadView, tokens: int) -> int:
    """Fewest running + waiting + in-flight requests; equals take turns."""
    return next_of(view, _least(view.requests, view))


def fewest_tokens(view: LoadView, tokens: int) -> int:
    """Fewest tokens, then fewest requests as SGLang's total_tokens; equals take turns."""
    tied = _least(view.tokens, view)
    if len(tied) > 1:
        least = min(view.requests[i] for i in tied)
        tied = [i for i in tied if view.requests[i] == least]
    return next_of(view, tied)


def take_turns(view: LoadView, tokens: int) -> int:
    """Every usable rank in turn."""
    return next_of(view, [i for i, ok in enumerate(view.usable) if ok])


METHODS: dict[str, LoadMethod] = {
    "round_robin": take_turns,
    "total_requests": fewest_requests,
    "total_tokens": fewest_tokens,
}


class TotalRequests:
    """SGLang's `total_requests`, with exact counts of what is in flight."""

    name: ClassVar[str] = "total_requests"
    Params: ClassVar[type[msgspec.Struct]] = NoParams

    def __init__(self, params: NoParams) -> None:
        self.params = params
        self.want = Want()

    def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
        return Choice(fewest_requests(view, facts.tokens), Reason.LEAST_REQUESTS)


class TotalTokens:
    """SGLang's `total_tokens`, with exact counts of what is in flight."""

    name: ClassVar[str] = "total_tokens"
    Params: ClassVar[type[msgspec.Struct]] = NoParams

    def __init__(self, params: NoParams) -> None:
        self.params = params
        self.want = Want()

    def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
        return Choice(fewest_tokens(view, facts.tokens), Reason.LEAST_TOKENS)
