"""The control socket in one process: verbs, swaps under load, bad input."""

import asyncio
import http.client
import json
import math
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar import logs, verbs
from sidecar.admin import ControlSite
from sidecar.budget import Budget
from sidecar.control import Control
from sidecar.dispatcher import Dispatcher
from sidecar.errors import EndpointError, RefusedError
from sidecar.orders import MAX_BODY_BYTES, PolicyState
from sidecar.policies import REGISTRY, make_policy
from tests.processes import short_directory
from tests.support import INSTANCE, Server, control_site, in_flight, keyed, keyless

DEFAULTS = {"max_load_skew": 1.5, "min_load_gap": 4.0, "hash_tokens": 4096}


@pytest.fixture
def path() -> Iterator[str]:
    with short_directory() as directory:
        yield f"{directory}/q.control"


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(make_policy("prefix_affinity"), Budget(5.0, 4), 1)


Test = Callable[[ControlSite], Awaitable[None]]


def served(path: str, dispatcher: Dispatcher, test: Test) -> None:
    """Run `test` in the loop that serves the control socket."""

    async def main() -> None:
        site = control_site(dispatcher)
        await site.start(path)
        try:
            await test(site)
        finally:
            await site.stop()

    asyncio.run(main())


def answered(path: str, dispatcher: Dispatcher, call: Callable[[], Any]) -> Any:
    """What `call` returns in another thread while the socket is served."""
    answers: list[Any] = []

    async def test(site: ControlSite) -> None:
        answers.append(await asyncio.to_thread(call))

    served(path, dispatcher, test)
    return answers[0]


