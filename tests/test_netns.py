"""Two nodes: the sidecar in one network namespace, a scheduler's reporter in another, CURVE between
them, and a link that goes down and comes up again."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_hook.reporter import Reporter, Sample
from sidecar.keygen import keygen
from sidecar.wire import report_endpoint
from tests.processes import (
    Asker,
    Running,
    clean_env,
    metric,
    running,
    short_directory,
    wait_for,
)
from tests.support import keyless

LEADER, NODE = "10.231.7.1", "10.231.7.2"
PORT = 9478
ADMIN = 9477
# The bounds under test are 4 s (hook) and 15 s (sidecar); other work shares the machine.
PATIENCE = 60.0

REPORTER = """
import itertools, os, time
from sglang_hook import settings
from sglang_hook.reporter import Reporter, Sample
own = settings.load(os.environ)
# Slowly: faster, the buffers of a dead connection would be full in time to give it up for that.
made = Reporter(own.reports, own.instance, 5, 0.2, 0.2, keys=own.keys())
for step in itertools.count(1):
    if made.due(step):
        made.push(step, Sample(running=step))
    time.sleep(0.02)  # a step of a scheduler
"""
SCRAPE = f"""
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:{ADMIN}/metrics").read().decode())
"""


class Nodes:
    """Two namespaces and the cable between them."""

    def __init__(self) -> None:
        self.leader, self.node = (f"dps{os.getpid()}{end}" for end in "ab")

    def make(self) -> None:
        for name in (self.leader, self.node):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        link = ["link", "add", "eth9", "netns", self.leader, "type", "veth"]
        ip(*link, "peer", "name", "eth9", "netns", self.node)
        for name, address in ((self.leader, LEADER), (self.node, NODE)):
            ip("-n", name, "address", "add", f"{address}/30", "dev", "eth9")
            ip("-n", name, "link", "set", "eth9", "up")

    def remove(self) -> None:
        for name in (self.leader, self.node):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "delete", name)

    def cable(self, state: str) -> None:
        """Plug it out (`down`) or in (`up`)."""
        ip("-n", self.node, "link", "set", "eth9", state)

    def inside(self, name: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", name, *command]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError) as error:
        made.remove()
        why = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"no network namespaces here (root and iproute2 are needed): {why.strip()}")
    try:
        yield made
    finally:
        made.remove()


class Leader:
    """The sidecar of the first node, seen from inside that node."""

    def __init__(self, nodes: Nodes, process: Running) -> None:
        self.nodes = nodes
        self.process = process

    def scrape(self) -> str:
        """The text of /metrics; empty while nobody answers."""
        command = self.nodes.inside(self.nodes.leader, sys.executable, "-I", "-c", SCRAPE)
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def metric(self, name: str, **labels: str) -> float | None:
        return metric(self.scrape(), name, **labels)

    def running(self) -> float:
        """The load that rank 5 reported last."""
        return self.metric("running_requests", dp_rank="5") or 0

    def age(self) -> float:
        return self.metric("report_age_seconds", dp_rank="5") or 0


def connections(process: Running) -> int:
    """Connections from or to the port of reports that the kernel of its node holds open."""
    table = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in table]
    port, established = f":{PORT:04X}", "01"
    ours = [row for row in rows if row[1].endswith(port) or row[2].endswith(port)]
    return sum(row[3] == established for row in ours)


@contextlib.contextmanager
def leader_of(nodes: Nodes, endpoint: str, keys: Path) -> Iterator[Leader]:
    command = [sys.executable, "-m", "sidecar", "serve", f"--endpoint={endpoint}"]
    command += [f"--reports-tcp=tcp://{LEADER}:{PORT}", f"--admin-port={ADMIN}"]
    command += [f"--curve-secret-key-file={keys}/sidecar.key_secret"]
    command += [f"--curve-client-keys-file={keys}/hook.key"]
    with running(nodes.inside(nodes.leader, *command)) as process:
        leader = Leader(nodes, process)
        wait_for(lambda: process.process.poll() is not None or leader.scrape(), PATIENCE)
        assert process.process.poll() is None, process.log()
        yield leader


def scheduler_on(nodes: Nodes, keys: Path) -> contextlib.AbstractContextManager[Running]:
    env = clean_env(
        DP_SIDECAR_ENDPOINT="ipc:///nowhere",
        DP_SIDECAR_INSTANCE="i",
        DP_SIDECAR_REPORT_ENDPOINT=f"tcp://{LEADER}:{PORT}",
        DP_SIDECAR_CURVE_SERVER_KEY=(keys / "sidecar.key").read_text(),
        DP_SIDECAR_CURVE_SECRET_KEY_FILE=str(keys / "hook.key_secret"),
    )
    return running(nodes.inside(nodes.node, sys.executable, "-c", REPORTER), env=env)


def test_reports_of_another_node(nodes: Nodes) -> None:
    with short_directory() as directory:
        keygen(str(directory / "keys"))
        endpoint, keys = f"ipc://{directory}/q", directory / "keys"
        with leader_of(nodes, endpoint, keys) as leader, scheduler_on(nodes, keys) as scheduler:
            wait_for(lambda: leader.running() > 0, PATIENCE)
            assert connections(leader.process) == connections(scheduler) == 1
            near = Reporter(report_endpoint(endpoint), "i", 6, 0.0, 0.0)
            wait_for(lambda: near.push(1, Sample()))
            wait_for(lambda: leader.metric("running_requests", dp_rank="6") == 0, PATIENCE)
            near.close()
            with Asker(endpoint) as asker:
                # The far report weighs in a decision made here.
                assert asker.query([keyless()], instance="i", ranks=[5, 6]).ranks == [6]

            nodes.cable("down")
            wait_for(lambda: leader.age() > 1, PATIENCE)
            before = leader.running()
            wait_for(lambda: not connections(scheduler), PATIENCE)
            wait_for(lambda: not connections(leader.process), PATIENCE)
            with Asker(endpoint) as asker:
                assert asker.query([keyless()], instance="i", ranks=[5, 6]).ranks

            nodes.cable("up")
            wait_for(lambda: leader.running() > before, PATIENCE)
            wait_for(lambda: leader.age() < 1, PATIENCE)
            assert not leader.metric("handshake_failures_total", cause="protocol")
            assert not leader.metric("handshake_failures_total", cause="client_key")
            assert leader.process.stop() == 0
