"""What a simulated rank does with each kind of message."""

import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from bench.simulated.batch import SimulatedRequest
from bench.simulated.compat import ShutdownReq
from bench.simulated.output import build_message

if TYPE_CHECKING:
    from bench.simulated.scheduler import SimulatedScheduler

_SINGLE = (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)
_BATCH = (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)

logger = logging.getLogger(__name__)


def dispatch(scheduler: "SimulatedScheduler", message: Any) -> Any:
    """Act on the message; returns the answer to send at once, if it has one."""
    if isinstance(message, _SINGLE):
        _queue(scheduler, message)
    elif isinstance(message, _BATCH):
        for each in message.batch:
            _queue(scheduler, each)
    elif isinstance(message, AbortReq):
        _abort(scheduler, message)
    elif isinstance(message, FlushCacheReqInput):
        return FlushCacheReqOutput(success=scheduler.flush_cache())
    elif isinstance(message, GetInternalStateReq):
        return _internal_state(scheduler)
    elif isinstance(message, ShutdownReq):
        scheduler.gracefully_exit = True
    else:
        return _refuse(message)
    return None


def _queue(scheduler: "SimulatedScheduler", received: Any) -> None:
    request = SimulatedRequest(received, scheduler.settings)
    try:
        scheduler.rank.add(request)
    except ValueError as error:
        reason = FINISH_ABORT(str(error), HTTPStatus.BAD_REQUEST, "BadRequestError")
        request.finished_reason = reason.to_json()
        scheduler.send_results([request])


def _abort(scheduler: "SimulatedScheduler", message: AbortReq) -> None:
    """Queued requests leave at once, those in a batch with the next step, as in SGLang."""

    def meant(reqs: Iterable[SimulatedRequest]) -> list[SimulatedRequest]:
        return [req for req in reqs if message.abort_all or req.rid.startswith(message.rid)]

    for req in meant(scheduler.waiting_queue):
        drop(scheduler, req, message.finished_reason)
    for req in meant(_inflight(scheduler)):
        req.to_finish = FINISH_ABORT().to_json()


def drop(scheduler: "SimulatedScheduler", req: SimulatedRequest, reason: Any) -> None:
    """Abort a request between two steps, and tell who waits for it."""
    scheduler.rank.abort(req)
    # So that the batch it may have been in lets go of it.
    req.finished_reason = reason or FINISH_ABORT().to_json()
    output = AbortReq(rid=req.rid, finished_reason=reason)
    scheduler.ipc_channels.send_to_tokenizer.send_output(output, req)


def _inflight(scheduler: "SimulatedScheduler") -> list[SimulatedRequest]:
    last, chunked = scheduler.last_batch, scheduler.chunked_req
    reqs = [*scheduler.running_batch.reqs]
    if last is not None and last is not scheduler.running_batch:
        reqs += last.reqs
    if chunked is not None and chunked not in reqs:
        reqs.append(chunked)
    return [req for req in reqs if not req.finished()]


def _internal_state(scheduler: "SimulatedScheduler") -> GetInternalStateReqOutput:
    settings = scheduler.settings
    state = {
        "simulated": True,
        "dp_rank": scheduler.placement.dp_rank,
        "last_gen_throughput": 0.0,
        "memory_usage": {"weight": 0.0, "kvcache": 0.0, "token_capacity": settings.cache_tokens},
        "effective_max_running_requests_per_dp": settings.max_running_requests,
        "prefix_cache_tokens": scheduler.rank.cache.pages * settings.page_tokens,
        "steps": msgspec.structs.asdict(scheduler.counts),
        "settings": msgspec.structs.asdict(settings),
    }
    return GetInternalStateReqOutput(internal_state=state)


def _refuse(message: Any) -> Any:
    """The refusal in the message's own reply type, so that no HTTP handler waits forever.

    None for messages without a reply type: nobody waits for those.
    """
    name = type(message).__name__
    reply = getattr(io_struct, name.removesuffix("Input") + "Output", None)
    if reply is None:
        return None
    reason = f"{name} is not simulated"
    logger.warning(reason)
    return build_message(reply, success=False, updated=False, message=reason, error_message=reason)