def raw(path: str, text: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to any bytes."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(text)
        response = http.client.HTTPResponse(client)
        response.begin()
        return response.status, dict(response.headers), response.read()


def post(
    body: bytes, length: int | None = None, method: str = "POST", to: str = "/policy"
) -> bytes:
    size = len(body) if length is None else length
    head = f"{method} {to} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {size}\r\n"
    return head.encode() + b"\r\n" + body


def test_show_and_set(
    path: str,
    dispatcher: Dispatcher,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An earlier test may have configured our logger, as the command does.
    monkeypatch.setattr(logs.logger, "propagate", True)
    caplog.set_level("INFO", logs.logger.name)
    client = Control(path)

    def call() -> list[PolicyState]:
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        first = client.show()
        second = client.set_policy(
            "prefix_affinity", {"min_load_gap": 8, "fallback": "round_robin"}
        )
        third = client.set_policy("round_robin")
        return [first, second, third, client.show()]

    first, second, third, last = answered(path, dispatcher, call)
    assert (first.name, first.version, first.policies) == ("prefix_affinity", 1, list(REGISTRY))
    assert first.params.items() >= DEFAULTS.items()
    assert second.version == 2
    assert second.params == first.params | {"min_load_gap": 8.0, "fallback": "round_robin"}
    assert (third.name, third.params, third.version) == ("round_robin", {}, 3)
    assert last == third
    assert dispatcher.policy.name == "round_robin"
    assert caplog.messages[1:] == ["policy set: prefix_affinity -> round_robin version 3 {}"]


def test_a_swap_under_load_loses_nothing(path: str, dispatcher: Dispatcher) -> None:
    server, client, keys = Server(), Control(path), [keyed(f"k{i}") for i in range(16)]
    asked, homes, versions = 0, set(), []

    async def test(site: ControlSite) -> None:
        nonlocal asked
        for number in range(40):
            before = dispatcher.policy_version
            gap = {"min_load_gap": float(number + 1), "max_load_skew": 1e6}
            swap = asyncio.create_task(asyncio.to_thread(client.set_policy, "prefix_affinity", gap))
            while True:
                done = swap.done()  # one more round after the swap, so that each version decides
                reply = server.ask(dispatcher, [*keys, keyless()], 1.0)
                asked += len(reply.ranks)
                homes.add(tuple(reply.ranks[: len(keys)]))
                versions.append(reply.policy_version)
                if done:
                    break
                await asyncio.sleep(0)
            assert (await swap).version == before + 1

    # A guard that spills nothing: a session that moves would be the swap's doing.
    dispatcher.swap_policy(make_policy("prefix_affinity", {"max_load_skew": 1e6}))
    served(path, dispatcher, test)
    tally = dispatcher.tallies[INSTANCE]
    assert sum(sum(counts.values()) for counts in tally.decisions.values()) == asked
    assert sum(in_flight(dispatcher.budget.instances[INSTANCE])) == asked == sum(server.sent)
    assert len(homes) == 1, "no session moved"
    assert versions == sorted(versions)
    assert set(versions) >= set(range(3, 43))


BAD_ORDERS = [
    ("best", {}, ["policy.name", "best", *REGISTRY]),
    ("", {}, ["name", "1"]),
    ("x" * 257, {}, ["name", "256"]),
    ("prefix_affinity", {"max_load_skew": 0.5}, ["max_load_skew", "1.0"]),
    ("prefix_affinity", {"hash_tokens": 1 << 21}, ["hash_tokens", "1048576"]),
    ("prefix_affinity", {"hash_tokens": 10**30}, ["hash_tokens"]),
    ("prefix_affinity", {"hash_tokens": "many"}, ["hash_tokens", "int"]),
    ("prefix_affinity", {"max_load_skew": None}, ["max_load_skew", "float"]),
    ("prefix_affinity", {"max_load_skew": math.nan}, ["prefix_affinity", "range"]),
    ("prefix_affinity", {"skew": 2}, ["skew"]),
    ("prefix_affinity", {"max_load_skew": {1}}, ["set"]),
    ("round_robin", {"hash_tokens": 1}, ["hash_tokens", "round_robin"]),
    ("prefix_affinity", {"fallback": "x" * MAX_BODY_BYTES}, [str(MAX_BODY_BYTES)]),
    ("prefix_affinity", {"fallback": "\ud800"}, []),
]


@pytest.mark.parametrize(("name", "params", "words"), BAD_ORDERS)
def test_a_bad_order_changes_nothing(
    path: str, dispatcher: Dispatcher, name: str, params: dict[str, Any], words: list[str]
) -> None:
    def call() -> str:
        with pytest.raises(RefusedError) as caught:
            Control(path).set_policy(name, params)
        return str(caught.value)

    error = answered(path, dispatcher, call)
    assert not [word for word in words if word not in error], error
    assert len(error) < 600
    assert dispatcher.policy_version == 1


BAD_REQUESTS = {
    "empty": (post(b""), 400, "body"),
    "no JSON": (post(b"{"), 400, "body"),
    "utf8": (post(b'{"name": "\xff"}'), 400, "body"),
    "no object": (post(b"[1]"), 400, "object"),
    "no name": (post(b"{}"), 400, "name"),
    "a wrong name": (post(b'{"name": 5}'), 400, "str"),
    "wrong params": (post(b'{"name": "round_robin", "params": [1]}'), 400, "params"),
    "an unknown field": (post(b'{"name": "round_robin", "parms": {}}'), 400, "parms"),
    "a long field": (post(b'{"' + b"x" * 60_000 + b'": 1}'), 400, "x"),
    "deep": (post(b'{"name": "a", "params": ' + b"[" * 60_000), 400, "body"),
    "nan": (post(b'{"name": "prefix_affinity", "params": {"max_load_skew": NaN}}'), 400, "body"),
    "oversized": (post(b" " * (MAX_BODY_BYTES + 1)), 413, str(MAX_BODY_BYTES)),
    "method": (post(b"", method="DELETE"), 405, "Not Allowed"),
    "path": (post(b'{"name": "round_robin"}', to="/policies"), 404, "Not Found"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_refused(path: str, dispatcher: Dispatcher, case: str) -> None:
    text, expected, word = BAD_REQUESTS[case]
    status, headers, body = answered(path, dispatcher, lambda: raw(path, text))
    assert status == expected
    assert headers["Content-Type"].startswith("application/json")
    assert word in json.loads(body)["error"]
    assert len(body) < 2000
    assert dispatcher.policy_version == 1
    assert case != "method" or headers["Allow"] == "GET,POST"


def test_a_body_that_does_not_come(
    path: str, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "BODY_SECONDS", 0.01)
    text = post(b'{"name": "round_robin"', length=100)
    status, _, body = answered(path, dispatcher, lambda: raw(path, text))
    assert (status, dispatcher.policy_version) == (408, 1)
    assert "0.01 s" in json.loads(body)["error"]


def test_a_client_that_leaves(
    path: str, dispatcher: Dispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    def call() -> str:
        for size in (10, 60, len(post(b"")) + 10):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                client.sendall(post(b'{"name": "round_robin"}', length=50)[:size])
        return Control(path).show().name

    assert answered(path, dispatcher, call) == "prefix_affinity"
    assert not [record for record in caplog.records if record.exc_info]


def test_start_fails_and_stop_is_safe(path: str, dispatcher: Dispatcher) -> None:
    async def main() -> None:
        site = control_site(dispatcher)
        await site.stop()
        for wrong in ("relative", "/a\0b", "/tmp/" + "x" * 200, "/proc/none/x"):
            with pytest.raises(EndpointError):
                await site.start(wrong)
        await site.start(path)
        with pytest.raises(EndpointError, match="held by another sidecar"):
            await control_site(dispatcher).start(path)
        await site.stop()
        await site.stop()
        assert not Path(path).exists()

    asyncio.run(main())
