"""The directory of the decision log: its lock, its secret, its files, and what they may take.

All of it runs in one thread beside the event loop. Nobody else may look into the directory (0700,
files 0600), and no link is followed.
"""

import contextlib
import fcntl
import os
import re
import stat
import zlib
from pathlib import Path
from typing import NamedTuple

from sidecar.errors import ConfigError
from sidecar.journal.record import CHUNK, MAGIC, SUFFIX
from sidecar.keyhash import secret_in

LEVEL = 6
FILES = 16
"""Files that the bound is shared by: the oldest sixteenth goes first."""
MIN_FILE_BYTES, MAX_FILE_BYTES = 32 << 10, 64 << 20
ASIDE_BYTES = 8192
"""Of the bound, for lock and secret."""
SECRET = "secret"
_LOCK = "lock"
_NAME = re.compile(r"decisions-\d{20}-\d{6}" + re.escape(SUFFIX))


class LockedError(Exception):
    """Another sidecar writes there."""


class TooLargeError(Exception):
    """More than everything may take, in one piece."""


class Chunk(NamedTuple):
    """Records that are written together. file: number of the file; requests: decisions in it."""

    file: int
    raw: bytes
    requests: int


def prepare(directory: str) -> bytes:
    """Make the directory if it is missing; its secret, made if it is missing.

    Raises ConfigError if it cannot be had, or is not ours alone.
    """
    key = "decision_log.directory"
    path = Path(directory)
    if not path.is_absolute():
        raise ConfigError(f"{key}: {directory!r} is not an absolute path")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check(path, os.lstat(path))
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(path / SECRET).st_mode):
                raise ConfigError(f"{path / SECRET}: is not a file; it is read through no link")
        return secret_in(path / SECRET)
    except OSError as error:
        raise ConfigError(f"{key}: {directory}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _check(path: Path, found: os.stat_result) -> None:
    """Whether a directory is ours alone. Raises ConfigError."""
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError(f"{path}: is a link; name the directory itself")
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path}: is not a directory")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{path}: belongs to user {found.st_uid}, not to {os.geteuid()}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{path}: others may look into it; chmod 700 it")


class Disk:
    """Writes chunks. boot: start of this sidecar, ns since 1970; max_bytes: for all files."""

    def __init__(self, directory: str, boot: int, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes - ASIDE_BYTES
        self.file_bytes = min(MAX_FILE_BYTES, max(MIN_FILE_BYTES, self.max_bytes // FILES))
        self._boot = boot
        self._at = self._lock = self._file = -1
        """Descriptors: of the directory, of its lock, of the file that is written."""
        self._number = 0
        self._size = 0
        self.written = 0
        """Bytes, by this process."""
        self._kept: dict[str, int] = {}
        """Name -> bytes of every file, the oldest first."""

    def write(self, chunk: Chunk) -> int:
        """Compress and append a chunk; the bytes that its file has then.

        Raises LockedError, TooLargeError or OSError; what was written of it is taken back.
        """
        if self._at < 0:
            self._open()
        packed = zlib.compress(chunk.raw, LEVEL)
        data = CHUNK.pack(len(packed), len(chunk.raw), zlib.crc32(packed)) + packed
        if chunk.file != self._number or self._file < 0:
            data = MAGIC + data
            self._close_file()
        self._make_room(len(data))
        try:
            if self._file < 0:
                self._begin(chunk.file)
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            self._take_back()
            raise
        self._size += len(data)
        self.written += len(data)
        self._kept[self._name] = self._size
        return self._size

    def close(self) -> None:
        """Let go of file, lock and directory."""
        self._close_file()
        for descriptor in (self._lock, self._at):
            if descriptor >= 0:
                os.close(descriptor)
        self._at = self._lock = -1

    @property
    def _name(self) -> str:
        return f"decisions-{self._boot:020d}-{self._number:06d}{SUFFIX}"

    def _open(self) -> None:
        flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        at = os.open(self.directory, flags)
        lock = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(_LOCK, flags, 0o600, dir_fd=at)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = "" if lock < 0 else os.pread(lock, 32, 0).decode(errors="replace").strip()
            for descriptor in (lock, at):
                if descriptor >= 0:
                    os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise LockedError(f"process {holder} writes there") from None
            raise
        self._at, self._lock = at, lock
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(lock, 0)
            os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        names = sorted(name for name in os.listdir(at) if _NAME.fullmatch(name))
        self._kept = {
            name: os.stat(name, dir_fd=at, follow_symlinks=False).st_size for name in names
        }

    def _begin(self, number: int) -> None:
        self._number, self._size = number, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._name, flags, 0o600, dir_fd=self._at)
        self._kept[self._name] = 0

    def _make_room(self, size: int) -> None:
        """Remove the oldest files until so much more may be written. Raises TooLargeError."""
        total = sum(self._kept.values()) + size
        for name in list(self._kept):
            if total <= self.max_bytes or (self._file >= 0 and name == self._name):
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._at)
            total -= self._kept.pop(name)
        if total > self.max_bytes:
            raise TooLargeError(f"{size} bytes in one piece, max_megabytes allows {self.max_bytes}")

    def _take_back(self) -> None:
        """Cut off what was written of a chunk, or remove the file if that is all of it."""
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            if self._size:
                os.ftruncate(self._file, self._size)
            else:
                os.unlink(self._name, dir_fd=self._at)
                self._kept.pop(self._name, None)
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
