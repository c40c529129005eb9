"""Values cut from the bytes of one input: equal bytes give equal values, in every process."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

MOST = 1 << 62
"""`wire.Count`."""
EXTREMES = (0, 1, 2, 255, 4096, 65535, 1 << 20, (1 << 31) - 1, 1 << 32, 1 << 53, MOST - 1, MOST)
OUTSIDE = (-1, -MOST, MOST + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))


class Source:
    """Takes from the front; past the end every byte is 0, so that any input is enough."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not taken yet."""
        return len(self._data) - self._at

    def byte(self) -> int:
        """0 to 255."""
        at = self._at
        if at >= len(self._data):
            return 0
        self._at = at + 1
        return self._data[at]

    def below(self, bound: int) -> int:
        """0 to bound - 1, bound at most 2^16."""
        value = self.byte()
        if bound > 256:
            value = value << 8 | self.byte()
        return value % bound

    def flag(self, odds: int = 2) -> bool:
        """True once in `odds`; False past the end."""
        return self.byte() % odds == odds - 1

    def one_of(self, choices: Sequence[T]) -> T:
        """One of at most 256."""
        return choices[self.byte() % len(choices)]

    def raw(self, size: int) -> bytes:
        """Up to `size` bytes."""
        taken = self._data[self._at : self._at + size]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        """All that is left."""
        return self.raw(self.left)

    def count(self) -> int:
        """0 to 2^62: mostly small, often at a bound."""
        first = self.byte()
        if first < 160:
            return first
        if first < 208:
            return first % 48 << 8 | self.byte()
        return EXTREMES[first % len(EXTREMES)]

    def wild(self) -> int:
        """As `count`, now and then outside of what a message may hold."""
        return self.one_of(OUTSIDE) if self.flag(16) else self.count()

    def text(self, most: int = 24) -> str:
        """Any string, lone surrogates and NUL included."""
        data = self.raw(self.below(most + 1))
        return data.decode("utf-8", "surrogateescape")


def bent(data: bytes, source: Source) -> bytes:
    """`data`, in one case of four with a few bytes changed, left out or added."""
    if not source.flag(4):
        return data
    changed = bytearray(data)
    for _ in range(1 + source.below(3)):
        at = source.below(max(1, min(len(changed), 65535)))
        how = source.below(4)
        if how == 0:
            changed[at : at + 1] = bytes([source.byte()])
        elif how == 1:
            del changed[at : at + 1 + source.below(16)]
        elif how == 2:
            changed[at:at] = source.raw(1 + source.below(8))
        else:
            del changed[at:]
    return bytes(changed)
