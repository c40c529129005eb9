"""A server whose schedulers tell all that the policy listens to, and prompts made of letters."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sidecar.dispatcher import Dispatcher
from sidecar.hashing import block_ends
from sidecar.loads import LoadView
from sidecar.policies import make_policy
from sidecar.policies.kv_affinity import KvAffinityParams
from sidecar.wire import Past, Reply, RequestFacts
from tests.support import INSTANCE, query, report

WANT = make_policy("kv_affinity").want
ENDS = block_ends(WANT.block_tokens, WANT.max_blocks, WANT.block_growth)
DEFAULTS = KvAffinityParams()


def prompt(
    stem: str, tokens: int, key: str = "", *, shared: str = "", shared_tokens: int = 0, **more: Any
) -> RequestFacts:
    """A prompt of so many tokens; prompts of one stem are the same as far as both go.

    shared: stem of its first `shared_tokens` tokens. more: last_rank, last_age_ms.
    """
    blocks, chain = [], 0
    for end in ENDS[: bisect_right(ENDS, tokens)]:
        chain = hash((chain, shared if end <= shared_tokens else stem)) & (1 << 63) - 1
        blocks.append(chain)
    return RequestFacts(key.encode(), 0, tokens, None, blocks, **more)


def past(facts: RequestFacts, rank: int, age: float) -> Past:
    return Past(facts, rank, round(age * 1000))


@dataclass
class Scheduler:
    """One rank's figures."""

    epoch: int = 1
    seq: int = 0
    queue: list[int] = field(default_factory=list)
    """Prompt tokens of requests that were sent and not read yet."""
    figures: dict[str, int] = field(default_factory=dict)

    def add(self, **more: int) -> None:
        for name, amount in more.items():
            self.figures[name] = self.figures.get(name, 0) + amount

    def take_in(self, count: int | None = None) -> None:
        """Requests are read; they run, and are admitted at once."""
        taken, self.queue = self.queue[:count], self.queue[len(self.queue[:count]) :]
        self.add(received=len(taken), received_tokens=sum(taken), running=len(taken))
        self.add(admitted_tokens=sum(taken))


@dataclass
class Server:
    """A controller, which remembers the rank of each key, and its schedulers."""

    dispatcher: Dispatcher
    ranks: Sequence[int] = tuple(range(8))
    instance: str = INSTANCE
    now: float = 1000.0
    epoch: int = 1

    def __post_init__(self) -> None:
        self.ranks = list(self.ranks)
        self.schedulers = {rank: Scheduler() for rank in self.ranks}
        self.sent = dict.fromkeys(self.ranks, 0)
        self.sent_tokens = dict.fromkeys(self.ranks, 0)
        self.keys: dict[bytes, tuple[int, float]] = {}

    def send(self, rank: int, tokens: int) -> None:
        """The controller sends a request, whoever decided it."""
        self.sent[rank] += 1
        self.sent_tokens[rank] += tokens
        self.schedulers[rank].queue.append(tokens)

    def query(self, requests: Sequence[RequestFacts] = (), history: Sequence[Past] = ()) -> Any:
        return query(
            requests,
            ranks=self.ranks,
            sent=[self.sent[rank] for rank in self.ranks],
            sent_tokens=[self.sent_tokens[rank] for rank in self.ranks],
            instance=self.instance,
            epoch=self.epoch,
            history=list(history),
        )

    def ask(self, *requests: RequestFacts, history: Sequence[Past] = ()) -> Reply:
        """Requests in one query; the hook's memory of their keys is told with them."""
        for facts in requests:
            if facts.routing_key in self.keys and facts.last_rank == -1:
                rank, at = self.keys[facts.routing_key]
                facts.last_rank, facts.last_age_ms = rank, int((self.now - at) * 1000)
        reply = self.dispatcher.handle(self.query(requests, history), self.now)
        for rank, facts in zip(reply.ranks, requests, strict=True):
            self.send(rank, facts.tokens)
            if facts.routing_key:
                self.keys[facts.routing_key] = rank, self.now
        return reply

    def put(self, *requests: RequestFacts, **more: Any) -> list[int]:
        return self.ask(*requests, **more).ranks

    def report(self, rank: int) -> None:
        scheduler = self.schedulers[rank]
        scheduler.seq += 1
        said = report(
            rank,
            scheduler.seq,
            instance=self.instance,
            epoch=scheduler.epoch,
            **(dict.fromkeys(("received", "received_tokens", "running", "waiting"), 0))
            | scheduler.figures,
        )
        self.dispatcher.report(said, self.now)

    def say(self, rank: int, **figures: int) -> None:
        """A rank reports these figures."""
        self.schedulers[rank].figures |= figures
        self.report(rank)

    def finish(self) -> None:
        """All that was sent is served, and every rank says so."""
        for rank, scheduler in self.schedulers.items():
            scheduler.take_in()
            self.say(rank, running=0, waiting=0, prefilling_tokens=0)

    def restart(self, rank: int) -> None:
        """A rank's process dies and comes again."""
        self.schedulers[rank] = Scheduler(epoch=self.schedulers[rank].epoch + 1)

    @property
    def view(self) -> LoadView:
        return self.dispatcher.budget.instances[self.instance].view
