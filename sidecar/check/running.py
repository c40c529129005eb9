"""What a running sidecar says, and who has its HTTP port."""

import http.client
import os
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from sidecar import __version__
from sidecar.check.finding import Finding, note, ok, problem, warning
from sidecar.config import Config
from sidecar.control import Control
from sidecar.errors import ControlError
from sidecar.listener import control_path
from sidecar.takeover import listening

TRIES = 5
# What the hook waits for an answer unless told otherwise, milliseconds.
DEADLINE_MS = 5.0
_TIMEOUT = 2.0
_MAX_STATUS_BYTES = 16 << 20
UPGRADE = "upgrade it without a gap: kill -USR2 {}"


def findings(config: Config, holder: int) -> Iterator[Finding]:
    """What depends on whether a sidecar runs. holder: its process id; 0: none, -1: not known."""
    tcp = config.serve.endpoint.startswith("tcp://")
    runs = bool(holder) or (tcp and listening(config.serve.endpoint))
    if runs:
        path = control_path(config.serve.endpoint, config.serve.control)
        if path:
            yield from _control(path)
    if config.admin.port:
        yield from _port(config, holder, runs=runs)


def _control(path: str) -> Iterator[Finding]:
    """Whether it answers, and how fast."""
    times = []
    try:
        for _ in range(TRIES):
            begun = time.monotonic()
            Control(path, timeout=_TIMEOUT).show()
            times.append((time.monotonic() - begun) * 1000)
    except ControlError as error:
        yield problem(f"control: {error}", "see its log; if it hangs: kill -9, SGLang serves on")
        return
    best = min(times)
    deadline = _deadline()
    if best > deadline:
        yield warning(
            f"control: answers in {best:.1f} ms at best; the hook waits {deadline:g} ms",
            "give it a CPU of its own, see CPUWeight in deploy/systemd",
        )
    else:
        yield ok(f"control: answers in {best:.1f} ms")


def _deadline() -> float:
    try:
        return float(os.environ.get("DP_SIDECAR_DEADLINE_MS", DEADLINE_MS))
    except ValueError:
        return DEADLINE_MS  # a finding of its own


def _port(config: Config, holder: int, *, runs: bool) -> Iterator[Finding]:
    """Who answers at the address of the HTTP side."""
    host, port = config.admin.host, config.admin.port
    where = f"{host}:{port}"
    local = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    status = _status(local, port)
    if status is None:
        if runs:
            yield warning(f"{where}: the running sidecar has no HTTP there", "see its log")
        else:
            yield ok(f"{where}: free for HTTP")
    elif "instances" not in status:
        yield problem(
            f"{where}: another program has the port; dispatch would serve without HTTP",
            "choose another --admin-port",
        )
    elif not runs or (holder > 0 and status.get("pid", holder) != holder):
        yield problem(
            f"{where}: the sidecar that answers there serves another endpoint",
            "give each sidecar its own --admin-port",
        )
    else:
        yield ok(f"{where}: HTTP of the running sidecar")
        yield from _state(status, holder)


def _status(host: str, port: int) -> dict[str, Any] | None:
    """/status there; None: nobody listens; {}: somebody else does."""
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
    try:
        connection.connect()
    except (OSError, UnicodeError):
        return None
    try:
        connection.request("GET", "/status")
        answer = connection.getresponse().read(_MAX_STATUS_BYTES)
        return msgspec.json.decode(answer, type=dict[str, Any])
    except (OSError, http.client.HTTPException, msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    finally:
        connection.close()


def _state(status: dict[str, Any], holder: int) -> Iterator[Finding]:
    """Versions, and who is connected."""
    version = status.get("version")
    if version != __version__:
        yield warning(
            f"the running sidecar is version {version}, installed is {__version__}",
            UPGRADE.format(holder if holder > 0 else "PID"),
        )
    instances = status["instances"] if isinstance(status["instances"], list) else []
    told = [instance for instance in instances if isinstance(instance, dict)]
    if not told:
        yield note(
            "no SGLang has asked yet",
            "once it runs: DP_SIDECAR_ENDPOINT in its environment, same user; grep dp_sidecar in "
            "its log",
        )
    for instance in told:
        about = instance.get("about")
        hook = about.get("hook", "unknown") if isinstance(about, dict) else "unknown"
        name = f"instance {instance.get('instance')}: hook {hook}"
        if hook in (version, "unknown"):
            yield ok(name)
        else:
            yield warning(
                f"{name}, sidecar {version}",
                "both work if their protocol is the same; install one version in both places",
            )
