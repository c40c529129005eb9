"""Policies change under 1,000 requests a second: nothing is lost, and no session moves."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.replace import RANKS, Decision, Traffic, drive, moved
from bench.swap import COMPUTING, OUTSIDE, WAITING
from sidecar.control import Control
from tests.processes import Sidecar, clean_env, short_directory, sidecar_process, wait_for

RATE = 1000.0
DEADLINE_MS = 250
"""Fifty times the hook's own: what is tested is that answers come, not how fast this machine is."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_directory() as path:
        (path / "sidecar.toml").write_text("")
        yield path


@pytest.fixture
def sidecar(folder: Path) -> Iterator[Sidecar]:
    env = clean_env()
    env["PYTHONPATH"] = ":".join(filter(None, [str(folder), env.get("PYTHONPATH")]))
    with sidecar_process(f"ipc://{folder}/q", config=folder / "sidecar.toml", env=env) as process:
        yield process


def under_load(sidecar: Sidecar, act: Callable[[Control], None]) -> list[Decision]:
    """What is decided while `act` changes policies in another thread, and that all is accounted."""
    traffic = Traffic(sidecar.endpoint, deadline_ms=DEADLINE_MS)
    traffic.meet()
    drive(traffic, RATE, time.monotonic() + 0.3)
    faults: list[BaseException] = []

    def acting() -> None:
        try:
            act(Control(f"{sidecar.path}.control", timeout=30))
        except BaseException as error:  # noqa: BLE001 - the test tells it
            faults.append(error)

    thread = threading.Thread(target=acting)
    thread.start()
    while thread.is_alive():
        drive(traffic, RATE, time.monotonic() + 0.05)
    thread.join()
    drive(traffic, RATE, time.monotonic() + 0.3)
    assert not faults
    decisions = traffic.decisions
    alone = [decision for decision in decisions if decision.boot is None]
    assert not alone, f"{len(alone)} of {len(decisions)} without an answer in {DEADLINE_MS} ms"
    assert not [decision for decision in decisions if decision.rank is None]
    sent, _ = traffic.chooser.sent.of(range(RANKS))
    assert sum(sent) == len(decisions) == sidecar.metric("decisions_total")
    wait_for(lambda: traffic.report() or sidecar.metric("in_flight_requests") == 0)
    traffic.client.ask(traffic.chooser.probe(), traffic.chooser._seq)
    assert sidecar.metric("sent_requests_total") == len(decisions)
    assert sidecar.metric("policy_errors_total") == 0
    assert sidecar.metric("unobserved_requests_total") == 0
    traffic.close()
    return decisions


def test_other_parameters(sidecar: Sidecar) -> None:
    def act(control: Control) -> None:
        for turn in range(40):
            state = control.set_policy("kv_affinity", {"move_tokens": 16_384 + turn})
            assert state.version == turn + 2

    assert moved(under_load(sidecar, act)) == 0
    assert sidecar.metric("policy_changes_total", what="set") == 40


def test_another_policy_and_back(sidecar: Sidecar) -> None:
    def act(control: Control) -> None:
        for turn in range(20):
            control.set_policy("kv_affinity" if turn % 2 else "prefix_affinity")

    decisions = under_load(sidecar, act)
    # The first that places by hash moves them, once: where they are then, both leave them.
    sessions = {decision.session for decision in decisions}
    assert moved(decisions) <= len(sessions)
    assert moved(decisions[len(decisions) // 2 :]) == 0


def test_shadow_on_and_off(sidecar: Sidecar) -> None:
    def act(control: Control) -> None:
        for name in ("round_robin", "kv_affinity", "prefix_affinity") * 4:
            control.set_shadow(name)
            wait_for(lambda: sidecar.metric("shadow_decisions_total"))
            control.shadow_off()

    assert moved(under_load(sidecar, act)) == 0
    assert not sidecar.metric("shadow_decisions_total")


def test_canary_on_and_off(sidecar: Sidecar) -> None:
    def act(control: Control) -> None:
        for turn in range(12):
            control.set_canary("kv_affinity", 0.5, {"move_ratio": 3 + turn})
            before = sidecar.metric("role_requests_total", role="canary") or 0
            wait_for(lambda: sidecar.metric("role_requests_total", role="canary") > before)  # noqa: B023
            control.canary_off()

    decisions = under_load(sidecar, act)
    assert moved(decisions) == 0
    both = [sidecar.metric("role_requests_total", role=role) for role in ("active", "canary")]
    assert sum(both) == len(decisions)


@pytest.mark.parametrize("wait", [WAITING, COMPUTING], ids=["waits", "computes"])
def test_a_reload_whose_import_takes_long(sidecar: Sidecar, folder: Path, wait: str) -> None:
    def act(control: Control) -> None:
        (folder / "sidecar.toml").write_text('[policy]\nname = "slow:Slow"\n')
        for turn in range(4):
            (folder / "slow.py").write_text(OUTSIDE.format(wait=wait) + "#" * turn)
            sidecar.signal(signal.SIGHUP)
            version = turn + 2
            wait_for(lambda: sidecar.metric("policy_version") == version, 30)  # noqa: B023
        assert control.show().name == "slow"
        assert not sidecar.lines("WARNING"), "an import does not keep anybody waiting"

    assert moved(under_load(sidecar, act)) == 0
    assert sidecar.metric("last_reload_successful") == 1


def test_refused_changes(sidecar: Sidecar, folder: Path) -> None:
    def act(control: Control) -> None:
        for name, params in (("best", {}), ("kv_affinity", {"move_ratio": 0})) * 10:
            with pytest.raises(Exception, match="policy"):
                control.set_policy(name, params)
        (folder / "sidecar.toml").write_text('[policy]\nname = "half:Mine"\n')
        (folder / "half.py").write_text("class Mine:\n    def ch")
        for _ in range(3):
            with pytest.raises(Exception, match="SyntaxError"):
                control.reload()

    assert moved(under_load(sidecar, act)) == 0
    assert sidecar.metric("policy_version") == 1
    assert sidecar.metric("reload_failures_total") == 3
