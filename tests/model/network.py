"""What lies between hook and sidecar in the model: it holds messages until a rule moves them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import zmq

from sidecar import wire

FATES = (
    *("answered", "answered", "answered", "answered"),
    *("query held", "query lost", "reply held", "reply lost", "garbled", "old answer"),
    *("another's answer", "wrong rank"),
)
"""What happens to a query that is waited for, and to its answer; in time only if answered."""
DEADLINE = 0.005


class Query(NamedTuple):
    """A query under way, or its answer. number: the id in the envelope of the REQ socket."""

    number: int
    socket: "ReqSocket"
    payload: bytes


def misled(answer: bytes) -> bytes:
    """An answer whose last rank does not exist."""
    reply = wire.decode_answer(answer)
    if isinstance(reply, wire.Reply) and reply.ranks:
        reply.ranks[-1] = 99
    return wire.encode(reply)


class Network:
    """Messages under way, oldest first. answer: what the sidecar does with a query."""

    def __init__(self, answer: Callable[[bytes], bytes], wait: Callable[[float], None]) -> None:
        self.answer = answer
        self.wait = wait
        self.queries: list[Query] = []
        self.replies: list[Query] = []
        self.reports: list[bytes] = []
        self.numbers = 0
        self.reachable = True

    def serve(self, query: Query) -> Query:
        """Let the sidecar answer; the answer is under way then."""
        data = self.answer(query.payload)
        query.socket.answers.append(data)
        reply = query._replace(payload=data)
        self.replies.append(reply)
        return reply

    def deliver(self, reply: Query) -> None:
        """Bring an answer to the socket that asked; it takes only one to its last question."""
        socket = reply.socket
        if reply.number == socket.asked and not socket.answered:
            socket.inbox, socket.answered = reply.payload, True


class ReqSocket:
    """A REQ socket with REQ_RELAXED and REQ_CORRELATE, without ZeroMQ."""

    def __init__(self, network: Network, look: Callable[[bytes], None]) -> None:
        self.network = network
        self.look = look
        """Shown every query that goes out."""
        self.fate = "answered"
        self.asked = -1
        self.answered = True
        self.inbox: bytes | None = None
        self.answers: list[bytes] = []
        """Every answer made to it: what a stray one may be."""
        self.taken: bytes | None = None
        """What the last wait for an answer gave; None: nothing."""

    def send(self, payload: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK, "sending may not wait"
        if not self.network.reachable:
            raise zmq.Again
        self.look(payload)
        self.network.numbers += 1
        self.asked, self.answered, self.inbox = self.network.numbers, False, None
        self.network.queries.append(Query(self.asked, self, payload))

    def recv(self, flags: int = 0) -> bytes:
        """Without NOBLOCK it waits for the answer until the deadline."""
        if not flags:
            self.wait()
            self.taken = self.inbox
        data, self.inbox = self.inbox, None
        if data is None:
            raise zmq.Again
        return data

    def get(self, option: int) -> int:
        assert option == zmq.EVENTS
        came = zmq.POLLIN if self.inbox is not None else 0
        return int(came | (zmq.POLLOUT if self.network.reachable else 0))

    def poll(self, timeout: int, flags: int) -> int:
        if flags == zmq.POLLOUT:
            return int(self.network.reachable)
        self.wait()
        return int(self.inbox is not None)

    def wait(self) -> None:
        """What happens until the deadline."""
        network, fate = self.network, self.fate
        query = next((one for one in network.queries if one.number == self.asked), None)
        if query is None:  # given up already
            return
        if fate != "query held":
            network.queries.remove(query)
        if fate not in ("query held", "query lost"):
            reply = network.serve(query)
            if fate != "reply held":
                network.replies.remove(reply)
            if fate == "garbled":
                reply = reply._replace(payload=reply.payload[:-2])
            if fate in ("old answer", "another's answer"):
                stray = 0 if fate == "old answer" else len(self.answers) // 2
                reply = reply._replace(payload=self.answers[stray])
            if fate == "wrong rank":
                reply = reply._replace(payload=misled(reply.payload))
            if not fate.startswith("reply"):
                network.deliver(reply)
        if self.inbox is None:
            network.wait(DEADLINE)


class PushSocket:
    """A PUSH socket for load reports. broken: nobody takes them."""

    def __init__(self, reports: list[bytes]) -> None:
        self.reports = reports
        self.broken = False

    def send(self, payload: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if self.broken:
            raise zmq.Again
        self.reports.append(payload)


class Peer:
    """Stands for `sglang_hook.peer.Peer`: one socket, which a failure after use replaces."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self.may_break = False

    def socket(self) -> Any:
        return self.made

    def reachable(self) -> bool:
        return not self.made.broken

    def worked(self) -> None:
        """Nothing depends on it here."""

    def refused(self) -> bool:
        return False

    def failed(self, error: zmq.ZMQError) -> None:
        if self.may_break:  # another identity: no late answer finds it
            self.made.asked, self.made.inbox, self.may_break = -1, None, False
