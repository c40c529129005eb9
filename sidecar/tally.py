"""What was decided for one instance since the sidecar started; plain numbers for metrics."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from sidecar.wire import Query, Telemetry

# Pairs of ranks whose spills are told apart: all of 64 ranks, the busiest of 320.
MAX_PAIRS = 4096


@dataclass(slots=True)
class Role:
    """What one role did: the active policy, the canary, or the shadow (which only would have)."""

    requests: int = 0
    spills: int = 0
    prompt_tokens: int = 0
    """Of the requests of which the policy tells what is cached; the next two are of those too."""
    expected_tokens: float = 0.0
    """Tokens expected in the cache of the rank chosen."""
    avoidable_tokens: float = 0.0
    """Regret: tokens that another live rank was expected to hold beyond those."""

    def add(self, tokens: int, expected: tuple[float, float] | None, *, spilled: bool) -> None:
        """Count one request. expected: tokens held by the rank chosen, and by the best one."""
        self.requests += 1
        self.spills += spilled
        if expected is not None:
            held, most = expected
            self.prompt_tokens += tokens
            self.expected_tokens += held
            self.avoidable_tokens += max(0.0, most - held)


def _roles() -> dict[str, Role]:
    return {"active": Role(), "canary": Role()}


@dataclass(slots=True)
class Tally:
    """Counters of one instance."""

    decisions: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """policy -> reason -> requests."""
    roles: dict[str, Role] = field(default_factory=_roles)
    spills: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(preferred rank, chosen rank) -> requests, whatever kept them off the preferred rank."""
    queries: int = 0
    unguarded: int = 0
    """Requests decided while no load was known."""
    bypassed: dict[str, int] = field(default_factory=dict)
    """Cause -> requests that the hook decided alone, since its controller started."""
    abstained: dict[str, int] = field(default_factory=dict)
    """Cause -> requests that the hook left to SGLang, since its controller started."""
    about: dict[str, str] = field(default_factory=dict)
    """Versions and settings that the hook told."""
    telemetry: Telemetry | None = None
    """What the hook measured of its queries, as it last told."""
    newest: tuple[int, int] = (-1, -1)
    """Epoch of the controller and number of the query that told all this."""

    def hear(self, query: Query) -> None:
        """Take in what the hook counted by itself."""
        self.queries += 1
        epoch, seq = self.newest
        if query.epoch == epoch and query.seq < seq:
            return  # it was late: younger ones have told more
        self.newest = query.epoch, query.seq
        if query.bypassed is not None:
            self.bypassed = query.bypassed
        if query.abstained is not None:
            self.abstained = query.abstained
        if query.about is not None:
            self.about = query.about
        if query.telemetry is not None:
            self.telemetry = query.telemetry

    def count_spill(self, preferred: int, chosen: int) -> None:
        """Count a spill; pairs beyond MAX_PAIRS count as (-1, -1)."""
        pair = (preferred, chosen)
        if pair not in self.spills and len(self.spills) >= MAX_PAIRS:
            pair = (-1, -1)
        self.spills[pair] += 1
