"""The control socket from outside: its path, its messages, and a client that needs no event loop.

It speaks HTTP over a Unix socket of mode 0600, so `curl --unix-socket PATH http://sidecar/policy`
does too. The verbs are in `sidecar.admin.ControlSite`.
"""

import contextlib
import http.client
import json
import socket
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sidecar.errors import ConfigError, ControlError, RefusedError

# A hundred times what the longest list of parameters takes.
MAX_BODY_BYTES = 64 << 10
_MAX_ANSWER_BYTES = 1 << 20


class PolicyState(msgspec.Struct, frozen=True):
    """The policy in force; what the verbs answer. Grows at the tail, unknown fields are skipped."""

    name: str
    params: dict[str, Any]
    """All of them, with the values in force."""
    version: int
    """Policies that this process has run, the first being 1."""
    policies: list[str]
    """Names that `set_policy` takes."""


class PolicyOrder(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of a `policy set`."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    params: dict[str, Any] = {}
    """Those left out take the policy's defaults."""


def control_path(endpoint: str, given: str = "") -> str:
    """Path of the control socket: `given`, else `PATH.control` of `ipc://PATH`, else "": none."""
    if given or not endpoint.startswith("ipc://"):
        return given
    return endpoint.removeprefix("ipc://") + ".control"


def decode_order(body: bytes) -> PolicyOrder:
    """Read the body of a `policy set`. Raises ConfigError, which names the field."""
    try:
        return msgspec.json.decode(body, type=PolicyOrder)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"body: {error}") from None


class _Connection(http.client.HTTPConnection):
    """HTTP to a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("sidecar", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Control:
    """The control socket of one sidecar. Each call is a connection of its own.

    timeout: longest wait, seconds, for any one step of a call.
    """

    def __init__(self, path: str, timeout: float = 5.0) -> None:
        self.path = path
        self.timeout = timeout

    def show(self) -> PolicyState:
        """The policy in force. Raises ControlError."""
        return self._call("GET")

    def set_policy(self, name: str, params: dict[str, Any] | None = None) -> PolicyState:
        """Swap the policy; parameters left out take their defaults.

        Raises RefusedError, which names field and bound, if the sidecar keeps the one it has, and
        ControlError if there is no telling.
        """
        try:
            body = json.dumps({"name": name, "params": params or {}}, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RefusedError(f"policy.params of {name}: {error}") from None
        if len(body) > MAX_BODY_BYTES:
            raise RefusedError(
                f"policy.params of {name}: {len(body)} bytes as JSON, at most {MAX_BODY_BYTES} fit"
            )
        return self._call("POST", body)

    def _call(self, method: str, body: bytes | None = None) -> PolicyState:
        status, answer = self._exchange(method, body)
        try:
            if status == 200:
                return msgspec.json.decode(answer, type=PolicyState)
            error = msgspec.json.decode(answer, type=dict[str, str])["error"]
        except (msgspec.DecodeError, UnicodeError, RecursionError, KeyError):
            raise ControlError(
                f"{self.path}: HTTP status {status} without sense; no sidecar of this version?"
            ) from None
        if status == 400:
            raise RefusedError(error)
        raise ControlError(f"{self.path}: HTTP status {status}: {error}")

    def _exchange(self, method: str, body: bytes | None) -> tuple[int, bytes]:
        """Status and body of the answer."""
        with contextlib.closing(_Connection(self.path, self.timeout)) as connection:
            try:
                connection.request(method, "/policy", body)
                response = connection.getresponse()
                return response.status, response.read(_MAX_ANSWER_BYTES)
            except (FileNotFoundError, ConnectionRefusedError):
                raise ControlError(f"{self.path}: no sidecar listens there") from None
            except TimeoutError:
                raise ControlError(f"{self.path}: no answer within {self.timeout:g} s") from None
            except http.client.HTTPException as error:
                raise ControlError(
                    f"{self.path}: does not answer as a control socket does "
                    f"({type(error).__name__})"
                ) from None
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ControlError(f"{self.path}: {reason}") from None
