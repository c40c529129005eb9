"""The server under test and its sidecar: what they are, and whether they belong together."""

import contextlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sidecar import config
from sidecar.listener import control_path
from sidecar.orders import PolicyState

ATTEMPTS = 10
"""Requests in which a hook must have asked: it tries a silent sidecar every 5 s at most."""


class TargetError(RuntimeError):
    """The target cannot be measured; the message is for the person who named it."""


class PolicyControl(Protocol):
    """What is needed of `sidecar.control.Control`."""

    def show(self) -> PolicyState: ...

    def set_policy(self, name: str, params: dict[str, Any] | None = None) -> PolicyState: ...


class Facts(msgspec.Struct):
    """What a server tells of itself; None: it does not."""

    url: str
    model: str
    simulated: bool = False
    time_scale: float = 1.0
    """Real seconds for a second of a simulated server; 1 for any other."""
    journal: str = ""
    """File of a simulated server that tells the rank of each request."""
    cache_report: bool = False
    """Whether answers tell cached tokens."""
    max_prompt: int | None = None
    vocabulary: int | None = None
    about: dict[str, Any] = {}
    """For the report: version, load balance method and the like."""


def fetch(url: str, method: str = "GET", body: bytes | None = None, timeout: float = 10.0) -> bytes:
    """Body of a successful answer. Raises TargetError; HTTPError is one of its causes."""
    headers = {"Content-Type": "application/json"} if body else {}
    try:
        request = urllib.request.Request(url, body, headers, method=method)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(200).decode(errors="replace").strip()
        raise TargetError(f"{method} {url}: HTTP {error.code} {text}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TargetError(f"{method} {url}: {getattr(error, 'reason', None) or error}") from error


def _json(url: str) -> Any:
    content = fetch(url)
    try:
        return json.loads(content)
    except ValueError:
        raise TargetError(f"GET {url}: not JSON; is this an SGLang server?") from None


def inspect(url: str, vocabulary: int | None = None) -> Facts:
    """What the server at `url` is. Raises TargetError if it does not serve."""
    fetch(f"{url}/health")
    models = _json(f"{url}/v1/models")
    try:
        model = str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise TargetError(f"GET {url}/v1/models: names no model") from None
    info = server_info(url)
    states = internal_states(info)
    simulated = bool(states and states[0].get("simulated"))
    settings = states[0].get("settings") or {} if simulated else {}
    try:
        told = msgspec.convert(settings, _Simulated)
    except msgspec.ValidationError as error:
        raise TargetError(f"{url}: settings of a simulated server: {error}") from None
    return Facts(
        url=url,
        model=model,
        simulated=simulated,
        # A simulated server of scale 0 does not sleep: its seconds are real ones.
        time_scale=told.time_scale or 1.0,
        journal=told.journal,
        cache_report=bool(info.get("enable_cache_report")),
        max_prompt=info.get("max_req_input_len"),
        vocabulary=vocabulary or _vocabulary(info.get("model_path")),
        about=_about(info, settings if simulated else None),
    )


class _Simulated(msgspec.Struct):
    time_scale: float = 1.0
    journal: str = ""


def find_control(endpoint: str, control: str) -> str:
    """Path of the control socket: as given, else by environment, else where a sidecar has it.

    Raises TargetError where the endpoint has none, ConfigError for a bad variable.
    """
    flags = {
        name: value for name, value in (("--endpoint", endpoint), ("--control", control)) if value
    }
    serve = config.load(None, os.environ, flags).serve
    path = control_path(serve.endpoint, serve.control)
    if not path:
        raise TargetError(f"a sidecar at {serve.endpoint} has a control socket only with --control")
    return path


def internal_states(info: dict[str, Any]) -> list[dict[str, Any]]:
    """What each scheduler tells of itself; whatever is no record is left out."""
    states = info.get("internal_states")
    return [each for each in states if isinstance(each, dict)] if isinstance(states, list) else []


def server_info(url: str) -> dict[str, Any]:
    """What SGLang tells of itself; empty if it does not."""
    for path in ("/server_info", "/get_server_info"):
        with contextlib.suppress(TargetError):
            info = _json(url + path)
            if isinstance(info, dict):
                return info
    return {}


_TOLD = (
    *("version", "model_path", "dp_size", "tp_size", "enable_dp_attention", "page_size"),
    *("load_balance_method", "chunked_prefill_size", "schedule_policy", "launch_command"),
)


def _about(info: dict[str, Any], settings: dict[str, Any] | None) -> dict[str, Any]:
    told = {name: info[name] for name in _TOLD if name in info}
    return told if settings is None else {**told, "simulated_settings": settings}


def _vocabulary(model_path: Any) -> int | None:
    """Of a model that lies on this machine; never probed: a bad id can crash a GPU server."""
    try:
        config = json.loads((Path(str(model_path)) / "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        return int(size) if size else None
    except (OSError, ValueError, AttributeError):
        return None


def flush(url: str, seconds: float = 60.0, pause: float = 0.5) -> None:
    """Empty the prefix cache; a server that still works on a request is asked again.

    Raises TargetError.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            fetch(f"{url}/flush_cache", "POST", timeout=seconds)
            return
        except TargetError as error:
            busy = getattr(error.__cause__, "code", None) == 400
            if not busy or time.monotonic() >= end:
                raise TargetError(f"the cache cannot be flushed: {error}") from None
        time.sleep(pause)


class Sidecar:
    """A sidecar's loopback HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url

    def status(self) -> dict[str, Any]:
        """Raises TargetError."""
        status = _json(f"{self.url}/status")
        if not isinstance(status, dict) or "instances" not in status:
            raise TargetError(f"{self.url}/status: not a sidecar")
        return status

    def metrics(self) -> str:
        """Raises TargetError."""
        return fetch(f"{self.url}/metrics").decode(errors="replace")

    def decided(self) -> dict[str, int]:
        """Instance -> requests decided so far."""
        return {
            each["instance"]: sum(sum(counts.values()) for counts in each["decisions"].values())
            for each in self.status()["instances"]
        }

    def ranks(self, instance: str) -> int:
        """Live DP ranks of an instance. Raises TargetError."""
        for each in self.status()["instances"]:
            if each["instance"] == instance:
                return sum(bool(rank["live"]) for rank in each["ranks"])
        raise TargetError(f"the sidecar no longer knows the instance {instance}")


def find_instance(
    facts: Facts, sidecar: Sidecar, control: PolicyControl, pause: float = 0.6
) -> str:
    """The name under which the target asks this sidecar. Raises TargetError, ControlError."""
    version, told = control.show().version, sidecar.status()["policy_version"]
    if version != told:
        raise TargetError(
            f"the control socket and {sidecar.url} belong to different sidecars: "
            f"policy version {version} there, {told} here"
        )
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(pause)
        before = sidecar.decided()
        _one_token(facts)
        risen = [name for name, n in sidecar.decided().items() if n > before.get(name, 0)]
        if len(risen) > 1:
            raise TargetError(
                f"the sidecar also serves {', '.join(risen)}: measure while nobody else is served"
            )
        if risen:
            return risen[0]
    raise TargetError(f"the target does not ask this sidecar: {_why_not(sidecar)}")


def _one_token(facts: Facts) -> None:
    body = {"model": facts.model, "prompt": [100, 101, 102], "max_tokens": 1, "ignore_eos": True}
    fetch(f"{facts.url}/v1/completions", "POST", json.dumps(body).encode(), timeout=120)


def _why_not(sidecar: Sidecar) -> str:
    known = [each["instance"] for each in sidecar.status()["instances"]]
    whom = f"it knows {', '.join(known)} only" if known else "nobody has asked it"
    return (
        f"{ATTEMPTS} requests raised none of its decisions ({whom}); start SGLang with "
        "DP_SIDECAR_ENDPOINT set to its endpoint, and look for dp_sidecar in SGLang's log"
    )
