"""All ranks in virtual time: jumps, barrier, snapshots, closed-form figures, nobody forgotten."""

import os
import random
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.arms import make_arm
from bench.model.cluster import Cluster
from bench.model.request import RankSpec
from bench.model.server import Placement, ServerSpec
from bench.model.simulate import simulate
from bench.model.steps import StepParams, StepTimes, Work
from bench.outcome import summarize
from bench.workloads.base import Call, Send, Source

PAGE = 64


def call(number, prompt=128, output=8, *, pages=None, key="", session=0):
    """A call whose pages nobody else has, unless they are given."""
    if pages is None:
        pages = range(number << 20, (number << 20) + -(-prompt // PAGE))
    return Call(number, session, 0, key, tuple(pages), prompt, output)


def sends(*calls):
    yield from map(Send, calls)


class Recorded(Source):
    """Remembers what it gave and when it heard of an end."""

    given: list[Call]
    heard: list[tuple[int, float]]

    def start(self):
        self.given, self.heard = [], []
        for at, each in super().start():
            self.given.append(each)
            yield at, each

    def done(self, call, now):
        self.heard.append((call.id, now))
        due = super().done(call, now)
        assert all(at >= now for at, _ in due)
        self.given += [each for _, each in due]
        return due


def opened(*timed):
    """Open loop: pairs of a time and a call, or calls one after the other."""
    return Recorded((at, sends(*(c if isinstance(c, tuple) else (c,)))) for at, c in timed)


def closed(calls, slots):
    return Recorded(((0.0, sends(each)) for each in calls), slots)


class Fixed:
    """Sends call i to rank ranks[i], and notes when it was asked."""

    def __init__(self, ranks):
        self.ranks, self.asked = ranks, []

    def choose(self, call, now):
        self.asked.append(now)
        ranks = self.ranks
        return Placement(ranks[call.id] if isinstance(ranks, dict) else ranks[call.id % len(ranks)])


def spec(ranks=2, lockstep=True, steps=None, **rank):
    return ServerSpec(
        ranks=ranks,
        lockstep=lockstep,
        rank=RankSpec(page_tokens=PAGE, **rank),
        steps=steps or StepParams(),
    )


def serve(server, source, ranks, make=Cluster):
    """Rows by call id, the cluster and the end."""
    cluster = make(server)
    chooser = Fixed(ranks)
    end = cluster.run(source, chooser)
    rows = {row.id: row for row in cluster.rows}
    assert len(rows) == len(cluster.rows)
    assert chooser.asked == sorted(chooser.asked), "time does not go back"
    return rows, cluster, end


class Made:
    """A workload from a function of the seed."""

    page_tokens, description = PAGE, ""

    def __init__(self, make, name="made"):
        self.make, self.name = make, name


class StepByStep(Cluster):
    """Takes every step by itself."""

    def _jump(self, group):
        return 1


def ms(seconds):
    return pytest.approx(seconds * 1e3)


TIMES = StepTimes(StepParams())


def prefill(tokens, before=0):
    return Work(True, tokens, tokens * (before + tokens / 2), 0)


# By hand


def test_one_request_takes_its_steps():
    rows, _, end = serve(spec(1), opened((1.0, call(1, 128, 3))), [0])
    first = TIMES.seconds([prefill(128)])
    rest = sum(TIMES.seconds([Work(False, 1, 0.0, 129 + i)]) for i in range(2))
    row = rows[1]
    assert (row.at, row.rank, row.cached_tokens, row.error) == (1.0, 0, 0, "")
    assert row.ttft_ms == ms(first)
    assert row.e2e_ms == ms(first + rest)
    assert end == pytest.approx(1.0 + first + rest)


def test_a_prompt_in_chunks_takes_the_sum_of_its_steps():
    rows, _, _ = serve(spec(1), opened((0.0, call(1, 2500, 1))), [0])
    chunks = [prefill(1024), prefill(1024, 1024), prefill(452, 2048)]
    assert rows[1].ttft_ms == ms(sum(TIMES.seconds([work]) for work in chunks))
    assert rows[1].e2e_ms == rows[1].ttft_ms


def test_what_is_cached_is_not_computed_again():
    again = call(2, 256, 1, pages=[1, 2, 3, 9])
    rows, _, _ = serve(spec(1), opened((0.0, (call(1, 256, 1, pages=[1, 2, 3, 4]), again))), [0])
    assert rows[2].cached_tokens == 192
    assert rows[2].ttft_ms == ms(TIMES.seconds([prefill(64, 192)]))
    assert rows[2].ttft_ms < rows[1].ttft_ms


def test_an_arrival_waits_for_the_step_under_way():
    first = TIMES.seconds([prefill(128)])
    decode = [TIMES.seconds([Work(False, 1, 0.0, 129 + i)]) for i in range(200)]
    # In the middle of the 101st decode step.
    at = first + sum(decode[:100]) + decode[100] / 2
    rows, _, _ = serve(spec(1), opened((0.0, call(1, 128, 200)), (at, call(2, 128, 1))), [0])
    wait = first + sum(decode[:101]) - at
    assert rows[2].ttft_ms == ms(wait + TIMES.seconds([prefill(128)]))


def test_a_rank_without_work_is_idle_half_of_the_time():
    _, cluster, _ = serve(spec(2), opened((3.0, call(1, 500, 20))), [0])
    assert cluster.idle_share == pytest.approx(0.5)


def test_plain_dp_is_idle_as_long_as_the_other_works():
    rows, cluster, _ = serve(
        spec(2, lockstep=False),
        opened((0.0, call(1, 1000, 1)), (0.0, call(2, 100, 1)), (9.0, call(3, 1000, 1))),
        {1: 0, 2: 1, 3: 1},
    )
    long, short = rows[1].e2e_ms, rows[2].e2e_ms
    assert rows[3].e2e_ms == pytest.approx(long)
    worked, busy = long + short + long, long + long
    assert cluster.idle_share == pytest.approx(1 - worked / (2 * busy))


def test_ranks_that_do_the_same_are_never_idle():
    calls = [(0.0, call(i, 1024, 30)) for i in range(4)]
    _, cluster, _ = serve(spec(4, lockstep=False), opened(*calls), [0, 1, 2, 3])
    assert cluster.idle_share == pytest.approx(0.0, abs=1e-9)


# The barrier


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_long_prefill_delays_the_others_decode_only_in_lock_step(lockstep):
    server = spec(2, lockstep=lockstep)
    alone, _, _ = serve(server, opened((0.0, call(1, 128, 50))), {1: 1})
    beside, _, _ = serve(
        server, opened((0.0, call(1, 128, 50)), (0.1, call(2, 8192, 1))), {1: 1, 2: 0}
    )
    slower = beside[1].e2e_ms - alone[1].e2e_ms
    assert (slower > 200) if lockstep else (slower == pytest.approx(0, abs=1e-6))
    assert beside[1].ttft_ms == pytest.approx(alone[1].ttft_ms)


def test_in_lock_step_decode_goes_on_in_a_slow_step():
    """SGLang runs both in one step: the decoding rank gets a token out of each of them."""
    rows, _, _ = serve(
        spec(2), opened((0.0, call(1, 128, 9)), (0.001, call(2, 8 * 1024, 1))), {1: 1, 2: 0}
    )
    # Eight chunks, eight tokens: the answer ends with the prompt.
    one, two = rows[1], rows[2]
    assert one.at + one.e2e_ms / 1e3 == pytest.approx(two.at + two.e2e_ms / 1e3)


# Jumps


def random_calls(seed, count=60):
    rng = random.Random(seed)
    for number in range(count):
        group, tokens = rng.randrange(6), rng.randrange(1, 40)
        head = rng.randrange(0, tokens + 1)
        tail = range((number + 10) << 20, ((number + 10) << 20) + tokens - head)
        pages = (*range(group << 10, (group << 10) + head), *tail)
        prompt = tokens * PAGE - rng.randrange(PAGE if tail else 1)
        yield call(
            number, prompt, rng.choice([1, 2, 20, 300]), pages=pages, key=f"k{group}", session=group
        )


def random_source(seed, slots=12):
    return closed(random_calls(seed), slots)


def alike_source(seed):
    """Requests of one length: every rank's batch grows at the same rate."""
    return closed([call(i, 512, 64) for i in range(64)], 8)


def open_source(seed):
    rng, at, timed = random.Random(seed), 0.0, []
    for each in random_calls(seed):
        at += rng.expovariate(12.0)
        timed.append((at, each))
    return opened(*timed)


def both_ways(monkeypatch, make, arm, server, seed=1):
    """Outcomes with jumps and step by step."""
    jumped = simulate(Made(make), make_arm(arm), seed, server)
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "_jump", StepByStep._jump)
        stepped = simulate(Made(make), make_arm(arm), seed, server)
    return jumped, stepped


def check_alike(jumped, stepped, rel):
    exact = [(r.id, r.rank, r.cached_tokens, r.reason, r.preferred, r.error) for r in stepped.rows]
    assert exact == [
        (r.id, r.rank, r.cached_tokens, r.reason, r.preferred, r.error) for r in jumped.rows
    ]
    for one, other in zip(jumped.rows, stepped.rows, strict=True):
        assert one.at == pytest.approx(other.at, rel=rel, abs=1e-9)
        assert one.ttft_ms == pytest.approx(other.ttft_ms, rel=rel)
        assert one.e2e_ms == pytest.approx(other.e2e_ms, rel=rel)
    assert jumped.idle_share == pytest.approx(stepped.idle_share, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("arm", ["round_robin", "prefix_affinity", "key_mod"])
def test_jumps_change_nothing_if_batches_grow_alike(monkeypatch, arm, lockstep):
    check_alike(*both_ways(monkeypatch, alike_source, arm, spec(2, lockstep)), rel=1e-6)


@pytest.mark.parametrize("make", [random_source, open_source])
@pytest.mark.parametrize("arm", ["round_robin", "prefix_affinity", "total_tokens", "oracle"])
def test_jumps_change_nothing_in_plain_dp(monkeypatch, make, arm):
    check_alike(*both_ways(monkeypatch, make, arm, spec(4, lockstep=False)), rel=1e-6)


@pytest.mark.parametrize("make", [random_source, open_source])
@pytest.mark.parametrize("arm", ["round_robin", "prefix_affinity", "total_tokens", "oracle"])
def test_jumps_change_nothing_in_lock_step(monkeypatch, make, arm):
    check_alike(*both_ways(monkeypatch, make, arm, spec(4)), rel=1e-6)


@pytest.mark.parametrize("arm", ["round_robin", "prefix_affinity", "total_requests"])
def test_without_a_price_of_context_jumps_change_nothing(monkeypatch, arm):
    server = spec(4, steps=StepParams(context_ns=0.0))
    check_alike(*both_ways(monkeypatch, random_source, arm, server), rel=1e-6)


@pytest.mark.parametrize("arm", ["round_robin", "prefix_affinity", "total_requests"])
def test_jumps_change_nothing_where_caches_are_too_small(monkeypatch, arm):
    """Leaves are evicted whole: chunks must be nodes of their own with jumps as without."""
    server = spec(3, cache_tokens=16 * PAGE * 12, chunk_tokens=PAGE * 2)

    def long_source(seed):
        rng = random.Random(seed)
        calls = []
        for i in range(60):
            size, group = rng.randint(10, 60), rng.randrange(4)
            pages = [*range(group << 30, (group << 30) + 8), *range(i << 20, (i << 20) + size)]
            calls.append(call(i, PAGE * len(pages), 8, pages=pages))
        return closed(calls, 9)

    jumped, stepped = both_ways(monkeypatch, long_source, arm, server)
    assert sum(row.cached_tokens for row in stepped.rows) > 0
    check_alike(jumped, stepped, rel=1e-6)


def test_a_request_that_comes_as_the_start_stall_ends_is_served_once():
    server = msgspec.structs.replace(spec(2), stall_seconds=1.0)
    source = opened((0.5, call(1, 128, 8)), (1.0, call(2, 128, 8)), (1.0, call(3, 128, 8)))
    rows, _, _ = serve(server, source, [0, 0, 1])
    assert sorted(rows) == [1, 2, 3]
    assert all(row.at + row.ttft_ms / 1e3 > 1.0 for row in rows.values())


def test_an_arrival_elsewhere_adds_no_chunk_to_a_long_prompt():
    """A jump over chunks that an arrival cuts short goes on where it was."""
    found = []
    for make in (Cluster, StepByStep):
        source = opened((0.0, call(1, 8192, 1)), (0.2, call(2, 128, 1)))
        rows, _, _ = serve(spec(2), source, {1: 0, 2: 1}, make)
        found.append([rows[1].ttft_ms, rows[2].ttft_ms])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_jump_knows_which_rank_s_context_is_the_longest():
    """One long context that grows slowly is passed by many short ones that grow fast."""
    found = []
    for make in (Cluster, StepByStep):
        calls = [(0.0, call(0, 2048, 400)), *((0.0, call(i, 64, 400)) for i in range(1, 17))]
        ranks = {0: 0} | dict.fromkeys(range(1, 17), 1)
        rows, _, _ = serve(spec(2), opened(*calls), ranks, make)
        found.append([row.e2e_ms for row in rows.values()])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


# The same again

SCRIPT = """
import sys, msgspec
from bench.arms import make_arm
from bench.model.server import ServerSpec
from bench.model.simulate import simulate
from tests.bench.test_model_cluster import Made, random_source
for arm in ("round_robin", "prefix_affinity", "lmetric", "chbl", "first_tokens_mod"):
    outcome = simulate(Made(random_source), make_arm(arm), 7, ServerSpec(ranks=4))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
"""


def test_the_same_seed_gives_the_same_bytes_in_every_process():
    def run(hash_seed):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, check=True, timeout=120
        )
        return done.stdout

    first = run("0")
    assert len(first) > 10_000
    assert first == run("12345")
    here = [
        msgspec.json.encode(simulate(Made(random_source), make_arm(arm), 7, ServerSpec(ranks=4)))
        for arm in ("round_robin", "prefix_affinity", "lmetric", "chbl", "first_tokens_mod")
    ]
    assert b"".join(here) == first


# Closed-form figures: 16 groups x 32 prompts of 4,096 shared + 128 own tokens, shuffled

GROUPS, PROMPTS, SHARED, OWN = 16, 32, 4096, 128


def published(seed, slots=64):
    order = [(g, p) for g in range(GROUPS) for p in range(PROMPTS)]
    random.Random(seed).shuffle(order)
    calls = []
    for group, number in order:
        own = (1000 + group * PROMPTS + number) << 20
        pages = [*range(group << 20, (group << 20) + SHARED // PAGE), own, own + 1]
        calls.append(
            call(group * 1000 + number, SHARED + OWN, 256, pages=pages, key=f"{seed}-{group}")
        )
    return closed(calls, slots)


def first_meetings(rows):
    return len({(row.id // 1000, row.rank) for row in rows})


@pytest.mark.parametrize("seed", range(4))
def test_round_robin_reuses_what_arithmetic_says(seed):
    """Every group meets every rank once cold: 512 x 128 own tokens and 127.x shared prompts."""
    outcome = simulate(Made(published), make_arm("round_robin"), seed, ServerSpec())
    cold = [row for row in outcome.rows if row.cached_tokens == 0]
    partly = [row for row in outcome.rows if 0 < row.cached_tokens < SHARED]
    met = first_meetings(outcome.rows)
    assert 120 <= met <= 128
    # More than a first meeting is cold (or warm in part) only while the first is in prefill.
    assert met <= len(cold) + len(partly) <= met + 16
    uncached = len(outcome.rows) * OWN + met * SHARED
    expected = 1 - uncached / (len(outcome.rows) * (SHARED + OWN))
    reuse = summarize(outcome)["reuse"]
    assert reuse == pytest.approx(expected, abs=0.006)
    assert reuse <= expected + 1e-9
    assert reuse == pytest.approx(0.729, abs=0.006)


@pytest.mark.parametrize("seed", range(2))
def test_one_at_a_time_only_first_meetings_are_cold(seed):
    def make(seed):
        return published(seed, slots=1)

    outcome = simulate(Made(make), make_arm("round_robin"), seed, ServerSpec())
    met = first_meetings(outcome.rows)
    assert sorted({row.cached_tokens for row in outcome.rows}) == [0, SHARED]
    assert sum(row.cached_tokens == 0 for row in outcome.rows) == met
    assert summarize(outcome)["reuse"] == pytest.approx(
        1 - (512 * OWN + met * SHARED) / (512 * (SHARED + OWN))
    )


def test_by_key_each_group_is_cold_once_if_one_comes_at_a_time():
    outcome = simulate(
        Made(lambda seed: published(seed, slots=1)), make_arm("key_mod"), 0, ServerSpec()
    )
    assert sum(row.cached_tokens == 0 for row in outcome.rows) == GROUPS


# Snapshots


class Noting(StepByStep):
    """Notes every snapshot: rank, time, requests that run and wait."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.noted = []

    def _publish(self, rank, at, *args, **more):
        super()._publish(rank, at, *args, **more)
        load = self.snapshots[rank].load
        self.noted.append((rank, at, load.running, load.waiting))


def steps_of(output):
    """Ends of the prefill and of each decode step of one request of 128 tokens."""
    ends = [TIMES.seconds([prefill(128), None])]
    for i in range(output - 1):
        ends.append(ends[-1] + TIMES.seconds([Work(False, 1, 0.0, 129 + i), None]))
    return ends


def test_a_rank_publishes_at_a_prefill_each_15_decode_steps_and_when_idle():
    _, cluster, end = serve(spec(2), opened((0.0, call(1, 128, 41))), [0], Noting)
    ends = steps_of(41)
    mine = [note for note in cluster.noted if note[0] == 0]
    assert [at for _, at, _, _ in mine] == pytest.approx([ends[0], ends[15], ends[30], end])
    # A prefill has joined those that run; a request that ends with a step is still in its snapshot.
    assert [note[2:] for note in mine] == [(1, 0), (1, 0), (1, 0), (0, 0)]


def test_an_idle_rank_among_busy_ones_publishes_each_15_steps():
    _, cluster, end = serve(spec(2), opened((0.0, call(1, 128, 41))), [0], Noting)
    ends = steps_of(41)
    others = [at for rank, at, _, _ in cluster.noted if rank == 1]
    # The prefill of its peer is a step to it like any other.
    assert others == pytest.approx([ends[14], ends[29], end])


def test_an_idle_rank_in_plain_dp_publishes_nothing():
    _, cluster, _ = serve(spec(2, lockstep=False), opened((0.0, call(1, 128, 41))), [0], Noting)
    assert {rank for rank, *_ in cluster.noted} == {0}


class Watching(Fixed):
    """Sees the newest snapshots whenever it is asked."""

    def __init__(self, ranks):
        super().__init__(ranks)
        self.saw = []

    def choose(self, call, now):
        self.saw.append(list(self.cluster.snapshots))
        return super().choose(call, now)


@pytest.mark.parametrize("seed", range(3))
def test_who_dispatches_sees_the_same_snapshots_without_jumps(seed):
    seen = []
    for make in (Cluster, StepByStep):
        watching = Watching([0, 1, 2])
        watching.cluster = make(spec(3, steps=StepParams(context_ns=0.0)))
        watching.cluster.run(open_source(seed), watching)
        seen.append(watching.saw)
    for jumped, stepped in zip(*seen, strict=True):
        assert [s.load for s in jumped] == [s.load for s in stepped]
        assert [s.received_tokens for s in jumped] == [s.received_tokens for s in stepped]
        # Within a jump the time of a snapshot is interpolated; it only tells old from new.
        assert [s.at for s in jumped] == pytest.approx([s.at for s in stepped], abs=2e-3)


# Nobody is forgotten


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("make", [random_source, open_source, alike_source])
def test_each_call_is_one_row_and_is_answered_once(make, lockstep):
    source = make(3)
    rows, cluster, end = serve(spec(3, lockstep, cache_tokens=4096), source, [0, 1, 2])
    assert sorted(rows) == sorted(each.id for each in source.given)
    assert sorted(number for number, _ in source.heard) == sorted(rows)
    assert [at for _, at in source.heard] == sorted(at for _, at in source.heard)
    assert end == source.heard[-1][1]
    for number, at in source.heard:
        row = rows[number]
        assert 0 < row.ttft_ms <= row.e2e_ms
        assert row.at + row.e2e_ms / 1e3 == pytest.approx(at)
        assert row.output_tokens == 1 or row.ttft_ms < row.e2e_ms
    for rank in cluster.ranks:
        assert (rank.requests, rank.cache.pinned) == (0, 0)
    assert all(cluster.outstanding(rank) == 0 for rank in range(3))
    assert 0 <= cluster.idle_share < 1
    sampled = [sample.at for sample in cluster.samples]
    assert sampled == sorted(sampled)


calls = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 5000), st.integers(1, 60), st.integers(0, 2)),
    min_size=1,
    max_size=20,
)


@given(timed=calls, lockstep=st.booleans(), cache=st.sampled_from([4096, 6400, 100_000]))
@settings(max_examples=60)
def test_any_calls_are_answered(timed, lockstep, cache):
    source = opened(
        *sorted(
            (
                (at / 8, call(number, prompt, output))
                for number, (at, prompt, output, _) in enumerate(timed)
            ),
            key=lambda pair: pair[0],
        )
    )
    ranks = {number: rank for number, (*_, rank) in enumerate(timed)}
    rows, _, _ = serve(spec(3, lockstep, cache_tokens=cache), source, ranks)
    assert sorted(rows) == list(range(len(timed)))
    for row in rows.values():
        assert bool(row.error) == (row.prompt_tokens + row.output_tokens > cache)
        assert row.error or 0 < row.ttft_ms <= row.e2e_ms


def test_a_request_longer_than_the_cache_is_an_error_and_the_run_goes_on():
    long, after = call(1, 5000, 10), call(2, 100, 10)
    rows, _, _ = serve(spec(2, cache_tokens=4096), opened((1.0, (long, after))), [0, 1])
    assert "KV cache" in rows[1].error
    assert rows[1].rank == -1
    assert not rows[2].error
    assert rows[2].at == 1.0
    assert rows[2].e2e_ms > 0


@pytest.mark.parametrize("cache", [64, 100, 4096, 4100])
def test_a_request_that_just_fits_the_cache_is_answered_or_an_error(cache):
    rows, _, _ = serve(spec(1, cache_tokens=cache), opened((0.0, call(1, cache - 8, 8))), [0])
    assert rows[1].error or rows[1].e2e_ms > 0


def test_a_source_without_calls_ends_at_once():
    for source in (opened(), closed([], 4)):
        rows, cluster, end = serve(spec(2), source, [0])
        assert (rows, end, cluster.idle_share) == ({}, 0.0, None)
    outcome = simulate(Made(lambda seed: opened()), make_arm("round_robin"), 0, ServerSpec())
    assert (outcome.rows, outcome.seconds) == ([], 0.0)
    assert summarize(outcome)["requests"] == 0


def test_two_at_the_same_instant_are_both_served():
    rows, _, _ = serve(spec(1), opened((2.0, call(1)), (2.0, call(2))), [0])
    assert [row.at for row in rows.values()] == [2.0, 2.0]
    # The scheduler began with the first; the second is in the next step.
    assert rows[1].ttft_ms == ms(TIMES.seconds([prefill(128)]))
    assert rows[2].ttft_ms == ms(2 * TIMES.seconds([prefill(128)]))


def test_an_open_loop_keeps_its_times_however_slow_the_server_is():
    at = [0.0, 0.01, 0.02, 5.0]
    timed = [(time, call(i, 8000, 100)) for i, time in enumerate(at)]
    rows, _, _ = serve(spec(1), opened(*timed), [0])
    assert [rows[i].at for i in range(4)] == at


def test_a_closed_loop_sends_when_an_answer_is_there():
    rows, cluster, _ = serve(spec(2), closed([call(i) for i in range(6)], 2), [0, 1])
    ends = sorted(row.at + row.e2e_ms / 1e3 for row in cluster.rows)
    begins = sorted(row.at for row in cluster.rows)
    assert begins == pytest.approx([0.0, 0.0, *ends[:4]])
    assert len(rows) == 6


def test_the_run_s_seconds_are_from_the_first_request_to_the_last_answer():
    outcome = simulate(
        Made(lambda seed: opened((5.0, call(1)), (6.0, call(2)))),
        make_arm("round_robin"),
        0,
        ServerSpec(ranks=2),
    )
    last = max(row.at + row.e2e_ms / 1e3 for row in outcome.rows)
    assert outcome.seconds == pytest.approx(last - 5.0)
    assert (outcome.kind, outcome.ranks, outcome.seed) == ("virtual", 2, 0)
