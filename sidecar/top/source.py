"""What a sidecar tells at /status, read over HTTP; what it does not tell has a default."""

import http.client
import urllib.parse
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from sidecar.errors import ConfigError, ControlError

# 4,096 instances are far less than this; a stranger at the port may send anything.
MAX_BODY_BYTES = 64 << 20
# What fits into a float: JSON has integers of any length.
Number = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]


class Histogram(Struct, frozen=True):
    """Durations: `counts[i]` took up to and with `bounds_us[i]` microseconds, the last longer."""

    bounds_us: list[float] = []
    counts: list[Number] = []

    @property
    def last_bound(self) -> float:
        """Microseconds; 0 if nothing is told."""
        return self.bounds_us[-1] if self.bounds_us else 0.0


class Hook(Struct, frozen=True):
    """What the hook measured of its own queries."""

    round_trip: Histogram = Histogram()
    breaker_open: bool | None = None
    breaker_opened: Number = 0


class Rank(Struct, frozen=True):
    """One rank; None is what it has not reported."""

    rank: Number
    live: bool = True
    running: Number | None = None
    waiting: Number | None = None
    in_flight: Number = 0
    load: Number = 0
    sent: Number = 0
    report_age_seconds: float | None = None
    tokens: Number | None = None
    capacity_tokens: Number | None = None
    admitted_tokens: Number | None = None
    cached_tokens: Number | None = None


class Instance(Struct, frozen=True):
    """One SGLang server."""

    instance: str
    about: dict[str, str] = {}
    decisions: dict[str, dict[str, Number]] = {}
    """policy -> reason -> requests."""
    bypassed: dict[str, Number] = {}
    hook: Hook | None = None
    ranks: list[Rank] = []


class Status(Struct, frozen=True):
    """The whole answer."""

    policy: str
    policy_version: Number
    version: str = ""
    pid: Number = 0
    uptime_seconds: float | None = None
    stale_seconds: float = 5.0
    last_reload_ok: bool = True
    canary: dict[str, Any] | None = None
    shadow: dict[str, Any] | None = None
    query_time: Histogram = Histogram()
    instances: list[Instance] = []


_status = msgspec.json.Decoder(Status)


def url_of(host: str, port: int) -> str:
    """Where to ask a sidecar with these settings. Raises ConfigError if it has no HTTP."""
    if port == 0:
        raise ConfigError("admin.port is 0, so that sidecar has no HTTP; --url names another")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - where it listens
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Source:
    """Asks one sidecar. Raises ConfigError if the URL is none.

    timeout: longest wait for each part of an answer, seconds.
    """

    def __init__(self, url: str, timeout: float = 5.0) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        try:
            parts = urllib.parse.urlsplit(self.url)
            self.host, self.port = parts.hostname or "", parts.port or 80
        except ValueError as error:
            raise ConfigError(f"--url {url!r}: {error}") from None
        plain = url.isascii() and url.isprintable() and " " not in url
        if not plain or parts.scheme != "http" or not self.host or parts.query or parts.fragment:
            raise ConfigError(f"--url {url!r}: must look like http://127.0.0.1:9477")
        self.path = parts.path + "/status"

    def fetch(self) -> Status:
        """The sidecar's state. Raises ControlError, which says what is wrong."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            connection.request("GET", self.path, headers={"Accept": "application/json"})
            answer = connection.getresponse()
            body = answer.read(MAX_BODY_BYTES)
        except TimeoutError:
            raise ControlError(f"no answer within {self.timeout:g} s") from None
        except (
            OSError,
            http.client.HTTPException,
            UnicodeError,
        ) as error:  # a name no DNS can hold
            text = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ControlError(str(text)) from None
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise ControlError(f"answers {answer.status}: no sidecar?")
        try:
            return _status.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # The text is not repeated: it may be anything.
            raise ControlError("the answer is not a sidecar's status") from None


def name_and_share(role: Mapping[str, Any] | None) -> str:
    """`prefix_affinity 10%` of a canary, `round_robin` of a shadow, empty for none."""
    if role is None:
        return ""
    name, share = str(role.get("policy", "?")), role.get("share")
    found = role.get("compared")
    if isinstance(found, dict):
        agreed, requests = found.get("agreed"), found.get("requests")
        if isinstance(agreed, int) and isinstance(requests, int) and 0 <= agreed <= requests > 0:
            return f"{name} agrees {100 * agreed / requests:.3g}%"
    if isinstance(share, int | float) and 0 <= share <= 1:
        return f"{name} {100 * share:.3g}%"
    return name
