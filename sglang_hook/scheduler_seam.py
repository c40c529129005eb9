"""Stands between SGLang's Scheduler and our Reporter.

What SGLang calls contains its own errors: it logs the first and lets SGLang go on as without us.
"""

import logging
from itertools import chain
from typing import Any

from sglang_hook.reading import instance_name, size
from sglang_hook.reporter import Reporter, Tokens
from sglang_hook.settings import Settings
from sidecar.wire import report_endpoint

logger = logging.getLogger("sglang_hook")


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
        self._snapshot, self._received_at_snapshot = (0, 0), 0
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
                if self._own_sample:
                    self.reporter.push(state, *self._sample(), self.reporter.received)
                else:
                    self.reporter.push(state, *self._snapshot, self._received_at_snapshot)
        except Exception as error:
            if not self._failed:
                self._failed = True
                logger.error("dp_sidecar: the load is not reported", exc_info=error)

    def _count(self, req: Any) -> None:
        kind = type(req).__name__
        if kind in ("TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput"):
            self.reporter.count(size(req))
        elif kind in ("BatchTokenizedGenerateReqInput", "BatchTokenizedEmbeddingReqInput"):
            for one in req.batch:
                self.reporter.count(size(one))

    def _sample(self) -> tuple[int, int]:
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
        return running, len(scheduler.waiting_queue) + compiling

    def _listen(self, writer: Any) -> None:
        """Take the token figures from the snapshots that SGLang writes anyway."""
        write = writer.write

        def listening(snapshot: Any) -> Any:
            try:
                # What was received by now is in these figures; what comes later is in flight to
                # them, or a long prefill would hide it.
                self._snapshot = (snapshot.num_running_reqs, snapshot.num_waiting_reqs)
                self._received_at_snapshot = self.reporter.received
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
                    logger.error("dp_sidecar: no token figures in load reports", exc_info=error)
            return write(snapshot)

        writer.write = listening


def _extends(batch: Any) -> bool:
    """Whether a batch that was run last is a prefill, which the running batch lacks as yet."""
    mode = getattr(batch, "forward_mode", None)
    return batch is not None and (mode is None or mode.is_extend())
