"""The controller side: builds queries, remembers facts, decides locally when nobody answers.

Knows no name of SGLang's; `patches` brings the requests in as `Dispatch` and takes ranks out.
"""

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sidecar import hashing, wire


class Dispatch(NamedTuple):
    """One request to place."""

    routing_key: str | None
    tokens: Any
    """Prompt token ids, shape (n,): list, array or numpy array; None if the prompt has none."""
    namespace: tuple[str | None, ...]
    """What separates radix caches: extra_key, cache_salt, LoRA id."""
    session: str | None = None
    """Id of an SGLang session, whose state lives in one scheduler."""


class LastRanks:
    """Least-recently-used table: affinity hash -> (rank, monotonic seconds), bounded."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._table: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def get(self, affinity: int) -> tuple[int, float] | None:
        return self._table.get(affinity)

    def put(self, affinity: int, rank: int, now: float) -> None:
        table = self._table
        table[affinity] = (rank, now)
        table.move_to_end(affinity)
        if len(table) > self.capacity:
            table.popitem(last=False)


class SentCounters:
    """Requests and prompt tokens sent to each rank by any path since the process started."""

    def __init__(self) -> None:
        self._requests: list[int] = []
        self._tokens: list[int] = []

    def count(self, rank: int, tokens: int) -> None:
        missing = rank + 1 - len(self._requests)
        if missing > 0:
            self._requests += [0] * missing
            self._tokens += [0] * missing
        self._requests[rank] += 1
        self._tokens[rank] += tokens

    def of(self, ranks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Requests and tokens of each of `ranks` (ascending ids); to be read, not kept."""
        if ranks and ranks[-1] >= len(self._requests):
            self._requests += [0] * (ranks[-1] + 1 - len(self._requests))
            self._tokens += [0] * (ranks[-1] + 1 - len(self._tokens))
        if len(ranks) == len(self._requests):
            return self._requests, self._tokens
        return [self._requests[rank] for rank in ranks], [self._tokens[rank] for rank in ranks]


