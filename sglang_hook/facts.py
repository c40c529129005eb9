"""What the controller side of the hook knows of a request before it is placed.

Knows no name of SGLang's and computes only the hashes that the sidecar wants.
"""

from array import array
from typing import Any, NamedTuple

from msgspec import Struct

from sglang_hook.memory import LastRanks
from sidecar import hashing
from sidecar.wire import RequestFacts, Want


class Dispatch(NamedTuple):
    """One request to place."""

    routing_key: str | None
    tokens: Any
    """Prompt token ids, shape (n,): list, array or numpy array; None if the prompt has none."""
    namespace: tuple[str | None, ...]
    """What separates radix caches: extra_key, cache_salt, LoRA id."""
    session: str | None = None
    """Id of an SGLang session, whose state lives in one scheduler."""


class Known(Struct, gc=False):
    """What is known of a request before it is placed."""

    facts: RequestFacts
    affinity: int | None
    """Hash of the session, else of the routing key, else of the token prefix."""
    conversation: int | None
    """What a later request of it is recognised by; None: nothing would."""
    keyed: bool
    """A routing key or a session. A prompt without one is SGLang's to place where the sidecar did
    not: there is no guard here, and a prefix that everybody shares would put all on one rank."""
    want: Want
    """What the facts were made by."""


def look_at(dispatch: Dispatch, want: Want, last_ranks: LastRanks, now: float) -> Known:
    """What the sidecar is told of a request, and what we recognise it by. now: monotonic s."""
    key = hashing.normalize_key(dispatch.routing_key)
    tokens = dispatch.tokens if dispatch.tokens is not None else array("q")
    affinity = hashing.key_hash(key) if key else None
    if dispatch.session:
        affinity = hashing.session_hash(dispatch.session)
    keyed = affinity is not None
    namespace, prefix, blocks = _hashes(want, dispatch.namespace, tokens, bool(key))
    if affinity is None:
        affinity = prefix
    last = None if affinity is None else last_ranks.get(affinity)
    rank, age = (-1, -1) if last is None else (last[0], int((now - last[1]) * 1000))
    facts = RequestFacts(key, namespace, len(tokens), prefix, blocks, rank, age)
    conversation = blocks[-1] if blocks and not keyed else affinity
    if not (key or blocks or prefix is not None):
        conversation = None  # a session of which the sidecar would recognise nothing
    return Known(facts, affinity, conversation, keyed, want)


def _hashes(
    want: Want, space: tuple[str | None, ...], tokens: Any, has_key: bool
) -> tuple[int, int | None, list[int]]:
    """Namespace, prefix hash and block hashes, as far as they are wanted."""
    with_prefix = want.prefix_tokens and (want.prefix_with_key or not has_key)
    if not with_prefix and not want.block_tokens:
        return 0, None, []
    namespace, prefix, blocks = hashing.namespace_hash(*space), None, []
    if with_prefix:
        prefix = hashing.prefix_hash(tokens, want.prefix_tokens, namespace)
    if want.block_tokens:
        blocks = hashing.block_hashes(
            tokens, want.block_tokens, want.max_blocks, namespace, want.block_growth
        )
    return namespace, prefix, blocks
