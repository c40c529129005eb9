"""Over TCP: nothing without the token, everything with it; the file it stands in."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.control import Control
from sidecar.errors import ConfigError, ControlError
from sidecar.orders import MAX_BODY_BYTES
from sidecar.tokens import read_token
from tests.processes import short_directory
from tests.sites import TOKEN, Sites


@pytest.fixture
def sites() -> Iterator[Sites]:
    with short_directory() as directory:
        yield Sites(directory)


# ---- the token

CLOSED = ("/policy", "/policy/list", "/policy/history", "/policy/shadow", "/path", "/handover", "")


def test_without_a_token_tcp_changes_nothing(sites: Sites) -> None:
    def call() -> None:
        for prefix in ("", "/control"):
            for path in CLOSED[:-1]:
                for method in ("GET", "POST", "DELETE"):
                    status, _ = sites.http(method, prefix + path, b"{}")
                    assert status in (404, 405), (method, prefix, path)
        assert sites.http("GET", "/status")[0] == 200

    sites.run(call, token="")
    assert sites.dispatcher.policy_version == 1


@pytest.mark.parametrize(
    "given",
    [
        *("", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}"),
        *(TOKEN, f"Bearer  {TOKEN}", f"Bearer {TOKEN.upper()}", "Bearer \xe9\xff", "Bearer " * 900),
    ],
    ids=lambda given: repr(given)[:30],
)
def test_a_wrong_token(sites: Sites, given: str) -> None:
    def call() -> None:
        headers = {"Authorization": given} if given else {}
        for method, path in (
            ("GET", "/control/policy"),
            ("POST", "/control/policy"),
            ("DELETE", "/control/policy/shadow"),
            ("POST", "/control/policy/reload"),
            ("GET", "/control"),
            ("GET", "/control/none"),
            ("GET", "/%63ontrol/policy"),
            ("GET", "/controlx"),
        ):
            status, answer = sites.http(method, path, b'{"name": "round_robin"}', **headers)
            assert status == 401, path
            assert "token" in answer["error"]
            assert sites.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/./control/policy", "//control/policy", "/x/../control/policy"):
            assert sites.http("GET", path, **headers)[0] in (401, 404)
        assert sites.http("GET", "/metrics", **headers)[0] == 200

    sites.run(call)
    assert sites.dispatcher.policy_version == 1
    assert sites.reloads == 0


def test_a_wrong_token_is_a_control_error_that_says_so(sites: Sites) -> None:
    def call() -> None:
        with pytest.raises(ControlError, match="token is missing or wrong"):
            Control(f"http://127.0.0.1:{sites.port}", token="wrong").show()

    sites.run(call)


def test_the_hand_over_is_not_open_to_tcp(sites: Sites) -> None:
    def call() -> None:
        for path in ("/handover", "/control/handover"):
            status, _ = sites.http("POST", path, b"{}", Authorization=f"Bearer {TOKEN}")
            assert status == 404

    sites.run(call)


def test_bodies_over_tcp(sites: Sites) -> None:
    def call() -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for body, expected in (
            (b"", 400),
            (b"{", 400),
            (b"[]", 400),
            (b'{"name": 5}', 400),
            (b'{"name": "round_robin", "x": 1}', 400),
            (b'{"name": "\xff"}', 400),
            (b"[" * 60_000, 400),
            (b" " * (MAX_BODY_BYTES + 1), 413),
        ):
            status, answer = sites.http("POST", "/control/policy", body, **headers)
            assert status == expected
            assert answer["error"]
        for method, path in (("PUT", "/control/policy"), ("GET", "/control/policy/reload")):
            assert sites.http(method, path, **headers)[0] == 405

    sites.run(call)
    assert sites.dispatcher.policy_version == 1


def test_a_good_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"  {TOKEN}\n")
    file.chmod(0o600)
    assert read_token(file) == TOKEN
    file.chmod(0o400)
    assert read_token(str(file)) == TOKEN


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"", 0o600, "0 characters.*16"),
        (b"short\n", 0o600, "5 characters.*16"),
        (b"x" * 15, 0o600, "15 characters"),
        (TOKEN.encode(), 0o640, "chmod 600"),
        (TOKEN.encode(), 0o604, "chmod 600"),
        (TOKEN.encode(), 0o620, "chmod 600"),
        (b"0123456789 abcdefgh", 0o600, "without spaces"),
        (b"0123456789\nabcdefgh", 0o600, "without spaces"),
        ("0123456789abcdefghé".encode(), 0o600, "ASCII"),
        (b"\0" * 32, 0o600, "characters"),
    ],
)
def test_a_bad_token_file(tmp_path: Path, content: bytes, mode: int, words: str) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"admin.token_file: {file}.*{words}") as caught:
        read_token(file)
    assert content.decode(errors="replace").strip() not in str(caught.value) or len(content) < 9


def test_no_token_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"admin.token_file"):
            read_token(path)
    if os.geteuid():
        file = tmp_path / "closed"
        file.write_text(TOKEN)
        file.chmod(0o000)
        with pytest.raises(ConfigError, match="Permission"):
            read_token(file)
