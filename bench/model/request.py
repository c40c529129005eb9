"""What a rank is made of: its bounds, its requests, and what it says of its load."""

from collections.abc import Hashable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from bench.model.radix import Node

Positive = Annotated[int, Meta(ge=1)]


class RankSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What bounds a rank; the defaults are those of 8 x H100 with a 122B model in FP8."""

    cache_tokens: Positive = 1_048_576
    """KV cache of the rank."""
    page_tokens: Positive = 64
    chunk_tokens: Positive = 1024
    """Prefilled tokens of one step: SGLang's chunked_prefill_size (8,192 on an H100) // dp_size."""
    max_running: Positive = 256

    @property
    def whole_pages(self) -> int:
        """Tokens that fit into the cache's whole pages."""
        return self.cache_tokens // self.page_tokens * self.page_tokens


class Request:
    """One request on its way through a rank."""

    __slots__ = (
        "answer_pages",
        "cached",
        "call",
        "done",
        "ends",
        "estimate",
        "node",
        "output_tokens",
        "pages",
        "prompt_tokens",
        "stored",
    )

    def __init__(
        self, pages: tuple[Hashable, ...], prompt_tokens: int, output_tokens: int, call: object
    ) -> None:
        self.pages = pages
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.call = call
        """Whatever the driver knows it by."""
        self.cached = 0
        """Prompt tokens found in the cache on admission."""
        self.done = 0
        """Prompt tokens whose KV exists."""
        self.stored = 0
        """Of those, tokens that the radix cache holds."""
        self.ends = 0
        """Value of the rank's step clock with which its last token comes."""
        self.answer_pages: tuple[Hashable, ...] | None = None
        """What follows the prompt's whole pages, if a later prompt may hold it; None: pages that
        nobody sends."""
        self.estimate = 0
        """Prompt tokens that the cache lacked when the request was queued."""
        self.node: Node | None = None

    @property
    def uncached(self) -> int:
        """Prompt tokens still to be prefilled."""
        return self.prompt_tokens - self.done


class Load(NamedTuple):
    """What SGLang's load snapshot says of a rank."""

    running: int
    waiting: int
    tokens: int
    """KV tokens in use by requests, and prompt tokens waiting (num_total_tokens)."""
    waiting_uncached: int
