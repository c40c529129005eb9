"""A/B on servers that are started here: policies on one, gateways on one, stock arms on one each.

MODEL is a model path of SGLang, or `simulated`. A stock method is fixed at the start of a server,
and its server and that of the gateways run without our hook: those arms cannot be interleaved with
the others, which the outcomes say (`more.relaunched`).
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from bench.arms import ArmError
from bench.demo import Sidecar as SidecarProcess
from bench.live.ab import STOCK, Progress, plan, policy_of, run_live, say
from bench.live.cells import Bench, Options
from bench.live.children import die_with_parent
from bench.live.peers import Peer, gateway, is_peer, peer_of
from bench.live.target import inspect
from bench.outcome import Outcome
from bench.simulated.launch import SimulatedServer
from bench.workloads import Workload
from sidecar.control import Control
from sidecar.listener import control_path

SIMULATED = "simulated"
READY_SECONDS = 3600.0
"""Loading a large model from a slow disk takes most of an hour."""
_SAY_SECONDS = 15.0


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What to start."""

    model: str
    ranks: int = 8
    arguments: tuple[str, ...] = ()
    """More arguments of the server; they win over ours."""
    ready_seconds: float = READY_SECONDS


class RealServer(SimulatedServer):
    """`sglang.launch_server` with a real model; stopped with all its processes."""

    def __init__(self, launch: Launch, env: dict[str, str], args: Sequence[str], log: Path) -> None:
        super().__init__(dp_size=launch.ranks, env=env, args=args, log_path=log)
        size = str(launch.ranks)
        options = ["--model-path", launch.model, "--port", str(self.port)]
        options += ["--dp-size", size, "--tp-size", size, "--enable-dp-attention"]
        options += ["--enable-cache-report", "--enable-metrics", *args]
        self._command = [sys.executable, "-m", "sglang.launch_server", *options]
        self._before_exec = die_with_parent


@contextlib.contextmanager
def serving(
    launch: Launch, folder: Path, name: str, env: dict[str, str], args: Sequence[str] = ()
) -> Iterator[str]:
    """A ready server; its URL. Its log is `name.log` in the folder."""
    log, arguments = folder / f"{name}.log", (*args, *launch.arguments)
    if launch.model == SIMULATED:
        env = {"SIMULATED_JOURNAL": str(folder / f"{name}.journal"), **env}
        server = SimulatedServer(launch.ranks, env=env, args=arguments, log_path=log)
    else:
        server = RealServer(launch, env, arguments, log)
    say(f"starting a server of {launch.ranks} ranks, {launch.model} ({name})")
    with server:
        server.wait_ready(launch.ready_seconds, _waiting())
        say("ready")
        try:
            yield server.base_url
        finally:
            say("stopping the server")


def _waiting() -> Callable[[float], None]:
    last = [0.0]

    def waiting(elapsed: float) -> None:
        if elapsed - last[0] >= _SAY_SECONDS:
            last[0] = elapsed
            say(f"  still starting after {elapsed:.0f} s")

    return waiting


def check_arm(arm: str) -> None:
    """Raises ArmError where servers started here cannot run an arm."""
    if is_peer(arm):
        peer_of(arm)
    elif arm not in STOCK:
        policy_of(arm)


def run_model(
    launch: Launch,
    workload: Workload,
    arms: Sequence[str],
    seeds: Sequence[int],
    repeats: int = 2,
    options: Options | None = None,
) -> Iterator[Outcome]:
    """Measure arms on servers started here; raises as `run_live` does, and ServerDied."""
    for arm in arms:
        if not is_peer(arm):
            check_arm(arm)
    peers = {arm: peer_of(arm) for arm in arms if is_peer(arm)}
    policies = [arm for arm in arms if arm not in (*STOCK, *peers)]
    options = options or Options()
    if peers:
        options = _for_peers(options)
    with tempfile.TemporaryDirectory(prefix="dps-live-") as name, _without_sidecar():
        folder = Path(name)
        if policies:
            yield from _policies(launch, folder, workload, policies, seeds, repeats, options)
        if peers:
            yield from _peers(launch, folder, workload, peers, seeds, repeats, options)
        for arm in arms:
            if arm in STOCK:
                yield from _stock(launch, folder, workload, arm, seeds, repeats, options)


def _for_peers(options: Options) -> Options:
    """Every arm is asked in the one way that smg takes token ids."""
    if options.client != "own":
        raise ArmError(f"smg refuses the requests of the client {options.client}: --client own")
    say("smg takes token ids on /generate alone: every arm is asked there")
    return msgspec.structs.replace(options, api="generate")


@contextlib.contextmanager
def _without_sidecar() -> Iterator[None]:
    """Settings of the sidecar in our own environment are those of another one."""
    names = [name for name in os.environ if name.startswith("DP_SIDECAR_")]
    kept = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(kept)


def _policies(
    launch: Launch,
    folder: Path,
    workload: Workload,
    arms: Sequence[str],
    seeds: Sequence[int],
    repeats: int,
    options: Options,
) -> Iterator[Outcome]:
    sidecar = SidecarProcess(folder)
    env = {"DP_SIDECAR_ENDPOINT": sidecar.endpoint}
    if launch.model == SIMULATED:
        # Ranks that share two cores with it must not look like a slow sidecar.
        env["DP_SIDECAR_DEADLINE_MS"] = "500"
    try:
        sidecar.start()
        with serving(launch, folder, "hooked", env) as url:
            control = Control(control_path(sidecar.endpoint))
            admin = f"http://127.0.0.1:{sidecar.port}"
            yield from run_live(
                url, control, admin, workload, arms, seeds, repeats, options=options
            )
    finally:
        sidecar.stop()


def _peers(
    launch: Launch,
    folder: Path,
    workload: Workload,
    peers: dict[str, Peer],
    seeds: Sequence[int],
    repeats: int,
    options: Options,
) -> Iterator[Outcome]:
    with serving(launch, folder, "gateways", {}) as url:
        bench = Bench(inspect(url, options.vocabulary), launch.ranks, options)
        cells = plan(list(peers), seeds, repeats)
        progress = Progress(len(cells))
        for number, cell in enumerate(cells):
            progress.begin(workload.name, cell)
            log = folder / f"gateway-{number}.log"
            with gateway(peers[cell.arm], url, launch.ranks, log) as bench.gateway:
                outcome = bench.measure(workload, cell, None, progress)
            outcome.more |= {"relaunched": True, "gateway": peers[cell.arm].about()}
            progress.end()
            yield outcome


def _stock(
    launch: Launch,
    folder: Path,
    workload: Workload,
    arm: str,
    seeds: Sequence[int],
    repeats: int,
    options: Options,
) -> Iterator[Outcome]:
    with serving(launch, folder, f"stock-{arm}", {}, ["--load-balance-method", arm]) as url:
        bench = Bench(inspect(url, options.vocabulary), launch.ranks, options)
        cells = plan([arm], seeds, repeats)
        progress = Progress(len(cells))
        for cell in cells:
            progress.begin(workload.name, cell)
            outcome = bench.measure(workload, cell, None, progress)
            outcome.more["relaunched"] = True
            progress.end()
            yield outcome
