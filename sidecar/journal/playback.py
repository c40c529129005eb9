"""Decides the events of a log again: the same code, the same loads, the same moments."""

import contextlib
from collections.abc import Callable
from typing import Any

from sidecar.budget import Budget
from sidecar.canary import Canary
from sidecar.catalog import Catalog, is_spec
from sidecar.dispatcher import Dispatcher
from sidecar.errors import ConfigError, PeerError
from sidecar.hashing import key_hash
from sidecar.journal.decoder import Began, Change, Decision, Event, Missing, Report
from sidecar.journal.record import Head, LogError, State
from sidecar.journal.seal import Seal
from sidecar.policies import REGISTRY, Policy
from sidecar.policies.prefix_affinity import PrefixAffinity
from sidecar.tally import Tally
from sidecar.wire import Reply, RequestFacts


class Maker:
    """Makes the policies that a log names. load: module:Class of those that are not ours and that
    no installed package offers: a log alone makes nobody import anything."""

    def __init__(self, seal: Seal | None, load: tuple[str, ...] = ()) -> None:
        self._seal = seal
        self._catalog = Catalog()
        self._specs = {self._catalog.configured(spec).name: spec for spec in load}

    def make(self, name: str, params: dict[str, Any]) -> Policy:
        """Raises ConfigError."""
        if name not in REGISTRY and not is_spec(name):
            name = self._specs.get(name, name)
        try:
            policy = self._catalog.configured(name, params)
        except ConfigError as error:
            hint = "" if name in REGISTRY else "; --load module:Class names its class"
            raise LogError(f"{str(error).removeprefix('policy.name: ')}{hint}") from None
        if isinstance(policy, PrefixAffinity) and self._seal is not None:
            policy.affinity = self._affinity
        return policy

    def _affinity(self, key: bytes) -> int:
        """The hash of a key, from what it is called in the log."""
        return key_hash(key) if self._seal is None else self._seal.unseal(int(key, 16))


class _AsLogged(Canary):
    """Decides for the requests that the canary decided for: without the keys nobody can say."""

    def takes(self, facts: RequestFacts) -> bool:
        return id(facts) in self.taken

    taken: set[int]


class _Observed(Dispatcher):
    """Tells of each request before it is decided."""

    before: Callable[[RequestFacts], None] | None = None

    def _place(self, facts: RequestFacts, tally: Tally) -> tuple[int, str]:
        if self.before is not None:
            self.before(facts)
        return super()._place(facts, tally)


class Playback:
    """The dispatcher of a log. on_error: told of each fault of a policy's code."""

    def __init__(self, maker: Maker, on_error: Callable[[Exception], None]) -> None:
        self._maker = maker
        self._on_error = on_error
        self._head: Head | None = None
        self._next = 0
        self.dispatcher: _Observed | None = None
        self.starts = 0
        """Starts of a sidecar, or places where the log begins in mid-life."""
        self.whole = True
        """Whether everything since the start of the sidecar was played back."""

    def play(
        self, event: Event, before: Callable[[RequestFacts], None] | None = None
    ) -> Reply | None:
        """Let an event happen; the reply, if it is a decision that can be made again.

        before: told of each request of it before it is decided.
        """
        if isinstance(event, Began):
            self._begin(event.head)
        elif isinstance(event, Missing):
            self.whole = False
            self._next += event.requests
        elif self.dispatcher is None:
            raise LogError("the log does not begin with its head")
        elif isinstance(event, Report):
            with contextlib.suppress(PeerError):  # told by the head already
                self.dispatcher.report(event.report, event.now)
        elif isinstance(event, Change):
            self._change(self.dispatcher, event.what, event.state)
        else:
            return self._decide(self.dispatcher, event, before)
        return None

    def _decide(
        self,
        dispatcher: _Observed,
        event: Decision,
        before: Callable[[RequestFacts], None] | None,
    ) -> Reply | None:
        self._next = event.number + len(event.query.requests)
        if isinstance(dispatcher.canary, _AsLogged):
            dispatcher.canary.taken = {id(event.query.requests[n]) for n in event.canary}
        dispatcher.before = before
        try:
            return dispatcher.handle(event.query, event.now)
        except PeerError:
            self.whole = False  # something of before is missing
            return None

    def _begin(self, head: Head) -> None:
        before, self._head = self._head, head
        if before is not None and before.boot == head.boot and self.dispatcher is not None:
            if head.first != self._next:
                self.whole = False
                self._hear(self.dispatcher, head)
            if head.state.version != self.dispatcher.policy_version:
                self._change(self.dispatcher, "reload", head.state)
            self._next = head.first
            return
        self.starts += 1
        self.whole = head.whole
        self._next = head.first
        budget = Budget(head.stale_seconds, head.max_instances)
        policy = self._maker.make(head.state.policy, head.state.params)
        self.dispatcher = _Observed(policy, budget, head.boot, self._on_error)
        self._canary(self.dispatcher, head.state)
        self.dispatcher.policy_version = head.state.version
        self._hear(self.dispatcher, head)

    def _hear(self, dispatcher: Dispatcher, head: Head) -> None:
        for at, report in head.reports:
            with contextlib.suppress(PeerError):
                dispatcher.report(report, at)

    def _change(self, dispatcher: Dispatcher, what: str, state: State) -> None:
        """As `Steering` did it. The shadow decides nothing."""
        if what == "reload":
            dispatcher.canary = None
        if what in ("set", "reload"):
            dispatcher.swap_policy(self._maker.make(state.policy, state.params))
        if what in ("canary", "canary_off", "reload"):
            self._canary(dispatcher, state)
        dispatcher.policy_version = state.version

    def _canary(self, dispatcher: Dispatcher, state: State) -> None:
        if not state.canary:
            if dispatcher.canary is not None:
                dispatcher.set_canary(None)
            return
        dispatcher.set_canary(self._maker.make(state.canary, state.canary_params), state.share)
        if dispatcher.canary is not None:
            dispatcher.canary = _AsLogged(*dispatcher.canary)
            dispatcher.canary.taken = set()
