"""A process in the sidecar's place that answers wrongly: `python -m bench.chaos.impostor HOW PATH`.

It says so on standard output when it listens, and throws load reports away.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from sidecar import wire

HUGE = 100 << 20
LATE_SECONDS = 0.008
"""Beyond the deadline of 5 ms."""

Answer = tuple[float, bytes]
"""Seconds to wait before it goes out, and what."""
Way = Callable[[wire.Query, deque[bytes]], list[Answer]]


def right(query: wire.Query) -> wire.Reply:
    """What the simplest sidecar might answer: where it went before."""
    turn = query.ranks[query.seq % len(query.ranks)]
    ranks = [one.last_rank if one.last_rank >= 0 else turn for one in query.requests]
    reasons = ["placed"] * len(ranks)
    return wire.Reply(wire.VERSION, query.seq, 7, "impostor", 1, ranks, reasons, wire.Want())


def altered(query: wire.Query, **changes: object) -> bytes:
    return wire.encode(msgspec.structs.replace(right(query), **changes))


def late(query: wire.Query, before: deque[bytes]) -> list[Answer]:
    return [(LATE_SECONDS, altered(query))]


def duplicated(query: wire.Query, before: deque[bytes]) -> list[Answer]:
    return [(0.0, altered(query))] * 3


def older(query: wire.Query, before: deque[bytes]) -> list[Answer]:
    """The answer to the query before this one."""
    before.append(altered(query))
    return [(0.0, before.popleft() if len(before) > 1 else before[0])]


def other_ranks(query: wire.Query, before: deque[bytes]) -> list[Answer]:
    ranks = [(-1, 99, 1 << 40)[query.seq % 3] for _ in query.requests]
    return [(0.0, altered(query, ranks=ranks))]


def other_length(query: wire.Query, before: deque[bytes]) -> list[Answer]:
    many = [0] * (len(query.requests) + 1) if query.seq % 2 else []
    return [(0.0, altered(query, ranks=many, reasons=["placed"] * len(many)))]


def garbage(query: wire.Query, before: deque[bytes]) -> list[Answer]:
    kinds = (b"", b"\xc1" * 1000, b"\x91" * 10_000, b"\x80\x04\x95pickle", altered(query)[:-3])
    return [(0.0, kinds[query.seq % len(kinds)])]


def huge(query: wire.Query, before: deque[bytes]) -> list[Answer]:
    """100 MB once in twenty queries, a right answer with a long tail else."""
    return [(0.0, bytes(HUGE) if query.seq % 20 == 0 else altered(query, policy="p" * (1 << 20)))]


WAYS: dict[str, Way] = {
    each.__name__.replace("_", "-"): each
    for each in (late, duplicated, older, other_ranks, other_length, garbage, huge)
}


def serve(way: Way, path: str) -> None:
    """Until it is ended."""
    context = zmq.Context()
    router, pull = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    for each, address in ((router, path), (pull, path + ".reports")):
        Path(address).unlink(missing_ok=True)
        each.linger = 0
        each.bind(f"ipc://{address}")
    print("begins", flush=True)
    before: deque[bytes] = deque()
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(pull, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if pull in ready:
            pull.recv()
        if router in ready:
            frames = router.recv_multipart()
            for pause, answer in way(wire.decode_query(frames[-1]), before):
                time.sleep(pause)
                router.send_multipart([*frames[:-1], answer])


def main() -> None:
    way, path = sys.argv[1:]
    serve(WAYS[way], path)


if __name__ == "__main__":
    main()
