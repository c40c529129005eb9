"""What another policy would have done with the traffic of a log (`shadow.Shadow`)."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

from sidecar.budget import Budget
from sidecar.errors import ConfigError
from sidecar.journal.account import Account
from sidecar.journal.decoder import Began, Change, Decision, Report
from sidecar.journal.playback import Maker
from sidecar.journal.reader import Reader
from sidecar.journal.record import Head
from sidecar.policies import SPILLS, Policy
from sidecar.policies.prefix_affinity import PrefixAffinity
from sidecar.seat import Expected, Seat
from sidecar.shadow import MAX_KEYS, Shadow
from sidecar.wire import VERSION, Query, Reply, RequestFacts, Want

WINDOW_SECONDS = 60.0
Work = dict[tuple[str, int], float]
"""(instance, rank) -> prompt tokens that it had to compute for what was assigned to it."""


def imbalance(work: Work, ranks: Iterable[tuple[str, int]]) -> float:
    """Work of the busiest ranks over that of the average ones, all instances together; 1: even."""
    each: dict[str, list[float]] = defaultdict(list)
    for instance, rank in ranks:
        each[instance].append(work.get((instance, rank), 0.0))
    mean = sum(sum(one) / len(one) for one in each.values())
    return sum(max(one) for one in each.values()) / mean if mean else 1.0


class Side:
    """One of the two: what was decided, or what would have been."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.requests = self.spills = self.tokens = self.moved = 0
        self.expected = self.avoidable = 0.0
        self._work: Work = defaultdict(float)
        self._window: Work = defaultdict(float)
        self._windows: list[tuple[float, float]] = []
        """Imbalance of each window, and its work."""
        self._last: OrderedDict[tuple[str, bytes], int] = OrderedDict()

    def add(
        self, instance: str, facts: RequestFacts, rank: int, reason: str, expected: Expected
    ) -> None:
        """One decision."""
        held, most = expected
        self.requests += 1
        self.reasons[reason] += 1
        self.spills += reason in SPILLS
        self.tokens += facts.tokens
        self.expected += held
        self.avoidable += max(0.0, most - held)
        uncached = max(0.0, facts.tokens - held)
        self._work[instance, rank] += uncached
        self._window[instance, rank] += uncached
        if facts.routing_key:
            self._went(instance, facts.routing_key, rank)

    def _went(self, instance: str, key: bytes, rank: int) -> None:
        before = self._last.pop((instance, key), rank)
        self.moved += before != rank
        self._last[instance, key] = rank
        if len(self._last) > MAX_KEYS:
            self._last.popitem(last=False)

    def close_window(self, ranks: set[tuple[str, int]]) -> None:
        """A minute is over."""
        work = sum(self._window.values())
        if work:
            self._windows.append((imbalance(self._window, ranks), work))
        self._window.clear()

    def told(self, ranks: set[tuple[str, int]], *, predicts: bool) -> dict[str, Any]:
        """As it is shown."""
        weight = sum(work for _, work in self._windows)
        minutes = sum(value * work for value, work in self._windows) / weight if weight else 1.0
        return {
            "requests": self.requests,
            "reasons": dict(self.reasons.most_common()),
            "spills": self.spills,
            "sessions_moved": self.moved,
            "prompt_tokens": self.tokens,
            "expected_cached_tokens": round(self.expected) if predicts else None,
            "avoidable_prefill_tokens": round(self.avoidable) if predicts else None,
            "imbalance": round(imbalance(self._work, ranks), 4),
            "imbalance_by_minute": round(minutes, 4),
        }


