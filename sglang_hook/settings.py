"""The hook's settings: environment variables, because they must reach every SGLang process."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from sidecar.curve import ClientKeys, parse_key, read_secret
from sidecar.errors import ConfigError
from sidecar.wire import (
    MAX_INSTANCE_CHARS,
    check_endpoint,
    check_report_endpoint,
    report_endpoint,
)

ENV_PREFIX = "DP_SIDECAR_"


class Settings(msgspec.Struct, frozen=True):
    """One field a variable: `deadline_ms` is DP_SIDECAR_DEADLINE_MS."""

    endpoint: str
    """Query socket of the sidecar; its presence switches the hook on."""
    report_endpoint: str = ""
    """Where load reports go; empty: beside the query socket."""
    curve_server_key: str = ""
    """The sidecar's public CURVE key, Z85; with it every tcp:// address is encrypted."""
    curve_secret_key_file: str = ""
    """The hook's own secret CURVE key; needed with the sidecar's public one."""
    allow_insecure_tcp: bool = False
    """Accept tcp:// without CURVE keys, neither encrypted nor guarded."""
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

    @property
    def reports(self) -> str:
        """Address that load reports go to."""
        return self.report_endpoint or report_endpoint(self.endpoint)

    def keys(self) -> ClientKeys | None:
        """The keys for tcp:// addresses; reads the secret's file. Raises ConfigError."""
        secret = ENV_PREFIX + "CURVE_SECRET_KEY_FILE"
        server = ENV_PREFIX + "CURVE_SERVER_KEY"
        if not self.curve_server_key and not self.curve_secret_key_file:
            return None
        if not self.curve_server_key or not self.curve_secret_key_file:
            missing, given = (secret, server) if self.curve_server_key else (server, secret)
            raise ConfigError(f"{missing}: is needed with {given}")
        public = parse_key(self.curve_server_key.strip(), server)
        return ClientKeys(read_secret(self.curve_secret_key_file, secret), public)


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
    except UnicodeEncodeError as error:  # a number that is none
        name = next(name for name in given if given[name] == error.object)
        raise ConfigError(f"{ENV_PREFIX}{name.upper()}: is not UTF-8") from None
    if not settings.instance.isprintable():
        raise ConfigError("DP_SIDECAR_INSTANCE: has characters that cannot be printed")
    allow_tcp = settings.keys() is not None or settings.allow_insecure_tcp
    check_endpoint(settings.endpoint, allow_tcp=allow_tcp)
    check_report_endpoint(settings.reports, allow_tcp=allow_tcp)
    return settings
