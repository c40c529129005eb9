"""The other seams: batch slices in the main process, schedulers, refusal to attach."""

import importlib.util
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")
from sglang.srt.managers import io_struct

from sglang_hook import front, patches
from sglang_hook.scheduler_seam import SchedulerSeam
from sglang_hook.settings import Settings
from sidecar import wire

from .conftest import generate


@pytest.mark.parametrize("shape", [{"text": ["a", "b", "c", "d"]}, {"text": "a"}])
def test_every_request_of_a_batch_keeps_the_key(shape):
    front.attach_io_struct(io_struct)
    samples = {"n": 4} if isinstance(shape["text"], str) else {}
    batch = io_struct.GenerateReqInput(
        **shape, sampling_params={"max_new_tokens": 1, **samples}, routing_key="session-1"
    )
    batch.normalize_batch_and_arguments()
    size = batch.batch_size if "n" not in samples else 1
    assert [batch[i].routing_key for i in range(size)] == ["session-1"] * size


def test_a_batch_without_key_stays_without(monkeypatch):
    front.attach_io_struct(io_struct)
    batch = io_struct.GenerateReqInput(text=["a", "b"], sampling_params={"max_new_tokens": 1})
    batch.normalize_batch_and_arguments()
    assert batch[0].routing_key is None


snapshots = pytest.mark.skipif(
    importlib.util.find_spec("sglang.srt.managers.load_snapshot") is None,
    reason="0.5.12 makes its figures on demand",
)


class Push:
    """Stands for the PUSH socket."""

    def __init__(self):
        self.reports = []

    def send(self, data, flags):
        self.reports.append(wire.decode_report(data))


def make_scheduler(**more):
    def req(finished=False):
        return SimpleNamespace(finished=lambda: finished)

    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(port=1),
        load_snapshot_writer=SimpleNamespace(dp_rank=3, write=lambda snapshot: "written"),
        waiting_queue=[req(), req()],
        running_batch=SimpleNamespace(reqs=[req(), req(True), req()]),
        last_batch=None,
        chunked_req=None,
    )
    for name, value in more.items():
        setattr(scheduler, name, value)
    return scheduler, req


def make_seam(scheduler):
    seam = SchedulerSeam(scheduler, Settings(endpoint="ipc:///nonexistent/q"))
    push = Push()
    seam.reporter._peer.socket = lambda: push
    now = [100.0]
    seam.reporter.clock = lambda: now[0]
    return seam, push, now


def test_received_counts_single_and_batched_requests_only():
    scheduler, _ = make_scheduler()
    seam, push, _ = make_seam(scheduler)
    batch = io_struct.BatchTokenizedGenerateReqInput(batch=[generate(tokens=5), generate(tokens=6)])
    seam.step([generate(tokens=4), batch, io_struct.FlushCacheReqInput()])
    [report] = push.reports
    assert (report.rank, report.received) == (3, 3)
    assert (report.running, report.waiting) == (2, 2)


@snapshots
def test_received_tokens_are_of_the_moment_of_sglangs_snapshot():
    """Prompts that came during a long prefill are in flight to its figures, not in them."""
    from sglang.srt.managers.load_snapshot import LoadSnapshot

    scheduler, _ = make_scheduler()
    seam, push, now = make_seam(scheduler)
    seam.step([generate(tokens=40)])
    scheduler.load_snapshot_writer.write(LoadSnapshot(num_total_tokens=40))
    now[0] += 1
    seam.step([generate(tokens=500)])
    report = push.reports[-1]
    assert (report.received, report.tokens, report.received_tokens) == (2, 40, 40)


def test_with_pipeline_parallelism_every_microbatch_counts():
    scheduler, req = make_scheduler()
    scheduler.running_mbs = [scheduler.running_batch, SimpleNamespace(reqs=[req(), req()]), None]
    scheduler.last_mbs = [
        None,
        SimpleNamespace(reqs=[req()], forward_mode=SimpleNamespace(is_extend=lambda: True)),
    ]
    seam, push, _ = make_seam(scheduler)
    seam.step([])
    assert push.reports[0].running == 5


@snapshots
def test_disaggregated_schedulers_report_sglangs_own_figures_of_one_moment():
    from sglang.srt.managers.load_snapshot import LoadSnapshot

    mode = SimpleNamespace(name="DECODE")
    scheduler, _ = make_scheduler(disaggregation_mode=mode)
    seam, push, now = make_seam(scheduler)
    seam.step([generate(tokens=5), generate(tokens=5)])
    snapshot = LoadSnapshot(num_running_reqs=1, num_waiting_reqs=7)
    scheduler.load_snapshot_writer.write(snapshot)
    now[0] += 1
    seam.step([generate(tokens=5)])
    report = push.reports[-1]
    assert (report.running, report.waiting, report.received) == (1, 7, 2)


def test_a_batch_in_prefill_and_a_chunked_request_are_running():
    scheduler, req = make_scheduler()
    chunked = req()
    scheduler.last_batch = SimpleNamespace(
        reqs=[req(), chunked, scheduler.running_batch.reqs[0]],
        forward_mode=SimpleNamespace(is_extend=lambda: True),
    )
    scheduler.chunked_req = chunked
    seam, push, _ = make_seam(scheduler)
    seam.step([])
    assert push.reports[0].running == 4


def test_a_decoding_last_batch_is_not_counted_twice():
    scheduler, req = make_scheduler()
    scheduler.last_batch = SimpleNamespace(
        reqs=[req()], forward_mode=SimpleNamespace(is_extend=lambda: False)
    )
    seam, push, _ = make_seam(scheduler)
    seam.step([])
    assert push.reports[0].running == 2


