"""Writing a log: its bounds, its secrecy, and a disk that does not take it."""

import asyncio
import errno
import os
import stat
import zlib
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sidecar.errors import ConfigError
from sidecar.hashing import key_hash
from sidecar.journal import outbox
from sidecar.journal.disk import Disk, prepare
from sidecar.journal.reader import Reader
from sidecar.journal.record import CHUNK, MAGIC
from sidecar.journal.seal import Seal
from sidecar.journal.verify import Verification
from sidecar.wire import MAX_BATCH, Past, RequestFacts
from tests.journal.support import MEGABYTE, Noted, feed, journal_in, replay, write
from tests.support import BOOT, query, report


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.dplog"))


def raw(file: Path) -> bytes:
    """All records of a file."""
    data, found = file.read_bytes()[len(MAGIC) :], b""
    while data:
        size = CHUNK.unpack_from(data)[0]
        found += zlib.decompress(data[CHUNK.size : CHUNK.size + size])
        data = data[CHUNK.size + size :]
    return found


def prompts(drawn: Random, count: int, blocks: int = 60) -> list[RequestFacts]:
    """Requests of which no two have a block in common."""
    return [
        RequestFacts(
            b"key-%d" % drawn.randrange(1000),
            0,
            64 * blocks,
            None,
            [drawn.getrandbits(64) for _ in range(blocks)],
        )
        for _ in range(count)
    ]


def busy(queries: int, *, seed: int = 1, boot: int = BOOT) -> Noted:
    noted, drawn = Noted(boot=boot), Random(seed)
    for n in range(queries):
        noted.report(report(n % 8, n + 1, running=drawn.randrange(5)), float(n))
        noted.handle(query(prompts(drawn, 2)), float(n))
    return noted


# ---- bounds


