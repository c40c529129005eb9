"""Reading SGLang's objects: what a request says, what a server is called."""

import re
import socket
from typing import Any

from sglang_hook.controller import Dispatch
from sglang_hook.settings import Settings
from sidecar.wire import MAX_INSTANCE_CHARS

CONTROLLER = "sglang.srt.managers.data_parallel_controller"

NEWEST = (0, 5, 23)
"""The newest release that was tested, see docs/compatibility.md."""

# What SGLang's warm-up sends once for each rank, without a key: affinity would put all on one.
WARM_UP_TEXT = "The capital city of France is"
WARM_UP_IDS = [10, 11, 12]


def numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 23) of 0.5.23, 0.5.23.post1 and 0.5.23rc1; () of what is no version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def instance_name(settings: Settings, server_args: Any) -> str:
    """Name of this server, the same in its controller and its schedulers."""
    if settings.instance:
        return settings.instance
    port = getattr(server_args, "port", 0)
    return f"{socket.gethostname()}:{port}"[-MAX_INSTANCE_CHARS:]


def to_dispatch(req: Any) -> Dispatch:
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


def is_warm_up(req: Any) -> bool:
    """Whether a request without a key is one of the prompts that SGLang warms its ranks with."""
    if getattr(req, "input_text", None) == WARM_UP_TEXT:
        return True
    ids = getattr(req, "input_ids", None)
    return ids is not None and len(ids) == len(WARM_UP_IDS) and list(ids) == WARM_UP_IDS


def size(req: Any) -> int:
    """Prompt length in tokens; 0 for a prompt of embeddings."""
    ids = getattr(req, "input_ids", None)
    return 0 if ids is None else len(ids)
