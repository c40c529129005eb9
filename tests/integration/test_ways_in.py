"""Servers of other kinds, each started anew: for `make test-matrix`, on its first and last release.

Without the hook; with several tokenizer processes; with one rank; `sgl.Engine` in our process.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.demo import Sidecar
from bench.simulated.model import write_model
from sidecar.hashing import key_hash, preferred

from .conftest import READY_SECONDS, eventually, serving
from .test_live import LONG

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not os.environ.get("EVERY_WAY"), reason="EVERY_WAY=1: minutes"),
    # A server each; the busy machine of a matrix takes two minutes to start one.
    pytest.mark.timeout(600),
]
RANKS = 2
SHAPES = pytest.mark.parametrize("shape", [["--plain-dp"], []], ids=["plain", "attention"])


def home(key: str) -> int:
    return preferred(key_hash(key.encode()), range(RANKS))


@SHAPES
def test_without_its_variable_sglang_is_as_ever(tmp_path: Path, shape: list[str]) -> None:
    with serving(tmp_path, RANKS, *shape, DP_SIDECAR_ENDPOINT="") as live:
        before = set(live.ranks())
        for number in range(8):
            assert live.chat("one key", f"{number} {LONG}").status_code == 200
        placed = [rank for rid, rank in live.ranks().items() if rid not in before]
        assert Counter(placed) == {0: 4, 1: 4}, "round robin, whatever the key"
        assert live.rank_of(live.chat("pinned", "x", routed_dp_rank=1)) == 1
        assert not live.status(), "the sidecar never heard of it"
        assert "dp_sidecar" not in live.server.log_path.read_text()


def test_several_tokenizers(tmp_path: Path) -> None:
    """They are processes that load no plugins; each keeps the key of a batch all the same."""
    env = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "300"}  # the busy machine
    with serving(tmp_path, RANKS, "--plain-dp", "--tokenizer-worker-num", "2", **env) as live:
        for number in range(8):  # whichever of the two answers
            key = f"tokenizers-{number}"
            answers = live.generate(text=[f"{number} a b", "c d", "e f"], routing_key=key).json()
            # By their ids: the second process may be warming up meanwhile.
            placed = [live.ranks()[answer["meta_info"]["id"]] for answer in answers]
            assert placed == [home(key)] * 3
        assert live.rank_of(live.chat("chat", LONG)) == home("chat")
        assert not live.status()["bypassed"]
        assert "dp_sidecar: not attached" not in live.server.log_path.read_text()


@pytest.mark.parametrize("method", ["follow_bootstrap_room", "round_robin"])
def test_a_prefill_server(tmp_path: Path, method: str) -> None:
    args = ("--plain-dp", "--disaggregation-mode", "prefill", "--load-balance-method", method)
    with serving(tmp_path, RANKS, *args) as live:
        before = set(live.ranks())
        for room in range(6):
            where = {"bootstrap_host": "2.2.2.2", "bootstrap_room": room}
            assert live.generate(text=LONG, routing_key="one key", **where).status_code == 200
        placed = [rank for rid, rank in live.ranks().items() if rid not in before]
        follows = method == "follow_bootstrap_room"
        assert Counter(placed) == ({0: 3, 1: 3} if follows else {home("one key"): 6})
        assert bool(live.status()["decisions"]) is not follows


def test_one_rank_leaves_the_hook_nothing_to_do(tmp_path: Path) -> None:
    with serving(tmp_path, 1) as live:
        for number in range(4):
            assert live.rank_of(live.chat("one key", f"{number} {LONG}")) == 0
        assert not live.status().get("decisions")
        log = live.server.log_path.read_text()
        assert "attached to the controller" not in log
        assert "ERROR: " not in "".join(line for line in log.splitlines() if "dp_sidecar" in line)


ENGINE = """
import sys
from bench.simulated.process import run_simulated_scheduler_process
from sglang.srt.entrypoints.engine import Engine

class Simulated(Engine):
    run_scheduler_process_func = staticmethod(run_simulated_scheduler_process)

if __name__ == "__main__":
    engine = Simulated(
        model_path=sys.argv[1], device="cpu", load_format="dummy", dp_size=2, log_level="info"
    )
    for turn in range(6):
        prompts = [f"{i} the of and to" * 20 for i in range(4)]
        answers = engine.generate(prompts, {"max_new_tokens": 2})
        assert len(answers) == 4 and all(answer["text"] for answer in answers), answers
    print("answered", flush=True)
    sys.stdin.readline()
    engine.shutdown()
"""


def test_an_engine_in_process(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    script = tmp_path / "engine_script.py"
    script.write_text(ENGINE)
    sidecar = Sidecar(tmp_path, "prefix_affinity")
    sidecar.start()
    env = os.environ | {"DP_SIDECAR_ENDPOINT": sidecar.endpoint, "DP_SIDECAR_DEADLINE_MS": "500"}
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "model")]
    log = tmp_path / "engine.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
        )
    try:
        eventually(
            lambda: b"\nanswered" in log.read_bytes() or process.poll() is not None, READY_SECONDS
        )
        assert b"\nanswered" in log.read_bytes(), log.read_text()[-4000:]
        assert log.read_text().count("attached to the controller") == 1
        status = sidecar.status() or {}
        assert sum(sum(counts.values()) for counts in status["decisions"].values()) == 24
        assert len(status["ranks"]) == 2
        assert sum(rank["sent"] for rank in status["ranks"]) >= 20, "the last query told so many"
    finally:
        end(process)
        sidecar.stop()


def end(process: "subprocess.Popen[bytes]") -> None:
    """Close its input, on which it ends; else kill it and all that it started."""
    import psutil

    tree = []
    if process.poll() is None:
        tree = psutil.Process(process.pid).children(recursive=True)
    assert process.stdin
    process.stdin.close()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in tree:
        if child.is_running():
            child.kill()
    psutil.wait_procs(tree, timeout=10)
