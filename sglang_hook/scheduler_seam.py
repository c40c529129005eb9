"""Stands between SGLang's Scheduler and our Reporter.

What SGLang calls contains its own errors: it logs the first and lets SGLang go on as without us.

What the engine found in its prefix cache is read from the batches that it prefilled. The event
loops (but that of --enable-pdmux) show a batch as `last_batch` at one step at least, before any
request is filtered out of it: the step after its launch. Under overlap it may still run then, but
what it found is decided before the launch. (A pause in mode `retract` hides a batch; its requests
are seen when they are prefilled again.)
"""

import logging
from collections.abc import Callable
from itertools import chain
from typing import Any

from sglang_hook.reading import instance_name, size
from sglang_hook.reporter import Reporter, Sample, Tokens
from sglang_hook.settings import Settings
from sglang_hook.wrapping import seam, untold

logger = logging.getLogger("sglang_hook")

# On a request that was counted. It goes with the request, unlike a set of ids of ours.
_COUNTED = "_dp_sidecar_counted"


class SchedulerSeam:
    """Samples one rank-zero scheduler and reports its load."""

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        self.scheduler = scheduler
        writer = getattr(scheduler, "load_snapshot_writer", None)
        self.reporter = Reporter(
            settings.reports,
            instance_name(settings, scheduler.server_args),
            (getattr(scheduler, "dp_rank", 0) or 0) if writer is None else writer.dp_rank,
            settings.report_interval_ms / 1000,
            settings.heartbeat_ms / 1000,
            keys=settings.keys(),
        )
        self._failed = False
        self._blind = False
        """Whether what prefill found could not be read once; the load is reported all the same."""
        # PD disaggregation has queues of its own; there SGLang's snapshot is the truth.
        mode = getattr(scheduler, "disaggregation_mode", None)
        self._own_sample = getattr(mode, "name", "NULL") == "NULL"
        self._snapshot = Sample()
        self._poll = _own_loads(scheduler) if writer is None else None
        """Makes SGLang's figures where it writes no snapshots; asked when a report is due."""
        if writer is not None:
            self._listen(writer)

    def step(self, recv_reqs: Any) -> None:
        """After the scheduler took in `recv_reqs` (maybe none): count them, report if it is due."""
        try:
            for req in recv_reqs or ():
                self._count(req)
            self._see_prefill()
            ours = self._own_sample or self._poll is not None
            state = self._state() if ours else self._snapshot
            if self.reporter.due(state):
                if self._poll is not None:
                    self._take(self._poll)
                self.reporter.push(state, self._sample() if self._own_sample else self._snapshot)
        except Exception as error:
            if not self._failed:
                self._failed = True
                logger.error("dp_sidecar: the load is not reported", exc_info=untold(error))

    def flushed(self, emptied: Any) -> None:
        """After SGLang's flush_cache; `emptied` is its answer, false where requests forbade it."""
        if emptied:
            self.reporter.flush()

    def _count(self, req: Any) -> None:
        kind = type(req).__name__
        if kind in ("TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput"):
            self.reporter.count(size(req))
        elif kind in ("BatchTokenizedGenerateReqInput", "BatchTokenizedEmbeddingReqInput"):
            for one in req.batch:
                self.reporter.count(size(one))

    def _see_prefill(self) -> None:
        """Count the requests of the batch run last, if their prefill began with it.

        Once each: not again with a later chunk, nor when a retracted request is prefilled anew.
        """
        try:
            scheduler = self.scheduler
            batch = scheduler.last_batch
            # Whoever decodes was seen in prefill: this is all that a decode step pays.
            if batch is None or batch is scheduler.running_batch or not _extends(batch):
                return
            for req in batch.reqs:
                if not getattr(req, _COUNTED, False):
                    setattr(req, _COUNTED, True)
                    self.reporter.admit(len(req.origin_input_ids), req.cached_tokens)
        except Exception as error:
            if not self._blind:
                self._blind = True
                logger.error("dp_sidecar: no prefix cache figures", exc_info=untold(error))

    def _prefilling(self) -> int:
        """Tokens that the prompt in chunks lacks beyond the chunk under way; 0: there is none."""
        try:
            chunked = self.scheduler.chunked_req
            return 0 if chunked is None else _rest(chunked)
        except Exception as error:
            if not self._blind:
                self._blind = True
                logger.error(
                    "dp_sidecar: no figure of the prompt in chunks", exc_info=untold(error)
                )
            return 0

    def _state(self) -> tuple[int, ...]:
        """What, when it changes, makes a report due."""
        scheduler = self.scheduler
        return (
            len(scheduler.waiting_queue),
            len(scheduler.running_batch.reqs),
            self.reporter.admitted_tokens,
            self._prefilling(),
        )

    def _sample_of(self, running: int, waiting: int) -> Sample:
        """These requests, and our own figures of the same moment."""
        reporter = self.reporter
        return Sample(
            running,
            waiting,
            reporter.received,
            self._prefilling(),
            reporter.admitted_tokens,
            reporter.cached_tokens,
        )

    def _sample(self) -> Sample:
        """Unfinished requests that run (a batch in prefill included), and that wait.

        SGLang's own snapshot leaves out the batch that was just prefilled: it joins the running
        batch one step later.
        """
        scheduler = self.scheduler
        # With pipeline parallelism `running_batch` is that of one microbatch; these hold all.
        batches = [
            scheduler.running_batch,
            *(getattr(scheduler, "running_mbs", None) or ()),
            *filter(
                _extends, (scheduler.last_batch, *(getattr(scheduler, "last_mbs", None) or ()))
            ),
        ]
        chunked = scheduler.chunked_req
        reqs = chain(
            *(batch.reqs for batch in batches if batch is not None),
            () if chunked is None else (chunked,),
        )
        running = len({id(req) for req in reqs if not req.finished()})
        grammar = getattr(scheduler, "grammar_manager", None)
        compiling = len(grammar.grammar_queue) if grammar is not None else 0
        return self._sample_of(running, len(scheduler.waiting_queue) + compiling)

    def _listen(self, writer: Any) -> None:
        """Take the token figures from the snapshots that SGLang writes anyway."""
        write = seam(writer, "write")

        def listening(snapshot: Any) -> Any:
            self._take(lambda: snapshot)
            return write(snapshot)

        writer.write = listening

    def _take(self, make: Callable[[], Any]) -> None:
        try:
            snapshot = make()
            # What was received by now is in these figures; what comes later is in flight to
            # them, or a long prefill would hide it.
            self._snapshot = self._sample_of(snapshot.num_running_reqs, snapshot.num_waiting_reqs)
            self.reporter.tokens = Tokens(
                self.reporter.received_tokens,
                max(0, int(snapshot.num_total_tokens)),
                max(0, int(snapshot.max_total_num_tokens)),
                max(0, int(snapshot.max_running_requests)),
                max(0, int(getattr(snapshot, "num_waiting_uncached_tokens", 0))),
            )
        except Exception as error:
            if not self._failed:
                self._failed = True
                logger.error("dp_sidecar: no token figures in load reports", exc_info=untold(error))


