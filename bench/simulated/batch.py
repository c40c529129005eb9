"""Requests and batches, with the attributes of SGLang's `Req` and `ScheduleBatch` in use."""

import zlib
from array import array
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from bench.simulated.model import OUTPUT_IDS
from bench.simulated.prefix_cache import Namespace


class SimulatedRequest:
    """One prompt on its way through a rank."""

    def __init__(self, received: Any, default_output_tokens: int) -> None:
        self.rid: str = received.rid
        self.http_worker_ipc: str | None = received.http_worker_ipc
        self.routing_key: str | None = getattr(received, "routing_key", None)
        self.sampling_params = received.sampling_params
        self.stream: bool = getattr(received, "stream", False)
        self.is_embedding = not hasattr(received, "stream")
        # Prompts given as embeddings have no ids: zeros keep their length right.
        ids = received.input_ids
        self.origin_input_ids = array("q", ids if ids is not None else [0] * 16)
        self.output_ids: array[int] = array("q")
        self.cached_tokens = 0
        self.prefix_len = 0
        self.sent_tokens = 0
        self.to_finish: dict[str, Any] | None = None
        self.finished_reason: dict[str, Any] | None = None
        self.namespace: Namespace = tuple(
            getattr(received, name, None) for name in ("extra_key", "cache_salt", "lora_id")
        )
        limit = None if self.is_embedding else self.sampling_params.max_new_tokens
        self.has_limit = limit is not None
        self.output_limit = 0 if self.is_embedding else default_output_tokens
        if limit is not None:
            self.output_limit = limit

    def finished(self) -> bool:
        return self.finished_reason is not None

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens still to be prefilled."""
        return len(self.origin_input_ids) - self.prefix_len

    def advance(self) -> None:
        """One forward step: the next token, unless that was the last one or it is aborted."""
        if self.to_finish is not None:
            self.finished_reason = self.to_finish
            return
        if len(self.output_ids) < self.output_limit:
            self.output_ids.append(self._next_token())
        if len(self.output_ids) >= self.output_limit:
            self.finished_reason = (
                {"type": "length", "length": self.output_limit}
                if self.has_limit
                else {"type": "stop", "matched": None}
            )

    def _next_token(self) -> int:
        seed = zlib.crc32(self.origin_input_ids[-64:].tobytes())
        # A large odd stride makes neighbouring tokens differ without any random state.
        return OUTPUT_IDS[(seed + len(self.output_ids) * 7919) % len(OUTPUT_IDS)]


@dataclass
class SimulatedBatch:
    reqs: list[SimulatedRequest] = field(default_factory=list)
    forward_mode: ForwardMode = ForwardMode.DECODE
    new_tokens: int = 0

    def batch_size(self) -> int:
        return len(self.reqs)

    def is_empty(self) -> bool:
        return not self.reqs

    def filter_batch(self, exclude: SimulatedRequest | None = None) -> None:
        self.reqs = [req for req in self.reqs if not req.finished() and req is not exclude]
