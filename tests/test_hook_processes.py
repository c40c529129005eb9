"""The hook in SGLang's processes: fork and spawn, threads, signals. What a fork gives each side a
socket of its own is in test_client.py and test_reporter.py; here it comes at bad moments.
"""

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from sglang_hook.client import SidecarClient
from sglang_hook.reporter import Reporter, Sample
from sidecar import wire
from sidecar.wire import Reply
from tests.processes import (
    ROOT,
    in_fork,
    running,
    short_directory,
    sidecar_process,
    wait_for,
)
from tests.test_client import hooked

DEADLINE_MS = 400
"""For an answer that does not come."""
PATIENT = 60.0
"""Seconds for what takes a fraction of one where nothing else runs."""
LONG_MS = 60_000
"""For one that comes when a test lets it."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with short_directory() as path:
        yield f"ipc://{path}/q"


# ---- fork


def test_a_fork_while_a_query_is_under_way(endpoint: str) -> None:
    """The parent has its answer, the child asks for itself, whoever is first."""
    with sidecar_process(endpoint) as sidecar, hooked(endpoint, deadline_ms=LONG_MS) as hook:
        hook.meet(PATIENT)
        sidecar.freeze()
        spy, answers = hook.spy(), []
        asking = threading.Thread(target=lambda: answers.append(hook.ask()))
        asking.start()
        try:
            wait_for(lambda: spy.sends == 1, PATIENT)

            def child() -> str:
                hook.meet(PATIENT)
                return "answered"

            assert in_fork(child, lambda: sidecar.signal(signal.SIGCONT), PATIENT) == "answered"
        finally:
            sidecar.signal(signal.SIGCONT)
            asking.join()
        assert isinstance(answers[0], Reply)
        assert all(isinstance(hook.ask(), Reply) for _ in range(20))


def test_a_fork_while_the_breaker_is_open(endpoint: str) -> None:
    with sidecar_process(endpoint) as sidecar, hooked(endpoint, deadline_ms=DEADLINE_MS) as hook:
        hook.meet(PATIENT)
        sidecar.freeze()
        assert hook.ask() == "deadline"
        sidecar.signal(signal.SIGCONT)

        def child() -> str:
            hook.meet(PATIENT)
            return "answered"

        assert in_fork(child, timeout=PATIENT) == "answered"
        hook.meet(PATIENT)


def test_a_fork_before_the_first_use(endpoint: str) -> None:
    """Nothing is made before it is needed, so there is nothing to inherit."""
    with sidecar_process(endpoint), hooked(endpoint) as hook:
        reporter = Reporter(wire.report_endpoint(endpoint), "i", 0, 0.0, 1.0)
        before = set(os.listdir("/proc/self/fd"))
        assert hook.client._peer._context is reporter._peer._context is None

        def child() -> str:
            hook.meet(PATIENT)
            wait_for(lambda: reporter.push(1, Sample()), PATIENT)
            return "answered"

        assert in_fork(child, timeout=PATIENT) == "answered"
        assert set(os.listdir("/proc/self/fd")) == before
        assert hook.client._peer._context is reporter._peer._context is None
        hook.meet(PATIENT)
        wait_for(lambda: reporter.push(1, Sample()), PATIENT)
        reporter.close()


FAMILY = """
import os, sys, time
from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser, Dispatch
from sglang_hook.reporter import Reporter, Sample
from sidecar import wire

chooser = Chooser(f"i-{os.getpid()}", 1, {}, lambda: [0, 1], 100)
client = SidecarClient(sys.argv[1], 2000, 1, 0.01, chooser.probe)
chooser.ask, client.heard = client.ask, chooser.heard
reporter = Reporter(wire.report_endpoint(sys.argv[1]), "i", 0, 0.0, 1.0)

def work():
    until = time.monotonic() + 60
    asked = 0
    while time.monotonic() < until:
        before = chooser.bypassed.total()
        chooser.choose_one(Dispatch("key", [1, 2], (None, None, None)))
        asked += chooser.bypassed.total() == before
        if reporter.push(1, Sample()) and asked >= 5:
            return
    raise SystemExit("not answered")

def generation(left):
    work()
    if left:
        child = os.fork()
        if child == 0:
            if left > 1 or sys.argv[2] == "work":
                generation(left - 1)
            sys.exit(0)  # as any process ends: finalizers, atexit, garbage
        assert os.waitpid(child, 0)[1] == 0, "the child failed"
        work()

