"""Published loads over real PUB sockets: reconnecting, hostile publishers, a loop that lives on."""

import asyncio
import socket as sockets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from sidecar import metrics
from sidecar.complaints import Complaints
from sidecar.config import Config
from sidecar.dispatcher import Dispatcher
from sidecar.errors import EndpointError
from sidecar.feed import Feed
from sidecar.loads import RankState
from sidecar.logs import RateLimit
from sidecar.metrics import Health
from sidecar.published import subscriber
from sidecar.published.settings import PublishedConfig, Publisher
from sidecar.published.stat import MAX_STAT_BYTES
from sidecar.published.subscriber import AT_ONCE, Subscriber
from tests.processes import free_port, short_directory
from tests.support import INSTANCE, keyless, make_dispatcher, query
from tests.test_metrics import samples

SECONDS = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_directory() as path:
        yield path


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


@contextmanager
def publishing(endpoint: str) -> Iterator["zmq.Socket[bytes]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.linger = 0
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.bind(endpoint)
        yield socket
    finally:
        context.destroy(linger=0)


def stat(rank: int, running: int) -> bytes:
    return msgspec.msgpack.encode(["LoadStat", running, 0, 0, 0, rank])


class Fed:
    """A dispatcher whose loads SGLang publishes."""

    def __init__(self, endpoints: str) -> None:
        self.dispatcher: Dispatcher = make_dispatcher()
        self.health = Health()
        config = Config(published=PublishedConfig({INSTANCE: endpoints}))
        complaints = Complaints(self.health, RateLimit())
        self.feed = Feed(config, self.dispatcher, self.dispatcher.report, complaints)
        self.dispatcher.handle(query(ranks=range(2)), 0.0)

    def state(self, rank: int) -> RankState | None:
        return self.dispatcher.budget.instances[INSTANCE].states.get(rank)

    def running(self, rank: int) -> int:
        state = self.state(rank)
        return state.report.running if state is not None and state.report is not None else -1

    async def told(self, socket: "zmq.Socket[bytes]", rank: int, running: int) -> None:
        """Publish until it has come: what is published before the connection stands is lost."""
        seq = 0

        def come() -> bool:
            nonlocal seq
            socket.send_multipart([b"load", seq.to_bytes(8, "big"), stat(rank, running)])
            seq += 1
            return self.running(rank) == running

        await until(come)


@asynccontextmanager
async def fed(endpoints: str) -> AsyncIterator[Fed]:
    loop, one = asyncio.get_running_loop(), Fed(endpoints)
    one.feed.start(loop)
    try:
        yield one
    finally:
        one.feed.stop(loop)
        one.feed.stop(loop)


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize("kind", ["ipc", "tcp", "tcp6"])
def test_each_rank_is_read_where_it_publishes(folder: Path, kind: str) -> None:
    if kind == "ipc":
        places = [f"ipc://{folder}/a", f"ipc://{folder}/b"]
    else:
        host = "127.0.0.1" if kind == "tcp" else "[::1]"
        if kind == "tcp6" and not ipv6():
            pytest.skip("no IPv6 on loopback")
        places = [f"tcp://{host}:{free_port()}" for _ in range(2)]

    async def test() -> None:
        async with fed(",".join(places)) as one:
            for rank, place in enumerate(places):
                with publishing(place) as socket:
                    await one.told(socket, rank, 7 + rank)
            assert [one.running(rank) for rank in (0, 1)] == [7, 8]

    run(test)


def ipv6() -> bool:
    try:
        with sockets.create_server(("::1", 0), family=sockets.AF_INET6):
            return True
    except OSError:
        return False


def test_a_publisher_may_come_later_go_and_come_back(folder: Path) -> None:
    place = f"ipc://{folder}/a"

    async def test() -> None:
        async with fed(place) as one:
            for running in (3, 4, 5):
                with publishing(place) as socket:
                    await one.told(socket, 0, running)

    run(test)


def hostile() -> Iterator[tuple[str, list[bytes]]]:
    """What a sound stat is not."""
    sound = [b"load", bytes(8), stat(0, 99)]
    yield "one frame", [b"load"]
    yield "no sequence", [b"load", stat(0, 99)]
    yield "four frames", [*sound, b""]
    yield "many frames", [*sound, *[b"x"] * 5000]
    yield "another topic", [b"loads", *sound[1:]]
    yield "garbage", [b"load", bytes(8), b"\xc1\xff" * 100]
    yield "another rank", [b"load", bytes(8), stat(1, 99)]
    yield "negative", [b"load", bytes(8), stat(0, -99)]
    yield "pickle", [b"load", bytes(8), b"\x80\x04\x95\x00."]


def test_hostile_messages_are_counted_and_the_next_sound_one_is_read(folder: Path) -> None:
    place = f"ipc://{folder}/a"

    async def test() -> None:
        async with fed(place) as one:
            with publishing(place) as socket:
                await one.told(socket, 0, 1)
                for turn, (what, frames) in enumerate(hostile()):
                    before = one.health.published[INSTANCE, "refused"]
                    socket.send_multipart(frames)
                    wait = lambda n=before: one.health.published[INSTANCE, "refused"] > n  # noqa: E731
                    await until(wait)
                    assert one.running(0) != 99, what
                    await one.told(socket, 0, 10 + turn)
        refused = {cause for socket, cause in one.health.rejected if socket == "published"}
        assert refused == {"frames", "malformed", "field", "rank"}

    run(test)


def test_what_is_too_large_or_no_zmq_costs_the_connection_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"ipc://{folder}/a"
    monkeypatch.setattr(subscriber, "RENEW_SECONDS", 0.2)

    async def test() -> None:
        async with fed(place) as one:
            with publishing(place) as socket:
                await one.told(socket, 0, 1)
                lost = socket.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
                socket.send_multipart([b"load", bytes(8), bytes(MAX_STAT_BYTES + 1)])
                await until(lambda: lost.poll(0))
                socket.disable_monitor()
                await one.told(socket, 0, 2)
            with sockets.socket(sockets.AF_UNIX) as raw:
                (folder / "a").unlink(missing_ok=True)
                raw.bind(f"{folder}/a")
                raw.listen()
                raw.setblocking(False)
                loop = asyncio.get_running_loop()
                peer, _ = await asyncio.wait_for(loop.sock_accept(raw), SECONDS)
                with peer:
                    await loop.sock_sendall(peer, b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20)
            (folder / "a").unlink()
            with publishing(place) as socket:
                await one.told(socket, 0, 3)

    run(test)


def test_of_a_flood_the_newest_counts_and_the_loop_is_not_held(folder: Path) -> None:
    place = f"ipc://{folder}/a"

    async def test() -> None:
        async with fed(place) as one:
            with publishing(place) as socket:
                await one.told(socket, 0, 1)
                for number in range(5000):
                    socket.send_multipart([b"load", number.to_bytes(8, "big"), stat(0, 1000)])
                await one.told(socket, 0, 2)
            outcomes = one.health.published
            assert outcomes[INSTANCE, "superseded"] > 0
            assert outcomes[INSTANCE, "refused"] == 0

    run(test)


def test_one_turn_of_the_loop_reads_a_bounded_number(folder: Path) -> None:
    place, taken = f"ipc://{folder}/a", []

    async def test() -> None:
        publisher = Publisher(INSTANCE, 0, place)
        subscriber = Subscriber([publisher], lambda *told: taken.append(told))
        loop = asyncio.get_running_loop()
        with publishing(place) as socket:
            subscriber.start(loop)
            try:

                def connected() -> bool:
                    socket.send_multipart([b"load", bytes(8), b"first"])
                    return bool(taken)

                await until(connected)
                for number in range(3 * AT_ONCE):
                    socket.send_multipart([b"load", bytes(8), str(number).encode()])
                last = str(3 * AT_ONCE - 1).encode()
                await until(lambda: taken[-1][1][2] == last)
            finally:
                subscriber.stop(loop)
        assert all(superseded < AT_ONCE for _, _, superseded in taken)

    run(test)


def test_an_address_that_cannot_be_leaves_dispatch_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        bad = Publisher(INSTANCE, 0, "tcp://not a host:1")
        with pytest.raises(EndpointError):
            Subscriber([bad], lambda *_: None).start(loop)
        one = Fed("tcp://127.0.0.1:1")
        one.feed._subscriber = Subscriber([bad], lambda *_: None)
        one.feed.start(loop)
        one.feed.stop(loop)
        assert one.dispatcher.handle(query([keyless()]), 1.0).ranks

    run(test)
    assert "dispatch serves" in caplog.text


def test_metrics_and_status_say_which_source_each_rank_has(folder: Path) -> None:
    place = f"ipc://{folder}/a"

    async def test() -> Fed:
        async with fed(place) as one:
            with publishing(place) as socket:
                await one.told(socket, 0, 1)
            return one

    one = asyncio.run(test())
    families = metrics.collect(one.dispatcher, one.health, 1.0)
    series = samples(b"".join(family.exposition() for family in families).decode())
    assert series["load_source"] == {(INSTANCE, "0", "published"): 1}
    assert series["published_loads_total"][INSTANCE, "taken"] >= 1
    assert set(series["published_loads_total"]) == {
        (INSTANCE, outcome) for outcome in ("taken", "superseded", "hook", "refused")
    }
    for unknown in ("scheduler_start_time_seconds", "cached_prompt_tokens_total"):
        assert not series.get(unknown)
    said = metrics.status(one.dispatcher, one.health, 1.0)
    assert said["load_source"] == "published"
    (instance,) = said["instances"]  # type: ignore[misc]
    assert [rank["source"] for rank in instance["ranks"]] == ["published", None]
