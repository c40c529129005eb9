"""The arms: SGLang's own methods as SGLang does them, ours with exact counts, bounds that hold."""

import math
import random
from types import SimpleNamespace

import pytest

from bench.arms import ARMS, POLICIES, ArmError, make_arm, split_spec
from bench.arms.reference import Chbl
from bench.arms.stock import TotalRequests, TotalTokens
from bench.model.cluster import Cluster
from bench.model.request import Load, RankSpec
from bench.model.server import ServerSpec, Snapshot
from bench.model.simulate import SPILLS, simulate
from bench.outcome import summarize
from bench.workloads.base import Call
from sidecar.hashing import key_hash
from sidecar.policies import REGISTRY
from tests.bench.test_model_cluster import (
    Made,
    alike_source,
    call,
    closed,
    open_source,
    opened,
    random_source,
)
from tests.support import in_flight, order_of

RANKS = 4


def server(**changes):
    return ServerSpec(**({"ranks": RANKS} | changes))


def watched(arm, watch):
    """The arm, with `watch(chooser, cluster, call, now)` asked before each choice."""
    made = make_arm(arm)

    def make(cluster):
        chooser = made.make(cluster)
        choose = chooser.choose

        def asked(call, now):
            check = watch(chooser, cluster, call, now)
            placement = choose(call, now)
            if check is not None:
                check(placement)
            return placement

        chooser.choose = asked
        return chooser

    return SimpleNamespace(name=arm, shared_cache=made.shared_cache, make=make)


def hot_source(seed):
    """One key fans out while others go on."""
    rng, calls = random.Random(seed), []
    for number in range(120):
        hot = number % 3 != 0
        key = "hot" if hot else f"cold-{rng.randrange(8)}"
        head = 1 if hot else 2 + rng.randrange(8)
        pages = (*range(head << 10, (head << 10) + 20), (number + 100) << 20)
        calls.append(call(number, 21 * 64, 40, pages=pages, key=key))
    return closed(calls, 40)


# Names and parameters


def test_every_arm_of_the_issue_is_there():
    wanted = {
        "round_robin",
        "total_requests",
        "total_tokens",
        "key_mod",
        "first_tokens_mod",
        "prefix_affinity",
        "prefix_affinity:min_load_gap=2",
        "prefix_affinity:min_load_gap=8",
        "prefix_affinity:max_load_skew=1e6",
        "prefix_affinity_token_guard",
        "chbl:bound=1.25",
        "lmetric",
        "least_waiting_uncached",
        "oracle",
    }
    assert {split_spec(spec)[0] for spec in wanted} <= set(ARMS)
    for spec in wanted:
        assert make_arm(spec).name == spec
    assert len(set(ARMS)) == len(ARMS)
    assert set(POLICIES.values()) == set(REGISTRY)


def test_a_spec_is_a_name_and_its_parameters():
    assert split_spec("a") == ("a", {})
    assert split_spec("a:b=1:c=x=y") == ("a", {"b": "1", "c": "x=y"})
    for bad in ("a:b", "a:=1", "a:", "a:b=1:c"):
        with pytest.raises(ArmError, match="name=value"):
            split_spec(bad)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nothing", "no arm 'nothing'.*round_robin.*prefix_affinity"),
        ("", "no arm ''"),
        ("chbl:bound=1", r"> 1\.0.*bound"),
        ("chbl:bound=0.5", r"> 1\.0.*bound"),
        ("chbl:bound=x", "float.*bound"),
        ("chbl:bound=nan", "bound"),
        ("chbl:bound=inf", r"<= 1000000\.0.*bound"),
        ("chbl:bond=2", "bond"),
        ("round_robin:x=1", "`x`"),
        ("oracle:x=1", "`x`"),
        ("first_tokens_mod:tokens=0", ">= 1.*tokens"),
        ("first_tokens_mod:tokens=1.5", "int.*tokens"),
        ("prefix_affinity:max_load_skew=0.5", r">= 1\.0.*max_load_skew"),
        ("prefix_affinity:min_load_gap=-1", r">= 0\.0.*min_load_gap"),
        ("prefix_affinity:fallback=best", "fallback"),
        ("prefix_affinity:skew=2", "skew"),
        ("prefix_affinity_token_guard:max_load_skew=0", r">= 1\.0.*max_load_skew"),
        ("sidecar_round_robin:x=1", "`x`"),
    ],
)
def test_what_is_wrong_is_named_with_its_bound(spec, said):
    with pytest.raises(ArmError, match=said) as caught:
        make_arm(spec)
    assert repr(spec) in str(caught.value)


