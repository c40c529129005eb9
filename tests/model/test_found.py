"""What the model found, each as a test of its own."""

from sglang_hook.controller import Chooser
from sidecar import wire
from sidecar.budget import Instance
from sidecar.wire import Query, Reply, Want
from tests.support import INSTANCE, STALE_SECONDS, in_flight, make_dispatcher, query, report

CONTROLLER, SCHEDULER, NEXT = 1 * 10**9, 2 * 10**9, 30 * 10**9
"""Epochs."""


def test_a_controller_restarted_alone_before_it_asked_a_new_sidecar_twice() -> None:
    """Not a start of the whole server: the scheduler was there before, and had received much."""
    instance = Instance("i", STALE_SECONDS)

    def ask(epoch: int, sent: int, now: float) -> None:
        instance.apply_query(query(ranks=[0], sent=[sent], epoch=epoch, sent_tokens=[0]), now)

    ask(CONTROLLER, 100, 1.0)
    instance.apply_report(report(0, 1, received=100, epoch=SCHEDULER), 1.1)
    ask(NEXT, 0, 2.0)
    instance.apply_report(report(0, 2, received=100, epoch=SCHEDULER), 2.1)
    ask(NEXT, 5, 2.2)
    assert in_flight(instance) == [5]


def test_a_late_answer_says_nothing_of_what_a_younger_query_tells() -> None:
    """The client looks for late answers when the next query is made, and not sent yet."""
    chooser = Chooser("i", 5, {"hook": "1"}, lambda: [0, 1], 10)

    def answer(seq: int, boot: int) -> None:
        chooser.heard(Reply(1, seq, boot, "test", 1, [], [], Want()))

    def told() -> Query:
        return wire.decode_query(chooser._query([], [0, 1]))

    answer(told().seq, boot=1)
    late = told()
    answer(late.seq, boot=2)  # a new sidecar, which that query told no news
    chooser.bypass("deadline")
    lost = told()
    assert lost.about and lost.bypassed
    answer(late.seq, boot=2)
    again = told()
    assert (again.about, again.bypassed) == ({"hook": "1"}, {"deadline": 1})
    answer(again.seq, boot=2)
    assert told().about is None


def test_a_query_made_before_its_sidecar_was_heard_of_did_not_tell_it_everything() -> None:
    chooser = Chooser("i", 5, {"hook": "1"}, lambda: [0, 1], 10)

    def made_query() -> Query:
        return wire.decode_query(chooser._query([], [0, 1]))

    def answer(seq: int, boot: int) -> None:
        chooser.heard(Reply(1, seq, boot, "test", 1, [], [], Want()))

    answer(made_query().seq, boot=1)
    late, made = made_query(), made_query()
    assert made.about is None
    answer(late.seq, boot=2)  # a new sidecar; then `made` is sent, and answered by it
    answer(made.seq, boot=2)
    assert made_query().about == {"hook": "1"}


def test_a_late_query_takes_no_counters_back() -> None:
    dispatcher = make_dispatcher()
    dispatcher.handle(query(seq=2, bypassed={"deadline": 2}), 1.0)
    dispatcher.handle(query(seq=1, bypassed={"deadline": 1}), 1.1)
    assert dispatcher.tallies[INSTANCE].bypassed == {"deadline": 2}
    dispatcher.handle(query(seq=1, epoch=2, bypassed={"deadline": 1}), 1.2)
    assert dispatcher.tallies[INSTANCE].bypassed == {"deadline": 1}
