"""What a rank's KV cache holds, by when it was used last: how much is active, what was evicted.

A cache that evicts the least recently used holds the most recent `capacity` tokens. Tokens are
summed by the span of their last use; when more than the capacity was used, the oldest span is gone.
"""

from heapq import heappop, heappush

STEPS = 64
"""Spans that ageing takes one by one; over more it sums up anew."""


class Footprint:
    """One rank. Spans are numbers of a SpanClock; tokens are counted once, wherever shared."""

    __slots__ = ("_order", "_spans", "active", "capacity", "oldest", "since", "total")

    def __init__(self, capacity: int, span: int, since: int) -> None:
        self.capacity = capacity
        """Tokens; 0: unknown, nothing is taken for evicted."""
        self.oldest = span
        """What was used before this span is gone."""
        self.since = since
        """What was used in this span or later is active."""
        self.total = 0
        """Tokens held."""
        self.active = 0
        """Tokens used lately."""
        self._spans: dict[int, int] = {}
        self._order: list[int] = []
        """The spans as a heap, with some that are gone: an eviction takes many, oldest first."""

    def holds(self, seen: int) -> bool:
        """Whether what was used last in span `seen` is still there."""
        return seen >= self.oldest

    def use(self, tokens: int, seen: int, span: int) -> int:
        """Tokens last used in span `seen` (-1: never) are used in `span`; returns their span."""
        if seen >= self.oldest:
            if span <= seen:
                return seen
            self._take(tokens, seen)
        elif span < self.oldest:
            return seen
        else:
            self.total += tokens
            seen = -1
        if span in self._spans:
            self._spans[span] += tokens
        else:
            self._spans[span] = tokens
            heappush(self._order, span)
        if seen < self.since <= span:
            self.active += tokens
        if self.total > self.capacity:
            self._evict()
        return span

    def drop(self, tokens: int, seen: int) -> None:
        """Tokens last used in span `seen` are not kept count of any more."""
        if seen >= self.oldest:
            self._take(tokens, seen)
            self.total -= tokens
            if seen >= self.since:
                self.active -= tokens

    def age(self, since: int) -> None:
        """What was used before span `since` is not active any more."""
        if self.since <= since <= self.since + STEPS:
            for span in range(self.since, since):
                self.active -= self._spans.get(span, 0)
        else:
            self.active = sum(n for span, n in self._spans.items() if span >= since)
        self.since = since

    def clear(self, span: int) -> None:
        """The cache was emptied; what is used in `span` or later counts again."""
        self.oldest = span
        self.total = self.active = 0
        self._spans.clear()
        self._order.clear()

    def _take(self, tokens: int, span: int) -> None:
        left = self._spans[span] - tokens
        if left:
            self._spans[span] = left
        else:
            del self._spans[span]

    def _evict(self) -> None:
        spans, order = self._spans, self._order
        if len(order) > 2 * len(spans) + STEPS:
            order[:] = sorted(spans)  # a sorted list is a heap
        while self.capacity and self.total > self.capacity and len(spans) > 1:
            first = heappop(order)
            gone = spans.pop(first, None)
            if gone is None:
                continue
            self.total -= gone
            if first >= self.since:
                self.active -= gone
            self.oldest = first + 1
