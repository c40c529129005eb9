"""The verbs over the control socket and, with a token, over TCP."""

import json
from collections.abc import Iterator

import pytest

from sidecar.errors import RefusedError
from sidecar.policies import REGISTRY
from tests.processes import short_directory
from tests.sites import Sites
from tests.support import keyed, query


@pytest.fixture
def sites() -> Iterator[Sites]:
    with short_directory() as directory:
        yield Sites(directory)


@pytest.mark.parametrize("way", ["socket", "TCP"])
def test_every_verb(sites: Sites, way: str) -> None:
    def call() -> None:
        control = sites.control(way)
        assert (control.show().name, control.show().version) == ("kv_affinity", 1)
        assert [one.name for one in control.list()] == list(REGISTRY)
        assert (
            control.set_policy("prefix_affinity", {"min_load_gap": 9}).params["min_load_gap"] == 9
        )
        assert control.set_shadow("total_tokens").shadow.name == "total_tokens"
        canary = control.set_canary("kv_affinity", 0.25, {"move_ratio": 3}).canary
        assert (canary.name, canary.share, canary.params["move_ratio"]) == ("kv_affinity", 0.25, 3)
        assert control.shadow_off().shadow is None
        assert control.canary_off().canary is None
        assert control.reload().name == "prefix_affinity"
        whats = [change.what for change in control.history()]
        assert whats == ["set", "shadow", "canary", "shadow_off", "canary_off"]
        assert control.where("k") == []

    sites.run(call)
    assert sites.reloads == 1
    assert sites.dispatcher.policy_version == 6


@pytest.mark.parametrize("way", ["socket", "TCP"])
def test_what_is_refused(sites: Sites, way: str) -> None:
    def call() -> None:
        control = sites.control(way)
        control.set_shadow("round_robin")
        control.set_canary("round_robin", 0.5)
        version = control.show().version
        for act, words in (
            (lambda: control.set_policy("best"), "no policy 'best'.*kv_affinity"),
            (lambda: control.set_shadow("round_robin"), "already.*policy shadow off"),
            (lambda: control.set_canary("round_robin", 0.1), "already.*policy canary off"),
            (lambda: control.set_canary("round_robin", 0.0), "share"),
            (lambda: control.set_canary("round_robin", 1.1), "share"),
            (lambda: control.set_canary("round_robin", -0.1), "share"),
            (lambda: control.set_canary("round_robin", float("nan")), "nan|range|JSON"),
            (lambda: control.set_canary("round_robin", "half"), "share"),  # type: ignore[arg-type]
            (lambda: control.set_policy("kv_affinity", {"move_ratio": 0.5}), "move_ratio"),
            (lambda: control.set_policy("kv_affinity", {"move_ratio": "x"}), "move_ratio"),
            (lambda: control.set_policy("kv_affinity", {"ratio": 1}), "ratio"),
            (lambda: control.set_policy("os:system"), "no policy 'os:system'"),
            (lambda: control.set_shadow("sidecar.policies:KvAffinity"), "already"),
            (lambda: control.where(""), "key"),
        ):
            with pytest.raises(RefusedError, match=words):
                act()
        assert control.show().version == version
        control.shadow_off()
        control.canary_off()
        for act in (control.shadow_off, control.canary_off):
            with pytest.raises(RefusedError, match="none to end"):
                act()
        sites.refusal = "sidecar.toml: policy.name: no policy 'x'"
        with pytest.raises(RefusedError, match="no policy 'x'"):
            control.reload()

    sites.run(call)


def test_a_path_is_asked_for_by_the_key(sites: Sites) -> None:
    def call() -> None:
        asked = query([keyed("Größe"), keyed("other")])
        reply = sites.dispatcher.handle(asked, 0.0)
        list(sites.paths.follow(asked, reply, 0.0))
        (path,) = sites.control("socket").where("Größe")
        assert [step["rank"] for step in path["steps"]] == reply.ranks[:1]
        status, shown = sites.http("GET", "/paths")
        assert status == 200
        assert path["key_hash"] in [one["key_hash"] for one in shown]
        assert "Größe" not in json.dumps(shown, ensure_ascii=False)

    sites.run(call)
