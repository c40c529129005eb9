"""What stands in the log instead of routing keys and of hashes of prompts.

Equal stays equal, and nobody without the secret can try keys or prompts until one fits. Hashes of
blocks are replaced by a keyed hash for good. The 64-bit hash of a routing key, and that of a prompt
prefix, are enciphered: whoever has the secret gets the hash back (never the key), because
`prefix_affinity` chooses ranks by its value.
"""

from hashlib import blake2s

from sidecar.hashing import key_hash, normalize_key
from sidecar.keyhash import SECRET_BYTES

ROUNDS = 6
"""Of a Feistel network over 2 x 32 bits: four make a strong pseudorandom permutation if the round
function is one-way (Luby and Rackoff 1988), two more are for small halves."""
_HALF = (1 << 32) - 1


class Seal:
    """secret: SECRET_BYTES of it, see `keyhash.secret_in`."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes")
        # A keyed state is copied: half the time of making one anew.
        self._rounds = [
            blake2s(key=secret, digest_size=4, person=b"round%d" % n) for n in range(ROUNDS)
        ]
        self._one_way = blake2s(key=secret, digest_size=8, person=b"one-way")
        self.name = blake2s(key=secret, digest_size=8, person=b"name").hexdigest()
        """Tells which secret it is; says nothing of it."""

    def of_key(self, key: bytes) -> int:
        """What a routing key is called in the log, 64 bits."""
        return self.seal(key_hash(normalize_key(key)))

    def one_way(self, value: int) -> bytes:
        """8 bytes for a 64-bit hash, for good."""
        state = self._one_way.copy()
        state.update(value.to_bytes(8, "little"))
        return state.digest()

    def seal(self, value: int) -> int:
        """Encipher 64 bits."""
        left, right = value >> 32, value & _HALF
        for state in self._rounds:
            left, right = right, left ^ _mix(state.copy(), right)
        return left << 32 | right

    def unseal(self, value: int) -> int:
        """The value that was sealed."""
        left, right = value >> 32, value & _HALF
        for state in reversed(self._rounds):
            left, right = right ^ _mix(state.copy(), left), left
        return left << 32 | right


def _mix(state: "blake2s", half: int) -> int:
    state.update(half.to_bytes(4, "little"))
    return int.from_bytes(state.digest(), "little")
