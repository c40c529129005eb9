"""What the sidecar does, without the sockets that it does it over: decide, look on, be steered."""

import asyncio
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from sidecar import logs, wire
from sidecar.aftermath import Aftermath, ShadowSeat
from sidecar.aside import aside
from sidecar.budget import Budget
from sidecar.catalog import Catalog
from sidecar.complaints import Complaints, bug
from sidecar.config import Config, Loader
from sidecar.dispatcher import Dispatcher
from sidecar.errors import ConfigError
from sidecar.keyhash import KeyHash
from sidecar.logs import logger
from sidecar.metrics import Health
from sidecar.paths import Paths
from sidecar.steering import Prepared, Steering, prepare

if TYPE_CHECKING:
    from sidecar.feed import Feed
    from sidecar.journal.writer import Journal


def _fixed(config: Config) -> tuple[object, ...]:
    """What a process keeps for its life."""
    return config.serve, config.published, config.admin, config.decision_log


class Service:
    """Dispatcher, policies and observers of one process.

    load: reads the configuration again, from `file`; raises ConfigError. Raises ConfigError if the
    configured policies cannot be had.
    """

    def __init__(
        self, config: Config, load: Loader, complaints: Complaints, file: str | None = None
    ) -> None:
        self.config = config
        self._load = load
        self.complaints = complaints
        self.health: Health = complaints.health
        budget = Budget(config.serve.stale_seconds, config.serve.max_instances)
        # What packages offer is looked up where it is needed, and in full once queries are served.
        catalog = Catalog()
        prepared = prepare(catalog, config.policy)
        self.dispatcher = Dispatcher(prepared.policy, budget, time.time_ns(), complaints.policy)
        self.steering = Steering(self.dispatcher, catalog, self.health)
        self.steering.config = os.path.abspath(file) if file else ""
        self.steering.start(prepared)
        self.dispatcher.on_discard = self._discard
        self.paths = Paths(KeyHash())
        self.aftermath = Aftermath(complaints.observer, self._unobserved)
        self.aftermath.observers = {"paths": self.paths, "shadow": ShadowSeat(self.dispatcher)}
        self.journal: Journal | None = None
        if config.decision_log.directory:
            from sidecar.journal.writer import journal_of

            self.journal = journal_of(config, self.dispatcher, self.health, complaints.limit)
            self.aftermath.observers["decision log"] = self.journal
            self.steering.on_change = self._policy_changed
        self.feed: Feed | None = None
        if config.published.endpoints:
            from sidecar import feed

            self.feed = feed.Feed(config, self.dispatcher, self.report, complaints)
        self._reload_lock = asyncio.Lock()

    def handle(self, query: wire.Query, now: float, size: int) -> wire.Reply:
        """Decide; what looks on follows later. size: bytes of the query. Raises PeerError."""
        reply = self.dispatcher.handle(query, now)
        if self.feed is not None:
            self.feed.sent(query, now)
        self.aftermath.decided(query, reply, now, size)
        return reply

    def report(self, report: wire.LoadReport, now: float) -> None:
        """Take in a load report. Raises PeerError."""
        self.dispatcher.report(report, now)
        self.health.reports += 1
        self.aftermath.reported(report, now)

    async def reload(self) -> None:
        """Read the configuration again and put its policies in force.

        Raises ConfigError, after which nothing has changed. Files and imports are read in a thread:
        queries are answered meanwhile.
        """
        async with self._reload_lock:
            try:
                config, prepared = await aside(self._read_again)
                self.steering.reload(prepared)
            except Exception as error:  # noqa: BLE001 - a policy's code may be anyone's
                refused = error if isinstance(error, ConfigError) else ConfigError(str(bug(error)))
                self.health.reload_failures += 1
                self.health.last_reload_ok = False
                stays = self.dispatcher.active.name
                logger.error("reload refused, %s stays: %s", stays, refused)
                raise refused from None
            logs.configure(config.log.level, config.log.format)
            if _fixed(config) != _fixed(self.config):
                logger.warning("reload: only [policy] and [log] change without a restart")
            self.config = config
            self.health.last_reload_ok = True

    async def close(self) -> None:
        """Finish the decision log."""
        if self.journal is not None:
            self.aftermath.drain()
            await self.journal.close()

    def _read_again(self) -> tuple[Config, Prepared]:
        config = self._load()
        self.steering.catalog.refresh()
        return config, prepare(self.steering.catalog, config.policy)

    def _discard(self, memory: Any) -> None:
        """Free what a policy remembered, if it can be freed slowly."""
        if hasattr(memory, "taken_apart"):
            self.aftermath.later(memory.taken_apart)

    def _policy_changed(self, what: str) -> None:
        if self.journal is not None:
            state = self.journal.state_of(self.dispatcher)
            self.aftermath.later(partial(self.journal.changed, what, state, time.monotonic()))

    def _unobserved(self, requests: int) -> None:
        if self.journal is not None:
            self.journal.skipped(requests)
        self.complaints.unobserved(requests)
