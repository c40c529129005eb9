"""A page of memory that all processes of the rig share: what they are told, what they hold."""

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

_BYTES = 4096
_RATE = struct.Struct("d")
_LIVE = struct.Struct("Q")
_HELD = struct.Struct("d")
_RANK = struct.Struct("QQ")
_AT_RATE, _AT_LIVE, _AT_HELD, _AT_RANKS = 0, 8, 16, 64
MAX_RANKS = 63
"""Bits of the word that says which ranks are live, less one."""


class Held(NamedTuple):
    """What a rank says of itself."""

    received: int
    """Requests taken in since its process started."""
    running: int


class Board:
    """The page at `path`, made if it is missing. Each word has one writer."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _BYTES)
            self._page = mmap.mmap(descriptor, _BYTES)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self._page.close()

    @property
    def rate(self) -> float:
        """Requests a second of each controller; 0: none."""
        return float(_RATE.unpack_from(self._page, _AT_RATE)[0])

    @rate.setter
    def rate(self, value: float) -> None:
        _RATE.pack_into(self._page, _AT_RATE, value)

    @property
    def held_seconds(self) -> float:
        """How long a rank runs a request."""
        return float(_RATE.unpack_from(self._page, _AT_HELD)[0])

    @held_seconds.setter
    def held_seconds(self, value: float) -> None:
        _HELD.pack_into(self._page, _AT_HELD, value)

    @property
    def live(self) -> list[int]:
        """Ranks that the controllers call live, ascending."""
        mask = _LIVE.unpack_from(self._page, _AT_LIVE)[0]
        return [rank for rank in range(MAX_RANKS) if mask >> rank & 1]

    @live.setter
    def live(self, ranks: list[int]) -> None:
        _LIVE.pack_into(self._page, _AT_LIVE, sum(1 << rank for rank in ranks))

    def rank(self, rank: int) -> Held:
        return Held(*_RANK.unpack_from(self._page, _AT_RANKS + rank * _RANK.size))

    def tell(self, rank: int, received: int, running: int) -> None:
        """Written by that rank's process."""
        _RANK.pack_into(self._page, _AT_RANKS + rank * _RANK.size, received, running)
