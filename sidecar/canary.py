"""A second policy that decides for a share of the affinity keys."""

from typing import NamedTuple

import xxhash

from sidecar.hashing import normalize_key
from sidecar.seat import Seat
from sidecar.wire import RequestFacts

_SEED = 0x63616E61  # "cana": which keys are taken has nothing to do with where they go
_SPACE = float(1 << 64)


class Canary(NamedTuple):
    """The second policy and its share, 0 to 1."""

    seat: Seat
    share: float

    def takes(self, facts: RequestFacts) -> bool:
        """Whether the canary decides this request."""
        return takes(facts, self.share)


def takes(facts: RequestFacts, share: float) -> bool:
    """Whether a canary of that share decides a request: always the same answer for one key.

    A request without a routing key goes by how its prompt begins (its first block, or its prefix
    hash), so turns of one session stay together; one without either stays with the active policy.
    """
    key = facts.routing_key and normalize_key(facts.routing_key)
    if not key:
        start = facts.block_hashes[0] if facts.block_hashes else facts.prefix_hash
        if start is None:
            return False
        key = start.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(key, seed=_SEED) < share * _SPACE
