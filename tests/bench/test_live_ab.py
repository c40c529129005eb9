import contextlib
import json

import pytest

from bench.arms import ArmError
from bench.live import __main__ as cli
from bench.live.ab import Progress, plan, policy_of, run_live
from bench.live.cells import Options
from bench.live.drive import DriveError
from bench.live.target import TargetError
from bench.workloads.base import Call, Send, Source
from sidecar.hashing import key_hash, preferred
from sidecar.policies import make_policy
from tests.bench.live_target import RANKS, FakeControl, FakeTarget

OPTIONS = Options(time_scale=0, warm_up=(8,), burn_in=(8,), flush_pause=0, sample_seconds=0)
ARMS = ("prefix_affinity:min_load_gap=2", "sidecar_round_robin")


class Tiny:
    """Two sessions of two turns, one of them with a key."""

    name, page_tokens, description = "tiny", 16, ""

    def make(self, seed):
        return Source(((0.0, self.script(i)) for i in range(2)), slots=2)

    def script(self, session):
        for turn in range(2):
            pages = tuple(range(turn + 1))
            key = f"key-{session}" if session else ""
            yield Send(Call(session * 10 + turn, session, turn, key, pages, 16 * turn + 9, 2))


@pytest.fixture
def target():
    with FakeTarget() as target:
        target.dispatcher.swap_policy(make_policy("total_tokens"))
        yield target


@pytest.fixture
def control(target):
    return FakeControl(target)


def live(target, control, arms=ARMS, seeds=(1,), repeats=2, tell=lambda text: None, **options):
    how = Options(**{each: getattr(OPTIONS, each) for each in Options.__struct_fields__} | options)
    return run_live(
        target.url, control, target.admin, Tiny(), arms, seeds, repeats, options=how, tell=tell
    )


def measured(target):
    """Token ids and keys of the requests, warming up and settling left out."""
    return [
        (body["prompt"], headers.get("x-smg-routing-key"))
        for _, body, headers in target.requests
        if body["max_tokens"] == 2
    ]


def test_the_order_of_cells():
    order = [(each.arm, each.seed, each.repeat) for each in plan("AB", [1, 2], 2)]
    assert [arm for arm, _, _ in order] == list("ABBABAAB")
    assert [(seed, repeat) for _, seed, repeat in order[::2]] == [(1, 0), (2, 0), (1, 1), (2, 1)]


def test_arms_that_the_sidecar_can_switch_to():
    name, params = policy_of("prefix_affinity:min_load_gap=2:token_fallback=false")
    assert name == "prefix_affinity"
    assert params["min_load_gap"] == 2.0
    assert params["token_fallback"] is False
    assert policy_of("sidecar_total_tokens") == ("total_tokens", {})


@pytest.mark.parametrize(
    ("arm", "error"),
    [
        ("round_robin", "fixed at its start .MODEL"),
        (
            "oracle",
            "only in the model.*can switch to kv_affinity, prefix_affinity, sidecar_round_robin",
        ),
        ("nonsense", "no arm 'nonsense'"),
        ("smg_manual", "at a server without the hook .MODEL"),
        ("prefix_affinity:gap=1", "unknown field `gap`"),
        ("prefix_affinity:max_load_skew=0.5", ">= 1.0"),
        ("prefix_affinity:", "name=value"),
    ],
)
def test_arms_that_it_cannot_switch_to(target, control, arm, error):
    with pytest.raises(ArmError, match=error):
        next(live(target, control, arms=[arm]))
    assert not target.events


def test_outcomes_and_what_is_told(target, control):
    outcomes = list(live(target, control))
    assert [each.arm for each in outcomes] == [ARMS[0], ARMS[1], ARMS[1], ARMS[0]]
    first = outcomes[0]
    assert (first.kind, first.ranks, first.seed, first.workload) == ("live", RANKS, 1, "tiny")
    assert [row.id for row in first.rows] == [0, 10, 1, 11]
    assert first.rows[1].preferred == preferred(key_hash(b"key-1"), range(RANKS))
    assert first.rows[0].preferred == -1
    assert outcomes[1].rows[1].preferred == -1
    assert first.seconds > 0
    assert first.more["sidecar"]["affinity_hits"] == {"routing_key": 2}
    assert (first.spills, first.fallbacks, first.bypasses) == (0, 2, 0)
    assert first.more["policy"]["params"]["min_load_gap"] == 2.0
    assert outcomes[1].more["sidecar"]["decisions"].keys() == {"round_robin>round_robin"}


