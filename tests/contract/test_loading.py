"""How the hook comes into SGLang's processes, and what it says where it cannot."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
import sglang
from sglang.srt.managers import data_parallel_controller as module
from sglang.srt.managers import scheduler as scheduler_module

from bench.stock import make_controller
from sglang_hook import controller_seam, patches
from sglang_hook.controller_seam import ControllerSeam
from sglang_hook.reading import numbers
from sglang_hook.sending import LISTENERS
from sglang_hook.settings import Settings
from sglang_hook.wrapping import SeamMissing

from .conftest import RANKS, Worker, generate

SGLANG = Path(next(iter(sglang.__path__)))
ENDPOINT = "ipc:///nonexistent/q"


def run(code: str, **env: str) -> str:
    """What a process of its own prints; its log too."""
    import os

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    return done.stdout + done.stderr


LOADED = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.entrypoints import engine
from sglang.srt.managers import data_parallel_controller, scheduler
from sglang.srt.managers import io_struct, multi_tokenizer_mixin
for owner, name in (
    (data_parallel_controller.DataParallelController, "__init__"),
    (scheduler.Scheduler, "process_input_requests"),
    (io_struct.GenerateReqInput, "__getitem__"),
    (multi_tokenizer_mixin, "write_to_shared_memory"),
):
    print(name, hasattr(getattr(owner, name), "_dp_sidecar_wrapped"))
print("controller", engine.run_data_parallel_controller_process.__module__)
"""


def test_without_its_variable_nothing_is_touched() -> None:
    text = run(LOADED, DP_SIDECAR_ENDPOINT="")
    assert text.count("False") == 4
    assert "controller sglang.srt" in text


@pytest.mark.parametrize("place", ["launch_server.py", "cli/serve.py", "srt/entrypoints/engine.py"])
def test_every_way_to_start_a_server_loads_plugins_first(place: str) -> None:
    assert "load_plugins()" in (SGLANG / place).read_text()


def test_its_processes_are_spawned() -> None:
    """What the main process patched is lost in them: each attaches by itself."""
    text = (SGLANG / "srt/entrypoints/engine.py").read_text()
    assert 'set_start_method("spawn", force=True)' in text


def test_schedulers_load_plugins() -> None:
    assert "load_plugins()" in (SGLANG / "srt/managers/scheduler.py").read_text()


READS = """
import sys
from sglang.srt.managers import io_struct, multi_tokenizer_mixin
print(multi_tokenizer_mixin.read_from_shared_memory(sys.argv[1]))
print(hasattr(io_struct.GenerateReqInput.__getitem__, "_dp_sidecar_wrapped"))
"""

WRITES = f"""{LOADED}
import os, subprocess, sys
name = f"dp_sidecar_test_{{os.getpid()}}"
memory = multi_tokenizer_mixin.write_to_shared_memory(("ports", {{"max": 1}}), name)
sys.stdout.flush()
subprocess.run([sys.executable, "-W", "ignore", "-c", {READS!r}, name], check=True)
memory.unlink()
"""


def test_sglang_loads_the_plugin_by_its_entry_point_and_http_workers_get_it_too() -> None:
    """--tokenizer-worker-num: they load no plugins, and would lose the keys of batches."""
    text = run(WRITES, DP_SIDECAR_ENDPOINT=ENDPOINT)
    assert "__getitem__ True" in text
    assert "write_to_shared_memory True" in text
    assert "controller sglang_hook.front" in text
    assert "not attached" not in text
    assert "('ports', {'max': 1})\nTrue" in text


# ---- what is not there


def fake(**changes: Any) -> Any:
    """A controller's module of a release to come."""

    class DataParallelController:
        dispatch_batch_generate = dispatch_batch_embedding = lambda self, batch: None

        def round_robin_scheduler(self, req: Any) -> None: ...

    parts = {
        "__name__": "future",
        "DataParallelController": DataParallelController,
        "TokenizedGenerateReqInput": int,
        "TokenizedEmbeddingReqInput": int,
        "sock_send": lambda socket, obj: None,
    }
    parts |= changes
    return SimpleNamespace(**{name: part for name, part in parts.items() if part is not None})


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("DataParallelController", "future has no DataParallelController"),
        ("TokenizedGenerateReqInput", "future has no TokenizedGenerateReqInput"),
        ("sock_send", "in a way unknown to this hook"),
    ],
)
def test_what_cannot_be_done_without_is_named(gone: str, words: str) -> None:
    with pytest.raises(SeamMissing, match=words):
        patches._attach_controller(fake(**{gone: None}))


def test_batches_can_be_done_without(caplog: pytest.LogCaptureFixture) -> None:
    future = fake()
    del future.DataParallelController.dispatch_batch_embedding
    patches._attach_controller(future)
    assert hasattr(future.DataParallelController.__init__, "_dp_sidecar_wrapped")
    [record] = caplog.records
    assert "has no dispatch_batch_embedding: one query for each request" in record.getMessage()


@pytest.mark.parametrize("gone", ["dispatching", "workers", "status"])
def test_a_controller_without_what_is_needed_dispatches_by_itself(
    gone: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "settings", lambda: Settings(endpoint=ENDPOINT))

    def made(self: Any) -> None:
        self.__dict__.update(make_controller([Worker(), Worker()]).__dict__)
        delattr(self, gone)

    future = type("Future", (), {"__init__": patches._hooked_init(made)})()
    assert not hasattr(future, "_dp_sidecar")
    [record] = caplog.records
    assert f"Future has no {gone}" in record.getMessage()
    assert record.exc_info is None


@pytest.mark.parametrize(("version", "lines"), [("0.5.23.post1", 0), ("0.5.24", 1), ("1.0", 1)])
def test_a_release_that_was_not_tested_is_named(
    version: str,
    lines: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patches._attach_controller(module)
    monkeypatch.setattr(
        controller_seam.ControllerSeam, "_about", lambda self: {"sglang": version, "method": ""}
    )
    controller = make_controller([Worker() for _ in range(RANKS)])
    with caplog.at_level(logging.WARNING):
        seam = ControllerSeam(controller, Settings(endpoint=ENDPOINT))
        seam.attach()
    seam.client.close()
    LISTENERS.clear()
    assert sum(f"SGLang {version} is newer" in r.getMessage() for r in caplog.records) == lines


def test_numbers_of_versions() -> None:
    assert numbers("0.5.12.post1") == (0, 5, 12)
    assert numbers("0.5.23rc1") == (0, 5, 23)
    assert numbers("unknown") == ()


def test_a_scheduler_without_requests_to_see_is_named() -> None:
    with pytest.raises(SeamMissing, match="Scheduler has no process_input_requests"):
        patches._attach_scheduler(
            SimpleNamespace(Scheduler=type("Scheduler", (), {}))  # type: ignore[arg-type]
        )
    assert hasattr(scheduler_module.Scheduler, "process_input_requests")


def test_without_the_hook_sglang_dispatches_as_ever() -> None:
    """Wrapped classes and functions, and no seam: as where attaching failed."""
    patches._attach_controller(module)
    controller = make_controller([Worker() for _ in range(RANKS)])
    for i in range(RANKS):
        controller.dispatching_with_trace(generate(f"r{i}", "k"))
    controller.dispatch_batch_generate([generate(f"b{i}") for i in range(RANKS)])
    assert [len(worker.got) for worker in controller.workers] == [2] * RANKS
