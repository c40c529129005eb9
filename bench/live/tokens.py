"""Page ids -> token ids, as JSON text: a prompt is joined from cached pages, never encoded anew.

What a page's tokens are depends on the salt, the page id and the range alone, so that every arm
sends the same prompts and a shared prefix of pages is a shared prefix of tokens.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from xxhash import xxh64_intdigest

LOW, HIGH = 1000, 30_000
"""Past the special tokens and within the vocabulary of nearly every model."""
CACHED_TOKENS = 1 << 24
"""About 100 MB of text: 250 prompts of 64K tokens."""
_U64 = np.uint64


def token_range(vocabulary: int | None) -> tuple[int, int]:
    """Ids to draw from; of a small vocabulary the upper half, as special tokens come first."""
    if vocabulary is None or vocabulary >= HIGH:
        return LOW, HIGH
    return min(LOW, vocabulary // 2), vocabulary


class Tokens:
    """The tokens of one workload and seed."""

    def __init__(self, salt: str, page_tokens: int, ids: tuple[int, int] = (LOW, HIGH)) -> None:
        self.page_tokens = page_tokens
        self._low, high = ids
        self._span = _U64(high - self._low)
        self._salt = xxh64_intdigest(salt.encode())
        with np.errstate(over="ignore"):
            # SplitMix64: its state moves by the golden ratio from one output to the next.
            self._steps = np.arange(1, page_tokens + 1, dtype=_U64) * _U64(0x9E3779B97F4A7C15)
        self._page = lru_cache(CACHED_TOKENS // page_tokens or 1)(self._make)

    def prompt(self, pages: Sequence[int], tokens: int) -> bytes:
        """Token ids, comma separated, cut to `tokens`."""
        rest = tokens - (len(pages) - 1) * self.page_tokens
        if not pages or not 0 < rest <= self.page_tokens:
            raise ValueError(f"{tokens} tokens do not end in the last of {len(pages)} pages")
        texts = [self._page(page) for page in pages]
        if rest < self.page_tokens:
            texts[-1] = b",".join(texts[-1].split(b",", rest)[:rest])
        return b",".join(texts)

    def _make(self, page: int) -> bytes:
        seed = xxh64_intdigest(page.to_bytes(16, "little", signed=True), seed=self._salt)
        with np.errstate(over="ignore"):
            mixed = self._steps + _U64(seed)
            mixed = (mixed ^ (mixed >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> _U64(27))) * _U64(0x94D049BB133111EB)
            mixed ^= mixed >> _U64(31)
        ids = (mixed % self._span).tolist()
        return ",".join(str(self._low + each) for each in ids).encode()
