"""Peers that do harm, each a process: `python -m bench.chaos.attacks NAME ENDPOINT [ARGUMENT ...]`.

They say so on standard output when they begin, and run until they are ended.
"""

import contextlib
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count

import msgspec
import zmq

from bench.roundtrip import encoded_query
from sidecar import wire

RANDOM = random.Random(6)
HUGE = 100 << 20
REPORTS_PER_SECOND = 10_000
RANKS = 8


def connected(kind: int, endpoint: str) -> "zmq.Socket[bytes]":
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.linger = 0
    made.setsockopt(zmq.SNDTIMEO, 1000)
    made.connect(endpoint)
    return made


def paced(per_second: float) -> Iterator[int]:
    """0, 1, 2 ... at that rate; what was missed is made up for."""
    begun = time.monotonic()
    for number in count():
        yield number
        time.sleep(max(0.0, begun + (number + 1) / per_second - time.monotonic()))


def push(sender: "zmq.Socket[bytes]", *frames: bytes) -> None:
    """Send without minding whether somebody takes it."""
    with contextlib.suppress(zmq.ZMQError):
        sender.send_multipart(frames, zmq.NOBLOCK)


def grow(endpoint: str) -> None:
    """Queries of an instance of its own, each of 16 new sessions with 64 new blocks."""
    dealer = connected(zmq.DEALER, endpoint)
    for number in paced(100):
        facts = [
            wire.RequestFacts(
                RANDOM.randbytes(32), 0, 4096, None, [RANDOM.getrandbits(64) for _ in range(64)]
            )
            for _ in range(16)
        ]
        sent = [number * 8] * RANKS
        query = wire.Query(wire.VERSION, number, "grow", 1, list(range(RANKS)), sent, sent, facts)
        push(dealer, b"", wire.encode(query))
        with contextlib.suppress(zmq.Again):
            while True:
                dealer.recv_multipart(zmq.NOBLOCK)


def noise(endpoint: str) -> None:
    """Random bytes to both sockets, with and without ZeroMQ's framing."""
    addresses = (endpoint, wire.report_endpoint(endpoint))
    senders = [connected(zmq.DEALER, addresses[0]), connected(zmq.PUSH, addresses[1])]
    for number in paced(200):
        data = RANDOM.randbytes(RANDOM.choice((0, 1, 10, 64, 1000, 100_000)))
        push(senders[number % 2], *([b""] if number % 4 == 0 else []), data)
        if number % 5 == 0:
            _raw(addresses[number % 2], data)


def _raw(address: str, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer, contextlib.suppress(OSError):
        peer.settimeout(0.5)
        peer.connect(address.removeprefix("ipc://"))
        peer.sendall(data)


def disorder(endpoint: str) -> None:
    """Valid messages where and when they do not belong, in envelopes of all shapes.

    Sequence numbers and epochs go back, ranks come and go, a query is sent as a report, a report or
    a reply as a query. It speaks for an instance of its own: see `double` for that of another.
    """
    dealer = connected(zmq.DEALER, endpoint)
    reports = connected(zmq.PUSH, wire.report_endpoint(endpoint))
    shapes: tuple[list[bytes], ...] = ([], [b""], [b"a", b""], [b""] * 5, [b"x"] * 300)
    for number in paced(300):
        ranks = sorted(RANDOM.sample(range(16), RANDOM.randint(0, 8)))
        sent = [RANDOM.randint(0, 1000) for _ in ranks]
        facts = [wire.RequestFacts(b"key-%d" % (number % 7), 0, 100, None, [])]
        seq, epoch = RANDOM.randint(0, 100), RANDOM.randint(1, 3)
        query = wire.Query(wire.VERSION, seq, "disorder", epoch, ranks, sent, sent, facts)
        report = wire.LoadReport(wire.VERSION, "disorder", seq % 16, epoch, seq, seq, seq, 1, 1)
        reply = wire.Reply(wire.VERSION, seq, 1, "kv_affinity", 1, [0], ["placed"], wire.Want())
        messages = [wire.encode(one) for one in (query, query, report, report, reply)]
        RANDOM.shuffle(messages)
        push(dealer, *RANDOM.choice(shapes), messages[0])
        push(dealer, *messages[:3])
        push(reports, messages[1])
        push(reports, *messages)
        with contextlib.suppress(zmq.Again):
            while True:
                dealer.recv_multipart(zmq.NOBLOCK)


def huge(endpoint: str) -> None:
    """100 MB to either socket: in one frame, and in frames that are small each."""
    data = bytes(HUGE)
    part = [bytes(1 << 20)] * (HUGE >> 20)
    for number in paced(2):
        address = (endpoint, wire.report_endpoint(endpoint))[number % 2]
        sender = connected(zmq.DEALER if number % 2 == 0 else zmq.PUSH, address)
        with contextlib.suppress(zmq.ZMQError):
            sender.send_multipart([data] if number % 4 < 2 else part)
        time.sleep(0.2)
        sender.close(0)


def reports(endpoint: str, instance: str) -> None:
    """10,000 load reports a second, half of them of ranks of `instance` that do not exist, half of
    instances that do not."""
    sender = connected(zmq.PUSH, wire.report_endpoint(endpoint))
    report = wire.LoadReport(wire.VERSION, instance, 60_000, 1, 1, 0, 0, 9, 9, 10_000)
    for number in paced(REPORTS_PER_SECOND):
        changed = msgspec.structs.replace(
            report,
            seq=number + 1,
            rank=100 + number % 50_000,
            instance=instance if number % 2 else f"nobody-{number % 5000}",
        )
        push(sender, wire.encode(changed))


def flood(endpoint: str) -> None:
    """Queries as fast as they are answered, and a queue of them."""
    dealer = connected(zmq.DEALER, endpoint)
    for number in count():
        push(dealer, b"", encoded_query(number, [number] * RANKS, 8))
        with contextlib.suppress(zmq.Again):
            while True:
                dealer.recv_multipart(zmq.NOBLOCK)
        time.sleep(0.0005)


ATTACKS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (grow, noise, disorder, huge, reports, flood)
}


def main() -> None:
    name, *rest = sys.argv[1:]
    print("begins", flush=True)
    ATTACKS[name](*rest)


if __name__ == "__main__":
    main()
