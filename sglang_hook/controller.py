"""The controller side: builds queries, remembers facts, decides locally when nobody answers.

Knows no name of SGLang's; `patches` brings the requests in as `Dispatch` and takes ranks out.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from sglang_hook.facts import Dispatch, Known, look_at
from sglang_hook.memory import History, LastRanks, SentCounters
from sglang_hook.telemetry import Meter
from sidecar import hashing, wire

__all__ = ("Chooser", "Dispatch", "LastRanks", "SentCounters")


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
        self.history = History()
        self.meter = Meter()
        """Of whoever is behind `ask`."""
        self.bypassed: Counter[str] = Counter()
        self.abstained: Counter[str] = Counter()
        self.want = wire.Want()
        self._seq = 0
        self._boot: int | None = None
        self._news = 0
        """Counts changes of `bypassed` and `abstained`."""
        self._told: int | None = None
        """`_news` that the sidecar knows; None: it knows nothing of us."""
        self._telling: tuple[int, int, int | None] = (0, 0, None)
        """Number of the query made last, `_news` in it, and the boot of the sidecar that knows
        everything by it; None: any does."""

    def choose_one(self, dispatch: Dispatch) -> int | None:
        """A live rank for one request; None: SGLang's own method decides."""
        live = self.live_ranks()
        if not live:
            self.bypass("no_live_rank")
            return None
        now = self.clock()
        known = look_at(dispatch, self.want, self.last_ranks, now)
        rank = None
        if dispatch.session:
            # A session's state lives in one scheduler: no guard may move it, so nobody is asked.
            self.bypass("session")
        else:
            (rank,) = self._remote([known.facts], live)
        return self._settle(known, rank, live, now)

    def choose(self, dispatches: Sequence[Dispatch]) -> list[int | None]:
        """The same for many requests, in one query."""
        live = self.live_ranks()
        if not live:
            self.bypass("no_live_rank", len(dispatches))
            return [None] * len(dispatches)
        now = self.clock()
        known = [look_at(dispatch, self.want, self.last_ranks, now) for dispatch in dispatches]
        asked = [i for i, dispatch in enumerate(dispatches) if not dispatch.session]
        if len(asked) < len(dispatches):
            self.bypass("session", len(dispatches) - len(asked))
        ranks: list[int | None] = [None] * len(dispatches)
        answers = self._remote([known[i].facts for i in asked], live)
        for position, rank in zip(asked, answers, strict=True):
            ranks[position] = rank
        return [self._settle(one, rank, live, now) for one, rank in zip(known, ranks, strict=True)]

    def _settle(self, known: Known, rank: int | None, live: list[int], now: float) -> int | None:
        """Decide locally what nobody decided; remember where it went."""
        decided = rank is not None
        if rank is None:
            if known.affinity is None or not known.keyed:
                return None
            rank = self._local(known.affinity, live)
        self._note(known, rank, now, decided=decided)
        return rank

    def _note(self, known: Known, rank: int, now: float, *, decided: bool) -> None:
        """Remember where a request went. decided: by the sidecar, which so knows of it."""
        if known.affinity is not None:
            self.last_ranks.put(known.affinity, rank, now)
        if known.conversation is not None:
            self.history.put(
                known.conversation, known.facts, known.want, rank, now, decided=decided
            )

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
        self._note(look_at(dispatch, self.want, self.last_ranks, now), rank, now, decided=False)

    def probe(self) -> bytes:
        """An encoded query without requests, which tells every fact."""
        return self._query([], self.live_ranks(), everything=True)

    def heard(self, reply: wire.Reply) -> None:
        """Learn from a reply what the policy wants, and what the sidecar knows by now."""
        if reply.want != self.want:  # else thousands of facts would hold equal ones
            self.want = reply.want
        self.history.heard(reply)
        seq, news, boot = self._telling
        # A new sidecar knows of the past only what a query told it: tell it all next time. Such a
        # query may have been made before it was heard of.
        if reply.seq == seq and boot in (None, reply.boot):
            self._told = news
        elif reply.seq == seq or reply.boot != self._boot:
            self._told = None
        self._boot = reply.boot

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
            self.history.missed()
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
        self._telling = (self._seq, self._news, None if everything else self._boot)
        query = wire.Query(
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
            self.history.part(self._seq, self.clock),
            self.meter.tell(everything=everything),
        )
        data = wire.encode(query)
        if query.history and len(data) > wire.MAX_MESSAGE_BYTES:
            query.history = self.history.withdraw()
            data = wire.encode(query)
        return data
