"""The controller in the model: the real hook, and what is true of it."""

import functools
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser, Dispatch
from sidecar import wire
from sidecar.errors import PeerError
from sidecar.hashing import key_hash, normalize_key, preferred, session_hash
from sidecar.wire import Reply
from tests.model.network import Network, Peer, ReqSocket
from tests.model.scheduler import Clock, Job
from tests.support import INSTANCE


@functools.cache
def _tokens(text: int, length: int) -> "array[int]":
    return array("q", range(text, text + length))


class Request(NamedTuple):
    """What a client sends. text: how the prompt begins; length: tokens."""

    key: str | None
    text: int = 0
    length: int = 1
    session: str | None = None

    @property
    def tokens(self) -> "array[int]":
        """Two prompts of one text share what the shorter one has."""
        return _tokens(self.text, self.length)

    @property
    def dispatch(self) -> Dispatch:
        return Dispatch(self.header, self.tokens, (None, None, None), self.session)

    @property
    def header(self) -> str | None:
        """The routing key as it is sent."""
        return "k" * 2000 if self.key == "long" else self.key

    @property
    def affinity(self) -> int | None:
        """What it is recognised by; None: it has neither key nor session."""
        if self.session:
            return session_hash(self.session)
        key = normalize_key(self.header)
        return key_hash(key) if key else None


class Controller:
    """One controller process: hook, counters, and what is true of them.

    live: ascending ids of the live ranks; send: puts a job into a rank's socket.
    """

    def __init__(
        self,
        number: int,
        clock: Clock,
        network: Network,
        live: Callable[[], list[int]],
        send: Callable[[int, Job], None],
    ) -> None:
        self.number, self.live, self.send = number, live, send
        self.chooser = Chooser(INSTANCE, clock.wall, {"hook": "model"}, live, 64, clock)
        self.client = SidecarClient("ipc:///q", 5, 1, 0.05, self.chooser.probe, clock)
        self.socket = ReqSocket(network, self._look)
        self.client._peer = Peer(self.socket)  # type: ignore[assignment]
        self.client.heard = self.chooser.heard
        self.chooser.ask = self.client.ask
        self.chooser.meter = self.client.meter
        self.sent: Counter[int] = Counter()
        self.sent_tokens: Counter[int] = Counter()
        self.last: dict[int, int] = {}
        """Affinity of a key or session -> where its last request went, by whatever path."""
        self.placed = 0
        """Requests that the sidecar placed."""
        self.asked = 0
        """Requests in all."""
        self._seq = 0
        self._turn = 0
        self._under_way: list[Request] = []
        self._asking: wire.Query | None = None

    @property
    def epoch(self) -> int:
        return self.chooser.epoch

    def ask(self, requests: Sequence[Request]) -> None:
        """Place requests, one call for all of them, and send them."""
        before = self._counted()
        self.socket.taken, self._asking = None, None
        self._under_way = [one for one in requests if not one.session]
        if len(requests) == 1:
            ranks = [self.chooser.choose_one(requests[0].dispatch)]
        else:
            ranks = self.chooser.choose([one.dispatch for one in requests])
        expected, placed = self._expected(requests)
        assert ranks == expected, "where the sidecar says, else where the key was, else nowhere"
        self.asked += len(requests)
        self.placed += placed
        assert self._counted() - before == len(requests) - placed, "each has one cause"
        for one, rank in zip(requests, ranks, strict=True):
            if rank is not None and one.affinity is not None:
                self.last[one.affinity] = rank
            self.deliver(one, rank)
        self._under_way = []

    def explicit(self, request: Request, rank: int) -> None:
        """A request that names its rank."""
        self.chooser.abstain("pinned")
        self.chooser.remember(request.dispatch, rank)
        self.asked += 1
        if request.affinity is not None:
            self.last[request.affinity] = rank
        self.deliver(request, rank)

    def health_check(self) -> None:
        """SGLang's own, which goes out uncounted by any policy."""
        self.chooser.abstain("health_check")
        self.asked += 1
        self.deliver(Request(None), None)

    def deliver(self, request: Request, rank: int | None) -> None:
        """Send it; without a rank SGLang's round robin chooses one."""
        live = self.live()
        if not live:
            return
        if rank is None:
            self._turn += 1
            rank = live[self._turn % len(live)]
        assert rank in live, "nothing goes to a rank that is down"
        size = request.length
        self.chooser.sent.count(rank, size)
        self.sent[rank] += 1
        self.sent_tokens[rank] += size
        self.send(rank, Job(size, self.number))

    def _counted(self) -> int:
        return self.chooser.bypassed.total() + self.chooser.abstained.total()

    def _expected(self, requests: Sequence[Request]) -> tuple[list[int | None], int]:
        """Where each must go, and how many of them the sidecar placed."""
        live = self.live()
        if not live:
            return [None] * len(requests), 0
        answer = iter(self._answer())
        ranks: list[int | None] = []
        placed = 0
        for one in requests:
            rank = None if one.session else next(answer, None)
            if rank in live:
                placed += 1
            elif one.affinity is None:
                rank = None
            else:
                last = self.last.get(one.affinity)
                # Of one call each sees where those of its key before it went, if not their rank
                # by the sidecar: these are noted as they are settled.
                known = self._settled(requests, ranks, one.affinity)
                last = known if known is not None else last
                rank = last if last in live else preferred(one.affinity, live)
            ranks.append(rank)
        return ranks, placed

    @staticmethod
    def _settled(
        requests: Sequence[Request], ranks: Sequence[int | None], affinity: int
    ) -> int | None:
        """Where the last request of that affinity before this one went in the same call."""
        pairs = list(zip(requests, ranks, strict=False))
        return next((rank for one, rank in reversed(pairs) if one.affinity == affinity), None)

    def _answer(self) -> list[int]:
        """The ranks of a sound answer to the very query that asked, if it came in time."""
        data, query = self.socket.taken, self._asking
        if data is None or query is None:
            return []
        try:
            reply = wire.decode_answer(data)
        except PeerError:
            return []
        if not isinstance(reply, Reply) or reply.seq != query.seq:
            return []
        return reply.ranks if len(reply.ranks) == len(query.requests) else []

    def _look(self, payload: bytes) -> None:
        """Every query tells the truth."""
        query = wire.decode_query(payload)
        assert query.seq > self._seq, "no number is used twice"
        self._seq = query.seq
        assert (query.epoch, query.ranks) == (self.epoch, self.live())
        assert query.sent == [self.sent[rank] for rank in query.ranks]
        assert query.sent_tokens == [self.sent_tokens[rank] for rank in query.ranks]
        if not query.requests:
            return
        self._asking = query
        assert len(query.requests) == len(self._under_way)
        for facts, one in zip(query.requests, self._under_way, strict=True):
            assert facts.tokens == one.length
            if one.affinity is not None:
                assert facts.last_rank == self.last.get(one.affinity, -1)
