"""An SGLang to come: this one's real classes, each seam removed in turn.

What is left attaches, one line of the log says what is missing, nothing raises.
"""

import logging
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("sglang")
from sglang.srt.entrypoints import engine
from sglang.srt.managers import data_parallel_controller as module
from sglang.srt.managers import io_struct, multi_tokenizer_mixin, scheduler

from bench.stock import make_controller
from sglang_hook import front, patches
from sglang_hook.settings import Settings
from sglang_hook.wrapping import MARK

from .conftest import RANKS, Worker, generate
from .test_seams import make_scheduler, make_seam

CONTROLLER = module.DataParallelController
SENDS = "sock_send" if hasattr(module, "sock_send") else None

SEAMS: dict[str, tuple[Any, str]] = {
    "controller": (CONTROLLER, "__init__"),
    "generate batches": (CONTROLLER, "dispatch_batch_generate"),
    "embedding batches": (CONTROLLER, "dispatch_batch_embedding"),
    "scheduler": (scheduler.Scheduler, "process_input_requests"),
    "flush": (scheduler.Scheduler, "flush_cache"),
    "slices": (io_struct.GenerateReqInput, "__getitem__"),
    "tokenizers": (multi_tokenizer_mixin, "write_to_shared_memory"),
}
WHOLE_CONTROLLER = {"controller", "generate batches", "embedding batches"}

REMOVED = [
    # owner, name, seams that are gone with it, whether a line of the log names it
    (module, "DataParallelController", WHOLE_CONTROLLER, True),
    (module, "TokenizedGenerateReqInput", WHOLE_CONTROLLER, True),
    (module, "TokenizedEmbeddingReqInput", WHOLE_CONTROLLER, True),
    (CONTROLLER, "dispatch_batch_generate", {"generate batches"}, True),
    (CONTROLLER, "dispatch_batch_embedding", {"embedding batches"}, True),
    (engine, "run_data_parallel_controller_process", set(), True),
    (io_struct, "GenerateReqInput", {"slices"}, True),
    (multi_tokenizer_mixin, "write_to_shared_memory", {"tokenizers"}, True),
    (scheduler, "Scheduler", {"scheduler", "flush"}, True),
    (scheduler.Scheduler, "process_input_requests", {"scheduler", "flush"}, True),
    (scheduler.Scheduler, "flush_cache", {"flush"}, False),
    *([(module, SENDS, WHOLE_CONTROLLER, True)] if SENDS else []),
]


def attached() -> set[str]:
    return {
        name for name, (owner, part) in SEAMS.items() if hasattr(getattr(owner, part, None), MARK)
    }


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """SGLang as before any test, in a main process with the hook on; put back at the end."""
    wrapped = [*SEAMS.values(), *([(module, SENDS)] if SENDS else [])]
    for owner, name in wrapped:
        found = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(found, "__wrapped__", found))
    run = engine.run_data_parallel_controller_process
    if run is front.run_controller_process:
        run = module.run_data_parallel_controller_process
    monkeypatch.setattr(engine, "run_data_parallel_controller_process", run)
    monkeypatch.setattr(patches, "settings", lambda: Settings(endpoint="ipc:///nonexistent/q"))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    yield monkeypatch


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "dp_sidecar" in r.getMessage()]


def test_with_all_of_them_everything_attaches(bare: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert not attached()
    patches.install()
    assert attached() == set(SEAMS)
    assert engine.run_data_parallel_controller_process is front.run_controller_process
    assert not said(caplog)


@pytest.mark.parametrize(
    ("owner", "name", "gone", "told"),
    REMOVED,
    ids=[f"{owner.__name__.split('.')[-1]}.{name}" for owner, name, _, _ in REMOVED],
)
def test_without_one_of_them_the_others_attach(
    owner: Any,
    name: str,
    gone: set[str],
    told: bool,
    bare: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bare.delattr(owner, name)
    patches.install()
    assert attached() == set(SEAMS) - gone
    lines = said(caplog)
    assert len(lines) == told
    assert all(f"has no {name}" in line or "unknown to this hook" in line for line in lines)
    if name in ("DataParallelController", SENDS):
        return  # SGLang itself does not dispatch without
    controller = make_controller([Worker() for _ in range(RANKS)])
    for number in range(RANKS):
        controller.dispatching_with_trace(generate(f"r{number}", "k"))
    assert [len(worker.got) for worker in controller.workers] == [1] * RANKS


def test_what_is_no_function_any_more_stops_nothing(
    bare: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A seam of another kind: whatever wrapping it raises is told, and the rest attaches."""

    class Fixed:
        __slots__ = ()
        __getitem__ = 1

    bare.setattr(io_struct, "GenerateReqInput", Fixed())
    patches.install()
    assert attached() == set(SEAMS) - {"slices"}
    [line] = said(caplog)
    assert "not attached" in line


@pytest.mark.parametrize(
    "name",
    ["workers", "status", "server_args", "load_balance_method", "dispatching", "_active_workers"],
)
def test_a_controller_without_one_of_its_parts_still_dispatches(
    name: str, bare: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or, where SGLang itself cannot without it, fails as SGLang does: the hook stays away."""

    def made(self: Any) -> None:
        self.__dict__.update(make_controller([Worker() for _ in range(RANKS)]).__dict__)
        self.__dict__.pop(name, None)

    bare.setattr(CONTROLLER, "__init__", made)
    patches.install()
    with caplog.at_level(logging.INFO):
        controller = CONTROLLER()
    if name == "_active_workers":  # 0.5.16: as before it, all workers count
        assert "attached to the controller" in said(caplog)[0]
        controller._dp_sidecar.client.close()
        return
    assert not hasattr(controller, "_dp_sidecar")
    [line] = said(caplog)
    assert f"has no {name}" in line


@pytest.mark.parametrize("name", ["waiting_queue", "running_batch", "last_batch", "chunked_req"])
def test_a_scheduler_without_one_of_its_parts_goes_on(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    real, _ = make_scheduler()
    seam, _, _ = make_seam(real)
    delattr(real, name)
    for _ in range(3):
        seam.step([generate()])
    assert seam.reporter.received == 3
    assert len(said(caplog)) <= 2


@pytest.mark.parametrize(
    "name", ["routing_key", "input_ids", "rid", "routed_dp_rank", "input_text"]
)
def test_a_request_without_one_of_its_fields_is_placed(
    name: str, make_harness: Callable[..., Any]
) -> None:
    """SGLang's own dispatch may read the field; then it is not ours to say that it cannot."""
    harness = make_harness()

    class Request:
        def __init__(self, real: Any) -> None:
            self.real = real

        def __getattr__(self, asked: str) -> Any:
            if asked == name:
                raise AttributeError(asked)
            return getattr(self.real, asked)

    assert harness.seam._rank_for(Request(generate("a", "k"))) == 5
    assert not harness.seam.chooser.bypassed