def test_parameters_reach_the_policy():
    chooser = make_arm("prefix_affinity:max_load_skew=3:token_fallback=false").make(
        Cluster(server())
    )
    params = chooser.dispatcher.policy.params
    assert (params.max_load_skew, params.token_fallback) == (3.0, False)


# Each on small workloads


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_serves_everything(arm, lockstep):
    for make in (random_source, open_source, alike_source):
        outcome = simulate(Made(make), make_arm(arm), 2, server(lockstep=lockstep))
        assert len(outcome.rows) == len({row.id for row in outcome.rows}) >= 60
        assert not any(row.error for row in outcome.rows)
        assert all(0 <= row.rank < RANKS for row in outcome.rows)
        assert all(0 < row.ttft_ms <= row.e2e_ms for row in outcome.rows)
        assert all(-1 <= row.preferred < RANKS for row in outcome.rows)
        assert all(0 <= row.cached_tokens < row.prompt_tokens for row in outcome.rows)


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_may_be_made_again(arm):
    made = make_arm(arm)
    one, two = (simulate(Made(random_source), made, 4, server()) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "oracle"])
def test_one_rank_leaves_no_choice(arm):
    outcome = simulate(Made(random_source), make_arm(arm), 4, server(ranks=1))
    reference = simulate(Made(random_source), make_arm("round_robin"), 4, server(ranks=1))
    assert [row.e2e_ms for row in outcome.rows] == [row.e2e_ms for row in reference.rows]


def test_round_robin_takes_turns():
    outcome = simulate(Made(random_source), make_arm("round_robin"), 1, server())
    assert [row.rank for row in outcome.rows] == [i % RANKS for i in range(len(outcome.rows))]


@pytest.mark.parametrize("arm", ["key_mod", "prefix_affinity:max_load_skew=1e6"])
@pytest.mark.parametrize("make", [hot_source, random_source, open_source])
def test_without_a_guard_no_key_moves(arm, make):
    outcome = simulate(Made(make), make_arm(arm), 3, server())
    keys = {each.id: each.key for each in _calls(make, 3)}
    ranks = {}
    for row in outcome.rows:
        ranks.setdefault(keys[row.id], set()).add(row.rank)
    assert {len(found) for found in ranks.values()} == {1}
    assert (outcome.spills, outcome.fallbacks, outcome.bypasses) == (0, 0, 0)
    assert all(row.rank == row.preferred for row in outcome.rows)


def _calls(make, seed) -> list[Call]:
    """All calls of a source, whoever serves them."""
    source, found = make(seed), []
    due = [each for _, each in source.start()]
    while due:
        each = due.pop()
        found.append(each)
        due += [following for _, following in source.done(each, 0.0)]
    return found


def test_equal_first_tokens_go_to_one_rank_whatever_the_key():
    tail = [(i + 1) << 20 for i in range(12)]
    calls = [call(i, 65 * 64, 1, pages=(*range(64), tail[i]), key=f"key-{i}") for i in range(12)]
    outcome = simulate(
        Made(lambda seed: closed(calls, 3)), make_arm("first_tokens_mod"), 0, server()
    )
    assert len({row.rank for row in outcome.rows}) == 1
    few = make_arm("first_tokens_mod:tokens=8192")
    outcome = simulate(Made(lambda seed: closed(calls, 3)), few, 0, server())
    assert len({row.rank for row in outcome.rows}) > 1


