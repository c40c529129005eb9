"""Reading what is cut off, damaged, foreign or hostile."""

import math
import os
import struct
import zlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from sidecar.cli import main
from sidecar.journal.decoder import Decision, Missing
from sidecar.journal.reader import Reader
from sidecar.journal.record import (
    CHUNK,
    LENGTH,
    MAGIC,
    MAX_RAW_BYTES,
    Gap,
    LogError,
    Part,
    State,
    encode,
)
from sidecar.journal.verify import Verification
from sidecar.wire import Want
from tests.journal.support import write
from tests.journal.test_record import GOLDEN, SAID
from tests.journal.test_writer import busy, files


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A file of several chunks; it stands beside its secret."""
    write(tmp_path / "log", busy(300), max_bytes=64 << 20)
    (file,) = files(tmp_path / "log")
    return file


def read(path: Path) -> tuple[int, list[str]]:
    """Decisions and warnings; a file that breaks off says so in its events too."""
    warnings: list[str] = []
    events = list(Reader([str(path)], warn=warnings.append).events())
    assert bool(warnings) == any(isinstance(one, Missing) for one in events)
    return sum(len(one.ranks) for one in events if isinstance(one, Decision)), warnings


def chunks(file: Path) -> list[int]:
    """Where each chunk begins, and the end."""
    data, at, found = file.read_bytes(), len(MAGIC), []
    while at < len(data):
        found.append(at)
        at += CHUNK.size + CHUNK.unpack_from(data, at)[0]
    return [*found, at]


def test_a_file_cut_in_half_is_read_up_to_the_cut(log: Path) -> None:
    whole = read(log)
    assert whole == (600, [])
    begins = chunks(log)
    assert len(begins) > 4
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    decisions, (warning,) = read(log)
    assert 200 < decisions < 400
    at = max(begin for begin in begins if begin < log.stat().st_size)
    assert f"{log}: is cut off in the chunk that begins at byte {at};" in warning
    told = Verification(Reader([str(log)])).run()
    assert told["differ"] == 0 and told["compared"] == decisions


def test_cut_anywhere_it_is_read_up_to_there(log: Path) -> None:
    data = log.read_bytes()
    last, sound = 0, chunks(log)
    for size in [*range(len(MAGIC) + 1, len(MAGIC) + 40), *range(len(MAGIC) + 1, len(data), 4999)]:
        log.write_bytes(data[:size])
        if size in sound:
            continue
        decisions, warnings = read(log)
        assert len(warnings) == 1
        last = max(last, decisions)
    assert last > 500


def test_a_flipped_bit_is_found(log: Path) -> None:
    data = bytearray(log.read_bytes())
    second = chunks(log)[1]
    data[second + 500] ^= 4
    log.write_bytes(data)
    decisions, (warning,) = read(log)
    assert 50 < decisions < 200
    assert f"checksum is wrong) in the chunk that begins at byte {second}" in warning


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "it is empty"),
        (b"\x1f\x8b\x08rest", "it is gzip data"),
        (b"\x28\xb5\x2f\xfdrest", "it is zstd data"),
        (b'{"policy": "kv_affinity"}\n' * 5, "it is text that begins"),
        (bytes(range(200, 232)), "it is binary data of another kind"),
        (MAGIC[:20], "its first line is cut off"),
        (MAGIC[:-2] + b"two\n", "its first line is damaged"),
        (MAGIC[:-2] + b"2\n" + b"x" * 99, "is a decision log of format 2, of a newer sidecar"),
        (MAGIC[:-2] + b"10\n", "is a decision log of format 10, of a newer sidecar"),
    ],
)
def test_a_file_that_is_not_ours_is_named_for_what_it_is(
    tmp_path: Path, data: bytes, what: str
) -> None:
    file = tmp_path / "some.file"
    file.write_bytes(data)
    with pytest.raises(LogError) as error:
        Reader([str(file)])
    assert str(file) in str(error.value) and what in str(error.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="No such file"):
        Reader([str(tmp_path / "absent")])
    with pytest.raises(LogError, match="holds no decision log"):
        Reader([str(tmp_path)])


def packed(raw: bytes, *, says: int | None = None) -> bytes:
    data = zlib.compress(raw)
    return CHUNK.pack(len(data), len(raw) if says is None else says, zlib.crc32(data)) + data


def records(*all_of_them: bytes) -> bytes:
    return b"".join(LENGTH.pack(len(one)) + one for one in all_of_them)


HEAD, PART, DECIDED, NEXT, *_ = (encode(record) for record in GOLDEN.values())


def head(**changes: object) -> bytes:
    return encode(replace(next(iter(GOLDEN.values())), **changes))


def part(requests: int, stem: int = -1, blocks: bytes = bytes(8 * 4096)) -> bytes:
    if stem < 0 and requests > 1:
        blocks = b""
    return encode(Part([], [replace(SAID, key=None, stem=stem, blocks=blocks)] * requests))


@pytest.mark.parametrize(
    ("chunk", "what"),
    [
        (struct.pack("<III", 1 << 31, 5, 0), "no chunk is that long"),
        (packed(bytes(MAX_RAW_BYTES), says=10), "another length than it says"),
        (packed(records(b"\xc1")), "makes no sense"),
        (packed(records(b"\x91\xa5other")), "makes no sense"),
        (packed(records(DECIDED)), "does not begin with its head"),
        (packed(records(HEAD, HEAD)), "second head"),
        (packed(records(HEAD, NEXT)), "makes no sense"),
        (CHUNK.pack(3, 9, zlib.crc32(b"abc")) + b"abc", "is damaged"),
        # A small file of somebody else's may not take much memory, nor tell of no time at all.
        (packed(records(head(wall=math.nan))), "makes no sense"),
        (packed(records(head(wall=1e300))), "makes no sense"),
        (packed(records(head(now=math.inf))), "makes no sense"),
        (packed(records(head(max_instances=0))), "makes no sense"),
        (packed(records(HEAD, part(1, blocks=bytes(8 * 4097)))), "makes no sense"),
        (packed(records(HEAD, part(1), part(1, 4095, blocks=bytes(16)))), "more blocks"),
        (packed(records(HEAD, *[part(9)] * 456)), "more requests"),
    ],
)
def test_nonsense_is_left_out(tmp_path: Path, chunk: bytes, what: str) -> None:
    file = tmp_path / "made.dplog"
    file.write_bytes(MAGIC + chunk)
    _, (warning, *_) = read(file)
    assert what in warning and f"at byte {len(MAGIC)};" in warning


def test_a_file_that_goes_while_it_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write(directory, busy(400))
    warnings: list[str] = []
    reader = Reader([str(directory)], warn=warnings.append)
    first, *rest = files(directory)
    first.unlink()
    assert rest
    told = Verification(reader).run()
    assert told["compared"] > 0 and told["log"]["missing"] == {"removed": 0}
    assert warnings == [f"{first}: was removed meanwhile, as the oldest"]


def test_the_next_file_is_read_all_the_same(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write(directory, busy(900))
    _, second, *_ = files(directory)
    damaged = bytearray(second.read_bytes())
    damaged[2000] ^= 1
    second.write_bytes(damaged)
    warnings: list[str] = []
    told = Verification(Reader([str(directory)], warn=warnings.append)).run()
    assert len(warnings) == 1 and second.name in warnings[0]
    log = told["log"]
    assert log["decisions"] + sum(log["missing"].values()) == 1800
    assert log["missing"]["between files"] > 0
    assert "gap" in told["notes"][0]


def test_what_a_log_says_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made.dplog"
    sound = head(state=State("round_robin", {}, 1, Want()))
    file.write_bytes(MAGIC + packed(records(sound, encode(Gap(5, 12, "\x1b[2J\x07")))))
    main(["replay", str(file)])
    told = capsys.readouterr()
    assert "[2J" in told.out and "\x1b" not in told.out + told.err


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.dplog")
    with pytest.raises(LogError, match="neither a file"):
        Reader([str(tmp_path / "a.dplog")])
    with pytest.raises(LogError, match="holds no decision log"):
        Reader([str(tmp_path)])
