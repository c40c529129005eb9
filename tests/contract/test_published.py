"""SGLang's own load publisher, the real class on a real socket: we read what it writes.

From 0.5.19 on; the frames and the leading positions of the stat are the same in all of them.
"""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("sglang")
pytest.importorskip("sglang.srt.managers.scheduler_components.load_publisher")
from sglang.srt.disaggregation import kv_events
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.managers.scheduler_components import load_publisher as publisher

from sidecar.published import stat
from tests.processes import free_port
from tests.test_published_sockets import fed, until

RANKS = 2
FIELDS = {"num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 1000}
LATER = {
    "num_waiting_uncached_tokens": 700,
    "num_total_tokens": 1900,
    "max_running_requests": 256,
    "total_prefill_uncached_tokens": 5,
    "total_prefill_busy_us": 6,
}


def ports() -> int:
    """The first of as many free ports as the KV events and the loads of all ranks take."""
    while True:
        first = free_port()
        if [free_port() for _ in range(2 * RANKS - 1)] == list(range(first + 1, first + 2 * RANKS)):
            return first


def place(attention: bool, rank: int) -> Any:
    """Where a scheduler stands: DP attention, or plain DP."""
    return SimpleNamespace(
        **{"pp_rank": 0, "attn_tp_rank": 0, "attn_cp_rank": 0, "num_dp_ranks": RANKS},
        **{"dp_size": RANKS, "dp_rank": None if attention else rank},
        attn_dp_size=RANKS if attention else 1,
        attn_dp_rank=rank if attention else 0,
    )


def make(monkeypatch: pytest.MonkeyPatch, kv: int, where: Any, endpoint: str = "auto") -> Any:
    """The publisher of one scheduler, bound."""
    arguments: dict[str, Any] = {
        "kv_events_config": json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{kv}"}),
        "load_publish_endpoint": endpoint,
        "publish_interval": 1,
    }
    if hasattr(publisher, "get_parallel"):
        for module in (publisher, kv_events):
            monkeypatch.setattr(module, "get_parallel", lambda: where)
    else:
        arguments["ps"] = where  # until 0.5.20
    made = publisher.SchedulerLoadPublisher(**arguments)
    assert made.enable
    return made


def snapshot(**changes: Any) -> Any:
    """What the scheduler measures."""
    known = {field.name for field in msgspec.structs.fields(LoadSnapshot)}
    fields = {"timestamp": 0.0, **FIELDS, "max_total_num_tokens": 50_000, **LATER, **changes}
    missing = {field.name for field in msgspec.structs.fields(LoadSnapshot) if field.required}
    return LoadSnapshot(
        **dict.fromkeys(missing - set(fields), 0),
        **{name: value for name, value in fields.items() if name in known},
    )


@pytest.mark.parametrize("attention", [True, False], ids=["DP attention", "plain DP"])
@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
def test_we_read_what_it_publishes(
    monkeypatch: pytest.MonkeyPatch, attention: bool, explicit: bool
) -> None:
    kv = ports()
    endpoint = f"tcp://*:{kv + RANKS}" if explicit else "auto"
    first = kv + RANKS
    made = [make(monkeypatch, kv, place(attention, rank), endpoint) for rank in range(RANKS)]

    async def test() -> None:
        async with fed(f"tcp://127.0.0.1:{first}-{first + RANKS - 1}") as one:
            turn = 0

            def come() -> bool:
                nonlocal turn
                turn += 1
                for rank, each in enumerate(made):
                    told = snapshot(num_running_reqs=3 + rank, num_used_tokens=1000 + turn)
                    each.publish_load_stat(lambda: None, force=True, snapshot=told)
                return [one.running(rank) for rank in range(RANKS)] == [3, 4]

            await until(come)
            state = one.state(1)
            assert state is not None
            report = state.report
            assert report is not None
            assert (report.waiting, report.capacity_tokens) == (2, 50_000)
            newer = "num_total_tokens" in publisher.LoadStat.__struct_fields__
            expected = (1900, 700, 256) if newer else (report.tokens, 0, 0)
            assert report.tokens > 1000
            assert (
                report.tokens,
                report.waiting_uncached_tokens,
                report.max_running,
            ) == expected
            assert not one.health.rejected

    try:
        asyncio.run(test())
    finally:
        for each in made:
            each.close()


def test_the_positions_that_we_read_are_the_ones_it_writes() -> None:
    theirs = publisher.LoadStat.__struct_fields__
    ours = dict(zip(stat.LoadStat.__struct_fields__, theirs, strict=False))
    assert (
        list(ours.items())
        == [
            ("running", "num_running_reqs"),
            ("waiting", "num_waiting_reqs"),
            ("used_tokens", "num_tokens"),
            ("capacity_tokens", "max_total_num_tokens"),
            ("dp_rank", "attn_dp_rank"),
            ("waiting_uncached_tokens", "num_waiting_uncached_tokens"),
            ("total_tokens", "num_total_tokens"),
            ("max_running", "max_running_requests"),
        ][: len(theirs)]
    )
    assert kv_events.LOAD_TOPIC.encode() == stat.TOPIC


def test_an_unchanged_load_is_told_once_a_second() -> None:
    # What staleness and the end of the grace rest on.
    assert publisher.LOAD_PUBLISH_HEARTBEAT_S <= 1.0
