"""A sum of what happened lately."""

import math


class Recent:
    """Tokens, each counting exp(-age / seconds); times are monotonic seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sum = 0.0
        self._at = 0.0

    def add(self, tokens: int, now: float) -> None:
        """So many tokens, now."""
        self._sum = self.value(now) + tokens
        self._at = now

    def value(self, now: float) -> float:
        """The sum at `now`."""
        return self._sum * math.exp(min(0.0, self._at - now) / self._seconds) if self._sum else 0.0