class Chooser:
    """Asks the sidecar for ranks; decides by itself when it must.

    live_ranks: ascending ids of the live ranks. `ask` takes an encoded query and its sequence
    number, and gives the reply or a bypass cause.
    """

    def __init__(
        self,
        instance: str,
        epoch: int,
        about: dict[str, str],
        live_ranks: Callable[[], list[int]],
        last_rank_keys: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instance = instance
        self.epoch = epoch
        self.about = about
        self.ask: Callable[[bytes, int], wire.Reply | str] = lambda query, seq: "unreachable"
        self.live_ranks = live_ranks
        self.clock = clock
        self.sent = SentCounters()
        self.last_ranks = LastRanks(last_rank_keys)
        self.bypassed: Counter[str] = Counter()
        self.abstained: Counter[str] = Counter()
        self.want = wire.Want()
        self._seq = 0
        self._boot: int | None = None
        self._news = 0
        """Counts changes of `bypassed` and `abstained`."""
        self._told: int | None = None
        """`_news` that the sidecar knows; None: it knows nothing of us."""
        self._telling: tuple[int, bool] = (0, False)
        """`_news` in the query under way, and whether it tells everything."""

    def choose_one(self, dispatch: Dispatch) -> int | None:
        """A live rank for one request; None: SGLang's own method decides."""
        live = self.live_ranks()
        if not live:
            self.bypass("no_live_rank")
            return None
        now = self.clock()
        facts, affinity = self._facts(dispatch, now)
        rank = None
        if dispatch.session:
            # A session's state lives in one scheduler: no guard may move it, so nobody is asked.
            self.bypass("session")
        else:
            (rank,) = self._remote([facts], live)
        keyed = bool(facts.routing_key or dispatch.session)
        return self._settle(affinity, rank, live, now, keyed=keyed)

    def choose(self, dispatches: Sequence[Dispatch]) -> list[int | None]:
        """The same for many requests, in one query."""
        live = self.live_ranks()
        if not live:
            self.bypass("no_live_rank", len(dispatches))
            return [None] * len(dispatches)
        now = self.clock()
        placed = [self._facts(dispatch, now) for dispatch in dispatches]
        asked = [i for i, dispatch in enumerate(dispatches) if not dispatch.session]
        if len(asked) < len(dispatches):
            self.bypass("session", len(dispatches) - len(asked))
        ranks: list[int | None] = [None] * len(dispatches)
        answers = self._remote([placed[i][0] for i in asked], live)
        for position, rank in zip(asked, answers, strict=True):
            ranks[position] = rank
        return [
            self._settle(affinity, rank, live, now, keyed=bool(facts.routing_key or one.session))
            for one, (facts, affinity), rank in zip(dispatches, placed, ranks, strict=True)
        ]

    def _settle(
        self, affinity: int | None, rank: int | None, live: list[int], now: float, *, keyed: bool
    ) -> int | None:
        """Decide locally what nobody decided; remember where the key went.

        keyed: a routing key or a session. A prompt without one is SGLang's to place: there is no
        guard here, and a prefix that everybody shares would put all of them on one rank.
        """
        if affinity is None or (rank is None and not keyed):
            return rank
        if rank is None:
            rank = self._local(affinity, live)
        self.last_ranks.put(affinity, rank, now)
        return rank

    def bypass(self, cause: str, requests: int = 1) -> None:
        """Count requests decided without the sidecar."""
        self.bypassed[cause] += requests
        self._news += 1

    def abstain(self, cause: str) -> None:
        """Count a request that is SGLang's to place."""
        self.abstained[cause] += 1
        self._news += 1

    def remember(self, dispatch: Dispatch, rank: int) -> None:
        """Note where a request went that was not ours to place (an explicit rank)."""
        now = self.clock()
        _, affinity = self._facts(dispatch, now)
        if affinity is not None:
            self.last_ranks.put(affinity, rank, now)

    def probe(self) -> bytes:
        """An encoded query without requests, which tells every fact."""
        return self._query([], self.live_ranks(), everything=True)

    def heard(self, reply: wire.Reply) -> None:
        """Learn from a reply what the policy wants, and what the sidecar knows by now."""
        self.want = reply.want
        news, everything = self._telling
        known = everything or reply.boot == self._boot
        # A new sidecar knows of the past only what a query told it: tell it all next time.
        self._told = news if known else None
        self._boot = reply.boot

    def _facts(self, dispatch: Dispatch, now: float) -> tuple[wire.RequestFacts, int | None]:
        """What the sidecar is told of a request, and its affinity hash."""
        want = self.want
        key = hashing.normalize_key(dispatch.routing_key)
        tokens = dispatch.tokens if dispatch.tokens is not None else array("q")
        affinity = hashing.key_hash(key) if key else None
        if dispatch.session:
            affinity = hashing.session_hash(dispatch.session)
        namespace, prefix, blocks = 0, None, []
        if want.block_tokens or (want.prefix_tokens and (want.prefix_with_key or not key)):
            namespace = hashing.namespace_hash(*dispatch.namespace)
            if want.prefix_tokens and (want.prefix_with_key or not key):
                prefix = hashing.prefix_hash(tokens, want.prefix_tokens, namespace)
            if want.block_tokens:
                blocks = hashing.block_hashes(tokens, want.block_tokens, want.max_blocks, namespace)
        if affinity is None:
            affinity = prefix
        last = None if affinity is None else self.last_ranks.get(affinity)
        rank, age = (-1, -1) if last is None else (last[0], int((now - last[1]) * 1000))
        facts = wire.RequestFacts(key, namespace, len(tokens), prefix, blocks, rank, age)
        return facts, affinity

    def _remote(self, facts: list[wire.RequestFacts], live: list[int]) -> list[int | None]:
        """Ask the sidecar; None where it gave no live rank. Counts every cause."""
        if not facts:
            return []
        nothing: list[int | None] = [None] * len(facts)
        query = self._query(facts, live) if len(facts) <= wire.MAX_BATCH else b""
        if not 0 < len(query) <= wire.MAX_MESSAGE_BYTES:
            self.bypass("oversized", len(facts))
            return nothing
        answer = self.ask(query, self._seq)
        if isinstance(answer, str):
            self.bypass(answer, len(facts))
            return nothing
        if len(answer.ranks) != len(facts):
            self.bypass("malformed", len(facts))
            return nothing
        ranks = [rank if rank in live else None for rank in answer.ranks]
        if None in ranks:
            self.bypass("invalid_rank", ranks.count(None))
        return ranks

    def _local(self, affinity: int, live: list[int]) -> int:
        """Last rank of the key if alive, else its rendezvous rank."""
        last = self.last_ranks.get(affinity)
        if last is not None and last[0] in live:
            return last[0]
        return hashing.preferred(affinity, live)

    def _query(
        self, facts: list[wire.RequestFacts], live: list[int], *, everything: bool = False
    ) -> bytes:
        self._seq += 1
        sent, sent_tokens = self.sent.of(live)
        everything = everything or self._told is None
        news = everything or self._told != self._news
        self._telling = (self._news, everything)
        return wire.encode(
            wire.Query(
                wire.VERSION,
                self._seq,
                self.instance,
                self.epoch,
                live,
                sent,
                sent_tokens,
                facts,
                dict(self.bypassed) if news else None,
                dict(self.abstained) if news else None,
                self.about if everything else None,
            )
        )