generation(3)
print("done")
"""


@pytest.mark.parametrize("last", ["work", "idle"])
def test_children_that_end_disturb_no_parent(endpoint: str, last: str) -> None:
    """Three generations, each of which works before and after its child; all end as programs do."""
    command = [sys.executable, "-W", "ignore", "-c", FAMILY, endpoint, last]
    with sidecar_process(endpoint) as sidecar, running(command) as process:
        assert process.wait(120) == 0, process.log()
        assert process.log() == "done\n"
        assert sidecar.metric("rejected_total", socket="query") in (None, 0)


def test_no_descriptor_reaches_a_program_that_is_started(endpoint: str) -> None:
    """SGLang's processes start others; a socket in these would outlive ours."""
    with sidecar_process(endpoint), hooked(endpoint) as hook:
        show = [sys.executable, "-c", "import os; print(len(os.listdir('/proc/self/fd')))"]
        before = subprocess.run(show, capture_output=True, check=True, close_fds=False)
        ours = len(os.listdir("/proc/self/fd"))
        hook.meet(PATIENT)
        assert len(os.listdir("/proc/self/fd")) > ours
        after = subprocess.run(show, capture_output=True, check=True, close_fds=False)
        assert after.stdout == before.stdout


# ---- spawn


@pytest.mark.parametrize("kind", [SidecarClient, Reporter])
def test_a_socket_cannot_be_sent_to_another_process(endpoint: str, kind: type) -> None:
    """Once it is open; an error at the sender, not a dead socket at the receiver."""
    import pickle

    if kind is Reporter:
        made = Reporter(wire.report_endpoint(endpoint), "i", 0, 0.0, 1.0)
        made.push(1, Sample())
    else:
        made = SidecarClient(endpoint, 5, 1, 0.01, lambda: b"")
        made.ask(b"", 1)
    with pytest.raises((TypeError, pickle.PicklingError, AttributeError)):
        pickle.dumps(made)
    made.close()


# ---- threads


ATTACHED = """
import sys, threading
from pathlib import Path
from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser, Dispatch
from sglang_hook.reporter import Reporter, Sample
from sidecar import wire

before = {task.name for task in Path("/proc/self/task").iterdir()}
chooser = Chooser("i", 1, {}, lambda: [0, 1], 100)
client = SidecarClient(sys.argv[1], 2000, 1, 0.01, chooser.probe)
chooser.ask, client.heard = client.ask, chooser.heard
reporter = Reporter(wire.report_endpoint(sys.argv[1]), "i", 0, 0.0, 1.0)
remote = pushed = 0
while not (remote and pushed):
    known = chooser.bypassed.total()
    chooser.choose_one(Dispatch("key", [1, 2], (None, None, None)))
    remote += chooser.bypassed.total() == known
    pushed += reporter.push(1, Sample())
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert len(sys._current_frames()) == 1
new = [task for task in Path("/proc/self/task").iterdir() if task.name not in before]
print(sorted((task / "comm").read_text().strip() for task in new))
"""


def test_no_thread_of_ours_runs_python(endpoint: str) -> None:
    """Only libzmq's, which never hold the interpreter: one for input and output, one that reaps,
    for each of the two sockets' contexts."""
    with (
        sidecar_process(endpoint),
        running([sys.executable, "-c", ATTACHED, endpoint]) as process,
    ):
        assert process.wait(PATIENT) == 0, process.log()
        names = ast.literal_eval(process.log())
        assert 2 <= len(names) <= 4
        assert {name.split("/")[0] for name in names} == {"ZMQbg"}


def test_the_hook_starts_neither_threads_nor_processes() -> None:
    banned = {"threading", "_thread", "concurrent", "asyncio", "subprocess"}
    for path in (ROOT / "sglang_hook").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            else:
                continue
            assert not names & banned, path.name


def test_others_run_while_a_query_waits(endpoint: str) -> None:
    """A wait for the sidecar does not hold the interpreter: SGLang has threads of its own."""
    with sidecar_process(endpoint) as sidecar, hooked(endpoint, deadline_ms=LONG_MS) as hook:
        hook.meet(PATIENT)
        sidecar.freeze()
        turns = []

        def other() -> None:
            """Runs only while the main thread waits, and ends that wait."""
            wait_for(lambda: spy.sends == 1, PATIENT)
            for turn in range(1000):
                turns.append(turn)
                time.sleep(0)
            sidecar.signal(signal.SIGCONT)

        spy = hook.spy()
        thread = threading.Thread(target=other)
        thread.start()
        try:
            assert isinstance(hook.ask(), Reply)
        finally:
            sidecar.signal(signal.SIGCONT)
            thread.join()
        assert len(turns) == 1000


# ---- signals


