"""Where schedulers publish their load, as the operator writes it."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from sidecar.errors import ConfigError, EndpointError
from sidecar.wire import MAX_INSTANCE_CHARS, MAX_RANKS, check_report_endpoint

WILDCARDS = ("*", "0.0.0.0", "[::]")  # noqa: S104 - where SGLang binds; nobody is reached there


class PublishedConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`[published]`: loads that do not come from the hook."""

    endpoints: Annotated[
        dict[str, str],
        Meta(
            description="Instance -> where SGLang's --load-publish-endpoint is reached, rank by "
            'rank: {"127.0.0.1:30000" = "tcp://127.0.0.1:6000-6007"}, those of another node behind '
            "a comma; read for ranks that the hook does not report. Empty: loads come from the hook"
        ),
    ] = {}
    grace_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=60_000,
            description="A request counts as in flight until a load that was published this long "
            "after it was sent",
        ),
    ] = 50.0
    # 50: a load leaves SGLang milliseconds after it took in what had arrived, for which a request
    # waits as long as a step takes, 20 to 50 ms in decode. Of 0 to 2,000 it has the least error
    # over the traffic of `python -m bench.published`.


class Publisher(NamedTuple):
    """The PUB socket of one rank."""

    instance: str
    rank: int
    endpoint: str


def publishers(endpoints: Mapping[str, str], *, allow_tcp: bool) -> list[Publisher]:
    """One for each rank of each instance. Raises ConfigError.

    allow_tcp: whether the operator does without keys, which these sockets do not have; loopback
    needs no leave.
    """
    found: list[Publisher] = []
    for instance, text in endpoints.items():
        if not 0 < len(instance) <= MAX_INSTANCE_CHARS:
            raise ConfigError(
                f"published.endpoints: an instance has 1 to {MAX_INSTANCE_CHARS} characters"
            )
        try:
            addresses = list(_addresses(text, allow_tcp=allow_tcp))
        except EndpointError as error:
            raise ConfigError(f"published.endpoints: {instance}: {error}") from None
        found += [Publisher(instance, rank, at) for rank, at in enumerate(addresses)]
    if len(found) > MAX_RANKS:
        raise ConfigError(f"published.endpoints: {len(found)} ranks, at most {MAX_RANKS}")
    if len({one.endpoint for one in found}) < len(found):
        raise ConfigError("published.endpoints: two ranks have one address")
    return found


def _addresses(text: str, *, allow_tcp: bool) -> Iterator[str]:
    """`tcp://HOST:FIRST-LAST`, `tcp://HOST:PORT` or `ipc://PATH`, with commas between."""
    for part in text.split(","):
        address = part.strip()
        host, colon, ports = address.removeprefix("tcp://").rpartition(":")
        if not address.startswith("tcp://") or not colon:
            yield check_report_endpoint(address, allow_tcp=allow_tcp)
            continue
        if host in WILDCARDS:
            raise EndpointError(f"{address}: name the host that the ranks are reached at")
        first, dash, last = ports.partition("-")
        yield from _ports(host, first, last if dash else first, allow_tcp or _is_loopback(host))


def _ports(host: str, first: str, last: str, allow_tcp: bool) -> Iterator[str]:
    """Of `first` to `last`, both of which are checked before anything is counted."""
    for port in (first, last):
        check_report_endpoint(f"tcp://{host}:{port}", allow_tcp=True)
    if not allow_tcp:
        raise EndpointError(
            f"tcp://{host}:{first}: SGLang publishes without keys; say with allow_insecure_tcp "
            "that it may be read from another host"
        )
    if int(first) > int(last):
        raise EndpointError(f"tcp://{host}:{first}-{last}: the last port is below the first")
    yield from (f"tcp://{host}:{port}" for port in range(int(first), int(last) + 1))


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]") or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host))
