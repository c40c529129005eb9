"""What README.md has a newcomer type: a server with simulated ranks, a routed request, a look."""

import contextlib
import json
import os
import urllib.request

import pytest

pytest.importorskip("sglang")

from tests.docs.sandbox import Sandbox
from tests.docs.table import NEWCOMER
from tests.integration.conftest import OLD, READY_SECONDS
from tests.processes import short_directory, wait_for

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(OLD, reason="README.md means the release that `make venv` installs"),
]


def listed(box: Sandbox) -> bool:
    """Whether /status lists the server, and the server is ready to be asked."""
    with contextlib.suppress(OSError):
        with urllib.request.urlopen(f"http://localhost:{box.port}/status", timeout=5) as body:
            return bool(json.load(body)["instances"])
    return False


def test_from_the_readme_to_a_routed_request() -> None:
    start, ask, where, look = NEWCOMER
    with short_directory() as folder:
        box = Sandbox(folder)
        # A busy test machine must not look like a slow sidecar.
        with box.start(start, DP_SIDECAR_DEADLINE_MS="500", PYTHONPATH=python_path()) as process:
            wait_for(lambda: listed(box) or process.process.poll() is not None, READY_SECONDS, 0.2)
            assert process.process.poll() is None, process.log()
            for _ in range(3):
                answered = box.run(ask)
                assert json.loads(answered.stdout)["usage"]["completion_tokens"] == 8, answered
            [session] = json.loads(box.run(where).stdout)
            [step] = session["steps"]
            assert (step["reason"], step["requests"]) == ("placed", 3)
            assert box.in_terminal(look, b"q") == 0
            assert process.stop() == 0, process.log()


def python_path() -> str:
    return os.environ.get("PYTHONPATH", "")
