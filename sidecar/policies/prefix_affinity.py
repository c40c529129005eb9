"""Send each key where its cache is; spill when that rank is overloaded (SGLang PR 31170)."""

import math
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from sidecar.hashing import key_hash, normalize_key, scores
from sidecar.loads import LoadView
from sidecar.policies.base import Choice, Explanation, Offer, Reason
from sidecar.policies.least_loaded import METHODS
from sidecar.wire import RequestFacts, Want


class PrefixAffinityParams(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Parameters; the defaults are those of the PR, but for `min_load_gap`.

    A skew alone calls two requests on an idle server an overload: it would tear n=4 samples of one
    prompt apart, and throws caches away: docs/results.md has the sweep of both over 16 workloads.
    """

    max_load_skew: Annotated[
        float,
        Meta(
            ge=1.0,
            le=1e6,
            description="A rank with more than this times the average requests (the average being "
            "at least 1) is overloaded",
        ),
    ] = 1.5
    min_load_gap: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1e6,
            description="Requests above the average that a rank may hold whatever the skew says; "
            "0: the skew alone decides, as in SGLang PR 31170",
        ),
    ] = 4.0
    hash_tokens: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Leading tokens that the token-prefix key covers")
    ] = 4096
    token_fallback: Annotated[
        bool,
        Meta(description="Place a request without a routing key by its token-prefix key"),
    ] = True
    fallback: Annotated[
        Literal["round_robin", "total_requests", "total_tokens"],
        Meta(description="Method that places a request without any affinity key"),
    ] = "total_tokens"


# Requests of one key in one query that share the first one's rank: the samples or prompts of one
# call, which share a prefix. Beyond it a fan-out is a load like any other.
SAMPLES = 8

_BY_KEY = (Reason.AFFINITY_HIT, Reason.SPILL, Reason.STALE_SKIP)
_BY_PREFIX = (Reason.TOKEN_AFFINITY_HIT, Reason.TOKEN_SPILL, Reason.TOKEN_STALE_SKIP)


class PrefixAffinity:
    """Affinity key -> rendezvous order of the ranks -> overload guard -> load-aware fallback."""

    name: ClassVar[str] = "prefix_affinity"
    Params: ClassVar[type[msgspec.Struct]] = PrefixAffinityParams

    def __init__(self, params: PrefixAffinityParams) -> None:
        self.params = params
        self.want = Want(prefix_tokens=params.hash_tokens if params.token_fallback else 0)
        self.affinity = key_hash
        """Of a routing key; a replay, which knows no keys, has another."""
        self._skew, self._gap = params.max_load_skew, params.min_load_gap
        # No threshold is lower than this, whatever the average: below it nothing is computed.
        self._always = max(self._skew, self._gap)
        self._fallback = METHODS[params.fallback]

    def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
        key = facts.routing_key and normalize_key(facts.routing_key)
        if key:
            affinity, reasons = self.affinity(key), _BY_KEY
        elif facts.prefix_hash is not None and self.params.token_fallback:
            affinity, reasons = facts.prefix_hash, _BY_PREFIX
        else:
            return Choice(self._fallback(view, facts.tokens), Reason.FALLBACK)
        slot = affinity if reasons is _BY_KEY else ~affinity
        if slot in view.placed:
            position, reason, preferred, samples = view.placed[slot]
            if samples < SAMPLES:
                # The load that this key itself adds in one query does not drive it away.
                view.placed[slot] = position, reason, preferred, samples + 1
                return Choice(position, reason, preferred)
        order = scores(affinity, view.rank_bytes)
        preferred = order.index(max(order))
        load = view.requests[preferred]
        if view.usable[preferred] and (load <= self._always or load <= self.threshold(view)):
            choice = Choice(preferred, reasons[0], preferred)
        else:
            choice = self._leave(preferred, order, view, reasons)
        view.placed[slot] = (*choice, 1)
        return choice

    def explain(self, facts: RequestFacts, view: LoadView) -> Explanation:
        """Offers in rendezvous order; a rank is admitted up to the limit `load_requests`."""
        placed, cursor = dict(view.placed), view.cursor
        choice = self.choose(facts, view)
        view.placed, view.cursor = placed, cursor
        key = facts.routing_key and normalize_key(facts.routing_key)
        affinity = self.affinity(key) if key else facts.prefix_hash
        order = [0] * len(view.ranks)
        if choice.preferred >= 0 and affinity is not None:
            order = scores(affinity, view.rank_bytes)
        limit = self.threshold(view)
        offers = []
        for position in sorted(range(len(order)), key=lambda p: -order[p]):
            load = view.requests[position]
            figures = {
                "load_requests": float(load),
                "load_tokens": float(view.tokens[position]),
            }
            admitted = view.usable[position] and load <= limit
            offers.append(Offer(view.ranks[position], admitted, figures))
        preferred = view.ranks[choice.preferred] if choice.preferred >= 0 else -1
        return Explanation(choice, preferred, offers, {"load_requests": limit})

    def threshold(self, view: LoadView) -> float:
        """Requests up to which a rank is admitted: max(skew * max(average, 1), average + gap).

        Infinite while no load is known: affinity is all there is, a refusal would help nobody.
        """
        if not view.known:
            return math.inf
        average = view.average()
        return max(self._skew * max(average, 1.0), average + self._gap)

    def _leave(
        self, preferred: int, order: list[int], view: LoadView, reasons: tuple[str, str, str]
    ) -> Choice:
        """Take the next rank in rendezvous order that reports and is not overloaded."""
        _, spill, skip = reasons
        missed = spill if view.usable[preferred] else skip
        limit = self.threshold(view)
        # Never empty: the least loaded of the counted ranks, all usable, is not above the average.
        admitted = [
            position
            for position, load in enumerate(view.requests)
            if view.usable[position] and load <= limit
        ]
        return Choice(max(admitted, key=order.__getitem__), missed, preferred)
