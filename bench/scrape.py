"""What does being scraped add to a query's round trip? ipc://, one query at a time.

`python -m bench.scrape [--json] [--ranks N] [--gap MS]` asks a sidecar of its own in blocks, in
turn without scrapes and with ten of /metrics a second, all in one run; the pairs of neighbouring
blocks give the spread. The sidecar has one core; the client and the scraper share the other, so the
scraper does as little as it can (one kept connection, nothing parsed), but what it does is in the
figures. N ranks report at their heartbeat. To reach: p99 with / without <= 1.10.
"""

import contextlib
import multiprocessing as mp
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import zmq

from bench import report
from bench.roundtrip import CLIENT_CORE, Asker, Client, pin, process, sidecar
from bench.simulated.launch import free_port
from sidecar import wire

PAIRS = 20
BLOCK_SECONDS = 1.5
SCRAPES_PER_SECOND = 10
HEARTBEATS_PER_SECOND = 4


def push_reports(endpoint: str, ranks: int) -> None:
    """What schedulers send whose load does not change, each with some of its own."""
    pin(CLIENT_CORE)
    push = zmq.Context().socket(zmq.PUSH)
    push.connect(wire.report_endpoint(endpoint))
    begun = time.monotonic()
    for seq in range(1, 1 << 62):
        rank = seq % ranks
        load = wire.LoadReport(wire.VERSION, "bench", rank, 1, seq, 0, 0, 4 + rank % 3, 1, 10_000)
        push.send(wire.encode(load))
        due = begun + seq / (HEARTBEATS_PER_SECOND * ranks)
        time.sleep(max(0.0, due - time.monotonic()))


def scrape(port: int, wanted: Event, done: Any) -> None:
    """Scrape while `wanted` is set; adds (scrapes, bytes, nanoseconds) to `done`."""
    pin(CLIENT_CORE)
    buffer = bytearray(1 << 20)
    wanted.wait()
    connection = socket.create_connection(("127.0.0.1", port))
    while True:
        wanted.wait()
        begun = time.perf_counter_ns()
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        size = connection.recv_into(buffer)
        head = bytes(buffer[: buffer.index(b"\r\n\r\n") + 4])
        if b" 200 " not in head[:15]:
            raise SystemExit(f"bench.scrape: {head[:60]!r} is no answer to a scrape")
        expected = len(head) + int(head.lower().split(b"content-length:")[1].split(b"\r")[0])
        while size < expected:
            size += connection.recv_into(memoryview(buffer)[size:])
        spent = time.perf_counter_ns() - begun
        with done.get_lock():
            done[0] += 1
            done[1] += size
            done[2] += spent
        time.sleep(max(0.0, 1 / SCRAPES_PER_SECOND - spent / 1e9))


class RankAsker(Asker):
    """Asks for an instance of any number of ranks."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.sent = [0] * ranks
        self.random = random.Random(1)

    def query(self, requests: int) -> bytes:
        self.seq += 1
        facts = [
            wire.RequestFacts(
                b"session-%04d" % self.random.randrange(2000), 0, 4096, None, [], -1, -1
            )
            for _ in range(requests)
        ]
        ranks, tokens = list(range(len(self.sent))), [4096 * n for n in self.sent]
        query = wire.Query(wire.VERSION, self.seq, "bench", 1, ranks, self.sent, tokens, facts)
        return wire.encode(query)


def block(client: Client, asker: Asker, gap: float) -> list[float]:
    """Round trips of BLOCK_SECONDS, microseconds. gap: mean seconds between queries."""
    times: list[float] = []
    end = time.monotonic() + BLOCK_SECONDS
    rng = random.Random(len(times))
    while time.monotonic() < end:
        if gap:
            time.sleep(rng.expovariate(1 / gap))
        times += client.times(asker, 1)
    return times


def measure(client: Client, asker: Asker, wanted: Event, gap: float) -> dict[str, Any]:
    """Pairs of blocks; percentiles of all blocks of a kind, and the spread of the pairs' ratios."""
    kinds: dict[bool, list[float]] = {False: [], True: []}
    ratios: dict[str, list[float]] = {"p50": [], "p99": []}
    for pair in range(PAIRS):
        last: dict[bool, list[float]] = {}
        for on in (False, True) if pair % 2 else (True, False):
            (wanted.set if on else wanted.clear)()
            last[on] = block(client, asker, gap)
            kinds[on] += last[on]
        for name, pick in PERCENTILES.items():
            ratios[name].append(pick(last[True]) / pick(last[False]))
    wanted.clear()
    result: dict[str, Any] = {}
    for name, pick in PERCENTILES.items():
        with_scrapes, without = pick(kinds[True]), pick(kinds[False])
        result[name] = {
            "us": round(with_scrapes, 1),
            "without_us": round(without, 1),
            "ratio": round(with_scrapes / without, 3),
            "of_pairs": report.spread(ratios[name]),
        }
    return result


def p99(times: list[float]) -> float:
    return quantiles(times, n=100)[98]


PERCENTILES: dict[str, Callable[[list[float]], float]] = {"p50": median, "p99": p99}


@contextlib.contextmanager
def scraped(endpoint: str, port: int, ranks: int) -> Iterator[tuple[Event, Any]]:
    """The scraper, and ranks that report."""
    context = mp.get_context("spawn")
    wanted, done = context.Event(), context.Array("q", 3)
    with process(push_reports, endpoint, ranks), process(scrape, port, wanted, done):
        yield wanted, done


def run(ranks: int, gap: float) -> dict[str, Any]:
    """Measure; about a minute."""
    with tempfile.TemporaryDirectory(prefix="dps-") as folder, contextlib.ExitStack() as stack:
        endpoint, port = f"ipc://{Path(folder, 'q')}", free_port()
        stack.enter_context(sidecar(endpoint, port))
        client, asker = Client(endpoint), RankAsker(ranks)
        wanted, done = stack.enter_context(scraped(endpoint, port, ranks))
        pin(CLIENT_CORE)
        block(client, asker, gap)
        result = measure(client, asker, wanted, gap)
        scrapes, size, spent = done[:]
        result["scrape"] = {
            "count": scrapes,
            "kilobytes": round(size / scrapes / 1000, 1),
            "ms": round(spent / scrapes / 1e6, 2),
        }
        client.socket.close(0)
    return {"ranks": ranks, "gap_ms": gap * 1000, **result}


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--gap", type=float, default=0.0, help="mean ms between queries")
    options = parser.parse_args()
    result = run(options.ranks, options.gap / 1000)
    rows = [["", "us", "without", "ratio", "pairs: min", "median", "max"]]
    for name in PERCENTILES:
        r = result[name]
        figures = [f"{r['us']:.1f}", f"{r['without_us']:.1f}", f"{r['ratio']:.3f}"]
        spread = (f"{r['of_pairs'][k]:.3f}" for k in ("min", "median", "max"))
        rows.append([name, *figures, *spread])
    report.show(result, rows, as_json=options.json)
    if not options.json:
        count, size, ms = (result["scrape"][k] for k in ("count", "kilobytes", "ms"))
        print(f"{count} scrapes of {size} kB took {ms} ms on average")


if __name__ == "__main__":
    main()
