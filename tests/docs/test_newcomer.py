"""What README.md has a newcomer type: a server with simulated ranks, a routed request, a look."""

import json

import pytest

pytest.importorskip("sglang")

from tests.docs.sandbox import Sandbox
from tests.docs.table import NEWCOMER
from tests.integration.conftest import OLD, READY_SECONDS
from tests.processes import Running, short_directory, wait_for

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(OLD, reason="README.md means the release that `make venv` installs"),
]


def ended(process: Running) -> bool:
    return process.process.poll() is not None


def test_from_the_readme_to_a_routed_request() -> None:
    start, ask, where, look = NEWCOMER
    with short_directory() as folder:
        box = Sandbox(folder)
        # A busy test machine must not look like a slow sidecar.
        with box.start(start, DP_SIDECAR_DEADLINE_MS="500") as process:
            wait_for(lambda: "ready to roll" in process.log() or ended(process), READY_SECONDS, 0.2)
            assert not ended(process), process.log()
            for _ in range(3):
                answered = box.run(ask)
                assert json.loads(answered.stdout)["usage"]["completion_tokens"] == 8, answered
            details = json.loads(answered.stdout)["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] > 0, "the page says so"
            [session] = json.loads(box.run(where).stdout)
            [step] = session["steps"]
            assert (step["reason"], step["requests"]) == ("placed", 3)
            code, shown = box.in_terminal(look, b"q")
            assert code == 0, shown
            assert process.stop() == 0, process.log()
