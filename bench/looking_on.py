"""What does a decision cost more while a shadow decides too, or the decision log is written?

`python -m bench.looking_on [--json]` times query to reply of prompts of up to 128 prefix blocks,
one query at a time: back to back, where the work after a reply is in the way of the next query, and
at 1,000 a second, where it fits between them. Blocks with nobody looking on, with a shadow and with
the log take turns in one run; cpu is what the sidecar process used for each decision and the report
beside it. `in process` is the CPU time of this thread: until the reply is encoded, and for looking
on after it. To reach: a shadow adds 15 us until the reply.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import psutil
import zmq

from bench import report
from bench.decide import PROMPTS_A_RANK, Mix
from bench.roundtrip import CLIENT_CORE, RANKS, SERVER_CORE, Client, pin
from sidecar import wire
from sidecar.aftermath import Aftermath, ShadowSeat
from sidecar.budget import Budget
from sidecar.control import Control
from sidecar.dispatcher import Dispatcher
from sidecar.errors import RefusedError
from sidecar.keyhash import KeyHash
from sidecar.paths import Paths
from sidecar.policies import make_policy

OFF = "nobody"
LOG = "decision log"
SHADOWS = {"shadow round_robin": "round_robin", "shadow kv_affinity": "kv_affinity"}
KINDS = (OFF, *SHADOWS, LOG)
PACES = {"back to back": 0.0, "1,000 a second": 1e-3}
BLOCK = 400
WARM = 100
ROUNDS = 8


class Process(NamedTuple):
    """A sidecar process and the client of it."""

    traffic: "Traffic"
    control: Control
    process: psutil.Process

    def cpu(self) -> float:
        """Microseconds used so far."""
        used = self.process.cpu_times()
        return 1e6 * (used.user + used.system)


class Traffic:
    """Queries as the hook makes them, and a load report beside each."""

    def __init__(self, ask: Callable[[bytes], bytes], tell: Callable[[bytes], object]) -> None:
        self._ask, self._tell = ask, tell
        self._mix = Mix(make_policy("kv_affinity").want)
        self._sent, self._tokens = [0] * RANKS, [0] * RANKS
        self._seq = 0

    def block(self, count: int, pace: float) -> list[float]:
        """Microseconds of each of `count` round trips, `pace` seconds apart at least."""
        times, due = [], time.perf_counter()
        for _ in range(count):
            query, facts = self._query()
            due = max(due + pace, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            begun = time.perf_counter_ns()
            answer = self._ask(query)
            times.append((time.perf_counter_ns() - begun) / 1000)
            self._went(facts, answer)
        return times

    def _query(self) -> tuple[bytes, wire.RequestFacts]:
        self._seq += 1
        facts = next(self._mix)
        head = (wire.VERSION, self._seq, "bench", 1, list(range(RANKS)))
        return wire.encode(wire.Query(*head, self._sent, self._tokens, [facts])), facts

    def _went(self, facts: wire.RequestFacts, answer: bytes) -> None:
        reply = wire.decode_answer(answer)
        if not isinstance(reply, wire.Reply):
            raise SystemExit(f"refused: {reply}")
        (rank,) = reply.ranks
        self._sent[rank] += 1
        self._tokens[rank] += facts.tokens
        self._mix.went(facts, rank)
        sent, tokens = self._sent[rank], self._tokens[rank]
        head = (wire.VERSION, "bench", rank, 1, self._seq, sent, tokens, 4, 1, tokens % 100_000)
        capacity = PROMPTS_A_RANK * self._mix.ends[-1]
        truth = (0, tokens, tokens // 3, 0, tokens // 1000)
        self._tell(wire.encode(wire.LoadReport(*head, capacity, 256, 0, *truth)))


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Process]:
    """A sidecar with the default policy."""
    endpoint = f"ipc://{folder}/q"
    command = [sys.executable, "-m", "sidecar", "serve", f"--endpoint={endpoint}"]
    command += ["--admin-port=0", "--log-level=error", *flags]
    pin(SERVER_CORE)
    child = subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": "0"})
    pin(CLIENT_CORE)
    with child:
        try:
            client = Client(endpoint)
            push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            push.connect(wire.report_endpoint(endpoint))
            traffic = Traffic(client.ask, push.send)
            traffic.block(1, 0.0)  # waits until it is up
            control = Control(f"{folder}/q.control", 30)
            yield Process(traffic, control, psutil.Process(child.pid))
            client.socket.close(0)
            push.close(0)
        finally:
            child.terminate()


def look_on(process: Process, kind: str) -> None:
    """Begin the shadow of that kind, or end what there is."""
    with suppress(RefusedError):
        process.control.shadow_off()
    if kind in SHADOWS:
        process.control.set_shadow(SHADOWS[kind])


def run() -> dict[str, Any]:
    """Every kind at every pace, in turn."""
    times: dict[tuple[str, str], list[float]] = {(p, k): [] for p in PACES for k in KINDS}
    cpu = dict.fromkeys(times, 0.0)
    with tempfile.TemporaryDirectory(prefix="dps-") as name, ExitStack() as stack:
        plain, logging = Path(name, "plain"), Path(name, "log")
        plain.mkdir()
        logging.mkdir()
        one = stack.enter_context(serving(plain))
        other = stack.enter_context(serving(logging, f"--decision-log-directory={logging}/d"))
        for process in (one, other):
            process.traffic.block(2000, 0.0)
        for _ in range(ROUNDS):
            for kind in KINDS:
                process = other if kind == LOG else one
                look_on(process, kind)
                for pace, seconds in PACES.items():
                    process.traffic.block(WARM, seconds)
                    before = process.cpu()
                    times[pace, kind] += process.traffic.block(BLOCK, seconds)
                    cpu[pace, kind] += process.cpu() - before
    return {pace: {kind: _figures(times, cpu, pace, kind) for kind in KINDS} for pace in PACES}


class InProcess:
    """A dispatcher and who looks on, without sockets; nanoseconds of this thread's CPU time."""

    def __init__(self, kind: str) -> None:
        self.dispatcher = Dispatcher(make_policy("kv_affinity"), Budget(5.0, 4), 1)
        self.aftermath = Aftermath(lambda name, error: None, lambda requests: None)
        self.aftermath.observers = {"paths": Paths(KeyHash())}
        if kind in SHADOWS:
            self.dispatcher.set_shadow(make_policy(SHADOWS[kind]))
            self.aftermath.observers["shadow"] = ShadowSeat(self.dispatcher)
        self.until_reply = self.after = 0

    def ask(self, payload: bytes) -> bytes:
        """As the server answers."""
        begun, now = time.thread_time_ns(), time.monotonic()
        query = wire.decode_query(payload)
        reply = self.dispatcher.handle(query, now)
        self.aftermath.decided(query, reply, now, len(payload))
        answer = wire.encode(reply)
        replied = time.thread_time_ns()
        self.aftermath.drain()
        self.until_reply += replied - begun
        self.after += time.thread_time_ns() - replied
        return answer

    def tell(self, payload: bytes) -> None:
        """As the server takes in a report."""
        said, now = wire.decode_report(payload), time.monotonic()
        self.dispatcher.report(said, now)
        self.aftermath.reported(said, now)
        begun = time.thread_time_ns()
        self.aftermath.drain()
        self.after += time.thread_time_ns() - begun


