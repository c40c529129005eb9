"""Kinds of controller and of request: what a server may be, and what it may be asked."""

from typing import Any

import pytest

pytest.importorskip("sglang")
import zmq
from sglang.srt.managers import data_parallel_controller as module
from sglang.srt.managers import io_struct

from bench.stock import make_controller
from sglang_hook import patches
from sglang_hook.controller_seam import ControllerSeam
from sglang_hook.sending import LISTENERS
from sglang_hook.settings import Settings

from .conftest import ELASTIC, RANKS, Worker, embedding, generate
from .test_seams import make_scheduler, make_seam

elastic = pytest.mark.skipif(not ELASTIC, reason="elastic from 0.5.16 on")
SETTINGS = Settings(endpoint="ipc:///nonexistent/q")


@pytest.mark.parametrize(
    "shape",
    [
        {"dp_size": RANKS, "tp_size": 1, "enable_dp_attention": False},
        {"dp_size": RANKS, "tp_size": RANKS, "enable_dp_attention": True},
        # What 0.5.22 and later make of it.
        {"dp_size": 1, "attn_dp_size": RANKS, "tp_size": RANKS, "enable_dp_attention": True},
    ],
    ids=["plain", "attention", "attention 0.5.22"],
)
def test_the_number_of_ranks_is_that_of_the_workers(harness: Any, shape: dict[str, Any]) -> None:
    harness.controller.server_args.__dict__.update(shape)
    harness.dispatch(generate("a", "k"))
    assert harness.queries[0].ranks == list(range(RANKS))
    assert harness.where() == {"a": 5}


def test_one_rank_leaves_nothing_to_do() -> None:
    patches._attach_controller(module)
    controller = make_controller([Worker()])
    stock = controller.dispatching
    ControllerSeam(controller, SETTINGS).attach()
    assert controller.dispatching == stock
    assert not LISTENERS


@pytest.mark.parametrize(
    "other",
    [{"node_rank": 1}, {"node_rank": 0, "is_ep_scale_joiner": True}],
    ids=["another node", "joins an elastic server"],
)
def test_only_the_controller_that_dispatches_is_attached(other: dict[str, Any]) -> None:
    controller = make_controller([Worker() for _ in range(RANKS)])
    controller.server_args.__dict__.update(other)
    stock = controller.dispatching
    ControllerSeam(controller, SETTINGS).attach()
    assert controller.dispatching == stock


@pytest.mark.parametrize("method", ["ROUND_ROBIN", "TOTAL_REQUESTS", "TOTAL_TOKENS"])
def test_a_prefill_server_with_another_method_asks_the_sidecar(
    make_harness: Any, method: str
) -> None:
    harness = make_harness(method)
    harness.controller.server_args.disaggregation_mode = "prefill"
    harness.controller.refresh_load_budget = lambda: None
    for i in range(4):
        harness.dispatch(generate(f"p{i}", "k", bootstrap_room=i))
    assert set(harness.where().values()) == {5}


def test_a_priority_travels_and_changes_nothing(harness: Any) -> None:
    req = generate("a", "k", priority=3)
    harness.dispatch(req)
    [got] = harness.controller.workers[5].got
    assert got is req
    assert got.priority == 3


@pytest.mark.parametrize("field", ["extra_key", "lora_id", "cache_salt"])
def test_what_separates_caches_separates_prompts(harness: Any, field: str) -> None:
    if not hasattr(generate("a"), field):
        pytest.skip(f"no {field} in this release")
    harness.dispatch(generate("learn"))
    prompt = range(5000)
    for rid, value in (("a", "x"), ("b", "y"), ("c", "x"), ("d", None)):
        harness.dispatch(generate(rid, input_ids=prompt, **{field: value}))
    a, b, c, d = (query.requests[0].prefix_hash for query in harness.queries[1:])
    assert a == c
    assert len({a, b, d}) == 3


def test_a_session_id_alone_makes_it_sticky(harness: Any) -> None:
    if not hasattr(generate("a"), "session_id"):
        pytest.skip("no session_id in this release")
    for i in range(5):
        harness.answer = harness.all_to(i)
        harness.dispatch(generate(f"s{i}", session_id="abc"))
    assert len(set(harness.where().values())) == 1


