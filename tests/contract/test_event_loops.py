"""SGLang's own event loops, with nothing to run: which batches they show to the hook."""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("sglang")
from sglang.srt.managers import scheduler as module
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from .test_prefix_figures import Rank, extend, request


class Over(Exception):
    """Ends an event loop; before 0.5.14 nothing else does."""


@pytest.mark.parametrize("loop", ["event_loop_normal", "event_loop_overlap"])
def test_the_event_loops_show_each_batch_before_they_filter_it(loop: str) -> None:
    rank = Rank()
    long = request(500, 128)
    batches = [
        extend(request(100, 10)),
        extend(request(20), long),
        extend(long, request(30, 5)),
        None,
        SimpleNamespace(reqs=[long], forward_mode=ForwardMode.DECODE, copy=lambda: None),
        extend(request(7, 3)),
        None,
    ]
    real: Any = MagicMock(wraps=None, _engine_paused=False, gracefully_exit=False, last_batch=None)
    real.is_disable_overlap_for_batch.return_value = False
    real.get_next_batch_to_run.side_effect = plans(real, batches)
    seen = steps(rank, real)
    real.ingest_requests.side_effect = real.process_input_requests.side_effect = seen
    with suppress(Over):
        getattr(module.Scheduler, loop)(real)
    assert real.run_batch.call_count == 5
    reporter = rank.seam.reporter
    assert (reporter.admitted_tokens, reporter.cached_tokens) == (657, 146)


def plans(real: Any, batches: list[Any]) -> Callable[..., Any]:
    """Like SGLang's planning, which first takes all requests out of the batch run last."""
    rest = iter(batches)

    def plan(*given: Any, **named: Any) -> Any:
        if real.last_batch is not None:
            real.last_batch.reqs = []
        batch = next(rest, real)
        if batch is real:
            raise Over
        if not (given or named):  # before 0.5.16
            return batch
        return SimpleNamespace(running_batch=rank_running, batch_to_run=batch)

    rank_running = SimpleNamespace(reqs=[])
    return plan


def steps(rank: Rank, real: Any) -> Callable[..., None]:
    def step(*_: Any) -> None:
        rank.look(real.last_batch)

    return step
