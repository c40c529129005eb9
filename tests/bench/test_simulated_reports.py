"""A simulated scheduler under the real hook: what is reported is what its rank knows."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput

from sglang_hook import patches
from sglang_hook.reporter import Sample
from sglang_hook.settings import Settings
from tests.bench import test_simulated
from tests.bench.test_simulated import prompt

make = test_simulated.make


@pytest.fixture
def sched(make: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    class Hooked(test_simulated.Scheduler):
        """A class of its own, so that the hook stays on no other."""

    monkeypatch.setattr(patches, "settings", lambda: Settings(endpoint="ipc:///nonexistent/q"))
    monkeypatch.setattr(test_simulated, "Scheduler", Hooked)
    patches._attach_scheduler(SimpleNamespace(Scheduler=Hooked))  # type: ignore[arg-type]
    made = make()
    made.process_input_requests([])
    yield made
    made._dp_sidecar.reporter.close()


def look(sched: Any) -> Sample:
    sched.process_input_requests([])
    sample = sched._dp_sidecar._sample()
    assert isinstance(sample, Sample)
    rank = sched.rank
    told = (sample.admitted_tokens, sample.cached_tokens, sample.prefilling_tokens)
    rest = 0 if rank.chunked is None else rank.chunked.uncached
    assert told == (rank.prompt_tokens, rank.cached_tokens, rest)
    return sample


def test_admitted_and_cached_are_what_the_rank_says(sched: Any) -> None:
    rests = []
    for turn in range(40):
        ids = [turn % 3, *range(40 + turn)]
        sched.step(prompt(f"a{turn}", 0, 3, ids=ids), prompt(f"b{turn}", 8, 1))
        rests.append(look(sched).prefilling_tokens)
    sched.process_input_requests([AbortReq(abort_all=True)])
    for _ in range(5):
        sched.step()
        look(sched)
    sample = look(sched)
    assert 0 < sample.cached_tokens < sample.admitted_tokens
    assert len(set(rests)) > 2
    assert sample.running == sample.waiting == sample.prefilling_tokens == 0


def test_chunks_count_down(sched: Any) -> None:
    sched.step(prompt("long", 40))
    assert look(sched)[3:] == (24, 40, 0)
    sched.step()
    assert look(sched)[3:] == (8, 40, 0)
    sched.step()
    assert look(sched)[3:] == (0, 40, 0)


def test_flushes_are_counted_when_they_succeed(sched: Any) -> None:
    sched.step(prompt("a", 8))
    sched.step(FlushCacheReqInput())
    assert sched._dp_sidecar.reporter.flushes == 0
    for _ in range(5):
        sched.step()
    sched.step(FlushCacheReqInput())
    assert sched._dp_sidecar.reporter.flushes == 1
    sched.step(prompt("again", 8))
    sched.process_input_requests([])
    sample = sched._dp_sidecar._sample()
    assert (sample.admitted_tokens, sample.cached_tokens) == (16, 0), "a flush forgets no counts"
