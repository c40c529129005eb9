import pytest

from bench.live.target import Sidecar, TargetError, find_instance, flush, inspect
from tests.bench.live_target import INSTANCE, RANKS, FakeControl, FakeTarget


@pytest.fixture
def target():
    with FakeTarget() as target:
        yield target


def find(target):
    control = FakeControl(target)
    return find_instance(inspect(target.url), Sidecar(target.admin), control, pause=0)


def test_it_finds_the_instance_and_its_ranks(target):
    assert find(target) == INSTANCE
    assert Sidecar(target.admin).ranks(INSTANCE) == RANKS


def test_a_target_without_the_hook(target):
    target.asks = False
    with pytest.raises(TargetError, match=r"does not ask this sidecar: .*nobody has asked it"):
        find(target)


def test_a_sidecar_that_others_ask(target):
    find(target)
    target.asks = False
    with pytest.raises(TargetError, match=f"it knows {INSTANCE} only"):
        find(target)


def test_a_sidecar_that_serves_others_meanwhile(target):
    target.instances = ["a:1", "b:2"]
    with pytest.raises(TargetError, match="also serves a:1, b:2"):
        find(target)


def test_control_and_status_of_different_sidecars(target):
    target.admin_version = 7
    with pytest.raises(TargetError, match="different sidecars: policy version 1 there, 7 here"):
        find(target)


def test_no_status(target):
    sidecar = Sidecar(target.url)
    with pytest.raises(TargetError, match="HTTP 404"):
        sidecar.status()
    sidecar.url += "/server_info?"
    with pytest.raises(TargetError, match="not a sidecar"):
        sidecar.status()


def test_an_unhealthy_target(target):
    target.healthy = False
    with pytest.raises(TargetError, match="/health: HTTP 503"):
        inspect(target.url)


@pytest.mark.parametrize("models", [{"data": []}, [], {}])
def test_a_target_without_a_model(target, models):
    target.models = models
    with pytest.raises(TargetError, match="names no model"):
        inspect(target.url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "http://[", ""])
def test_no_target(url):
    with pytest.raises(TargetError, match="GET"):
        inspect(url)


def test_what_a_simulated_server_tells(target):
    target.simulated = {"simulated": True, "settings": {"time_scale": 2, "journal": "file"}}
    facts = inspect(target.url, vocabulary=5000)
    assert (facts.simulated, facts.time_scale, facts.journal) == (True, 2.0, "file")
    assert facts.vocabulary == 5000
    target.simulated["settings"]["time_scale"] = 0
    assert inspect(target.url).time_scale == 1.0


def test_a_busy_cache_is_flushed_later(target):
    target.busy = 2
    flush(target.url, pause=0)
    assert target.events == ["flush"] * 3


def test_a_cache_that_stays_busy(target):
    target.busy = 1000
    with pytest.raises(TargetError, match=r"cannot be flushed: .*HTTP 400"):
        flush(target.url, seconds=0.01, pause=0)


@pytest.mark.parametrize(
    "simulated", [{"simulated": True, "settings": "s"}, {"settings": {"time_scale": "x"}}]
)
def test_a_server_that_tells_nonsense_of_itself(simulated):
    with FakeTarget() as target:
        target.simulated = {"simulated": True, **simulated}
        with pytest.raises(TargetError, match="settings of a simulated server"):
            inspect(target.url)