def test_arms_get_the_same_prompts_and_keys_in_the_same_order(target, control):
    list(live(target, control, seeds=(1, 2), repeats=1))
    cells = [measured(target)[i : i + 4] for i in range(0, 16, 4)]
    assert cells[0] == cells[1]
    assert cells[2] == cells[3]
    assert cells[0] != cells[2], "another key set has other tokens"
    assert [key for _, key in cells[0]] == [None, "key-1", None, "key-1"]
    long, short = cells[0][2][0], cells[0][0][0]
    assert long[:9] == short


def test_policy_then_flush_then_warm_up(target, control):
    list(live(target, control, arms=["sidecar_round_robin"], repeats=1))
    events = target.events
    start = events.index("set round_robin")
    assert events[start + 1] == "flush"
    warm_up = 2 * RANKS
    assert events[start + 2 : -1] == ["request under round_robin"] * (warm_up + 1 + 4 + 1)
    assert events[-1] == "set total_tokens"


def test_the_policy_is_restored_when_the_caller_stops(target, control):
    with contextlib.closing(live(target, control)) as outcomes:
        next(outcomes)
    assert control.set[-1] == ("total_tokens", {})


def test_ctrl_c_keeps_what_was_measured(target, control):
    def interrupt(text):
        if text.startswith("[3/"):
            raise KeyboardInterrupt

    outcomes = []
    with pytest.raises(KeyboardInterrupt):
        outcomes.extend(live(target, control, tell=interrupt))
    assert len(outcomes) == 2
    assert control.show().name == "total_tokens"


def test_a_server_that_fails_every_request(target, control):
    def broken(text):
        target.fails = "stream" if text.startswith("[2/") else ""

    outcomes = []
    with pytest.raises(TargetError, match="warm-up failed: no memory left"):
        outcomes.extend(live(target, control, tell=broken))
    assert len(outcomes) == 1
    assert control.show().name == "total_tokens"


def test_a_policy_set_by_somebody_else(target, control):
    show, looks = control.show, []

    def shown():
        looks.append(1)
        # Before all, to find the instance, after the first arm is set, and after its cell.
        if len(looks) == 4:
            target.dispatcher.swap_policy(make_policy("round_robin"))
        return show()

    control.show = shown
    with pytest.raises(TargetError, match="restarted, or somebody set its policy"):
        list(live(target, control))
    assert control.set[-1] == ("total_tokens", {})


def test_a_sidecar_gone_at_the_end(target, control, capsys):
    def vanish(text):
        control.gone = text.startswith("[2/")

    with pytest.raises(Exception, match="no sidecar listens there"):
        list(live(target, control, tell=vanish))
    assert "total_tokens" in capsys.readouterr().err


def test_a_target_without_the_hook(target, control, monkeypatch):
    monkeypatch.setattr("bench.live.target.ATTEMPTS", 1)
    target.asks = False
    with pytest.raises(TargetError, match="does not ask this sidecar"):
        list(live(target, control))
    assert control.show().name == "total_tokens"


def test_time_left_is_told_from_cells_done():
    told = []
    progress = Progress(4, told.append)
    for cell in plan(["a"], [1], 2):
        progress.begin("tiny", cell)
        progress.end()
    assert told[0] == "[1/4] tiny, a, key set 1, run 1"
    assert told[1].startswith("[2/4] tiny, a, key set 1, run 2; about 0 s left")


def run_cli(target, *more):
    argv = [f"--target={target.url}", f"--admin={target.admin}", "--control=/nowhere"]
    return cli.main([*argv, "--workload=random:requests=2:prompt-max=600", *more])


def test_cli_errors_are_a_sentence(target, capsys):
    assert run_cli(target, "--arm=oracle") == 2
    assert "bench.live: arm 'oracle'" in capsys.readouterr().err
    assert run_cli(target, "--arm=prefix_affinity") == 2
    assert "/nowhere: no sidecar listens there" in capsys.readouterr().err
    assert run_cli(target, "--arm=prefix_affinity", "--workload=nonsense") == 2
    assert "no workload 'nonsense'" in capsys.readouterr().err
    assert run_cli(target, "--arm=prefix_affinity", "--control=", "--endpoint=tcp://a:1") == 2
    assert "control socket only with --control" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run_cli(target, "--arm=prefix_affinity", "--seeds=0")


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (KeyboardInterrupt(), 130), (DriveError("broken"), 1)]
)
def test_cli_writes_what_was_measured(target, control, monkeypatch, tmp_path, error, code):
    def some(*arguments, **options):
        yield from live(target, control, repeats=1)
        if error is not None:
            raise error

    monkeypatch.setattr(cli, "run_live", some)
    monkeypatch.setattr(cli.report, "machine", dict)
    file = tmp_path / "out.json"
    assert run_cli(target, "--arm=prefix_affinity", f"--json={file}") == code
    written = json.loads(file.read_text())
    assert [each["arm"] for each in written["summaries"]] == list(ARMS)
    assert written["outcomes"][0]["rows"][0][0] == 0
