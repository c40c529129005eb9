"""What does it weigh? Import of the inert plugin; memory of the sidecar and of kv_affinity.

`python -m bench.footprint [--json]`. The plugin is imported and called in fresh interpreters
without DP_SIDECAR_ENDPOINT, as in an SGLang process that does not use it. The sidecar decides a
million requests with a routing key each; its resident memory is read on the way. A dispatcher with
kv_affinity, in a fresh process for each case, decides prompts of distinct prefix blocks, mostly ten
million in all; what its resident memory grew by is read at a tenth and at the end. To reach: 5 ms,
neither zmq nor msgspec loaded; 80 MiB, flat; 64 MiB, flat.
"""

import gc
import json
import multiprocessing as mp
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil

from bench import report
from bench.roundtrip import Asker, Client, sidecar
from sidecar import wire
from sidecar.budget import Budget
from sidecar.dispatcher import Dispatcher
from sidecar.hashing import block_ends
from sidecar.policies import make_policy

IMPORTS = 9
BATCH = 1000
KEYS = (20_000, 200_000, 1_000_000)
REQUESTS = 64
"""Of a query to kv_affinity."""
CAPACITY = 1_048_576
"""Tokens of a rank's cache."""


class Case(NamedTuple):
    """What kv_affinity is asked."""

    name: str
    prompts: int
    blocks: int
    """Of each prompt."""
    ranks: int = 8
    reports: bool = True


CASES = (
    Case("128 blocks a prompt", 78_125, 128),
    Case("a million keys, 10 blocks each", 1_000_000, 10),
    Case("8 blocks a prompt", 1_250_000, 8),
    Case("1 block a prompt", 1_000_000, 1),
    Case("128 blocks a prompt, 320 ranks", 78_125, 128, 320),
    Case("1 block a prompt, 320 ranks", 1_000_000, 1, 320),
    Case("a system prompt on 320 ranks", 500_000, 0, 320),
    Case("128 blocks a prompt, no reports", 78_125, 128, 8, False),
    Case("1 block a prompt, 320 ranks, no reports", 1_500_000, 1, 320, False),
)
_IMPORT = """
import json, sys, time
begun = time.perf_counter()
from sglang_hook.plugin import register
register()
spent = time.perf_counter() - begun
print(json.dumps([spent * 1000, [name for name in ("zmq", "msgspec") if name in sys.modules]]))
"""


def import_ms() -> tuple[dict[str, float], list[str]]:
    """Milliseconds in fresh interpreters, and what was loaded that should not be."""
    times, loaded = [], set()
    for _ in range(IMPORTS):
        command = [sys.executable, "-c", _IMPORT]
        done = subprocess.run(command, env={}, capture_output=True, check=True)
        spent, extra = json.loads(done.stdout)
        times.append(spent)
        loaded |= set(extra)
    return report.spread(times), sorted(loaded)


def memory_mib() -> dict[str, float]:
    """Resident memory of a sidecar process after so many distinct routing keys, MiB."""
    with tempfile.TemporaryDirectory(prefix="dps-") as folder:
        endpoint = f"ipc://{Path(folder, 'q')}"
        with sidecar(endpoint, 0) as pid:
            client, asker = Client(endpoint), Asker()
            sizes, asked = {}, 0
            for keys in KEYS:
                while asked < keys:
                    asker.learn(client.ask(asker.query(BATCH)))
                    asked += BATCH
                sizes[str(keys)] = round(psutil.Process(pid).memory_info().rss / 2**20, 1)
            client.socket.close(0)
    return sizes


class Feeder:
    """A dispatcher with kv_affinity that is asked what a case says."""

    def __init__(self, case: Case) -> None:
        self._case = case
        policy = make_policy("kv_affinity")
        want = policy.want
        self._ends = block_ends(want.block_tokens, want.max_blocks, want.block_growth)
        self._random = Random(1)
        self._dispatcher = Dispatcher(policy, Budget(1e9, 1), boot=1)
        self._sent, self._tokens = [0] * case.ranks, [0] * case.ranks
        self._query = wire.Query(
            wire.VERSION, 0, "bench", 1, list(range(case.ranks)), self._sent, self._tokens, []
        )

    def ask(self) -> None:
        """One query, and a report of each rank that got something."""
        query = self._query
        query.seq += 1
        now = query.seq * 0.05
        query.requests = [self._facts(query.seq * REQUESTS + i) for i in range(REQUESTS)]
        ranks = self._dispatcher.handle(query, now).ranks
        for rank, facts in zip(ranks, query.requests, strict=True):
            self._sent[rank] += 1
            self._tokens[rank] += facts.tokens
        for rank in sorted(set(ranks)) if self._case.reports else ():
            head = (wire.VERSION, "bench", rank, 1, query.seq)
            counts = (self._sent[rank], self._tokens[rank], 8, 4, 0, CAPACITY, 256)
            self._dispatcher.report(wire.LoadReport(*head, *counts), now)

    def _facts(self, number: int) -> wire.RequestFacts:
        count = self._case.blocks
        # Without blocks of their own all prompts share a few, which so are on every rank.
        fresh = [self._random.getrandbits(64) for _ in range(count)] or [1, 2, 3, 4, number % 2000]
        return wire.RequestFacts(b"key-%d" % number, 0, self._ends[len(fresh) - 1], None, fresh)


def kv_mib(case: Case) -> list[float]:
    """Growth of this process's resident memory at a tenth of the prompts and at the end, MiB."""
    feeder = Feeder(case)
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    growth = []
    queries = case.prompts // REQUESTS
    for count in (queries // 10, queries - queries // 10):
        for _ in repeat(None, count):
            feeder.ask()
        growth.append(round((process.memory_info().rss - before) / 2**20, 1))
    return growth


def in_fresh_process(case: Case) -> list[float]:
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
        return pool.submit(kv_mib, case).result()


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    times, loaded = import_ms()
    sizes = memory_mib()
    grown = {case.name: in_fresh_process(case) for case in CASES}
    result = {
        "plugin_import_ms": times,
        "plugin_loads": loaded,
        "sidecar_mib_by_keys": sizes,
        "kv_affinity_mib": grown,
    }
    rows = [["", "value"]]
    rows += [[f"plugin import, {name}", f"{ms:.2f} ms"] for name, ms in times.items()]
    rows += [["zmq or msgspec loaded", ", ".join(loaded) or "no"]]
    rows += [[f"sidecar after {int(keys):,} keys", f"{mib} MiB"] for keys, mib in sizes.items()]
    rows += [[f"kv_affinity, {name}", f"{a} {b} MiB"] for name, (a, b) in grown.items()]
    report.show(result, rows, as_json=options.json)


if __name__ == "__main__":
    main()
