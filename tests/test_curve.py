"""CURVE keys: made by `keygen`, read from files, refused by name and never shown."""

import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from sglang_hook import settings
from sidecar import cli, curve
from sidecar.errors import ConfigError, EndpointError
from tests.processes import NOBODY

ENDPOINT = "tcp://127.0.0.1:7000"
FILES = ["hook.key", "hook.key_secret", "sidecar.key", "sidecar.key_secret"]


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A directory that `keygen` filled."""
    assert cli.main(["keygen", str(tmp_path / "keys")]) == 0
    capsys.readouterr()
    return tmp_path / "keys"


def told(call: Callable[[], object], *words: str) -> str:
    """The text of the ConfigError that `call` raises, which has every word."""
    with pytest.raises(ConfigError) as caught:
        call()
    text = str(caught.value)
    assert not [word for word in words if word not in text], text
    return text


def private(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(0o600)
    return str(path)


def test_keygen_writes_two_pairs(keys: Path) -> None:
    assert sorted(path.name for path in keys.iterdir()) == FILES
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    for who in ("sidecar", "hook"):
        secret, public = keys / f"{who}.key_secret", keys / f"{who}.key"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert len(secret.read_text().strip()) == len(public.read_text().strip()) == 40
        pair = curve.read_secret(str(secret), "x")
        assert pair.public.decode() == public.read_text().strip()
        assert pair.secret.decode() not in repr(pair)


def test_keygen_says_what_goes_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keygen", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    public = (tmp_path / "sidecar.key").read_text().strip()
    for name in ("sidecar.key_secret", "hook.key_secret"):
        assert str(tmp_path / name) in said
        assert (tmp_path / name).read_text().strip() not in said
    assert f"DP_SIDECAR_CURVE_SERVER_KEY={public}\n" in said
    assert shlex.quote(public).strip("'") == public
    assert not set("$`\"'\\!#%&*?<>()[]{}| ") & set(public), "it needs quotes"


@pytest.mark.parametrize("there", FILES)
def test_keygen_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str
) -> None:
    (tmp_path / there).write_text("mine")
    assert cli.main(["keygen", str(tmp_path)]) == 2
    assert f"{tmp_path / there}: is there already and is kept" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_keygen_where_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["keygen", str(tmp_path / "file" / "keys")]) == 2
    assert "keygen: " in capsys.readouterr().err


SECRET = zmq.curve_keypair()[1].decode()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("", "has 0"),
        (SECRET[:-1], "has 39"),
        (SECRET + "x", "has 41"),
        (SECRET[:-1] + "~", "not Z85"),
        (SECRET[:-1] + " x", "has 41"),
        ("#" * 40, "not Z85"),
        (b"\xff" * 40, "is not a file of keys"),
        (SECRET * 100, "more than 256 bytes"),
    ],
)
def test_secrets_that_are_none(tmp_path: Path, content: str | bytes, word: str) -> None:
    path = private(tmp_path / "secret", content)
    text = told(lambda: curve.read_secret(path, "serve.curve_secret_key_file"), path, word)
    assert text.startswith("serve.curve_secret_key_file: ")
    assert SECRET[:20] not in text


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o620, 0o602, 0o644, 0o777])
def test_a_secret_that_others_can_read(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "secret", SECRET)
    if os.getuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    os.chmod(path, mode)
    told(lambda: curve.read_secret(path, "x"), f"{mode:04o}", "chmod 600", path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give root a file")
@pytest.mark.parametrize(
    ("mode", "fine"), [(0o440, True), (0o640, True), (0o660, False), (0o644, False)]
)
def test_a_secret_of_roots_may_be_its_groups(tmp_path: Path, mode: int, fine: bool) -> None:
    path = private(tmp_path / "secret", SECRET)
    os.chmod(path, mode)
    if fine:
        assert curve.read_secret(path, "x").secret.decode() == SECRET
    else:
        told(lambda: curve.read_secret(path, "x"), "chmod 600")


def test_secrets_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, word in ((tmp_path / "none", "No such file"), (tmp_path / "pipe", "not a file")):
        told(lambda path=path: curve.read_secret(str(path), "x"), str(path), word)
    told(lambda: curve.read_secret(str(tmp_path), "x"), "not a file")
    told(lambda: curve.read_secret("a\0b", "x"), "x: ")


def test_a_file_of_client_keys(tmp_path: Path) -> None:
    pairs = [zmq.curve_keypair()[0].decode() for _ in range(3)]
    text = f"# ours\n\n{pairs[0]}\n  {pairs[1]}  # node 2\r\n{pairs[2]} #{pairs[0]}\n"
    known = curve.read_clients(private(tmp_path / "clients", text), "x")
    assert known == {z85.decode(key) for key in pairs}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("", "0 keys"),
        ("# none yet\n", "0 keys"),
        ("x" * 40 + "\nshort\n", "line 2"),
        (f"{'x' * 40} {'y' * 40}\n", "one key a line"),
        ("\n~" + "x" * 39, "line 2"),
    ],
)
def test_bad_client_keys(tmp_path: Path, content: str, word: str) -> None:
    path = private(tmp_path / "clients", content)
    told(lambda: curve.read_clients(path, "serve.curve_client_keys_file"), path, word)


def test_both_settings_of_the_sidecar_or_none(keys: Path) -> None:
    secret, clients = str(keys / "sidecar.key_secret"), str(keys / "hook.key")
    assert curve.server_keys("", "") is None
    assert curve.server_keys(secret, clients) is not None
    for given in ((secret, ""), ("", clients)):
        told(
            lambda given=given: curve.server_keys(*given),
            "serve.curve_secret_key_file",
            "serve.curve_client_keys_file",
            "needed",
        )


def hook_env(keys: Path, **more: str) -> dict[str, str]:
    return {
        "DP_SIDECAR_ENDPOINT": ENDPOINT,
        "DP_SIDECAR_CURVE_SERVER_KEY": (keys / "sidecar.key").read_text(),
        "DP_SIDECAR_CURVE_SECRET_KEY_FILE": str(keys / "hook.key_secret"),
    } | more


def test_the_hook_takes_tcp_with_keys(keys: Path) -> None:
    loaded = settings.load(hook_env(keys))
    assert loaded.reports == "tcp://127.0.0.1:7001"
    found = loaded.keys()
    assert found is not None
    assert found.server.decode() == (keys / "sidecar.key").read_text().strip()
    assert (keys / "hook.key_secret").read_text().strip() not in repr(loaded) + repr(vars(found))


def test_the_hook_reports_elsewhere_than_it_asks(keys: Path) -> None:
    local = {"DP_SIDECAR_ENDPOINT": "ipc:///tmp/q"}
    assert settings.load(local).reports == "ipc:///tmp/q.reports"
    assert settings.load(local).keys() is None
    there = {"DP_SIDECAR_REPORT_ENDPOINT": "tcp://leader:65535"}
    assert settings.load(hook_env(keys, **local, **there)).reports == "tcp://leader:65535"
    with pytest.raises(EndpointError, match=r"tcp://leader:65535.*CURVE"):
        settings.load(local | there)
    assert settings.load(local | there | {"DP_SIDECAR_ALLOW_INSECURE_TCP": "1"}).keys() is None
    for bad, word in (
        ("http://x", "begins with"),
        ("tcp://x:65536", "1 to 65535"),
        ("ipc://x", ""),
    ):
        with pytest.raises(EndpointError, match=f"{bad}.*{word}"):
            settings.load(hook_env(keys, DP_SIDECAR_REPORT_ENDPOINT=bad))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"DP_SIDECAR_CURVE_SERVER_KEY": ""}, "DP_SIDECAR_CURVE_SERVER_KEY: is needed"),
        ({"DP_SIDECAR_CURVE_SERVER_KEY": "x"}, "DP_SIDECAR_CURVE_SERVER_KEY: a CURVE key has 40"),
        ({"DP_SIDECAR_CURVE_SECRET_KEY_FILE": ""}, "DP_SIDECAR_CURVE_SECRET_KEY_FILE: is needed"),
        ({"DP_SIDECAR_CURVE_SECRET_KEY_FILE": "/no"}, "DP_SIDECAR_CURVE_SECRET_KEY_FILE: /no: No"),
    ],
)
def test_bad_settings_of_the_hook(keys: Path, change: dict[str, str], word: str) -> None:
    told(lambda: settings.load(hook_env(keys, **change)), word)


def test_one_environment_for_both_ends(keys: Path) -> None:
    """`run` starts sidecar and server with the same variables: their secrets have two names."""
    from sidecar import config

    env = hook_env(keys, DP_SIDECAR_SERVE_CURVE_SECRET_KEY_FILE=str(keys / "sidecar.key_secret"))
    assert config.load(None, env, {}).serve.curve_secret_key_file.endswith("sidecar.key_secret")
    assert settings.load(env).curve_secret_key_file.endswith("hook.key_secret")
