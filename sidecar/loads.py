"""What is known of the ranks: each one's reports and counters, and the view that a policy gets."""

import copy
from dataclasses import dataclass, field
from typing import Any

from sidecar.wire import LoadReport

# A controller is made once the ranks of its node have loaded their model, which in one start of a
# server takes minutes if a disk is slow. Those of other nodes load in step and are ready seconds
# after it, by clocks that may differ; one that is a minute later has joined alone, or it could not
# have loaded a model.
TOGETHER_NS = 600 * 10**9
JOINED_NS = 60 * 10**9
# More than a rank can have been sent between the newest query and a report that is newer.
UNTOLD_REQUESTS = 1000
# Within so many seconds and looks (`RankState.narrow`) a rank has once taken in all it was sent: it
# does so at every step, and reports then.
NARROW_SECONDS, NARROW_LOOKS = 2.0, 8
# In place of the protocol's, where a report was made of what SGLang's own publisher tells
# (sidecar/published); no message with it is read from a socket. Its epoch counts the restarts seen.
PUBLISHED = 0


def is_published(report: LoadReport) -> bool:
    """Whether the report was made of what SGLang publishes; `received` is then what the controller
    had sent a while before, in its own counting, and what the prefix cache did is not known."""
    return report.version == PUBLISHED


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
    paired_at: float = 0.0
    before: tuple[int, int | None] | None = None
    """The pair before `pair`."""
    unsure: bool = False
    """Whether something may have been in flight when the origins were found."""
    least: tuple[int, int] | None = None
    """Least requests and tokens that were in flight by these origins since `looked_since`."""
    looked_since: float = 0.0
    looks: int = 0

    @property
    def source(self) -> str | None:
        """Where the last report is from: `hook`, `published`; None: there was none."""
        if self.report is None:
            return None
        return "published" if is_published(self.report) else "hook"

    def in_flight(self) -> tuple[int, int]:
        """Requests and prompt tokens sent and not yet received."""
        received = self.report.received if self.report else 0
        received_tokens = self.report.received_tokens if self.report else 0
        return (
            max(0, self.sent - self.sent_origin - received),
            max(0, self.sent_tokens - self.sent_tokens_origin - received_tokens),
        )

    def reconcile(self, controller: int, now: float, spoke_at: float) -> None:
        """Find the origins anew if either process is another than before.

        controller: epoch of the controller that counts `sent`; spoke_at: when the process that is
        replaced was heard last. Of a pair that did not start together nobody knows what was in
        flight when the older of the two was joined by the younger: counting starts at zero then,
        and `narrow` finds by how much that was wrong.
        """
        pair = (controller, self.report.epoch if self.report else None)
        if pair == self.pair:
            return
        before, self.pair = self.pair, pair
        # The whole server started again, minutes after its start: both are new one after the other,
        # and neither was heard beside the other's predecessor.
        again = before is not None and self.before is not None and spoke_at <= self.paired_at
        earlier = set(self.before or ())
        again = again and None not in earlier and not set(pair) & earlier
        # A scheduler that has received more than this controller has sent served one before it.
        older = self.report is not None and self.report.received > self.sent + UNTOLD_REQUESTS
        self.unsure = not _together(pair) or older or (_together(before) and not again)
        if not self.unsure:
            self.sent_origin = self.sent_tokens_origin = 0
        else:
            report = self.report
            self.sent_origin = self.sent - (report.received if report else 0)
            self.sent_tokens_origin = self.sent_tokens - (report.received_tokens if report else 0)
        self.before, self.paired_at = before, now
        self._look_anew(now)

    def narrow(self, now: float, *, newest: bool) -> bool:
        """Correct origins that were found in passing; whether any has changed.

        newest: whether `sent` is newer than the report. Less than nothing is then never in flight;
        and what always seems to be was received before it was heard that it was sent, or is lost.
        """
        report = self.report
        if report is None:
            return False
        requests = self.sent - self.sent_origin - report.received
        tokens = self.sent_tokens - self.sent_tokens_origin - report.received_tokens
        least = self.least or (requests, tokens)
        self.least = least = (min(least[0], requests), min(least[1], tokens))
        self.looks += 1
        over = self.looks >= NARROW_LOOKS and now - self.looked_since >= NARROW_SECONDS
        too_few = (min(0, requests), min(0, tokens)) if newest else (0, 0)
        too_many = (max(0, least[0]), max(0, least[1])) if over else (0, 0)
        wrong, wrong_tokens = too_few[0] + too_many[0], too_few[1] + too_many[1]
        self.sent_origin += wrong
        self.sent_tokens_origin += wrong_tokens
        changed = bool(wrong or wrong_tokens)
        if over or changed:
            self._look_anew(now)
        return changed

    def _look_anew(self, now: float) -> None:
        self.least, self.looks, self.looked_since = None, 0, now


def _together(pair: tuple[int, int | None] | None) -> bool:
    """Whether controller and scheduler belong to one start of the server."""
    return (
        pair is not None and pair[1] is not None and -JOINED_NS <= pair[0] - pair[1] <= TOGETHER_NS
    )


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