class Contest:
    """Plays a log to another policy."""

    def __init__(
        self, reader: Reader, name: str, params: dict[str, Any], load: tuple[str, ...] = ()
    ) -> None:
        self._account = Account(reader)
        self._maker = Maker(reader.seal, load)
        self._name, self._params = name, params
        self.policy = self._maker.make(name, params)
        self._shadow: Shadow | None = None
        self._instance = ""
        self._boot = 0
        self._sides = {"active": Side(), "shadow": Side()}
        self._went: int = -1
        self.agreed = 0
        self._ranks: set[tuple[str, int]] = set()
        self._policies: Counter[str] = Counter()
        self._window = 0.0
        self._wants: set[Want] = set()
        self.errors = 0
        self._known: dict[int, str] = {}
        """Version -> the policy in force."""

    def run(self) -> dict[str, Any]:
        """The report. Raises LogError and ConfigError."""
        for event in self._account.events():
            if isinstance(event, Began):
                self._begin(event.head)
            elif self._shadow is None:
                continue
            elif isinstance(event, Report):
                self._shadow.report(event.report, event.now)
            elif isinstance(event, Change):
                self._asked(event.state.want)
                self._known[event.state.version] = event.state.policy
            elif isinstance(event, Decision):
                self._decide(self._shadow, event)
        for side in self._sides.values():
            side.close_window(self._ranks)
        return self._told()

    def _begin(self, head: Head) -> None:
        self._asked(head.state.want)
        if self._shadow is not None and head.boot == self._boot:
            return
        self._boot = head.boot
        self._known = {head.state.version: head.state.policy}
        active = self._maker.make(head.state.policy, head.state.params)
        budget = Budget(head.stale_seconds, head.max_instances)
        # One of its own for each start: a policy may keep something outside its memory.
        self.policy = self._maker.make(self._name, self._params)
        self._shadow = Shadow(self.policy, Seat(active, budget, self._failed))
        self._shadow.told = self._add
        for at, report in head.reports:
            self._shadow.report(report, at)

    def _decide(self, shadow: Shadow, event: Decision) -> None:
        query = event.query
        self._instance = query.instance
        self._ranks.update((query.instance, rank) for rank in query.ranks)
        self._policies[self._known.get(event.version, "unknown")] += len(query.requests)
        window = event.now // WINDOW_SECONDS
        if window != self._window:
            self._window = window
            for side in self._sides.values():
                side.close_window(self._ranks)
        for _ in shadow.follow(query, _reply(query, event), event.now):
            pass

    def _add(
        self, role: str, facts: RequestFacts, rank: int, reason: str, expected: Expected
    ) -> None:
        self._sides[role].add(self._instance, facts, rank, reason, expected)
        if role == "shadow":
            self._went = rank
        else:
            self.agreed += rank == self._went

    def _asked(self, want: Want) -> None:
        """Check that the log holds what the policy reads. Raises ConfigError."""
        self._wants.add(want)
        wants = self.policy.want
        blocks, told = wants.block_tokens, want.block_tokens
        if blocks and told and blocks != told:
            raise ConfigError(
                f"block_tokens: the log holds hashes of blocks of {told} tokens, not of {blocks}: "
                f"give block_tokens={told}"
            )
        tokens, told = wants.prefix_tokens, want.prefix_tokens
        if tokens and told and tokens != told:
            raise ConfigError(
                f"hash_tokens: the log holds hashes of prefixes of {told} tokens, not of "
                f"{tokens}: give hash_tokens={told}"
            )

    def _told(self) -> dict[str, Any]:
        active = self._sides["active"]
        predicts = any(want.block_tokens for want in self._wants)
        comparable = not (self._account.sealed and _by_hash(self.policy))
        share = self.agreed / active.requests if active.requests else None
        return {
            "log": self._account.told(),
            "policies": dict(self._policies),
            "policy": {"name": self.policy.name, "params": self._params},
            "compared": active.requests,
            "agreement": round(share, 6) if share is not None and comparable else None,
            "logged": active.told(self._ranks, predicts=predicts),
            "replayed": self._sides["shadow"].told(self._ranks, predicts=predicts),
            "policy_errors": self.errors,
            "notes": self._notes(predicts=predicts, comparable=comparable),
        }

    def _notes(self, *, predicts: bool, comparable: bool) -> list[str]:
        notes = []
        if predicts:
            notes.append(
                "expected and avoidable tokens are predictions of kv_affinity's index, not "
                "measurements; the loads are those that the logged decisions made"
            )
        else:
            notes.append(
                "the log holds no block hashes (its policies did not ask for them), so nothing is "
                "known of caches and imbalance counts whole prompts"
            )
        if self.policy.want.prefix_tokens and not any(want.prefix_tokens for want in self._wants):
            notes.append("the log holds no prefix hashes: requests without a key have none")
        if not comparable:
            notes.append(
                "the secret of the log is not beside it: sessions are spread alike, but to other "
                "ranks than their keys would have chosen, so agreement says nothing"
            )
        if not self._account.whole:
            notes.append("the log begins in mid-life, or something is missing (see the log's line)")
        return notes

    def _failed(self, error: Exception) -> None:
        self.errors += 1


def _by_hash(policy: Policy) -> bool:
    return isinstance(policy, PrefixAffinity)


def _reply(query: Query, event: Decision) -> Reply:
    """What was answered, as far as the log says."""
    return Reply(VERSION, query.seq, 0, "", event.version, event.ranks, event.reasons, Want())
