"""Messages from a rank to the real detokenizer and TokenizerManager."""

from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

from sglang.srt.managers.io_struct import BatchEmbeddingOutput, BatchTokenIDOutput

from bench.simulated.batch import SimulatedRequest
from bench.simulated.compat import ARRAYS, fields_of

Message = TypeVar("Message")

# Nothing computes them, but requests that ask for them must not break the TokenizerManager.
_LOGPROBS = [
    name
    for name in sorted(fields_of(BatchTokenIDOutput)[1])
    if name.endswith(("logprobs_val", "logprobs_idx"))
]


def build_message(kind: type[Message], **values: Any) -> Message:
    """A message of any SGLang version: what it does not know is dropped, what is missing None."""
    unset, known = _fields(cast(Hashable, kind))
    return kind(**unset | {name: value for name, value in values.items() if name in known})


@cache
def _fields(kind: Hashable) -> tuple[dict[str, None], set[str]]:
    return fields_of(kind)  # takes a millisecond


def token_output(reqs: list[SimulatedRequest], dp_rank: int) -> BatchTokenIDOutput:
    """The tokens since the last output of each request."""
    new_ids: list[Any] = [req.output_ids[req.sent_tokens :] for req in reqs]
    if not ARRAYS:
        new_ids = [[*ids] for ids in new_ids]
    for req in reqs:
        req.sent_tokens = len(req.output_ids)
    params = [req.sampling_params for req in reqs]
    return build_message(
        BatchTokenIDOutput,
        **_common(reqs),
        **{name: [[] for _ in reqs] for name in _LOGPROBS},
        decoded_texts=["" for _ in reqs],
        decode_ids=new_ids,
        # Zero, as no prompt tokens go in front of the output: every token is a whole word.
        read_offsets=[0 for _ in reqs],
        output_ids=new_ids,
        skip_special_tokens=[each.skip_special_tokens for each in params],
        spaces_between_special_tokens=[each.spaces_between_special_tokens for each in params],
        no_stop_trim=[each.no_stop_trim for each in params],
        reasoning_tokens=[0 for _ in reqs],
        completion_tokens=[len(req.output_ids) for req in reqs],
        dp_ranks=[dp_rank for _ in reqs],
    )


def embedding_output(reqs: list[SimulatedRequest]) -> BatchEmbeddingOutput:
    return build_message(
        BatchEmbeddingOutput, **_common(reqs), embeddings=[[1.0, 0.0, 0.0, 0.0] for _ in reqs]
    )


def _common(reqs: list[SimulatedRequest]) -> dict[str, list[Any]]:
    return {
        "rids": [req.rid for req in reqs],
        "http_worker_ipcs": [req.http_worker_ipc for req in reqs],
        "finished_reasons": [req.finished_reason for req in reqs],
        "prompt_tokens": [len(req.origin_input_ids) for req in reqs],
        "cached_tokens": [req.cached for req in reqs],
        "retraction_counts": [0 for _ in reqs],
    }
