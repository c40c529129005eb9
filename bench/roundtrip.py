"""What does asking the sidecar cost over asking nobody in particular? ipc://, one query at a time.

`python -m bench.roundtrip [--json]` times query to reply against a bare pyzmq REQ -> ROUTER echo of
the same sizes, both servers in processes of their own, in blocks that take turns in one run: idle,
under 800 load reports a second, and while /metrics is scraped ten times a second. The client has
one core and each server the other: left to itself the kernel moves them about, and a server on the
client's core answers in half the time. To reach: p50 ratio 1.20, p99 ratio 1.4 (idle and under
reports), 60,000 decisions/s in batches of 64.
"""

import contextlib
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import zmq

from bench import report
from bench.simulated.launch import free_port
from sidecar import wire

BLOCK = 250
BLOCKS = 16
BATCH = 64
BATCHES = 400
RANKS = 8
CORES = sorted(os.sched_getaffinity(0))
CLIENT_CORE, SERVER_CORE = 0, 1
REPORTS_PER_SECOND = 800
SCRAPES_PER_SECOND = 10


def encoded_query(seq: int, sent: list[int], requests: int) -> bytes:
    """A query of `requests` requests, each with its own routing key and a last rank."""
    facts = [
        wire.RequestFacts(b"session-%06d" % (seq * requests + i), 0, 4096, None, [], i % RANKS, 900)
        for i in range(requests)
    ]
    tokens = [4096 * n for n in sent]
    query = wire.Query(wire.VERSION, seq, "bench", 1, list(range(RANKS)), sent, tokens, facts)
    return wire.encode(query)


def pin(core: int) -> None:
    """Stay on this core (modulo their number), as will threads and processes made from now on."""
    os.sched_setaffinity(0, {CORES[core % len(CORES)]})


def echo_server(endpoint: str, reply: bytes) -> None:
    """The reference: a blocking ROUTER that answers everything with `reply`."""
    pin(SERVER_CORE)
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(endpoint)
    while True:
        frames = router.recv_multipart()
        frames[-1] = reply
        router.send_multipart(frames)


def push_reports(endpoint: str) -> None:
    """What eight busy schedulers send."""
    push = zmq.Context().socket(zmq.PUSH)
    push.connect(wire.report_endpoint(endpoint))
    begun = time.monotonic()
    for seq in range(1, 1 << 62):
        push.send(
            wire.encode(
                wire.LoadReport(wire.VERSION, "bench", seq % RANKS, 1, seq, 0, 0, 4, 1, 10_000)
            )
        )
        time.sleep(max(0.0, begun + seq / REPORTS_PER_SECOND - time.monotonic()))


def scrape(port: int) -> None:
    """What an eager Prometheus does."""
    while True:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read()
        time.sleep(1 / SCRAPES_PER_SECOND)


@contextlib.contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[None]:
    """A process that runs while the context does."""
    child = mp.get_context("spawn").Process(target=target, args=args, daemon=True)
    os.sched_setaffinity(0, CORES)
    child.start()
    pin(CLIENT_CORE)
    try:
        yield
    finally:
        child.terminate()
        child.join()


@contextlib.contextmanager
def sidecar(endpoint: str, port: int) -> Iterator[int]:
    """A sidecar process with the default policy; gives its process id."""
    command = [sys.executable, "-m", "sidecar", "serve", f"--endpoint={endpoint}"]
    command += [f"--admin-port={port}", "--log-level=warning"]
    pin(SERVER_CORE)
    child = subprocess.Popen(command)
    pin(CLIENT_CORE)
    with child:
        try:
            yield child.pid
        finally:
            child.terminate()