def test_the_oldest_files_go_first_and_the_bound_holds(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    noted = busy(1600)
    journal = write(directory, noted)
    left = files(directory)
    total = sum(file.stat().st_size for file in directory.iterdir())
    assert total <= MEGABYTE < journal.outbox.disk.written
    assert len(left) > 5 and not left[0].name.endswith("-000001.dplog")
    assert not journal.health.log_dropped
    assert journal.health.log_records == 3200
    told = Verification(Reader([str(directory)])).run()
    assert told["log"]["whole"] is False and told["log"]["missing"] == {}
    assert told["warm_up"] > 0 and told["compared"] > 1000
    assert "mid-life" in told["notes"][0]


def test_a_new_start_counts_the_files_of_the_last_one(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    for boot in (BOOT, BOOT + 10**9, BOOT + 2 * 10**9):
        write(directory, busy(800, boot=boot), boot=boot)
    assert sum(file.stat().st_size for file in directory.iterdir()) <= MEGABYTE
    assert {file.name[:30] for file in files(directory)} != {files(directory)[0].name[:30]}


def test_a_piece_larger_than_everything_is_left_out(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    noted = busy(40)
    journal = write(directory, noted, max_bytes=40_000)
    assert journal.health.log_dropped["too_large"] + journal.health.log_records == 80
    assert journal.health.log_dropped["too_large"] > 0
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 40_000


def test_a_query_as_long_as_may_be(tmp_path: Path) -> None:
    noted, drawn = Noted(), Random(3)
    history = [Past(facts, 2, 5) for facts in prompts(drawn, 100, 5)]
    noted.handle(query(prompts(drawn, MAX_BATCH, 5), history=history), 1.0)
    noted.handle(query(prompts(drawn, 40, 5), history=history[:50]), 2.0)
    write(tmp_path / "log", noted)
    assert replay(tmp_path / "log").ranks == [reply.ranks for reply in noted.replies]


def test_tables_are_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.journal.encoder.MAX_TABLE", 50)
    noted = busy(50)
    write(tmp_path / "log", noted)
    assert replay(tmp_path / "log").ranks == [reply.ranks for reply in noted.replies]


def test_a_slow_disk_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_PENDING_BYTES", 200_000)
    noted = busy(600)

    async def all_of_it() -> Any:
        journal = journal_in(tmp_path / "log", noted.first)
        for act in noted.acts[:1000]:
            act(journal)  # the loop never gets to write
        await asyncio.wait_for(journal.close(), 20)
        await feed(journal, noted.acts[1000:])
        await journal.close()
        return journal

    health = asyncio.run(all_of_it()).health
    assert health.log_dropped["slow"] > 100
    assert health.log_dropped["slow"] + health.log_records == 1200
    told = Verification(Reader([str(tmp_path / "log")])).run()
    assert told["log"]["missing"] == {"slow": health.log_dropped["slow"]}
    assert told["log"]["decisions"] == health.log_records
    assert "gap" in told["notes"][0]


def test_what_never_came_is_marked(tmp_path: Path) -> None:
    noted = busy(10)
    noted.acts.insert(10, lambda journal: journal.skipped(7))
    write(tmp_path / "log", noted)
    assert Verification(Reader([str(tmp_path / "log")])).run()["log"]["missing"] == {"lagging": 7}


# ---- secrecy


def test_no_key_and_no_hash_of_a_prompt_is_in_it(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    noted = Noted("prefix_affinity")
    key, namespace, prefix, block = b"session-of-a-customer", 0x0102030405060708, 77 << 50, 99 << 50
    facts = RequestFacts(key, namespace, 100, prefix, [block])
    noted.handle(query([facts, facts], history=[Past(facts, 1, 5)]), 1.0)
    write(directory, noted)
    data = b"".join(raw(file) for file in files(directory))
    assert b"affinity_hit" in data
    assert key not in data and b"session" not in data
    for value in (key_hash(key), namespace, prefix, block):
        for order in ("big", "little"):
            assert value.to_bytes(8, order) not in data  # type: ignore[arg-type]
    seal = Seal((directory / "secret").read_bytes())
    assert seal.of_key(key).to_bytes(8, "big") in data
    assert (directory / "secret").read_bytes() not in data


def test_only_we_may_look(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "log"
    before = os.umask(0)
    try:
        write(directory, busy(3))
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o600}


def test_a_directory_that_others_share_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"decision_log.directory: .*chmod 700"):
        prepare(str(tmp_path / "open"))
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ConfigError, match="is a link"):
        prepare(str(tmp_path / "link"))
    (tmp_path / "real" / "secret").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="no link"):
        prepare(str(tmp_path / "real"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"decision_log\.directory"):
        prepare(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="absolute"):
        prepare("log")


def test_links_in_the_place_of_files_are_not_followed(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    prepare(str(directory))
    victim = tmp_path / "victim"
    (directory / f"decisions-{BOOT:020d}-000001.dplog").symlink_to(victim)
    journal = write(directory, busy(3))
    assert journal.health.log_dropped["disk"] == 6
    assert not victim.exists()


# ---- a disk that does not take it


def failing(monkeypatch: pytest.MonkeyPatch, times: int, after: int) -> None:
    """The disk is full, some bytes after the next chunk began, so many times."""
    real, left = os.write, [times]

    def full(descriptor: int, data: Any) -> int:
        if left[0] > 0:
            left[0] -= 1
            real(descriptor, data[:after])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr("sidecar.journal.disk.os.write", full)


def test_a_full_disk_costs_what_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outbox, "RETRY_SECONDS", 0.01)
    directory = tmp_path / "log"
    noted = busy(600)

    async def all_of_it() -> Any:
        journal = journal_in(directory, noted.first)
        await feed(journal, noted.acts[:400])
        failing(monkeypatch, 1, 100)
        await feed(journal, noted.acts[400:])
        while journal.outbox.stuck:
            await asyncio.sleep(0.005)
        await feed(journal, [lambda journal: journal.report(report(0, 9999), 9999.0)])
        await journal.close()
        return journal

    health = asyncio.run(all_of_it()).health
    assert health.log_dropped["disk"] > 0
    assert health.log_dropped["disk"] + health.log_records == 1200
    assert len([one for one in caplog.messages if "No space left" in one]) == 1
    told = Verification(Reader([str(directory)], warn=pytest.fail)).run()
    assert told["log"]["decisions"] == health.log_records
    assert sum(told["log"]["missing"].values()) == health.log_dropped["disk"]


def test_one_directory_is_for_one_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outbox, "LOCKED_SECONDS", 0.01)
    directory = tmp_path / "log"
    noted, second = busy(20), busy(20, boot=BOOT + 1)

    async def all_of_it() -> None:
        first = journal_in(directory, noted.first)
        await feed(first, noted.acts[:20])
        first._flush()
        while first.outbox.writing is not None:
            await asyncio.sleep(0.005)
        other = journal_in(directory, second.first, boot=BOOT + 1)
        await feed(other, second.acts)
        other._flush()
        while not other.outbox.stuck:
            await asyncio.sleep(0.005)
        assert f"process {os.getpid()} writes there" in caplog.text
        await feed(first, noted.acts[20:])
        await first.close()
        while other.outbox.stuck:  # it waits for the lock, as one that takes over does
            await asyncio.sleep(0.005)
        await other.close()
        assert not first.health.log_dropped and not other.health.log_dropped

    asyncio.run(all_of_it())
    found = replay(directory)
    assert found.ranks == [reply.ranks for reply in noted.replies + second.replies]


def test_one_that_never_gets_the_lock_loses_all(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    noted = busy(5)
    holder = Disk(str(directory), BOOT + 1, MEGABYTE)
    prepare(str(directory))
    holder._open()
    journal = write(directory, noted)
    holder.close()
    assert journal.health.log_dropped == {"locked": 10}
    assert files(directory) == []
