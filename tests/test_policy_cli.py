"""`sglang-dp-sidecar policy ...` against a running sidecar: what it prints, and its exit codes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar import config
from sidecar.cli import main
from sidecar.errors import ConfigError
from sidecar.policies import REGISTRY
from sidecar.policy_cli import parameters
from tests.outside import distribution, sound
from tests.processes import Asker, Sidecar, clean_env, short_directory, sidecar_process, wait_for
from tests.support import keyed

ABSENT = 69
TOKEN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in config.settings():
        monkeypatch.delenv(key.env, raising=False)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_directory() as path:
        (path / "token").write_text(TOKEN)
        (path / "token").chmod(0o600)
        (path / "sidecar.toml").write_text("")
        (path / "dps_outside.py").write_text(sound())
        distribution(path, "dps-outside", {"mine": "dps_outside:Mine"})
        yield path


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[Sidecar]:
    env = clean_env()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH")]))
    flags = (f"--admin-token-file={folder}/token",)
    config_file = folder / "sidecar.toml"
    with sidecar_process(f"ipc://{folder}/q", *flags, config=config_file, env=env) as process:
        yield process


class Command:
    """The command line, at one sidecar."""

    def __init__(self, sidecar: Sidecar, capsys: pytest.CaptureFixture[str]) -> None:
        self.sidecar = sidecar
        self.capsys = capsys

    def __call__(self, *arguments: str, code: int = 0, way: tuple[str, ...] = ()) -> str:
        """What it prints: to standard output, or with another exit code the error."""
        where = way or (f"--endpoint={self.sidecar.endpoint}",)
        assert main(["policy", *arguments, *where]) == code
        printed = self.capsys.readouterr()
        assert not (printed.err if code == 0 else printed.out)
        return printed.out if code == 0 else printed.err

    def state(self) -> dict[str, object]:
        return json.loads(self("show"))


@pytest.fixture
def command(
    sidecar: Sidecar, folder: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    made = Command(sidecar, capsys)
    (folder / "sidecar.toml").write_text("")
    made("reload")
    yield made


def test_list(command: Command) -> None:
    lines = command("list").splitlines()
    assert [line.partition("  ")[0] for line in lines if "(built in)" in line] == list(REGISTRY)
    assert "mine  (dps-outside)" in lines, "without a reload"
    assert "  limit = 3, at least 1, at most 9" in lines
    assert "      How many" in lines
    assert "  move_ratio = 2.0, at least 1, at most 1000000" in lines
    assert '  fallback = "total_tokens", one of round_robin, total_requests, total_tokens' in lines
    listed = json.loads(command("list", "--json"))
    assert [one["name"] for one in listed] == [*REGISTRY, "mine"]
    assert listed[0]["params"]["move_ratio"]["default"] == 2.0


def test_set_takes_parameters_in_every_form(command: Command) -> None:
    for given in (
        ("kv_affinity", "move_tokens=5", "move_ratio=3"),
        ("kv_affinity", "--move_tokens", "5", "--move_ratio", "3"),
        ("kv_affinity", "--move-tokens=5", "--move-ratio=3"),
        ("kv_affinity", "move_tokens=5", "--move-ratio", "3"),
        ("kv_affinity", "--move_tokens", "5", "move_ratio=3"),
    ):
        before = command.state()["version"]
        printed = json.loads(command("set", *given))
        assert (printed["params"]["move_tokens"], printed["params"]["move_ratio"]) == (5.0, 3.0)
        assert printed["version"] == before + 1  # type: ignore[operator]


def test_a_policy_from_outside_is_set(command: Command) -> None:
    assert json.loads(command("set", "mine", "--limit", "4"))["params"] == {"limit": 4}
    with Asker(command.sidecar.endpoint) as asker:
        assert asker.query([keyed("a")]).policy == "mine"
    error = command("set", "mine", "limit=10", code=2)
    assert "limit" in error and "9" in error
    assert command.state()["params"] == {"limit": 4}


def test_shadow_and_canary(command: Command) -> None:
    shadow = json.loads(command("shadow", "kv_affinity", "--move-ratio", "3"))["shadow"]
    assert (shadow["name"], shadow["params"]["move_ratio"]) == ("kv_affinity", 3.0)
    canary = json.loads(command("canary", "round_robin", "--share", "0.05"))["canary"]
    assert canary == {"name": "round_robin", "params": {}, "share": 0.05}
    assert "already" in command("shadow", "round_robin", code=2)
    assert "already" in command("canary", "round_robin", "--share=0.1", code=2)
    ended = json.loads(command("shadow", "off"))
    assert ended["shadow"] is None and "same rank for " in ended["note"]
    assert "same rank for " in command("history")
    assert json.loads(command("canary", "off"))["canary"] is None
    assert "none to end" in command("shadow", "off", code=2)
    assert "none to end" in command("canary", "off", code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["canary", "round_robin"], ["--share"]),
        (["canary", "round_robin", "--share=0"], ["share", "0"]),
        (["canary", "round_robin", "--share=1.5"], ["share", "1"]),
        (["canary", "round_robin", "--share=nan"], ["round_robin"]),
        (["canary", "off", "--share=0.5"], ["off", "no parameters"]),
        (["shadow", "off", "x=1"], ["off", "no parameters"]),
        (["shadow", "best"], ["best", "kv_affinity"]),
        (["set", "off"], ["off", "kv_affinity"]),
        (["set", "kv_affinity", "--move_tokens"], ["--move_tokens", "PARAM=VALUE"]),
        (["set", "kv_affinity", "--move_tokens", "-5"], ["move_tokens", "0"]),
        (["set", "kv_affinity", "move_token=1"], ["move_token", "it has move_tokens, move_ratio"]),
        (["set", "round_robin", "x=1"], ["x", "it has no parameters"]),
        (
            ["reload", "--config", "deploy/config/sidecar.toml"],
            ["reads /", "sidecar.toml, not deploy/config/sidecar.toml", "start it"],
        ),
        (["set", "kv_affinity", "--move_tokens", "5", "move_tokens=6"], ["twice"]),
        (["set", "os:system"], ["no policy", "os:system", "only where the configuration"]),
    ],
    ids=" ".join,
)
def test_bad_orders(command: Command, arguments: list[str], words: list[str]) -> None:
    before = command.state()
    error = command(*arguments, code=2)
    assert error.startswith("sglang-dp-sidecar: ")
    assert len(error.splitlines()) == 1
    assert not [word for word in words if word not in error], error
    assert command.state() == before


def test_history(command: Command) -> None:
    command("set", "round_robin")
    command("canary", "kv_affinity", "--share=0.25")
    *_, second, last = command("history").splitlines()
    assert last.split()[2:6] == [
        "version",
        str(command.state()["version"]),
        "canary",
        "kv_affinity",
    ]
    assert last.endswith(" share 0.25")
    assert second.split()[4:6] == ["set", "round_robin"]
    changes = json.loads(command("history", "--json"))
    assert (changes[0]["what"], changes[0]["version"]) == ("start", 1)
    assert changes[-1]["share"] == 0.25
    assert [change["version"] for change in changes] == sorted(c["version"] for c in changes)


def test_reload(command: Command, folder: Path) -> None:
    module, settings = folder / "dps_outside.py", folder / "sidecar.toml"
    settings.write_text('[policy]\nname = "dps_outside:Mine"\nparams = {limit = 7}\n')
    assert json.loads(command("reload"))["params"] == {"limit": 7}
    good = module.read_text()
    failures = command.sidecar.metric("reload_failures_total") or 0
    for broken in ("def (", good.replace("def choose", "def chose"), good.replace("= 3", "= x")):
        module.write_text(broken)
        error = command("reload", code=2)
        assert "dps_outside:Mine" in error
        assert command.sidecar.metric("last_reload_successful") == 0
        with Asker(command.sidecar.endpoint) as asker:
            assert asker.query([keyed("a")]).reasons == ["placed"]
    assert command.sidecar.metric("reload_failures_total") == failures + 3
    module.write_text(good.replace("Reason.PLACED", "Reason.FALLBACK"))
    assert json.loads(command("reload"))["name"] == "mine"
    assert command.sidecar.metric("last_reload_successful") == 1
    with Asker(command.sidecar.endpoint) as asker:
        wait_for(lambda: asker.query([keyed("a")]).reasons == ["fallback"])
    module.write_text(good)


def test_over_tcp(command: Command, folder: Path) -> None:
    url = f"--url=http://127.0.0.1:{command.sidecar.port}"
    way = (url, f"--admin-token-file={folder}/token")
    version = json.loads(command("show", way=way))["version"]
    assert json.loads(command("set", "total_tokens", way=way))["version"] == version + 1
    wrong = folder / "wrong"
    wrong.write_text("x" * 20)
    wrong.chmod(0o600)
    refused = (url, f"--admin-token-file={wrong}")
    assert "token is missing or wrong" in command("show", code=ABSENT, way=refused)
    assert "--admin-token-file" in command("show", code=2, way=(url,))
    wrong.chmod(0o644)
    assert "chmod 600" in command("show", code=2, way=refused)
    https = ("--url=https://127.0.0.1:1", way[1])
    assert "http://HOST:PORT" in command("show", code=2, way=https)
    for bad in ("http://127.0.0.1:9", "http://", "http://127.0.0.1:99999", "http://a b"):
        assert command("show", code=ABSENT, way=(f"--url={bad}", way[1]))


@pytest.mark.parametrize("action", ["show", "list", "history", "reload"])
def test_nobody_there(command: Command, folder: Path, action: str) -> None:
    error = command(action, code=ABSENT, way=(f"--endpoint=ipc://{folder}/none",))
    assert "no sidecar listens there" in error


def test_parameters() -> None:
    given = ["a=1", "--b", "2.5", "--c-d=true", "e=x y", "f=", "g=a=b", 'h="1"', "i=null"]
    assert parameters("set", given) == {
        **{"a": 1, "b": 2.5, "c_d": True, "e": "x y", "f": "", "g": "a=b", "h": "1", "i": "null"},
    }
    for bad in (["a"], ["=1"], ["--"], ["--a"], ["a=1", "--a", "2"], ["-a", "1"], ["--=1"]):
        with pytest.raises(ConfigError, match="policy set: "):
            parameters("set", bad)


def test_an_endpoint_without_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "show", "--endpoint=/run/query.sock"]) == 2
    assert "begins with ipc://" in capsys.readouterr().err