async def in_process() -> dict[str, dict[str, float]]:
    """Microseconds of CPU for each decision: medians of the rounds."""
    kinds = (OFF, *SHADOWS)
    all_of = {kind: InProcess(kind) for kind in kinds}
    traffic = {kind: Traffic(one.ask, one.tell) for kind, one in all_of.items()}
    rounds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for one in traffic.values():
        one.block(2000, 0.0)
    for _ in range(ROUNDS):
        for kind in kinds:
            all_of[kind].until_reply = all_of[kind].after = 0
            traffic[kind].block(BLOCK, 0.0)
            spent = all_of[kind].until_reply, all_of[kind].after
            rounds[kind].append((spent[0] / BLOCK / 1000, spent[1] / BLOCK / 1000))
    found = {kind: [median(part) for part in zip(*rounds[kind], strict=True)] for kind in kinds}
    names = ("until_reply_us", "after_us")
    return {
        kind: {
            **{name: round(us, 1) for name, us in zip(names, found[kind], strict=True)},
            "until_reply_added_us": round(found[kind][0] - found[OFF][0], 1),
            "after_added_us": round(found[kind][1] - found[OFF][1], 1),
        }
        for kind in kinds
    }


def _figures(times: Any, cpu: Any, pace: str, kind: str) -> dict[str, float]:
    found: dict[str, float] = {}
    of, base = times[pace, kind], times[pace, OFF]
    for name, pick in (("p50", median), ("p99", lambda t: quantiles(t, n=100)[98])):
        found[f"{name}_us"] = round(pick(of), 1)
        found[f"{name}_added_us"] = round(pick(of) - pick(base), 1)
        found[f"{name}_ratio"] = round(pick(of) / pick(base), 3)
    found["cpu_us"] = round(cpu[pace, kind] / len(of), 1)
    found["cpu_added_us"] = round((cpu[pace, kind] - cpu[pace, OFF]) / len(of), 1)
    return found


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    result = run()
    inside = asyncio.run(in_process())
    names = list(result["back to back"][OFF])
    rows = [["", "looking on", *names]]
    for pace, kinds in result.items():
        rows += [[pace, kind, *(f"{row[n]:g}" for n in names)] for kind, row in kinds.items()]
    report.show({**result, "in process": inside}, rows, as_json=options.json)
    for kind, row in inside.items() if not options.json else ():
        figures = ", ".join(f"{name} {us:g}" for name, us in row.items())
        print(f"in process, {kind}: {figures}")


if __name__ == "__main__":
    main()
