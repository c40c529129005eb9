"""Socket files that are removed under a running sidecar, and what must not be touched instead."""

import errno
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.errors import EndpointError
from sidecar.files import Lock
from sidecar.sockets import Sockets
from tests.processes import Asker, Sidecar, short_directory, sidecar_process, wait_for
from tests.support import keyed

SUFFIXES = ("", ".reports", ".control", ".lock")


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path / "s"


@pytest.fixture
def sidecar(directory: Path) -> Iterator[Sidecar]:
    with sidecar_process(f"ipc://{directory}/q") as process:
        wait_for(lambda: Path(f"{directory}/q.control").exists())
        yield process


def whole(directory: Path) -> bool:
    return all(Path(f"{directory}/q{suffix}").exists() for suffix in SUFFIXES)


def serves(asker: Asker) -> bool:
    return len(asker.query([keyed("k")]).ranks) == 1


@pytest.mark.parametrize("gone", [*SUFFIXES, "all", "the directory"])
def test_files_that_were_removed_are_made_again(
    sidecar: Sidecar, directory: Path, gone: str
) -> None:
    with Asker(sidecar.endpoint) as before:
        assert serves(before)
        if gone == "the directory":
            shutil.rmtree(directory)
        for suffix in SUFFIXES if gone == "all" else [gone]:
            Path(f"{directory}/q{suffix}").unlink(missing_ok=True)
        wait_for(lambda: whole(directory))
        with Asker(sidecar.endpoint) as after:
            assert serves(after)
        assert serves(before), "who was connected stays so"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(f"{directory}/q").stat().st_mode) == 0o600
    remade = len(SUFFIXES) - 1 if gone in ("all", "the directory") else int(gone != ".lock")
    wait_for(lambda: sidecar.metric("sockets_remade_total") == remade)
    assert len(sidecar.lines("WARNING", "was removed by somebody")) == remade
    assert sidecar.stop() == 0
    assert all(one.suffix == ".lock" for one in directory.iterdir())


def test_a_second_sidecar_refuses_though_the_lock_was_removed(
    sidecar: Sidecar, directory: Path
) -> None:
    lock = Path(f"{directory}/q.lock")
    lock.unlink()
    wait_for(lock.exists)
    with sidecar_process(sidecar.endpoint, ready=False) as second:
        assert second.wait() == 69


def test_what_another_has_put_there_is_kept_and_told(sidecar: Sidecar, directory: Path) -> None:
    with Asker(sidecar.endpoint) as before, socket.socket(socket.AF_UNIX) as other:
        assert serves(before)
        Path(f"{directory}/q").unlink()
        other.bind(f"{directory}/q")
        theirs = os.lstat(f"{directory}/q").st_ino
        wait_for(lambda: sidecar.lines("WARNING", "is no longer our socket"))
        assert os.lstat(f"{directory}/q").st_ino == theirs
        assert serves(before)
        assert sidecar.stop() == 0
        assert os.lstat(f"{directory}/q").st_ino == theirs, "it is not ours to remove"


def test_a_successor_in_a_new_directory_keeps_its_files(directory: Path) -> None:
    first = Sockets(f"ipc://{directory}/q", allow_tcp=False)
    first.bind()
    shutil.rmtree(directory)
    second = Sockets(f"ipc://{directory}/q", allow_tcp=False)
    second.bind()
    try:
        with pytest.raises(EndpointError, match="held by another sidecar"):
            first.mend()
        first.close()
        assert Path(f"{directory}/q").exists()
        assert second.mend() == []
    finally:
        second.close()


def test_a_full_disk_does_not_keep_the_lock(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    directory.mkdir()
    monkeypatch.setattr(os, "pwrite", full)
    lock = Lock(f"{directory}/q")
    lock.acquire()
    assert not lock.free()
    with pytest.raises(EndpointError, match="held by another"):
        Lock(f"{directory}/q").acquire()
    lock.release()


def test_the_control_socket_comes_back_once_its_place_is_free(
    sidecar: Sidecar, directory: Path
) -> None:
    control = Path(f"{directory}/q.control")
    control.unlink()
    control.write_text("not a socket")
    wait_for(lambda: sidecar.lines("WARNING", "is not a socket"))
    control.unlink()
    wait_for(control.exists)
    wait_for(lambda: sidecar.metric("sockets_remade_total") == 1)
