"""`top` in a real terminal: keys, resizes, a sidecar that goes away, the terminal afterwards."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.feed import Feed
from tests.processes import (
    Sidecar,
    clean_env,
    free_port,
    short_directory,
    sidecar_process,
    wait_for,
)

TMUX = shutil.which("tmux")
pytestmark = pytest.mark.skipif(TMUX is None, reason="needs tmux (.ci/debian-packages)")
_names = itertools.count()
PATIENCE = 30.0
SHOWN = "q quit"


class Terminal:
    """A shell in a tmux of our own, 80x24."""

    def __init__(self, directory: Path) -> None:
        self.name = f"dps-{os.getpid()}-{next(_names)}"
        self.directory = directory
        # -u: the character set is ours, not the machine's
        self.run(
            "-f",
            "/dev/null",
            "-u",
            "new-session",
            "-d",
            "-c",
            str(directory),
            "-x",
            "80",
            "-y",
            "24",
            "sh",
        )
        self.run("set-option", "-g", "status", "off")
        self.resize(80, 24)

    def run(self, *arguments: str) -> str:
        assert TMUX is not None
        command = [TMUX, "-L", self.name, *arguments]
        env = clean_env(TMUX_TMPDIR=str(self.directory), PS1="$ ", LC_ALL="C.UTF-8")
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout

    def resize(self, width: int, height: int) -> None:
        self.run("resize-window", "-x", str(width), "-y", str(height))

    def type(self, text: str) -> None:
        self.run("send-keys", text, "Enter")

    def key(self, name: str) -> None:
        self.run("send-keys", name)

    def screen(self) -> str:
        return self.run("capture-pane", "-p")

    def state(self, name: str) -> str:
        """A tmux format, such as alternate_on."""
        return self.run("display-message", "-p", f"#{{{name}}}").strip()

    def wait(self, *texts: str) -> str:
        """The screen once it shows all of these."""

        def shown() -> str:
            screen = self.screen()
            return screen if all(text in screen for text in texts) else ""

        try:
            return str(wait_for(shown, PATIENCE, 0.02))
        except AssertionError:
            raise AssertionError(f"no {texts} in\n{self.screen()}") from None

    def top(self, port: int, *flags: str) -> None:
        words = ("--url", f"http://127.0.0.1:{port}", "--interval", "0.1", *flags)
        self.type(f"{sys.executable} -m sidecar top {' '.join(words)}; echo code=$?")


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def terminal(directory: Path) -> Iterator[Terminal]:
    terminal = Terminal(directory)
    try:
        yield terminal
    finally:
        terminal.run("kill-server")


@pytest.fixture
def sidecar(directory: Path) -> Iterator[Sidecar]:
    with sidecar_process(f"ipc://{directory}/q") as sidecar:
        yield sidecar


def port_of(sidecar: Sidecar) -> int:
    assert sidecar.port
    return sidecar.port


@pytest.mark.parametrize("key", ["q", "C-c"])
def test_quits_and_leaves_the_terminal_as_it_was(
    terminal: Terminal, sidecar: Sidecar, key: str
) -> None:
    terminal.type("stty -a > before; echo ready=$?")
    terminal.wait("ready=0")
    terminal.top(port_of(sidecar))
    terminal.wait(SHOWN, "no instance")
    assert terminal.state("alternate_on") == "1"
    terminal.key(key)
    terminal.wait("ready=0", "code=0")  # what was on the screen before is back
    assert terminal.state("alternate_on") == "0"
    assert terminal.state("cursor_flag") == "1"
    terminal.type("stty -a | cmp - before; echo same=$?; rm before")
    terminal.wait("same=0")


def test_shows_ranks_live_and_follows_the_size(terminal: Terminal, sidecar: Sidecar) -> None:
    with Feed(sidecar) as feed:
        feed.play()
        terminal.top(port_of(sidecar))
        screen = terminal.wait(SHOWN, "gpu-1:30000", "sglang 0.5.23")
        rows = [line.split()[0] for line in screen.splitlines() if "/1.0M" in line]
        assert rows == [str(rank) for rank in range(8)]
        feed.play()
        wait_for(lambda: rates_of(terminal.screen()), PATIENCE, 0.02)
        terminal.resize(40, 10)
        narrow = wait_for(lambda: narrowed(terminal, 10), PATIENCE, 0.02)
        assert "more ranks" in narrow
        assert all(len(line) <= 40 for line in narrow.splitlines())
        terminal.resize(160, 40)
        terminal.wait("█ running ▒ waiting ░ in flight", " 7 ", SHOWN)
        terminal.key("q")
        terminal.wait("code=0")


def rates_of(screen: str) -> bool:
    return "/s  hit" in screen and "-/s" not in screen and " 0.0/s" not in screen


def narrowed(terminal: Terminal, height: int) -> str:
    """The screen once its last line is the last of that many."""
    lines = terminal.screen().splitlines()
    fits = len(lines) == height and lines[-1].startswith(SHOWN) and "more ranks" in "".join(lines)
    return "\n".join(lines) if fits else ""


def test_a_sidecar_that_is_away_is_asked_on(terminal: Terminal, directory: Path) -> None:
    port = free_port()
    terminal.top(port)
    terminal.wait(f"no sidecar at http://127.0.0.1:{port}: Connection refused", SHOWN)
    with sidecar_process(f"ipc://{directory}/q", f"--admin-port={port}") as sidecar:
        with Feed(sidecar) as feed:
            feed.play()
            terminal.wait("gpu-1:30000")
        assert "no sidecar" not in terminal.screen()
        sidecar.freeze()
        terminal.wait("no answer within", "gpu-1:30000")  # the last known stays
        terminal.key("q")  # a silent sidecar holds up no key
        terminal.wait("code=0")


def test_the_name_of_an_instance_cannot_steer_the_terminal(
    terminal: Terminal, sidecar: Sidecar
) -> None:
    hostile = "evil\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\n\x1b[?1049l"
    with Feed(sidecar, instance=hostile) as feed:
        feed.play()
        terminal.top(port_of(sidecar))
        screen = terminal.wait("evil?[2J?]0;owned??31m???[?1049l")
    assert "kv_affinity" in screen
    assert terminal.state("alternate_on") == "1"
    assert "owned" not in terminal.state("pane_title")


def test_a_dumb_terminal_is_refused(terminal: Terminal) -> None:
    terminal.type("export TERM=dumb")
    terminal.top(1)
    terminal.wait("cannot move its cursor; --once", "code=2")


def test_ctrl_z_and_back(terminal: Terminal, sidecar: Sidecar) -> None:
    terminal.type("set -m")
    terminal.top(port_of(sidecar))
    terminal.wait(SHOWN, "no instance")
    terminal.key("C-z")
    wait_for(lambda: terminal.state("alternate_on") == "0", PATIENCE, 0.02)
    terminal.type("fg")
    wait_for(lambda: terminal.state("alternate_on") == "1", PATIENCE, 0.02)
    terminal.wait(SHOWN, "no instance")
    terminal.key("q")
    wait_for(lambda: terminal.state("alternate_on") == "0", PATIENCE, 0.02)


def test_320_ranks_in_80x24(terminal: Terminal, sidecar: Sidecar) -> None:
    with Feed(sidecar, ranks=320) as feed:
        feed.play(2)
        terminal.top(port_of(sidecar))
        screen = terminal.wait("more ranks, load", SHOWN)
    lines = screen.splitlines()
    loads = [int(line.split()[1]) for line in lines if "/1.0M" in line]
    assert len(loads) >= 15
    assert loads == sorted(loads, reverse=True)
    assert f"{320 - len(loads)} more ranks" in screen
    assert lines[-1].startswith(SHOWN)
