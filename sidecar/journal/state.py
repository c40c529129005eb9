"""What the log must know of the sidecar that writes it."""

from typing import NamedTuple

from sidecar.dispatcher import Dispatcher
from sidecar.journal.record import State


def state_of(dispatcher: Dispatcher) -> State:
    """The policies at work now."""
    canary, shadow = dispatcher.canary, dispatcher.shadow
    return State(
        dispatcher.active.name,
        dispatcher.active.params,
        dispatcher.policy_version,
        dispatcher.want,
        "" if canary is None else canary.seat.name,
        {} if canary is None else canary.seat.params,
        0.0 if canary is None else canary.share,
        "" if shadow is None else shadow.seat.name,
    )


class Origin(NamedTuple):
    """What a replay must know of this sidecar."""

    boot: int
    stale_seconds: float
    max_instances: int
