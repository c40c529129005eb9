"""A sidecar process that reads what SGLang publishes: decisions, what it says of them, replay."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from sidecar import wire
from tests.processes import Asker, Sidecar, clean_env, short_directory, sidecar_process, wait_for
from tests.support import INSTANCE, Server, keyless
from tests.test_published import STARTED
from tests.test_published_sockets import publishing, stat

RANKS = 4
PATIENT = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_directory() as path:
        yield path


class Publishers:
    """The PUB sockets of all ranks."""

    def __init__(self, sockets: Sequence["zmq.Socket[bytes]"]) -> None:
        self.sockets, self.seq = sockets, 0

    def publish(self, *running: int) -> None:
        self.seq += 1
        for rank, (socket, runs) in enumerate(zip(self.sockets, running, strict=True)):
            socket.send_multipart([b"load", self.seq.to_bytes(8, "big"), stat(rank, runs)])


def ranks_of(sidecar: Sidecar) -> list[dict[str, Any]]:
    instances = json.loads(sidecar.http("/status")[1])["instances"]
    return instances[0]["ranks"] if instances else []


def running_of(sidecar: Sidecar) -> list[int]:
    return [rank["running"] for rank in ranks_of(sidecar)]


def test_it_serves_by_published_loads(folder: Path) -> None:
    places = [f"ipc://{folder}/{rank}" for rank in range(RANKS)]
    log = folder / "decisions"
    flags = (
        "--published-endpoints=" + json.dumps({INSTANCE: ",".join(places)}),
        "--published-grace-ms=500",
        "--policy=total_requests",
        f"--decision-log-directory={log}",
    )
    endpoint, server = f"ipc://{folder}/query.sock", Server(ranks=RANKS, epoch=STARTED)
    with ExitStack() as stack:
        made = Publishers([stack.enter_context(publishing(place)) for place in places])
        sidecar = stack.enter_context(sidecar_process(endpoint, *flags))
        asker = stack.enter_context(Asker(endpoint))

        def ask(requests: int) -> Counter[int]:
            reply = asker.ask(wire.encode(server.query([keyless()] * requests)))
            assert isinstance(reply, wire.Reply)
            for rank in reply.ranks:
                server.send(rank, 100)
            return Counter(reply.ranks)

        def told(*running: int) -> bool:
            made.publish(*running)
            return running_of(sidecar) == list(running)

        wait_for(lambda: told(9, 0, 9, 9), PATIENT)
        assert ask(6) == {1: 6}
        wait_for(lambda: told(0, 0, 0, 0), PATIENT)

        def idle() -> bool:
            made.publish(0, 0, 0, 0)
            return all(rank["load"] == 0 for rank in ranks_of(sidecar))

        wait_for(idle, PATIENT)
        assert [rank["source"] for rank in ranks_of(sidecar)] == ["published"] * RANKS
        assert sidecar.metric("load_source", source="published") == RANKS
        assert (sidecar.metric("published_loads_total", outcome="taken") or 0) >= 2 * RANKS
        assert json.loads(sidecar.http("/status")[1])["load_source"] == "published"
        assert sidecar.lines("loads of host:30000 published at", "grace 500 ms")
        assert ask(8) == dict.fromkeys(range(RANKS), 2)
        assert sidecar.stop() == 0
    replayed = subprocess.run(
        [sys.executable, "-m", "sidecar", "replay", str(log)],
        env=clean_env(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=PATIENT,
        check=False,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert re.search(r"\b14\b", replayed.stdout), replayed.stdout


def test_without_publishers_nothing_is_subscribed_to(folder: Path) -> None:
    with sidecar_process(f"ipc://{folder}/query.sock") as sidecar:
        assert json.loads(sidecar.http("/status")[1])["load_source"] == "hook"
        assert not sidecar.lines("published at")
        assert sidecar.metric("published_loads_total") is None


def test_ranks_that_would_take_all_descriptors_are_not_read(folder: Path) -> None:
    """They are no peers' flood, and to make the sockets anew would free none of them."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
    (folder / "sitecustomize.py").write_text(limit)
    env = clean_env(PYTHONPATH=f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    places = ",".join(f"ipc://{folder}/{rank}" for rank in range(60))
    flag = "--published-endpoints=" + json.dumps({INSTANCE: places})
    with sidecar_process(f"ipc://{folder}/q", flag, env=env) as sidecar:
        assert sidecar.lines("WARNING", "no published loads", "180 descriptors")
        with Asker(sidecar.endpoint) as asker:
            assert len(asker.query([keyless()], ranks=list(range(60))).ranks) == 1
        assert sidecar.metric("socket_resets_total") == 0
        assert sidecar.stop() == 0
