"""Changes of the policies: checked first, whole, remembered, counted and logged."""

import time
from pathlib import Path
from typing import Any

import pytest

from sidecar import logs, metrics
from sidecar.catalog import Catalog
from sidecar.config import CanaryConfig, PolicyConfig, ShadowConfig
from sidecar.errors import ConfigError
from sidecar.metrics import Health
from sidecar.metrics.process import MAX_HISTORY
from sidecar.orders import CanaryOrder, PolicyOrder
from sidecar.policies import Choice, make_policy
from sidecar.steering import Steering, prepare
from tests.outside import Outside
from tests.support import keyed, make_dispatcher, query


def make() -> Steering:
    dispatcher = make_dispatcher("kv_affinity")
    return Steering(dispatcher, Catalog(dict), Health())


def state(steering: Steering) -> Any:
    """All that a refused change must leave as it is."""
    dispatcher = steering.dispatcher
    seats = dispatcher.active, dispatcher.canary, dispatcher.shadow
    return (steering.state(), seats, dispatcher.want, list(steering.history))


def configured(steering: Steering, **policy: Any) -> None:
    steering.reload(prepare(steering.catalog, PolicyConfig(**policy)))


def test_each_change_is_one_line_of_history_with_its_version(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs.logger, "propagate", True)
    caplog.set_level("INFO", logs.logger.name)
    steering, begun = make(), time.time()
    steering.start(prepare(steering.catalog, PolicyConfig()))
    steering.set_policy(PolicyOrder("prefix_affinity", {"min_load_gap": 8}))
    steering.set_shadow(PolicyOrder("round_robin"))
    steering.set_canary(CanaryOrder("kv_affinity", 0.05, {"move_ratio": 3}))
    steering.set_shadow(None)
    steering.set_canary(None)
    configured(steering, name="total_tokens")
    told = [(c.version, c.what, c.policy, c.share) for c in steering.history]
    assert told == [
        (1, "start", "kv_affinity", None),
        (2, "set", "prefix_affinity", None),
        (3, "shadow", "round_robin", None),
        (4, "canary", "kv_affinity", 0.05),
        (5, "shadow_off", "round_robin", None),
        (6, "canary_off", "kv_affinity", None),
        (7, "reload", "total_tokens", None),
    ]
    assert steering.history[1].params["min_load_gap"] == 8.0
    assert steering.history[3].params["move_ratio"] == 3.0
    at = [change.at for change in steering.history]
    assert begun <= at[0] <= at[-1] <= time.time()
    assert at == sorted(at)
    assert steering.dispatcher.policy_version == 7
    counted = {what: n for what, n in steering.health.policy_changes.items() if n}
    assert counted == dict.fromkeys({what for _, what, _, _ in told}, 1)
    lines = [record.message for record in caplog.records if "version" in record.message]
    assert len(lines) == 6
    assert all("version" in line for line in lines)
    assert lines[0].startswith("policy set: kv_affinity -> prefix_affinity version 2")
    assert "share 0.05" in lines[2]


def test_the_history_is_bounded_and_keeps_the_newest() -> None:
    steering = make()
    for number in range(3 * MAX_HISTORY):
        steering.set_policy(PolicyOrder("kv_affinity", {"move_tokens": number}))
    assert len(steering.history) == MAX_HISTORY
    assert [change.version for change in steering.history][-1] == 3 * MAX_HISTORY + 1
    assert steering.history[-1].params["move_tokens"] == 3 * MAX_HISTORY - 1


