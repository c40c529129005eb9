"""kv_affinity on the real server: prompts without a key keep their rank, through restarts too."""

import signal
from collections.abc import Iterator

import pytest
import requests

from .conftest import RANKS, Live, eventually

LONG = "the of and to " * 100
CHATS = 3 * RANKS


class Chats:
    """Conversations without a key, each a turn longer every time."""

    def __init__(self, live: Live, name: str, begin: str = LONG) -> None:
        self.live = live
        self.texts = [f"{name} {'a ' * (5 * n + 1)}{begin}" for n in range(CHATS)]

    def turn(self) -> list[int]:
        """The rank of each."""
        self.texts = [text + LONG for text in self.texts]
        return [self.live.rank_of(self.live.chat(None, text)) for text in self.texts]


@pytest.fixture
def kv(live: Live) -> Iterator[Live]:
    """The same server, its sidecar started anew with kv_affinity; afterwards as before."""
    restart(live, "kv_affinity")
    yield live
    restart(live, "prefix_affinity")


def restart(live: Live, policy: str) -> None:
    live.sidecar.process.send_signal(signal.SIGTERM)
    live.sidecar.process.wait()
    live.sidecar.policy = policy
    live.sidecar.start()
    again(live)


def again(live: Live) -> None:
    """Wait until the sidecar decides."""
    eventually(lambda: live.chat("again", "x").ok and live.status().get("decisions"))
    # The first query is made by what the policy before wanted.
    for _ in range(2):
        live.rank_of(live.chat("again", "x"))


def reasons(live: Live) -> dict[str, int]:
    return dict(live.status()["decisions"]["kv_affinity"])


def test_conversations_without_a_key_spread_and_stay(kv: Live) -> None:
    # Long: what the tests before left on the ranks counts where conversations are placed.
    chats = Chats(kv, "spread", LONG * 10)
    first = chats.turn()
    assert set(first) == set(range(RANKS))
    assert chats.turn() == first
    assert chats.turn() == first
    assert reasons(kv)["prefix_hit"] > CHATS


def test_sessions_with_a_key_find_their_cache(kv: Live) -> None:
    first = {}
    for turn in (1, 2, 3):
        for key in (f"kv-{n}" for n in range(CHATS)):
            answer = kv.chat(key, key + LONG * turn)
            rank = kv.rank_of(answer)
            assert first.setdefault(key, rank) == rank
            details = answer.json()["usage"]["prompt_tokens_details"] or {}
            assert turn == 1 or details["cached_tokens"] >= 300 * (turn - 1)


def test_all_samples_and_prompts_of_a_call_share_a_rank(kv: Live) -> None:
    before = set(kv.ranks())
    assert kv.chat("kv-samples", LONG, n=4).ok
    assert kv.generate(text=[f"{LONG} {n}" for n in range(4)], routing_key="kv-batch").ok
    new = {rid: rank for rid, rank in kv.ranks().items() if rid not in before}
    assert len(new) >= 8
    assert len({*new.values()}) <= 2


def test_a_killed_sidecar_is_told_of_conversations(kv: Live) -> None:
    chats = Chats(kv, "told")
    first = chats.turn()
    kv.sidecar.kill()
    kv.sidecar.start()
    again(kv)
    kv.rank_of(kv.chat("one more query", "x"))  # the hook tells the past with what it asks next
    assert chats.turn() == first
    assert reasons(kv)["prefix_hit"] >= CHATS


def test_a_flushed_cache_loses_its_credit(kv: Live) -> None:
    chats = Chats(kv, "flushed")
    chats.turn()
    assert kv.settle()
    hits = reasons(kv).get("prefix_hit", 0)
    assert requests.post(f"{kv.server.base_url}/flush_cache", timeout=30).ok
    assert kv.settle()
    placed = reasons(kv).get("placed", 0)
    chats.turn()
    assert reasons(kv).get("prefix_hit", 0) == hits
    assert reasons(kv)["placed"] >= placed + CHATS
