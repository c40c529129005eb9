"""What SGLang's own controller has in its process once the hook is attached, and what it says."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.managers import data_parallel_controller as module

from bench.stock import make_controller
from sglang_hook import patches
from sglang_hook.controller_seam import ControllerSeam
from sglang_hook.sending import LISTENERS
from sglang_hook.settings import Settings
from tests.processes import short_directory, sidecar_process, wait_for

from .conftest import RANKS, Worker, generate


@pytest.fixture
def endpoint() -> Iterator[str]:
    with short_directory() as path:
        yield f"ipc://{path}/q"
    LISTENERS.clear()


def attached(endpoint: str) -> ControllerSeam:
    """A hooked controller with a client of its own."""
    patches._attach_controller(module)
    controller = make_controller([Worker() for _ in range(RANKS)])
    made = ControllerSeam(controller, Settings(endpoint=endpoint, deadline_ms=1000))
    made.attach()
    return made


def lines(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sglang_hook"]


def threads() -> dict[str, str]:
    """Id and name of every thread of this process, whoever made it."""
    tasks = Path("/proc/self/task").iterdir()
    return {task.name: (task / "comm").read_text().strip() for task in tasks}


@pytest.mark.parametrize("there", [True, False])
def test_no_thread_of_ours_beside_the_controllers(endpoint: str, there: bool) -> None:
    """But those of libzmq, which run no Python and so hold the interpreter from nobody."""
    python, before = threading.enumerate(), threads()
    if not there:
        made = attached(endpoint)
        made.controller.dispatching(generate("r", "key"))
    else:
        with sidecar_process(endpoint, "--admin-port=0"):
            made = attached(endpoint)

            def remote() -> bool:
                known = made.chooser.bypassed.total()
                made.controller.dispatching(generate("r", "key"))
                return made.chooser.bypassed.total() == known

            wait_for(remote, 60)
    assert threading.enumerate() == python
    new = threads().items() - before.items()
    assert new
    assert {name.partition("/")[0] for _, name in new} == {"ZMQbg"}
    made.client.close()


def test_one_line_says_that_nobody_answers(endpoint: str, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "sglang_hook"):
        made = attached(endpoint)
        for number in range(20):
            made.controller.dispatching(generate(f"r{number}", "key"))
    [line] = lines(caplog)
    assert f"sidecar at {endpoint} (no answer yet), else round_robin" in line
    assert made.chooser.bypassed.total() == 20
    made.client.close()


def test_one_line_says_that_somebody_does(endpoint: str, caplog: Any) -> None:
    with sidecar_process(endpoint, "--admin-port=0"):

        def greeted() -> bool:
            caplog.clear()
            with caplog.at_level(logging.INFO, "sglang_hook"):
                attached(endpoint).client.close()
            return f"sidecar at {endpoint}, else round_robin" in lines(caplog)[0]

        wait_for(greeted, 60)
        assert len(lines(caplog)) == 1