def test_reports_on_change_at_most_each_interval_and_on_heartbeat():
    scheduler, req = make_scheduler()
    seam, push, now = make_seam(scheduler)
    seam.step([])
    scheduler.waiting_queue.append(req())
    seam.step([])
    assert len(push.reports) == 1, "within the interval"
    now[0] += 0.006
    seam.step([])
    assert len(push.reports) == 2, "changed"
    now[0] += 0.2
    seam.step([])
    assert len(push.reports) == 2, "unchanged"
    now[0] += 0.06
    seam.step([])
    assert len(push.reports) == 3, "heartbeat"
    assert [report.seq for report in push.reports] == [1, 2, 3]


@pytest.mark.skipif(not hasattr(io_struct, "GetLoadsReqInput"), reason="it has snapshots")
def test_where_there_are_no_snapshots_figures_are_made_when_a_report_is_due():
    asked = []

    def get_loads(request):
        asked.append(request.include)
        return SimpleNamespace(
            num_running_reqs=7,
            num_waiting_reqs=8,
            num_total_tokens=40,
            max_total_num_tokens=90,
            max_running_requests=5,
        )

    scheduler, _ = make_scheduler(dp_rank=3, get_loads=get_loads)
    del scheduler.load_snapshot_writer
    seam, push, now = make_seam(scheduler)
    seam.step([generate(tokens=40)])
    seam.step([])
    [report] = push.reports
    assert (report.rank, report.running, report.waiting, report.received) == (3, 2, 2, 1)
    assert (report.tokens, report.received_tokens, report.capacity_tokens) == (40, 40, 90)
    assert asked == [["core"]], "not at each step"
    scheduler.get_loads = seam._poll = lambda *_: 1 / 0
    now[0] += 1
    seam.step([])
    assert len(push.reports) == 2, "without them the rest is reported"


@pytest.mark.skipif(not hasattr(io_struct, "GetLoadsReqInput"), reason="it has snapshots")
def test_disaggregated_schedulers_without_snapshots_report_sglangs_figures():
    loads = SimpleNamespace(num_running_reqs=1, num_waiting_reqs=7, num_total_tokens=0)
    loads.max_total_num_tokens = loads.max_running_requests = 0
    mode = SimpleNamespace(name="DECODE")
    scheduler, _ = make_scheduler(disaggregation_mode=mode, get_loads=lambda _: loads)
    del scheduler.load_snapshot_writer
    seam, push, _ = make_seam(scheduler)
    seam.step([generate(tokens=5)])
    report = push.reports[-1]
    assert (report.running, report.waiting, report.received) == (1, 7, 1)


@snapshots
def test_token_figures_come_from_sglangs_own_snapshot():
    from sglang.srt.managers.load_snapshot import LoadSnapshot

    scheduler, _ = make_scheduler()
    seam, push, _ = make_seam(scheduler)
    snapshot = LoadSnapshot(num_total_tokens=7, max_total_num_tokens=9, max_running_requests=5)
    assert scheduler.load_snapshot_writer.write(snapshot) == "written"
    seam.step([])
    report = push.reports[0]
    assert (report.tokens, report.capacity_tokens, report.max_running) == (7, 9, 5)


def test_an_error_in_reporting_is_logged_once_and_contained(caplog):
    scheduler, _ = make_scheduler(running_batch=None)
    seam, push, _ = make_seam(scheduler)
    for _ in range(3):
        seam.step([])
    assert not push.reports
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_the_real_scheduler_is_wrapped_and_silent_where_it_is_not_rank_zero():
    from sglang.srt.managers import scheduler as module

    patches._attach_scheduler(module)
    scheduler = module.Scheduler.__new__(module.Scheduler)
    if hasattr(module.Scheduler, "publish_load_snapshot"):
        scheduler.load_snapshot_writer = None
    scheduler.recv_from_tokenizer = None
    with pytest.raises(AttributeError):  # the original needs a whole scheduler
        scheduler.process_input_requests([])
    assert scheduler._dp_sidecar is None


def test_a_missing_seam_is_one_error_line(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, patches.CONTROLLER, SimpleNamespace(__name__="controller"))
    monkeypatch.setattr(patches.multiprocessing, "parent_process", lambda: "as in a child")
    monkeypatch.setattr(patches, "settings", lambda: Settings(endpoint="ipc:///x/q"))
    with caplog.at_level(logging.ERROR):
        patches.install()
    [record] = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "controller has no DataParallelController" in record.getMessage()


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"DP_SIDECAR_ENDPOINT": "ipc:///" + "x" * 101}, "107"),
        ({"DP_SIDECAR_ENDPOINT": "nonsense"}, "begins with ipc:// or tcp://"),
        ({"DP_SIDECAR_ENDPOINT": "tcp://127.0.0.1:1"}, "allow_insecure_tcp"),
        ({"DP_SIDECAR_ENDPOINT": "ipc:///x", "DP_SIDECAR_DEADLINE_MS": "0"}, "DEADLINE_MS"),
        ({"DP_SIDECAR_ENDPOINT": "ipc:///x", "DP_SIDECAR_DEADLINE_MS": "soon"}, "DEADLINE_MS"),
        ({"DP_SIDECAR_ENDPOINT": "ipc:///x", "SGLANG_RUST_SERVER": "Y"}, "no Python controller"),
    ],
)
def test_what_is_wrong_is_said_and_sglang_starts(env, text):
    code = "from sglang_hook.plugin import register; register(); print('alive')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "alive\n"
    assert text in done.stderr
    assert "ERROR" in done.stderr
