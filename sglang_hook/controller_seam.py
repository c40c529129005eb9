"""Stands between SGLang's DataParallelController and our Chooser.

Every method that SGLang calls contains its own errors: it counts them, logs the first, and lets
SGLang go on as without us.
"""

import contextlib
import logging
import platform
import sys
import time
from collections.abc import Iterator
from typing import Any

from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser
from sglang_hook.reading import (
    CONTROLLER,
    NEWEST,
    instance_name,
    is_warm_up,
    numbers,
    size,
    to_dispatch,
)
from sglang_hook.sending import LISTENERS, count_at_sockets, tokenized
from sglang_hook.settings import Settings
from sglang_hook.wrapping import seam, untold
from sidecar import __version__

logger = logging.getLogger("sglang_hook")

_HEALTH_CHECK = "HEALTH_CHECK"  # sglang.srt.constants.HEALTH_CHECK_RID_PREFIX


class ControllerSeam:
    """One hooked controller. Raises SeamMissing if it lacks what we need of it."""

    def __init__(self, controller: Any, settings: Settings) -> None:
        for name in ("workers", "status", "server_args", "load_balance_method"):
            seam(controller, name)
        self.controller = controller
        # Not the module of the controller's class, which may be a subclass of Ray's.
        self._module = sys.modules[CONTROLLER]
        self.method = controller.load_balance_method.name.lower()
        self.stock = seam(controller, "dispatching")
        self.plan: dict[int, int | None] = {}
        self._named = bool(settings.instance)
        # Before 0.5.16 every worker is one of the server's for good.
        self._elastic = hasattr(controller, "_active_workers")
        self._known: tuple[Any, list[Any], list[Any]] = ([], [], [])
        self._live: list[int] = []
        self._rank_of: dict[int, int] = {}
        self._failed = False
        # Before 0.5.15 the controller pickles onto each socket; then this is how requests go.
        self._sock_send = hasattr(self._module, "sock_send")
        self.chooser = Chooser(
            instance=instance_name(settings, controller.server_args),
            epoch=time.time_ns(),
            about=self._about(),
            live_ranks=self.live_ranks,
            last_rank_keys=settings.last_rank_keys,
        )
        self.client = SidecarClient(
            settings.endpoint,
            settings.deadline_ms,
            settings.breaker_misses,
            settings.probe_interval_ms / 1000,
            self.chooser.probe,
            keys=settings.keys(),
        )
        self.client.heard = self.chooser.heard
        self.chooser.ask = self.client.ask
        self.chooser.meter = self.client.meter

    def attach(self) -> None:
        """Take over the controller's `dispatching`."""
        args = self.controller.server_args
        # A node that joins an elastic server starts its ranks, and the first node dispatches.
        joins = args.node_rank != 0 or getattr(args, "is_ep_scale_joiner", False)
        if len(self.controller.workers) < 2 or joins:
            return
        if self._sock_send:
            LISTENERS.append(self.sent)
        else:
            count_at_sockets(self.controller.workers, tokenized(self._module), self.sent)
        self.client.greet()
        self.controller._dp_sidecar = self
        self.controller.dispatching = self.dispatching
        logger.info(
            "dp_sidecar: hook %s attached to the controller of %s, sidecar at %s%s, else %s",
            __version__,
            self.chooser.instance,
            self.client.endpoint,
            self.client.standing(),
            self.method,
        )
        self._warn_of_limits()

    def _warn_of_limits(self) -> None:
        """Say what of this server's configuration we cannot serve fully."""
        args = self.controller.server_args
        version = self.chooser.about["sglang"]
        if numbers(version) > NEWEST:
            logger.warning(
                "dp_sidecar: WARNING: SGLang %s is newer than what this hook was tested with; it "
                "attached to what is there, lines of dp_sidecar above say what is not",
                version,
            )
        if self.method == "follow_bootstrap_room":
            logger.warning(
                "dp_sidecar: WARNING: %s: SGLang places every request by its room, the sidecar "
                "none, and it is told of none; with another --load-balance-method it would",
                self.method,
            )
        if getattr(args, "nnodes", 1) > 1 and not self._named:
            logger.warning(
                "dp_sidecar: WARNING: nnodes > 1: schedulers on other nodes report under another "
                "name; set DP_SIDECAR_INSTANCE to the same on every node, and on the others "
                "DP_SIDECAR_REPORT_ENDPOINT to a tcp:// address, or their load stays unknown"
            )

    def dispatching(self, req: Any) -> Any:
        """Place one request; SGLang's own method does it where we have no rank to give."""
        rank = self._rank_for(req)
        worker = None if rank is None else self._worker(rank)
        if worker is None:
            return self.stock(req)
        self._record(rank, req)
        return self._module.sock_send(worker, req) if self._sock_send else worker.send_pyobj(req)

    @contextlib.contextmanager
    def planned(self, batch: Any) -> Iterator[None]:
        """Ask for the ranks of a whole batch in one query, for `dispatching` to take."""
        try:
            reqs = [req for req in batch if self._abstention(req) is None]
            ranks = self.chooser.choose([to_dispatch(req) for req in reqs])
            self.plan = {id(req): rank for req, rank in zip(reqs, ranks, strict=True)}
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            self._failure(error)
        try:
            yield
        finally:
            self.plan = {}

    def live_ranks(self) -> list[int]:
        """Ascending ids of the ranks that SGLang would send to now."""
        controller = self.controller
        now = controller._active_workers if self._elastic else range(len(controller.workers))
        active, status, workers = self._known
        if now != active or controller.status != status or controller.workers != workers:
            active, status, workers = self._known = (
                now if isinstance(now, range) else list(now),
                list(controller.status),
                list(controller.workers),
            )
            self._live = sorted(
                rank
                for rank in active
                if 0 <= rank < len(workers) and status[rank] and workers[rank] is not None
            )
            self._rank_of = {
                id(worker): r for r, worker in enumerate(workers) if worker is not None
            }
        return self._live

    def sent(self, socket: Any, req: Any) -> None:
        """Count a request towards the rank that owns `socket`."""
        try:
            rank = self._rank_of.get(id(socket))
            if rank is None:
                self.live_ranks()  # the workers may be others by now
                rank = self._rank_of.get(id(socket))
            if rank is not None:
                self.chooser.sent.count(rank, size(req))
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            self._failure(error)

    def _rank_for(self, req: Any) -> int | None:
        try:
            abstention = self._abstention(req)
            if abstention is not None:
                self.chooser.abstain(abstention)
                if abstention == "pinned":
                    self.chooser.remember(to_dispatch(req), req.routed_dp_rank)
                return None
            if id(req) in self.plan:
                return self.plan[id(req)]
            return self.chooser.choose_one(to_dispatch(req))
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            self._failure(error)
            return None

    def _abstention(self, req: Any) -> str | None:
        """Why a request is SGLang's to place; None: it is ours."""
        if getattr(req, "routed_dp_rank", None) is not None:
            return "pinned"
        rid = getattr(req, "rid", None)
        if isinstance(rid, str) and rid.startswith(_HEALTH_CHECK):
            return "health_check"
        if self.method == "follow_bootstrap_room":
            return "bootstrap_room"
        if getattr(req, "routing_key", None) is None and is_warm_up(req):
            return "warm_up"
        return None

    def _worker(self, rank: int) -> Any:
        workers = self.controller.workers
        return workers[rank] if 0 <= rank < len(workers) else None

    def _record(self, rank: int | None, req: Any) -> None:
        """Let SGLang's total_* methods see our choices until the next load snapshot."""
        try:
            if self.method.startswith("total_"):
                budget = self.controller.dp_budget
                budget.total_requests[rank] += 1
                budget.total_tokens[rank] += size(req)
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            self._failure(error)

    def _failure(self, error: Exception) -> None:
        self.chooser.bypass("hook_error")
        if not self._failed:
            self._failed = True
            logger.error(
                "dp_sidecar: an error in the hook, SGLang places the request; "
                "further ones are counted only",
                exc_info=untold(error),
            )

    def _about(self) -> dict[str, str]:
        import sglang

        return {
            "sglang": str(getattr(sglang, "__version__", "unknown")),
            "hook": __version__,
            "python": platform.python_version(),
            "method": self.method,
        }
