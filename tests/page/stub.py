"""A stand-in for the sidecar's HTTP: the real page, and answers that the test chooses."""

import asyncio
import threading
from typing import Any

import msgspec
from aiohttp import web

from sidecar.web import add_page

BOUNDS = [2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 20000]


def rank(number: int, step: int = 0, **changes: Any) -> dict[str, Any]:
    """A rank of /status; what it counts grows with `step`."""
    running = (number * 7 + step) % 23
    waiting = number % 5 if running > 15 else 0
    flight = (number + step) % 3 == 0
    fields: dict[str, Any] = {
        "rank": number,
        "live": True,
        "running": running,
        "waiting": waiting,
        "in_flight": int(flight),
        "load": running + waiting + flight,
        "sent": 100 + step * (number % 7),
        "received": 100 + step * (number % 7),
        "report_age_seconds": 0.01 * (number % 40),
        "tokens": (1 << 20) * (number * 13 % 89 + 5) // 100,
        "capacity_tokens": 1 << 20,
        "admitted_tokens": 10_000 * step,
        "cached_tokens": 100 * (number * 31 % 60 + 40) * step,
    }
    return fields | changes


def instance(name: str, size: int, step: int = 0, **changes: Any) -> dict[str, Any]:
    """An instance of /status with `size` ranks."""
    fields: dict[str, Any] = {
        "instance": name,
        "about": {"sglang": "0.5.23", "hook": "0.3.0", "python": "3.11.7", "method": "round_robin"},
        "queries": 1000 + step,
        "decisions": {
            "kv_affinity": {
                "affinity_hit": 12_043 + 87 * step,
                "placed": 711 + 6 * step,
                "spill": 312 + 3 * step,
                "prefix_hit": 2_010 + 12 * step,
                "replica_hit": 95 + step,
                "stale_skip": 2,
            },
            "prefix_affinity": {"fallback": 40 + step},
        },
        "bypassed": {"deadline": 3 + step // 2, "session": 41},
        "abstained": {},
        "hook": {
            "round_trip": {
                "bounds_us": [50, 75, 100, 150, 200, 300, 400, 600, 1000],
                "counts": [0, 0, 3 * step, 40 * step, 50 * step, 9 * step, step, 0, 0, 0],
            },
            "breaker_open": False,
            "breaker_opened": 0,
        },
        "last_query_age_seconds": 0.2,
        "ranks": [rank(number, step) for number in range(size)],
    }
    return fields | changes


def status(*instances: dict[str, Any], step: int = 0, **changes: Any) -> dict[str, Any]:
    """An answer of /status."""
    fields: dict[str, Any] = {
        "version": "0.3.0",
        "pid": 4711,
        "uptime_seconds": 12_000.0 + step,
        "policy": "kv_affinity",
        "policy_version": 3,
        "policy_params": {"move_tokens": 16384.0, "move_ratio": 2.0, "block_tokens": 64},
        "canary": {"policy": "prefix_affinity", "share": 0.1, "params": {"max_load_skew": 2}},
        "shadow": None,
        "changes": [
            {"version": n + 1, "at": 1_790_000_000 + 3000 * n, "what": what, "policy": policy}
            | {"params": {"move_tokens": 16384.0} if policy == "kv_affinity" else {}}
            | {"share": 0.1 if what == "canary" else None}
            for n, (what, policy) in enumerate(
                [("start", "kv_affinity"), ("reload", "kv_affinity"), ("canary", "prefix_affinity")]
            )
        ],
        "last_reload_ok": True,
        "stale_seconds": 5.0,
        "query_time": {
            "bounds_us": BOUNDS,
            "counts": [0, 0, 5 * step, 60 * step, 40 * step, 4 * step, step, 0, 0, 0, 0, 0],
        },
        "instances": list(instances),
    }
    return fields | changes


def session(number: int, name: str = "gpu-1:30000", moves: int = 4) -> dict[str, Any]:
    """A session of /paths that leaves its home now and then and comes back."""
    home = number * 5 % 8
    steps = []
    for step in range(moves + 1):
        away = step % 2
        reason = "placed" if step == 0 else "spill" if away else "affinity_hit"
        steps.append(
            {
                "rank": (home + 3 + step) % 8 if away else home,
                "reason": reason,
                "requests": 1 if away else 3 + (number + step) % 9,
                "age_seconds": 4.0 * (moves - step) + number,
            }
        )
    # Fibonacci hashing: the hashes differ in their first digits
    key_hash = f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}"
    return {"key_hash": key_hash, "instance": name, "steps": steps}


class Stub:
    """Serves on loopback while the block lasts."""

    def __init__(self) -> None:
        self.status: Any = status()
        self.paths: Any = []
        self.asked: list[str] = []
        self.broken = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def __enter__(self) -> "Stub":
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        """Listen, at the same port if it did before."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def stop(self) -> None:
        """Listen no more; safe to call twice."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()

    async def _start(self) -> None:
        app = web.Application()
        add_page(app)
        app.router.add_get("/status", self._status)
        app.router.add_get("/paths", self._paths)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _status(self, request: web.Request) -> web.Response:
        self.asked.append("status")
        return self._json(self.status)

    async def _paths(self, request: web.Request) -> web.Response:
        self.asked.append("paths")
        if self.paths is None:
            raise web.HTTPNotFound
        return self._json(self.paths)

    @staticmethod
    def _json(value: Any) -> web.Response:
        return web.Response(body=msgspec.json.encode(value), content_type="application/json")
