"""Looks after the files of the sockets: who tidies up a directory must not make us unreachable.

A connection outlives the file that it was made through, so without a look nothing would be noticed
until the next hook or rank connects, and finds nobody.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from sidecar.errors import EndpointError
from sidecar.logs import logger

if TYPE_CHECKING:
    from sidecar.complaints import Complaints
    from sidecar.sites import Sites
    from sidecar.sockets import Sockets

LOOK_SECONDS = 1.0
"""A look is a few system calls; a server takes longer to start than this."""


class Vigil:
    """Makes files again that are gone; tells of those that are in others' hands.

    sockets: those of now; whoever makes others says so.
    """

    def __init__(self, sockets: "Sockets", sites: "Sites", complaints: "Complaints") -> None:
        self.sockets = sockets
        self.sites = sites
        self.complaints = complaints

    async def keep(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._mend(self._sockets)
            await self._mend(self.sites.mend)

    async def _sockets(self) -> list[str]:
        return self.sockets.mend()

    async def _mend(self, mend: Callable[[], Coroutine[Any, Any, list[str]]]) -> None:
        try:
            for path in await mend():
                self.complaints.health.remade_sockets += 1
                logger.warning("%s was removed by somebody, and is made again", path)
        except EndpointError as error:
            self.complaints.unreachable(error)
        except Exception as error:  # noqa: BLE001 - nobody looks after this one
            self.complaints.observer("vigil", error)
