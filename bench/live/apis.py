"""The two ways to ask an SGLang server for a streamed answer: what is sent, what comes back.

`completions` is the OpenAI API, what clients use. Its streamed answers do not say which DP rank
they come from; those of SGLang's own `generate` do, and tell cached tokens without
`--enable-cache-report`.
"""

from typing import Any, Protocol

import msgspec

ROUTING_KEY_HEADER = "x-smg-routing-key"


class Answer(msgspec.Struct):
    """What the chunks of one answer have told so far; -1: nothing yet."""

    request_id: str = ""
    rank: int = -1
    prompt_tokens: int = -1
    cached_tokens: int = -1
    output_tokens: int = -1
    error: str = ""


class Ask(msgspec.Struct, frozen=True):
    """One request."""

    prompt: bytes
    """Token ids, comma separated."""
    output_tokens: int
    key: str = ""
    rank: int | None = None
    """Sent to this DP rank whatever the policy says: for warming up."""


class Api(Protocol):
    """A way to ask."""

    path: str

    def headers(self, ask: Ask) -> dict[str, str]:
        """Beside Content-Type."""
        ...

    def body(self, model: str, ask: Ask) -> bytes:
        """JSON."""
        ...

    def read(self, data: bytes, answer: Answer) -> bool:
        """Take in a chunk; whether it brings tokens. Raises msgspec.DecodeError."""
        ...


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = -1
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    id: str = ""
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: Any = None


class Completions:
    """`/v1/completions`."""

    path = "/v1/completions"

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_Completion)

    def headers(self, ask: Ask) -> dict[str, str]:
        return {ROUTING_KEY_HEADER: ask.key} if ask.key else {}

    def body(self, model: str, ask: Ask) -> bytes:
        fields: dict[str, Any] = {
            "model": model,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.rank is not None:
            fields["routed_dp_rank"] = ask.rank
        return b'{"prompt":[' + ask.prompt + b"]," + msgspec.json.encode(fields)[1:]

    def read(self, data: bytes, answer: Answer) -> bool:
        chunk = self._decoder.decode(data)
        answer.request_id = chunk.id or answer.request_id
        if chunk.error is not None:
            answer.error = _error_text(chunk.error)
        if chunk.usage is not None:
            answer.prompt_tokens = chunk.usage.prompt_tokens
            if chunk.usage.completion_tokens is not None:
                answer.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            if details is not None and details.cached_tokens is not None:
                answer.cached_tokens = details.cached_tokens
        # Even where its text is empty: that is a token of which a character is still missing.
        return bool(chunk.choices)


class _Meta(msgspec.Struct):
    id: str = ""
    dp_rank: int | None = None
    prompt_tokens: int = -1
    cached_tokens: int = -1
    completion_tokens: int = -1


class _Generated(msgspec.Struct):
    meta_info: _Meta | None = None
    error: Any = None


class Generate:
    """SGLang's `/generate`, which takes the routing key in the body."""

    path = "/generate"

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_Generated)

    def headers(self, ask: Ask) -> dict[str, str]:
        return {}

    def body(self, model: str, ask: Ask) -> bytes:
        sampling = {"max_new_tokens": ask.output_tokens, "temperature": 0, "ignore_eos": True}
        fields: dict[str, Any] = {"sampling_params": sampling, "stream": True}
        if ask.key:
            fields["routing_key"] = ask.key
        if ask.rank is not None:
            fields["routed_dp_rank"] = ask.rank
        return b'{"input_ids":[' + ask.prompt + b"]," + msgspec.json.encode(fields)[1:]

    def read(self, data: bytes, answer: Answer) -> bool:
        chunk = self._decoder.decode(data)
        if chunk.error is not None:
            answer.error = _error_text(chunk.error)
        meta = chunk.meta_info
        if meta is None:
            return False
        answer.request_id = meta.id
        answer.rank = -1 if meta.dp_rank is None else meta.dp_rank
        answer.prompt_tokens = meta.prompt_tokens
        answer.cached_tokens = meta.cached_tokens
        answer.output_tokens = meta.completion_tokens
        return True


def _error_text(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:200] or "error"


class Routed(Generate):
    """`/generate` through a gateway, which looks for the routing key in the header alone."""

    def headers(self, ask: Ask) -> dict[str, str]:
        return {ROUTING_KEY_HEADER: ask.key} if ask.key else {}


APIS: dict[str, type[Completions] | type[Generate]] = {
    "completions": Completions,
    "generate": Generate,
}
