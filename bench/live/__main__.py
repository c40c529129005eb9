"""A/B of dispatch policies at a real SGLang server, without a relaunch.

    python -m bench.live --target URL --endpoint ipc://PATH --workload agentic \\
        --arm prefix_affinity --arm sidecar_round_robin --seeds 2 --repeats 2 --json OUT

`--model PATH` (or `simulated`) instead of `--target` starts servers and a sidecar itself. Ctrl-C
keeps what was measured. Exit codes: 0; 1 the run broke off; 2 a wrong argument or target; 130.
"""

import argparse
import contextlib
import json
import math
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgspec

from bench import report
from bench.arms import ArmError
from bench.live.ab import policy_of, run_live, say
from bench.live.apis import APIS
from bench.live.cells import CLIENTS, Options
from bench.live.drive import DriveError
from bench.live.launch import Launch, check_arm, run_model
from bench.live.target import TargetError, find_control
from bench.outcome import Outcome, summarize
from bench.simulated.launch import ServerDied
from bench.workloads import TRACES, Workload, WorkloadError, make_workload
from sidecar.control import Control
from sidecar.errors import ConfigError, ControlError

USAGE = (ArmError, WorkloadError, TargetError, ControlError, ConfigError)
LATE_SHARE = 0.05
BROKEN = (DriveError, ServerDied, TimeoutError, OSError)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m bench.live", description=(__doc__ or "").splitlines()[0]
    )
    add = found.add_argument
    where = found.add_mutually_exclusive_group(required=True)
    where.add_argument("--target", metavar="URL", help="a running server with the hook")
    where.add_argument("--model", help="start a server of this model path, or `simulated`")
    add("--endpoint", metavar="ipc://PATH", default="", help="the sidecar's query socket")
    add("--control", metavar="PATH", default="", help="its control socket (default: by endpoint)")
    add("--admin", metavar="URL", default="http://127.0.0.1:9477", help="its /status")
    add("--workload", required=True, metavar="NAME[:PARAM=VALUE...]")
    add("--arm", action="append", required=True, metavar="NAME[:PARAM=VALUE...]")
    add("--seeds", type=_positive, default=2, help="key sets: seeds 1 to N")
    add("--repeats", type=_positive, default=2, help="runs of each arm and key set")
    add("--time-scale", type=float, default=1.0, help="stretches think times and arrivals")
    add("--api", choices=sorted(APIS), default="completions", help="generate: ranks are told too")
    add("--client", choices=CLIENTS, default="own", help="bench_serving: SGLang's, a cross-check")
    add("--vocabulary", type=_positive, help="token ids of the model, if under 30,000")
    add("--request-seconds", type=float, default=600.0, help="longest wait for an answer")
    add("--traces", type=Path, default=TRACES, help="folder of the traces")
    add("--ranks", type=_positive, default=8, help="with --model: its DP ranks")
    add("--server-arg", action="append", default=[], help="with --model: one more of its arguments")
    add("--json", metavar="FILE", help="write outcomes with every request to FILE")
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.json:
        try:
            Path(options.json).open("a", encoding="utf-8").close()
        except OSError as error:
            print(f"bench.live: --json {options.json}: {error.strerror}", file=sys.stderr)
            return 2
    # `timeout` and a cancelled job end with SIGTERM: as with Ctrl-C, everything is put back.
    before = signal.signal(signal.SIGTERM, _interrupt)
    outcomes: list[Outcome] = []
    try:
        with contextlib.closing(_outcomes(options)) as found:
            for outcome in found:
                outcomes.append(outcome)
                say(_line(outcome))
        return 0
    except KeyboardInterrupt:
        say("interrupted: what was measured is kept")
        return 130
    except (*USAGE, *BROKEN) as error:
        print(f"bench.live: {error}", file=sys.stderr)
        return 2 if isinstance(error, USAGE) and not outcomes else 1
    finally:
        signal.signal(signal.SIGTERM, before)
        if options.json and outcomes:
            _write(Path(options.json), outcomes)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _outcomes(options: argparse.Namespace) -> Generator[Outcome, None, None]:
    if not 0 <= options.time_scale < math.inf or not 0 < options.request_seconds < math.inf:
        raise WorkloadError("--time-scale is 0 or more, --request-seconds is more than 0")
    how = Options(
        time_scale=options.time_scale,
        api=options.api,
        client=options.client,
        vocabulary=options.vocabulary,
        request_seconds=options.request_seconds,
    )
    for arm in options.arm:
        (policy_of if options.target else check_arm)(arm)
    workload = make_workload(options.workload, options.traces)
    run = _at_target if options.target else _at_model
    return cast("Generator[Outcome, None, None]", run(options, workload, how))


def _at_target(options: argparse.Namespace, workload: Workload, how: Options) -> Iterator[Outcome]:
    path = find_control(options.endpoint, options.control)
    seeds = range(1, options.seeds + 1)
    target, admin = options.target.rstrip("/"), options.admin.rstrip("/")
    return run_live(
        target, Control(path), admin, workload, options.arm, seeds, options.repeats, options=how
    )


def _at_model(options: argparse.Namespace, workload: Workload, how: Options) -> Iterator[Outcome]:
    launch = Launch(model=options.model, ranks=options.ranks, arguments=tuple(options.server_arg))
    seeds = range(1, options.seeds + 1)
    return run_model(launch, workload, options.arm, seeds, options.repeats, how)


def _line(outcome: Outcome) -> str:
    """The cell in a line."""
    found = summarize(outcome)
    ttft, reuse, rate = found["ttft_ms"], found["reuse"], found["req_per_s"]
    parts = [f"  {outcome.arm}: {found['requests']} requests, {found['failed']} failed"]
    parts += [f"{rate:.2f}/s" if rate else "", f"reuse {reuse:.3f}" if reuse is not None else ""]
    parts += [f"TTFT p50 {ttft['p50']:.0f} p99 {ttft['p99']:.0f} ms" if ttft else ""]
    parts += [f"{name} {found[name]}" for name in ("spills", "fallbacks", "bypasses")]
    late = (outcome.more.get("steps") or {}).get("late_share", 0.0)
    # Simulated ranks that this machine could not keep in time.
    parts += [f"machine {late:.0%} too slow" if late > LATE_SHARE else ""]
    return ", ".join(filter(None, parts))


def _write(path: Path, outcomes: list[Outcome]) -> None:
    body: dict[str, Any] = {"machine": report.machine()}
    body["summaries"] = [
        {"arm": each.arm, "seed": each.seed, "repeat": each.more.get("repeat"), **summarize(each)}
        for each in outcomes
    ]
    body["outcomes"] = msgspec.to_builtins(outcomes)
    path.write_text(json.dumps(body), encoding="utf-8")
    say(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
