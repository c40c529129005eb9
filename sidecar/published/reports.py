"""From what SGLang publishes to the load reports that everything else reads.

A report needs `received`. Nobody tells it here, so it is what the controller had sent to the rank
`grace` seconds before the stat came: whatever is younger stays in flight. A stat without requests
thus erases nothing that was just sent, and what was sent is in flight no longer than until the
first stat after its grace; SGLang publishes one a second at least.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

from sidecar.budget import Budget, Instance
from sidecar.errors import PeerError
from sidecar.loads import PUBLISHED
from sidecar.published.history import SentHistory
from sidecar.published.settings import Publisher
from sidecar.published.stat import LoadStat, decode
from sidecar.wire import LoadReport, Query

OUTCOMES = ("taken", "superseded", "hook", "refused")
"""What became of a message: it is the rank's load now; a newer one had come; the hook reports that
rank, and knows better; it was no sound stat (`stat.CAUSES`)."""


class _Told:
    """What a rank's publisher told last."""

    __slots__ = ("count", "received", "restarts", "seq")

    def __init__(self) -> None:
        self.seq = -1
        self.restarts = 0
        """How often it began to count anew: a new scheduler, with an empty cache."""
        self.count = 0
        self.received = (0, 0)


class Published:
    """Makes the reports.

    grace: seconds; budget: of the policy in force; deliver: takes a report in, and may raise;
    refused: told of each error, a PeerError unless it is ours.
    """

    def __init__(
        self,
        publishers: Sequence[Publisher],
        grace: float,
        budget: Callable[[], Budget],
        deliver: Callable[[LoadReport, float], None],
        refused: Callable[[Exception], None],
    ) -> None:
        self._told = {publisher: _Told() for publisher in publishers}
        self._histories = {one.instance: SentHistory(grace) for one in publishers}
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """(instance, one of OUTCOMES) -> messages."""
        self.outcomes.update(dict.fromkeys(product(self._histories, OUTCOMES), 0))
        self._budget, self._deliver, self._refused = budget, deliver, refused

    def sent(self, query: Query, instance: Instance, now: float) -> None:
        """`instance` has answered the query; now: monotonic seconds."""
        history = self._histories.get(query.instance)
        if history is not None:
            history.note(query, *instance.counters(), now)

    def take(
        self, publisher: Publisher, frames: Sequence[bytes], superseded: int, now: float
    ) -> None:
        """Messages came: the frames of the newest, and how many before it. Raises nothing."""
        name = publisher.instance
        self.outcomes[name, "superseded"] += superseded
        try:
            seq, stat = decode(frames)
            if stat.dp_rank not in (None, publisher.rank):
                raise PeerError("rank", f"{publisher.endpoint}: publishes rank {stat.dp_rank}")
            report = self._report(publisher, seq, stat, now)
            instance = self._budget().instances.get(name)
            if instance is not None and instance.hook_reports(publisher.rank, now):
                self.outcomes[name, "hook"] += 1
                return
            self._deliver(report, now)
        except Exception as error:  # noqa: BLE001 - the reader must live on
            self.outcomes[name, "refused"] += 1
            self._refused(error)
        else:
            self.outcomes[name, "taken"] += 1

    def _report(self, publisher: Publisher, seq: int, stat: LoadStat, now: float) -> LoadReport:
        told = self._told[publisher]
        if seq <= told.seq:
            told.restarts += 1
        told.seq = seq
        told.count += 1
        before = self._histories[publisher.instance].before(publisher.rank, now)
        told.received = told.received if before is None else before
        return LoadReport(
            PUBLISHED,
            publisher.instance,
            publisher.rank,
            epoch=told.restarts,
            seq=told.count,
            received=told.received[0],
            received_tokens=told.received[1],
            running=stat.running,
            waiting=stat.waiting,
            # 0.5.19 does not tell the tokens that wait.
            tokens=max(stat.used_tokens, stat.total_tokens),
            capacity_tokens=stat.capacity_tokens,
            max_running=stat.max_running,
            waiting_uncached_tokens=stat.waiting_uncached_tokens,
        )
