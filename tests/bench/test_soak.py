"""The soak, for some seconds; and what it makes of samples that are not flat."""

from pathlib import Path

import pytest
from tqdm import tqdm

from bench.soak import verdict
from bench.soak.__main__ import keep, prepared
from bench.soak.plan import plan
from bench.soak.verdict import Row
from bench.soak.world import Check, Usage
from tests.processes import wait_for


def exact(check: Check) -> Check | None:
    """The check, if the load view was the truth in it."""
    return None if check.drift or check.held_off else check


def test_a_few_seconds(tmp_path: Path) -> None:
    with prepared(4.0, rate=200.0, keys=50) as soak, tqdm(total=4.0, disable=True) as told:
        # On a busy machine the first answers come too late, and the hook asks less often then.
        first = wait_for(lambda: exact(soak.world.check(0.0)), 60)
        soak.run(told)
        result = soak.result()
        keep(soak, result, tmp_path)
    assert first.held >= 8
    assert (result["lost"], result["errors"]) == (0, 0)
    # Ranks that joined alone seconds before are a request or two off, until `narrow` has its time.
    assert result["drift"] <= 8 * result["checks"]
    assert result["asked"] > 20
    assert result["checks"] >= 1
    done = result["events"]
    assert set(done) == {event.what for event in plan(4.0)} - {"check"}
    assert {"kill_sidecar", "take_over", "restart_controller", "restart_scheduler"} < set(done)
    assert {name.split()[0] for name in soak.rows[-1].usage} == {
        "sidecar",
        "controller",
        "schedulers",
    }
    assert (tmp_path / "soak.png").stat().st_size > 10_000
    assert (tmp_path / "samples.json").stat().st_size > 1000


def test_half_an_hour_has_every_kind_of_event_in_order() -> None:
    events = plan(1800.0)
    assert events == sorted(events)
    assert events[0].at > 0
    assert events[-1].at < 1800
    kinds = [event.what for event in events]
    assert set(kinds) == {
        *("check", "stop_and_go", "kill_sidecar", "take_over", "leave", "come_back"),
        *("restart_scheduler", "restart_controller"),
    }
    # The middle third is one life of the sidecar.
    assert not [e for e in events if "sidecar" in e.what and 600 < e.at < 1200]


def rows(
    sizes: list[float], name: str = "sidecar 1", descriptors: list[int] | None = None
) -> list[Row]:
    """Samples of one process, five seconds apart, from a minute after its start."""
    counts = descriptors or [40] * len(sizes)
    told = {"asked": 1, "stock": 0, "lost": 0, "errors": 0, "bypassed": {}, "longest_ms": 1.0}
    return [
        Row(60 + 5.0 * i, {name: 60 + 5.0 * i}, {name: Usage(mib, n, 8)}, told, 0, {name: 9.0}, 1)
        for i, (mib, n) in enumerate(zip(sizes, counts, strict=True))
    ]


def found_of(made: list[Row], checks: list[Check] | None = None) -> list[str]:
    return verdict.broken(verdict.summary(made, checks or [], {}))


def test_flat_memory_is_within_bounds() -> None:
    assert not found_of(rows([90.0 + i % 3 * 0.5 for i in range(60)]))


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (rows([90.0 + 0.1 * i for i in range(60)]), "growth_mib"),
        (rows([90.0] * 55 + [95.0] * 5), "range_mib"),
        (rows([90.0] * 60, descriptors=[40 + i // 10 for i in range(60)]), "descriptors_leaked"),
        (rows([90.0] * 20) + rows([93.0] * 20, "sidecar 2"), "equal age"),
    ],
    ids=["grows", "jumps", "leaks", "grows from life to life"],
)
def test_what_grows_is_told(made: list[Row], word: str) -> None:
    assert [text for text in found_of(made) if word in text]


def test_what_is_lost_or_wrong_is_told() -> None:
    made = rows([90.0] * 3, "controller 1")
    made[-1].told.update(lost=2, errors=1)
    check = Check(1.0, 3, 5, 0, 3.0, "take-over", ["rank 0 sent: 1, in truth 4"])
    assert [text.split()[0] for text in found_of(made, [check])] == ["2", "1", "the"]


def test_a_short_life_is_not_judged() -> None:
    assert verdict.judge("sidecar 1", rows([90.0, 99.0])) is None
