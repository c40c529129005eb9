"""The one place where policies change: each change is checked first, then whole, then told."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from sidecar.catalog import Catalog
from sidecar.config import PolicyConfig
from sidecar.dispatcher import Dispatcher, wanted
from sidecar.errors import ConfigError
from sidecar.logs import logger
from sidecar.metrics import Health
from sidecar.orders import CanaryOrder, Change, Compared, Listed, PolicyOrder, PolicyState, Trial
from sidecar.policies import REGISTRY, Policy
from sidecar.seat import Seat, alike


class Prepared(NamedTuple):
    """The policies of a configuration, made and tried, not yet in force."""

    policy: Policy
    shadow: Policy | None
    canary: Policy | None
    share: float


def prepare(catalog: Catalog, config: PolicyConfig) -> Prepared:
    """Make what the configuration names; takes as long as its imports do.

    Raises ConfigError, which names the setting and the bound.
    """
    make = catalog.configured
    policy = _named("policy.name", make, config.name, config.in_force())
    shadow = canary = None
    if config.shadow.name:
        shadow = _named("policy.shadow", make, config.shadow.name, config.shadow.params)
    if config.canary.name:
        if not config.canary.share:
            raise ConfigError("policy.canary.share: is 0, so the canary would decide nothing")
        canary = _named("policy.canary", make, config.canary.name, config.canary.params)
    return Prepared(policy, shadow, canary, config.canary.share)


def _named(
    key: str, make: Callable[[str, dict[str, Any]], Policy], name: str, params: dict[str, Any]
) -> Policy:
    try:
        return make(name, params)
    except ConfigError as error:
        text = str(error).removeprefix("policy.name: ")
        own = key == "policy.name" and text.startswith("policy.params")
        raise ConfigError(text if own else f"{key}: {text}") from None


def is_ours(name: str) -> bool:
    """Whether a policy is one of ours, so that making it takes no time."""
    return name in REGISTRY


def told(policy: Policy) -> dict[str, Any]:
    """Parameters of a policy as plain values."""
    params: dict[str, Any] = msgspec.to_builtins(policy.params)
    return params


def _trial(seat: Seat, share: float = 0.0, compared: Compared | None = None) -> Trial:
    return Trial(seat.name, seat.params, share, compared)


class Steering:
    """Changes the policies of one dispatcher, and remembers each change."""

    def __init__(self, dispatcher: Dispatcher, catalog: Catalog, health: Health) -> None:
        self.dispatcher = dispatcher
        self.catalog = catalog
        self.health = health
        self.history = health.changes
        self.config = ""
        """The file that a reload reads."""
        self.on_change: Callable[[str], None] = lambda what: None
        """Told what changed (`orders.Change.what`), once it has."""

    def start(self, prepared: Prepared) -> None:
        """Put in force what the configuration names beside the policy. Raises ConfigError."""
        wanted(prepared.policy, prepared.canary, prepared.shadow)
        self._trials(prepared)
        self._changed("start", self.dispatcher.policy)

    def state(self) -> PolicyState:
        """The policies at work."""
        dispatcher = self.dispatcher
        canary, shadow = dispatcher.canary, dispatcher.shadow
        return PolicyState(
            dispatcher.active.name,
            dispatcher.active.params,
            dispatcher.policy_version,
            self.catalog.names(),
            None if canary is None else _trial(canary.seat, canary.share),
            None if shadow is None else _trial(shadow.seat, compared=shadow.compared()),
            self.config,
            self.history[-1].note if self.history else "",
        )

    def listing(self) -> list[Listed]:
        """Every policy that there is."""
        return self.catalog.listing()

    def reload(self, prepared: Prepared) -> None:
        """Put a configuration in force, canary and shadow too.

        Raises ConfigError, after which nothing has changed.
        """
        dispatcher, before = self.dispatcher, self.state()
        wanted(prepared.policy, prepared.canary, prepared.shadow)
        canary, shadow = dispatcher.canary, dispatcher.shadow
        if canary is not None and not self._same_canary(prepared):
            dispatcher.set_canary(None)
        if shadow is not None and not self._same_shadow(prepared):
            dispatcher.set_shadow(None)
        dispatcher.swap_policy(prepared.policy)
        self._trials(prepared)
        self._changed("reload", prepared.policy)
        for trial, name in ((before.canary, "canary"), (before.shadow, "shadow")):
            if trial is not None and getattr(dispatcher, name) is None:
                logger.info("reloaded: the %s %s is not configured, ended", name, trial.name)

    def make(self, key: str, order: PolicyOrder | CanaryOrder) -> Policy:
        """The policy that an order names. One from outside runs its own code, so maybe for long.

        key: the setting that errors name. Raises ConfigError.
        """
        self._check_free(key)
        return _named(key, self.catalog.make, order.name, order.params)

    def _check_free(self, key: str) -> None:
        """There is one shadow and one canary. Raises ConfigError."""
        canary, shadow = self.dispatcher.canary, self.dispatcher.shadow
        for other, seat in (
            ("policy.canary", None if canary is None else canary.seat),
            ("policy.shadow", None if shadow is None else shadow.seat),
        ):
            if key == other and seat is not None:
                what = key.removeprefix("policy.")
                raise ConfigError(
                    f"{key}: {seat.name} is the {what} already; end it first with "
                    f"`policy {what} off`"
                )

    def set_policy(self, order: PolicyOrder, policy: Policy | None = None) -> None:
        """Swap the policy. Raises ConfigError, after which nothing has changed.

        policy: made of the order already, as in the next two.
        """
        before = self.dispatcher.active.name
        policy = policy or self.make("policy.name", order)
        self.dispatcher.swap_policy(policy)
        self._changed("set", policy, f"{before} -> ")

    def set_shadow(self, order: PolicyOrder | None, policy: Policy | None = None) -> None:
        """Begin or end (None) a shadow. Raises ConfigError, after which nothing has changed."""
        shadow = self.dispatcher.shadow
        if order is None:
            if shadow is None:
                raise ConfigError("policy.shadow: there is none to end")
            note = str(shadow.compared())
            self.dispatcher.set_shadow(None)
            self._changed("shadow_off", shadow.policy, note=note)
            return
        self._check_free("policy.shadow")
        policy = policy or self.make("policy.shadow", order)
        self.dispatcher.set_shadow(policy)
        self._changed("shadow", policy)

    def set_canary(self, order: CanaryOrder | None, policy: Policy | None = None) -> None:
        """Begin or end (None) a canary. Raises ConfigError, after which nothing has changed."""
        canary = self.dispatcher.canary
        if order is None:
            if canary is None:
                raise ConfigError("policy.canary: there is none to end")
            self.dispatcher.set_canary(None)
            self._changed("canary_off", canary.seat.policy)
            return
        self._check_free("policy.canary")
        policy = policy or self.make("policy.canary", order)
        self.dispatcher.set_canary(policy, order.share)
        self._changed("canary", policy, share=order.share)

    def _trials(self, prepared: Prepared) -> None:
        """Begin what is configured and not there yet: an equal one goes on with what it knows."""
        if prepared.canary is not None and not self._same_canary(prepared):
            self.dispatcher.set_canary(prepared.canary, prepared.share)
        if prepared.shadow is not None and not self._same_shadow(prepared):
            self.dispatcher.set_shadow(prepared.shadow)

    def _same_canary(self, prepared: Prepared) -> bool:
        canary, policy = self.dispatcher.canary, prepared.canary
        if canary is None or policy is None:
            return canary is None and policy is None
        return canary.share == prepared.share and alike(policy, canary.seat.policy)

    def _same_shadow(self, prepared: Prepared) -> bool:
        shadow, policy = self.dispatcher.shadow, prepared.shadow
        if shadow is None or policy is None:
            return shadow is None and policy is None
        return alike(policy, shadow.policy)

    def _changed(
        self,
        what: str,
        policy: Policy,
        before: str = "",
        share: float | None = None,
        note: str = "",
    ) -> None:
        """One change: a line of history, a count, a log line."""
        version, params = self.dispatcher.policy_version, told(policy)
        self.history.append(Change(version, time.time(), what, policy.name, params, share, note))
        self.health.policy_changes[what] += 1
        self.on_change(what)
        if what == "start":
            return  # the log line of the start tells it
        of = f": {note}" if note else "" if share is None else f" share {share:g}"
        line = "reloaded: policy" if what == "reload" else f"policy {what}:"
        logger.info("%s %s%s version %d %s%s", line, before, policy.name, version, params, of)
