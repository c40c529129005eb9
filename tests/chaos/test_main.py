"""`python -m bench.chaos`: a table, or JSON, and an exit code."""

import json
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def test_one_fault_as_json() -> None:
    command = [sys.executable, "-m", "bench.chaos", "--only=stop-1ms", "--seconds=0.2", "--ranks=2"]
    done = subprocess.run(
        [*command, "--json"], cwd=CHECKOUT, capture_output=True, text=True, timeout=200, check=False
    )
    told = json.loads(done.stdout)
    assert [one["name"] for one in told["faults"]] == ["none", "stop-1ms"]
    assert [one["lost"] for one in told["faults"]] == [0, 0]
    assert done.returncode == bool(told["broken"])
    assert "stop-1ms: stopped (SIGSTOP) for 1 ms ..." in done.stderr


def test_a_fault_that_there_is_not() -> None:
    command = [sys.executable, "-m", "bench.chaos", "--only=nonsense"]
    done = subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert "no such fault; there are: " in done.stderr
