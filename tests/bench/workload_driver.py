"""A server without limits on which tests play workloads, and checks that hold for all of them."""

import heapq
from collections.abc import Callable

import msgspec

from bench.workloads import Call, Source, Workload


class Sent(msgspec.Struct):
    """A call and when it was sent and done."""

    call: Call
    at: float
    done: float


def play(
    workload: Workload, seed: int = 0, service: Callable[[Call], float] = lambda _: 1.0
) -> list[Sent]:
    """All calls in the order of sending; service: seconds that a call takes."""
    return play_source(workload.make(seed), service)


def play_source(source: Source, service: Callable[[Call], float] = lambda _: 1.0) -> list[Sent]:
    due = [(at, False, call.id, call) for at, call in source.start()]
    assert [each[0] for each in due] == sorted(each[0] for each in due)
    heapq.heapify(due)
    sent: list[Sent] = []
    while due:
        now, over, _, call = heapq.heappop(due)
        if over:
            for at, following in source.done(call, now):
                assert at >= now
                heapq.heappush(due, (at, False, following.id, following))
        else:
            sent.append(Sent(call, now, now + service(call)))
            heapq.heappush(due, (sent[-1].done, True, call.id, call))
    check(sent)
    return sent


def check(sent: list[Sent]) -> None:
    """What every workload keeps to."""
    assert len({each.call.id for each in sent}) == len(sent)
    assert len({(each.call.session, each.call.turn) for each in sent}) == len(sent)
    for each in sent:
        assert each.call.output_tokens >= 1


def check_lengths(sent: list[Sent], page: int) -> None:
    for each in sent:
        assert len(each.call.pages) == -(-each.call.prompt_tokens // page)
        assert len(set(each.call.pages)) == len(each.call.pages)


def shared(a: Call, b: Call) -> int:
    """Pages at the beginning that two prompts have in common; none after that may be."""
    common = 0
    for mine, theirs in zip(a.pages, b.pages, strict=False):
        if mine != theirs:
            break
        common += 1
    assert not set(a.pages[common:]) & set(b.pages[common:])
    return common


def by_session(sent: list[Sent]) -> dict[int, list[Sent]]:
    found: dict[int, list[Sent]] = {}
    for each in sent:
        found.setdefault(each.call.session, []).append(each)
    return found


def most_active(sent: list[Sent]) -> int:
    """The greatest number of sessions between their first and last call."""
    spans = [
        (min(s.at for s in each), max(s.done for s in each)) for each in by_session(sent).values()
    ]
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    active = most = 0
    for _, change in edges:
        active += change
        most = max(most, active)
    return most
