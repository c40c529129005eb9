"""Each request goes where it costs least, its cache counted in. docs/policies.md has the evidence.

All costs are in tokens of prefill. A conversation (a routing key, or a prompt that goes on where an
earlier one ended) stays where its cache is until waiting there costs clearly more than computing
it anew elsewhere; a new one is placed where it costs least for as long as it lives.
"""

import math
from typing import Annotated, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from sidecar.hashing import block_ends, key_hash, normalize_key
from sidecar.loads import LoadView
from sidecar.policies.base import Choice, Explanation, Offer, Reason, next_of
from sidecar.policies.kv.costs import Costs
from sidecar.policies.kv.memory import Memory
from sidecar.policies.kv.spill import leaves
from sidecar.wire import LoadReport, RequestFacts, Want

MAX_BLOCKS = 128
BLOCK_GROWTH = 14
"""A block is a fourteenth of what precedes it: with 64-token blocks, 128 reach 1.38M tokens."""
REPLICA_SHARE = 0.9
"""A rank that holds this share of what the home holds is as good a home."""
HISTORY = 8192
"""Conversations that the hook tells a new sidecar of."""


class KvAffinityParams(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Parameters, in tokens of prefill and seconds; docs/policies.md shows half and double."""

    move_tokens: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="Tokens of waiting and prefill that leaving a cache must save at least",
        ),
    ] = 16_384.0
    move_ratio: Annotated[
        float,
        Meta(
            ge=1,
            le=1e6,
            description="Times that staying must cost more than leaving, for a cache to be left",
        ),
    ] = 2.0
    request_tokens: Annotated[
        float,
        Meta(ge=0, le=1e6, description="Tokens that each running or queued request counts as"),
    ] = 300.0
    recent_weight: Annotated[
        float,
        Meta(
            ge=0,
            le=1e3,
            description="Tokens that each token counts as, where a new conversation is placed, "
            "that is active in the rank's cache or was computed by it lately",
        ),
    ] = 0.1
    recent_seconds: Annotated[
        float, Meta(ge=1, le=86_400, description="How long a prompt is active after its last use")
    ] = 120.0
    block_tokens: Annotated[
        int, Meta(ge=1, le=1 << 16, description="Tokens of the first prefix blocks")
    ] = 64


class Home(NamedTuple):
    """The rank that a conversation belongs to."""

    position: int
    stay: str
    leave: str
    """Reasons for either."""
    costs: list[float]
    """What to compare it by with other ranks."""
    stake: float
    """Tokens of cache there that leaving would give up; infinite: more than this prompt shows."""


def _slot(facts: RequestFacts) -> int | None:
    """Hash of the routing key; None: there is none, or a blank one, which is none either."""
    key = facts.routing_key and normalize_key(facts.routing_key)
    return key_hash(key) if key else None


class KvAffinity:
    """Placement, binding and spilling by cost."""

    name: ClassVar[str] = "kv_affinity"
    Params: ClassVar[type[msgspec.Struct]] = KvAffinityParams

    def __init__(self, params: KvAffinityParams) -> None:
        self.params = params
        self.want = Want(
            block_tokens=params.block_tokens,
            max_blocks=MAX_BLOCKS,
            block_growth=BLOCK_GROWTH,
            history=HISTORY,
        )

    def new_memory(self) -> Memory:
        """Nothing known."""
        p, want = self.params, self.want
        ends = block_ends(want.block_tokens, want.max_blocks, want.block_growth)
        costs = Costs(p.request_tokens, p.recent_weight)
        return Memory(ends, p.recent_seconds, costs)

    def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
        memory: Memory = view.memory
        memory.look(view)
        held = memory.held(facts)
        home = self._home(facts, held, view)
        if home is None or not view.usable[home.position]:
            position = self._least(memory.costs.placing, held, view)
            if home is None:
                return Choice(position, Reason.PLACED)
            return Choice(position, Reason.STALE_SKIP, home.position)
        return self._stay_or_leave(home, facts, held, view)

    def learn(self, facts: RequestFacts, rank: int, age: float | None, view: LoadView) -> None:
        if age is not None:
            view.memory.told(facts, rank, view.now - age, view)
            return
        view.memory.catch_up(view)  # somebody else may have decided
        view.memory.sent(facts, rank, view.now)
        slot = _slot(facts)
        if slot is not None:
            # Of the samples of one prompt in one query only we know where the first went.
            position = view.position[rank]
            view.placed.setdefault(slot, (position, "", position, 1))

    def heard(self, report: LoadReport, view: LoadView, now: float) -> None:
        view.memory.heard(report, view, now)

    def expected(self, facts: RequestFacts, view: LoadView) -> dict[int, float]:
        memory: Memory = view.memory
        return memory.expected(facts, view)

    def explain(self, facts: RequestFacts, view: LoadView) -> Explanation:
        """Figures in tokens: what each rank holds of the prompt, what a request costs there, and
        what a conversation costs that is placed there. Limits: staying at home costs more than
        leaving by `move_tokens` and `move_ratio` before it is left."""
        cursor = view.cursor
        choice = self.choose(facts, view)
        view.cursor = cursor
        memory: Memory = view.memory
        held, costs = memory.held(facts), memory.costs
        home = self._home(facts, held, view)
        preferred = -1 if home is None else view.ranks[home.position]
        offers = []
        for position, rank in enumerate(view.ranks):
            lacking = facts.tokens - held.get(rank, 0.0)
            figures = {
                "load_requests": float(view.requests[position]),
                "held_tokens": held.get(rank, 0.0),
                "serving_tokens": costs.serving[position] + lacking,
                "placing_tokens": costs.placing[position] + lacking,
            }
            offers.append(Offer(rank, view.usable[position], figures))
        by = "placing_tokens" if home is None else "serving_tokens"
        offers.sort(key=lambda offer: (offer.rank != preferred, offer.figures[by]))
        limits = {"move_tokens": self.params.move_tokens, "move_ratio": self.params.move_ratio}
        return Explanation(choice, preferred, offers, limits)

    def _home(self, facts: RequestFacts, held: dict[int, float], view: LoadView) -> Home | None:
        """Where the request belongs: the last rank of its key, else the rank that holds most."""
        memory: Memory = view.memory
        position = view.position
        slot = _slot(facts)
        if slot is not None:
            if facts.last_rank in position and not memory.emptied_since(facts, view.now):
                here = position[facts.last_rank]
            elif slot in view.placed:
                here = view.placed[slot][0]
            else:
                return None
            # A key's next prompts need the cache there even where this prompt does not.
            costs, stake = memory.costs.serving, math.inf
            return Home(here, Reason.AFFINITY_HIT, Reason.SPILL, costs, stake)
        placing = memory.costs.placing
        most, cost, where = 0.0, 0.0, -1
        for rank, tokens in held.items():
            if tokens >= most and rank in position:
                at = position[rank]
                if tokens > most or where < 0 or placing[at] < cost:
                    most, cost, where = tokens, placing[at], at
        if where < 0:
            return None
        # A prefix that many begin with says nothing of where one more of them should live.
        goes_on = memory.goes_on(facts)
        costs = memory.costs.serving if goes_on else placing
        return Home(where, Reason.PREFIX_HIT, Reason.PREFIX_SPILL, costs, most)

    def _stay_or_leave(
        self, home: Home, facts: RequestFacts, held: dict[int, float], view: LoadView
    ) -> Choice:
        memory: Memory = view.memory
        here, there = home.position, self._least(home.costs, held, view)
        if not self._leaves(home, there, facts, held, view):
            return Choice(here, home.stay, here)
        mine, other = held.get(view.ranks[here], 0.0), held.get(view.ranks[there], 0.0)
        if 0 < REPLICA_SHARE * mine <= other:
            return Choice(there, Reason.REPLICA_HIT, there)
        # It will live where it goes: there if it is worth it, by what it costs for longer.
        longer = self._least(memory.costs.placing, held, view)
        if self._leaves(home, longer, facts, held, view):
            there = longer
        return Choice(there, home.leave, here)

    def _leaves(
        self,
        home: Home,
        there: int,
        facts: RequestFacts,
        held: dict[int, float],
        view: LoadView,
    ) -> bool:
        """Whether the request leaves its home for the rank at `there`."""
        if there == home.position:
            return False
        mine = held.get(view.ranks[home.position], 0.0)
        other = held.get(view.ranks[there], 0.0)
        stake = max(0.0, home.stake - other)
        stay = home.costs[home.position] + facts.tokens - mine
        leave = home.costs[there] + facts.tokens - other
        return leaves(stay, leave, stake, self.params.move_tokens, self.params.move_ratio)

    def _least(self, costs: list[float], held: dict[int, float], view: LoadView) -> int:
        """The position that costs least, what it holds counted; equals take turns."""
        where, positions = -1, view.position
        best = least = min(costs)
        for rank, tokens in held.items():
            if rank in positions:
                cost = costs[positions[rank]] - tokens
                if cost < best:
                    best, where = cost, positions[rank]
        if where >= 0:
            return where
        if costs.count(least) == 1:
            return next_of(view, [costs.index(least)])
        return next_of(view, [position for position, cost in enumerate(costs) if cost == least])
