"""Requests through SGLang's real controller code."""

from collections import Counter

import pytest
from sglang.srt.managers.io_struct import (
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
)

from sglang_hook.settings import Settings
from sidecar import hashing, wire

from .conftest import ELASTIC, RANKS, embedding, generate


def test_the_request_goes_where_the_sidecar_says(harness):
    req = generate("a", "session-1", tokens=70, extra_key="x", lora_id="l")
    harness.dispatch(req)
    assert harness.where() == {"a": 5}
    [query] = harness.queries
    [facts] = query.requests
    assert facts.routing_key == b"session-1"
    assert facts.tokens == 70
    assert query.ranks == list(range(RANKS))
    assert req.routed_dp_rank is None, "the scheduler must not see a rank that nobody asked for"


def test_keyless_requests_carry_the_hash_that_the_policy_wants(harness):
    harness.dispatch(generate("a"), generate("b", extra_key="x"), embedding("c"))
    _, second, third = (query.requests[0] for query in harness.queries)
    salted = hashing.namespace_hash("x", None, None)
    assert second.prefix_hash == hashing.prefix_hash(generate("b").input_ids, 4096, salted)
    assert third.prefix_hash == hashing.prefix_hash(range(64), 4096)


def test_the_last_rank_of_a_key_travels(harness):
    harness.dispatch(generate("a", "k"), generate("b", "k"))
    first, second = (query.requests[0] for query in harness.queries)
    assert (first.last_rank, first.last_age_ms) == (-1, -1)
    assert second.last_rank == 5
    assert second.last_age_ms >= 0


@pytest.mark.parametrize(
    ("batch_type", "method", "make"),
    [
        (BatchTokenizedGenerateReqInput, "dispatch_batch_generate", generate),
        (BatchTokenizedEmbeddingReqInput, "dispatch_batch_embedding", embedding),
    ],
)
def test_a_batch_is_one_query(harness, batch_type, method, make):
    harness.answer = harness.all_to(1, 2, 3)
    reqs = [make(rid) for rid in "abc"]
    pinned = make("p", routed_dp_rank=7)
    getattr(harness.controller, method)(batch_type(batch=[reqs[0], pinned, *reqs[1:]]))
    assert [len(query.requests) for query in harness.queries] == [3]
    assert harness.where() == {"a": 1, "b": 2, "c": 3, "p": 7}
    assert harness.seam.plan == {}


def test_sent_counts_every_path_and_travels(harness):
    harness.dispatch(
        generate("ours", "k", tokens=10),
        generate("pinned", "k2", tokens=20, routed_dp_rank=2),
        generate("HEALTH_CHECK_1", tokens=30),
    )
    harness.answer = lambda query: "deadline"
    harness.dispatch(generate("local", "k", tokens=40))  # last rank of k
    harness.dispatch(generate("stock", tokens=50))
    counts = Counter(harness.where().values())
    assert harness.sent() == [counts[rank] for rank in range(RANKS)]
    assert sum(harness.sent()) == 5
    harness.dispatch(generate("again", "k"))
    assert harness.queries[-1].sent == [counts[rank] for rank in range(RANKS)]
    assert sum(harness.queries[-1].sent_tokens) == 150


def test_control_messages_are_not_counted(harness):
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    harness.controller.control_message_step = 1
    harness.controller.send_control_message(FlushCacheReqInput())
    assert all(len(worker.got) == 1 for worker in harness.controller.workers)
    assert sum(harness.sent()) == 0


def test_explicit_rank_is_untouched_and_remembered(harness):
    harness.dispatch(generate("p", "k", routed_dp_rank=3))
    assert harness.where() == {"p": 3}
    assert not harness.queries
    assert harness.seam.chooser.abstained == {"pinned": 1}
    harness.answer = lambda query: "unreachable"
    harness.dispatch(generate("q", "k"))
    assert harness.where()["q"] == 3


def test_an_explicit_rank_that_is_not_live_fails_as_without_us(make_harness):
    harness = make_harness()
    stock = make_harness()
    stock.controller.dispatching = stock.controller.round_robin_scheduler
    for one in (harness, stock):
        with pytest.raises(ValueError if ELASTIC else IndexError):
            one.dispatch(generate("p", routed_dp_rank=99))