def is_rank_zero(scheduler: Any) -> bool:
    """Whether this process takes the requests of its rank, and so reports its load."""
    if hasattr(scheduler, "load_snapshot_writer"):
        return scheduler.load_snapshot_writer is not None
    return getattr(scheduler, "recv_from_tokenizer", None) is not None  # 0.5.12


def _own_loads(scheduler: Any) -> Callable[[], Any]:
    """What 0.5.12 has in place of snapshots. Raises SeamMissing."""
    get_loads = seam(scheduler, "get_loads")
    from sglang.srt.managers.io_struct import GetLoadsReqInput

    core = GetLoadsReqInput(include=["core"])
    return lambda: get_loads(core)


def _extends(batch: Any) -> bool:
    """Whether a batch that was run last is a prefill, which the running batch lacks as yet."""
    mode = getattr(batch, "forward_mode", None)
    return batch is not None and (mode is None or mode.is_extend())


def _rest(req: Any) -> int:
    """Tokens of a request's prompt beyond those computed or being computed.

    After a retraction the answer so far is part of it.
    """
    return max(0, int(req.seqlen) - (_end(req) or 0))


def _end(req: Any) -> int | None:
    """Where the chunk under way ends; nothing between a retraction and the next prefill."""
    if hasattr(req, "extend_end"):  # 0.5.23
        return req.extend_end  # type: ignore[no-any-return]
    if hasattr(req, "extend_range"):  # 0.5.15
        return getattr(req.extend_range, "end", 0)
    if hasattr(req, "fill_len"):  # 0.5.13
        return req.fill_len  # type: ignore[no-any-return]
    return len(req.fill_ids)
