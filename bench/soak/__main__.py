"""Is memory flat under churn and restarts, is no descriptor lost, is the load view the truth?

`python -m bench.soak [--minutes 30] [--rate 2000] [--out bench/out/soak] [--json]` asks as the
controller does, through the hook's own Chooser and client, in a process of its own; eight
schedulers with the hook's own reporters are another; the sidecar is a third, with the default
policy, a decision log and HTTP that is scraped every second. Ranks leave and return, a scheduler
restarts alone, the sidecar is killed, taken over and stopped, the controller restarts (plan.py).
What fills up by design (the hook's 131,072 last ranks and 8,192 conversations, the sidecar's prefix
index) is filled and replaced first, by routing keys that come once: for some minutes. To reach:
no request without a rank, a drift of 0 at every quiet moment, no descriptor more, memory within
2 MiB (verdict.py says over what). Exits with 1 otherwise. samples.json and soak.png go to --out.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import report
from bench.soak import picture, verdict
from bench.soak.controller import FRESH_TOKENS
from bench.soak.plan import Event, plan
from bench.soak.verdict import Row
from bench.soak.world import Check, World
from sglang_hook.memory import HISTORY_ENTRIES
from sidecar.hashing import block_ends
from sidecar.policies import make_policy
from sidecar.policies.kv.index import NODE_WEIGHT
from sidecar.policies.kv.memory import MAX_WEIGHT

SAMPLE = 5.0
SCRAPE = 1.0
NARROWED = 5.0
"""Seconds from the replacement of a process to a check. A new sidecar beside a controller and a
scheduler that did not start together knows within two what was in flight (RankState.narrow)."""
KEYS = 131_072
"""What the hook remembers by default."""


def fresh_until_full() -> int:
    """Prompts of the soak's once-only kind that fill the prefix index."""
    want = make_policy("kv_affinity").want
    ends = block_ends(want.block_tokens, want.max_blocks, want.block_growth)
    blocks = bisect_left(list(ends), FRESH_TOKENS + 1)
    return MAX_WEIGHT // (NODE_WEIGHT + blocks)


class Soak:
    """One soak. keys: routing keys that the controller remembers."""

    def __init__(self, world: World, seconds: float, keys: int) -> None:
        self.world, self.seconds, self.keys = world, seconds, keys
        self.begun = time.monotonic()
        self.rows: list[Row] = []
        self.checks: list[Check] = []
        self.events: Counter[str] = Counter()
        self.scrapes = self.unanswered = 0
        self._until_full = fresh_until_full()
        self._before: dict[str, int] = {}
        """Counters of the controller at the sample before."""
        self._fresh = 0
        """Prompts of the once-only kind since the sidecar started."""
        self._sidecars = 1
        self._sampled = self.begun
        self._check_at = float("inf")

    @property
    def now(self) -> float:
        return time.monotonic() - self.begun

    def run(self, told: "tqdm[Any]") -> None:
        """Do what is planned, scrape and sample in between. told: tells how far it is."""
        events = iter(plan(self.seconds))
        event = next(events, None)
        scrape, sample = SCRAPE, min(SAMPLE, self.seconds / 4)
        every = sample
        while event is not None or self.now < self.seconds:
            if event is not None and self.now >= event.at:
                self._do(event)
                event = next(events, None)
            elif self.now >= self._check_at:
                self._check()
            elif self.now >= sample:
                self.sample()
                sample = max(sample + every, self.now)
                self._tell(told)
            elif self.now >= scrape:
                scrape = self.now + SCRAPE
                self._scrape()
            else:
                time.sleep(0.01)
        self._check()
        self.sample()

    def _do(self, event: Event) -> None:
        if event.what == "check":
            self._check_at = self._settled()
            return
        if event.what == "restart_controller":
            self.sample()  # what it has counted goes with it
            self._before = {}
        self.events[event.what] += 1
        rank = () if event.rank is None else (event.rank,)
        getattr(self.world, event.what)(*rank)

    def _settled(self) -> float:
        """When the load view may be checked, in seconds since the start."""
        wait = min(NARROWED, self.seconds / 20)
        return max(self.now, self.world.replaced_at + wait - self.begun)

    def _check(self) -> None:
        self._check_at = float("inf")
        time.sleep(max(0.0, self._settled() - self.now))
        self.checks.append(self.world.check(self.now))

    def _scrape(self) -> None:
        for path in ("/metrics", "/status"):
            self.scrapes += 1
            self.unanswered += self.world.get(path) is None

    def sample(self) -> None:
        world, now = self.world, time.monotonic()
        told = world.controller.ask("tell")
        fresh = told["fresh"] - self._before.get("fresh", 0)
        asked = told["asked"] - self._before.get("asked", 0)
        if world.counts["sidecar"] != self._sidecars:
            self._sidecars = world.counts["sidecar"]
            self._fresh = HISTORY_ENTRIES  # which the controller tells it
            fresh = round(fresh * min(1.0, (now - world.born["sidecar"]) / (now - self._sampled)))
        self._fresh += fresh
        ages = {f"{kind} {n}": now - world.born[kind] for kind, n in world.counts.items()}
        filled = {
            f"controller {world.counts['controller']}": told["fresh"] / self.keys,
            f"sidecar {world.counts['sidecar']}": self._fresh / self._until_full,
            f"schedulers {world.counts['schedulers']}": verdict.SETTLED,
        }
        blocks = world.schedulers.ask("tell")["blocks"]
        rate = round(asked / (now - self._sampled), 1)
        self.rows.append(Row(round(self.now, 1), ages, world.usage(), told, blocks, filled, rate))
        self._before, self._sampled = told, now

    def _tell(self, told: "tqdm[Any]") -> None:
        row = self.rows[-1]
        sizes = " ".join(f"{name} {usage.mib:.1f}" for name, usage in row.usage.items())
        drift = sum(check.drift for check in self.checks)
        told.set_postfix_str(f"{row.rate:.0f}/s, MiB: {sizes}, drift {drift}")
        told.update(min(self.now, self.seconds) - told.n)

    def result(self) -> dict[str, Any]:
        """All figures, and what is out of bounds."""
        found = verdict.summary(self.rows, self.checks, dict(self.events))
        ranks = self.world.schedulers.ask("tell")["ranks"]
        found["died_with_a_scheduler"] = sum(rank["died"] for rank in ranks)
        found["scrapes"], found["scrapes_unanswered"] = self.scrapes, self.unanswered
        found["broken"] = verdict.broken(found)
        return found


