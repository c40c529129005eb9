"""Adapters between SGLang's objects and the hook: one controller, one scheduler a process.

With `patches` the only code that touches SGLang's attributes. Every method that SGLang calls
contains its own errors: it counts them, logs the first, and lets SGLang go on as without us.
"""

import contextlib
import logging
import platform
import socket as sockets
import sys
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any, ClassVar

from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser, Dispatch
from sglang_hook.reporter import Reporter, Tokens
from sglang_hook.settings import Settings
from sidecar import __version__
from sidecar.wire import MAX_INSTANCE_CHARS, report_endpoint

logger = logging.getLogger("sglang_hook")

# What SGLang's warm-up sends once for each rank, without a key: affinity would put all on one.
_WARM_UP_TEXT = "The capital city of France is"
_WARM_UP_IDS = [10, 11, 12]
_CONTROLLER_MODULE = "sglang.srt.managers.data_parallel_controller"
_HEALTH_CHECK = "HEALTH_CHECK"  # sglang.srt.constants.HEALTH_CHECK_RID_PREFIX


def instance_name(settings: Settings, server_args: Any) -> str:
    """Name of this server, the same in its controller and its schedulers."""
    if settings.instance:
        return settings.instance
    port = getattr(server_args, "port", 0)
    return f"{sockets.gethostname()}:{port}"[-MAX_INSTANCE_CHARS:]


def sent(socket: Any, req: Any) -> None:
    """A tokenized request went out through SGLang's `sock_send`, whatever chose its rank."""
    seam = ControllerSeam.attached
    if seam is not None:
        seam.sent(socket, req)


class ControllerSeam:
    """Stands between SGLang's DataParallelController and our Chooser."""

    attached: "ClassVar[ControllerSeam | None]" = None
    """The one of this process."""

    def __init__(self, controller: Any, settings: Settings) -> None:
        self.controller = controller
        self._module = sys.modules[_CONTROLLER_MODULE]
        self.method = controller.load_balance_method.name.lower()
        self.stock = controller.dispatching
        self.plan: dict[int, int | None] = {}
        self._known: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        self._live: list[int] = []
        self._rank_of: dict[int, int] = {}
        self._failed = False
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
        )
        self.client.heard = self.chooser.heard
        self.chooser.ask = self.client.ask

    def attach(self) -> None:
        """Take over the controller's `dispatching`."""
        if len(self.controller.workers) < 2 or self.controller.server_args.node_rank != 0:
            return
        ControllerSeam.attached = self
        self.controller._dp_sidecar = self
        self.controller.dispatching = self.dispatching
        self.client.greet()
        logger.info(
            "dp_sidecar: hook %s attached to the controller of %s, sidecar at %s, else %s",
            __version__,
            self.chooser.instance,
            self.client.endpoint,
            self.method,
        )

    def dispatching(self, req: Any) -> Any:
        """Place one request; SGLang's own method does it where we have no rank to give."""
        rank = self._rank_for(req)
        worker = None if rank is None else self._worker(rank)
        if worker is None:
            return self.stock(req)
        self._record(rank, req)
        return self._module.sock_send(worker, req)

    @contextlib.contextmanager
    def planned(self, batch: Any) -> Iterator[None]:
        """Ask for the ranks of a whole batch in one query, for `dispatching` to take."""
        try:
            reqs = [req for req in batch if self._abstention(req) is None]
            ranks = self.chooser.choose([_dispatch(req) for req in reqs])
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
        active, status, workers = self._known
        if (
            controller._active_workers != active
            or controller.status != status
            or controller.workers != workers
        ):
            self._known = (
                list(controller._active_workers),
                list(controller.status),
                list(controller.workers),
            )
            active, status, workers = self._known
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
                self.chooser.sent.count(rank, _size(req))
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            self._failure(error)

    def _rank_for(self, req: Any) -> int | None:
        try:
            abstention = self._abstention(req)
            if abstention is not None:
                self.chooser.abstain(abstention)
                if abstention == "pinned":
                    self.chooser.remember(_dispatch(req), req.routed_dp_rank)
                return None
            if id(req) in self.plan:
                return self.plan[id(req)]
            return self.chooser.choose_one(_dispatch(req))
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
        if getattr(req, "routing_key", None) is None and _is_warm_up(req):
            return "warm_up"
        return None

    def _worker(self, rank: int) -> Any:
        workers = self.controller.workers
        return workers[rank] if 0 <= rank < len(workers) else None

    def _record(self, rank: int | None, req: Any) -> None:
        """Let SGLang's total_* methods see our choices until the next load snapshot."""
        try:
            if self.controller.refresh_load_budget_on_dispatch:
                budget = self.controller.dp_budget
                budget.total_requests[rank] += 1
                budget.total_tokens[rank] += _size(req)
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            self._failure(error)

    def _failure(self, error: Exception) -> None:
        self.chooser.bypass("hook_error")
        if not self._failed:
            self._failed = True
            logger.error(
                "dp_sidecar: an error in the hook, SGLang places the request; "
                "further ones are counted only",
                exc_info=error,
            )

    def _about(self) -> dict[str, str]:
        import sglang

        return {
            "sglang": str(getattr(sglang, "__version__", "unknown")),
            "hook": __version__,
            "python": platform.python_version(),
            "method": self.method,
        }


