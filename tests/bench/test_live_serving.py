import asyncio
import sys
from pathlib import Path

import pytest

from bench.live import serving
from bench.live.target import Facts, TargetError
from bench.outcome import Outcome, summarize
from bench.workloads import make_workload

FACTS = Facts(url="http://127.0.0.1:1", model="fake")
RESULT = {
    "duration": 2.5,
    "input_lens": [100, 100],
    "output_lens": [3, 0],
    "ttfts": [0.5, 0.0],
    "itls": [[0.25, 0.25], []],
    "errors": ["", "Traceback: lost"],
}


def test_flags_say_what_the_workload_is():
    flags = serving.flags(make_workload("published-16x32"), FACTS, 3, Path("out"))
    for flag in (
        "--backend=sglang-oai",
        "--gsp-num-groups=16",
        "--gsp-prompts-per-group=32",
        "--gsp-system-prompt-len=4096",
        "--gsp-question-len=128",
        "--gsp-output-len=256",
        "--num-prompts=512",
        "--max-concurrency=64",
        "--seed=3",
        "--gsp-send-routing-key",
    ):
        assert flag in flags
    assert "--gsp-ordered" not in flags


def test_an_open_loop_without_keys():
    flags = serving.flags(make_workload("gsp:rate=2:ordered=true"), FACTS, 1, Path("out"))
    assert "--request-rate=2.0" in flags
    assert "--gsp-ordered" in flags
    assert not [flag for flag in flags if "concurrency" in flag or "routing" in flag]


def test_what_it_cannot_express():
    with pytest.raises(TargetError, match=r"agentic: sglang\.bench_serving can send"):
        serving.flags(make_workload("agentic"), FACTS, 1, Path("out"))


def test_rows():
    rows, seconds = serving.read_rows(RESULT)
    assert seconds == 2.5
    assert (rows[0].ttft_ms, rows[0].e2e_ms, rows[0].output_tokens) == (500.0, 1000.0, 3)
    assert rows[1].error == "Traceback: lost"
    found = summarize(Outcome("w", "a", 1, "live", 8, rows, seconds))
    assert (found["requests"], found["failed"], found["req_per_s"]) == (2, 1, 0.4)
    assert found["reuse"] is None


def test_a_result_without_a_column():
    with pytest.raises(TargetError, match="has no itls"):
        serving.read_rows({name: value for name, value in RESULT.items() if name != "itls"})


def test_a_run_that_breaks_off(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    workload = make_workload("gsp")
    with pytest.raises(TargetError, match="ended with 1"):
        asyncio.run(serving.send(workload, FACTS, 1, 60))
