"""Loads that SGLang publishes, from its sockets to where reports of the hook go."""

import asyncio
import resource
import time
from collections.abc import Callable

from sidecar import wire
from sidecar.complaints import Complaints, bug
from sidecar.config import Config
from sidecar.dispatcher import Dispatcher
from sidecar.errors import EndpointError, PeerError
from sidecar.logs import logger
from sidecar.published.reports import Published
from sidecar.published.settings import Publisher, publishers
from sidecar.published.subscriber import Subscriber

FILES_A_RANK = 3
"""A socket of libzmq's, its connection, and what is closed but not gone yet."""


class Feed:
    """Reads the publishers of `config.published`.

    report: takes a load report in, as if the hook had sent it; may raise PeerError.
    """

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        report: Callable[[wire.LoadReport, float], None],
        complaints: Complaints,
    ) -> None:
        self._config, self._dispatcher, self._complaints = config, dispatcher, complaints
        found = publishers(config.published.endpoints, allow_tcp=config.serve.allow_insecure_tcp)
        grace = config.published.grace_ms / 1000
        self.published = Published(
            found, grace, lambda: dispatcher.budget, deliver=report, refused=self._refused
        )
        self._subscriber = Subscriber(found, self._take)
        self.descriptors = FILES_A_RANK * len(found)
        """That it takes at most."""
        complaints.health.load_source = "published"
        complaints.health.published = self.published.outcomes

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read from now on. Where that cannot be, dispatch serves all the same."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if self.descriptors > limit // 2:
            logger.warning(
                "no published loads: they take %d descriptors, half of the %d of this process "
                "(ulimit -n) is for hooks; dispatch serves",
                self.descriptors,
                limit,
            )
            self.descriptors = 0
        if self.descriptors == 0:
            return
        try:
            self._subscriber.start(loop)
        except EndpointError as error:
            logger.warning("no published loads: %s; dispatch serves", error)
            return
        for instance, text in self._config.published.endpoints.items():
            grace = self._config.published.grace_ms
            logger.info("loads of %s published at %s, grace %g ms", instance, text, grace)

    def stop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read no more; safe to call twice."""
        self._subscriber.stop(loop)

    def sent(self, query: wire.Query, now: float) -> None:
        """The query was answered just now; monotonic seconds."""
        self.published.sent(query, self._dispatcher.active.here, now)

    def _take(self, publisher: Publisher, frames: list[bytes], superseded: int) -> None:
        self.published.take(publisher, frames, superseded, time.monotonic())

    def _refused(self, error: Exception) -> None:
        refused = error if isinstance(error, PeerError) else bug(error)
        self._complaints.rejected("published", refused)