def test_all_that_was_sent_is_received(harness: Any) -> None:
    """By the counters of both sides: their difference is what is in flight."""
    harness.answer = harness.all_to(*range(RANKS))
    harness.dispatch(*(generate(f"g{i}", f"k{i}", tokens=10 + i) for i in range(20)))
    harness.dispatch(embedding("e"), generate("p", routed_dp_rank=3), generate("HEALTH_CHECK_1"))
    harness.controller.dispatch_batch_generate(
        io_struct.BatchTokenizedGenerateReqInput(batch=[generate(f"b{i}") for i in range(20)])
    )
    sent, tokens = harness.seam.chooser.sent.of(list(range(RANKS)))
    for rank, worker in enumerate(harness.controller.workers):
        seam, _, _ = make_seam(make_scheduler()[0])
        seam.step(worker.got)
        received = seam.reporter.received, seam.reporter.received_tokens
        assert received == (sent[rank], tokens[rank])
    assert sum(sent) == 43


@pytest.mark.parametrize("pickled", ["1", "0"])
def test_real_sockets_carry_what_sglang_can_read(
    pickled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hasattr(io_struct, "_USE_PICKLE_IPC"):  # SGLANG_USE_PICKLE_IPC, read at its import
        monkeypatch.setattr(io_struct, "_USE_PICKLE_IPC", pickled == "1")
    elif pickled == "0":
        pytest.skip("this release always pickles")
    patches._attach_controller(module)
    with zmq.Context() as context:
        pairs = [(context.socket(zmq.PUSH), context.socket(zmq.PULL)) for _ in range(3)]
        for rank, (push, pull) in enumerate(pairs):
            push.bind(f"inproc://rank{rank}")
            pull.connect(f"inproc://rank{rank}")
        controller = make_controller([push for push, _ in pairs])
        seam = ControllerSeam(controller, SETTINGS)
        seam.attach()
        try:
            seam.chooser.choose_one = lambda dispatch: 2  # type: ignore[method-assign]
            controller.dispatching_with_trace(generate("ours", "k", tokens=7))
            controller.dispatching_with_trace(generate("pinned", routed_dp_rank=1))
            assert [read(pull).rid for _, pull in pairs[1:]] == ["pinned", "ours"]
            sent = seam.chooser.sent.of([0, 1, 2])
            assert [list(part) for part in sent] == [[0, 1, 1], [0, 64, 7]]
        finally:
            LISTENERS.clear()
            seam.client.close()
            for push, pull in pairs:
                push.close(0)
                pull.close(0)


def read(socket: Any) -> Any:
    assert socket.poll(5000)
    if hasattr(io_struct, "sock_recv"):
        return io_struct.sock_recv(socket)
    return socket.recv_pyobj()


@elastic
def test_workers_of_an_elastic_server_come_and_go(harness: Any) -> None:
    controller = harness.controller
    controller.server_args.elastic_ep_backend = "mooncake"
    controller.max_dp_size = RANKS
    controller.dp_active = [rank < 4 for rank in range(RANKS)]
    controller.status = list(controller.dp_active)
    controller._refresh_active_workers()
    harness.dispatch(generate("a", "k"))
    assert harness.queries[-1].ranks == [0, 1, 2, 3]
    assert harness.where()["a"] < 4, "5 is not there yet"
    controller.add_elastic_workers(4, 2)
    harness.dispatch(generate("b", "other"))
    assert harness.queries[-1].ranks == [0, 1, 2, 3, 4, 5]
    assert harness.where()["b"] == 5
    controller.status[5] = False
    controller._refresh_active_workers()
    harness.dispatch(generate("c", "other"))
    assert harness.queries[-1].ranks == [0, 1, 2, 3, 4]
    assert sum(harness.sent()) == 3


@elastic
def test_slots_without_a_socket_are_no_ranks() -> None:
    patches._attach_controller(module)
    controller = make_controller([Worker(), None, Worker(), None])
    controller._active_workers = [0, 2]
    seam = ControllerSeam(controller, SETTINGS)
    assert seam.live_ranks() == [0, 2]
