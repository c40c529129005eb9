"""What the model's prefix cache knows a prompt by: an id for each page of tokens."""

from array import array
from hashlib import blake2b

Namespace = tuple[str | None, ...]
"""Prompts of different namespaces share nothing, whatever their tokens."""

_DIGEST_BYTES = 16


def page_ids(
    namespace: Namespace, tokens: "array[int]", page_tokens: int, first: int = 0
) -> tuple[bytes, ...]:
    """Ids of the whole pages from page `first` on; a page that is partly filled has none.

    An id stands for a page's own tokens only: the radix tree takes account of what comes before
    it, so the namespace in the first page tells whole prompts apart.
    """
    found = []
    for begin in range(first * page_tokens, len(tokens) - page_tokens + 1, page_tokens):
        page = tokens[begin : begin + page_tokens].tobytes()
        if begin == 0:
            page += repr(namespace).encode()
        found.append(blake2b(page, digest_size=_DIGEST_BYTES).digest())
    return tuple(found)