class Client:
    """A bare REQ socket, the same for both servers."""

    def __init__(self, endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(endpoint)

    def ask(self, payload: bytes) -> bytes:
        self.socket.send(payload)
        return self.socket.recv()

    def times(self, asker: "Asker", count: int, requests: int = 1) -> list[float]:
        """Microseconds of each of `count` round trips, the making of the query excluded."""
        out = []
        for _ in range(count):
            payload = asker.query(requests)
            begun = time.perf_counter_ns()
            answer = self.ask(payload)
            out.append((time.perf_counter_ns() - begun) / 1000)
            asker.learn(answer)
        return out


class Asker:
    """Makes queries as the hook does: each with the counters that the answers led to."""

    def __init__(self) -> None:
        self.seq = 0
        self.sent = [0] * RANKS

    def query(self, requests: int) -> bytes:
        self.seq += 1
        return encoded_query(self.seq, self.sent, requests)

    def learn(self, answer: bytes) -> None:
        reply = wire.decode_answer(answer)
        if not isinstance(reply, wire.Reply):
            raise SystemExit(f"refused: {reply}")
        for rank in reply.ranks:
            self.sent[rank] += 1


class Bench:
    """Both servers, up."""

    def __init__(self, echo: Client, ours: Client) -> None:
        self.echo, self.ours = echo, ours
        # One for each server: the echo's answers are always the same and must not mislead us.
        self.askers = {echo: Asker(), ours: Asker()}

    def compare(self) -> dict[str, float]:
        """Blocks in turn; the ratios are of whole-run percentiles."""
        echo: list[float] = []
        ours: list[float] = []
        for turn in range(BLOCKS):
            pair = [(self.echo, echo), (self.ours, ours)]
            for client, into in pair if turn % 2 else reversed(pair):
                into.extend(client.times(self.askers[client], BLOCK))
        figures: dict[str, float] = {}
        for name, pick in (("p50", median), ("p99", lambda t: quantiles(t, n=100)[98])):
            a, b = pick(ours), pick(echo)
            figures |= {f"{name}_us": round(a, 1), f"{name}_echo_us": round(b, 1)}
            figures[f"{name}_ratio"] = round(a / b, 3)
        return figures

    def batches(self) -> dict[str, float]:
        """Decisions a second in batches of 64, one batch after the other."""
        times = self.ours.times(self.askers[self.ours], BATCHES, BATCH)
        return {
            "p50_us": round(median(times), 1),
            "decisions_per_s": round(BATCH * len(times) / (sum(times) / 1e6)),
        }


def run() -> dict[str, Any]:
    """Measure everything; a minute."""
    with tempfile.TemporaryDirectory(prefix="dps-") as folder, contextlib.ExitStack() as stack:
        ours, echo = f"ipc://{Path(folder, 'q')}", f"ipc://{Path(folder, 'e')}"
        port = free_port()
        stack.enter_context(sidecar(ours, port))
        client = Client(ours)
        sample = client.ask(encoded_query(0, [0] * RANKS, 1))
        stack.enter_context(process(echo_server, echo, sample))
        bench = Bench(Client(echo), client)
        bench.compare()  # warm up
        result: dict[str, Any] = {"idle": bench.compare(), "batch64": bench.batches()}
        with process(push_reports, ours):
            result["reports"] = bench.compare()
        with process(scrape, port):
            result["scrape"] = bench.compare()
        bench.echo.socket.close(0)
        client.socket.close(0)
    return result


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    result = run()
    rows = [["", "p50 us", "echo us", "ratio", "p99 us", "echo us", "ratio"]]
    for name in ("idle", "reports", "scrape"):
        r = result[name]
        rows.append(
            [name]
            + [f"{r[k]:.1f}" for k in ("p50_us", "p50_echo_us")]
            + [f"{r['p50_ratio']:.3f}"]
            + [f"{r[k]:.1f}" for k in ("p99_us", "p99_echo_us")]
            + [f"{r['p99_ratio']:.3f}"]
        )
    batch = result["batch64"]
    report.show(result, rows, as_json=options.json)
    if not options.json:
        rate, p50 = batch["decisions_per_s"], batch["p50_us"]
        print(f"batches of {BATCH}: {rate:,} decisions/s, p50 {p50} us")


if __name__ == "__main__":
    main()
