"""What a release of SGLang must do at least, for `make test-matrix`: one server, few requests."""

from importlib.metadata import version

from .conftest import RANKS, eventually
from .test_live import home


def test_plugin_loads(live):
    assert live.rank_of(live.chat("first", "hello")) == home("first")
    log = live.server.log_path.read_text()
    assert log.count("attached to the controller") == 1
    assert "dp_sidecar: not attached" not in log
    assert live.status()["about"]["sglang"] == version("sglang")


def test_dispatch(live):
    bypassed = live.status()["bypassed"]
    assert live.rank_of(live.chat("one", "hello")) == home("one")
    before = set(live.ranks())
    assert live.generate(text=["a b", "c d", "e f"], routing_key="batch").status_code == 200
    assert {rank for rid, rank in live.ranks().items() if rid not in before} == {home("batch")}
    assert live.rank_of(live.chat("pinned", "hello", routed_dp_rank=RANKS - 1)) == RANKS - 1
    assert live.status()["bypassed"] == bypassed  # the server may have been through other tests


def test_reports(live):
    assert live.settle(), "all that was sent was received, and nothing is left"
    assert eventually(lambda: all(rank["capacity_tokens"] for rank in live.status()["ranks"]))
