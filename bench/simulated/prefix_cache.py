"""The prefix cache of one rank: which leading pages of a prompt need no prefill."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator

PAGE_TOKENS = 16
_DIGEST_BYTES = 16

Namespace = tuple[str | None, ...]


class PrefixCache:
    """Pages keyed by all the tokens up to their end; the least recently used leaf goes first.

    A chain is always touched from its deepest page to its first, so in `_pages` a page stands
    after every page that continues it: the first one is a leaf, and the oldest of them.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens // PAGE_TOKENS
        self._pages: OrderedDict[bytes, None] = OrderedDict()

    def match(self, namespace: Namespace, tokens: "array[int]") -> int:
        """How many leading tokens are cached; like SGLang, never the whole prompt."""
        found: list[bytes] = []
        for key in _page_keys(namespace, tokens[:-1]):
            if key not in self._pages:
                break
            found.append(key)
        self._touch(found)
        return len(found) * PAGE_TOKENS

    def insert(self, namespace: Namespace, tokens: "array[int]") -> None:
        self._touch(list(_page_keys(namespace, tokens)))
        while len(self._pages) > self._capacity:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        self._pages.clear()

    @property
    def tokens(self) -> int:
        return len(self._pages) * PAGE_TOKENS

    def _touch(self, chain: list[bytes]) -> None:
        for key in reversed(chain):
            self._pages[key] = None
            self._pages.move_to_end(key)


def _page_keys(namespace: Namespace, tokens: "array[int]") -> Iterator[bytes]:
    key = repr(namespace).encode()
    for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
        page = tokens[end - PAGE_TOKENS : end].tobytes()
        key = hashlib.blake2b(key + page, digest_size=_DIGEST_BYTES).digest()
        yield key
