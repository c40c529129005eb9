"""The command line: settings in force, usage errors, help."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sidecar import __version__, cli, config, entry
from sidecar.cli import main
from tests.processes import ROOT, clean_env

DEFAULTS = (ROOT / "deploy" / "config" / "sidecar.toml").read_text()
VERBS = ("serve", "run", "config")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in config.settings():
        monkeypatch.delenv(key.env, raising=False)


def ended(arguments: Sequence[str]) -> int:
    """Exit code, however main says it."""
    try:
        return main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def test_config_prints_the_default_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    assert capsys.readouterr().out == DEFAULTS


def test_config_prints_what_is_in_force(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[admin]\nport = 1\n[serve]\nmax_instances = 2\nstale_seconds = 3\n")
    monkeypatch.setenv("DP_SIDECAR_MAX_INSTANCES", "4")
    monkeypatch.setenv("DP_SIDECAR_STALE_SECONDS", "5")
    assert main(["config", "--config", str(file), "--stale-seconds", "6"]) == 0
    printed = capsys.readouterr().out
    assert "\nport = 1\n" in printed
    assert "\nmax_instances = 4\n" in printed
    assert "\nstale_seconds = 6.0\n" in printed
    again = tmp_path / "again.toml"
    again.write_text(printed)
    monkeypatch.undo()
    assert main(["config", "--config", str(again)]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["serve", "--no-such-flag", "1"],
        ["config", "--admin-port"],
        ["config", "extra"],
    ],
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(arguments) == 2
    printed = capsys.readouterr()
    assert "usage:" in printed.err
    assert not printed.out


BAD_VALUES = [
    ("--admin-port", "65536", ("admin.port", "65535")),
    ("--admin-port", "-1", ("admin.port", "0")),
    ("--admin-port", "http", ("admin.port", "int")),
    ("--stale-seconds", "0", ("serve.stale_seconds", "0.1")),
    ("--stale-seconds", "nan", ("serve.stale_seconds", "0.1")),
    ("--max-instances", "0", ("serve.max_instances", "1")),
    ("--drain-seconds", "61", ("serve.drain_seconds", "60")),
    ("--allow-insecure-tcp", "maybe", ("serve.allow_insecure_tcp", "bool")),
    ("--log-level", "loud", ("log.level", "warning")),
    ("--log-format", "xml", ("log.format", "json")),
    ("--admin-host", "", ("admin.host", "1")),
    ("--policy", "best", ("policy.name", "prefix_affinity")),
    ("--prefix-affinity-max-load-skew", "0.9", ("max_load_skew", "1")),
    ("--prefix-affinity-hash-tokens", "1.5", ("hash_tokens", "int")),
]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("flag", "value", "named"), BAD_VALUES)
def test_a_bad_value_is_named(
    verb: str,
    flag: str,
    value: str,
    named: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended([verb, f"{flag}={value}"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("sglang-dp-sidecar: flag: ") or flag == "--policy"
    assert all(name in printed.err for name in named), printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "c.toml"),
        (b"[serve\n", "line 1"),
        (b"\xff\xfe", "utf-8"),
        (b"[serve]\nport = 1\n", "port"),
        (b'[admin]\nport = "9477"\n', "admin.port"),
        (b"a = " + b"[" * 5000, "c.toml"),
        (b"a = " + b"1" * 5000, "c.toml"),
    ],
    ids=["missing", "syntax", "utf8", "unknown key", "type", "nested", "digits"],
)
def test_a_bad_file_is_named(
    text: bytes | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.toml"
    if text is not None:
        file.write_bytes(text)
    assert main(["config", "--config", str(file)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"sglang-dp-sidecar: {file}: ")
    assert named in printed


def test_a_bad_variable_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DP_SIDECAR_ADMIN_PORT", "70000")
    assert main(["config"]) == 2
    assert "environment: " in (printed := capsys.readouterr().err)
    assert "admin.port" in printed
    assert "65535" in printed


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("verb", VERBS)
def test_help_lists_every_flag(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended([verb, "--help"]) == 0
    # As one line: argparse breaks it anywhere.
    text = "".join(capsys.readouterr().out.split())
    for key in config.settings():
        assert f"{key.flag}VALUE" in text
        assert "".join(key.description.split()) in text
        assert key.env in text
        assert f"(default:{key.default};" in text
    assert "--config" in text
    assert ("--server-module" in text) == (verb == "run")


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in VERBS)


@pytest.mark.parametrize(
    "command",
    [[sys.executable, "-m", "sidecar"], [str(Path(sys.executable).parent / "sglang-dp-sidecar")]],
    ids=["module", "script"],
)
def test_both_ways_to_start(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*command, "config"],
        env=clean_env(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == DEFAULTS
    assert not done.stderr
    failed = subprocess.run(
        [*command, "config", "--admin-port=x"],
        env=clean_env(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert failed.returncode == 2
    assert "admin.port" in failed.stderr


def test_signals_before_it_serves_do_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing takes longer than it takes systemd to send one."""
    numbers = (signal.SIGHUP, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    seen = []

    def imported(argv: list[str]) -> int:
        seen.extend(signal.getsignal(number) for number in numbers)
        return 0

    monkeypatch.setattr(cli, "main", imported)
    try:
        assert entry.main(["check"]) == 0
        assert seen == before, "of other verbs they are the end"
        assert entry.main(["serve"]) == 0
        assert seen[2:] == [signal.SIG_IGN, signal.SIG_IGN]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
