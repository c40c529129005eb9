"""bench.sim, the cells under it, and the plan of `make bench`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import ab, plan, sim
from bench.arms import make_arm
from bench.cells import Cell, Store, code_digest, run_cell, run_cells, server_from
from bench.model.server import ServerSpec
from bench.outcome import Outcome

TINY = "random:requests=24:concurrency=8"
ROOT = Path(__file__).parents[2]


def run_sim(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench.sim", *arguments])
    return sim.main()


def test_json_has_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = ("--arm", "round_robin", "--arm", "prefix_affinity")
    assert run_sim(monkeypatch, "--workload", TINY, *arms, "--seeds", "2", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [(run["arm"], run["seed"]) for run in result["runs"]] == [
        ("round_robin", 0),
        ("round_robin", 1),
        ("prefix_affinity", 0),
        ("prefix_affinity", 1),
    ]
    for run in result["runs"]:
        assert run["requests"] == 24
        assert run["req_per_s"] > 0
        assert run["tpot_ms"] > 0
        assert run["reuse"] == 0
        assert set(run["ttft_ms"]) == set(run["e2e_ms"]) == {"mean", "p50", "p90", "p99"}
        assert {"uncached_max_over_mean", "idle_share", "spills", "fallbacks"} <= set(run)
    difference = result["comparisons"][1]["figures"]["ttft_ms_mean"]["difference"]
    assert difference["verdict"] in ("lower", "higher", "no difference")


def test_equal_arguments_print_equal_bytes_in_every_process() -> None:
    command = [sys.executable, "-m", "bench.sim", "--workload", "hot-key:sessions=8:turns=3"]
    command += ["--arm", "prefix_affinity", "--arm", "total_tokens", "--seeds", "1", "--json"]
    printed = {
        subprocess.run(
            command,
            capture_output=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1")
    }
    assert len(printed) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workload", TINY, "--arm", "robin"), "no arm 'robin'"),
        (("--workload", TINY, "--arm", "chbl:bound=1"), "> 1.0"),
        (("--workload", TINY, "--arm", "chbl:bond=2"), "unknown field `bond`"),
        (("--workload", TINY, "--arm", "prefix_affinity:min_load_gap=-1"), ">= 0"),
        (("--workload", TINY, "--arm", "round_robin:"), "name=value"),
        (("--workload", "randm", "--arm", "round_robin"), "randm"),
        (("--workload", "random:requests=0", "--arm", "round_robin"), ">= 1"),
        (("--workload", TINY, "--arm", "round_robin", "--seeds", "0"), "seeds"),
        (("--workload", TINY, "--arm", "round_robin", "--baseline", "chbl"), "baseline"),
        (("--workload", TINY, "--arm", "round_robin", "--server", "ranks=0"), ">= 1"),
        (("--workload", TINY, "--arm", "round_robin", "--server", "rank.pages=1"), "pages"),
        (("--workload", TINY, "--arm", "round_robin", "--server", "rank.page_tokens=1"), "page"),
        (("--workload", TINY, "--arm", "round_robin", "--server", "steps.table=x"), "no 'x'"),
        (("--workload", "mooncake", "--arm", "round_robin", "--traces", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_input_is_a_sentence(
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_sim(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("bench.sim: ")
    assert not captured.out


def test_server_fields() -> None:
    server = server_from(["ranks=2", "lockstep=false", "steps.shared=0.5"])
    assert (server.ranks, server.lockstep, server.steps.shared) == (2, False, 0.5)
    assert server.rank == ServerSpec().rank


def test_stored_cells_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell(TINY, "round_robin", seed) for seed in range(3)]
    store = Store(tmp_path, "code")
    store.save(cells[1], run_cell(cells[1], tmp_path))
    told = dict(run_cells(cells, tmp_path, store, jobs=2))
    assert told == {cells[0]: False, cells[1]: True, cells[2]: False}
    assert all(kept for _, kept in run_cells(cells, tmp_path, store, jobs=1))
    assert store.load(cells[2]) == run_cell(cells[2], tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_other_code_finds_nothing_stored(tmp_path: Path) -> None:
    cell = Cell(TINY, "round_robin", 0)
    Store(tmp_path, "code").save(cell, run_cell(cell, tmp_path))
    assert not Store(tmp_path, "other").path(cell).exists()
    assert code_digest(ROOT) == code_digest(ROOT)


def test_a_cell_that_cannot_run_says_why(tmp_path: Path) -> None:
    cells = [Cell(TINY, "robin", 0)]
    with pytest.raises(ValueError, match="no arm 'robin'"):
        list(run_cells(cells, tmp_path, Store(tmp_path, "code"), jobs=1))


def test_the_plan_can_be_made() -> None:
    for arm in (*plan.FULL_ARMS, plan.sweep_arm(1.25, 0)):
        make_arm(arm)
    assert set(plan.MAIN_ARMS) <= set(plan.FULL_ARMS)
    assert set(plan.QUICK_WORKLOADS) <= set(plan.FULL_WORKLOADS)
    cells = plan.cells([TINY], 2, full=True)
    assert len(set(cells)) == len(cells)
    assert all(plan.weight(cell) > 0 for cell in cells)


def test_workloads_without_their_traces_are_skipped_with_a_sentence(tmp_path: Path) -> None:
    found, notes = plan.available(("random", "mooncake"), tmp_path)
    assert found == ["random"]
    assert len(notes) == 1
    assert "mooncake skipped" in notes[0]


def run_ab(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> int:
    arguments = [
        "--out",
        str(out),
        "--no-server",
        "--workload",
        TINY,
        "--seeds",
        "1",
        "--jobs",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["bench.ab", *arguments, *more])
    return ab.main()


def the_report(out: Path) -> dict[str, object]:
    (folder,) = (each for each in out.iterdir() if each.name != "cells")
    assert (folder / "report.html").stat().st_size > 1000
    result: dict[str, object] = json.loads((folder / "result.json").read_text())
    return result


def test_bench_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ab(monkeypatch, tmp_path) == 0
    result = the_report(tmp_path)
    runs = result["runs"]
    assert isinstance(runs, list)
    assert {run["arm"] for run in runs} == set(plan.MAIN_ARMS)
    assert result["notes"] == []


def test_ctrl_c_keeps_and_reports_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run_cells

    def interrupted(*arguments: object) -> object:
        for count, told in enumerate(real(*arguments)):  # type: ignore[arg-type]
            if count == 3:
                raise KeyboardInterrupt
            yield told

    monkeypatch.setattr(ab, "run_cells", interrupted)
    assert run_ab(monkeypatch, tmp_path) == 130
    result = the_report(tmp_path)
    assert isinstance(result["runs"], list)
    assert len(result["runs"]) == 3
    assert "INTERRUPTED: 3 of" in str(result["notes"])


@pytest.mark.parametrize("option", ["--seeds", "--jobs"])
def test_bench_refuses_bad_numbers(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_ab(monkeypatch, tmp_path, option, "0") == 2
    assert option[2:] in capsys.readouterr().err


def test_bench_needs_room_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ab, "NEEDED_BYTES", 1 << 62)
    assert run_ab(monkeypatch, tmp_path) == 2
    assert "MB free" in capsys.readouterr().err


def test_a_full_disk_keeps_and_reports_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, saved = Store.save, tmp_path / "saved"

    def full(store: Store, cell: Cell, outcome: Outcome) -> None:
        if saved.exists():
            raise OSError(28, "No space left on device", "rows")
        save(store, cell, outcome)
        saved.touch()

    monkeypatch.setattr(Store, "save", full)
    out = tmp_path / "out"
    assert run_ab(monkeypatch, out) == 74
    captured = capsys.readouterr()
    assert "STOPPED, No space left on device: 1 of" in captured.err
    assert plan.MAIN_ARMS[0] in captured.out
    assert "STOPPED" in str(the_report(out)["notes"])


@pytest.mark.parametrize("junk", [b"", b"\x1f\x8b", b"junk", None])
def test_a_cell_file_that_cannot_be_read_costs_one_cell_and_is_run_again(
    junk: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(store: Store, cell: Cell, outcome: Outcome) -> None:
        save(store, cell, outcome)
        if cell.arm == "chbl":
            data = store.path(cell).read_bytes()
            store.path(cell).write_bytes(data[:-20] if junk is None else junk)

    save = Store.save
    monkeypatch.setattr(Store, "save", damage)
    assert run_ab(monkeypatch, tmp_path) == 0
    result = the_report(tmp_path)
    assert isinstance(result["runs"], list)
    assert {run["arm"] for run in result["runs"]} == set(plan.MAIN_ARMS) - {"chbl"}
    assert "runs it again" in str(result["notes"])
    monkeypatch.setattr(Store, "save", save)
    assert run_ab(monkeypatch, tmp_path) == 0
    notes = [
        json.loads((each / "result.json").read_text())["notes"]
        for each in tmp_path.iterdir()
        if each.name != "cells"
    ]
    assert len(notes) == 2
    assert [] in notes


def test_a_killed_worker_ends_the_run_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(store: Store, cell: Cell, outcome: Outcome) -> None:
        if cell.arm == "chbl":
            os.kill(os.getpid(), 9)
        save(store, cell, outcome)

    save = Store.save
    monkeypatch.setattr(Store, "save", die)
    assert run_ab(monkeypatch, tmp_path) == 70
    assert "a worker was killed" in str(the_report(tmp_path)["notes"])


def test_two_runs_in_one_second_have_a_folder_each(tmp_path: Path) -> None:
    folders = {ab._new_folder(tmp_path) for _ in range(3)}
    assert len(folders) == 3


def test_nothing_left_to_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--out", str(tmp_path / "out"), "--traces", str(tmp_path), "--no-server"]
    monkeypatch.setattr(sys, "argv", ["bench.ab", *arguments, "--workload", "mooncake"])
    assert ab.main() == 2
    assert "nothing to run" in capsys.readouterr().err


def test_a_bad_setting_of_the_sidecar_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DP_SIDECAR_ADMIN_PORT", "x")
    arguments = ["--target", "http://127.0.0.1:1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench.ab", *arguments])
    assert ab.main() == 2
    assert "admin.port" in capsys.readouterr().err
