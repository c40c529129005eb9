"""Reads decision logs. What was cut off, or is broken, costs what stood behind it in its file."""

import contextlib
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from sidecar.errors import ConfigError
from sidecar.journal.decoder import Decoder, Event, Missing
from sidecar.journal.disk import SECRET
from sidecar.journal.record import (
    CHUNK,
    FORMAT,
    LENGTH,
    MAGIC,
    MAX_RAW_BYTES,
    SUFFIX,
    TITLE,
    LogError,
    Record,
    decode,
)
from sidecar.journal.seal import Seal
from sidecar.keyhash import secret_in

_KNOWN = (
    (b"\x1f\x8b", "gzip data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x7fELF", "a program"),
    (b"SQLite format", "an SQLite database"),
)


_NONSENSE = (
    *(ValueError, LookupError, TypeError, ArithmeticError, RecursionError),
    msgspec.MsgspecError,
)


class Reader:
    """The events of a log. paths: directories or files; secret: file, or None for the one beside
    the log; warn: told of what cannot be read; progress: of bytes read, and of all.

    Raises LogError if there is no log, or a file is not one.
    """

    def __init__(
        self,
        paths: Sequence[str],
        secret: str | None = None,
        warn: Callable[[str], None] = lambda text: None,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self.files = _files(paths)
        self.seal = _seal(self.files, secret)
        self._warn = warn
        self._progress = progress
        for file in self.files:
            with contextlib.suppress(FileNotFoundError), _open(file) as opened:
                _begin(file, opened)

    def events(self) -> Iterator[Event]:
        """Every event, in order."""
        sizes = [file.stat().st_size if file.exists() else 0 for file in self.files]
        for number, file in enumerate(self.files):
            before = sum(sizes[:number])
            try:
                opened = _open(file)
            except FileNotFoundError:
                self._warn(f"{file}: was removed meanwhile, as the oldest")
                yield Missing(0, "removed")
                continue
            with opened:
                _begin(file, opened)
                yield from self._file(file, opened, before, sum(sizes))

    def _file(self, file: Path, opened: IO[bytes], before: int, total: int) -> Iterator[Event]:
        decoder = Decoder(self.seal)
        while True:
            at = opened.tell()
            try:
                raw, problem = _chunk(opened)
                for record in _records(raw):
                    yield from decoder.events(record)
            except _NONSENSE as error:
                problem = f"makes no sense ({error})"
            except LogError as error:
                problem = str(error)
            except OSError as error:
                problem = f"cannot be read ({error.strerror})"
            if problem:
                self._warn(
                    f"{file}: {problem} in the chunk that begins at byte {at}; the rest of this "
                    f"file ({file.stat().st_size - at} bytes) is left out"
                )
                yield Missing(0, "unreadable")
                return
            self._progress(before + opened.tell(), total)
            if not raw:
                if decoder.head is None:
                    self._warn(f"{file}: has nothing in it")
                return


def _chunk(opened: IO[bytes]) -> tuple[bytes, str]:
    """The records of the next chunk, b"" at the end; and what is wrong with it."""
    head = opened.read(CHUNK.size)
    if not head:
        return b"", ""
    if len(head) < CHUNK.size:
        return b"", "is cut off"
    size, raw_size, checksum = CHUNK.unpack(head)
    if size > MAX_RAW_BYTES or raw_size > MAX_RAW_BYTES:
        return b"", "is damaged (no chunk is that long)"
    packed = opened.read(size)
    inflate = zlib.decompressobj()
    if len(packed) < size:
        # What there is of it is sound as far as it goes.
        return _inflated(inflate, packed, raw_size)[0], "is cut off"
    raw, problem = b"", "is damaged (its checksum is wrong)"
    if zlib.crc32(packed) == checksum:
        raw, problem = _inflated(inflate, packed, raw_size)
        if not problem and len(raw) != raw_size:
            raw, problem = b"", "is damaged (it has another length than it says)"
    return raw, problem


def _inflated(inflate: "zlib._Decompress", packed: bytes, most: int) -> tuple[bytes, str]:
    try:
        return inflate.decompress(packed, most + 1), ""
    except zlib.error as error:
        return b"", f"is damaged ({error})"


def _records(raw: bytes) -> Iterator[Record]:
    """The whole records of a chunk; one that is cut off is left out."""
    at = 0
    while at + LENGTH.size <= len(raw):
        (size,) = LENGTH.unpack_from(raw, at)
        at += LENGTH.size
        if at + size > len(raw):
            return
        yield decode(raw[at : at + size])
        at += size


def _files(paths: Sequence[str]) -> list[Path]:
    """The files of a log, in the order in which they were written. Raises LogError."""
    if not paths:
        raise LogError("LOG: name a directory or a file")
    found: list[Path] = []
    for name in paths:
        path = Path(name)
        try:
            if path.is_dir():
                inside = sorted(
                    p for p in path.iterdir() if p.name.endswith(SUFFIX) and p.is_file()
                )
                if not inside:
                    raise LogError(f"{path}: holds no decision log (no file *{SUFFIX})")
                found += inside
            else:
                if not stat.S_ISREG(path.stat().st_mode):
                    raise LogError(f"{path}: is neither a file nor a directory")
                found.append(path)
        except OSError as error:
            raise LogError(f"{path}: {error.strerror}") from None
    return sorted(dict.fromkeys(found), key=lambda path: path.name)


def _seal(files: Sequence[Path], secret: str | None) -> Seal | None:
    """What the secret opens; None: there is none beside the log. Raises ConfigError."""
    if secret is None:
        beside = files[0].parent / SECRET
        if not os.access(beside, os.R_OK):
            return None
        secret = str(beside)
    elif not os.path.exists(secret):
        raise ConfigError(f"--secret: {secret}: there is no such file")
    return Seal(secret_in(secret))


def _open(file: Path) -> IO[bytes]:
    """Raises LogError, and FileNotFoundError: a sidecar that serves removes the oldest files."""
    try:
        return open(file, "rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LogError(f"{file}: {error.strerror}") from None


def _begin(file: Path, opened: IO[bytes]) -> None:
    """Read the first line. Raises LogError, which says what the file is instead."""
    head = opened.read(len(MAGIC))
    if head == MAGIC:
        return
    line = head if head.endswith(b"\n") else head + opened.readline(64)
    if line.startswith(TITLE):
        told = line[len(TITLE) :].decode(errors="replace").strip()
        if told.isdigit() and int(told) > FORMAT:
            raise LogError(
                f"{file}: is a decision log of format {told}, of a newer sidecar; this one reads "
                f"format {FORMAT}: read it with that version"
            )
        raise LogError(f"{file}: is a decision log, but its first line is damaged")
    raise LogError(f"{file}: is not a decision log: {_what(line)}")


def _what(head: bytes) -> str:
    if not head:
        return "it is empty"
    if MAGIC.startswith(head):
        return "its first line is cut off"
    for magic, name in _KNOWN:
        if head.startswith(magic):
            return f"it is {name}"
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head[:24]):
        return f"it is text that begins {head[:24].decode()!r}"
    return "it is binary data of another kind"