@contextlib.contextmanager
def prepared(seconds: float, rate: float, keys: int = KEYS) -> Iterator[Soak]:
    """A soak with its processes, which end with the block."""
    with tempfile.TemporaryDirectory(prefix="dps-") as folder:
        world = World(Path(folder), rate, keys)
        try:
            yield Soak(world, seconds, keys)
        finally:
            world.close()


def keep(soak: Soak, result: dict[str, Any], out: Path) -> None:
    """The samples and the picture."""
    out.mkdir(parents=True, exist_ok=True)
    samples = [row._asdict() | {"usage": _plain(row)} for row in soak.rows]
    checks = [check._asdict() for check in soak.checks]
    (out / "samples.json").write_text(
        json.dumps({"machine": report.machine(), **result, "checks_made": checks, "rows": samples})
    )
    picture.draw(soak.rows, soak.checks, out / "soak.png")


def _plain(row: Row) -> dict[str, Any]:
    return {name: usage._asdict() for name, usage in row.usage.items()}


def main() -> int:
    parser = report.arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="how long (default: 30)")
    parser.add_argument("--rate", type=float, default=2000, help="requests a second (default)")
    parser.add_argument("--out", type=Path, default=Path("bench/out/soak"), help="folder")
    options = parser.parse_args()
    os.environ.pop("NOTIFY_SOCKET", None)
    seconds = options.minutes * 60
    with (
        tqdm(total=seconds, unit="s", mininterval=SAMPLE, file=sys.stderr) as told,
        prepared(seconds, options.rate) as soak,
    ):
        try:
            soak.run(told)
        finally:
            result = soak.result()
            keep(soak, result, options.out)
    report.show(result, list(lines(result)), as_json=options.json)
    return bool(result["broken"])


def lines(result: dict[str, Any]) -> Iterator[list[str]]:
    """The result as a table of names and values."""
    for name, value in result.items():
        each = value if isinstance(value, list) and value else [value]
        for part in each:
            text = ", ".join(f"{k} {v}" for k, v in part.items()) if isinstance(part, dict) else ""
            yield [name, text or str(part)]


if __name__ == "__main__":
    sys.exit(main())
