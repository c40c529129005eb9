"""The simulated scheduler without a server: its seams, its answers, its reports."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput, ShutdownReq
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.sampling.sampling_params import SamplingParams

from bench.client import read_journal
from bench.model.steps import Work
from bench.simulated import scheduler as module
from bench.simulated.load import Placement
from bench.simulated.pace import Step
from bench.stock import make_request

PAGE = 4


class Channels:
    """Stands for the sockets of a scheduler; keeps what was sent."""

    recv_from_tokenizer = recv_from_rpc = None

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.send_to_tokenizer = self.send_to_detokenizer = self

    def send_output(self, output: Any, received: Any = None) -> None:
        self.sent.append(output)

    def ended(self) -> dict[str, Any]:
        """rid -> why it ended, of all answers so far."""
        outputs = [output for output in self.sent if hasattr(output, "finished_reasons")]
        pairs = [pair for o in outputs for pair in zip(o.rids, o.finished_reasons, strict=True)]
        return {rid: reason["type"] for rid, reason in pairs if reason}


class Writer:
    """Stands for SGLang's writer of load snapshots."""

    dp_rank, publish_interval, publish_counter = 0, 15, 0

    def __init__(self) -> None:
        self.written: list[LoadSnapshot] = []

    def write(self, snapshot: LoadSnapshot) -> None:
        self.written.append(snapshot)


class Pace:
    """Steps that take no time; `others` says whether other ranks work."""

    others = False
    number = 0

    def step(self, work: Work | None, overdue: Callable[[], bool]) -> Step | None:
        if work is None and not self.others:
            return None
        self.number += 1
        return Step(self.number, 1.0, 0.0)

    def fileno(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


class Scheduler(module.SimulatedScheduler):
    """With what stands for the world around it."""

    def _find_pace(self) -> Any:
        return Pace()

    def step(self, *received: Any) -> None:
        self.process_input_requests(list(received))
        self.take_step()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Scheduler]:
    def scheduler(**settings: Any) -> Scheduler:
        small = {"PAGE_TOKENS": PAGE, "CHUNKED_PREFILL_TOKENS": 16, "CACHE_TOKENS": 400}
        small |= {"JOURNAL": tmp_path / "journal"}
        for name, value in (small | settings).items():
            monkeypatch.setenv(f"SIMULATED_{name}", str(value))
        monkeypatch.setattr(module, "find_placement", lambda *_: Placement(3, 4, True))
        monkeypatch.setattr(module, "open_writer", lambda *_: Writer())
        monkeypatch.setattr(module, "open_channels", lambda *_: Channels())
        return Scheduler(SimpleNamespace(skip_tokenizer_init=False), None)

    return scheduler


def prompt(rid: str, tokens: int, output: int | None = 3, **more: Any) -> Any:
    ids = more.pop("ids", range(tokens))
    return make_request(rid, ids, sampling_params=SamplingParams(max_new_tokens=output), **more)


def rids(reqs: Any) -> list[str]:
    return [req.rid for req in reqs]


def test_states_at_the_seams_are_those_of_sglang(make: Callable[..., Scheduler]) -> None:
    sched = make()
    sched.step(prompt("a", 8, 2), prompt("b", 20, 3))
    assert rids(sched.last_batch.reqs) == ["a", "b"]
    assert sched.last_batch.forward_mode.is_extend()
    assert sched.running_batch.reqs == []
    assert sched.chunked_req.rid == "b"
    sched.step(prompt("c", 8))
    assert rids(sched.running_batch.reqs) == ["a"]
    assert rids(sched.last_batch.reqs) == ["b", "c"]
    assert sched.chunked_req is None
    sched.step()
    assert sched.last_batch is sched.running_batch
    assert not sched.last_batch.forward_mode.is_extend()
    finished = {req.rid: req.finished() for req in sched.running_batch.reqs}
    assert finished == {"a": True, "b": False, "c": False}, "it stays until the next step"
    sched.step()
    assert rids(sched.running_batch.reqs) == ["b", "c"]
    sched.step()
    assert sched.last_batch is None
    assert sched.ipc_channels.ended() == {"a": "length", "b": "length", "c": "length"}


def test_the_queue_holds_what_found_no_place(make: Callable[..., Scheduler]) -> None:
    sched = make(MAX_RUNNING_REQUESTS=1)
    sched.step(prompt("a", 8), prompt("b", 8))
    assert rids(sched.waiting_queue) == ["b"]


def test_while_others_work_an_idle_rank_has_an_idle_batch(make: Callable[..., Scheduler]) -> None:
    sched = make()
    sched.pace.others = True
    for _ in range(29):
        sched.step()
    mode = sched.last_batch.forward_mode
    assert (mode.is_idle(), mode.is_extend(), sched.last_batch.reqs) == (True, False, [])
    assert len(sched.load_snapshot_writer.written) == 1, "each 15th step"
    assert sched.counts.steps == 29
    assert sched.counts.worked_seconds == 0
    sched.pace.others = False
    sched.step()
    assert sched.last_batch is None
    assert len(sched.load_snapshot_writer.written) == 2, "at once when all are idle"


