"""The control verbs behind the control socket and behind TCP, in one process."""

import asyncio
import contextlib
import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sidecar.admin import Admin, ControlSite
from sidecar.catalog import Catalog
from sidecar.control import Control
from sidecar.errors import ConfigError
from sidecar.keyhash import KeyHash
from sidecar.logs import RateLimit
from sidecar.metrics import Health
from sidecar.paths import Paths
from sidecar.steering import Steering
from sidecar.verbs import Verbs
from tests.support import make_dispatcher

TOKEN = "0123456789abcdef-token"


class Sites:
    """One dispatcher behind both sites; `call` runs in a thread while they serve."""

    def __init__(self, directory: Path) -> None:
        self.path = f"{directory}/control"
        self.dispatcher = make_dispatcher("kv_affinity")
        self.health = Health()
        self.steering = Steering(self.dispatcher, Catalog(dict), self.health)
        self.paths = Paths(KeyHash())
        self.reloads = 0
        self.refusal = ""
        verbs = Verbs(self.steering, self.paths, self._reload, RateLimit())
        self.site = ControlSite(verbs)
        self.admin = Admin(self.dispatcher, self.health, lambda: True, verbs)
        self.port = 0

    async def _reload(self) -> None:
        self.reloads += 1
        if self.refusal:
            raise ConfigError(self.refusal)

    def run(self, call: Callable[[], Any], token: str = TOKEN) -> Any:
        async def main() -> Any:
            await self.site.start(self.path)
            self.port = await self.admin.start("127.0.0.1", 0, token)
            try:
                return await asyncio.to_thread(call)
            finally:
                await self.site.stop()
                await self.admin.stop()

        return asyncio.run(main())

    def control(self, way: str) -> Control:
        if way == "socket":
            return Control(self.path, timeout=30)
        return Control(f"http://127.0.0.1:{self.port}", timeout=30, token=TOKEN)

    def http(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        """Status of a request over TCP, and its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            text = response.read()
            self.headers = dict(response.headers)
        with contextlib.suppress(ValueError):
            return response.status, json.loads(text)
        return response.status, text
