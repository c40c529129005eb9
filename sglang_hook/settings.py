"""The hook's settings: environment variables, because they must reach every SGLang process."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from sidecar.errors import ConfigError
from sidecar.wire import MAX_INSTANCE_CHARS, check_endpoint

ENV_PREFIX = "DP_SIDECAR_"


class Settings(msgspec.Struct, frozen=True):
    """One field a variable: `deadline_ms` is DP_SIDECAR_DEADLINE_MS."""

    endpoint: str
    """Query socket of the sidecar; its presence switches the hook on."""
    allow_insecure_tcp: bool = False
    """Accept a tcp:// endpoint, which is neither encrypted nor guarded."""
    instance: Annotated[str, Meta(max_length=MAX_INSTANCE_CHARS)] = ""
    """Name of this server in metrics; default host:port."""
    deadline_ms: Annotated[int, Meta(ge=1, le=1000)] = 5
    """Longest wait for an answer; the controller serves nothing else meanwhile."""
    breaker_misses: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Consecutive unanswered queries after which requests are decided locally without waiting.
    1, because a late answer or a probe closes the breaker again within milliseconds."""
    probe_interval_ms: Annotated[int, Meta(ge=1, le=60_000)] = 50
    """Least time between probes of a silent sidecar; they ride on requests and never wait."""
    last_rank_keys: Annotated[int, Meta(ge=1, le=1 << 24)] = 131_072
    """Keys whose last rank is remembered (about 200 bytes each)."""
    report_interval_ms: Annotated[int, Meta(ge=1, le=10_000)] = 5
    """Least time between load reports of a rank whose queues change."""
    heartbeat_ms: Annotated[int, Meta(ge=10, le=60_000)] = 250
    """Time after which an unchanged load is reported again."""


def load(env: Mapping[str, str]) -> Settings:
    """Read the settings. Raises ConfigError (names variable and bound) or EndpointError."""
    given = {
        name: env[ENV_PREFIX + name.upper()]
        for name in Settings.__struct_fields__
        if ENV_PREFIX + name.upper() in env
    }
    try:
        settings = msgspec.convert(given, Settings, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        for name in Settings.__struct_fields__:
            text = text.replace(f"`$.{name}`", ENV_PREFIX + name.upper())
        raise ConfigError(text) from None
    if not settings.instance.isprintable():
        raise ConfigError("DP_SIDECAR_INSTANCE: has characters that cannot be printed")
    check_endpoint(settings.endpoint, allow_tcp=settings.allow_insecure_tcp)
    return settings
