"""The terminal: keys, resizes, signals, and leaving it as it was."""

import contextlib
import os
import queue
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sidecar.errors import ConfigError, ControlError
from sidecar.top.frame import Size, frame
from sidecar.top.rates import History, Picture
from sidecar.top.source import Source, Status

QUIT = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
WATCHED = (*QUIT, signal.SIGWINCH, signal.SIGTSTP)
NEWS = 0
"""Beside the numbers of signals: an answer has come."""
PLAIN_WIDTH = 120  # where nothing says how wide


def print_once(source: Source, interval: float) -> int:
    """Print one frame of the `interval` seconds from now as plain text; the exit code.

    Raises ControlError if there is no answer.
    """
    history = History()
    try:
        history.add(time.monotonic(), source.fetch())
        time.sleep(interval)
        picture = history.add(time.monotonic(), source.fetch())
    except ControlError as error:
        raise ControlError(f"no sidecar at {source.url}: {error}") from None
    console = Console(file=sys.stdout, color_system=None, highlight=False)
    wide = console.is_terminal or "COLUMNS" in os.environ
    lines = frame(picture, Size(console.width if wide else PLAIN_WIDTH), source.url)
    encoding = sys.stdout.encoding or "utf-8"
    text = "\n".join(line.plain.rstrip() for line in lines) + "\n"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    return 0


def watch(source: Source, interval: float) -> int:
    """Show the sidecar until q, Ctrl-C or SIGTERM; the exit code.

    interval: seconds between two questions. Raises ConfigError without a terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("top: standard input or output is no terminal; --once needs none")
    if Console().is_dumb_terminal:
        raise ConfigError(
            "top: this terminal (TERM) cannot move its cursor; --once needs none that can"
        )
    with _wakeups() as (reading, writing), _Asking(source, interval, writing) as asking:
        screen = _Screen(asking, reading)
        while screen.show() != "quit":
            # Ctrl-Z: the shell gets its terminal back as it was, until `fg`.
            os.kill(os.getpid(), signal.SIGSTOP)
    return 0


@contextlib.contextmanager
def _wakeups() -> Iterator[tuple[int, int]]:
    """A pipe that tells of each watched signal, as the byte of its number."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    before = {number: signal.signal(number, lambda *about: None) for number in WATCHED}
    old = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading, writing
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


class _Asking:
    """A thread that asks the sidecar, so that a silent one holds up no key."""

    def __init__(self, source: Source, interval: float, news: int) -> None:
        self.source, self.interval = source, interval
        self.answers: queue.SimpleQueue[tuple[float, Status | str]] = queue.SimpleQueue()
        """(monotonic seconds, a status or why there is none)."""
        self._news = os.dup(news)
        self._stop = threading.Event()
        # Nothing waits for it at the end: it may hang in a connection.
        self._thread = threading.Thread(target=self._ask, name="top", daemon=True)

    def __enter__(self) -> "_Asking":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()

    def _ask(self) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            answer: Status | str
            try:
                answer = self.source.fetch()
            except ControlError as error:
                answer = str(error)
            self.answers.put((time.monotonic(), answer))
            with contextlib.suppress(BlockingIOError):  # full: it will be looked at anyway
                os.write(self._news, bytes((NEWS,)))
            self._stop.wait(max(0.0, begun + self.interval - time.monotonic()))


class _Screen:
    """What is shown, and until when."""

    def __init__(self, asking: _Asking, wakeups: int) -> None:
        self.asking, self.wakeups = asking, wakeups
        self.history = History()
        self.picture: Picture | None = None
        self.trouble = ""
        self.silent_since: float | None = None
        # COLUMNS and LINES of the environment would freeze the size.
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.console = Console(_environ=env, highlight=False)

    def show(self) -> str:
        """Take the terminal and show frames; `quit`, or `stop` for Ctrl-Z."""
        with (
            _keys(),
            Live(
                console=self.console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            ) as live,
        ):
            while True:
                live.update(self._frame(), refresh=True)
                if word := self._wait():
                    return word

    def _wait(self) -> str:
        """Until something happens; `quit`, `stop`, or empty to draw again."""
        stdin = sys.stdin.fileno()
        ready, _, _ = select.select([stdin, self.wakeups], [], [])
        told = os.read(self.wakeups, 4096) if self.wakeups in ready else b""
        self._take_answers()
        if not QUIT.isdisjoint(told):
            return "quit"
        if stdin in ready:
            keys = os.read(stdin, 1024)
            if not keys or keys[:1] in (b"q", b"Q", b"\x03"):  # nothing: the terminal is gone
                return "quit"
        return "stop" if signal.SIGTSTP in told else ""

    def _take_answers(self) -> None:
        while not self.asking.answers.empty():
            at, answer = self.asking.answers.get()
            if isinstance(answer, Status):
                self.picture = self.history.add(at, answer)
                self.trouble, self.silent_since = "", None
            else:
                self.silent_since = at if self.silent_since is None else self.silent_since
                self.trouble = f"{answer}; for {at - self.silent_since:.0f} s, asking on"

    def _frame(self) -> Group:
        width, height = self.console.size
        lines = frame(self.picture, Size(width, height), self.asking.source.url, self.trouble)
        encoding = self.console.encoding
        return Group(*(_encodable(line, encoding) for line in lines))


def _encodable(line: Text, encoding: str) -> Text:
    """The line in characters that the terminal's encoding has."""
    plain = line.plain.encode(encoding, "replace").decode(encoding)
    if plain != line.plain:
        line.plain = plain
    return line


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Keys come one by one and unseen; afterwards the terminal is as it was."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    try:
        tty.setcbreak(stdin)
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
