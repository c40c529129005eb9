"""The HTTP sides of a process, made and started while queries are answered already."""

import asyncio
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from sidecar.aside import aside
from sidecar.config import Config
from sidecar.errors import EndpointError
from sidecar.listener import control_path
from sidecar.logs import logger
from sidecar.service import Service
from sidecar.takeover import Handover
from sidecar.tokens import read_token

if TYPE_CHECKING:
    from sidecar.admin import Admin, ControlSite


# An import takes far less; one that never ends must not keep /healthz from answering.
FIND_SECONDS = 5.0


class Sites:
    """Control socket and admin port of one process; what they cannot do keeps nobody waiting.

    ready: whether queries are answered. Raises ConfigError if there is no sound token to be had.
    """

    def __init__(
        self, config: Config, service: Service, ready: Callable[[], bool], handover: Handover
    ) -> None:
        self.config = config
        self.service = service
        self.handover = handover
        self.ready = ready
        self._token = read_token(config.admin.token_file) if config.admin.token_file else ""
        self._made: tuple[ControlSite, Admin] | None = None
        self._owed = False
        """Whether the control socket was lost and could not be made again yet."""

    def make(self) -> "tuple[ControlSite, Admin]":
        """Both, made once. It imports more than half of all that a sidecar needs."""
        if self._made is None:
            from sidecar.admin import Admin, ControlSite
            from sidecar.verbs import Verbs

            service, limit = self.service, self.service.complaints.limit
            verbs = Verbs(service.steering, service.paths, service.reload, limit)
            admin = Admin(service.dispatcher, service.health, self.ready, verbs)
            self._made = ControlSite(verbs, self.handover), admin
            # It dies with the process: keep it out of every collection.
            gc.freeze()
        return self._made

    async def start(self) -> None:
        """Listen where it can; what it cannot is told in the log."""
        try:
            control, admin = await aside(self.make)
        except Exception as error:  # noqa: BLE001 - an import runs whatever lies there
            why = f"{type(error).__name__}: {error}"
            logger.error("no HTTP and no control socket: %s; dispatch serves", why)
            return
        await self._look_for_policies()
        await self._start_control(control)
        await self._start_admin(admin)

    async def _look_for_policies(self) -> None:
        """Find what packages offer, before anybody can ask for it. That runs their code."""
        try:
            await asyncio.wait_for(aside(self.service.steering.catalog.look), FIND_SECONDS)
        except asyncio.TimeoutError:
            logger.warning("policies of packages: not imported within %g s", FIND_SECONDS)
        except Exception as error:  # noqa: BLE001 - it runs the code of packages
            self.service.complaints.observer("policies of packages", error)

    async def mend(self) -> list[str]:
        """Listen again at the control socket if somebody removed its file. Its path, if so.

        Raises EndpointError if that cannot be.
        """
        path = control_path(self.config.serve.endpoint, self.config.serve.control)
        if self._made is None or not (self._owed or self._made[0].lost):
            return []
        self._owed = True
        await self._made[0].stop()
        await self._made[0].start(path)
        self._owed = False
        return [path]

    async def stop(self) -> None:
        """Close the listeners; safe to call twice."""
        self._owed = False
        if self._made is not None:
            await asyncio.gather(*(site.stop() for site in self._made))

    async def _start_control(self, control: "ControlSite") -> None:
        path = control_path(self.config.serve.endpoint, self.config.serve.control)
        if not path:
            return
        try:
            await control.start(path)
        except EndpointError as error:
            logger.warning("no control socket: %s; dispatch serves", error)
        else:
            logger.info("control on %s", path)

    async def _start_admin(self, admin: "Admin") -> None:
        settings = self.config.admin
        if settings.port == 0:
            return
        try:
            port = await admin.start(settings.host, settings.port, self._token)
        except (OSError, UnicodeError) as error:
            # Dispatch matters more than being watched. (A name no DNS can hold is a UnicodeError.)
            logger.warning(
                "no HTTP on %s:%d: %s; dispatch serves", settings.host, settings.port, error
            )
        else:
            logger.info("http on %s:%d", settings.host, port)