def _dispatch(req: Any) -> Dispatch:
    """What we read of a tokenized request."""
    params = getattr(req, "session_params", None)
    session = getattr(req, "session_id", None) or getattr(params, "id", None)
    return Dispatch(
        routing_key=getattr(req, "routing_key", None),
        tokens=getattr(req, "input_ids", None),
        namespace=(
            getattr(req, "extra_key", None),
            getattr(req, "cache_salt", None),
            getattr(req, "lora_id", None),
        ),
        session=session,
    )


def _is_warm_up(req: Any) -> bool:
    if getattr(req, "input_text", None) == _WARM_UP_TEXT:
        return True
    ids = getattr(req, "input_ids", None)
    return ids is not None and len(ids) == len(_WARM_UP_IDS) and list(ids) == _WARM_UP_IDS


def _size(req: Any) -> int:
    ids = getattr(req, "input_ids", None)
    return 0 if ids is None else len(ids)


class SchedulerSeam:
    """Samples one rank-zero scheduler and reports its load."""

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        self.scheduler = scheduler
        writer = scheduler.load_snapshot_writer
        self.reporter = Reporter(
            report_endpoint(settings.endpoint),
            instance_name(settings, scheduler.server_args),
            writer.dp_rank,
            settings.report_interval_ms / 1000,
            settings.heartbeat_ms / 1000,
        )
        self._failed = False
        # PD disaggregation has queues of its own; there SGLang's snapshot is the truth.
        mode = getattr(scheduler, "disaggregation_mode", None)
        self._own_sample = getattr(mode, "name", "NULL") == "NULL"
        self._snapshot = (0, 0)
        self._listen(writer)

    def step(self, recv_reqs: Any) -> None:
        """After the scheduler took in `recv_reqs` (maybe none): count them, report if it is due."""
        try:
            for req in recv_reqs or ():
                self._count(req)
            scheduler = self.scheduler
            state = (len(scheduler.waiting_queue), len(scheduler.running_batch.reqs))
            if not self._own_sample:
                state = self._snapshot
            if self.reporter.due(state):
                running, waiting = self._sample() if self._own_sample else self._snapshot
                self.reporter.push(state, running, waiting)
        except Exception as error:
            if not self._failed:
                self._failed = True
                logger.error("dp_sidecar: the load is not reported", exc_info=error)

    def _count(self, req: Any) -> None:
        kind = type(req).__name__
        if kind in ("TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput"):
            self.reporter.count(_size(req))
        elif kind in ("BatchTokenizedGenerateReqInput", "BatchTokenizedEmbeddingReqInput"):
            for one in req.batch:
                self.reporter.count(_size(one))

    def _sample(self) -> tuple[int, int]:
        """Unfinished requests that run (a batch in prefill included), and that wait.

        SGLang's own snapshot leaves out the batch that was just prefilled: it joins the running
        batch one step later.
        """
        scheduler = self.scheduler
        last = scheduler.last_batch
        mode = getattr(last, "forward_mode", None)
        extending = last is not None and (mode is None or mode.is_extend())
        chunked = scheduler.chunked_req
        reqs = chain(
            scheduler.running_batch.reqs,
            last.reqs if extending else (),
            () if chunked is None else (chunked,),
        )
        running = len({id(req) for req in reqs if not req.finished()})
        grammar = getattr(scheduler, "grammar_manager", None)
        compiling = len(grammar.grammar_queue) if grammar is not None else 0
        return running, len(scheduler.waiting_queue) + compiling

    def _listen(self, writer: Any) -> None:
        """Take the token figures from the snapshots that SGLang writes anyway."""
        write = writer.write

        def listening(snapshot: Any) -> Any:
            try:
                self._snapshot = (snapshot.num_running_reqs, snapshot.num_waiting_reqs)
                self.reporter.tokens = Tokens(
                    max(0, int(snapshot.num_total_tokens)),
                    max(0, int(snapshot.max_total_num_tokens)),
                    max(0, int(snapshot.max_running_requests)),
                    max(0, int(getattr(snapshot, "num_waiting_uncached_tokens", 0))),
                )
            except Exception as error:
                if not self._failed:
                    self._failed = True
                    logger.error("dp_sidecar: no token figures in load reports", exc_info=error)
            return write(snapshot)

        writer.write = listening
