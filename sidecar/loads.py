"""What is known of the ranks: each one's reports and counters, and the view that a policy gets."""

import copy
from dataclasses import dataclass, field
from typing import Any

from sidecar.wire import LoadReport

# Both epochs are taken when the model is loaded: seconds apart in one start of a server, minutes if
# a rank's disk is slow. A scheduler that joins a server this young alone is known by its change.
TOGETHER_NS = 600 * 10**9


@dataclass(slots=True)
class RankState:
    """What is known of one rank; kept while it is down, so that it returns with its history."""

    first_seen: float
    report: LoadReport | None = None
    reported_at: float = 0.0
    sent: int = 0
    sent_tokens: int = 0
    # `sent` is compared with `received` from these origins: 0 while controller and scheduler
    # started together, elsewhere once one of them is a new incarnation.
    sent_origin: int = 0
    sent_tokens_origin: int = 0
    pair: tuple[int, int | None] | None = None
    """Epochs of the controller and the scheduler that the origins are for."""

    def in_flight(self) -> tuple[int, int]:
        """Requests and prompt tokens sent and not yet received."""
        received = self.report.received if self.report else 0
        received_tokens = self.report.received_tokens if self.report else 0
        return (
            max(0, self.sent - self.sent_origin - received),
            max(0, self.sent_tokens - self.sent_tokens_origin - received_tokens),
        )

    def reconcile(self, controller: int) -> None:
        """Find the origins anew if either process is another than before.

        controller: epoch of the controller that counts `sent`. Of a pair that did not start
        together nobody knows what was in flight when the older of the two was joined by the
        younger: counting starts at zero then.
        """
        pair = (controller, self.report.epoch if self.report else None)
        if pair == self.pair:
            return
        before, self.pair = self.pair, pair
        if _together(pair) and not _together(before):
            self.sent_origin = self.sent_tokens_origin = 0
        else:
            report = self.report
            self.sent_origin = self.sent - (report.received if report else 0)
            self.sent_tokens_origin = self.sent_tokens - (report.received_tokens if report else 0)


def _together(pair: tuple[int, int | None] | None) -> bool:
    """Whether controller and scheduler belong to one start of the server."""
    return pair is not None and pair[1] is not None and abs(pair[0] - pair[1]) <= TOGETHER_NS


@dataclass(slots=True)
class LoadView:
    """What a policy sees of one instance; position i is the same rank in every list, length n."""

    ranks: list[int] = field(default_factory=list)
    """Stable ids of the live ranks, ascending."""
    position: dict[int, int] = field(default_factory=dict)
    """Rank id -> its position."""
    changed: set[int] = field(default_factory=set)
    """Positions of which anything has changed since a policy that keeps sums emptied this."""
    retracted: dict[int, int] = field(default_factory=dict)
    """Position -> requests assigned there that the hook then sent elsewhere; for a policy that
    keeps them, which empties this."""
    rank_bytes: list[bytes] = field(default_factory=list)
    """Their ids as hash input."""
    requests: list[int] = field(default_factory=list)
    """Running + waiting + in flight."""
    queued: list[int] = field(default_factory=list)
    """Of those, waiting or in flight."""
    in_flight: list[int] = field(default_factory=list)
    """Of those, sent and not received by the time of the rank's last report."""
    prefilling: list[int] = field(default_factory=list)
    """Prompt tokens that the rank's chunked prefill has still to compute, when it last reported."""
    tokens: list[int] = field(default_factory=list)
    """KV tokens in use + waiting + in flight."""
    usable: list[bool] = field(default_factory=list)
    """False: the reports of this rank are stale while those of others are not."""
    counted: list[bool] = field(default_factory=list)
    """Whether the rank's load is known and part of the average."""
    total: int = 0
    """Sum of `requests` over the counted ranks."""
    known: int = 0
    """Number of counted ranks; 0: no load is known and the guard is off."""
    cursor: int = -1
    """Rank that a load-aware method chose last: ties go to the next one."""
    placed: dict[int, tuple[int, str, int, int]] = field(default_factory=dict)
    """For a policy, in the query under way: key -> position, reason, preferred, requests."""
    now: float = 0.0
    """Time of the query under way, monotonic seconds."""
    witness: Any = None
    """For a policy that only looks on: a memory of what was really sent. Of that, not of what the
    policy would have sent, the reports of the engine are."""
    memory: Any = None
    """What the policy keeps of this instance (`Policy.new_memory`)."""

    def twin(self) -> "LoadView":
        """A copy that changes on its own, without the policy's memory."""
        twin = copy.copy(self)
        twin.memory = twin.witness = None
        for name in self.__slots__:
            value = getattr(twin, name)
            if isinstance(value, list | dict | set):
                setattr(twin, name, value.copy())
        return twin

    def average(self) -> float:
        """Mean requests of the counted ranks; 0.0 if there is none."""
        return self.total / self.known if self.known else 0.0