# Loads


@pytest.mark.parametrize("bound", [1.01, 1.25, 3.0])
@pytest.mark.parametrize("make", [hot_source, random_source, open_source])
def test_chbl_never_passes_its_bound(make, bound):
    spills = []

    def watch(chooser, cluster, call, now):
        assert isinstance(chooser, Chbl)
        loads = [cluster.outstanding(rank) for rank in range(RANKS)]
        limit = math.ceil(bound * (sum(loads) + 1) / RANKS)

        def check(placement):
            assert loads[placement.rank] + 1 <= limit
            order = order_of(key_hash(call.key.encode()), range(RANKS))
            free = [rank for rank in order if loads[rank] + 1 <= limit]
            assert (placement.rank, placement.preferred) == (free[0], order[0])
            spills.append(placement.rank != placement.preferred)

        return check

    outcome = simulate(Made(make), watched(f"chbl:bound={bound}", watch), 5, server())
    assert outcome.spills == sum(spills)


def sends_to_a_cheapest(arm, cost):
    def watch(chooser, cluster, call, now):
        costs = [cost(cluster, call, rank) for rank in range(RANKS)]

        def check(placement):
            assert costs[placement.rank] == min(costs)

        return check

    simulate(Made(open_source), watched(arm, watch), 5, server())


def test_lmetric_takes_the_least_product():
    def cost(cluster, call, rank):
        new = cluster.ranks[rank].uncached_of(call.pages, call.prompt_tokens)
        return (cluster.to_prefill(rank) + new) * (cluster.outstanding(rank) + 1)

    sends_to_a_cheapest("lmetric", cost)


def test_least_waiting_uncached_takes_the_least_to_prefill():
    def cost(cluster, call, rank):
        new = cluster.ranks[rank].uncached_of(call.pages, call.prompt_tokens)
        return cluster.to_prefill(rank) + new

    sends_to_a_cheapest("least_waiting_uncached", cost)


# The sidecar's own policies


SIDECAR = ["prefix_affinity", "prefix_affinity:max_load_skew=1:min_load_gap=0", *list(POLICIES)[1:]]


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("arm", SIDECAR)
def test_the_sidecar_knows_every_request_in_flight(arm, lockstep):
    """Its view of each rank is what was sent there and not answered, at every choice."""
    seen = []

    def watch(chooser, cluster, call, now):
        recorder = chooser._policy
        choose = recorder.policy.choose

        def look(facts, view):
            want = [cluster.outstanding(rank) for rank in range(RANKS)]
            assert view.requests == want
            assert (view.total, view.known) in ((sum(want), RANKS), (0, 0))
            seen.append(want)
            return choose(facts, view)

        recorder.policy = SimpleNamespace(choose=look)

        def check(placement):
            recorder.policy = SimpleNamespace(choose=choose)

        return check

    choosers = []
    arm = watched(arm, watch)
    make = arm.make
    arm.make = lambda cluster: choosers.append(make(cluster)) or choosers[-1]
    outcome = simulate(Made(hot_source), arm, 5, server(lockstep=lockstep))
    assert len(seen) == len(outcome.rows)
    assert max(map(sum, seen)) == 39
    chooser = choosers[0]
    chooser._report(1e6)
    instance = chooser.dispatcher.budget.instance("model", 1e6)
    assert in_flight(instance) == [0] * RANKS
    assert instance.view.requests == [0] * RANKS
    assert instance.view.tokens == [0] * RANKS


def test_spills_name_the_preferred_rank():
    arm = make_arm("prefix_affinity:max_load_skew=1:min_load_gap=0")
    outcome = simulate(Made(hot_source), arm, 6, server())
    keys = {each.id: each.key for each in _calls(hot_source, 6)}
    spilled = [row for row in outcome.rows if row.reason in SPILLS]
    assert len(spilled) == outcome.spills > 10
    for row in outcome.rows:
        assert row.preferred == order_of(key_hash(keys[row.id].encode()), range(RANKS))[0]
        assert (row.rank != row.preferred) == (row.reason in SPILLS)


