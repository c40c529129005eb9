"""What a scheduler found in its prefix cache, read from fakes and SGLang's own classes."""

import inspect
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("sglang")
from sglang.srt.managers import scheduler as module
from sglang.srt.managers.io_struct import FlushCacheReqInput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hook import patches
from sglang_hook.scheduler_seam import _rest
from sglang_hook.wrapping import MARK
from sidecar.wire import LoadReport

from .test_seams import make_scheduler, make_seam, snapshots


def request(prompt: int = 100, cached: int = 0, **more: Any) -> Any:
    fields = {"finished": lambda: False, "seqlen": prompt, "cached_tokens": cached} | more
    return SimpleNamespace(origin_input_ids=range(prompt), **fields)


def extend(*reqs: Any) -> Any:
    batch = SimpleNamespace(reqs=list(reqs), forward_mode=ForwardMode.EXTEND)
    batch.copy = lambda: SimpleNamespace(reqs=list(batch.reqs), forward_mode=batch.forward_mode)
    return batch


class Rank:
    """A fake scheduler, hooked; `look` is a step an interval later."""

    def __init__(self, **more: Any) -> None:
        self.scheduler, _ = make_scheduler(**more)
        self.seam, self.push, self.now = make_seam(self.scheduler)

    def look(self, last_batch: Any = None, chunked: Any = None) -> LoadReport:
        self.scheduler.last_batch, self.scheduler.chunked_req = last_batch, chunked
        self.now[0] += 1
        self.seam.step([])
        report = self.push.reports[-1]
        assert isinstance(report, LoadReport)
        return report

    def figures(self, last_batch: Any = None, chunked: Any = None) -> tuple[int, int]:
        report = self.look(last_batch, chunked)
        return report.admitted_tokens, report.cached_tokens


def test_each_request_is_counted_with_its_first_prefill() -> None:
    rank = Rank()
    first, second = extend(request(100, 64), request(50)), extend(request(30, 16))
    assert rank.figures() == (0, 0)
    assert rank.figures(first) == (150, 64)
    assert rank.figures(first) == (150, 64), "a paused engine shows a batch again and again"
    assert rank.figures(second) == (180, 80)


def test_later_chunks_and_new_prefills_of_retracted_requests_are_not_counted() -> None:
    rank = Rank()
    long = request(1000, 64)
    assert rank.figures(extend(request(10), long), long) == (1010, 64)
    long.cached_tokens = 500
    assert rank.figures(extend(long, request(20, 8)), long) == (1030, 72)


def test_only_prefills_are_read() -> None:
    rank = Rank()
    decode = SimpleNamespace(reqs=[request()], forward_mode=ForwardMode.DECODE)
    assert rank.figures(decode) == (0, 0)
    # With DP attention a decoding batch may run as one of prefill; its requests were seen before.
    rank.scheduler.running_batch = extend(request())
    assert rank.figures(rank.scheduler.running_batch) == (0, 0)


def test_a_prompt_in_chunks_lacks_what_no_chunk_holds_yet() -> None:
    rank = Rank()
    assert rank.look(chunked=request(1000, extend_end=300)).prefilling_tokens == 700
    old = SimpleNamespace(start=300, end=400)
    assert rank.look(chunked=request(1000, extend_range=old)).prefilling_tokens == 600
    assert rank.look(chunked=request(1000, extend_range=None)).prefilling_tokens == 1000
    assert rank.look().prefilling_tokens == 0


def test_progress_of_a_prefill_makes_a_report_due() -> None:
    rank = Rank()
    chunked = request(1000, extend_end=100)
    rank.look(chunked=chunked)
    rank.now[0] += 0.006
    rank.seam.step([])
    assert len(rank.push.reports) == 1, "unchanged, before the heartbeat"
    chunked.extend_end = 200
    rank.now[0] += 0.006
    rank.seam.step([])
    assert [report.prefilling_tokens for report in rank.push.reports] == [900, 800]


@snapshots
def test_disaggregated_schedulers_report_figures_of_their_snapshot() -> None:
    from sglang.srt.managers.load_snapshot import LoadSnapshot

    rank = Rank(disaggregation_mode=SimpleNamespace(name="PREFILL"))
    assert rank.figures(extend(request(100, 10))) == (0, 0)
    chunked = request(50, extend_end=20)
    rank.scheduler.chunked_req = chunked
    rank.scheduler.load_snapshot_writer.write(LoadSnapshot(num_running_reqs=1))
    report = rank.look(extend(chunked), chunked)
    assert (report.running, report.prefilling_tokens) == (1, 30)
    assert (report.admitted_tokens, report.cached_tokens) == (100, 10)


