"""Series of the active policy, the canary and the shadow; and that no key makes a series."""

from collections import deque

import msgspec
import pytest

from sidecar import metrics
from sidecar.dispatcher import Dispatcher
from sidecar.metrics import Health
from sidecar.policies import make_policy
from sidecar.wire import RequestFacts
from tests.support import INSTANCE, keyed, keyless, load_up, make_dispatcher, query, report
from tests.test_metrics import exposition, samples

TOKENS = 2048


def prompt(start: int, key: bytes = b"") -> RequestFacts:
    """A prompt of TOKENS tokens in blocks of 64, unlike those of other starts."""
    blocks = [start * 1000 + i for i in range(TOKENS // 64)]
    return RequestFacts(key, 0, TOKENS, None, blocks)


def ask(dispatcher: Dispatcher, *requests: RequestFacts) -> list[int]:
    """Decide, and let the shadow follow as the server does."""
    asked = query(requests)
    reply = dispatcher.handle(asked, 0.0)
    if dispatcher.shadow is not None:
        deque(dispatcher.shadow.follow(asked, reply, 0.0), maxlen=0)
    return reply.ranks


def of(dispatcher: Dispatcher, name: str, health: Health | None = None):
    return samples(exposition(dispatcher, health)).get(name, {})


def test_who_is_at_work() -> None:
    dispatcher = make_dispatcher("kv_affinity")
    assert of(dispatcher, "policy_info") == {("kv_affinity", "active"): 1}
    assert of(dispatcher, "canary_share") == {(): 0}
    dispatcher.set_canary(make_policy("prefix_affinity"), 0.25)
    dispatcher.set_shadow(make_policy("round_robin"))
    assert of(dispatcher, "policy_info") == {
        ("kv_affinity", "active"): 1,
        ("prefix_affinity", "canary"): 1,
        ("round_robin", "shadow"): 1,
    }
    assert of(dispatcher, "canary_share") == {(): 0.25}
    dispatcher.set_canary(None)
    dispatcher.set_shadow(None)
    assert len(of(dispatcher, "policy_info")) == 1


def test_what_the_active_policy_expects_and_regrets() -> None:
    dispatcher = make_dispatcher("kv_affinity")
    load_up(dispatcher, [0] * 8)
    (first,) = ask(dispatcher, prompt(1, b"k"))
    assert of(dispatcher, "expected_cached_tokens_total")[INSTANCE, "active"] == 0
    ask(dispatcher, prompt(1, b"k"))
    active = (INSTANCE, "active")
    series = samples(exposition(dispatcher))
    assert series["role_requests_total"][active] == 2
    assert series["prompt_tokens_total"][active] == 2 * TOKENS
    assert series["expected_cached_tokens_total"][active] == TOKENS
    assert series["avoidable_prefill_tokens_total"][active] == 0
    assert series["role_spills_total"][active] == 0
    # Its rank is drowned in work, so the prompt is computed anew elsewhere: all of it is regret.
    drowned = report(first, 2, running=64, waiting=400, waiting_uncached_tokens=4_000_000)
    dispatcher.report(drowned, 0.0)
    again = msgspec.structs.replace(prompt(1, b"k"), last_rank=first, last_age_ms=1)
    (elsewhere,) = ask(dispatcher, again)
    assert elsewhere != first
    series = samples(exposition(dispatcher))
    assert series["role_spills_total"][active] == 1
    assert series["avoidable_prefill_tokens_total"][active] == TOKENS
    assert series["expected_cached_tokens_total"][active] == TOKENS


def test_a_policy_that_cannot_tell_expects_nothing() -> None:
    dispatcher = make_dispatcher("round_robin")
    ask(dispatcher, prompt(1), prompt(1))
    series = samples(exposition(dispatcher))
    assert series["role_requests_total"][INSTANCE, "active"] == 2
    assert series["prompt_tokens_total"][INSTANCE, "active"] == 0


def test_the_canary_is_counted_by_itself() -> None:
    dispatcher = make_dispatcher("prefix_affinity")
    dispatcher.set_canary(make_policy("prefix_affinity", {"min_load_gap": 9}), 0.5)
    ask(dispatcher, *[keyed(f"k{i}") for i in range(200)])
    requests = of(dispatcher, "role_requests_total")
    assert requests[INSTANCE, "canary"] + requests[INSTANCE, "active"] == 200
    assert 60 < requests[INSTANCE, "canary"] < 140


def test_the_shadow_beside_what_was_done() -> None:
    dispatcher = make_dispatcher("kv_affinity")
    dispatcher.set_shadow(make_policy("round_robin"))
    load_up(dispatcher, [0] * 8)
    for _ in range(4):
        ask(dispatcher, prompt(1, b"k"))
    series = samples(exposition(dispatcher))
    shadow, shadowed = (INSTANCE, "shadow"), (INSTANCE, "shadowed")
    agreed = series["shadow_decisions_total"]
    assert agreed[INSTANCE, "yes"] + agreed[INSTANCE, "no"] == 4
    assert agreed[INSTANCE, "no"] >= 2
    assert series["role_requests_total"][shadow] == series["role_requests_total"][shadowed] == 4
    cached = series["expected_cached_tokens_total"]
    assert cached[shadowed] == 3 * TOKENS
    assert cached[shadow] == 0, "round robin goes to another rank each time"
    assert series["avoidable_prefill_tokens_total"][shadow] == 3 * TOKENS
    imbalance = series["assigned_imbalance_ratio"]
    assert imbalance[shadowed] == pytest.approx(8)  # all the work on one of 8 ranks
    assert imbalance[shadow] == pytest.approx(2)  # equal work on 4 of 8
    dispatcher.set_shadow(None)
    assert not of(dispatcher, "shadow_decisions_total")


def test_changes_of_policy_are_counted_from_zero() -> None:
    health, dispatcher = Health(), make_dispatcher()
    kinds = {"start", "set", "reload", "canary", "canary_off", "shadow", "shadow_off"}
    assert of(dispatcher, "policy_changes_total", health) == {(kind,): 0 for kind in kinds}
    health.policy_changes["set"] += 2
    assert of(dispatcher, "policy_changes_total", health)["set",] == 2


def test_status_tells_the_roles() -> None:
    dispatcher = make_dispatcher("kv_affinity")
    dispatcher.set_canary(make_policy("prefix_affinity"), 0.25)
    dispatcher.set_shadow(make_policy("round_robin"))
    ask(dispatcher, prompt(1, b"k"))
    told = msgspec.json.decode(msgspec.json.encode(metrics.status(dispatcher, Health(), 1e9)))
    assert (told["canary"]["policy"], told["canary"]["share"]) == ("prefix_affinity", 0.25)
    assert told["canary"]["params"]["min_load_gap"] == 4
    compared = told["shadow"].pop("compared")
    assert told["shadow"] == {"policy": "round_robin", "params": {}}
    assert compared["requests"] == 1 and compared["prompt_tokens"] == 2048
    assert told["uptime_seconds"] > 0
    assert told["pid"] > 0
    (instance,) = told["instances"]
    assert set(instance["expected"]) == {"active", "canary", "shadow", "shadowed"}
    assert instance["expected"]["shadow"]["requests"] == 1


def test_routing_keys_make_no_series() -> None:
    """100,000 sessions, with a canary and a shadow: as many series as after 10,000."""
    dispatcher = make_dispatcher()
    load_up(dispatcher, [0] * 8)
    dispatcher.set_canary(make_policy("prefix_affinity", {"min_load_gap": 9}), 0.5)
    dispatcher.set_shadow(make_policy("round_robin"))
    # One key for each home and each reason first, so that every series there can be exists.
    for source in range(8):
        for target in range(8):
            ask(dispatcher, keyless())
            dispatcher.tallies[INSTANCE].spills[source, target] += 1
    for batch in range(10):
        ask(dispatcher, *[keyed(f"warm-{batch}-{i}") for i in range(1000)])
    before = exposition(dispatcher).count("\n")
    for batch in range(100):
        ask(dispatcher, *[keyed(f"secret-{batch}-{i}") for i in range(1000)])
    text = exposition(dispatcher)
    assert text.count("\n") == before
    assert "secret" not in text