def test_a_wider_guard_spills_less():
    gaps = (0, 2, 4, 8, 1e6)
    spills = [
        simulate(
            Made(hot_source), make_arm(f"prefix_affinity:min_load_gap={gap}"), 6, server()
        ).spills
        for gap in gaps
    ]
    assert spills == sorted(spills, reverse=True)
    assert spills[0] > 0 == spills[-1]


def test_keyless_prompts_are_placed_by_prefix_or_fall_back():
    calls = [call(i, 640, 20) for i in range(40)]

    def run(arm):
        return simulate(Made(lambda seed: closed(calls, 10)), make_arm(arm), 0, server())

    by_prefix, fallback = run("prefix_affinity"), run("prefix_affinity:token_fallback=false")
    assert by_prefix.fallbacks == 0
    assert {row.reason for row in by_prefix.rows} <= {"token_affinity_hit", "token_spill"}
    assert fallback.fallbacks == 40
    assert fallback.spills == 0
    assert {row.preferred for row in fallback.rows} == {-1}


def test_stock_methods_spill_nothing():
    for arm in ("round_robin", "total_requests", "total_tokens"):
        outcome = simulate(Made(hot_source), make_arm(arm), 0, server())
        assert (outcome.spills, outcome.fallbacks, outcome.bypasses) == (0, 0, 0)


# The bound


CONTENDERS = [arm for arm in ARMS if arm != "oracle"]


def reuse(arm, make, spec, seed=0):
    return summarize(simulate(Made(make), make_arm(arm), seed, spec))["reuse"]


def one_by_one(seed):
    return closed(_calls(random_source, seed), 1)


def test_no_arm_reuses_more_than_the_oracle_if_one_comes_at_a_time():
    most = reuse("oracle", one_by_one, server())
    for arm in CONTENDERS:
        assert reuse(arm, one_by_one, server()) <= most + 1e-12, arm


@pytest.mark.parametrize("lockstep", [True, False])
def test_the_oracle_s_cache_is_no_larger_than_all_caches(lockstep):
    rank = RankSpec(cache_tokens=4096)
    over = []

    def watch(chooser, cluster, call, now):
        promised = 0
        for rank in cluster.ranks:
            held = {id(r): r for r in [*rank.fresh, *rank.batch, *(e[2] for e in rank.running)]}
            if rank.chunked is not None:
                held[id(rank.chunked)] = rank.chunked
            promised += sum(r.prompt_tokens + r.output_tokens - r.stored for r in held.values())
        used = cluster.ranks[0].cache.pages * 64 + promised
        over.append(max(0, used - RANKS * 4096))

    calls = [call(i, 1024, 256) for i in range(200)]
    arm = watched("oracle", watch)
    simulate(Made(lambda seed: closed(calls, 40)), arm, 1, server(rank=rank, lockstep=lockstep))
    assert max(over) == 0


# SGLang's own code beside


class Theirs:
    """SGLang's controller with a clock and snapshots of ours."""

    def __init__(self, monkeypatch, method):
        pytest.importorskip("sglang")
        from sglang.srt.managers import data_parallel_controller as module

        from bench.stock import make_controller

        self.now, self.sent, self.loads = 0.0, [], [(0.0, 0, 0, 0)] * RANKS
        clock = SimpleNamespace(perf_counter=lambda: self.now + 1024.0)
        monkeypatch.setattr(module, "time", clock)
        workers = [SimpleNamespace(rank=rank) for rank in range(RANKS)]
        monkeypatch.setattr(module, "sock_send", lambda worker, req: self.sent.append(worker.rank))
        self.controller = make_controller(workers, method)
        self.controller.refresh_load_budget_on_dispatch = method != "ROUND_ROBIN"
        self.controller.load_snapshot_reader = SimpleNamespace(read_all=self.read)
        self.controller._last_refresh_time = 0.0

    def read(self):
        for rank, (at, running, waiting, tokens) in enumerate(self.loads):
            yield SimpleNamespace(
                dp_rank=rank,
                timestamp=at,
                num_running_reqs=running,
                num_waiting_reqs=waiting,
                num_total_tokens=tokens,
            )

    def choose(self, tokens):
        from bench.stock import make_request

        self.controller.dispatching_with_trace(make_request("r", range(tokens)))
        return self.sent[-1]


