"""`sglang serve` with its real schedulers on the CPU: a real radix cache, dummy weights."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests

pytest.importorskip("sglang")

from bench.demo import Sidecar
from bench.simulated.launch import free_port
from bench.simulated.model import write_model
from bench.simulated.server import _load_files

from .conftest import OLD, READY_SECONDS, eventually
from .tap import Tap

CHUNK = 64
"""Prompt tokens in a prefill step: the prompts here take several."""

pytestmark = pytest.mark.skipif(OLD, reason="the old release is tested with simulated ranks")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    write_model(folder / "model")
    sidecar = Sidecar(folder)
    sidecar.start()
    port = free_port()
    arguments = (
        f"--model-path {folder / 'model'} --served-model-name real --port {port} --dp-size 2 "
        "--device cpu --load-format dummy --attention-backend torch_native --max-total-tokens 4096 "
        "--disable-overlap-schedule --enable-cache-report --sleep-on-idle --log-level warning "
        f"--chunked-prefill-size {CHUNK}"
    )
    tap = Tap(folder, sidecar.endpoint)
    env = {
        **os.environ,
        "DP_SIDECAR_ENDPOINT": tap.endpoint,
        "DP_SIDECAR_DEADLINE_MS": "500",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0",
    }
    log = (folder / "server.log").open("wb")
    process = subprocess.Popen(
        [Path(sys.executable).with_name("sglang"), "serve", *arguments.split()],
        env=env,
        stdout=log,
        stderr=log,
    )
    try:
        wait_ready(process, port, folder / "server.log")
        yield f"http://127.0.0.1:{port}", sidecar, tap
    finally:
        tree = [psutil.Process(process.pid)]
        tree += tree[0].children(recursive=True)
        files = _load_files(tree)
        for one in tree:
            one.send_signal(signal.SIGKILL)
        process.wait()
        psutil.wait_procs(tree, timeout=10)
        for file in files:
            Path(file).unlink(missing_ok=True)
        log.close()
        tap.stop()
        sidecar.stop()


def wait_ready(process, port, log):
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if requests.get(f"http://127.0.0.1:{port}/health_generate", timeout=5).ok:
                return
        except requests.RequestException:
            time.sleep(0.25)
    raise AssertionError(f"never ready: {log.read_text()[-4000:]}")


def ask(url, key, turn):
    """Tokens found cached and of the prompt, as the answer says; turns of a key grow."""
    content = f"{key[-1]} the of and to in is that it " * 10 * (turn + 1)
    body = {"model": "real", "messages": [{"role": "user", "content": content}]}
    response = requests.post(
        f"{url}/v1/chat/completions",
        json=body | {"max_tokens": 4},
        headers={"x-smg-routing-key": key},
        timeout=60,
    )
    usage = response.json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def test_sessions_find_their_cache_and_the_load_returns_to_zero(server):
    url, sidecar, _ = server
    for key in (f"session-{i}" for i in range(4)):
        first, _ = ask(url, key, 0)
        second, prompt = ask(url, key, 1)
        assert first < 20
        assert second > prompt * 0.4
    status = sidecar.status()
    assert status["decisions"] == {"kv_affinity": {"placed": 4, "affinity_hit": 4}}

    def idle():
        return all(
            rank["sent"] == rank["received"] and not rank["running"] + rank["waiting"]
            for rank in sidecar.status()["ranks"]
        )

    assert eventually(idle)
    assert sum(rank["received"] for rank in sidecar.status()["ranks"]) >= 8 + 2


def test_reports_say_what_the_engine_found_in_its_cache(server):
    url, _, tap = server
    before = tap.settled()
    for turn in range(3):
        cached, prompt = ask(url, "truth-5", turn)
        assert prompt > CHUNK
        assert cached > 20 or turn == 0
        after = tap.settled()
        assert after["admitted_tokens"] - before["admitted_tokens"] == prompt
        assert after["cached_tokens"] - before["cached_tokens"] == cached
        assert after["prefilling_tokens"] == 0
        before = after
    assert requests.post(f"{url}/flush_cache", timeout=60).ok
    after = tap.settled()
    assert after == before | {"flushes": before["flushes"] + 2}, "both ranks"
    cached, _ = ask(url, "truth-5", 2)
    assert cached == 0
    assert tap.settled()["cached_tokens"] == before["cached_tokens"]
