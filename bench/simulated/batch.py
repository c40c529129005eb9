"""Requests and batches, with the attributes of SGLang's `Req` and `ScheduleBatch` in use."""

import zlib
from array import array
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from bench.model.request import Request
from bench.simulated.model import OUTPUT_IDS
from bench.simulated.pages import Namespace, page_ids
from bench.simulated.settings import Settings


class SimulatedRequest(Request):
    """One prompt on its way through a rank; how far it is, the model's rank keeps."""

    def __init__(self, received: Any, settings: Settings) -> None:
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
        self.sent_tokens = 0
        self.to_finish: dict[str, Any] | None = None
        self.finished_reason: dict[str, Any] | None = None
        self.namespace: Namespace = tuple(
            getattr(received, name, None) for name in ("extra_key", "cache_salt", "lora_id")
        )
        self.page_tokens = settings.page_tokens
        limit = 0 if self.is_embedding else self.sampling_params.max_new_tokens
        self.has_limit = limit is not None
        length = len(self.origin_input_ids)
        output = settings.default_output_tokens if limit is None else limit
        # SGLang too lets an answer end where the memory does.
        output = max(0, min(output, settings.rank_spec().whole_pages - length))
        pages = page_ids(self.namespace, self.origin_input_ids, self.page_tokens)
        super().__init__(pages, length, output, None)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache, known from the first chunk on."""
        return self.cached

    @property
    def seqlen(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def extend_end(self) -> int:
        """Prompt tokens up to the end of the last chunk, the one under way included."""
        return self.done

    def finished(self) -> bool:
        return self.finished_reason is not None

    def advance(self) -> None:
        """One forward step: the next token, unless that was the last one or it is aborted."""
        if self.to_finish is not None:
            self._finish(self.to_finish)
            return
        if len(self.output_ids) < self.output_tokens:
            self.output_ids.append(self._next_token())
        if len(self.output_ids) >= self.output_tokens:
            self._finish(
                {"type": "length", "length": self.output_tokens}
                if self.has_limit
                else {"type": "stop", "matched": None}
            )

    def _finish(self, reason: dict[str, Any]) -> None:
        self.finished_reason = reason
        # The next turn of a chat may hold this answer.
        tokens = self.origin_input_ids + self.output_ids
        self.answer_pages = page_ids(self.namespace, tokens, self.page_tokens, len(self.pages))

    def _next_token(self) -> int:
        seed = zlib.crc32(self.origin_input_ids[-64:].tobytes())
        # A large odd stride makes neighbouring tokens differ without any random state.
        return OUTPUT_IDS[(seed + len(self.output_ids) * 7919) % len(OUTPUT_IDS)]


@dataclass
class SimulatedBatch:
    reqs: list[SimulatedRequest] = field(default_factory=list)
    forward_mode: ForwardMode = ForwardMode.DECODE

    def batch_size(self) -> int:
        return len(self.reqs)

    def is_empty(self) -> bool:
        return not self.reqs

    def filter_batch(self, exclude: SimulatedRequest | None = None) -> None:
        self.reqs = [req for req in self.reqs if not req.finished() and req is not exclude]
