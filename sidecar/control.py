"""The control socket from outside: a client that needs no event loop.

It speaks HTTP over a Unix socket of mode 0600, so `curl --unix-socket PATH http://sidecar/policy`
does too. The verbs are in `sidecar.verbs`, what is said in `sidecar.orders`.
"""

import builtins
import contextlib
import http.client
import json
import socket
from typing import Any, TypeVar

import msgspec

from sidecar.errors import ControlError, RefusedError
from sidecar.orders import MAX_BODY_BYTES, Change, Listed, PolicyState

_MAX_ANSWER_BYTES = 4 << 20

Params = dict[str, Any] | None
T = TypeVar("T")


class _OverUnix(http.client.HTTPConnection):
    """HTTP to a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("sidecar", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def _reason(answer: bytes) -> str:
    """The text of an error; "" if there is none."""
    try:
        return msgspec.json.decode(answer, type=dict[str, str]).get("error", "")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ""


class Control:
    """The control verbs of one sidecar. Each call is a connection of its own.

    path: of the control socket, or `http://HOST:PORT` where `admin.token_file` opens them; token:
    what stands in that file; timeout: longest wait, seconds, for any one step of a call.

    Every verb raises RefusedError, which names field and bound, if the sidecar leaves everything as
    it is, and ControlError if there is no telling.
    """

    def __init__(self, path: str, timeout: float = 5.0, token: str = "") -> None:
        self.path = path
        self.timeout = timeout
        self.token = token

    def show(self) -> PolicyState:
        """The policies at work."""
        return self._call("GET", "/policy", PolicyState)

    def list(self) -> list[Listed]:
        """Every policy that there is, with its parameters."""
        return self._call("GET", "/policy/list", builtins.list[Listed])

    def history(self) -> builtins.list[Change]:
        """What changed since the sidecar started, the newest last."""
        return self._call("GET", "/policy/history", builtins.list[Change])

    def set_policy(self, name: str, params: Params = None) -> PolicyState:
        """Swap the policy; parameters left out take their defaults."""
        order = {"name": name, "params": params or {}}
        return self._call("POST", "/policy", PolicyState, order)

    def reload(self) -> PolicyState:
        """Have it read its configuration again, as SIGHUP does."""
        return self._call("POST", "/policy/reload", PolicyState)

    def set_shadow(self, name: str, params: Params = None) -> PolicyState:
        """Let a second policy look on."""
        order = {"name": name, "params": params or {}}
        return self._call("POST", "/policy/shadow", PolicyState, order)

    def shadow_off(self) -> PolicyState:
        """End the shadow."""
        return self._call("DELETE", "/policy/shadow", PolicyState)

    def set_canary(self, name: str, share: float, params: Params = None) -> PolicyState:
        """Let a second policy decide for a share (0 to 1) of the affinity keys."""
        order = {"name": name, "share": share, "params": params or {}}
        return self._call("POST", "/policy/canary", PolicyState, order)

    def canary_off(self) -> PolicyState:
        """Give its keys back to the policy in force."""
        return self._call("DELETE", "/policy/canary", PolicyState)

    def where(self, key: str) -> builtins.list[dict[str, Any]]:
        """The ranks that the session of a routing key went to lately, at each instance."""
        return self._call("POST", "/path", builtins.list[dict[str, Any]], {"key": key})

    def hand_over(self, order: bytes) -> bytes:
        """Ask the sidecar to let a successor take over (`sidecar.takeover`); return its answer.

        Raises RefusedError if it serves on, and ControlError if there is no telling.
        """
        status, answer = self._exchange("POST", "/handover", order)
        if status == 200:
            return answer
        if status == 404:
            raise RefusedError(f"{self.path}: its version cannot hand over")
        raise RefusedError(_reason(answer) or f"{self.path}: HTTP status {status}")

    def _call(self, method: str, target: str, kind: type[T], order: Any = None) -> T:
        status, answer = self._exchange(method, target, _body(order))
        try:
            if status == 200:
                return msgspec.json.decode(answer, type=kind)
            error = msgspec.json.decode(answer, type=dict[str, str])["error"]
        except (msgspec.DecodeError, UnicodeError, RecursionError, KeyError):
            raise ControlError(
                f"{self.path}: HTTP status {status} without sense; no sidecar of this version?"
            ) from None
        if status in (400, 409):
            raise RefusedError(error)
        raise ControlError(f"{self.path}: HTTP status {status}: {error}")

    def _connection(self) -> http.client.HTTPConnection:
        if not self.path.startswith("http://"):
            return _OverUnix(self.path, self.timeout)
        # What stands before the host, and what is no port, is http.client's to refuse.
        return http.client.HTTPConnection(
            self.path.removeprefix("http://").rstrip("/"), timeout=self.timeout
        )

    def _exchange(self, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        """Status and body of the answer."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        over_tcp = self.path.startswith("http://")
        try:
            with contextlib.closing(self._connection()) as connection:
                connection.request(method, "/control" * over_tcp + target, body, headers)
                response = connection.getresponse()
                return response.status, response.read(_MAX_ANSWER_BYTES)
        except (FileNotFoundError, ConnectionRefusedError):
            raise ControlError(f"{self.path}: no sidecar listens there") from None
        except TimeoutError:
            late = "" if method == "GET" else "; it may still be done, `policy history` tells"
            raise ControlError(f"{self.path}: no answer within {self.timeout:g} s{late}") from None
        except http.client.HTTPException as error:
            raise ControlError(
                f"{self.path}: does not answer as a control socket does ({type(error).__name__})"
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ControlError(f"{self.path}: {reason}") from None


def _body(order: Any) -> bytes | None:
    """An order as JSON. Raises RefusedError if it is none or too long."""
    if order is None:
        return None
    name = order.get("name", "the order")
    try:
        body = json.dumps(order, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedError(f"policy.params of {name}: {error}") from None
    if len(body) > MAX_BODY_BYTES:
        raise RefusedError(
            f"policy.params of {name}: {len(body)} bytes as JSON, at most {MAX_BODY_BYTES} fit"
        )
    return body
