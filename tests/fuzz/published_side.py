"""What SGLang's schedulers publish: frames of anybody's at the ports where they should be."""

from sidecar import wire
from sidecar.errors import PeerError
from sidecar.published import stat
from sidecar.published.history import SLOTS
from sidecar.published.reports import OUTCOMES, Published
from sidecar.published.settings import Publisher
from tests.fuzz.sidecar_side import Life, small_index
from tests.fuzz.source import Source, bent
from tests.fuzz.world import BrokenPromise, check, hold

STEPS = 32
GRACE = 1.0
PUBLISHERS = [Publisher(name, rank, "tcp://1.2.3.4:5") for name in "ab" for rank in range(3)]
CAUSES = {*stat.CAUSES, *wire.REFUSALS}


class Watched(Life):
    """A life in which publishers tell the loads, beside hooks that may."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.looked = True
        budget, report = lambda: self.dispatcher.budget, self.dispatcher.report
        self.published = Published(PUBLISHERS, GRACE, budget, report, self.refused)
        self.taken = 0
        self.observers = [self]

    def refused(self, error: Exception) -> None:
        """A message that is no sound stat."""
        if not isinstance(error, PeerError):
            raise BrokenPromise("a fault of ours") from error
        hold(error.cause in CAUSES, f"no such cause: {error.cause}")

    def report(self, report: wire.LoadReport, now: float) -> None:
        """See Observer."""

    def follow(self, query: wire.Query, reply: wire.Reply, now: float) -> list[None]:
        """See Observer."""
        self.published.sent(query, self.dispatcher.active.here, now)
        return []

    def publish(self) -> None:
        """A message of one publisher."""
        source = self.source
        seq = source.raw(8) if source.flag(8) else source.byte().to_bytes(8, "big")
        frames = [stat.TOPIC, seq, bent(wire.encode(self.stat()), source)]
        if source.flag(8):
            frames = [source.raw(source.below(12)) for _ in range(source.below(5))]
        self.published.take(source.one_of(PUBLISHERS), frames, source.below(3), self.now)
        self.taken += 1

    def stat(self) -> stat.LoadStat:
        """What SGLang tells."""
        source = self.source
        told = stat.LoadStat(source.count(), source.count(), source.count(), source.wild())
        if source.flag():
            told.dp_rank = source.below(4)
            told.waiting_uncached_tokens = source.count()
        return told

    def check(self) -> None:
        """Each message came to one end, and nothing has grown."""
        ends = self.published.outcomes
        hold(ends.keys() == {(name, end) for name in "ab" for end in OUTCOMES}, "another end")
        told = sum(n for (_, end), n in ends.items() if end != "superseded")
        hold(told == self.taken, "messages lost, or counted twice")
        for history in self.published._histories.values():
            hold(len(history) <= 2 * SLOTS + 3, "too long a history")
        check(self.dispatcher)


def published(data: bytes) -> None:
    """One life of a dispatcher whose loads are published."""
    source = Source(data)
    with small_index():
        life = Watched(source)
        for _ in range(STEPS):
            if not source.left:
                break
            if source.flag():
                life.publish()
            else:
                life.step()
        life.check()
