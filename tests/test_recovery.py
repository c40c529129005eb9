"""A sidecar that is started again decides its first query by the exact load of every rank."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser, Dispatch
from sglang_hook.reporter import Reporter, Sample
from sidecar import wire
from tests.processes import short_directory, sidecar_process, wait_for
from tests.support import key_preferring

RANKS = list(range(8))
KEY = key_preferring(3, RANKS).decode()
BUSY = [40 if rank == 3 else 2 for rank in RANKS]


class Schedulers:
    """Eight ranks whose queues never change: they report as seldom as the hook ever does."""

    def __init__(self, endpoint: str, heartbeat: float) -> None:
        reports = wire.report_endpoint(endpoint)
        self.reporters = [Reporter(reports, "i", rank, 0.001, heartbeat) for rank in RANKS]

    def step(self) -> None:
        for reporter, running in zip(self.reporters, BUSY, strict=True):
            if reporter.due(0):
                reporter.push(0, Sample(running=running))

    def told(self) -> bool:
        """Whether every rank has told somebody."""
        self.step()
        return all(reporter._sent_state is not None for reporter in self.reporters)

    def close(self) -> None:
        for reporter in self.reporters:
            reporter.close()


@pytest.fixture
def endpoint() -> Iterator[str]:
    with short_directory() as folder:
        yield f"ipc://{folder}/q"


def first_answer(endpoint: str, step: Callable[[], object]) -> wire.Reply:
    """The first answer that the hook gets, with `step` done all the time."""
    chooser = Chooser("i", time.time_ns(), {}, lambda: RANKS, 100)
    client = SidecarClient(endpoint, 1000, 1, 0.05, chooser.probe)
    replies: list[wire.Reply] = []

    def ask(query: bytes, seq: int) -> wire.Reply | str:
        answer = client.ask(query, seq)
        if isinstance(answer, wire.Reply):
            replies.append(answer)
        return answer

    chooser.ask, client.heard = ask, chooser.heard

    def asked() -> bool:
        step()
        chooser.choose_one(Dispatch(KEY, None, (None, None, None)))
        return bool(replies)

    try:
        wait_for(asked, 60)
    finally:
        client.close()
    return replies[0]


@contextlib.contextmanager
def listening(endpoint: str) -> "Iterator[zmq.Socket[bytes]]":
    """Who takes load reports."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.bind(endpoint)
        yield pull


def test_the_first_decision_knows_every_load(endpoint: str) -> None:
    schedulers = Schedulers(endpoint, heartbeat=0.25)
    try:
        with sidecar_process(endpoint, "--policy=prefix_affinity") as sidecar:
            wait_for(schedulers.told)
            sidecar.kill()
        with sidecar_process(endpoint, "--policy=prefix_affinity", ready=False):
            reply = first_answer(endpoint, schedulers.step)
    finally:
        schedulers.close()
    # Without the loads it would have its preferred rank; with any of them missing, no average.
    assert reply.reasons == ["spill"]
    assert reply.ranks != [3]


def test_ranks_that_had_nobody_report_again_before_their_heartbeat(endpoint: str) -> None:
    schedulers = Schedulers(endpoint, heartbeat=3600)
    path = Path(endpoint.removeprefix("ipc://") + ".reports")
    try:
        for _ in range(2):
            with listening(wire.report_endpoint(endpoint)) as pull:
                wait_for(schedulers.told)
                heard = {wire.decode_report(pull.recv()).rank for _ in RANKS}
                assert heard == set(RANKS)
            path.unlink(missing_ok=True)
            wait_for(lambda: all(reporter.due(0) for reporter in schedulers.reporters))
            schedulers.step()
            assert not schedulers.told(), "nobody took it"
    finally:
        schedulers.close()
