"""The bench of late, missing and few facts."""

import json
import sys
from pathlib import Path

import pytest

from bench import degraded
from bench.arms import make_arm
from bench.degraded import Setting, cell, plan, run, without_keys
from bench.model.server import ServerSpec
from bench.model.simulate import simulate
from bench.workloads import make_workload

TINY = "hot-key:sessions=8:turns=3:burst=20:bursts=1:pause=2"
NOWHERE = Path("/nowhere")


def test_the_table_of_a_tiny_workload(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--workload", TINY, "--seeds", "2", "--jobs", "1", "--json"]
    wide = ["--wide", "short-chats:chats=20:turns=2"]
    monkeypatch.setattr(sys, "argv", ["bench.degraded", *arguments, *wide])
    assert degraded.main() == 0
    table = json.loads(capsys.readouterr().out)["table"]
    found = {tuple(row["of"][1:]): row["ratios"] for row in table}
    assert found["one rank", "round_robin"] == {
        "ttft_ms_mean": [1.0, 1.0, 1.0],
        "req_per_s": [1.0, 1.0, 1.0],
    }
    assert found["no keys", "undisturbed"]["ttft_ms_mean"] != [1.0, 1.0, 1.0]
    assert ("320 ranks", "least_waiting_uncached") in found
    assert ("undisturbed", "undisturbed") not in found


def test_late_reports_change_what_is_decided() -> None:
    workload = "short-chats:chats=64:turns=4"
    plain = run(Setting(workload), 0, NOWHERE)
    late = run(Setting(workload, server=("report_delay_seconds=3600",)), 0, NOWHERE)
    assert plain.summary["ttft_ms"] != late.summary["ttft_ms"]


def test_without_keys_nothing_is_bound_by_one() -> None:
    arm = make_arm("kv_affinity")
    workload = make_workload(TINY, NOWHERE)
    keyed = simulate(workload, arm, 0, ServerSpec())
    keyless = simulate(workload, without_keys(arm), 0, ServerSpec())
    assert len(keyed.rows) == len(keyless.rows)
    assert "affinity_hit" in {row.reason for row in keyed.rows}
    assert "affinity_hit" not in {row.reason for row in keyless.rows}


def test_what_is_compared() -> None:
    table = plan(["a"], "")
    assert table["a", "no keys", "undisturbed"] == (Setting("a", keys=False), Setting("a"))
    one, basis = table["a", "one rank", "round_robin"]
    assert one.server == basis.server == ("ranks=1",)
    assert {name[0] for name in table} == {"a"}


def test_a_cell_has_its_interval_if_there_is_one() -> None:
    assert cell(0.5, 0.4, 0.6) == "0.50 [0.40 0.60]"
    assert cell(0.5, None, None) == "0.50"
    assert cell(None, None, None) == "?"
