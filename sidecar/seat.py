"""A policy and what it goes by: its own load budget and its own memory of where requests went.

Each policy that looks at the traffic, in force or on trial, has a seat of its own: what one of them
takes note of is not gone for the others.
"""

import math
import signal
from collections.abc import Callable
from typing import Any, cast

import msgspec

from sidecar import wire
from sidecar.budget import Budget, Instance
from sidecar.errors import PeerError, PolicyError
from sidecar.loads import LoadView
from sidecar.policies import REASONS, REGISTRY, SPILLS, Choice, Learner, Policy, Predictor

OnError = Callable[[PolicyError], None]
OnDiscard = Callable[[Any], None]
Expected = tuple[float, float]

FAULTS = (BaseException,)
"""What a policy may raise that is contained: all of it, as it may be anyone's code. A panic in
Rust, for one, is no Exception. What left the loop's reader would leave every later query unread."""


class NonsenseError(ValueError):
    """A policy answered what nobody can act on."""


def _learner(policy: Policy) -> Learner | None:
    """The policy, if it learns. Asked by name: a wrapper may pass on what it does not define."""
    parts = ("new_memory", "learn", "heard")
    return cast(Learner, policy) if all(hasattr(policy, part) for part in parts) else None


def alike(one: Policy, other: Policy) -> bool:
    """Whether two policies decide equally: of one class, with equal parameters."""
    return type(one) is type(other) and bool(one.params == other.params)


def _ctrl_c_raises() -> bool:
    """Whether a KeyboardInterrupt may be a person's, as in a replay; who serves has a handler."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Seat:
    """One policy at work.

    on_error: told of each fault of the policy's code; on_discard: given each memory that is no
    longer needed, as a full one takes long to free.
    """

    def __init__(
        self,
        policy: Policy,
        budget: Budget,
        on_error: OnError,
        on_discard: OnDiscard = lambda memory: None,
    ) -> None:
        self.budget = budget
        self.on_error = on_error
        self.on_discard = on_discard
        self.here = Instance("", 0.0)
        """The instance whose query is under way."""
        self._take_place(policy)

    def _take_place(self, policy: Policy) -> None:
        self.policy = policy
        # As they were when it was checked: labels and answers must not fail because of it later.
        self.name = policy.name
        self.params: dict[str, Any] = msgspec.to_builtins(policy.params)
        self._learner = _learner(policy)
        self.predictor = cast(Predictor, policy) if hasattr(policy, "expected") else None
        """The policy, if it tells what is cached where."""

    def swap(self, policy: Policy) -> None:
        """Seat another policy; loads stay. An equal one keeps the memory too."""
        same = alike(policy, self.policy)
        ours = type(self.policy) in REGISTRY.values()
        self._take_place(policy)
        if not ours:
            for instance in self.budget.instances.values():
                self.forget(instance)
                instance.renew_view()
        if not (same and ours):
            self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what the policy remembers, and tell it the last reports."""
        for instance in self.budget.instances.values():
            self.forget(instance)
            self._catch_up(instance)

    def forget(self, instance: Instance) -> None:
        """Let go of what the policy remembers of an instance."""
        memory, instance.view.memory = instance.view.memory, None
        if memory is not None:
            self.on_discard(memory)

    def close(self) -> None:
        """Let go of all that the policy remembers."""
        for instance in self.budget.instances.values():
            self.forget(instance)

    def beside(self, policy: Policy) -> "Seat":
        """A seat for another policy, which knows the loads that this one knows."""
        seat = Seat(policy, self.budget.twin(), self.on_error, self.on_discard)
        seat.here = seat.budget.instances.get(self.here.name, seat.here)
        seat.begin_anew()
        return seat

    def report(self, report: wire.LoadReport, now: float) -> None:
        """Take in a load report. Raises PeerError."""
        instance = self.budget.instance(report.instance, now)
        instance.apply_report(report, now)
        if self._learner is not None:
            view = self._remembering(instance.view, self._learner)
            self._tell(self._learner.heard, report, view, now)

    def meet(self, query: wire.Query, now: float) -> LoadView:
        """The view of the instance that asks, with what its query tells. Raises PeerError."""
        instance = self.budget.instance(query.instance, now)
        try:
            view = instance.apply_query(query, now)
        except PeerError:
            if instance.epoch is None and not instance.states:
                self.budget.forget(instance.name)
            raise
        self.here = instance
        view.placed.clear()
        if self._learner is not None:
            self._remembering(view, self._learner)
            for past in query.history:
                self._tell(self._learner.learn, past.facts, past.rank, past.age_ms / 1000, view)
        return view

    def choose(self, facts: wire.RequestFacts) -> Choice | None:
        """The policy's choice if it is a sound one, else None; a policy may be anyone's code."""
        view = self.here.view
        try:
            position, reason, preferred = self.policy.choose(facts, view)
            size = len(view.ranks)
            if (
                type(position) is int
                and 0 <= position < size
                and type(reason) is str
                and reason in REASONS
                and type(preferred) is int
                and (0 if reason in SPILLS else -1) <= preferred < size
            ):
                return Choice(position, reason, preferred)
            raise NonsenseError(f"{Choice(position, reason, preferred)} of {size} ranks")
        except FAULTS as error:
            self._failed(error)
            return None

    def take(self, facts: wire.RequestFacts, position: int) -> None:
        """Take note that the request goes to the rank at `position`, whoever chose it."""
        self.here.assign(position, facts.tokens)
        if self._learner is not None:
            view = self.here.view
            self._tell(self._learner.learn, facts, view.ranks[position], None, view)

    def expected(self, facts: wire.RequestFacts, position: int) -> Expected | None:
        """What is cached of a request that is not taken note of yet; None: the policy can't tell.

        Tokens of the prompt in the cache of the rank at `position`, and of the live rank that has
        most.
        """
        if self.predictor is None:
            return None
        view = self.here.view
        try:
            held = self.predictor.expected(facts, view)
            places = view.position
            most = float(max((n for rank, n in held.items() if rank in places), default=0.0))
            here = float(held.get(view.ranks[position], 0.0))
            # Also of what is no number: one would be in the sums forever.
            if not 0 <= here <= most < math.inf:
                raise NonsenseError(f"expects {here} and {most} of {facts.tokens} tokens")
            return here, most
        except FAULTS as error:
            self._failed(error)
            return None

    def _catch_up(self, instance: Instance) -> None:
        """Tell a new policy the last reports, so that it sees what the next ones change."""
        if self._learner is not None:
            view = self._remembering(instance.view, self._learner)
            heard = [state for state in instance.states.values() if state.report is not None]
            newest = max((state.reported_at for state in heard), default=0.0)
            for state in heard:
                # Time begins with the first: one that has long been silent would mislead it.
                if newest - state.reported_at <= instance.stale_seconds:
                    self._tell(self._learner.heard, state.report, view, state.reported_at)

    def _tell(self, method: Callable[..., None], *what: object) -> None:
        """Tell a policy that learns; a fault of its code costs what it would have learnt."""
        try:
            method(*what)
        except FAULTS as error:
            self._failed(error)

    def _remembering(self, view: LoadView, learner: Learner) -> LoadView:
        """The view, with a memory for the policy."""
        if view.memory is None:
            try:
                view.memory = learner.new_memory()
            except FAULTS as error:
                self._failed(error)
            view.retracted.clear()
        return view

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt) and _ctrl_c_raises():
            raise error
        self.on_error(PolicyError(self.name, error))