class Alarms:
    """A handler of SIGALRM that counts, and a timer that keeps sending it; ends with the block."""

    def __init__(self, seconds: float, most: int = 1 << 30) -> None:
        self.seconds, self.most = seconds, most
        self.count = 0

    def __enter__(self) -> "Alarms":
        self._before = signal.signal(signal.SIGALRM, self._rang)
        signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _rang(self, *_: object) -> None:
        self.count += 1
        if self.count >= self.most:
            signal.setitimer(signal.ITIMER_REAL, 0)


def interrupted(alarms: Alarms, act: Callable[[], object]) -> object:
    """What `act` gives while alarms ring."""
    with alarms:
        return act()


def test_the_deadline_holds_under_a_rain_of_signals(endpoint: str) -> None:
    """As a sampling profiler sends them. Each interrupts the wait, none may begin it anew."""
    # A wait that began anew with each alarm would end only after the last one, 25 deadlines later.
    alarms = Alarms(DEADLINE_MS / 1000 / 20, most=20 * 25)
    with sidecar_process(endpoint) as sidecar, hooked(endpoint, deadline_ms=DEADLINE_MS) as hook:
        hook.meet(PATIENT)
        sidecar.freeze()
        assert interrupted(alarms, hook.ask) == "deadline"
        assert 0 < alarms.count < alarms.most
        sidecar.signal(signal.SIGCONT)
        hook.meet(PATIENT)


def test_signals_lose_no_answer(endpoint: str) -> None:
    with sidecar_process(endpoint), hooked(endpoint) as hook:
        hook.meet(PATIENT)

        def many() -> bool:
            return all(isinstance(hook.ask(), Reply) for _ in range(500))

        alarms = Alarms(0.0005)
        assert interrupted(alarms, many)
        wait_for(lambda: alarms.count, PATIENT)


def test_an_answer_after_signals_to_this_very_thread(endpoint: str) -> None:
    """They come while it waits; it has the answer, and then the handler runs."""
    with sidecar_process(endpoint) as sidecar, hooked(endpoint, deadline_ms=LONG_MS) as hook:
        hook.meet(PATIENT)
        sidecar.freeze()
        spy, alarms, main = hook.spy(), Alarms(0.0), threading.get_ident()

        def disturb() -> None:
            wait_for(lambda: spy.sends == 1, PATIENT)
            for _ in range(20):
                signal.pthread_kill(main, signal.SIGALRM)
                time.sleep(0)
            sidecar.signal(signal.SIGCONT)

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            with alarms:
                assert isinstance(hook.ask(), Reply)
                assert alarms.count
        finally:
            sidecar.signal(signal.SIGCONT)
            thread.join()


def test_signals_are_as_before_after_a_query(endpoint: str) -> None:
    with sidecar_process(endpoint), hooked(endpoint) as hook:
        for blocked in (set(), {signal.SIGUSR1, signal.SIGALRM}):
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            try:
                hook.meet(PATIENT)
                hook.client.greet(1)
                assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, ())


def test_children_that_die_while_a_query_waits(endpoint: str) -> None:
    """SIGCHLD with a handler, as SGLang has one to see its schedulers die."""
    seen: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, frame: seen.append(number))
    with sidecar_process(endpoint) as sidecar, hooked(endpoint, deadline_ms=LONG_MS) as hook:
        hook.meet(PATIENT)
        sidecar.freeze()
        try:
            children = [
                subprocess.Popen([sys.executable, "-S", "-c", "pass"], stdout=subprocess.DEVNULL)
                for _ in range(3)
            ]
            thread = threading.Thread(
                target=lambda: (
                    [child.wait() for child in children],
                    sidecar.signal(signal.SIGCONT),
                )
            )
            thread.start()
            assert isinstance(hook.ask(), Reply)
            thread.join()
            assert seen
        finally:
            sidecar.signal(signal.SIGCONT)
            signal.signal(signal.SIGCHLD, before)
        assert all(isinstance(hook.ask(), Reply) for _ in range(20))


def test_a_report_under_a_rain_of_signals(endpoint: str) -> None:
    with sidecar_process(endpoint) as sidecar:
        reporter = Reporter(wire.report_endpoint(endpoint), "rain", 0, 0.0, 1.0)
        wait_for(lambda: reporter.push(1, Sample()), PATIENT)
        with Alarms(0.0005) as alarms:
            pushed = 1 + sum(reporter.push(1, Sample()) for _ in range(500))
            wait_for(lambda: alarms.count, PATIENT)
        # Each that was taken arrives: none is cut in two.
        wait_for(lambda: sidecar.metric("load_reports_total") == pushed, PATIENT)
        reporter.close()
