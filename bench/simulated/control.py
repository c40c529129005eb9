"""What a simulated rank does with each kind of message."""

import logging
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
    ShutdownReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)

from bench.simulated.output import build_message

if TYPE_CHECKING:
    from bench.simulated.scheduler import SimulatedScheduler

_SINGLE = (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)
_BATCH = (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)

logger = logging.getLogger(__name__)


def dispatch(scheduler: "SimulatedScheduler", message: Any) -> Any:
    """Act on the message; returns the answer to send at once, if it has one."""
    if isinstance(message, _SINGLE):
        scheduler.handle_generate_request(message)
    elif isinstance(message, _BATCH):
        for each in message.batch:
            scheduler.handle_generate_request(each)
    elif isinstance(message, AbortReq):
        scheduler.abort_request(message)
    elif isinstance(message, FlushCacheReqInput):
        return FlushCacheReqOutput(success=scheduler.flush_cache())
    elif isinstance(message, GetInternalStateReq):
        return _internal_state(scheduler)
    elif isinstance(message, ShutdownReq):
        scheduler.gracefully_exit = True
    else:
        return _refuse(message)
    return None


def _internal_state(scheduler: "SimulatedScheduler") -> GetInternalStateReqOutput:
    settings = scheduler.settings
    state = {
        "simulated": True,
        "dp_rank": scheduler.placement.dp_rank,
        "last_gen_throughput": 0.0,
        "memory_usage": {"weight": 0.0, "kvcache": 0.0, "token_capacity": settings.cache_tokens},
        "effective_max_running_requests_per_dp": settings.max_running_requests,
        "prefix_cache_tokens": scheduler.tree_cache.tokens,
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