def test_snapshots_come_on_prefill_and_each_fifteenth_decode(
    make: Callable[..., Scheduler],
) -> None:
    sched = make()
    sched.step(prompt("a", 8, 32), prompt("b", 20, 32, ids=range(100, 120)))
    [first] = sched.load_snapshot_writer.written
    assert (first.dp_rank, first.num_running_reqs, first.num_waiting_reqs) == (3, 0, 0)
    assert first.num_waiting_uncached_tokens == 12, "what the chunks still lack"
    sched.step()
    for _ in range(30):
        sched.step()
    written = sched.load_snapshot_writer.written
    assert [each.num_running_reqs for each in written] == [0, 1, 2, 2]
    # 28 prompt tokens, and 1 + 15 tokens of each answer when the 15th step is over
    assert written[2].num_total_tokens == written[2].num_used_tokens == 28 + 2 * 16


def test_the_next_turn_finds_the_answer_in_the_cache(
    make: Callable[..., Scheduler], tmp_path: Path
) -> None:
    sched = make()
    ids = list(range(10))
    sched.step(prompt("a", 0, 6, ids=ids))
    req = sched.last_batch.reqs[0]
    for _ in range(6):
        sched.step()
    # The last answer token was never read: 15 of 16 tokens are computed, 3 whole pages.
    turn = [*ids, *req.output_ids, 1, 2, 3]
    sched.step(prompt("b", 0, 6, ids=turn))
    assert sched.last_batch.reqs[0].cached == 12
    sched.step(prompt("c", 0, 6, ids=turn, extra_key="another namespace"))
    assert sched.last_batch.reqs[-1].cached == 0
    lines = (tmp_path / "journal").read_text().splitlines()
    assert lines == ["a\t3\t0", "b\t3\t12", "c\t3\t0"]
    assert read_journal(tmp_path / "journal") == {"a": 3, "b": 3, "c": 3}


def test_aborts_reach_requests_wherever_they_are(make: Callable[..., Scheduler]) -> None:
    sched = make(MAX_RUNNING_REQUESTS=3)
    sched.step(prompt("running", 4, 50))
    sched.step(prompt("fresh", 4, 50), prompt("chunked", 40, 50), prompt("queued", 4, 50))
    assert sched.chunked_req.rid == "chunked"
    sched.process_input_requests([AbortReq(abort_all=True)])
    aborted = {output.rid for output in sched.ipc_channels.sent if isinstance(output, AbortReq)}
    assert aborted == {"queued"}
    sched.take_step()
    assert sched.ipc_channels.ended() == {"running": "abort", "fresh": "abort"}
    aborted = {output.rid for output in sched.ipc_channels.sent if isinstance(output, AbortReq)}
    assert aborted == {"queued", "chunked"}
    assert sched.is_fully_idle()
    assert sched.rank.load().tokens == 0
    sched.step()
    assert sched.last_batch is None
    assert sched.running_batch.reqs == []


def test_a_prompt_that_never_fits_is_refused(make: Callable[..., Scheduler]) -> None:
    sched = make()
    sched.step(prompt("long", 401))
    assert sched.ipc_channels.ended() == {"long": "abort"}
    sched.step(prompt("cut", 399, 50))
    for _ in range(30):
        sched.step()
    assert sched.ipc_channels.ended()["cut"] == "length"
    assert sched.ipc_channels.sent[-1].completion_tokens == [1]


def test_an_answer_without_limit_stops_by_itself(make: Callable[..., Scheduler]) -> None:
    sched = make(DEFAULT_OUTPUT_TOKENS=5)
    sched.step(prompt("a", 8, None))
    for _ in range(5):
        sched.step()
    assert sched.ipc_channels.ended() == {"a": "stop"}


def test_a_flush_waits_for_requests(make: Callable[..., Scheduler]) -> None:
    sched = make()
    flush = FlushCacheReqInput()
    sched.step(prompt("a", 8), flush)
    for _ in range(5):
        sched.step()
    sched.step(flush)
    answers = [output.success for output in sched.ipc_channels.sent if hasattr(output, "success")]
    assert answers == [False, True]


def test_the_order_to_stop_is_seen_while_a_step_hangs(make: Callable[..., Scheduler]) -> None:
    sched = make()
    late = [prompt("a", 8)]
    sched._read = lambda: late
    assert not sched._is_told_to_stop()
    late = [ShutdownReq()]
    assert sched._is_told_to_stop()
    sched.last_batch = sched.running_batch
    late = []
    assert [type(each).__name__ for each in sched._receive()][-1] == "ShutdownReq"
    sched._inbox = [ShutdownReq()]
    sched.run_event_loop()
    assert sched.pace.closed