def test_health_checks_stay_with_sglang_and_move_no_user(make_harness):
    mixed, alone = make_harness(), make_harness()
    for one in (mixed, alone):
        one.answer = lambda query: one.all_to(query.seq % RANKS)(query)  # noqa: B023
    for i in range(32):
        if i % 2:
            mixed.dispatch(generate(f"HEALTH_CHECK_{i}"))
        mixed.answer = alone.answer = mixed.all_to(i % RANKS)
        mixed.dispatch(generate(f"u{i}", f"k{i}"))
        alone.dispatch(generate(f"u{i}", f"k{i}"))
    users = {rid: rank for rid, rank in mixed.where().items() if rid.startswith("u")}
    assert users == alone.where()
    assert mixed.seam.chooser.abstained.total() <= 16


@pytest.mark.parametrize(
    "warm_up", [{"input_text": "The capital city of France is"}, {"input_ids": [10, 11, 12]}]
)
def test_warm_up_prompts_reach_every_rank(harness, warm_up):
    harness.dispatch(*(generate(f"w{i}", **warm_up) for i in range(RANKS)))
    assert sorted(harness.where().values()) == list(range(RANKS))
    assert not harness.queries


def test_follow_bootstrap_room_is_left_alone(make_harness, caplog):
    harness = make_harness("FOLLOW_BOOTSTRAP_ROOM")
    [record] = [r for r in caplog.records if "dp_sidecar" in r.getMessage()]
    assert "SGLang places every request by its room" in record.getMessage()
    harness.dispatch(*(generate(f"b{i}", "k", bootstrap_room=i) for i in range(RANKS)))
    assert harness.where() == {f"b{i}": i for i in range(RANKS)}
    assert not harness.queries


def test_sessions_stay_on_one_rank_whatever_the_sidecar_says(harness):
    from sglang.srt.managers.io_struct import SessionParams

    for i in range(5):
        harness.answer = harness.all_to(i)
        harness.dispatch(generate(f"s{i}", session_params=SessionParams(id="abc")))
    assert len(set(harness.where().values())) == 1


@pytest.mark.parametrize("bad", [99, -1, 3, 2**70, True])
def test_a_rank_that_is_not_live_is_decided_locally(harness, bad):
    harness.controller.status[3] = False
    if ELASTIC:
        harness.controller.workers[1] = None
    else:
        harness.controller.status[1] = False
    harness.answer = harness.all_to(bad)
    for i in range(40):
        harness.dispatch(generate(f"r{i}", f"k{i}"))
    harness.dispatch(generate("keyless"))
    where = harness.where()
    assert len(where) == 41
    assert not {1, 3} & set(where.values())
    assert harness.queries[0].ranks == [0, 2, 4, 5, 6, 7]
    assert harness.seam.chooser.bypassed == {"invalid_rank": 41}


@pytest.mark.parametrize(
    "cause", ["deadline", "unreachable", "breaker_open", "malformed", "refused", "mismatched"]
)
def test_no_answer_means_a_local_decision_that_keeps_affinity(harness, cause):
    harness.answer = lambda query: cause
    harness.dispatch(*(generate(f"r{i}", f"k{i % 10}") for i in range(100)))
    where = harness.where()
    assert all(where[f"r{i}"] == where[f"r{i % 10}"] for i in range(100))
    for i in range(10):
        expected = hashing.preferred(hashing.key_hash(b"k%d" % i), range(RANKS))
        assert where[f"r{i}"] == expected
    assert harness.seam.chooser.bypassed == {cause: 100}


def test_without_key_and_answer_sglang_decides(harness):
    harness.answer = lambda query: "deadline"
    harness.dispatch(*(generate(f"r{i}") for i in range(80)))
    # once a prefix hash is known, the prompt has an affinity key; round robin until then
    assert Counter(harness.where().values()) == {rank: 10 for rank in range(RANKS)}


