"""What do requests see of each fault? Real processes of ours under load, one fault after another.

`python -m bench.chaos [--seconds S] [--only NAME ...] [--rate 200] [--json] [--markdown]` starts a
controller with the hook's own classes, eight ranks that report, and a sidecar; breaks something;
waits until the sidecar decides again and its view of the loads is the truth; stops the load and
looks what is left. `waits`: requests that waited a whole deadline (5 ms) for nothing; `delayed`:
those beyond deadline and allowance; `alone`: median of a dispatch that asked nobody; `remote`,
`exact`: from the end of the fault to the first remote decision, and to the true loads. Exits 1 if a
bound does not hold.
"""

import signal
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from bench import report
from bench.chaos import faults, limits_side, sglang_side, sidecar_side, wire_side
from bench.chaos.outcome import ALLOWANCE, Outcome
from bench.chaos.process import Impossible, Stuck

HEADER = (
    *(
        "fault",
        "s",
        "load",
        "requests",
        "lost",
        "waits",
        "delayed",
        "worst ms",
        "alone us",
        "moved",
    ),
    *("remote ms", "exact ms", "hook MiB", "fds", "sidecar MiB", "fds", "holds"),
)
SIDES = (sidecar_side, limits_side, wire_side, sglang_side)
"""Modules that register faults."""
NOISE = "none"
"""The fault that is none; always run, to know what the machine alone does."""


def chosen(only: Sequence[str]) -> list[faults.Fault]:
    """Faults whose name holds one of these; all of them without any. The first: no fault."""
    order = [side.__name__ for side in SIDES]
    found = [f for f in faults.FAULTS.values() if not only or any(o in f.name for o in only)]
    found.sort(key=lambda one: order.index(one.module))
    if not found:
        raise SystemExit(f"no such fault; there are: {', '.join(faults.FAULTS)}")
    found = [one for one in found if one.name != NOISE]
    return [faults.FAULTS[NOISE], *found]


def row(outcome: Outcome) -> list[str]:
    """One line of the table."""
    cells = (
        *(
            outcome.title,
            outcome.seconds,
            outcome.load,
            outcome.requests,
            outcome.lost,
            outcome.waits,
        ),
        *(outcome.delayed, outcome.worst_ms, outcome.alone_us, outcome.moved),
        *(outcome.first_remote_ms, outcome.exact_ms, outcome.hook_mib, outcome.hook_descriptors),
        *(outcome.sidecar_mib, outcome.sidecar_descriptors),
        "; ".join(outcome.broken) or "yes",
    )
    return ["-" if cell is None else str(cell) for cell in cells]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table for the pages."""
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


def run(options: Any) -> tuple[list[Outcome], list[str]]:
    """Every fault that was asked for, and the names of those that could not be done."""
    outcomes: list[Outcome] = []
    stuck = []
    for one in chosen(options.only):
        print(f"{one.name}: {one.title} ...", file=sys.stderr, flush=True)
        try:
            outcome = faults.measure(one, options.rate, options.seconds, ranks=options.ranks)
        except Impossible as error:
            print(f"  not possible here: {error}", file=sys.stderr, flush=True)
            continue
        except Stuck as error:
            print(f"  NOT DONE: {error}", file=sys.stderr, flush=True)
            stuck.append(one.name)
            continue
        outcomes.append(outcome)
        outcome.judge(one.bounds, outcomes[0].waits / outcomes[0].requests)
        told = "; ".join(outcome.broken) or "holds"
        print(f"  {told} {outcome.causes} {outcome.notes or ''}", file=sys.stderr, flush=True)
    return outcomes, stuck


def main() -> int:
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, help="of each fault, instead of its own")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--markdown", action="store_true", help="print the table for the pages")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is mounted must be unmounted
    outcomes, stuck = run(options)
    rows = [list(HEADER), *(row(outcome) for outcome in outcomes)]
    broken = [*stuck, *(outcome.name for outcome in outcomes if outcome.broken)]
    if options.markdown:
        print(markdown(rows))
    else:
        told = {"allowance_ms": ALLOWANCE * 1000, "faults": msgspec.to_builtins(outcomes)}
        report.show({**told, "broken": broken}, rows, as_json=options.json)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