@pytest.mark.sglang
@pytest.mark.parametrize("method", ["round_robin", "total_requests", "total_tokens"])
def test_stock_arms_choose_as_sglang_does(monkeypatch, method):
    for seed in range(6):
        rng = random.Random(seed)
        with monkeypatch.context() as patch:
            theirs = Theirs(patch, method.upper())
            cluster = Cluster(server())
            ours = make_arm(method).make(cluster)
            # Steps of 1/1024 s, so that both clocks subtract without rounding; 20 ms is 20.48.
            for tick in range(1, 600):
                now = theirs.now = tick / 1024
                for rank in range(RANKS):
                    if rng.random() < 0.05:
                        running, waiting = rng.randrange(9), rng.randrange(4)
                        tokens = rng.choice([0, 100, rng.randrange(5000)])
                        theirs.loads[rank] = (now, running, waiting, tokens)
                        cluster.snapshots[rank] = Snapshot(now, Load(running, waiting, tokens, 7))
                for number in range(rng.choice([0, 0, 1, 4])):
                    tokens = rng.randrange(1, 60)
                    placed = ours.choose(call(number, tokens), now)
                    assert (placed.reason, placed.preferred) == ("", -1)
                    assert placed.rank == theirs.choose(tokens), (seed, tick)


@pytest.mark.parametrize("kind", [TotalRequests, TotalTokens])
def test_a_burst_within_20_ms_is_spread_and_then_forgotten(kind):
    """Snapshots overwrite what was counted since: the next burst meets the same ranks again."""
    cluster = Cluster(server())
    chooser = make_arm("total_requests" if kind is TotalRequests else "total_tokens").make(cluster)
    assert isinstance(chooser, kind)
    first = [chooser.choose(call(i), 1.0 + i / 1000).rank for i in range(8)]
    assert first == [0, 1, 2, 3] * 2
    for rank in range(RANKS):
        cluster.snapshots[rank] = Snapshot(1.01, Load(0 if rank == 2 else 5, 0, rank != 2, 0))
    assert chooser.choose(call(9), 1.019).rank == 0, "not read yet"
    assert chooser.choose(call(10), 1.02).rank == 2


def test_an_old_snapshot_is_not_read_again():
    cluster = Cluster(server())
    chooser = make_arm("total_requests").make(cluster)
    for rank in range(RANKS):
        cluster.snapshots[rank] = Snapshot(0.5, Load(0, 0, 0, 0))
    ranks = [chooser.choose(call(i), 1.0 + i).rank for i in range(8)]
    assert ranks == [0, 1, 2, 3] * 2


def test_total_methods_herd_where_snapshots_lag():
    """Requests that a prefill holds are in no snapshot: bursts pile up, as they do in SGLang."""
    calls = [(0.25 * burst, call(burst * 8 + i, 4096, 4)) for burst in range(8) for i in range(8)]

    def worst(arm):
        outcome = simulate(Made(lambda seed: opened(*calls)), make_arm(arm), 0, server())
        counts = [sum(row.rank == rank for row in outcome.rows) for rank in range(RANKS)]
        return max(counts) - min(counts)

    assert worst("round_robin") == 0
    assert worst("total_requests") >= worst("sidecar_total_requests")
