"""A log played back decides what was decided: every request, on worlds where all sorts happen."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from sidecar.policies import make_policy
from sidecar.wire import RequestFacts
from tests.journal.support import Noted, replay, write
from tests.kv.world import World

NAMES = [
    *("ask", "ask", "ask", "ask", "report", "report", "report", "tick", "tick"),
    *("reports", "silence", "pinned", "history", "flush", "restart", "controller", "ranks"),
]


class Wider(World):
    """With prefix hashes and namespaces too."""

    def facts(self) -> RequestFacts:
        facts = super().facts()
        facts.namespace = self.drawn.choice([0, 0, 1 << 63, 7])
        facts.prefix_hash = self.drawn.choice([None, 0, (1 << 64) - 1, 12345])
        return facts


def live(noted: Noted, steps: int, seed: int, change: Any = None) -> None:
    drawn = Random(seed)
    worlds = [Wider(noted, drawn, name) for name in ("a", "b")]
    for step in range(steps):
        world = drawn.choice(worlds)
        now = max(each.server.now for each in worlds)
        world.server.now = now
        getattr(world, drawn.choice(NAMES))()
        if change is not None and step % 40 == 20:
            change(noted, drawn)


def change(noted: Noted, drawn: Random) -> None:
    """What an operator may do."""
    what = drawn.choice(["set", "set", "canary", "canary_off", "reload", "shadow", "shadow_off"])
    name = drawn.choice(["kv_affinity", "prefix_affinity", "round_robin", "total_tokens"])
    if what == "canary":
        noted.set_canary(make_policy(drawn.choice(["kv_affinity", "prefix_affinity"])), 0.5)
    elif what == "canary_off":
        noted.set_canary(None)
    elif what == "set":
        noted.swap_policy(make_policy(name))
    elif what == "reload":
        noted.canary = noted.shadow = None
        noted.swap_policy(make_policy(name))
        if drawn.random() < 0.5:
            noted.set_canary(make_policy("kv_affinity"), 0.3)
    else:
        noted.set_shadow(make_policy("total_requests") if what == "shadow" else None)
    noted.note(what)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["kv_affinity", "prefix_affinity", "total_tokens"])
def test_every_decision_is_made_again(tmp_path: Path, policy: str, seed: int) -> None:
    noted = Noted(policy)
    live(noted, 600, seed)
    write(tmp_path / "log", noted)
    found = replay(tmp_path / "log")
    assert found.warnings == [] and found.errors == []
    assert found.ranks == found.logged == [reply.ranks for reply in noted.replies]
    assert found.reasons == [reply.reasons for reply in noted.replies]
    assert sum(map(len, found.ranks)) > 250


@pytest.mark.parametrize("seed", range(8))
def test_across_changes_of_the_policies(tmp_path: Path, seed: int) -> None:
    noted = Noted("kv_affinity")
    live(noted, 800, seed, change)
    write(tmp_path / "log", noted)
    found = replay(tmp_path / "log")
    assert found.warnings == [] and found.errors == []
    assert found.ranks == [reply.ranks for reply in noted.replies]
    assert found.reasons == [reply.reasons for reply in noted.replies]
