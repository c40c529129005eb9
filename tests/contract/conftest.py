"""The real SGLang classes, without processes: what the hook wraps must be there and behave."""

import os
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("sglang")
from sglang.srt.managers import data_parallel_controller as module
from sglang.srt.managers.io_struct import (
    TokenizedEmbeddingReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from bench.stock import make_controller, make_message, make_request
from sglang_hook import patches
from sglang_hook.controller_seam import ControllerSeam
from sglang_hook.sending import LISTENERS
from sglang_hook.settings import Settings
from sidecar import wire

RANKS = 8
ELASTIC = hasattr(module.DataParallelController, "_refresh_active_workers")
"""From 0.5.16 on workers come and go, and an explicit rank is checked."""


_status = [0]


def pytest_sessionfinish(exitstatus: int) -> None:
    _status[0] = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    # Under the newer libraries of this environment the older releases crash while Python frees
    # their modules, which would hide the outcome of the tests.
    if not ELASTIC:
        sys.stdout.flush()
        os._exit(_status[0])


class Worker:
    """The controller's end of a rank's socket; keeps what was sent."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def send_pyobj(self, obj: Any, flags: int = 0, protocol: int = 0) -> None:
        self.got.append(obj)


def generate(rid: str = "r", key: str | None = None, tokens: int = 64, **more: Any) -> Any:
    """A tokenized generation request; `tokens` ids that depend on the rid."""
    first = sum(map(ord, rid))
    ids = more.pop("input_ids", range(first, first + tokens))
    return make_request(rid, ids, key, **more)


def embedding(rid: str = "e", **more: Any) -> Any:
    """A tokenized embedding request, which never has a routing key."""
    fields = {
        "rid": rid,
        "input_text": "text",
        "input_ids": array("q", range(64)),
        "mm_inputs": None,
        "image_inputs": None,  # the same before 0.5.15
        "token_type_ids": None,
        "sampling_params": SamplingParams(),
    }
    return make_message(TokenizedEmbeddingReqInput, fields | more)


class Harness:
    """A hooked controller whose sidecar is a function of the query."""

    def __init__(self, controller: Any, seam: Any) -> None:
        self.controller = controller
        self.seam = seam
        self.queries: list[wire.Query] = []
        self.answer: Callable[[wire.Query], wire.Reply | str] = self.all_to(5)

    def all_to(self, *ranks: Any) -> Callable[[wire.Query], wire.Reply | str]:
        """A sidecar that answers these ranks, the last for all further requests."""

        def answer(query: wire.Query) -> wire.Reply:
            size = len(query.requests)
            chosen = [*ranks, *[ranks[-1]] * size][:size]
            return wire.Reply(1, query.seq, 1, "test", 1, chosen, ["x"] * size, wire.Want(4096))

        return answer

    def ask(self, payload: bytes, seq: int) -> wire.Reply | str:
        query = wire.decode_query(payload)
        self.queries.append(query)
        reply = self.answer(query)
        if isinstance(reply, wire.Reply):
            self.seam.chooser.heard(reply)
        return reply

    endpoint = "nowhere"

    def greet(self) -> None:
        """Nobody to meet."""

    def standing(self) -> str:
        """Nothing that the log should say of it."""
        return ""

    def dispatch(self, *reqs: Any) -> None:
        for req in reqs:
            self.controller.dispatching_with_trace(req)

    def where(self) -> dict[str, int]:
        """rid -> rank, and that nothing was sent twice."""
        got = [(req.rid, r) for r, w in enumerate(self.controller.workers) if w for req in w.got]
        assert len({rid for rid, _ in got}) == len(got)
        return dict(got)

    def sent(self) -> list[int]:
        return list(self.seam.chooser.sent.of(list(range(len(self.controller.workers))))[0])


@pytest.fixture
def make_harness() -> Iterator[Callable[..., Harness]]:
    def make(method: str = "ROUND_ROBIN") -> Harness:
        patches._attach_controller(module)
        controller = make_controller([Worker() for _ in range(RANKS)], method)
        # nobody listens there: the client is replaced by the harness
        seam = ControllerSeam(controller, Settings(endpoint="ipc:///nonexistent/q"))
        harness = Harness(controller, seam)
        seam.client = harness
        seam.chooser.ask = harness.ask
        seam.attach()
        return harness

    yield make
    LISTENERS.clear()


@pytest.fixture
def harness(make_harness: Callable[..., Harness]) -> Harness:
    return make_harness()