REFUSED = {
    "unknown policy": lambda s: s.set_policy(PolicyOrder("best")),
    "unknown shadow": lambda s: s.set_shadow(PolicyOrder("best")),
    "unknown canary": lambda s: s.set_canary(CanaryOrder("best", 0.5)),
    "out of range": lambda s: s.set_policy(PolicyOrder("kv_affinity", {"move_ratio": 0})),
    "wrong type": lambda s: s.set_canary(CanaryOrder("kv_affinity", 0.5, {"move_ratio": "x"})),
    "unknown parameter": lambda s: s.set_shadow(PolicyOrder("kv_affinity", {"x": 1})),
    "module": lambda s: s.set_policy(PolicyOrder("json:JSONDecoder")),
    "a second shadow": lambda s: s.set_shadow(PolicyOrder("round_robin")),
    "a second canary": lambda s: s.set_canary(CanaryOrder("round_robin", 0.1)),
    "blocks that differ": lambda s: s.set_policy(PolicyOrder("kv_affinity", {"block_tokens": 32})),
    "reload: unknown": lambda s: configured(s, name="best"),
    "reload: shadow": lambda s: configured(s, shadow=ShadowConfig("best")),
    "reload: canary": lambda s: configured(s, canary=CanaryConfig("kv_affinity", 0.0)),
    "reload: module": lambda s: configured(s, name="no_such_module:Mine"),
    "reload: two kinds of blocks": lambda s: configured(
        s, canary=CanaryConfig("kv_affinity", 0.5, {"block_tokens": 32})
    ),
    "reload: params of ours": lambda s: configured(s, name="round_robin", params={"x": 1}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(case: str) -> None:
    steering = make()
    steering.set_shadow(PolicyOrder("total_tokens"))
    steering.set_canary(CanaryOrder("kv_affinity", 0.3, {"move_ratio": 3}))
    steering.dispatcher.handle(query([keyed("a")]), 0.0)
    before = state(steering)
    with pytest.raises(ConfigError, match=r"policy|block_tokens"):
        REFUSED[case](steering)
    assert state(steering) == before
    assert steering.dispatcher.handle(query([keyed("a")]), 0.0).ranks


def test_the_errors_say_what_to_do() -> None:
    steering = make()
    for end in (steering.set_shadow, steering.set_canary):
        with pytest.raises(ConfigError, match="none to end"):
            end(None)
    steering.set_shadow(PolicyOrder("round_robin"))
    steering.set_canary(CanaryOrder("round_robin", 0.1))
    with pytest.raises(ConfigError, match=r"round_robin is the shadow already.*policy shadow off"):
        steering.set_shadow(PolicyOrder("kv_affinity"))
    with pytest.raises(ConfigError, match=r"round_robin is the canary already.*policy canary off"):
        steering.set_canary(CanaryOrder("kv_affinity", 0.1))
    with pytest.raises(ConfigError, match=r"policy.canary.share.*0"):
        configured(steering, canary=CanaryConfig("kv_affinity", 0.0))
    with pytest.raises(ConfigError, match=r"policy.shadow: no policy 'x'; there are kv_affinity"):
        configured(steering, shadow=ShadowConfig("x"))


def test_a_reload_puts_all_three_in_force_and_ends_what_it_does_not_name() -> None:
    steering = make()
    configured(
        steering,
        name="prefix_affinity",
        shadow=ShadowConfig("round_robin"),
        canary=CanaryConfig("kv_affinity", 0.25, {"move_ratio": 4}),
    )
    now = steering.state()
    assert (now.name, now.shadow.name, now.canary.name, now.canary.share) == (
        *("prefix_affinity", "round_robin"),
        *("kv_affinity", 0.25),
    )
    assert now.canary.params["move_ratio"] == 4.0
    assert steering.history[-1].version == now.version
    configured(steering, name="prefix_affinity")
    assert steering.state().canary is steering.state().shadow is None
    assert steering.dispatcher.want == steering.dispatcher.policy.want


def test_a_reload_can_change_what_could_not_be_side_by_side() -> None:
    # The new three fit each other; that they do not fit the old ones is no matter.
    steering = make()
    steering.set_canary(CanaryOrder("kv_affinity", 0.3))
    params = {"block_tokens": 32}
    steering.catalog.make("kv_affinity", params)
    prepared = prepare(
        steering.catalog,
        PolicyConfig(
            name="round_robin",
            canary=CanaryConfig("kv_affinity", 0.5, params),
            shadow=ShadowConfig("kv_affinity", params),
        ),
    )
    steering.reload(prepared)
    assert steering.dispatcher.want.block_tokens == 32


def test_a_start_with_all_three_that_do_not_fit_is_refused(tmp_path: Path) -> None:
    steering = make()
    config = PolicyConfig(canary=CanaryConfig("kv_affinity", 0.5, {"block_tokens": 32}))
    with pytest.raises(ConfigError, match="block_tokens"):
        steering.start(prepare(steering.catalog, config))
    assert not steering.history


def test_a_policy_that_breaks_its_own_name_and_parameters_can_be_told_and_left() -> None:
    steering, policy = make(), Outside(Choice(0, "placed"))
    dispatcher = steering.dispatcher
    dispatcher.swap_policy(policy)
    dispatcher.set_shadow(make_policy("round_robin"))
    policy.name, policy.params = None, object()  # type: ignore[assignment, misc]
    assert dispatcher.handle(query([keyed("a")]), 0.0).policy == "outside"
    assert (steering.state().name, steering.state().params) == ("outside", {})
    assert b'"outside"' in b"".join(metrics.status_parts(dispatcher, steering.health, 1.0))
    assert list(metrics.collect(dispatcher, steering.health, 1.0))
    configured(steering, name="round_robin")
    assert steering.state().name == "round_robin"
