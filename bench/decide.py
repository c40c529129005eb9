"""What does one decision of the core cost? prefix_affinity and kv_affinity; 8, 64 and 320 ranks.

`python -m bench.decide [--json]` calls Dispatcher.handle, without wire and sockets, at steady load
with one load report a decision, and prints microseconds: minimum, median and maximum of the
repeats' means; what the report costs stands in a row of its own. prefix_affinity is asked for
distinct routing keys. kv_affinity is asked in turn for new conversations, for turns that go on
where an earlier prompt ended (bound by their key) and for prompts without a key that share a
system prompt, each of 128 prefix blocks, with its memory full. To reach: prefix_affinity 8 us at 8
ranks, 60 us at 320; kv_affinity 15 us and 100 us.
"""

import time
from collections import deque
from collections.abc import Iterator
from random import Random

from bench import report
from sidecar import wire
from sidecar.budget import Budget
from sidecar.dispatcher import Dispatcher
from sidecar.hashing import block_ends
from sidecar.policies import make_policy

POLICIES = ("prefix_affinity", "kv_affinity")
RANKS = (8, 64, 320)
DECISIONS = 4000
REPEATS = 7
SECONDS = 5e-4
"""Between decisions: each of 320 ranks reports every 160 ms, within the hook's heartbeat."""
PROMPT_TOKENS = 4096
BLOCKS = 128
TURN_BLOCKS, SYSTEM_BLOCKS = 8, 20
"""What a turn adds to its conversation; what the prompts without a key share."""
WARM = 3000
"""Decisions that fill the memory of kv_affinity."""
PROMPTS_A_RANK = 64
"""That its cache holds."""


def distinct_keys() -> Iterator[wire.RequestFacts]:
    """Requests with a routing key each."""
    turn = 0
    while True:
        yield wire.RequestFacts(b"session-%d" % turn, 0, PROMPT_TOKENS)
        turn += 1


class Mix:
    """Endless requests for kv_affinity: new conversations, their next turns, keyless prompts."""

    def __init__(self, want: wire.Want) -> None:
        self._random = Random(1)
        self.ends = block_ends(want.block_tokens, want.max_blocks, want.block_growth)
        self._system = self._fresh(SYSTEM_BLOCKS)
        self._open: deque[tuple[wire.RequestFacts, int]] = deque()
        self._turn = 0

    def __iter__(self) -> "Mix":
        return self

    def __next__(self) -> wire.RequestFacts:
        self._turn += 1
        kind = self._turn % 3
        if kind == 0:
            return self._facts(b"", self._system + self._fresh(BLOCKS - SYSTEM_BLOCKS))
        if kind == 1 or len(self._open) < 100:
            return self._facts(b"session-%d" % self._turn, self._fresh(BLOCKS - TURN_BLOCKS))
        past, rank = self._open.popleft()
        facts = self._facts(past.routing_key, past.block_hashes + self._fresh(TURN_BLOCKS))
        facts.last_rank, facts.last_age_ms = rank, 300
        return facts

    def went(self, facts: wire.RequestFacts, rank: int) -> None:
        """A new conversation has a next turn, some hundred decisions later."""
        if facts.routing_key and facts.last_rank < 0:
            self._open.append((facts, rank))

    def _facts(self, key: bytes, blocks: list[int]) -> wire.RequestFacts:
        return wire.RequestFacts(key, 0, self.ends[len(blocks) - 1], None, blocks)

    def _fresh(self, count: int) -> list[int]:
        return [self._random.getrandbits(64) for _ in range(count)]


class Steady:
    """A dispatcher under steady load, and what its decisions and its reports cost so far."""

    def __init__(self, policy: str, size: int) -> None:
        self._policy = make_policy(policy)
        self._dispatcher = Dispatcher(self._policy, Budget(5.0, 64), boot=1)
        self._mix = Mix(self._policy.want) if policy == "kv_affinity" else None
        self._requests = iter(self._mix or distinct_keys())
        self._size = size
        self._sent, self._tokens = [0] * size, [0] * size
        self._query = wire.Query(
            wire.VERSION, 0, "bench", 1, list(range(size)), self._sent, self._tokens, []
        )
        self.deciding = self.reporting = 0
        """Nanoseconds."""

    def run(self, decisions: int) -> None:
        for _ in range(decisions):
            self._query.seq += 1
            now = self._query.seq * SECONDS
            # One report a decision keeps the load steady, as a server does.
            told = self._report(self._query.seq % self._size)
            begun = time.perf_counter_ns()
            self._dispatcher.report(told, now)
            self.reporting += time.perf_counter_ns() - begun
            facts = next(self._requests)
            self._query.requests = [facts]
            begun = time.perf_counter_ns()
            reply = self._dispatcher.handle(self._query, now)
            self.deciding += time.perf_counter_ns() - begun
            self._went(facts, reply.ranks[0])

    def _report(self, rank: int) -> wire.LoadReport:
        sent, tokens = self._sent[rank], self._tokens[rank]
        head = (wire.VERSION, "bench", rank, 1, self._query.seq, sent, tokens, 4, 1)
        capacity = PROMPTS_A_RANK * self._mix.ends[-1] if self._mix else 0
        # Of a turn nearly all is cached, of a prompt without a key little.
        truth = (0, tokens, tokens // 3, 0, tokens // 1000)
        return wire.LoadReport(*head, tokens % 100_000, capacity, 256, 0, *truth)

    def _went(self, facts: wire.RequestFacts, rank: int) -> None:
        self._sent[rank] += 1
        self._tokens[rank] += facts.tokens
        if self._mix:
            self._mix.went(facts, rank)


def measure(policy: str, size: int) -> tuple[float, float]:
    """Mean microseconds of a decision among `size` ranks, and of a report."""
    steady = Steady(policy, size)
    if policy == "kv_affinity":
        steady.run(WARM)
        steady.deciding = steady.reporting = 0
    steady.run(DECISIONS)
    return steady.deciding / DECISIONS / 1000, steady.reporting / DECISIONS / 1000


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    rows = [["policy", "ranks", "", "min us", "median us", "max us"]]
    result: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for policy in POLICIES:
        for size in RANKS:
            times = [measure(policy, size) for _ in range(REPEATS)]
            for what, values in zip(("decision", "report"), zip(*times, strict=True), strict=True):
                cost = report.spread(values)
                result.setdefault(f"us_per_{what}", {}).setdefault(policy, {})[str(size)] = cost
                figures = [f"{cost[k]:.2f}" for k in ("min", "median", "max")]
                rows.append([policy, str(size), what, *figures])
    report.show(result, rows, as_json=options.json)


if __name__ == "__main__":
    main()
