import contextlib
import os

import pytest

from bench.arms import ArmError
from bench.live import launch as launching
from bench.live.launch import Launch, RealServer, run_model
from tests.bench.live_target import FakeControl, FakeTarget
from tests.bench.test_live_ab import OPTIONS, Tiny


class FakeSidecar:
    """In the place of the process."""

    def __init__(self, folder):
        self.endpoint, self.port = f"ipc://{folder}/query.sock", 1
        EVENTS.append("sidecar made")

    def start(self):
        EVENTS.append("sidecar started")

    def stop(self):
        EVENTS.append("sidecar stopped")


EVENTS: list[str] = []


@pytest.fixture
def target(monkeypatch):
    EVENTS.clear()
    with FakeTarget() as target:

        @contextlib.contextmanager
        def serving(launch, folder, name, env, args=()):
            EVENTS.append(f"start {name} {' '.join([*sorted(env), *args])}".strip())
            assert "DP_SIDECAR_ENDPOINT" not in os.environ
            try:
                yield target.url
            finally:
                EVENTS.append(f"stop {name}")

        real = launching.run_live

        def run_live(url, control, admin, *more, **options):
            return real(url, FakeControl(target), target.admin, *more, **options)

        monkeypatch.setattr(launching, "serving", serving)
        monkeypatch.setattr(launching, "SidecarProcess", FakeSidecar)
        monkeypatch.setattr(launching, "run_live", run_live)
        monkeypatch.setenv("DP_SIDECAR_ENDPOINT", "ipc:///of/another")
        yield target


def run(*arms):
    return run_model(Launch(model="m", ranks=4), Tiny(), arms, [1], 1, OPTIONS)


def test_policies_share_a_server_and_stock_methods_have_one_each(target):
    outcomes = list(run("round_robin", "prefix_affinity", "total_tokens", "sidecar_round_robin"))
    assert [each.arm for each in outcomes] == [
        "prefix_affinity",
        "sidecar_round_robin",
        "round_robin",
        "total_tokens",
    ]
    assert EVENTS == [
        "sidecar made",
        "sidecar started",
        "start hooked DP_SIDECAR_ENDPOINT",
        "stop hooked",
        "sidecar stopped",
        "start stock-round_robin --load-balance-method round_robin",
        "stop stock-round_robin",
        "start stock-total_tokens --load-balance-method total_tokens",
        "stop stock-total_tokens",
    ]
    stock = outcomes[2]
    assert stock.more["relaunched"]
    assert (stock.ranks, stock.spills, stock.bypasses) == (4, None, None)
    assert os.environ["DP_SIDECAR_ENDPOINT"] == "ipc:///of/another"


def test_everything_is_stopped_when_the_caller_stops(target):
    with contextlib.closing(run("prefix_affinity", "sidecar_round_robin")) as outcomes:
        next(outcomes)
    assert EVENTS[-2:] == ["stop hooked", "sidecar stopped"]


def test_a_wrong_arm_starts_nothing(target):
    with pytest.raises(ArmError, match="oracle"):
        next(run("prefix_affinity", "oracle"))
    assert EVENTS == []


def test_command_of_a_real_server(tmp_path):
    launch = Launch(model="a/model", ranks=8, arguments=("--tp-size", "16"))
    server = RealServer(launch, {}, launch.arguments, tmp_path / "log")
    command = server._command
    assert command[1:5] == ["-m", "sglang.launch_server", "--model-path", "a/model"]
    assert "--enable-dp-attention" in command
    assert command[-2:] == ["--tp-size", "16"], "what was given comes last, so it wins"
