"""What a sidecar sends to the hook: bytes and answers, right, late, wrong, extreme."""

import contextlib
from array import array
from collections.abc import Iterator
from typing import Any

import zmq

from sglang_hook import memory
from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser, Dispatch
from sglang_hook.memory import HASHES_AN_ENTRY, PART_ENTRIES
from sidecar import hashing, wire
from tests.fuzz import messages
from tests.fuzz.source import Source, bent
from tests.fuzz.world import hold

CAUSES = {"deadline", "unreachable", "handshake", "breaker_open"}
ANSWERED = {"version", "malformed", "refused", "mismatched"}
STEPS = 32
KEPT = 8
"""Keys, and conversations, that a hook here remembers."""
MAX_END = 1 << 62
"""No prompt is longer: what a schedule of blocks says beyond it is of no use, and takes memory."""
MAX_HASHES = 200
"""Block hashes that a hook here remembers."""
TOKENS = (
    None,
    array("q", range(40)),
    list(range(9)),
    [0] * 200,
    array("q", [7] * 70),
    array("i", [-1, 5]),
)


@contextlib.contextmanager
def small_history() -> Iterator[None]:
    """Let a hook remember few block hashes, so that forgetting them happens."""
    before, memory.HISTORY_HASHES = memory.HISTORY_HASHES, MAX_HASHES
    try:
        yield
    finally:
        memory.HISTORY_HASHES = before


class Late:
    """A socket on which one message waits, or none."""

    def __init__(self, data: bytes | None) -> None:
        self.data = data

    def recv(self, flags: int) -> bytes:
        """What waits there."""
        if self.data is None:
            raise zmq.Again()
        return self.data


class Hook:
    """A chooser and its client, without a socket between them and the input."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.now = 100.0
        self.live = [0, 1, 2, 3]
        self.asked = 0
        self.chooser = Chooser("i", 1, {"hook": "1"}, lambda: self.live, KEPT, lambda: self.now)
        self.chooser.history.capacity = KEPT
        self.client = SidecarClient(
            "ipc:///nowhere", 5, 1, 0.05, self.chooser.probe, lambda: self.now
        )
        self.client.heard = self.chooser.heard
        self.chooser.meter = self.client.meter
        self.chooser.ask = self.ask

    def ask(self, payload: bytes, seq: int) -> wire.Reply | str:
        """Somebody answers, or nobody does."""
        source = self.source
        query = wire.decode_query(payload)  # what we send is always valid
        hold(query.seq == seq, "another number than the query's")
        hold(len(query.history) <= PART_ENTRIES, "too much of the past in one query")
        told = sum(len(past.facts.block_hashes) for past in query.history[1:])
        hold(told <= PART_ENTRIES * HASHES_AN_ENTRY, "too many hashes of the past in one query")
        if source.flag(8):
            return self.client._missed() if source.flag() else source.one_of(sorted(CAUSES))
        answer = messages.reply(source, seq, len(query.requests), query.ranks)
        found = self.client._read(bent(encoded(answer), source), seq)
        hold(isinstance(found, wire.Reply) or found in ANSWERED, f"no such cause: {found}")
        return found

    def step(self) -> None:
        """One thing happens."""
        source, what = self.source, self.source.below(8)
        if what == 0:
            self.live = source.one_of(([0, 1, 2, 3], [1], [], [0, 5, 900], [2, 3]))
        elif what == 1:
            self.now += source.one_of((0.0, 0.001, 0.06, 1.0, 6.0, 1e6))
        elif what == 2:
            late = encoded(messages.reply(source, source.below(9), source.below(3), self.live))
            self.client._listen(Late(bent(late, source) if source.flag(8) else late))  # type: ignore[arg-type]
        elif what == 3:
            wire.decode_query(self.chooser.probe())
        elif what == 4:
            self.chooser.remember(dispatch_of(source), source.below(4))
        else:
            self.choose([dispatch_of(source) for _ in range(1 if what < 7 else source.below(4))])
        self.check()

    def choose(self, dispatches: list[Dispatch]) -> None:
        """Requests come: each gets a live rank or None, and each is counted once."""
        before = self.chooser.bypassed.total()
        if len(dispatches) == 1:
            ranks = [self.chooser.choose_one(dispatches[0])]
        else:
            ranks = self.chooser.choose(dispatches)
        hold(len(ranks) == len(dispatches), "not one answer for each request")
        for dispatch, rank in zip(dispatches, ranks, strict=True):
            hold(rank is None or rank in self.live, f"rank {rank} is not live")
            if rank is not None:
                self.chooser.sent.count(rank, len(dispatch.tokens or ()))
        counted = self.chooser.bypassed.total() - before
        hold(0 <= counted <= len(dispatches), "requests counted twice")
        hold(counted or None not in ranks, "a request that nobody decided and nobody counted")

    def check(self) -> None:
        """Nothing has grown beyond its bound."""
        chooser, want = self.chooser, self.chooser.want
        hold(len(chooser.last_ranks) <= KEPT, "too many keys remembered")
        hold(len(chooser.history) <= KEPT, "too many conversations remembered")
        hold(len(chooser.history._untold) <= KEPT, "too much to be told")
        kept = [len(entry.blocks or ()) for entry in chooser.history._table.values()]
        hold(sum(kept) == chooser.history.hashes <= MAX_HASHES, "too many hashes remembered")
        ends = hashing.block_ends(want.block_tokens, want.max_blocks, want.block_growth)
        hold(len(ends) <= want.max_blocks, "more blocks than are wanted")
        hold(not ends or ends[-1] <= MAX_END, "a schedule that ends beyond any prompt")


def encoded(answer: Any) -> bytes:
    """An answer as bytes; what msgpack cannot hold is none."""
    try:
        return wire.encode(answer)
    except (OverflowError, UnicodeEncodeError):
        return b"\xc0"


def dispatch_of(source: Source) -> Dispatch:
    """A request of SGLang's."""
    key = (
        source.one_of((None, "", " ", "k1", "k2", "\ud800", "x" * 2000)) if source.flag() else None
    )
    parts = (None, source.text(4) if source.flag(8) else None, None)
    session = source.one_of((None, "s", "\udfff")) if source.flag(8) else None
    return Dispatch(key, source.one_of(TOKENS), parts, session)


def chooser(data: bytes) -> None:
    """One life of a hook's controller side."""
    source = Source(data)
    hook = Hook(source)
    with small_history():
        for _ in range(STEPS):
            if not source.left:
                break
            hook.step()


def answer(data: bytes) -> None:
    """Bytes as the answer to the first query, and as one that comes late."""
    hook = Hook(Source(b""))
    client = hook.client
    hook.chooser.ask = lambda payload, seq: client._read(data, seq)
    for key in ("k1", None):
        hook.choose([Dispatch(key, TOKENS[1], (None, None, None))])
    client._listen(Late(data))  # type: ignore[arg-type]
    hook.choose([Dispatch("k2", TOKENS[3], ("salt",))])
    hook.check()
