"""What SGLang publishes, made into load reports: decode, the grace, restarts, both sources."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.budget import Budget, Instance
from sidecar.dispatcher import Dispatcher
from sidecar.errors import PeerError
from sidecar.loads import is_published
from sidecar.published.history import SLOTS, SentHistory
from sidecar.published.reports import OUTCOMES, Published
from sidecar.published.settings import Publisher
from sidecar.published.stat import CAUSES, decode
from sidecar.wire import Query, RequestFacts
from tests.support import (
    INSTANCE,
    STALE_SECONDS,
    Server,
    in_flight,
    keyed,
    keyless,
    make_dispatcher,
    query,
    report,
)
from tests.test_policies import LOAD_AWARE

GRACE = 0.25  # not the default, which tests of time need not know
STARTED = 10**18
# As SGLang 0.5.19 and 0.5.23 encode them; tests/contract/test_published.py asks the real ones.
STAT_0_5_19 = ["LoadStat", 3, 2, 1000, 50_000, 5]
STAT_0_5_23 = [*STAT_0_5_19, 700, 1900, 256, 123_456, 987_654]


def message(stat: object, seq: int = 0) -> list[bytes]:
    return [b"load", seq.to_bytes(8, "big"), msgspec.msgpack.encode(stat)]


class Ranks:
    """A dispatcher that is told loads by publishers alone, and its server in miniature."""

    def __init__(self, ranks: int = 8, policy: str = "total_requests", grace: float = GRACE):
        self.dispatcher: Dispatcher = make_dispatcher(policy)
        self.server = Server(ranks=ranks, epoch=STARTED)
        self.publishers = [Publisher(INSTANCE, rank, f"ipc:///tmp/{rank}") for rank in range(ranks)]
        self.errors: list[Exception] = []
        self.published = Published(
            self.publishers,
            grace,
            lambda: self.dispatcher.budget,
            deliver=self.dispatcher.report,
            refused=self.errors.append,
        )
        self._seq = [0] * ranks

    def ask(self, requests: Sequence[RequestFacts], now: float) -> list[int]:
        """Ask for ranks and send the requests there."""
        told = self.server.query(requests)
        reply = self.dispatcher.handle(told, now)
        self.published.sent(told, self.dispatcher.active.here, now)
        for rank, facts in zip(reply.ranks, requests, strict=True):
            self.server.send(rank, facts.tokens)
        return reply.ranks

    def publish(self, rank: int, now: float, running: int = 0, waiting: int = 0) -> None:
        stat = ["LoadStat", running, waiting, 0, 0, rank]
        self.take(rank, message(stat, self._seq[rank]), now)
        self._seq[rank] += 1

    def publish_all(self, now: float) -> None:
        for rank in range(len(self.publishers)):
            self.publish(rank, now)

    def restart(self, rank: int) -> None:
        self._seq[rank] = 0

    def take(self, rank: int, frames: Sequence[bytes], now: float) -> None:
        self.published.take(self.publishers[rank], frames, 0, now)

    @property
    def instance(self) -> Instance:
        return self.dispatcher.budget.instances[INSTANCE]

    def in_flight(self) -> list[int]:
        return in_flight(self.instance)

    def outcomes(self) -> dict[str, int]:
        return {name: self.published.outcomes[INSTANCE, name] for name in OUTCOMES}


@pytest.mark.parametrize("stat", [STAT_0_5_19, STAT_0_5_23, [*STAT_0_5_23, "of a newer SGLang"]])
def test_every_shape_of_the_stat_is_read(stat: list[Any]) -> None:
    seq, read = decode(message(stat, 7))
    newer = len(stat) > len(STAT_0_5_19)
    assert (seq, read.running, read.waiting) == (7, 3, 2)
    assert (read.used_tokens, read.capacity_tokens, read.dp_rank) == (1000, 50_000, 5)
    assert (read.waiting_uncached_tokens, read.total_tokens) == ((700, 1900) if newer else (0, 0))
    assert read.max_running == (256 if newer else 0)


def test_a_stat_becomes_the_report_of_its_rank() -> None:
    ranks = Ranks()
    for stat, tokens in ((STAT_0_5_19, 1000), (STAT_0_5_23, 1900)):
        ranks.take(5, message(stat), 1.0)
        told = ranks.instance.states[5].report
        assert told is not None
        assert (told.running, told.waiting, told.tokens) == (3, 2, tokens)
        assert (told.capacity_tokens, told.rank, told.instance) == (50_000, 5, INSTANCE)
        assert is_published(told)
        assert ranks.instance.states[5].source == "published"


WRONG: list[tuple[str, Sequence[bytes]]] = [
    ("frames", []),
    ("frames", [b"load"]),
    ("frames", [b"load", bytes(8)]),
    ("frames", [*message(STAT_0_5_23), b""]),
    ("frames", [b"loads", *message(STAT_0_5_23)[1:]]),
    ("frames", [b"load", bytes(7), message(STAT_0_5_23)[2]]),
    ("malformed", [b"load", bytes(8), b""]),
    ("malformed", [b"load", bytes(8), b"\xc1"]),
    ("field", [b"load", bytes(8), b"\x91" * 4000]),
    ("malformed", [b"load", bytes(8), message(STAT_0_5_23)[2] + b"x"]),
    ("malformed", [b"load", bytes(8), b"\x96\xa8LoadSta\xff\x01\x01\x01\x01\x01"]),
    ("field", message(STAT_0_5_23[:4])),
    ("field", message(["secret", 1, 2, 3, 4])),
    ("field", message(["LoadStat", -1, 2, 3, 4])),
    ("field", message(["LoadStat", 1, 2, 3, 1 << 63])),
    ("field", message(["LoadStat", 1, 2.5, 3, 4])),
    ("field", message(["LoadStat", 1, 2, None, 4])),
    ("field", message(["LoadStat", 1, 2, 3, 4, 1 << 20])),
    ("field", message({"num_running_reqs": 1})),
    ("rank", message(["LoadStat", 1, 2, 3, 4, 6])),
]


@pytest.mark.parametrize(("cause", "frames"), WRONG)
def test_what_is_no_stat_is_refused_and_counted(cause: str, frames: Sequence[bytes]) -> None:
    ranks = Ranks()
    ranks.publish(5, 0.0, running=4)
    ranks.take(5, frames, 1.0)
    (error,) = ranks.errors
    assert isinstance(error, PeerError)
    assert error.cause == cause
    assert cause in CAUSES
    assert "secret" not in str(error)
    assert ranks.outcomes() == {"taken": 1, "superseded": 0, "hook": 0, "refused": 1}
    told = ranks.instance.states[5].report
    assert told is not None
    assert told.running == 4


@given(st.lists(st.binary(max_size=64), max_size=5), st.binary(max_size=200))
def test_no_bytes_get_out_of_it(frames: list[bytes], stat: bytes) -> None:
    ranks = Ranks()
    ranks.take(0, frames, 0.0)
    ranks.take(0, [b"load", bytes(8), stat], 0.0)
    assert all(isinstance(error, PeerError) for error in ranks.errors)


def test_a_fault_of_ours_is_told_and_contained() -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    errors: list[Exception] = []
    publisher = Publisher(INSTANCE, 0, "ipc:///tmp/0")
    published = Published([publisher], GRACE, lambda: Budget(1.0, 1), fail, errors.append)
    published.take(publisher, message(["LoadStat", 1, 2, 3, 4, 0]), 3, 0.0)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert (
        published.outcomes
        == Counter({(INSTANCE, "superseded"): 3, (INSTANCE, "refused"): 1}) | Counter()
    )
    assert published.outcomes[INSTANCE, "refused"] == 1


@pytest.mark.parametrize("name", [*LOAD_AWARE, "prefix_affinity", "kv_affinity"])
@pytest.mark.parametrize("size", [2, 8, 32])
@pytest.mark.parametrize("batch", [1, 16])
def test_cases_4_5_7_a_burst_spreads(name: str, size: int, batch: int) -> None:
    ranks, counts = Ranks(size, name), Counter[int]()
    ranks.publish_all(0.0)
    steps = 64 // batch
    for step in range(steps):
        # All within the grace; stats of the moment before come after each.
        now = 1.0 + step * (GRACE * 0.9 / steps)
        counts.update(ranks.ask([keyless()] * batch, now))
        ranks.publish_all(now)
    assert max(counts.values()) - min(counts.get(rank, 0) for rank in range(size)) <= 1
    assert sum(counts.values()) == 64
    assert sum(ranks.in_flight()) == 64


def test_what_was_sent_stays_in_flight_for_the_grace_and_no_longer() -> None:
    ranks = Ranks(2)
    ranks.publish_all(0.0)
    ranks.ask([keyless()] * 10, 1.0)
    for late, expected in ((0.0, 10), (0.1, 10), (GRACE - 0.001, 10), (GRACE, 0), (9.0, 0)):
        ranks.publish_all(1.0 + late)
        assert sum(ranks.in_flight()) == expected, late


def test_without_a_new_stat_nothing_is_taken_for_received() -> None:
    ranks = Ranks(2)
    ranks.publish_all(0.0)
    ranks.ask([keyless()] * 10, 0.1)
    ranks.ask([], 3.0)
    assert sum(ranks.in_flight()) == 10


def test_tokens_go_the_same_way() -> None:
    ranks = Ranks(1)
    ranks.publish(0, 0.0)
    ranks.ask([keyless(500)], 1.0)
    ranks.publish(0, 1.1)
    assert ranks.instance.states[0].in_flight() == (1, 500)
    ranks.publish(0, 2.0)
    ranks.ask([], 2.1)
    assert ranks.instance.states[0].in_flight() == (0, 0)
    assert ranks.instance.view.tokens == [0]


@pytest.mark.parametrize("told_before_the_query", [False, True])
def test_what_was_sent_before_we_came_is_not_in_flight(told_before_the_query: bool) -> None:
    ranks = Ranks(2)
    for _ in range(1000):
        ranks.server.send(0)
    if told_before_the_query:
        ranks.publish_all(0.0)
    ranks.ask([], 1.0)
    if told_before_the_query:
        assert ranks.in_flight() == [0, 0]
    ranks.publish_all(1.0)
    assert ranks.in_flight() == [0, 0]
    ranks.ask([keyless()], 1.01)
    ranks.publish_all(1.02)
    assert sum(ranks.in_flight()) == 1


def test_a_controller_that_starts_anew_begins_at_zero() -> None:
    ranks = Ranks(2)
    ranks.publish_all(0.0)
    for step in range(50):
        ranks.ask([keyless()], step)
        ranks.publish_all(step)
    ranks.server.restart_controller(STARTED + 1)
    ranks.server.send(1)  # before its first query
    ranks.ask([], 100.0)
    assert ranks.in_flight() == [0, 0]
    ranks.ask([keyless()] * 4, 100.1)
    ranks.publish_all(100.2)
    assert sum(ranks.in_flight()) == 4
    ranks.publish_all(101.0)
    assert ranks.in_flight() == [0, 0]


def test_a_rank_that_leaves_and_returns_keeps_its_counts() -> None:
    ranks = Ranks(3)
    ranks.publish_all(0.0)
    ranks.ask([keyless()] * 9, 1.0)
    without = query(
        ranks=[0, 2],
        sent=[ranks.server.sent[0], ranks.server.sent[2]],
        sent_tokens=[ranks.server.sent_tokens[0], ranks.server.sent_tokens[2]],
        epoch=STARTED,
    )
    ranks.dispatcher.handle(without, 1.05)
    ranks.published.sent(without, ranks.instance, 1.05)
    ranks.publish_all(1.1)
    assert ranks.in_flight() == [3, 3]
    ranks.ask([], 1.15)
    ranks.publish_all(1.2)
    assert ranks.in_flight()[0] == ranks.in_flight()[2] == 3
    ranks.publish_all(2.0)
    assert ranks.in_flight() == [0, 0, 0]


def test_a_restarted_scheduler_is_accepted_and_its_cache_is_known_to_be_gone() -> None:
    ranks = Ranks(2, "kv_affinity")
    for now in range(5):
        ranks.publish_all(float(now))
    before = ranks.instance.states[1].report
    ranks.restart(1)
    ranks.publish(1, 5.0, running=3)
    after = ranks.instance.states[1].report
    assert before is not None
    assert after is not None
    assert (after.running, after.epoch, ranks.errors) == (3, before.epoch + 1, [])
    memory = ranks.instance.view.memory
    assert memory.rank(1).emptied_at >= 4.0
    assert memory.rank(0).emptied_at == float("-inf")


def test_an_answer_that_came_too_late_is_not_received_either() -> None:
    ranks = Ranks(2)
    ranks.publish_all(0.0)
    reply = ranks.dispatcher.handle(ranks.server.query([keyless()] * 6), 1.0)
    ranks.published.sent(ranks.server.query(), ranks.instance, 1.0)
    for _ in reply.ranks:
        ranks.server.send(0)  # the hook decided by itself
    ranks.ask([], 1.01)
    ranks.publish_all(1.005 + GRACE)  # rank 1 was thought to have been sent three by then
    assert ranks.ask([keyless()] * 2, 1.3) == [1, 1]
    assert ranks.in_flight() == [3, 2]
    ranks.publish_all(1.31)
    assert ranks.in_flight() == [0, 2]
    ranks.publish_all(2.0)
    assert ranks.in_flight() == [0, 0]


class TestBothSources:
    """A rank of which the hook tells, and SGLang too."""

    def test_the_hook_wins_while_it_reports(self) -> None:
        ranks = Ranks(2)
        ranks.ask([], 0.0)
        ranks.dispatcher.report(report(0, running=7, epoch=STARTED), 0.0)
        ranks.publish(0, 0.1, running=1)
        ranks.publish(1, 0.1, running=1)
        assert ranks.instance.view.requests == [7, 1]
        assert [ranks.instance.states[rank].source for rank in (0, 1)] == ["hook", "published"]
        assert ranks.outcomes() == {"taken": 1, "superseded": 0, "hook": 1, "refused": 0}

    def test_a_silent_hook_is_replaced_and_comes_back(self) -> None:
        ranks = Ranks(1)
        ranks.ask([], 0.0)
        ranks.dispatcher.report(report(0, running=7, epoch=STARTED), 0.0)
        late = STALE_SECONDS * 2
        ranks.ask([keyless()] * 3, late)
        ranks.publish(0, late, running=1)
        assert (ranks.instance.states[0].source, ranks.in_flight()) == ("published", [3])
        ranks.publish(0, late + 1, running=1)
        assert ranks.in_flight() == [0]
        back = report(0, 9, running=2, received=2, epoch=STARTED)
        ranks.dispatcher.report(back, late + 1)
        assert (ranks.instance.states[0].source, ranks.in_flight()) == ("hook", [1])
        ranks.publish(0, late + 1, running=5)
        assert ranks.instance.view.requests == [3]

    def test_another_source_is_no_emptied_cache(self) -> None:
        ranks = Ranks(1, "kv_affinity")
        ranks.ask([keyed("session", 1000)], 0.0)
        ranks.dispatcher.report(report(0, epoch=STARTED), 0.0)
        ranks.publish(0, STALE_SECONDS * 2)
        ranks.dispatcher.report(report(0, 5, epoch=STARTED), STALE_SECONDS * 2)
        assert ranks.instance.view.memory.rank(0).emptied_at == float("-inf")


def test_stats_without_cache_figures_do_not_cost_the_index_its_credit() -> None:
    ranks = Ranks(1, "kv_affinity")
    prompt = RequestFacts(b"s", 0, 64 * 32, None, list(range(1, 33)))
    for now in range(400):
        ranks.ask([prompt], float(now))
        ranks.publish(0, now + 0.5)
    memory = ranks.instance.view.memory
    assert memory.rank(0).engine.credit == 1.0
    assert memory.rate.value == 0.0


def test_a_silent_publisher_is_stale_like_a_silent_hook() -> None:
    ranks = Ranks(2)
    ranks.ask([], 0.0)
    ranks.publish_all(0.0)
    for step in range(1, 6):
        ranks.publish(0, step * STALE_SECONDS / 4)
    ranks.ask([], STALE_SECONDS * 1.25)
    assert ranks.instance.view.usable == [True, False]


class TestHistory:
    """Memory and order of what was sent lately."""

    def note(self, history: SentHistory, sent: int, now: float, **changes: Any) -> None:
        asked: Query = query(ranks=[0], sent=[0], **changes)
        history.note(asked, [sent], [sent * 10], now)

    def test_nothing_is_known_of_a_rank_that_nobody_called_live(self) -> None:
        history = SentHistory(GRACE)
        assert history.before(0, 1.0) is None
        self.note(history, 1, 0.0)
        assert history.before(1, 1.0) is None

    @given(
        st.lists(st.floats(0, 0.3), min_size=1, max_size=120),
        st.sampled_from([0.0, 0.01, GRACE, 5.0]),
        st.floats(0, 6),
    )
    def test_it_is_what_was_sent_a_grace_ago_or_an_eighth_of_it_before(
        self, gaps: list[float], grace: float, later: float
    ) -> None:
        history, now, times = SentHistory(grace), 0.0, []
        for gap in gaps:
            now += gap
            times.append(now)
            self.note(history, len(times), now)
            assert len(history) <= 2 * SLOTS + 3
        found = history.before(0, now + later)
        assert found is not None
        until = now + later - grace
        slot = grace / SLOTS
        most = sum(at <= until for at in times)
        least = sum(at <= until - slot * 1.000001 - 1e-9 for at in times)
        assert least <= found[0] <= most
        assert found[1] == found[0] * 10

    def test_it_never_grows(self) -> None:
        history = SentHistory(5.0)
        for step in range(20_000):
            self.note(history, step, step * 0.001)
        assert len(history) <= 2 * SLOTS + 3


Step = Callable[[Ranks, float], object]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "publish", "explicit", "controller", "scheduler"]),
            st.integers(0, 3),
            st.floats(0, 0.4),
        ),
        max_size=60,
    )
)
def test_never_negative_and_zero_at_the_end(steps: list[tuple[str, int, float]]) -> None:
    ranks, now = Ranks(4), 0.0
    for kind, rank, gap in steps:
        now += gap
        if kind == "ask":
            ranks.ask([keyless()] * (rank + 1), now)
        elif kind == "publish":
            ranks.publish(rank, now)
        elif kind == "explicit":
            ranks.server.send(rank)
        elif kind == "controller":
            ranks.server.restart_controller(ranks.server.epoch + 1)
        else:
            ranks.restart(rank)
        if INSTANCE in ranks.dispatcher.budget.instances:
            assert min([0, *ranks.in_flight()]) == 0
    ranks.ask([], now)
    ranks.publish_all(now + GRACE * 1.01)
    assert ranks.in_flight() == [0, 0, 0, 0]
    view = ranks.instance.view
    assert (view.requests, view.total, view.in_flight) == ([0] * 4, 0, [0] * 4)