class Broken:
    """Raises at whatever is read of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    "strange",
    [
        {"last_batch": extend(Broken()), "chunked": Broken()},
        {"last_batch": Broken()},
        {"last_batch": extend(SimpleNamespace(finished=lambda: False))},
        {"chunked": SimpleNamespace(finished=lambda: False)},
        {"last_batch": extend(request(cached=None))},  # type: ignore[arg-type]
    ],
    ids=["raising", "raising batch", "no attributes", "chunked without", "no number"],
)
def test_what_cannot_be_read_is_logged_once_and_loads_go_on(
    strange: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank()
    # What counts running requests reads the same batch; here only our figures are at stake.
    rank.seam._sample = lambda: rank.seam._sample_of(7, 0)
    for _ in range(3):
        report = rank.look(**strange)
    assert (report.running, report.seq) == (7, 3)
    assert (report.prefilling_tokens, report.admitted_tokens, report.cached_tokens) == (0, 0, 0)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert rank.figures(extend(request(5, 2))) == (5, 2), "it sees again what it can"


# ------------------------------------------------------------ SGLang's own classes


@pytest.fixture
def real() -> Iterator[Any]:
    """SGLang's own Scheduler, hooked; as much of it as flush_cache touches."""
    patches._attach_scheduler(module)
    scheduler = module.Scheduler.__new__(module.Scheduler)
    scheduler.__dict__.update(make_scheduler()[0].__dict__, _engine_paused=False)
    for name in (
        *("tree_cache", "req_to_token_pool", "token_to_kv_pool_allocator", "grammar_manager"),
        *("metrics_reporter", "draft_worker", "device_module"),
    ):
        setattr(scheduler, name, MagicMock())
    return scheduler


def flush_handler(scheduler: Any, bound: Any) -> Any:
    """What answers /flush_cache."""
    if hasattr(scheduler, "flush_cache_wrapped"):  # 0.5.12
        scheduler._pending_flush = None
        return scheduler.flush_cache_wrapped
    from sglang.srt.managers.scheduler_components.flush_wrapper import SchedulerFlushWrapper

    names = inspect.signature(SchedulerFlushWrapper).parameters  # they differ with the release
    wrapper = SchedulerFlushWrapper(**dict.fromkeys(names, MagicMock()) | {"flush_cache": bound})
    return wrapper.handle


def test_flushes_count_when_they_succeed_whoever_asks(real: Any) -> None:
    # Bound before the first step makes the seam, as SGLang does in Scheduler.__init__.
    bound = real.flush_cache
    handle = flush_handler(real, bound)
    real.is_fully_idle = lambda **_: True
    assert bound(empty_cache=False) is True, "before there is a seam: nothing is cached"
    seam, push, _ = make_seam(real)
    real._dp_sidecar = seam
    seam.step([])
    real.is_fully_idle = lambda **_: False
    assert handle(FlushCacheReqInput()).success is False
    seam.step([])
    assert [report.flushes for report in push.reports] == [0]
    real.is_fully_idle = lambda **_: True
    assert handle(FlushCacheReqInput()).success is True
    seam.step([])
    assert [report.flushes for report in push.reports] == [0, 1], "at once"
    assert bound(empty_cache=False) is True, "so a weight update does"
    seam.step([])
    assert push.reports[-1].flushes == 2
    assert real.tree_cache.reset.call_count == 3


def test_a_scheduler_without_flush_cache_still_reports() -> None:
    class Bare:
        publish_load_snapshot = process_input_requests = lambda self, *_: None

    patches._attach_scheduler(SimpleNamespace(Scheduler=Bare))  # type: ignore[arg-type]
    assert hasattr(Bare.process_input_requests, MARK)


def test_what_is_read_of_a_request_is_there() -> None:
    req = Req("r", "", array("q", range(100)), SamplingParams(max_new_tokens=1))
    assert (len(req.origin_input_ids), req.cached_tokens, req.seqlen) == (100, 0, 100)
    assert _rest(req) == 100
    if hasattr(req, "extend_end"):
        req.extend_end = 30
    elif hasattr(req, "set_extend_range"):
        req.set_extend_range(0, 30)
    elif hasattr(req, "fill_len"):
        req.fill_len = 30
    else:
        req.fill_ids = list(req.origin_input_ids)[:30]
    assert _rest(req) == 70
    rank = Rank()
    batch = ScheduleBatch(reqs=[req], forward_mode=ForwardMode.EXTEND)
    rank.seam._sample = lambda: rank.seam._sample_of(0, 0)
    assert rank.figures(batch) == rank.figures(batch) == (100, 0)
