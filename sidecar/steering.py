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
from sidecar.orders import CanaryOrder, Change, Listed, PolicyOrder, PolicyState, Trial
from sidecar.policies import Policy


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
    policy = _named("policy.name", catalog, config.name, config.in_force())
    shadow = canary = None
    if config.shadow.name:
        shadow = _named("policy.shadow", catalog, config.shadow.name, config.shadow.params)
    if config.canary.name:
        if not config.canary.share:
            raise ConfigError("policy.canary.share: is 0, so the canary would decide nothing")
        canary = _named("policy.canary", catalog, config.canary.name, config.canary.params)
    return Prepared(policy, shadow, canary, config.canary.share)


def _named(key: str, catalog: Catalog, name: str, params: dict[str, Any]) -> Policy:
    try:
        return catalog.configured(name, params)
    except ConfigError as error:
        raise ConfigError(f"{key}: {str(error).removeprefix('policy.name: ')}") from None


def told(policy: Policy) -> dict[str, Any]:
    """Parameters of a policy as plain values."""
    params: dict[str, Any] = msgspec.to_builtins(policy.params)
    return params


def _trial(policy: Policy, share: float = 0.0) -> Trial:
    return Trial(policy.name, told(policy), share)


class Steering:
    """Changes the policies of one dispatcher, and remembers each change."""

    def __init__(self, dispatcher: Dispatcher, catalog: Catalog, health: Health) -> None:
        self.dispatcher = dispatcher
        self.catalog = catalog
        self.health = health
        self.history = health.changes
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
            dispatcher.policy.name,
            told(dispatcher.policy),
            dispatcher.policy_version,
            self.catalog.names(),
            None if canary is None else _trial(canary.seat.policy, canary.share),
            None if shadow is None else _trial(shadow.policy),
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
        dispatcher.canary = dispatcher.shadow = None
        dispatcher.swap_policy(prepared.policy)
        self._trials(prepared)
        self._changed("reload", prepared.policy)
        for trial, name in ((before.canary, "canary"), (before.shadow, "shadow")):
            if trial is not None and getattr(dispatcher, name) is None:
                logger.info("reloaded: the %s %s is not configured, ended", name, trial.name)

    def set_policy(self, order: PolicyOrder) -> None:
        """Swap the policy. Raises ConfigError, after which nothing has changed."""
        before = self.dispatcher.policy.name
        policy = self.catalog.make(order.name, order.params)
        self.dispatcher.swap_policy(policy)
        self._changed("set", policy, f"{before} -> ")

    def set_shadow(self, order: PolicyOrder | None) -> None:
        """Begin or end (None) a shadow. Raises ConfigError, after which nothing has changed."""
        shadow = self.dispatcher.shadow
        if order is None:
            if shadow is None:
                raise ConfigError("policy.shadow: there is none to end")
            self.dispatcher.set_shadow(None)
            self._changed("shadow_off", shadow.policy)
            return
        if shadow is not None:
            raise ConfigError(
                f"policy.shadow: {shadow.policy.name} is the shadow already; end it first with "
                "`policy shadow off`"
            )
        policy = self.catalog.make(order.name, order.params)
        self.dispatcher.set_shadow(policy)
        self._changed("shadow", policy)

    def set_canary(self, order: CanaryOrder | None) -> None:
        """Begin or end (None) a canary. Raises ConfigError, after which nothing has changed."""
        canary = self.dispatcher.canary
        if order is None:
            if canary is None:
                raise ConfigError("policy.canary: there is none to end")
            self.dispatcher.set_canary(None)
            self._changed("canary_off", canary.seat.policy)
            return
        if canary is not None:
            raise ConfigError(
                f"policy.canary: {canary.seat.policy.name} is the canary already; end it first "
                "with `policy canary off`"
            )
        policy = self.catalog.make(order.name, order.params)
        self.dispatcher.set_canary(policy, order.share)
        self._changed("canary", policy, share=order.share)

    def _trials(self, prepared: Prepared) -> None:
        if prepared.canary is not None:
            self.dispatcher.set_canary(prepared.canary, prepared.share)
        if prepared.shadow is not None:
            self.dispatcher.set_shadow(prepared.shadow)

    def _changed(
        self, what: str, policy: Policy, before: str = "", share: float | None = None
    ) -> None:
        """One change: a line of history, a count, a log line."""
        version, params = self.dispatcher.policy_version, told(policy)
        self.history.append(Change(version, time.time(), what, policy.name, params, share))
        self.health.policy_changes[what] += 1
        self.on_change(what)
        if what == "start":
            return  # the log line of the start tells it
        of = "" if share is None else f" share {share:g}"
        line = "reloaded: policy" if what == "reload" else f"policy {what}:"
        logger.info("%s %s%s version %d %s%s", line, before, policy.name, version, params, of)