def test_a_shared_prompt_without_key_does_not_herd_while_nobody_answers(harness):
    """Without the guard, affinity of a common prefix would put all of it on one rank."""
    prompt = range(5000)
    harness.dispatch(generate("learns-what-the-policy-wants"))
    harness.dispatch(generate("first", input_ids=prompt))
    assert harness.queries[-1].requests[0].prefix_hash is not None
    harness.answer = lambda query: "unreachable"
    harness.dispatch(*(generate(f"r{i}", input_ids=prompt) for i in range(40)))
    harness.controller.dispatch_batch_generate(
        BatchTokenizedGenerateReqInput(
            batch=[generate(f"b{i}", input_ids=prompt) for i in range(40)]
        )
    )
    where = harness.where()
    counts = Counter(rank for rid, rank in where.items() if rid[0] in "rb")
    assert counts == {rank: 10 for rank in range(RANKS)}


def test_an_error_of_ours_is_contained_and_counted(harness, caplog):
    def broken(dispatches):
        raise RuntimeError("boom")

    harness.seam.chooser.choose = harness.seam.chooser.choose_one = broken
    harness.dispatch(*(generate(f"r{i}", "k") for i in range(RANKS)))
    harness.controller.dispatch_batch_generate(
        BatchTokenizedGenerateReqInput(batch=[generate(f"s{i}") for i in range(RANKS)])
    )
    assert sorted(harness.where().values()) == sorted([*range(RANKS)] * 2)
    assert harness.seam.chooser.bypassed["hook_error"] >= 2 * RANKS
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1


@pytest.mark.skipif(not ELASTIC, reason="SGLang waits for a rank for ever, on its own")
def test_no_live_rank_is_sglangs_own_error(harness):
    harness.controller._active_workers = []
    with pytest.raises(RuntimeError, match="No active DP workers"):
        harness.dispatch(generate("r", "k"))
    assert harness.seam.chooser.bypassed == {"no_live_rank": 1}


def test_ranks_that_come_and_go_are_seen_at_once(harness):
    harness.dispatch(generate("a", "k"))
    harness.controller.status = [rank != 5 for rank in range(RANKS)]
    harness.dispatch(generate("b", "k"))
    harness.controller.status = [True] * RANKS
    harness.dispatch(generate("c", "k"))
    assert [len(query.ranks) for query in harness.queries] == [8, 7, 8]
    where = harness.where()
    assert where["b"] != 5
    assert where["a"] == where["c"] == 5


def test_total_methods_see_our_choices(make_harness):
    harness = make_harness("TOTAL_REQUESTS")
    harness.controller.refresh_load_budget_on_dispatch = True
    harness.controller.refresh_load_budget = lambda: None
    harness.dispatch(*(generate(f"r{i}", "k", tokens=10) for i in range(3)))
    assert harness.controller.dp_budget.total_requests[5] == 3
    assert harness.controller.dp_budget.total_tokens[5] == 30


def test_a_subclass_from_another_module_is_served(make_harness):
    """Ray's controller is one."""
    harness = make_harness()
    base = type(harness.controller)
    harness.controller.__class__ = type("RayController", (base,), {"__module__": __name__})
    seam = type(harness.seam)(harness.controller, Settings(endpoint="ipc:///nonexistent/q"))
    seam.chooser.ask = harness.ask
    harness.seam.__dict__.update(seam.__dict__)
    harness.controller.dispatching = harness.seam.dispatching
    harness.seam.stock = harness.controller.round_robin_scheduler
    harness.dispatch(generate("a", "k"))
    assert harness.where() == {"a": 5}


def test_attaching_twice_wraps_once(harness):
    from sglang.srt.managers import data_parallel_controller as module

    from sglang_hook import patches

    def seams():
        controller = module.DataParallelController
        return getattr(module, "sock_send", None), controller.dispatch_batch_generate

    before = seams()
    patches._attach_controller(module)
    assert seams() == before


def test_a_reply_for_another_number_of_requests_is_refused(harness):
    harness.answer = lambda query: wire.Reply(
        1, query.seq, 1, "test", 1, [1, 2, 3], ["x"] * 3, wire.Want()
    )
    harness.dispatch(generate("a", "k"))
    assert harness.seam.chooser.bypassed == {"malformed": 1}
    assert len(harness.where()) == 1
