"""Names of routing keys."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import ConfigError
from sidecar.keyhash import SECRET_BYTES, KeyHash, secret_in


@given(st.binary(max_size=2000), st.binary(max_size=2000))
def test_names(one: bytes, other: bytes) -> None:
    names = KeyHash(bytes(SECRET_BYTES))
    assert names.of(one) == names.of(one)
    assert len(names.of(one)) == 16
    assert int(names.of(one), 16) >= 0
    assert (names.of(one) == names.of(other)) == (one == other)


def test_without_the_secret_nobody_knows() -> None:
    assert len({KeyHash().of(b"k") for _ in range(20)}) == 20
    assert KeyHash(b"a" * 32).of(b"k") != KeyHash(b"b" * 32).of(b"k")
    assert KeyHash(b"a" * 32).of(b"k") == KeyHash(b"a" * 32).of(b"k")


def test_a_secret_is_made_once_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    first = secret_in(path)
    assert len(first) == SECRET_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret_in(path) == secret_in(str(path)) == first
    assert secret_in(tmp_path / "other") != first


@pytest.mark.parametrize("size", [0, 31, 33, 5000])
def test_a_file_that_is_no_secret(tmp_path: Path, size: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * size)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{size} bytes.*32"):
        secret_in(path)
    assert path.stat().st_size == size, "it is somebody's"


def test_a_secret_that_others_may_read_is_none(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret_in(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        secret_in(path)


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "secret", Path("/proc/none"), tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=str(path)):
            secret_in(path)
