"""Every command of README.md and of the pages for operators is run, as tests/docs/table.py says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.cli import parser
from sidecar.config import ServeConfig
from sidecar.wire import RequestFacts
from tests.docs import table
from tests.docs.pages import PAGES, commands
from tests.docs.sandbox import Sandbox, copy_of_checkout
from tests.processes import ROOT, Asker, short_directory, wait_for


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with short_directory() as folder:
        yield Sandbox(folder)


def test_every_command_is_in_a_table_and_no_other() -> None:
    known = [command for each in table.TABLES for command in each]
    twice = {command for command in known if known.count(command) > 1}
    assert twice == {"curl -s localhost:9477/paths"}  # a newcomer's and an operator's
    found = commands()
    assert {page for pages in found.values() for page in pages} == set(PAGES)
    assert not found.keys() - set(known), "in no table: say how it is run"
    assert not set(known) - found.keys(), "in no page any more"


@pytest.fixture(scope="module")
def serving() -> Iterator[Sandbox]:
    """A sidecar with a decision log and a token, that one session has asked twice."""
    with short_directory() as folder:
        box = Sandbox(folder)
        token = folder / "etc" / "sglang-dp-sidecar" / "token"
        token.parent.mkdir(parents=True)
        token.write_text("a-token-of-some-length")
        token.chmod(0o600)
        env = {
            "DP_SIDECAR_DECISION_LOG_DIRECTORY": str(box.log),
            "DP_SIDECAR_ADMIN_TOKEN_FILE": str(token),
        }
        with box.start("sglang-dp-sidecar serve", **env) as process:
            wait_for(lambda: box.socket.exists() or process.process.poll(), 30)
            assert box.socket.exists(), process.log()
            assert answers(box)
            explain = f"sglang-dp-sidecar explain {box.log} --key KEY"
            names = wait_for(
                lambda: re.findall(r"\b\d{10,}-\d+\b", box.run(explain).stdout), 30, 0.2
            )
            box.places["1764489600-17"] = names[0]
            yield box
            assert process.stop() == 0


def answers(box: Sandbox) -> bool:
    """Ask for a rank for the routing key KEY, twice."""
    with Asker(f"ipc://{box.socket}") as asker:
        [rank] = asker.query([RequestFacts(b"KEY", tokens=100)], seq=1).ranks
        again = asker.query([RequestFacts(b"KEY", tokens=100, last_rank=rank)], seq=2)
        return bool(again.ranks == [rank])


@pytest.mark.parametrize("command", table.RUN)
def test_beside_a_sidecar(serving: Sandbox, command: str) -> None:
    program = command.partition(" ")[0]
    if program in ("curl", "ssh") and shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    # -G: ssh says what it would do.
    done = serving.run(command.replace("ssh ", "ssh -G "))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(table.RUN[command], done.stdout), done.stdout


@pytest.mark.parametrize("command", table.IN_A_TERMINAL)
def test_in_a_terminal(serving: Sandbox, command: str) -> None:
    code, shown = serving.in_terminal(command, b"q")
    assert code == 0, shown


@pytest.mark.parametrize("command", table.SERVING)
def test_serving(sandbox: Sandbox, command: str) -> None:
    shutil.copy(ROOT / "deploy" / "config" / "sidecar.toml", sandbox.cwd)
    assert sandbox.run("sglang-dp-sidecar keygen keys").returncode == 0
    with sandbox.start(command) as process:
        wait_for(sandbox.socket.exists, 30)
        assert answers(sandbox)
        assert process.stop() == 0, process.log()


@pytest.mark.parametrize("command", table.BESIDE_A_STAND_IN)
def test_beside_a_stand_in_for_sglang(sandbox: Sandbox, command: str) -> None:
    done = sandbox.run(command, **sandbox.stand_in())
    assert done.returncode == 0, done.stderr
    told = json.loads(sandbox.record.read_text())
    assert told["argv"] == shlex.split(table.BESIDE_A_STAND_IN[command])
    assert told["endpoint"] == f"ipc://{sandbox.socket}"


def test_the_default_endpoint_is_the_one_that_the_pages_name() -> None:
    assert any(ServeConfig().endpoint in command for command in table.BESIDE_A_STAND_IN)


def test_sglang_knows_the_arguments() -> None:
    pytest.importorskip("sglang")
    import argparse

    from sglang.srt.server_args import ServerArgs

    theirs = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(theirs)
    for arguments in table.BESIDE_A_STAND_IN.values():
        if arguments.startswith("--"):
            theirs.parse_args(arguments.split())


def test_in_a_checkout(sandbox: Sandbox) -> None:
    copy_of_checkout(sandbox.cwd)
    for command in table.IN_A_CHECKOUT:
        # Only the environment that the commands make themselves is installed into.
        here = {} if command.startswith("/opt/") else {"PIP_DRY_RUN": "1"}
        alone = {"PIP_NO_DEPS": "1"} if command.startswith("/opt/") else {}
        done = sandbox.run(command, PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0", **here, **alone)
        assert done.returncode == 0, command + done.stdout + done.stderr
    assert (sandbox.folder / "opt/sglang-dp-sidecar/bin/sglang-dp-sidecar").exists()
    assert (sandbox.folder / "etc/sglang-dp-sidecar/sidecar.toml").exists()


def module_knows(arguments: list[str]) -> None:
    """Check `-m MODULE --flag ...` against the module's help."""
    module = arguments[arguments.index("-m") + 1]
    shown = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
    ).stdout
    for word in arguments[arguments.index("-m") + 2 :]:
        assert not word.startswith("--") or re.search(rf"{word}\b", shown), word


@pytest.mark.parametrize("command", table.BY_MAKE)
def test_make_would_start_what_is_there(command: str) -> None:
    told = subprocess.run(
        [*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.replace("\\\n", " ")
    lines = [shlex.split(line) for line in told.splitlines()]
    script = [line[0] for line in lines if line and line[0].startswith(".ci/")]
    assert all(os.access(ROOT / name, os.X_OK) for name in script)
    started = [line for line in lines if line[:2] == [".venv/bin/python", "-m"]]
    assert started or script
    for line in started:
        if "bench" in line[2]:
            module_knows(line)


@pytest.mark.parametrize("command", table.BENCHES)
def test_a_bench_knows_its_flags(command: str) -> None:
    module_knows(command.split())


@pytest.mark.parametrize("command", table.NAMED)
def test_a_verb_that_is_named_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.split()[1:]
    verb = [word for word in words[: 2 if words[0] == "policy" else 1]]
    with pytest.raises(SystemExit) as end:
        parser().parse_args([*verb, "--help"])
    assert end.value.code == 0
    assert " ".join(verb) in capsys.readouterr().out
    if len(words) > 2:
        parser().parse_known_args([word.replace("NAME", "kv_affinity") for word in words])


@pytest.mark.parametrize("command", table.UNITS)
def test_a_unit_that_is_named_exists(command: str) -> None:
    units = ROOT / "deploy" / "systemd"
    for name in command.split()[2:]:
        there = [units / f"{name}.service", units / f"{name}.service.d"]
        assert name.startswith("--") or any(path.exists() for path in there)


@pytest.mark.parametrize("node", sorted(set(table.ELSEWHERE.values())))
def test_what_runs_elsewhere_is_there(node: str) -> None:
    file, _, name = node.partition("::")
    assert f"\ndef {name}(" in Path(ROOT / file).read_text(), node
