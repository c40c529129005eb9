import contextlib
import os
import subprocess
import sys

import psutil
import pytest

from bench.arms import ArmError
from bench.live import launch as launching
from bench.live import peers
from bench.live.drive import DriveError
from bench.live.launch import Launch, run_model
from bench.live.peers import gateway, peer_of
from bench.simulated.launch import ServerDied
from tests.bench.live_target import RANKS, FakeTarget
from tests.bench.test_live_ab import OPTIONS, Tiny

# Passes requests on and notes its processes; its policy says what goes wrong.
SMG = """#!{python} -IS
import sys

arguments = sys.argv[1:]
if arguments == ["--version"]:
    sys.exit(print("smg 1.2.3"))
if "bad" in arguments:
    sys.exit("usage: smg" + chr(10) + "smg: error: argument --policy: invalid choice: 'bad'")
if "--help" in arguments:
    sys.exit(print("usage: smg [--policy P] [--assignment-mode M] [--fast-and-loose]"))
import json, os, subprocess, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

given = dict(zip(arguments, arguments[1:]))
policy, worker = given["--policy"], given["--worker-urls"]
if policy == "dies":
    sys.exit("smg has no wish to live")
child = subprocess.Popen(["sleep", "600"])
with open({pids!r}, "a") as pids:
    print(os.getpid(), child.pid, file=pids)
ranks = range(1 if policy == "blind" else {ranks})
workers = [{{"url": worker, "dp_rank": rank, "is_healthy": True}} for rank in ranks]

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(json.dumps({{"workers": workers}}).encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if policy == "falls":
            os._exit(7)
        names = ("Content-Type", "x-smg-routing-key")
        headers = {{name: self.headers[name] for name in names if name in self.headers}}
        request = urllib.request.Request(worker + self.path, body, {{**headers, "via": policy}})
        with urllib.request.urlopen(request) as answer:
            self.reply(answer.read())

    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *told):
        pass

ThreadingHTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """File with the processes that the fake `smg` started, a line each."""
    smg, pids = tmp_path / "smg", tmp_path / "pids"
    smg.write_text(SMG.format(python=sys.executable, pids=str(pids), ranks=RANKS))
    smg.chmod(0o755)
    monkeypatch.setenv("SMG", str(smg))
    return pids


@pytest.fixture
def target(monkeypatch):
    with FakeTarget() as target:

        @contextlib.contextmanager
        def serving(launch, folder, name, env, args=()):
            target.events.append(f"start {name} {env}{args}")
            yield target.url
            target.events.append(f"stop {name}")

        monkeypatch.setattr(launching, "serving", serving)
        yield target


def run(*arms, repeats=1, options=OPTIONS):
    return run_model(Launch(model="m", ranks=RANKS), Tiny(), arms, [1], repeats, options)


def started(pids):
    return [[int(pid) for pid in line.split()] for line in pids.read_text().splitlines()]


def assert_ended(pids):
    found = []
    for pid in (pid for line in started(pids) for pid in line):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(found, timeout=5)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


def test_command_of_a_gateway(pids):
    peer = peer_of("smg_manual:assignment_mode=min_load:fast_and_loose=true")
    assert peer.about() == {
        "version": "smg 1.2.3",
        "policy": "manual",
        "flags": ["--assignment-mode", "min_load", "--fast-and-loose"],
    }
    command = peer.command("http://127.0.0.1:1", 2, 3)
    assert command[:2] == [os.environ["SMG"], "launch"]
    text = " ".join(command)
    assert "--worker-urls http://127.0.0.1:1 --dp-aware" in text
    assert "--host 127.0.0.1 --port 2" in text
    assert "--prometheus-host 127.0.0.1 --prometheus-port 3" in text
    assert text.endswith("--policy manual --assignment-mode min_load --fast-and-loose")


@pytest.mark.parametrize(
    ("arm", "error"),
    [
        ("smg_bad", "argument --policy: invalid choice: 'bad'"),
        ("smg_manual:nonsense=1", "`smg launch` has no --nonsense"),
        ("smg_manual:assignment=1", "`smg launch` has no --assignment"),
        ("smg_manual:dp_aware=true", "dp_aware is not for you to set"),
        ("smg_manual:", "name=value"),
    ],
)
def test_a_wrong_arm_starts_nothing(pids, target, arm, error):
    with pytest.raises(ArmError, match=error):
        next(run("smg_manual", arm))
    assert not target.events
    assert not pids.exists()


def test_without_smg_it_says_what_to_install(target, tmp_path, monkeypatch):
    monkeypatch.setenv("SMG", str(tmp_path / "none"))
    with pytest.raises(ArmError, match=r"no executable .*environment of its own.*smg==.*SMG="):
        next(run("prefix_affinity", "smg_manual"))
    monkeypatch.delenv("SMG")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArmError, match="no executable 'smg'"):
        next(run("smg_manual"))
    assert not target.events


def test_another_client_is_refused(pids, target):
    options = type(OPTIONS)(client="bench_serving")
    with pytest.raises(ArmError, match="--client own"):
        next(run("smg_manual", options=options))
    assert not target.events


def test_gateways_share_a_server_and_each_cell_has_a_new_one(pids, target):
    outcomes = list(run("smg_manual", "smg_cache_aware", "round_robin", repeats=2))
    assert [each.arm for each in outcomes] == [
        *("smg_manual", "smg_cache_aware", "smg_cache_aware", "smg_manual"),
        *("round_robin", "round_robin"),
    ]
    servers = [event for event in target.events if event.startswith(("start", "stop"))]
    assert servers[:2] == ["start gateways {}()", "stop gateways"]
    assert len(started(pids)) == 4
    assert_ended(pids)
    first, stock = outcomes[0], outcomes[-1]
    assert (first.ranks, {row.rank for row in first.rows}) == (RANKS, {2})
    assert [row.error for row in first.rows] == [""] * 4
    assert first.more["relaunched"]
    assert first.more["gateway"]["policy"] == "manual"
    assert (first.more["api"], stock.more["api"]) == ("generate", "generate")
    assert "gateway" not in stock.more


def test_the_workload_alone_goes_through_the_gateway(pids, target):
    list(run("smg_manual"))
    assert {path for path, _, _ in target.requests} == {"/generate"}
    through = [headers for _, _, headers in target.requests if "via" in map(str.lower, headers)]
    keys = [{name.lower(): value for name, value in each.items()} for each in through]
    assert [each.get("x-smg-routing-key") for each in keys].count("key-1") == 2
    assert len(keys) == 4
    assert len(target.requests) == 4 + 2 * RANKS
    assert not any("via" in map(str.lower, each) for _, _, each in target.requests[: 2 * RANKS])


def test_a_gateway_that_dies_at_its_start(pids, target):
    with pytest.raises(ServerDied, match="exit code 1:\nsmg has no wish to live"):
        next(run("smg_dies"))


def test_a_gateway_that_does_not_see_the_ranks(pids, target, monkeypatch):
    now, look = [0.0], peers._ranks

    def ranks(url):
        found = look(url)
        # Time is up once it has told one.
        now[0] += peers.READY_SECONDS if found else 0.0
        return found

    monkeypatch.setattr(peers, "_ranks", ranks)
    monkeypatch.setattr(peers, "monotonic", lambda: now[0])
    with pytest.raises(TimeoutError, match=f"smg knows 1 of {RANKS} DP ranks"):
        next(run("smg_blind"))
    assert_ended(pids)


def test_a_gateway_that_dies_on_a_request(pids, target):
    with pytest.raises(ServerDied, match="exit code 7"):
        next(run("smg_falls"))
    assert_ended(pids)


def test_what_else_goes_wrong_inside_is_not_the_gateways(pids, target, tmp_path):
    with (
        pytest.raises(DriveError, match="of the server"),
        gateway(peer_of("smg_manual"), target.url, RANKS, tmp_path / "log"),
    ):
        raise DriveError("of the server")
    assert_ended(pids)


def test_everything_is_stopped_when_the_caller_stops(pids, target):
    with contextlib.closing(run("smg_manual", "smg_cache_aware")) as outcomes:
        next(outcomes)
    assert_ended(pids)


def test_a_gateway_ends_with_its_parent(tmp_path):
    script = (
        "import os, signal; from bench.live import peers; from pathlib import Path\n"
        "peers._start(['/bin/sh', '-c', 'exec sleep 600 3>&1'], Path('/dev/stderr'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    # Its stderr is open for as long as one of the processes lives.
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert found.returncode == -9
