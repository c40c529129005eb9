"""Are the decisions of a log made again by the same policies?"""

from typing import Any

from sidecar.journal.account import Account, name_of
from sidecar.journal.decoder import Began, Change, Decision, Event
from sidecar.journal.playback import Maker, Playback
from sidecar.journal.reader import Reader
from sidecar.journal.record import LogError
from sidecar.policies.prefix_affinity import PrefixAffinity
from sidecar.wire import Reply

SHOWN = 10
"""Differences that are shown."""


class Verification:
    """Plays a log back and compares."""

    def __init__(self, reader: Reader, load: tuple[str, ...] = ()) -> None:
        self._account = Account(reader)
        self._files = len(reader.files)
        self._playback = Playback(Maker(reader.seal, load), self._failed)
        self.compared = self.differ = self.warm_up = 0
        self.first: list[dict[str, Any]] = []
        self.errors = 0

    def run(self) -> dict[str, Any]:
        """The report. Raises LogError."""
        for event in self._account.events():
            if self._account.sealed:
                self._check_sealed(event)
            reply = self._playback.play(event)
            if isinstance(event, Decision):
                self._compare(event, reply)
        return {
            "log": self._account.told(),
            "compared": self.compared,
            "differ": self.differ,
            "warm_up": self.warm_up,
            "first": self.first,
            "policy_errors": self.errors,
            "notes": self._notes(),
        }

    def _check_sealed(self, event: Event) -> None:
        if isinstance(event, Began):
            state = event.head.state
        elif isinstance(event, Change):
            state = event.state
        else:
            return
        if PrefixAffinity.name in (state.policy, state.canary):
            raise LogError(
                "the secret that the log was written with is not beside it, and prefix_affinity "
                "chooses by the hashes that it hides: --secret FILE names it"
            )

    def _compare(self, event: Decision, reply: Reply | None) -> None:
        # What the sidecar knew before the log begins is not in it: the first file makes up for it.
        account = self._account
        if not account.begins_whole and account.files == 1 and self._files > 1:
            self.warm_up += len(event.ranks)
            return
        ranks = [-1] * len(event.ranks) if reply is None else reply.ranks
        reasons = ["refused"] * len(event.ranks) if reply is None else reply.reasons
        self.compared += len(ranks)
        for n, (rank, reason) in enumerate(zip(ranks, reasons, strict=True)):
            if rank == event.ranks[n] and reason == event.reasons[n]:
                continue
            self.differ += 1
            if len(self.first) < SHOWN:
                self.first.append(
                    {
                        "at": name_of(event, n),
                        "instance": event.query.instance,
                        "rank": event.ranks[n],
                        "reason": event.reasons[n],
                        "replayed_rank": rank,
                        "replayed_reason": reason,
                    }
                )

    def _notes(self) -> list[str]:
        notes = []
        if not self._account.begins_whole:
            notes.append(
                "the log begins in mid-life: what the sidecar knew by then is not in it, so "
                "decisions may differ until that no longer counts"
                + (
                    f"; the first file ({self.warm_up} decisions) is not compared"
                    if self.warm_up
                    else ""
                )
            )
        if self._account.gaps:
            notes.append("something is missing: decisions after a gap may differ")
        return notes

    def _failed(self, error: Exception) -> None:
        self.errors += 1
